"""A long vector is summed in parts: what is lost of it is told as of one. And what else is small about transports."""

from unittest import mock

import numpy as np
import pytest

from paceline.errors import ConfigurationError, PeerLostError
from paceline.transports.transport import C10dTransport
from paceline_lossy import Bound, Sum
from paceline_lossy.datagrams import udp_socket
from paceline_lossy.datagrams.lossy_link import PART_BYTES, _cuts, _Launched
from paceline_lossy.datagrams.udp_socket import _PRIME, KeyAgreement
from paceline_lossy.lossy_transport import Losses


def losses(number, missing, ranges):
    return Losses(number, missing, (5, 5), np.array(ranges, np.int64).reshape(-1, 3))


def test_losses_of_parts_are_those_of_the_vector():
    """Whatever part finishes first: elements count from the vector's beginning, and it is done with the last."""
    vector = np.zeros(2 * PART_BYTES // 4 + 3, np.float32)
    launched = Sum(vector, Bound(0.1))
    cuts = _cuts(launched)
    per_part = PART_BYTES // 4
    assert cuts == [0, per_part, 2 * per_part, len(vector)]
    whole = _Launched(launched, 3)
    whole.take(per_part, losses(4, (1, 0), [[1, 10, 20]]))
    whole.take(2 * per_part, losses(5, (0, 0), []))
    assert not launched.wait(0)
    whole.take(0, losses(3, (0, 2), [[0, 1, 2], [1, 7, 9]]))
    assert launched.wait(0)
    found = launched.losses
    assert found.collective == 3
    assert found.missing == (1, 2)
    assert found.expected == (15, 15)
    assert found.ranges.tolist() == [[0, 1, 2], [1, 7, 9], [1, per_part + 10, per_part + 20]]


def test_a_long_vector_is_eight_parts():
    """So all are under way at once."""
    vector = np.zeros(100 * PART_BYTES // 4 + 1, np.float32)
    cuts = _cuts(Sum(vector, Bound(0.1)))
    assert len(cuts) == 9
    assert max(np.diff(cuts)) == cuts[1] == -(-len(vector) // 8)


def test_a_vector_with_a_priority_is_one_part():
    vector = np.zeros(3 * PART_BYTES, np.float32)
    assert _cuts(Sum(vector, Bound(0.1, priority=1))) == [0, len(vector)]
    assert _cuts(Sum(vector[:1], Bound(0.1))) == [0, 1]


@pytest.mark.parametrize("public", [0, 1, _PRIME - 1, _PRIME, _PRIME + 1])
def test_a_number_that_gives_the_secret_away_is_refused(public):
    """With 0, 1 or -1 as the other's part, whoever reads the store knows what two ranks agree on."""
    with pytest.raises(ValueError, match="is not a member of the group"):
        KeyAgreement().secret_with(f"{public:x}")


def test_an_interface_that_takes_no_datagrams_is_named():
    with pytest.raises(ConfigurationError, match="there is no interface 'nosuch0' on this host; there are "):
        udp_socket.address_of("nosuch0")
    without_address = mock.patch.object(udp_socket.fcntl, "ioctl", side_effect=OSError("none is set"))
    with without_address, pytest.raises(ConfigurationError, match="'lo' has no IPv4 address: none is set"):
        udp_socket.address_of("lo")
    assert udp_socket.address_of("lo") == "127.0.0.1"
    assert udp_socket._mtu_of("192.0.2.1") == 1500  # nobody's here


@pytest.mark.parametrize(
    ("gloo", "says"),
    [
        (
            "Timed out waiting 1000ms",
            "rank 1 heard nothing from rank 0 for 5 s: it is stuck, stopped or unreachable",
        ),
        ("Connection closed by peer", "rank 1 lost rank 0, which ended or gave up"),
    ],
)
def test_what_gloo_says_of_a_peer_is_said_in_our_words(gloo, says):
    transport = C10dTransport.__new__(C10dTransport)
    transport.rank = 1
    work = mock.Mock(wait=mock.Mock(side_effect=RuntimeError(gloo)))
    with pytest.raises(PeerLostError, match=says) as caught:
        transport._wait(work, 0, 0.0, 5.0)
    assert caught.value.peer == 0

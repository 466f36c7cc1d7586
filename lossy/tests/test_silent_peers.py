"""When a silent peer is given up: at the user's timeout, and earlier only on evidence."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from harness.datagram_networks import endpoints
from paceline.comm import Rendezvous
from paceline.errors import PeerLostError
from paceline_lossy import open_lossy_transport
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams import udp_socket
from paceline_lossy.datagrams.link_thread import ClosedPorts

TIMEOUT_S = 1800.0
_SECOND_US = 1_000_000


def test_a_rank_that_meets_no_other_closes_its_sockets(monkeypatch):
    made = []

    class Noted(udp_socket.Introduction):
        def __init__(self, *args):
            super().__init__(*args)
            made.extend(self._sockets)

    monkeypatch.setattr(udp_socket, "Introduction", Noted)
    rendezvous = Rendezvous(dist.HashStore(), 0, 2, timedelta(seconds=0.1), "connecting")
    with pytest.raises(PeerLostError):
        udp_socket.find_members(rendezvous, "127.0.0.1", 2)
    assert [each.fileno() for each in made] == [-1, -1]


@pytest.mark.compiles
def test_a_silence_may_last_as_long_as_the_users_timeout():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        opening = [
            threads.submit(open_lossy_transport, store, rank, 2, timedelta(seconds=TIMEOUT_S))
            for rank in range(2)
        ]
        made = [each.result() for each in opening]
    for end in made:
        assert end._driver.endpoint.tables.numbers[e.SILENCE_US] == TIMEOUT_S * _SECOND_US
        end.close(0.0)


def _ask_between(ports, begin_s, end_s):
    found = [ports.find([1], now_s * _SECOND_US) for now_s in range(begin_s, end_s)]
    return next((peer for peer in found if peer is not None), None)


def test_a_port_that_is_closed_is_known_and_a_silent_one_is_not():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        place = peer.getsockname()
        ports = ClosedPorts([("127.0.0.1", 1), place])
        assert _ask_between(ports, 1, 21) is None, "it may be stopped, or have no core"
    ports.find([], 0)  # it was heard of meanwhile
    assert _ask_between(ports, 21, 41) == 1
    ports.close()


def test_a_network_without_a_way_to_a_silent_peer_is_ridden_out():
    """An interface may be down, or a firewall in the way. `connect` to a broadcast address is refused as well."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        ports = ClosedPorts([("127.0.0.1", 1), ("255.255.255.255", 9)])
        assert _ask_between(ports, 1, 21) is None
        assert not ports._asking, "no socket is left"
        ports._places = [("127.0.0.1", 1), peer.getsockname()]
        assert _ask_between(ports, 21, 31) is None
    assert _ask_between(ports, 31, 51) == 1, "the way is back, and the port closed"
    ports.close()


def test_a_path_that_never_carried_anything_long_is_known_before_the_timeout():
    now_us = 100 * _SECOND_US
    end = endpoints(2)[0]
    way, peer = end.tables.ways[1], end.tables.peers[1]
    way[e.W_BACKOFF], way[e.W_STUCK_SINCE], peer[e.P_HEARD_AT] = 9, now_us - 21 * _SECOND_US, now_us
    assert end.never_reached(now_us, 20 * _SECOND_US) == 1
    assert end.never_reached(now_us, 30 * _SECOND_US) is None
    way[e.W_HAS_DELAY] = 1  # something had arrived: the path was cut
    assert end.never_reached(now_us, 20 * _SECOND_US) is None
    assert end.is_unreached(1, now_us, 20 * _SECOND_US)
    assert not end.is_unreached(1, now_us + 15 * _SECOND_US, 20 * _SECOND_US), "nor is it heard any more"


def test_who_is_needed_and_silent_is_asked():
    now_us = 100 * _SECOND_US
    end = endpoints(3)[0]
    end.tables.peers[:, e.P_HEARD_AT] = now_us - 3 * _SECOND_US
    end.tables.peers[1, e.P_IS_NEEDED] = 1
    assert end.silent_peers(now_us) == [1]
    end.tables.peers[1, e.P_HEARD_AT] = now_us
    assert end.silent_peers(now_us) == []

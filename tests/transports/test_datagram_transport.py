"""`DatagramTransport` on this machine's loopback: both ranks in this process."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.errors import PeerLostError, ProtocolError
from paceline.process_group import connections
from paceline.transports.bounded_loss.udp_socket import socket_addresses

pytestmark = pytest.mark.compiles

LIMIT_S = 30.0  # for what is about to happen, on a busy machine


@pytest.fixture
def ends():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        making = [
            threads.submit(connections.open_datagram_transport, store, rank, 2, timedelta(seconds=20))
            for rank in range(2)
        ]
        made = [each.result() for each in making]
    yield made
    for end in made:
        end.close()


@pytest.mark.parametrize("number_of_parts", [1, 12])  # the latter: more than are under way at once
def test_after_an_error_memory_is_left_alone(ends, number_of_parts):
    """Rank 0 gives up on what rank 1 sends later, and rank 1 on what rank 0 receives: neither touches it again."""
    size = number_of_parts << 20
    mine, theirs = torch.zeros(size, dtype=torch.uint8), torch.full((size,), 7, dtype=torch.uint8)
    with pytest.raises(PeerLostError):
        ends[0].exchange([], [(1, mine)], 0.1)
    ends[1].exchange([(0, theirs)], [], LIMIT_S)  # it arrives nevertheless
    assert not mine.any()
    with pytest.raises(ProtocolError):
        ends[0].exchange([], [(1, mine)], 0.1)


def test_after_an_error_what_was_to_be_sent_leaves_as_it_was(ends):
    """Rank 0 gives up and writes into its tensor; rank 1, which receives later, gets what was sent."""
    size = 12 << 20
    mine, theirs = torch.full((size,), 7, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    with pytest.raises(PeerLostError):
        ends[0].exchange([(1, mine)], [], 0.1)
    mine.fill_(9)
    time.sleep(0.05)
    ends[1].exchange([], [(0, theirs)], LIMIT_S)
    assert theirs.unique().tolist() == [7]


def test_a_rank_that_leaves_waits_until_its_peer_has_heard_it(ends, monkeypatch):
    """What rank 1 answers is lost for a while: rank 0 asks at ever longer intervals, and gets its answer at last."""
    monkeypatch.setattr("paceline.transports.bounded_loss.link_thread.LINGER_S", LIMIT_S)
    theirs = torch.zeros(1000, dtype=torch.uint8)
    addresses = ends[1]._driver._io.outgoing.addresses
    right = addresses[0].copy()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole, ThreadPoolExecutor(2) as threads:
        hole.bind(("127.0.0.1", 0))
        addresses[0] = socket_addresses([hole.getsockname()])[0]
        sending = threads.submit(ends[0].exchange, [(1, torch.ones_like(theirs))], [], LIMIT_S)
        ends[1].exchange([], [(0, theirs)], LIMIT_S)
        leaving = threads.submit(ends[1].close, LIMIT_S)
        time.sleep(0.4)
        addresses[0] = right
        sending.result()
        assert leaving.result()
    assert theirs.all()

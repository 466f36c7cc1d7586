"""Messages through shared memory: whole, in order, longer than all slots, both ways at once; and who is missing."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PeerLostError, ProtocolError
from paceline.transports.shared_memory import SharedMemoryTransport, join_host
from paceline.transports.shared_memory.mailboxes import NUM_SLOTS, SLOT_BYTES


def together(num_ranks, function):
    """What `function(transport)` returned, or raised, for each rank in a thread of its own."""
    store = dist.HashStore()

    def main(rank):
        transport = SharedMemoryTransport(join_host(store, rank, num_ranks))
        try:
            return function(transport)
        except (PeerLostError, ProtocolError) as error:
            return error

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(main, range(num_ranks)))


def message(source, target, number, length):
    """What rank `source` says; unlike any other message."""
    return (torch.arange(length) + 1000 * source + 100 * target + 10 * number).to(torch.int16)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(2, 5),
    st.lists(st.lists(st.sampled_from([1, 7, 4096, 40_000]), max_size=3), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_all_to_all(num_ranks, rounds, stride):
    """Every rank sends to some others, in several exchanges; some ranks take part in some of them only."""

    def main(transport):
        me, told = transport.rank, []
        for number, lengths in enumerate(rounds):
            to, of = (me + stride) % num_ranks, (me - stride) % num_ranks
            if to == me or (number % 2 and num_ranks == 2):
                continue
            sends = [(to, message(me, to, i, length)) for i, length in enumerate(lengths)]
            receives = [(of, torch.empty(length, dtype=torch.int16)) for length in lengths]
            transport.exchange(sends, receives, 20.0, told.append)
            for i, (_, received) in enumerate(receives):
                assert torch.equal(received, message(of, me, i, len(received)))
            assert told[-len(lengths) :] == list(range(len(lengths))) or not lengths
        return transport.bytes_sent

    sent = together(num_ranks, main)
    assert not [error for error in sent if isinstance(error, Exception)], sent


def test_messages_longer_than_all_slots_cross():
    """Both send first: neither can wait for the other to have received before it receives itself."""
    length = (NUM_SLOTS + 3) * SLOT_BYTES // 2 + 5

    def main(transport):
        peer = 1 - transport.rank
        for number in range(3):
            received = torch.empty(length, dtype=torch.int16)
            mine = message(transport.rank, peer, number, length)
            transport.exchange([(peer, mine)], [(peer, received)], 20.0)
            mine.zero_()  # it may be changed now
            assert torch.equal(received, message(peer, transport.rank, number, length))
        return transport.bytes_sent

    assert together(2, main) == [6 * length] * 2


def test_a_full_box_is_waited_for():
    """A receiver that is late finds every part; the sender has posted as many as there are slots, and no more."""
    length = (NUM_SLOTS + 3) * SLOT_BYTES // 2

    def main(transport):
        if transport.rank == 0:
            transport.exchange([(1, message(0, 1, 0, length))], [], 20.0)
            return None
        deadline_s = time.monotonic() + 10.0
        box = transport._incoming[0]
        while box.num_waiting() < NUM_SLOTS and time.monotonic() < deadline_s:
            time.sleep(0.001)
        time.sleep(0.1)  # a sender that did not wait would go on
        assert box.num_waiting() == NUM_SLOTS
        received = torch.empty(length, dtype=torch.int16)
        transport.exchange([], [(0, received)], 20.0)
        return torch.equal(received, message(0, 1, 0, length))

    assert together(2, main) == [None, True]


def test_another_size_is_an_error():
    """Never written over what it was not meant for."""
    boxes = [torch.zeros(8, dtype=torch.int16) for _ in range(2)]

    def main(transport):
        peer = 1 - transport.rank
        mine = torch.ones(8 + transport.rank, dtype=torch.int16)
        transport.exchange([(peer, mine)], [(peer, boxes[transport.rank])], 20.0)
        return boxes[transport.rank]

    first, second = together(2, main)
    assert isinstance(first, ProtocolError)
    assert "18 bytes came from rank 1 where one of 16 was expected" in str(first)
    assert not boxes[0].any()
    if isinstance(second, PeerLostError):  # its peer gave up before it had looked
        assert not boxes[1].any() or bool(boxes[1].all())
    else:
        assert torch.equal(second, torch.ones(8, dtype=torch.int16))  # which was as it expected


def test_who_does_not_come_is_named():
    """At the time limit; and at once where a peer has failed before."""

    def main(transport):
        received = torch.zeros(8)
        if transport.rank == 2:
            return None
        transport.exchange([], [(transport.rank + 1, received)], 0.3 if transport.rank == 1 else 20.0)
        return received

    first, second, _ = together(3, main)
    assert isinstance(second, PeerLostError)
    assert (second.peer, "heard nothing from rank 2 for 0.3 s" in str(second)) == (2, True)
    assert (first.peer, str(first)) == (1, "rank 0 lost rank 1, which gave up")

"""How near the bounded-loss protocol comes to the wire's rate, in virtual time: whatever else this machine does."""

import numpy as np
import pytest

from harness.datagram_networks import Mailer, Switch, endpoints, time_of_sums
from paceline_lossy import Bound
from paceline_lossy.datagrams import datagram as d
from paceline_lossy.datagrams import datagram_loop as loop
from paceline_lossy.datagrams import endpoint_state as e

pytestmark = pytest.mark.compiles

RATE, MEGABYTES, PAYLOAD = 100e6, 2.0, 1432


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "lose", "ratio"),
    [(4, 0.0, 0.96), (4, 0.01, 0.93), (4, 0.03, 0.85), (2, 0.0, 0.96), (8, 0.0, 0.94)],
)
def test_a_sum_takes_about_as_long_as_its_bytes_on_the_wire(ranks, lose, ratio):
    """`ratio` of the time is the transfer of bytes with their headers, what was lost sent twice; 2 MB, two phases."""
    elements = int(MEGABYTES * 250_000)
    vectors = [[np.ones(1, np.float32), np.ones(elements, np.float32)] for _ in range(ranks)]
    switch = Switch(ranks, RATE, lose=lose)
    (_, took_us), _ = time_of_sums(switch, vectors, payload=PAYLOAD)
    bytes_sent = 2 * (ranks - 1) / ranks * elements * 4 * (PAYLOAD + 82) / PAYLOAD / (1 - lose)
    assert bytes_sent * 8 / RATE * 1e6 > ratio * took_us, (bytes_sent * 8 / RATE * 1e6, took_us)
    for of_rank in vectors:
        assert (of_rank[1] == ranks).all()
    assert switch.dropped == 0


def test_sixteen_that_push_into_one_small_port_do_not_collapse():
    """100 kB each, through a port of 64 KiB, and back: about as long as the bytes take, though hundreds are dropped."""
    pushed = 25_000
    vectors = [[np.ones(1, np.float32), np.ones(pushed, np.float32)] for _ in range(17)]
    switch = Switch(17, RATE, queue_bytes=64 * 1024)
    (_, took_us), _ = time_of_sums(switch, vectors, payload=PAYLOAD, servers=1)
    wire_us = 2 * 16 * pushed * 4 * (PAYLOAD + 82) / PAYLOAD * 8 / RATE * 1e6
    assert switch.dropped > 0
    assert took_us < 1.2 * wire_us, (took_us, wire_us)


def test_the_host_s_own_queue_is_timed_by_how_fast_it_drains():
    """12.5 bytes a microsecond; a queue that ran empty, or was filled meanwhile, says nothing."""
    drain = np.zeros(3)
    assert loop.note_drain(drain, 30_000, 1000) == 0
    assert loop.note_drain(drain, 17_500, 2000) == 1400
    assert loop.note_drain(drain, 0, 9000) == 0
    assert loop.note_drain(drain, 25_000, 9000) == 2000
    assert loop.note_drain(drain, 27_500, 9500) == 2200
    assert loop.note_drain(drain, 90_000, 9500) == 2500  # no more is left out


def test_the_rest_is_longer_while_the_host_s_own_queue_lasts():
    """Until half of it has left, but no longer than 900 us; 300 us if nothing is known, or the queue is short."""
    drain = np.zeros((1, 3))
    assert loop._rest_us(drain) == 300
    drain[0] = 12.5, 15_000, 1000  # bytes a microsecond, bytes: it lasts for 1200 us
    assert loop._rest_us(drain) == 600
    drain[0, 1] = 90_000
    assert loop._rest_us(drain) == 900
    drain[0, 1] = 1500
    assert loop._rest_us(drain) == 300
    assert loop._rest_us(np.array([[12.5, 90_000, 0], [12.5, 15_000, 0]])) == 600, "the shortest of several"


def test_whom_most_is_left_to_be_sent_to_is_served_first():
    """Rank 1's window was small; once it is not, all goes there until as much is left for rank 2; then in turn."""
    one = endpoints(3, payload=PAYLOAD)[0]
    one.begin(np.ones(3 * 100 * PAYLOAD // 4, np.float32), Bound(0), 1000)
    t, mailer = one.tables, Mailer(one)
    t.peers[:, e.P_BEGUN] = 1
    t.rates[1, e.R_WINDOW], t.rates[2, e.R_WINDOW] = 2.0, 1000.0

    def chunks(now_us, most):
        return [way for way, datagram in mailer.take(one, now_us, most) if len(datagram) > PAYLOAD]

    for turn in range(10):
        chunks(1000 + 10_000 * turn, 64)
    sent = t.outgoing[0, 0, 1:]
    left = sent[:, e.O_CHUNKS] - sent[:, e.O_NEXT] + sent[:, e.O_QUEUED]
    assert left[0] > left[1] + 20, left
    t.rates[1, e.R_WINDOW] = 1000.0
    begun_us = 1_000_000
    t.ways[:, e.W_PROGRESS_AT] = begun_us  # as if answers had come
    behind = int(left[0] - left[1])
    for number in range(behind):
        assert chunks(begun_us + 100 * number, 1) == [1], number
    rest = [way for number in range(10) for way in chunks(begun_us + 10_000 + 100 * number, 1)]
    assert sorted(rest) == [1] * 5 + [2] * 5
    assert rest != sorted(rest), "in turn"


def test_a_datagram_s_time_is_about_that_at_which_it_leaves_the_host():
    """So what it waits in the host is no queue of the network's."""
    one, _ = endpoints(2)
    one.tables.local_us[:] = 700
    one.begin(np.ones(100, np.float32), Bound(0), 1000)
    leaving = [datagram.view(np.uint32) for _, datagram in Mailer(one).take(one, 1000)]
    chunks = [word[d.TIME] for word in leaving if word[d.SENDER_KIND] >> 16 & 0xF == d.DATA]
    assert chunks
    assert set(chunks) == {1700}

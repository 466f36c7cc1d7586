"""The bounded-loss protocol without sockets: endpoints in one process, a clock and a network that the test plays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.datagram_networks import PAYLOAD, ROWS, TICK_US, Mailer, Network, endpoints
from paceline_lossy import Bound
from paceline_lossy.datagrams import datagram as d
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams.authentication import nh, num_pairs, siphash
from paceline_lossy.datagrams.shards import first_chunk
from paceline_lossy.datagrams.udp_socket import KeyAgreement

pytestmark = pytest.mark.compiles

LONGEST_US = 400_000_000


def run(network, ranks, vectors, bound, late_rank=None, late_us=0):
    """Sum the vectors of all ranks, one collective after another under way together; returns losses of each rank."""
    ends = endpoints(ranks)
    rows = np.zeros((ROWS, ends[0].row_bytes), np.uint8)
    sizes, peers = np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64)
    losses, begun, now_us = [[] for _ in ends], [0] * ranks, 1000
    while min(map(len, losses)) < len(vectors[0]):
        assert now_us < LONGEST_US, "it does not end"
        for rank, end in enumerate(ends):
            is_here = rank != late_rank or now_us >= late_us
            while is_here and begun[rank] < len(vectors[rank]) and end.can_begin:
                end.begin(vectors[rank][begun[rank]], bound, now_us)
                begun[rank] += 1
            for i in range(end.transmit(rows, sizes, peers, now_us)):
                network.carry(now_us, int(peers[i]), rows[i, : sizes[i]])
        now_us += TICK_US if network.under_way else 20 * TICK_US  # nothing is under way: only clocks go on
        for _, peer, datagram in network.arrived(now_us):
            row = np.zeros((1, ends[0].row_bytes), np.uint8)
            row[0, : len(datagram)] = datagram
            ends[peer].receive(row, np.array([len(datagram)]), np.zeros(1, np.int64), 1, now_us)
        for rank, end in enumerate(ends):
            losses[rank] += end.take_finished()
            assert end.misfit_peer is None
    return [sorted(each, key=lambda one: one.collective) for each in losses], ends


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(2, 4),
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=10),
    lose=st.sampled_from([0.0, 0.01, 0.1, 0.4]),
    repeat=st.sampled_from([0.0, 0.2]),
    delay=st.sampled_from([0.0, 0.3]),
    corrupt=st.sampled_from([0.0, 0.05]),
    bound=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    protected=st.sampled_from([0.0, 0.3, 1.0]),
    late_us=st.sampled_from([0, 30_000]),
    is_early=st.booleans(),
)
def test_it_ends_exactly_or_within_the_bound(
    seed, ranks, sizes, lose, repeat, delay, corrupt, bound, protected, late_us, is_early
):
    """Whatever the network does: the same bits everywhere; bound 0 is the exact sum; no more is lost than allowed."""
    given_ = [
        [
            np.random.default_rng((seed, rank, i)).integers(-99, 99, size).astype(np.float32)
            for i, size in enumerate(sizes)
        ]
        for rank in range(ranks)
    ]
    vectors = [[vector.copy() for vector in of_rank] for of_rank in given_]
    network = Network(seed, lose, repeat, delay, corrupt)
    what = Bound(bound, protected, is_early=is_early)
    losses, ends = run(network, ranks, vectors, what, ranks - 1, late_us)
    for i in range(len(sizes)):
        exact = sum(of_rank[i] for of_rank in given_)
        for rank in range(ranks):
            assert vectors[rank][i].tobytes() == vectors[0][i].tobytes()
            assert losses[rank][i].missing == losses[0][i].missing
        missing, expected = losses[0][i].missing, losses[0][i].expected
        for lost, of in zip(missing, expected, strict=True):
            assert lost <= bound * of
        if sum(missing) == 0:
            assert (vectors[0][i] == exact).all()
        assert bound > 0 or sum(missing) == 0
        assert protected < 1 or sum(missing) == 0
    # A corrupted datagram is a stranger's; one that changes nothing but the padding cannot be made here.
    counted = sum(int(end.tables.numbers[e.STRANGERS]) for end in ends)
    assert counted <= network.corrupted
    assert counted > 0 or network.corrupted < 3


def test_a_lossy_network_makes_use_of_the_bound_and_the_estimate_is_unbiased():
    """Ranks hold constants 1, 2, 3; over many losses the mean of the estimates is their sum (three standard errors)."""
    estimates, lost = [], 0
    for seed in range(12):
        vectors = [[np.full(3000, rank + 1, np.float32)] for rank in range(3)]
        losses, _ = run(Network(seed, lose=0.15), 3, vectors, Bound(0.4))
        lost += sum(losses[0][0].missing)
        estimates.append(vectors[0][0].mean())
    assert lost > 50
    spread = np.std(estimates) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - 6) < 3 * spread + 0.02


@pytest.mark.parametrize(("num_chunks", "times"), [(6, 3), (90, 2)])
def test_what_is_repeated_last_is_sent_twice_and_what_more_follows_only_once(num_chunks, times):
    """The third chunk that rank 0 sends is lost. To lose its repetition would cost a round trip, if nothing follows."""
    ends, now_us, sent, lost = endpoints(2), 1000, {}, None
    mailer = Mailer(ends[0])
    vectors = [np.full(num_chunks * PAYLOAD // 2, rank + 1, np.float32) for rank in range(2)]
    for end, vector in zip(ends, vectors, strict=True):
        end.begin(vector, Bound(0), now_us)
    finished = [[], []]
    while not all(finished):
        for rank, end in enumerate(ends):
            arriving = []
            for _, datagram in mailer.take(end, now_us):
                word = datagram[: d.HEADER_BYTES].view(np.uint32)
                who, chunk = int(word[d.SENDER_KIND]), int(word[d.CHUNK])
                if rank == 0 and who >> 16 & 0xF == d.DATA and not who >> 24 & d.GATHER:
                    sent[chunk] = sent.get(chunk, 0) + 1
                    if len(sent) == 3 and lost is None:
                        lost = chunk
                        continue
                arriving.append(datagram)
            mailer.hand(ends[1 - rank], arriving, now_us)
        now_us += TICK_US
        for rank, end in enumerate(ends):
            finished[rank] += end.take_finished()
        assert now_us < LONGEST_US
    assert sent == {chunk: times if chunk == lost else 1 for chunk in range(num_chunks)}
    assert (vectors[0] == 3).all()


@pytest.mark.parametrize(("has_lost", "pauses_us"), [(1, [1500, 2500, 4500, 8500, 16500]), (0, [1500])])
def test_ends_follow_each_other_faster_where_something_was_lost(has_lost, pauses_us):
    """Nothing is answered for 35 ms, of which a round trip that is not known yet takes more."""
    one, other = endpoints(2)
    other.begin(np.ones(100, np.float32), Bound(0), 1000)
    one.begin(np.ones(100, np.float32), Bound(0), 1000)
    t, mailer, said_us = one.tables, Mailer(one), []
    t.peers[1, e.P_BEGUN], t.outgoing[0, 0, 1, e.O_HAS_LOST] = 1, has_lost
    for now_us in range(1000, 36_000, TICK_US):
        kinds = [
            datagram.view(np.uint32)[d.SENDER_KIND] >> 16 & 0xF for _, datagram in mailer.take(one, now_us)
        ]
        said_us += [now_us] * kinds.count(d.END)
    assert np.diff(said_us).tolist() == pauses_us


def test_early_delivery_waits_for_no_more_than_the_bound_asks_and_late_datagrams_change_nothing():
    """Every fifth DATA of phase 0 is held back. Not early, nothing ends; early, all but these are the sum.

    They come when all slots serve later sums, which stay exact.
    """
    for is_early in (False, True):
        ends, held, now_us = endpoints(2), [], 1000
        mailer, vectors = Mailer(ends[0]), [np.full(1600, rank + 1, np.float32) for rank in range(2)]
        for end, vector in zip(ends, vectors, strict=True):
            end.begin(vector, Bound(0.25, is_scaled=False, is_early=is_early), now_us)
        losses = [[], []]
        while now_us < 30_000 and not all(losses):
            for rank, end in enumerate(ends):
                for peer, datagram in mailer.take(end, now_us):
                    word = datagram[: d.HEADER_BYTES].view(np.uint32)
                    who = int(word[d.SENDER_KIND])
                    is_data = who >> 16 & 0xF in (d.DATA, d.END) and not who >> 24 & d.GATHER
                    if is_data and (who >> 16 & 0xF == d.END or word[d.CHUNK] % 5 == 0):
                        held.append((peer, datagram))
                    else:
                        mailer.hand(ends[peer], [datagram], now_us)
                losses[rank] += end.take_finished()
            now_us += TICK_US
        assert [len(each) for each in losses] == [is_early, is_early]
    assert losses[0][0].missing == losses[1][0].missing == (12, 12)
    missing = np.zeros(1600, bool)
    for _, first, end in losses[0][0].ranges:
        missing[first:end] = True
    expected = np.where(missing, np.where(np.arange(1600) < 800, 1, 2), 3)
    for vector in vectors:
        assert (vector == expected).all()
    later = [[np.full(400, 5.0, np.float32) for _ in range(e.SLOTS)] for _ in ends]
    for of_rank, end in zip(later, ends, strict=True):
        for vector in of_rank:
            if end.can_begin:
                end.begin(vector, Bound(0), now_us)
    assert held
    for peer, datagram in held:
        mailer.hand(ends[peer], [datagram], now_us)
    num_done = [0, 0]
    while min(num_done) < e.SLOTS - 1 and now_us < LONGEST_US:
        for rank, end in enumerate(ends):
            for peer, datagram in mailer.take(end, now_us):
                mailer.hand(ends[peer], [datagram], now_us)
            num_done[rank] += len(end.take_finished())
        now_us += TICK_US
    assert all((vector == 10).all() for of_rank in later for vector in of_rank[: num_done[0]])
    assert (np.array([vectors[0], vectors[1]]) == expected).all()


def test_a_silent_peer_is_named():
    """Nothing arrives from rank 2: it is lost after the silence, and nobody else is."""
    ends = endpoints(3, silence_us=1_000_000)
    rows = np.zeros((ROWS, ends[0].row_bytes), np.uint8)
    sizes, peers = np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64)
    now_us = 1000
    for end in ends:
        end.begin(np.ones(100, np.float32), Bound(0.5), now_us)
    while ends[0].lost_peer is None:
        assert now_us < LONGEST_US
        for end in ends[:2]:
            for i in range(end.transmit(rows, sizes, peers, now_us)):
                if peers[i] < 2:
                    ends[peers[i]].receive(
                        rows[i : i + 1].copy(), sizes[i : i + 1], np.zeros(1, np.int64), 1, now_us
                    )
        now_us += 10_000
    assert ends[0].lost_peer == 2
    assert now_us >= 1_000_000


@pytest.mark.parametrize("kinds", [{d.DATA, d.END}, {d.FEEDBACK, d.NACK, d.DONE, d.STATUS}])
def test_replays_are_no_sign_of_life(kinds):
    """Rank 1 dies in its second sum; all that it had said is said again and again. It is lost as if nobody spoke."""
    ends = endpoints(2, silence_us=1_000_000)
    mailer, now_us, recorded, vectors = Mailer(ends[0]), 1000, [], [np.ones(400, np.float32) for _ in "ab"]
    for end, vector in zip(ends, vectors, strict=True):
        end.begin(vector, Bound(0.5), now_us)
    while not (ends[0].take_finished() and ends[1].take_finished()) and now_us < 500_000:
        for end in ends:
            for peer, datagram in mailer.take(end, now_us):
                if peer == 0 and datagram.view(np.uint32)[d.SENDER_KIND] >> 16 & 0xF in kinds:
                    recorded.append(datagram)
                mailer.hand(ends[peer], [datagram], now_us)
        now_us += 500
    died_us, before = now_us, int(ends[0].tables.numbers[e.REPLAYED])
    assert len(recorded) > 3
    ends[0].begin(np.ones(400, np.float32), Bound(0.5), now_us)
    while ends[0].lost_peer is None and now_us < died_us + 5_000_000:
        mailer.take(ends[0], now_us)
        mailer.hand(ends[0], [recorded[now_us // 10_000 % len(recorded)]], now_us)
        now_us += 10_000
    assert ends[0].lost_peer == 1
    assert now_us - died_us < 1_100_000
    assert ends[0].tables.numbers[e.REPLAYED] - before == (now_us - died_us) // 10_000


@pytest.mark.parametrize(("ranks", "sums_a_step"), [(2, 4), (4, 8), (8, 4), (16, 2), (32, 1), (64, 89)])
def test_a_part_begins_elsewhere_in_every_step(ranks, sums_a_step):
    """200 steps: what is sent last, and let go first, is not always the same, whatever a step consists of."""
    chunks = 2**20 // ranks // 1432 + 1
    for part in range(sums_a_step):
        starts = [first_chunk(step * sums_a_step + part, 0, ranks - 1, chunks) for step in range(200)]
        assert len(set(starts)) > 0.4 * min(chunks, 200)
        assert max(map(starts.count, starts)) < 8 + 3 * 200 / chunks


def test_a_path_that_drops_long_datagrams_is_told_from_a_silent_peer():
    """What is longer than 80 bytes never arrives at rank 1: rank 0 says so, and nobody is taken for lost."""
    ends = endpoints(2, silence_us=2_000_000)
    mailer, now_us = Mailer(ends[0]), 1000
    for end in ends:
        end.begin(np.ones(400, np.float32), Bound(0.5), now_us)
    while ends[0].stuck_peer is None:
        assert now_us < LONGEST_US
        for end in ends:
            for peer, datagram in mailer.take(end, now_us):
                if len(datagram) <= 80:
                    mailer.hand(ends[peer], [datagram], now_us)
        now_us += 5_000
    assert ends[0].stuck_peer == 1
    assert [end.lost_peer for end in ends] == [None, None]


def test_a_peer_that_spoke_while_nothing_long_arrived_is_not_only_silent_afterwards():
    """Rank 1 gives up first: its silence is shorter, so rank 0 sees the path's fault before it misses rank 1."""
    silence_us = 2_000_000
    ends = endpoints(2, silence_us=silence_us)
    mailer, now_us = Mailer(ends[0]), 1000
    for end in ends:
        end.begin(np.ones(400, np.float32), Bound(0.5), now_us)
    while ends[0].stuck_peer is None and ends[0].lost_peer is None:
        assert now_us < LONGEST_US
        for end in ends[: 1 if now_us > 0.4 * silence_us else 2]:
            for peer, datagram in mailer.take(end, now_us):
                if len(datagram) <= 80:
                    mailer.hand(ends[peer], [datagram], now_us)
        now_us += 5_000
    assert (ends[0].stuck_peer, ends[0].lost_peer) == (1, None)


def test_siphash_is_the_published_one_and_keys_agree():
    """The paper's test vector (appendix A): key 00..0f, message 00..0e; what follows the message does not matter."""
    key = np.arange(16, dtype=np.uint8).view(np.uint64)
    message = np.append(np.arange(15, dtype=np.uint8), 77).astype(np.uint8).view(np.uint64)
    assert siphash(message, 0, 15, key[0], key[1]) == 0xA129CA6149BE45E5
    one, two, other = KeyAgreement(), KeyAgreement(), KeyAgreement()
    assert one.secret_with(two.public) == two.secret_with(one.public) != one.secret_with(other.public)


@pytest.mark.parametrize("num_bytes", [0, 1, 4, 5, 8, 12, 126, 1430, 1432])
def test_the_hash_of_a_payload_is_nh_twice(num_bytes):
    """As it is defined, in whole numbers: pairs of words of the two halves, and again with the next pair's key."""
    dice = np.random.default_rng(num_bytes)
    key = dice.integers(0, 1 << 32, (2, num_pairs(1432)), np.uint32)
    row = dice.integers(0, 256, 40 + 1432, np.uint8)
    message = row[40 : 40 + num_bytes].tobytes()
    padded = np.frombuffer(message + bytes(-num_bytes % 8), np.uint32).astype(object).reshape(2, -1)
    expected = [
        sum(
            ((left + int(key[0, i + moved])) % 2**32) * ((right + int(key[1, i + moved])) % 2**32)
            for i, (left, right) in enumerate(padded.T)
        )
        % 2**64
        for moved in (0, 1)
    ]
    assert list(nh(row.view(np.uint32), 10, num_bytes, key)) == expected
    assert row[40 : 40 + num_bytes].tobytes() == message


def test_each_bit_of_a_datagram_and_its_direction_count():
    """A datagram with any bit turned, without its end, or sent back to who has sent it is a stranger's."""
    ends = endpoints(2)
    vector = np.arange(100, dtype=np.float32)
    vector[[15, 31, 47, 65, 81, 97]] = 0  # each datagram's last: the hash of one that lacks zeros is the same
    for end in ends:
        end.begin(vector.copy(), Bound(0), 1000)
    mailer = Mailer(ends[0])
    whole = max((each for _, each in mailer.take(ends[0], 1000)), key=len)
    tried = 0
    for bit in range(8 * len(whole)):
        changed = whole.copy()
        changed[bit // 8] ^= 1 << bit % 8
        mailer.hand(ends[1], [changed], 1000)
        tried += 1
    for wrong in (whole[:-1], whole[:-4], np.append(whole[:-8], whole[-4:])):
        mailer.hand(ends[1], [wrong], 1000)
        tried += 1
    assert ends[1].tables.numbers[e.STRANGERS] == tried
    back = whole.copy()
    back[32] = 1
    mailer.hand(ends[0], [back], 1000)
    assert ends[0].tables.numbers[e.STRANGERS] == 1
    mailer.hand(ends[1], [whole], 1000)
    assert ends[1].tables.numbers[e.STRANGERS] == tried, "and the datagram itself is taken"
    assert ends[1].tables.incoming[0, 0, 0, e.I_GOT] == 1


@pytest.mark.parametrize("skipped", [0, 5, 50])
def test_the_next_answer_tells_what_was_skipped(skipped):
    """However long ago; so it is repeated before its sender has sent all. What was not skipped is not."""
    ends = endpoints(2)
    for end in ends:
        end.begin(np.ones(4000, np.float32), Bound(0), 1000)
        end.tables.peers[:, e.P_BEGUN] = 1
    ends[0].tables.rates[1, [e.R_WINDOW, e.R_RTT]] = 60.0, 10.0
    mailer = Mailer(ends[0])
    sent = [each for i in range(4) for _, each in mailer.take(ends[0], 1000 + 100 * i)]
    chunks = [each for each in sent if each.view(np.uint32)[d.SENDER_KIND] >> 16 & 15 == d.DATA]
    assert len(chunks) == 60
    lost = chunks.pop(skipped)
    mailer.hand(ends[1], chunks, 1500)
    answers = [each for _, each in mailer.take(ends[1], 9000)]
    mailer.hand(ends[0], answers, 9100)
    state = ends[0].tables.chunk_state[0, 0, 1]
    assert np.flatnonzero(state == e.QUEUED).tolist() == [lost.view(np.uint32)[d.CHUNK]]
    assert (state == e.DELIVERED).sum() == len(chunks)

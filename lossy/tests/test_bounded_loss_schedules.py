"""Random schedules of what networks, hosts and strangers do to the bounded-loss protocol, found by hypothesis.

Whatever happens, every sum that begins on all ranks ends once the network is whole again; on all ranks with the same
bits; with what was lost known exactly, and within its bound.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from harness.datagram_networks import PAYLOAD, ROWS, TICK_US, Mailer, Network, endpoints, strangers
from paceline_lossy import Bound
from paceline_lossy.datagrams import endpoint_state as e

pytestmark = pytest.mark.compiles

MOST_SUMS, LONGEST_US = 12, 60_000_000
PER_CHUNK = PAYLOAD // 4


class Schedule(RuleBasedStateMachine):
    """Endpoints of some ranks, and everything that can go wrong between them."""

    @initialize(
        ranks=st.integers(2, 4),
        ratio=st.sampled_from([0.0, 0.2, 0.5]),
        protected=st.sampled_from([0.0, 0.3]),
        is_scaled=st.booleans(),
        is_early=st.booleans(),
        ports=st.sampled_from([1, 1, 2, 3]),
        seed=st.integers(0, 10**6),
    )
    def begin(self, ranks, ratio, protected, is_scaled, is_early, ports, seed):
        self.ranks, self.seed = ranks, seed
        self.bound = Bound(ratio, protected, is_scaled, is_early=is_early)
        self.ports = ports
        self.now_us, self.generation, self.noise = 1000, 0, 0
        self.network = Network(seed)
        self.cut, self.recorded = set(), []
        self._open()

    def _open(self):
        self.ends = endpoints(self.ranks, generation=self.generation, ports=self.ports)
        self.mailer = Mailer(self.ends[0])
        self.sizes, self.given = [], []
        self.vectors = [[] for _ in self.ends]
        self.losses = [{} for _ in self.ends]
        self.num_checked = 0

    @rule(rank=st.integers(0, 3), size=st.integers(1, 400))
    def launch(self, rank, size):
        """A rank begins its next sum; the first to come says how long it is."""
        rank %= self.ranks
        number = len(self.vectors[rank])
        if number == MOST_SUMS or not self.ends[rank].can_begin:
            return
        if number == len(self.sizes):
            self.sizes.append(size)
            dice = np.random.default_rng((self.seed, self.generation, number))
            self.given.append(dice.integers(-99, 99, (self.ranks, size)).astype(np.float32))
        self.vectors[rank].append(self.given[number][rank].copy())
        self.ends[rank].begin(self.vectors[rank][number], self.bound, self.now_us)

    @rule(turns=st.integers(1, 60))
    def let_time_pass(self, turns):
        for _ in range(turns):
            self._turn()

    @rule(
        lose=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
        repeat=st.sampled_from([0.0, 0.3]),
        delay=st.sampled_from([0.0, 0.5]),
        corrupt=st.sampled_from([0.0, 0.1]),
    )
    def change_the_network(self, lose, repeat, delay, corrupt):
        self.network.lose, self.network.repeat = lose, repeat
        self.network.delay, self.network.corrupt = delay, corrupt

    @rule(one=st.integers(0, 3), other=st.integers(0, 3), port=st.integers(0, 3))
    def cut_or_join(self, one, other, port):
        """One direction between two ranks is cut, or whole again; or only what leaves by one of the ports."""
        ports = [port] if port < self.ports else range(self.ports)
        self.cut ^= {(one % self.ranks, other % self.ranks * self.ports + each) for each in ports}

    @rule(which=st.lists(st.integers(0, 10**6), max_size=5), to=st.integers(0, 3))
    def replay(self, which, to):
        """Somebody sends what was sent before, to its receiver or to another."""
        for number in which:
            if self.recorded:
                peer, datagram = self.recorded[number % len(self.recorded)]
                target = peer if to == 3 else to % self.ranks
                self.network.under_way.append((self.now_us, target, datagram.copy()))

    @rule(noise=st.binary(max_size=130), to=st.integers(0, 3))
    def send_noise(self, noise, to):
        """A stranger sends anything: it is counted, and nothing else."""
        before = strangers(self.ends)
        self.mailer.hand(self.ends[to % self.ranks], [np.frombuffer(noise, np.uint8)], self.now_us)
        assert strangers(self.ends) == before + 1

    @rule()
    def restart(self):
        """The job begins anew, with new keys; what the old one sent is still under way, and nobody takes it."""
        self.generation += 1
        self._open()
        for _, peer, datagram in self.network.under_way[:ROWS]:
            self.mailer.hand(self.ends[peer], [datagram], self.now_us)
        assert strangers(self.ends) == len(self.network.under_way[:ROWS])

    def _turn(self):
        for rank, end in enumerate(self.ends):
            for way, datagram in self.mailer.take(end, self.now_us):
                peer = way // self.ports
                if len(self.recorded) < 2000:
                    self.recorded.append((peer, datagram))
                if (rank, way) not in self.cut:
                    self.network.carry(self.now_us, peer, datagram)
        self.now_us += TICK_US if self.network.under_way else 20 * TICK_US
        for _, peer, datagram in self.network.arrived(self.now_us):
            self.mailer.hand(self.ends[peer], [datagram], self.now_us)
        for rank, end in enumerate(self.ends):
            assert end.misfit_peer is None
            assert end.lost_peer is None
            for losses in end.take_finished():
                self.losses[rank][losses.collective] = losses
        while all(self.num_checked in of_rank for of_rank in self.losses):
            self._check(self.num_checked)
            self.num_checked += 1

    def teardown(self):
        """The network is whole again, and every rank begins what one has begun: all of it ends."""
        if not hasattr(self, "ends"):
            return
        self.change_the_network(0.0, 0.0, 0.0, 0.0)
        self.cut = set()
        until_us = self.now_us + LONGEST_US
        while self.num_checked < len(self.sizes):
            for rank in range(self.ranks):
                if len(self.vectors[rank]) < len(self.sizes):
                    self.launch(rank, 1)
            self._turn()
            assert self.now_us < until_us, "it does not end"
        for _ in range(400):
            self._turn()
        assert all(end.is_idle for end in self.ends)

    def _check(self, number):
        first = self.losses[0][number]
        for rank in range(1, self.ranks):
            assert self.vectors[rank][number].tobytes() == self.vectors[0][number].tobytes()
            assert (self.losses[rank][number].ranges == first.ranges).all()
        assert sum(first.missing) == len(first.ranges)
        self._check_bound(number, first.ranges)
        np.testing.assert_allclose(
            self.vectors[0][number], self._expected(number, first.ranges), rtol=1e-5, atol=1e-3
        )
        if not len(first.ranges):
            assert (self.vectors[0][number] == self.given[number].sum(axis=0)).all()

    def _expected(self, number, ranges):
        """The sum from what was lost: a lost contribution is zero, or the mean of the other ranks' that arrived."""
        given, owners = self.given[number], self._owners(number)
        here = np.ones(given.shape, bool)
        for source, begin, end in ranges:
            assert source != owners[begin], "a rank loses nothing of its own shard"
            here[source, begin:end] = False
        if not self.bound.is_scaled:
            return (given * here).sum(axis=0)
        own = given[owners, np.arange(given.shape[1])]
        others = (given * here).sum(axis=0) - own
        num_here = here.sum(axis=0) - 1
        return np.where(
            num_here == 0, own * self.ranks, own + others * (self.ranks - 1) / np.maximum(num_here, 1)
        )

    def _owners(self, number):
        """Whose shard each element is in."""
        size = self.sizes[number]
        per_rank = (size + self.ranks - 1) // self.ranks
        shard = (per_rank + 1) // 2 * 2  # of 8 bytes
        return np.arange(size) // shard

    def _check_bound(self, number, ranges):
        owners = self._owners(number)
        for source in range(self.ranks):
            for owner in range(self.ranks):
                shard = np.flatnonzero(owners == owner)
                lost = [begin for who, begin, _ in ranges if who == source and owners[begin] == owner]
                if not lost:
                    continue
                starts = range(shard[0], shard[-1] + 1, PER_CHUNK)
                num_protected = int(np.ceil(len(starts) * self.bound.protected_ratio))
                assert len(lost) <= self.bound.ratio * (len(starts) - num_protected)
                means = [
                    np.abs(self.given[number][source, at : min(at + PER_CHUNK, shard[-1] + 1)]).mean()
                    for at in starts
                ]
                for begin in lost:
                    mean = means[(begin - shard[0]) // PER_CHUNK]
                    assert sum(other >= mean for other in means) > num_protected


def _search(max_examples, steps):
    run_state_machine_as_test(
        Schedule,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_schedules():
    _search(80, 25)


@pytest.mark.lab
@pytest.mark.timeout(900)  # minutes on a busy machine
def test_thousands_of_schedules():
    """The same for longer; of the laboratory."""
    _search(4000, 50)


def test_the_sources_of_losses_are_found_in_a_network_that_loses():
    """The machine above would be content with a protocol that never loses: this one does, and says whose it was."""
    machine = Schedule()
    machine.begin(3, 0.5, 0.0, False, False, 1, 1)
    machine.network.lose = 0.3
    for rank in range(3):
        for _ in range(4):
            machine.launch(rank, 300)
    for _ in range(4000):
        machine._turn()
    machine.teardown()
    lost = np.concatenate([losses.ranges for losses in machine.losses[0].values()])
    assert len(lost) > 10
    assert set(lost[:, 0]) == {0, 1, 2}
    assert sum(int(end.tables.numbers[e.REPEATED]) for end in machine.ends) > 0

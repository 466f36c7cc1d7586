"""Where the answer is known, the simulator gives it: alpha-beta formulas, ideal overlap, the schedules' prices."""

import math
import sys

import pytest

from paceline.errors import ConfigurationError
from paceline.planning import AlphaBetaCost
from paceline.planning.bucket_assignment import BucketCaps, GradientSpec, assign_buckets
from paceline.schedules import SCHEDULES, Link, Links, Topology, price
from paceline_plan import (
    Cluster,
    HostLink,
    LayerTimes,
    RecordedWorkload,
    ReductionPlan,
    Servers,
    collective_cost,
    simulate,
)
from paceline_plan.round_patterns import ALL_REDUCES, candidates, is_possible, patterns
from paceline_plan.simulator import _Simulator

MIB = 2**20
LATENCY, RATE = 1e-4, 1e8


def workload(
    num_layers: int = 10, backward_s: float = 0.01, size: int = MIB, **more: object
) -> RecordedWorkload:
    layers = tuple(LayerTimes(f"{i}", backward_s / 2, backward_s, (size,)) for i in range(num_layers))
    return RecordedWorkload("made up", "made up", layers, **more)  # type: ignore[arg-type]


def flat(num_ranks: int, **more: object) -> Cluster:
    link = HostLink(RATE, LATENCY)
    return Cluster((1,) * num_ranks, (link,) * num_ranks, **more)  # type: ignore[arg-type]


def test_patterns_are_the_schedules() -> None:
    """Who sends how many bytes to whom, round by round, for every algorithm and many shapes of cluster."""
    shapes = [Topology.one_rank_a_host(n) for n in (2, 3, 4, 5, 7, 8, 12, 16)]
    shapes += [
        Topology((0, 0, 1, 1)),
        Topology((0, 1, 0, 1, 2, 2)),
        Topology((0, 0, 0, 1, 1)),
        Topology((0,) * 4),
    ]
    for topology in shapes:
        for name in candidates(topology):
            schedule = SCHEDULES[name].build(topology)
            wanted = [_sent(t, schedule.num_blocks) for t in schedule.rounds]
            found: list[dict[tuple[int, int], float]] = []
            for pattern in patterns(name, topology):
                round_: dict[tuple[int, int], float] = {}
                for source, target, ratio in zip(
                    pattern.sources, pattern.targets, pattern.ratios, strict=True
                ):
                    pair = (int(source), int(target))
                    round_[pair] = round_.get(pair, 0.0) + ratio
                found += [round_] * pattern.repeat
            assert len(found) == len(wanted), (name, topology)
            for mine, theirs in zip(found, wanted, strict=True):
                assert mine == pytest.approx(theirs), (name, topology)


def _sent(transfers: tuple, num_blocks: int) -> dict[tuple[int, int], float]:
    sent: dict[tuple[int, int], float] = {}
    for t in transfers:
        pair = (t.source, t.target)
        sent[pair] = sent.get(pair, 0.0) + (t.last - t.first) / num_blocks
    return sent


def test_a_collective_costs_what_its_schedule_is_priced_at() -> None:
    """The same links everywhere: the formula of `schedules.price`, to rounding."""
    links = Links(Link(2e-5, 4e9), Link(LATENCY, RATE), fold_s_per_byte=1e-10)
    for hosts in ((1,) * 8, (1,) * 5, (2, 2, 2, 2), (4, 4), (3, 2)):
        cluster = Cluster(hosts, (HostLink(RATE, LATENCY),) * len(hosts), links.within, fold_s_per_byte=1e-10)
        for name in candidates(cluster.topology):
            size = 8 * 3 * 5 * 64 * 1024
            wanted = price(SCHEDULES[name].build(cluster.topology), size, cluster.topology, links)
            cost = collective_cost(cluster, name)
            assert cost.rounds == wanted.rounds
            assert cost.of(size) == pytest.approx(wanted.time_s, rel=1e-9), (name, hosts)


def test_alpha_beta_formulas() -> None:
    size = 64 * MIB
    for num_ranks in (2, 4, 8, 64, 256):
        cluster = flat(num_ranks)
        moved_s = 2 * (num_ranks - 1) / num_ranks * size / RATE
        ring = 2 * (num_ranks - 1) * LATENCY + moved_s
        assert collective_cost(cluster, "ring").of(size) == pytest.approx(ring, rel=1e-12)
        halving = 2 * math.log2(num_ranks) * LATENCY + moved_s
        assert collective_cost(cluster, "halving_doubling").of(size) == pytest.approx(halving, rel=1e-12)


def test_overlap_is_ideal_where_it_can_be() -> None:
    """Communication that fits behind backward leaves the last bucket; one that does not leaves its own length."""
    for rate in (1e12, 1e9, 1e8, 1e7):
        links = (HostLink(rate),) * 4
        cluster = Cluster((1,) * 4, links)
        load = workload()
        each_s = 1.5 * MIB / rate
        found = simulate(load, cluster, ReductionPlan(caps_bytes=(MIB,)))
        if each_s <= 0.01:
            wanted = load.compute_s + each_s
        else:
            wanted = load.forward_s + 0.01 + 10 * each_s
        assert found.step_s == pytest.approx(wanted, rel=1e-12)
        after = simulate(load, cluster, ReductionPlan(caps_bytes=(math.inf,)))
        assert after.step_s == pytest.approx(load.compute_s + 10 * each_s, rel=1e-12)
        assert simulate(load, cluster, ReductionPlan((MIB,), overlap=False)).step_s == pytest.approx(
            after.step_s
        )


def test_skipping_synchronization_saves_what_is_exposed() -> None:
    load, cluster = workload(optimizer_s=0.003, other_s=0.002), flat(4)
    every = simulate(load, cluster)
    for n in (2, 4, 8):
        found = simulate(load, cluster, ReductionPlan(sync_every=n))
        wanted = load.compute_s - load.optimizer_s + (every.exposed_s + load.optimizer_s) / n
        assert found.micro_step_s == pytest.approx(wanted, rel=1e-12)


def test_unequal_links_speeds_and_shares() -> None:
    size, load = 8 * MIB, workload()
    links = (
        HostLink(RATE, LATENCY),
        HostLink(RATE / 10, LATENCY),
        HostLink(RATE, LATENCY),
        HostLink(RATE, LATENCY),
    )
    cost = collective_cost(Cluster((1,) * 4, links), "ring")
    assert cost.of(size) == pytest.approx(6 * LATENCY + 1.5 * size / (RATE / 10))
    assert cost.bottleneck == "host 1's link"
    uplink = collective_cost(flat(4, racks=2, uplink_bytes_per_s=RATE / 20), "ring")
    assert uplink.bottleneck == "a rack's uplink"
    fast = (HostLink(math.inf),) * 2
    slow_rank = Cluster((1, 1), fast, speeds=(1.0, 0.5))
    assert simulate(load, slow_rank).step_s == pytest.approx(2 * load.compute_s)
    shared = simulate(load, slow_rank, ReductionPlan(shares=(2 / 3, 1 / 3)))
    assert shared.step_s == pytest.approx(load.compute_s * 4 / 3)


def test_parameter_servers_hide_from_the_lemmas_number_on() -> None:
    """Half-duplex servers, as the lemma has them: the wire's time is 2 S N / (n B)."""
    load, workers = workload(backward_s=0.05), Cluster((1,) * 8, (HostLink(math.inf),) * 8)
    for number in (1, 2, 4):
        plan = ReductionPlan((MIB,), servers=Servers(number, 1e9, duplex=False))
        assert simulate(load, workers, plan).wire_s == pytest.approx(2 * 10 * MIB * 8 / (number * 1e9))
        duplex = simulate(load, workers, ReductionPlan((MIB,), servers=Servers(number, 1e9)))
        assert duplex.step_s <= simulate(load, workers, plan).step_s * (1 + 1e-9)


def test_pulls_stream_a_piece_behind_pushes() -> None:
    """A bucket of 4 MiB from 2 ranks, over a server's link of 2 MiB a second: 4 s each way, not one after the other."""
    load = RecordedWorkload("one", "made up", (LayerTimes("a", 0.0, 0.0, (4 * MIB,)),))
    workers = Cluster((1, 1), (HostLink(math.inf, 0.25),) * 2)

    def step_s(number: int, piece_mib: float) -> float:
        servers = Servers(number, 2 * MIB, piece_bytes=piece_mib * MIB, two_way_ratio=1.0)
        return simulate(load, workers, ReductionPlan((MIB,), servers=servers)).step_s

    assert step_s(1, 1) == pytest.approx(0.25 + 1 + 4 + 0.25)
    assert step_s(1, 4) == pytest.approx(0.25 + 4 + 4 + 0.25)
    assert step_s(2, 1) == pytest.approx(0.25 + 1 + 2 + 0.25)  # both get their first MiB in the first second
    two = RecordedWorkload("two", "made up", (load.layers[0], load.layers[0]))
    streams = Servers(1, 2 * MIB, two_way_ratio=1.0)
    assert simulate(two, workers, ReductionPlan((MIB,), servers=streams)).step_s == pytest.approx(
        0.25 + 1 + 8 + 0.25
    )


def test_both_directions_of_a_shared_link_are_slower() -> None:
    """Two pieces of 1 s at half the rate while both ways are in use: 1 s of pushing, 2 s of both, 1 s of pulling."""
    load = RecordedWorkload("one", "made up", (LayerTimes("a", 0.0, 0.0, (2 * MIB,)),))

    def step_s(worker_mib: float, server_mib: float, number: int = 1) -> float:
        workers = Cluster((1, 1), (HostLink(worker_mib * MIB),) * 2)
        servers = Servers(number, server_mib * MIB, piece_bytes=MIB / number, two_way_ratio=0.5)
        return simulate(load, workers, ReductionPlan((MIB,), servers=servers)).step_s

    assert step_s(math.inf, 2) == pytest.approx(4)  # two workers' connections at the server's link
    assert step_s(1, math.inf) == pytest.approx(3)  # a single one at each worker's
    assert step_s(1, math.inf, 2) == pytest.approx(4)  # two servers' at each worker's


def test_the_slowest_of_more_ranks_is_slower() -> None:
    load = workload(relative_steps=(0.95, 1.0, 1.0, 1.02, 1.3))
    fast = HostLink(math.inf)
    steps = [
        sum(simulate(load, Cluster.of_equal_hosts(n, fast), num_steps=200).steps_s) / 200 for n in (2, 8, 64)
    ]
    assert steps[0] < steps[1] < steps[2] <= 1.31 * load.compute_s
    again = [simulate(load, flat(8), num_steps=3, seed=s).steps_s for s in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


def test_loss_stalls_more_the_more_messages_there_are() -> None:
    load = workload()
    lossy = [Cluster.of_equal_hosts(n, HostLink(RATE, LATENCY, 0.001)) for n in (2, 16)]
    dry = [Cluster.of_equal_hosts(n, HostLink(RATE, LATENCY)) for n in (2, 16)]
    stalls = [
        sum(simulate(load, a, ReductionPlan(algorithm="ring"), num_steps=100).steps_s) / 100
        - simulate(load, b, ReductionPlan(algorithm="ring")).step_s
        for a, b in zip(lossy, dry, strict=True)
    ]
    assert 0 < stalls[0] < stalls[1]


def test_priorities_serve_the_front_first() -> None:
    load, cluster = workload(size=8 * MIB), flat(4)
    plans = [ReductionPlan((MIB,), priority=first) for first in (False, True)]
    plain, first = (simulate(load, cluster, plan).step_s for plan in plans)
    wire_s = simulate(load, cluster, plans[0]).wire_s
    assert wire_s * (1 - 1e-9) <= first < plain  # the next forward hides some of it, the wire is the limit
    fast = Cluster((1, 1), (HostLink(math.inf),) * 2)
    assert simulate(load, fast, plans[1]).step_s == pytest.approx(load.compute_s)


def test_a_bucket_is_ready_with_its_last_gradient() -> None:
    sizes, caps = (4, MIB, 4, 5 * MIB, 4096), (MIB, 3 * MIB)
    layers = tuple(LayerTimes(str(i), 0.0, 1.0, (size,)) for i, size in enumerate(reversed(sizes)))
    found = _Simulator(RecordedWorkload("x", "y", layers), flat(2), ReductionPlan(caps), seed=0)
    specs = [GradientSpec(size, "float32") for size in sizes]
    wanted = assign_buckets(specs, range(len(sizes)), BucketCaps(caps))
    assert [list(places) for places in found.places] == wanted == [[0, 1], [2, 3], [4]]
    assert [bucket.size_bytes for bucket in found.buckets] == [MIB + 4, 5 * MIB + 4, 4096]
    assert [bucket.ready_s for bucket in found.buckets] == [2.0, 4.0, 5.0]


def test_launching_and_finishing_take_their_time() -> None:
    load, fast = workload(), Cluster((1, 1), (HostLink(math.inf),) * 2)
    found = simulate(
        load, fast, ReductionPlan((MIB,), launch=AlphaBetaCost(1e-3, 0.0), finish=AlphaBetaCost(2e-3, 0.0))
    )
    assert found.step_s == pytest.approx(load.compute_s + 10 * 3e-3)


def test_one_rank_has_nothing_to_overlap() -> None:
    found = simulate(workload(), flat(1))
    assert (found.num_buckets, found.exposed_s) == (0, 0)
    assert found.step_s == pytest.approx(workload().compute_s)


def test_what_cannot_be_is_refused() -> None:
    for make in (
        lambda: HostLink(0),
        lambda: HostLink(math.nan),
        lambda: HostLink(1e9, -1),
        lambda: HostLink(1e9, loss_ratio=1),
        lambda: Cluster((), ()),
        lambda: Cluster((1, 1), (HostLink(1),)),
        lambda: flat(2, speeds=(1.0, 0.0)),
        lambda: flat(2, speeds=(1.0,)),
        lambda: flat(2, racks=3),
        lambda: ReductionPlan(caps_bytes=()),
        lambda: ReductionPlan(payload_ratio=0),
        lambda: ReductionPlan(shares=(0.5, 0.6)),
        lambda: ReductionPlan(sync_every=0),
        lambda: ReductionPlan(priority=True, sync_every=2),
        lambda: Servers(0, 1e9),
        lambda: RecordedWorkload("x", "y", ()),
        lambda: workload(backward_s=math.nan),
        lambda: simulate(workload(), flat(2), num_steps=0),
        lambda: simulate(workload(), flat(2), ReductionPlan(shares=(1.0,))),
        lambda: simulate(workload(), flat(2), ReductionPlan(algorithm="rings")),
    ):
        with pytest.raises(ConfigurationError):
            make()


def test_thousands_of_ranks_are_fast() -> None:
    """Nothing is done for each message: a job of 16 times as many hosts calls at most 16 times as many functions."""
    load = workload(100, relative_steps=(0.9, 1.0, 1.2))
    assert all(is_possible(name, flat(256).topology) for name in ALL_REDUCES if not name.startswith("hier"))

    def num_calls(num_hosts: int) -> int:
        cluster, calls = Cluster.of_equal_hosts(num_hosts, HostLink(RATE, LATENCY), 8), 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            simulate(load, cluster, ReductionPlan((MIB,)), num_steps=10)
        finally:
            sys.setprofile(before)
        return calls

    assert num_calls(4096) < 16 * num_calls(256)  # messages of a ring are 256 times as many

"""Lemmas, the integer program, what limits, what is kept and scored, and files that are no workloads."""

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import ConfigurationError
from paceline_plan import (
    Cluster,
    HostLink,
    LayerTimes,
    RecordedWorkload,
    ReductionPlan,
    Servers,
    Simulation,
    scaling,
    simulate,
)
from paceline_plan.forecast import forecast
from paceline_plan.lemmas import (
    compare_efficiency,
    compare_servers,
    efficiency,
    fewest_servers,
    largest_overhead,
    most_devices,
)
from paceline_plan.request import PlanRequest
from paceline_plan.scaling import (
    Question,
    Setup,
    best_algorithm,
    best_caps,
    cap_grid,
    doubling_counts,
    predict_scaling,
    what_helps,
    what_limits,
)

MIB = 2**20


def workload(**more: object) -> RecordedWorkload:
    layers = tuple(LayerTimes(f"{i}", 0.005, 0.01, (MIB,)) for i in range(10))
    return RecordedWorkload("made up", "made up", layers, **more)  # type: ignore[arg-type]


def grow(rate: float = 1e9, latency_s: float = 1e-5):
    return lambda n: Cluster.of_equal_hosts(n, HostLink(rate, latency_s))


def test_lemma_3_1_is_the_papers() -> None:
    printed = {
        (2, 0.02): 1.96, (4, 0.05): 3.50, (8, 0.10): 4.89, (16, 0.125): 6.00, (8, 0.20): 3.69, (16, 0.50): 2.67,
    }  # fmt: skip
    for (G, R), speed_up in printed.items():
        assert G * efficiency(R, G) == pytest.approx(speed_up, abs=0.006)
    assert largest_overhead(0.75, 4) == pytest.approx(0.125)  # the paper's example
    assert most_devices(0.75, 0.125) == 4
    assert most_devices(0.9, 0.0) == largest_overhead(0.5, 2) == math.inf
    for a, R in itertools.product((0.5, 0.75, 0.9), (0.01, 0.05, 0.2)):
        G = int(most_devices(a, R))
        assert efficiency(R, G) >= a - 1e-9 > efficiency(R, G + 1) - 1e-9


def test_lemma_3_1_is_right_without_communication_and_promises_too_much_with_it() -> None:
    load = workload(optimizer_s=0.01, other_s=0.02)
    counts = (1, 2, 4, 8, 16)
    free = compare_efficiency(load, grow(math.inf, 0.0), ReductionPlan(), counts)
    assert [x.simulated for x in free] == pytest.approx([x.lemma for x in free], rel=1e-9)
    slow = compare_efficiency(load, grow(2e8), ReductionPlan(), counts)
    assert all(x.simulated < x.lemma for x in slow[2:])


def test_lemma_3_2_is_the_papers_and_overlaps_with_too_much() -> None:
    assert fewest_servers(100e6, 8, 10e9 / 8, 0.5) == 3
    assert fewest_servers(100e6, 4, 10e9 / 8, 1.0) == 1
    load = workload()
    found = compare_servers(load, grow(1e12, 0.0)(8), ReductionPlan((MIB,)), 1e9)
    assert found.lemma == math.ceil(2 * 10 * MIB * 8 / (1e9 * load.compute_s))
    assert found.half_duplex is not None
    assert found.duplex is not None
    assert found.lemma <= found.half_duplex
    assert found.duplex <= found.half_duplex
    narrow = compare_servers(load, grow(1e8, 0.0)(8), ReductionPlan((MIB,)), 1e9)
    assert narrow.worker_limit_s > narrow.window_s  # the lemma does not ask; no number of servers helps
    assert narrow.lemma == found.lemma
    for bad in ((0.0, 2), (1.5, 2), (0.5, 0)):
        with pytest.raises(ConfigurationError):
            largest_overhead(*bad)
    with pytest.raises(ConfigurationError):
        fewest_servers(1, 1, 0, 1)


def test_what_limits_is_what_was_made_to_limit() -> None:
    jitter = (0.9, 1.0, 1.0, 1.6)
    cases = {
        "computing": (workload(), grow(1e10)(8), ReductionPlan()),
        "the hosts' links": (workload(), grow(1e7)(8), ReductionPlan()),
        "latency": (workload(), grow(1e12, 5e-3)(8), ReductionPlan(algorithm="ring")),
        "recorded steps that vary": (workload(relative_steps=jitter), grow(1e10)(8), ReductionPlan()),
        "the parameter servers' links": (workload(), grow(1e12)(8), ReductionPlan(servers=Servers(1, 1e8))),
        "several links alike": (workload(), grow(1e8)(8), ReductionPlan(servers=Servers(8, 1e8))),
        "computing (one rank)": (workload(), grow()(1), ReductionPlan()),
    }
    setups = {limit: Setup(*case) for limit, case in cases.items()}
    for limit, setup in setups.items():
        found = what_limits(setup, setup.simulate())
        assert found.startswith(limit), (limit, found)
    slow = setups["the hosts' links"]
    helps = what_helps(slow, slow.simulate())
    assert [x.ratio for x in helps] == sorted((x.ratio for x in helps), reverse=True)
    assert {"links twice as fast", 'compression="bf16"'} <= {x.what for x in helps}
    real = Setup(RecordedWorkload.shipped("resnet50"), grow(1e9)(8), ReductionPlan())
    assert "overlap_forward=True" in {x.what for x in what_helps(real, real.simulate())}
    alone = setups["computing (one rank)"]
    assert what_helps(alone, alone.simulate()) == ()


def test_every_point_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(load: RecordedWorkload, cluster: Cluster, plan: ReductionPlan, **how: int) -> Simulation:
        asked.append((load, cluster, plan, tuple(how.items())))
        return simulate(load, cluster, plan, **how)

    monkeypatch.setattr(scaling, "simulate", counted)
    load = workload(samples_per_step=32, relative_steps=(0.98, 1.0, 1.03))
    question = Question(load, grow(2e8, 2e-3), ReductionPlan(algorithm="ring"), (1, 2, 8))
    predict_scaling(question)
    assert len(set(asked)) == len(asked)
    for num_ranks in question.counts:
        same = [x for x in asked if x[:3] == (load, question.grow(num_ranks), question.plan)]
        assert len(same) == 1, num_ranks


def test_scaling_has_a_knee_and_a_band() -> None:
    load = workload(samples_per_step=32, relative_steps=(0.98, 1.0, 1.03))
    question = Question(
        load, grow(2e8, 2e-3), ReductionPlan(algorithm="ring"), doubling_counts(48), 1_000_000, 2.5
    )
    answer = predict_scaling(question)
    assert [x.num_ranks for x in answer.points] == [1, 2, 4, 8, 16, 32, 48]
    assert answer.points[0].efficiency == pytest.approx(1, abs=0.05)
    assert 1 <= answer.knee < 48
    for point in answer.points:
        assert point.low_s < point.step_s < point.high_s
        assert point.epoch_s is not None
        assert point.epoch_cost == pytest.approx(point.epoch_s / 3600 * point.num_ranks * 2.5)
    free = predict_scaling(Question(workload(), grow(math.inf, 0.0), ReductionPlan(), (1, 64)))
    assert free.knee == 64
    assert free.points[-1].efficiency == pytest.approx(1)
    assert free.points[-1].samples_per_s is None
    with pytest.raises(ConfigurationError):
        doubling_counts(0)


def test_steps_of_several_micro_steps() -> None:
    load = workload(samples_per_step=64, num_micro_steps=4, optimizer_s=0.01, other_s=0.002)
    question = Question(load, grow(math.inf, 0.0), ReductionPlan(sync_every=4), (1, 8), 6400)
    one, eight = predict_scaling(question).points
    assert one.step_s == pytest.approx(load.compute_s)
    assert load.compute_s == pytest.approx(4 * (0.05 + 0.1 + 0.002) + 0.01)
    assert one.epoch_s == pytest.approx(100 * one.step_s)
    assert (eight.efficiency, eight.speed_up) == pytest.approx((1, 8))  # nothing communicates
    assert eight.samples_per_s == pytest.approx(8 * 64 / one.step_s)
    every = replace(question, plan=ReductionPlan(sync_every=1))  # as if each micro-step were a step
    assert predict_scaling(every).points[0].samples_per_s == pytest.approx(16 / (0.152 + 0.01))
    slow = Question(load, grow(1e8), ReductionPlan(sync_every=4), (8,))
    assert predict_scaling(slow).points[0].efficiency < 1


def test_a_step_lies_in_its_own_band() -> None:
    by_hand = (1.0, 1.1), (0.5, 2.0, 2.0)  # their median is not 1
    few = (1.1, 1.0, 1.0, 1.1, 2.0, 0.5, 1.0, 1.1, 1.0)  # of which most draws are slower
    for jitter in (*by_hand, few):
        question = Question(workload(relative_steps=jitter), grow(3e9), ReductionPlan(), (2, 16))
        for point in predict_scaling(question).points:
            assert point.low_s <= point.step_s <= point.high_s
            assert point.high_s < 1.5 * point.step_s


def test_a_search_is_never_worse_than_what_it_starts_from() -> None:
    chance = random.Random(4)
    for _ in range(6):
        layers = tuple(
            LayerTimes(f"{i}", 0.001, chance.random() * 0.01, (chance.choice([4096, MIB, 8 * MIB]),))
            for i in range(30)
        )
        load = RecordedWorkload("made up", "made up", layers)
        cluster = grow(10 ** chance.uniform(7.5, 10), 10 ** chance.uniform(-5, -3))(chance.choice([2, 8, 32]))
        setup = Setup(load, cluster, ReductionPlan(algorithm="ring"))
        found = best_caps(setup)
        assert found.step_s == pytest.approx(simulate(load, cluster, found.plan).step_s)
        for caps in cap_grid(load.gradient_bytes):
            assert found.step_s <= simulate(load, cluster, ReductionPlan(caps, "ring")).step_s + 1e-12
        by_name = best_algorithm(setup)
        assert by_name.step_s <= simulate(load, cluster, ReductionPlan(algorithm="ring")).step_s + 1e-12


def _trace(num_steps: int) -> list[str]:
    header = {"format": "paceline trace", "version": 1, "name": "net", "device": "CPU"}
    header["layers"] = [{"name": "a", "gradient_bytes": [400, 4]}, {"name": "b", "gradient_bytes": [80]}]
    step = {
        "warm_up": False, "forward_s": 0.3, "forward_ends_s": [0.1, 0.25], "backward_s": 0.6, "ready_s": [0.55, 0.2],
        "optimizer_s": 0.05, "other_s": 0.01,
    }  # fmt: skip
    return [json.dumps(header), json.dumps({**step, "warm_up": True}), *[json.dumps(step)] * num_steps]


def test_traces_and_workloads(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(_trace(3)))
    found = RecordedWorkload.load(path)
    assert (found.forward_s, found.backward_s, found.optimizer_s) == pytest.approx((0.3, 0.6, 0.05))
    assert found.order == (1, 0)
    assert [size for _, size in found.ready_gradients()] == [80, 4, 400]
    assert [ready_s for ready_s, _ in found.ready_gradients()] == pytest.approx([0.2, 0.6, 0.6])
    found.save(tmp_path / "workload.json")
    assert RecordedWorkload.load(tmp_path / "workload.json") == found
    path.write_text("\n".join(_trace(3))[:-40])
    cut_off = RecordedWorkload.load(path)
    assert "1 incomplete" in cut_off.source
    assert cut_off.backward_s == pytest.approx(0.6)
    record = json.loads((tmp_path / "workload.json").read_text())
    bad = {
        "version 2": json.dumps({**record, "version": 2}),
        "no complete step": "\n".join(_trace(0)),
        "no complete step ": "\n".join(_trace(1))[:-40],
        "empty": "",
        "cut off": json.dumps(record)[:-50],
        "neither": "[1, 2]",
        "damaged": json.dumps({**record, "layers": [{"name": "a"}]}),
        "below 0": json.dumps({**record, "optimizer_s": math.nan}),
        "no gradients": json.dumps({**record, "layers": [], "ready_order": []}),
        "no gradients ": json.dumps(
            {**record, "layers": [{**x, "gradient_bytes": [0]} for x in record["layers"]]}
        ),
        "damaged ": json.dumps(
            {**record, "layers": [{**x, "gradient_bytes": [math.inf]} for x in record["layers"]]}
        ),
        "steps of -3 samples": json.dumps({**record, "samples_per_step": -3}),
        "steps of 0 samples": json.dumps({**record, "samples_per_step": 0}),
        "0 micro-steps": json.dumps({**record, "num_micro_steps": 0}),
        "ready order": json.dumps({**record, "ready_order": [0, 0]}),
    }
    for words, text in bad.items():
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=words.strip()):
            RecordedWorkload.load(path)
    for missing in (tmp_path / "not there", tmp_path):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            RecordedWorkload.load(missing)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="not text"):
        RecordedWorkload.load(path)


def test_a_plan_counts_hosts_and_quotes_the_lemmas_of_servers_only_beside_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {}
    for servers in (0, 2):
        request = PlanRequest("tiny", to=4, ranks_per_host=2, rate="1Gbit", servers=servers)
        forecast(request, tmp_path, as_json=False)
        said[servers] = capsys.readouterr().out
    rows = [line.split()[:2] for line in said[0].splitlines()]
    assert rows.index(["devices", "hosts"]) < rows.index(["4", "2"])
    assert "lemma 3." in said[2]
    assert "lemma" not in said[0]

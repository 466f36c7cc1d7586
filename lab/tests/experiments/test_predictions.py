"""What is said about predictions: a fit finds what runs were made of, and papers' curves come out as the docs say."""

import math
from dataclasses import replace

import pytest

from paceline_lab.bench.layer_profile import default_profile
from paceline_lab.bench.timed_model import gradient_bytes, planned
from paceline_lab.experiments.papers.variants import Variant, bucket_caps_mb
from paceline_lab.experiments.prediction.predicted_runs import (
    EmulatedHosts,
    EmulationCost,
    Errors,
    Fitted,
    Run,
    fit,
    run_of,
    samples,
)
from paceline_plan import (
    Cluster,
    HostLink,
    LayerTimes,
    RecordedWorkload,
    ReductionPlan,
    collective_cost,
    simulate,
)

TRUE = Fitted(0.95, 2e-4, EmulationCost(2, 5e-4, 5e-5, 0.0, 5e-5))


def _runs(counts: tuple[int, ...]) -> list[Run]:
    layers = tuple(LayerTimes(str(i), 0.001, 0.002, (40_000,)) for i in range(20))
    load = RecordedWorkload("made up", "made up", layers)
    runs = []
    for num_ranks in counts:
        for cap in (1.0, 80_000.0, math.inf):
            links = (HostLink(12.5e6),) * num_ranks
            run = Run(f"{num_ranks} hosts", "torch", load, links, ReductionPlan((cap,), "ring"), (1.0,))
            runs.append(replace(run, steps_s=(TRUE.step_s(run),)))
    return runs


def test_what_emulation_costs_is_apart() -> None:
    load, mib = _runs((1,))[0].workload, 2**20
    links = (HostLink(1e9, 1e-4),) * 4
    cost = EmulationCost(2, collective_s=1e-3, message_s=1e-4, s_per_byte=1e-9, layer_s=1e-4)
    alone, shared = Cluster((1,) * 4, links), EmulatedHosts((1,) * 4, links, emulation=cost)
    ring = [collective_cost(cluster, "ring") for cluster in (alone, shared)]
    added = 4 / 2 * 1e-3 + 24 / 2 * 1e-4 + 6 * mib / 2 * 1e-9
    assert ring[1].of(mib) - ring[0].of(mib) == pytest.approx(added)
    assert simulate(load, shared).step_s > simulate(load, alone).step_s + 2 * 20 * 2 * 1e-4
    assert shared.with_links(faster=2.0).layer_overhead_s() == shared.layer_overhead_s() == 2e-4
    assert "with what emulation costs" in shared.describe()


def test_a_fit_predicts_what_it_has_not_seen() -> None:
    """Runs made by known numbers, fitted on some numbers of ranks, predict the others; without emulation not."""
    fitted = fit(_runs((1, 2, 16)))
    unseen = _runs((4, 8))
    errors = Errors.of("unseen", unseen, fitted)
    assert errors.median_ratio < 0.02
    assert abs(errors.worst_ratio) < 0.06
    alone = [x["without_emulation_s"] / x["measured_s"] for x in samples(unseen, fitted)]
    assert min(alone) < 0.9


def test_a_variant_is_what_the_simulator_takes() -> None:
    profile = default_profile("tiny").taking(0.1)
    assert planned(profile).gradient_bytes == gradient_bytes(profile)
    links = [HostLink(1e7)] * 4
    run = run_of(
        "x", Variant("torch", 4, cap_mb=25, half=True, first_rank_slowness=2), profile, 10, links, [0.1]
    )
    assert (len(run.links), run.plan.payload_ratio, run.plan.overlap) == (4, 0.5, True)
    assert run.plan.caps_bytes == pytest.approx((2.5 * 2**20,))
    assert run.speeds == (0.5, 1, 1, 1)
    alone = run_of("x", Variant("none", 4), profile, 10, links, [0.1])
    assert len(alone.links) == 1
    assert not run_of("x", Variant("after", 4), profile, 10, links, [0.1]).plan.overlap


@pytest.mark.parametrize(("num_ranks", "cap_mb"), [(2, 5), (16, 8), (256, 25)])
def test_our_default_caps_are_those_of_the_number_of_ranks(num_ranks: int, cap_mb: float) -> None:
    """As the wrapper's own default is: with more ranks, larger buckets."""
    assert bucket_caps_mb(Variant("ours", num_ranks), 60 * 2**20) == (1, cap_mb)
    assert bucket_caps_mb(Variant("torch", num_ranks), 1300 * 2**20) == (1, 25)
    assert bucket_caps_mb(Variant("ours", num_ranks, cap_mb=3), 1300 * 2**20) == (3,)

"""The arithmetic beside the figures, and where the times of timed compute come from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from paceline.errors import ConfigurationError
from paceline_lab.bench.allreduce import launches, num_per_turn
from paceline_lab.bench.allreduce_sides import parse_sizes
from paceline_lab.bench.commands import check_memory, needed_bytes
from paceline_lab.bench.layer_profile import LayerTime, Profile, default_profile
from paceline_lab.bench.limit import StepLimit, backward_and_communication_s, bus_rate, ring_bytes_per_rank
from paceline_lab.bench.profile_recording import record
from paceline_lab.bench.ranks import LoopbackRanks
from paceline_lab.bench.sides import StepTimes
from paceline_lab.bench.step import SideOutcome, StepConfig, StepOutcome
from paceline_lab.bench.step_report import report
from paceline_lab.bench.timed_model import gradient_bytes, planned
from paceline_plan import LayerTimes, RecordedWorkload


def test_a_ring_sends_what_the_papers_say() -> None:
    """1.5, 1.75, 1.9375 times the buffer for 4, 8 and 32 ranks (Goyal et al. 2017, section 4.1); nothing alone."""
    assert [ring_bytes_per_rank(p, 1000) for p in (1, 2, 4, 8, 32)] == [0, 1000, 1500, 1750, 1937.5]
    assert bus_rate(4, 1000, 2.0) == 750


def test_shares_of_the_ideal_overlap_are_the_papers() -> None:
    """Li et al. 2020, figure 6: forward, backward, communication, optimizer, total; realised as computed from it."""
    for parts, total, share in [
        ((0.15, 0.40, 0.44, 0.014), 0.62, 0.96),
        ((0.118, 0.277, 0.595, 0.010), 0.735, 0.96),
        ((0.088, 0.42, 0.477, 0.014), 0.648, 0.84),
        ((0.059, 0.25, 0.68, 0.010), 0.786, 0.86),
    ]:
        assert StepLimit(*parts).realised(total) == pytest.approx(share, abs=0.015)


def test_the_ideal_hides_the_shorter_behind_the_longer() -> None:
    """Communication or backward, whichever is longer; no share where there is nothing to hide."""
    assert StepLimit(1, 2, 5, 0.5).ideal_s == 6.5
    assert StepLimit(1, 5, 2, 0.5).ideal_s == 6.5
    assert StepLimit(1, 5, 2, 0.5).no_overlap_s == 8.5
    assert StepLimit(1, 2, 0, 0.5).realised(3.5) == 0


def test_what_is_ready_last_cannot_be_hidden() -> None:
    """All bytes in the layer that backward meets last: nothing overlaps; in the first: all but backward does."""
    assert backward_and_communication_s([(1.0, 0), (1.0, 100)], 3.0) == 5.0
    assert backward_and_communication_s([(0.0, 100), (2.0, 0)], 3.0) == 3.0
    assert backward_and_communication_s([(1.0, 50), (1.0, 50)], 1.0) == 2.5
    assert backward_and_communication_s([(1.0, 99), (9.0, 1)], 1.0) == pytest.approx(10.01)


def test_the_default_profile_is_published_and_one_to_two() -> None:
    """ResNet-50's 105 ms; backward twice the forward; the convolutions get nearly all of it."""
    profile = default_profile("resnet50")
    assert profile.forward_s == pytest.approx(0.035)
    assert profile.backward_s == pytest.approx(0.070)
    convolutions = [x.forward_s for x in profile.layers if len(x.shapes[0]) == 4]
    assert len(convolutions) == 53
    assert sum(convolutions) > 0.98 * profile.forward_s
    assert profile.taking(2.1).backward_s == pytest.approx(1.4)


def test_mlstm_is_ready_only_at_the_first_byte() -> None:
    """All of the recurrence comes before any of its gradients: the layer that backward meets first has it."""
    by_name = {layer.name: layer for layer in default_profile("mlstm-4k").layers}
    assert by_name["w_m"].backward_s > 0.95 * sum(x.backward_s for x in by_name.values()) * 0.95
    assert by_name["w_mh"].backward_s == 0


def test_a_recorded_profile_adds_up_and_comes_back(tmp_path: Path) -> None:
    """Layers are the model's, times are positive, the file reads as it was written."""
    told: list[float] = []
    profile = record("transformer", "cpu", 1, told.append, quick=True)
    assert told[-1] == 1.0
    assert all(layer.forward_s >= 0 and layer.backward_s >= 0 for layer in profile.layers)
    assert profile.forward_s > 0
    assert profile.backward_s > 0
    assert "recorded" in profile.source
    default_profile("resnet50").save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json", "resnet50") == default_profile("resnet50")
    assert RecordedWorkload.load(tmp_path / "profile.json") == planned(default_profile("resnet50"))


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    """It says which layer differs; so does a broken file and a missing one."""
    path = tmp_path / "profile.json"
    default_profile("vgg16").save(path)
    with pytest.raises(ConfigurationError, match="does not fit the model: it has '0'"):
        Profile.load(path, "resnet50")
    shorter = default_profile("vgg16")
    dataclasses.replace(shorter, layers=shorter.layers[:-1]).save(path)
    with pytest.raises(ConfigurationError, match="it has 15 layers, the model 16"):
        Profile.load(path, "vgg16")
    renamed = dataclasses.replace(shorter.layers[3], name="other")
    dataclasses.replace(shorter, layers=(*shorter.layers[:3], renamed, *shorter.layers[4:])).save(path)
    with pytest.raises(ConfigurationError, match="it has 'other'"):
        Profile.load(path, "vgg16")
    path.write_text(json.dumps({"workload": "vgg16"}))
    with pytest.raises(ConfigurationError, match="is not a profile"):
        Profile.load(path, "vgg16")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Profile.load(tmp_path / "none.json", "vgg16")
    with pytest.raises(ConfigurationError, match="no time below 0"):
        Profile("x", "y", (LayerTime("a", ((1,),), -1.0, 0.0),), 0.0)


def test_what_does_not_fit_into_memory_is_refused_with_what_would() -> None:
    """BERT on 16 ranks with two sides is more than 24 GiB; the scale that is named fits."""
    config = StepConfig("bert", ("ours", "torch"), 2, 1, default_profile("bert"))
    with pytest.raises(ConfigurationError, match=r"16 ranks of bert .* --scale (\d+)") as refused:
        check_memory(config, 16, 24e9)
    scale = float(str(refused.value).split("--scale ")[1].split()[0])
    check_memory(dataclasses.replace(config, scale=scale), 16, 24e9)
    assert needed_bytes(config, 4) < 24e9
    check_memory(config, 16, None)


def test_sizes_need_a_unit() -> None:
    """And are whole numbers of float32."""
    assert parse_sizes("64KiB, 1MB") == (65536, 1_000_000)
    for text in ("64", "3B", "", "many"):
        with pytest.raises(ConfigurationError, match="--sizes"):
            parse_sizes(text)


def test_launches_alternate_only_where_they_must() -> None:
    """Sides under torchrun share one launch; mpirun's are launched before and after the others'."""
    assert launches(("gloo",)) == [("gloo",)]
    assert launches(("gloo", "mpi4py")) == [("gloo",), ("mpi4py",), ("mpi4py",), ("gloo",)]
    assert num_per_turn(64 * 1024) > num_per_turn(25 * 2**20) == 1


def test_a_recording_is_a_profile_of_the_same_step() -> None:
    layers = (LayerTimes("last", 0.01, 0.02, (64, 8)), LayerTimes("first", 0.03, 0.05, (128, 32)))
    recorded = RecordedWorkload(
        "mine", "made up", layers, 0.004, other_s=0.001, ready_order=(0, 1), num_micro_steps=3
    )
    found = Profile.of_recording(recorded)
    assert [layer.name for layer in found.layers] == ["first", "last"]  # whose gradients come last and first
    assert gradient_bytes(found) == recorded.gradient_bytes
    assert found.forward_s + found.backward_s + found.optimizer_s == pytest.approx(recorded.compute_s)
    assert StepConfig("mine", ("ours", "torch"), 2, profile=found).gradient_bytes == recorded.gradient_bytes


def outcome_of(step_s: float, compute_s: float, communication_s: float) -> StepOutcome:
    """Two ranks, two rounds, one side."""

    def times(total_s: float) -> StepTimes:
        thirds = [[total_s / 3] * 4 for _ in range(3)]
        return StepTimes(*thirds)

    side = SideOutcome("torch", (times(step_s),) * 2, ranks_equal=True, error=None, bucket_bytes=())
    return StepOutcome((times(compute_s),) * 2, ([communication_s] * 4,) * 2, (side,), ())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((0.15, 0.1, 0.06), ""),
        ((0.06, 0.1, 0.06), "a step of torch took 60.0 ms, and computing alone 100.0 ms"),
        ((0.2, 0.1, 0.4), "a step of torch took 200.0 ms, and the ideal is 466.7 ms"),
    ],
)
def test_a_result_that_cannot_be_is_not_shown(parts: tuple[float, float, float], says: str) -> None:
    config, place = StepConfig("tiny", ("torch",), 2), LoopbackRanks(2)
    made = report(config, outcome_of(*parts), place, 0.0)
    assert made.summaries["disturbed"] == says
    shown = [bool(cell) for cell in made.rows[0][:5]]
    assert shown == ([True, False, True, False, False] if says else [True] * 5)
    assert any("only ratios are shown" in note for note in made.notes) == bool(says)

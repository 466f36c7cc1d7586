"""Timed compute: the sleeps add up, the gradients are real and known, and parallel training gets them right."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from harness.ranks import pool
from paceline_lab.bench.layer_profile import LayerTime, Profile, default_profile, layers_of
from paceline_lab.bench.protocol import WrongAnswerError
from paceline_lab.bench.sides import Trainee, digest
from paceline_lab.bench.step import Communication, StepConfig, check, measure
from paceline_lab.bench.timed_model import (
    GradientTable,
    SleepingOptimizer,
    Stopwatch,
    TimedModel,
    gradient_bytes,
    scaled,
)
from paceline_lab.workloads import make_workload

SHAPES = ((3, 4), (5,), (2, 3, 2, 2), (1, 3, 3), (6, 1), ())
PROFILE = Profile(
    "given",
    "made up",
    (
        LayerTime("first", ((4, 3), (4,)), 0.001, 0.002),
        LayerTime("second", ((2, 4, 1, 1),), 0.003, 0.005),
        LayerTime("third", ((5, 2), (5,)), 0.007, 0.011),
    ),
    optimizer_s=0.0,
)


class Hands:
    """A clock that only moves when somebody sleeps, and then too far."""

    def __init__(self, overshoot: float = 0.0) -> None:
        self.now_s, self.overshoot = 100.0, overshoot
        self.slept: list[float] = []

    def sleep(self, length_s: float) -> None:
        self.slept.append(length_s)
        self.now_s += length_s + self.overshoot

    def now(self) -> float:
        return self.now_s


def stopwatch(hands: Hands) -> Stopwatch:
    return Stopwatch(hands.sleep, hands.now)


@given(st.lists(st.floats(0, 0.01), min_size=1, max_size=40), st.floats(0, 0.02, allow_subnormal=False))
def test_sleeps_that_are_too_long_add_up_all_the_same(lengths: list[float], overshoot: float) -> None:
    """However late every sleep ends, the sum is right to within one overshoot, never shorter than asked."""
    hands = Hands(overshoot)
    watch = stopwatch(hands)
    for length in lengths:
        watch.spend(length)
    assert sum(lengths) - 1e-9 <= hands.now_s - 100.0 <= sum(lengths) + overshoot + 1e-9


def test_layers_sleep_in_order_forward_and_in_reverse_backward() -> None:
    """The very lengths of the profile; gradients are ready layer by layer, the last layer's first."""
    hands = Hands()
    model = TimedModel(PROFILE, rank=0, stopwatch=stopwatch(hands))
    ready: list[tuple[int, ...]] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: ready.append((len(hands.slept), *p.shape)))
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    assert hands.slept == pytest.approx([0.001, 0.003, 0.007, 0.011, 0.005, 0.002])
    assert sorted(ready[:2]) == [(4, 5), (4, 5, 2)]  # after the fourth sleep: the third layer's
    assert ready[2] == (5, 2, 4, 1, 1)
    assert sorted(ready[3:]) == [(6, 4), (6, 4, 3)]


def test_gradients_are_of_the_rank_and_differ_everywhere() -> None:
    """Autograd hands out the table's windows: right shapes, dense, a rank's own, the same again in the next step."""
    gradients = []
    for rank in (0, 0, 1):
        model = TimedModel(PROFILE, rank, stopwatch=stopwatch(Hands()))
        for _ in range(2):
            model.zero_grad()
            model(torch.zeros(1, requires_grad=True)).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    first, again, other = gradients
    assert [tuple(g.shape) for g in first] == [(4, 3), (4,), (2, 4, 1, 1), (5, 2), (5,)]
    assert all(g.is_contiguous() for g in first)
    assert digest(first) == digest(again) != digest(other)
    assert torch.equal(first[0][1, :2], first[0][0, 1:])  # a row is the one before it, moved
    flat = torch.cat([g.flatten() for g in first])
    assert torch.equal(flat * 256, (flat * 256).round())
    assert flat.abs().max() < 4


def test_what_is_done_to_a_gradient_does_not_come_back() -> None:
    """Clipping or averaging in place changes this step's gradients, not the table that the next step's come from."""
    model = TimedModel(PROFILE, rank=0, stopwatch=stopwatch(Hands()))
    digests = []
    for _ in range(2):
        model.zero_grad()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        digests.append(digest(gradients))
        for gradient in gradients:
            gradient.mul_(0.5)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_window_lies_inside_its_table(shape: tuple[int, ...]) -> None:
    """Every index reads its own table: the largest index of the largest window is still there."""
    shapes = [*SHAPES] * 500
    table = GradientTable(shapes)
    values = table.of_rank(3)
    for index in (SHAPES.index(shape), SHAPES.index(shape) + 499 * len(SHAPES)):
        view = table.view(values, index, shape)
        assert view.shape == shape
        assert view.contiguous().view(-1)[-1].isfinite()


def test_a_wrong_gradient_is_noticed() -> None:
    """The known mean is not met by one rank's own gradients, nor by a mean with two rows exchanged."""
    model = TimedModel(PROFILE, rank=0, stopwatch=stopwatch(Hands()))
    tables = torch.stack([model.table.of_rank(rank) for rank in range(4)])
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    mean = [model.table.view(tables.mean(0), i, shape).clone() for i, shape in enumerate(shapes)]
    own = [model.table.view(tables[0], i, shape).clone() for i, shape in enumerate(shapes)]
    assert model.expected_error(mean, 4) == 0.0
    assert model.expected_error(own, 4) > 0.5
    mean[3] = mean[3].flip(0)
    assert model.expected_error(mean, 4) > 0.01


def test_parameters_take_no_memory_and_never_change() -> None:
    """BERT's 438 MB of parameters are there in name only; the optimizer leaves them alone."""
    before_kb = _resident_kb()
    model = TimedModel(default_profile("bert").taking(0.0), rank=0, stopwatch=stopwatch(Hands()))
    SleepingOptimizer(model.parameters(), 0.0).step()
    assert sum(p.numel() for p in model.parameters()) == 109_512_762
    assert _resident_kb() - before_kb < 100_000


def test_scale_divides_the_bytes() -> None:
    """The first size of every parameter, rounded up; as many tensors as before."""
    assert scaled((7, 3), 2) == (4, 3)
    assert scaled((1,), 8) == (1,)
    profile = default_profile("resnet50")
    assert gradient_bytes(profile) == 4 * 25_557_032
    assert gradient_bytes(profile, 4) == pytest.approx(gradient_bytes(profile) / 4, rel=0.01)
    assert len(list(TimedModel(profile, 0, 4.0).parameters())) == 161


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("resnet50", 161, 25_557_032),
        ("bert", 201, 109_512_762),
        ("vgg16", 32, 138_357_544),
        ("mlstm-4k", 12, 86_319_360),
        ("tiny", 1000, 16_000),
    ],
)
def test_workloads_have_their_shapes(name: str, tensors: int, parameters: int) -> None:
    """A figure stands for a model only if the tensors are the model's own, each in one layer."""
    shapes = [shape for layer in layers_of(make_workload(name)) for shape in layer.shapes]
    assert (len(shapes), sum(math.prod(shape) for shape in shapes)) == (tensors, parameters)


def _measured(rank: int, num_ranks: int) -> dict[str, object]:
    profile = default_profile("resnet50").taking(0.004)
    config = StepConfig("resnet50", ("ours", "torch", "torch-fp16"), 2, 1, profile, scale=64.0)
    outcome = measure(config, lambda _: None)
    check(outcome)
    return {
        "sides": [(side.name, side.ranks_equal, side.error) for side in outcome.sides],
        "num_steps": [len(times.backward_s) for side in outcome.sides for times in side.per_rank],
        "communication": [len(times) for times in outcome.communication_s],
        "buckets": [sum(side.bucket_bytes) for side in outcome.sides],
        "bytes": config.gradient_bytes,
    }


@pytest.mark.processes
def test_all_sides_get_the_mean_on_real_ranks() -> None:
    """Two processes: bitwise the same on both, exactly the mean in float32, nearly in float16; two turns a round."""
    for found in pool(2).run(_measured):
        (ours, torchs, fp16), size = found["sides"], found["bytes"]
        assert ours == ("ours", True, 0.0)
        assert torchs == ("torch", True, 0.0)
        assert fp16[1]
        assert 0 <= fp16[2] < 2e-3
        assert found["num_steps"] == [4] * 6
        assert found["communication"] == [4, 4]
        assert all(buckets >= size for buckets in found["buckets"])


def _unsynchronized(rank: int, num_ranks: int) -> str:
    config = StepConfig("resnet50", ("none",), 2, 1, default_profile("resnet50").taking(0.0), scale=64.0)
    try:
        check(measure(config, lambda _: None))
    except WrongAnswerError as error:
        return str(error)
    return "no error"


@pytest.mark.processes
def test_times_of_a_side_that_does_not_synchronize_are_refused() -> None:
    """Without data parallelism the ranks end with different gradients; that must not become a figure."""
    for message in pool(2).run(_unsynchronized):
        assert "none ended with different numbers" in message


def _parts(rank: int, num_ranks: int) -> tuple[list[int], float, str]:
    communication = Communication(4 * 1000, piece_bytes=4 * 300)
    communication.step()
    dist.barrier()
    trainee = Trainee("ours", make_workload("wide_mlp", quick=True))
    return communication._sizes, len(communication.times_s), digest(trainee.last_answer())


@pytest.mark.processes
def test_communication_alone_sends_all_bytes_in_pieces() -> None:
    """No more, no less than the gradients; and after a real step both ranks hold the same parameters."""
    (sizes, count, first), (_, _, second) = pool(2).run(_parts)
    assert sizes == [300, 300, 300, 100]
    assert count == 1
    assert first == second


def _resident_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

"""A rank of `bounded_loss`: sums, over two links, layers with priorities, steps, or some in a row; sides in turn."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline_lossy import Bound, open_lossy_transport
from paceline_lossy.lossy_transport import LossyTransport

BOUNDS = {"ours, bound 0": 0.0, "ours, bound 5 %": 0.05}
GLOO = "Gloo"
FRONT_BYTES = 250_000
TORCH = "torch over Gloo"
# The arguments of `BoundedLoss`; None: over Gloo.
STEP_SIDES: dict[str, dict[str, Any] | None] = {
    TORCH: None,
    "Paceline over Gloo": None,
    **{side: {"bound": bound} for side, bound in BOUNDS.items()},
}
_WARM_UP_STEPS = 3
# The same, and whether the next forward runs meanwhile.
OVERLAP_SIDES: dict[str, tuple[dict[str, Any] | None, bool]] = {
    f"{name}{', overlap' * overlaps}": (bounded, overlaps)
    for overlaps in (False, True)
    for name, bounded in (
        (GLOO, None),
        ("bound 0", {"bound": 0.0}),
        ("bound 5 %", {"bound": 0.05}),
        ("bound 5 %, priorities", {"bound": 0.05, "priorities": True}),
    )
}
_IN_A_ROW = 5

Samples = dict[str, list[dict[str, float]]]


def main() -> None:
    """Read the case from the command line; rank 0 prints the times of each side."""
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("benchmark", dist.distributed_c10d._get_default_store())
    link = open_lossy_transport(store, rank, ranks, timedelta(seconds=120))
    measure = {"sum": _sums, "paths": _paths, "layers": _layers, "step": _steps, "overlap": _in_a_row}[
        case["kind"]
    ]
    samples = measure(link, case)
    if rank == 0:
        print(json.dumps(samples), flush=True)
    link.close(5.0)
    dist.destroy_process_group()


def _begin_together(link: LossyTransport) -> None:
    link.launch(torch.zeros(1).numpy(), Bound(0)).wait()


@contextmanager
def _timed(into: list[dict[str, float]], is_counted: bool) -> Iterator[dict[str, float]]:
    """Append milliseconds, and those of the processor, if they count."""
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    sample: dict[str, float] = {}
    yield sample
    sample["ms"] = round((time.perf_counter() - begun_s) * 1e3, 2)
    sample["cpu_ms"] = round((time.process_time() - begun_cpu_s) * 1e3, 2)
    if is_counted:
        into.append(sample)


def _sums(link: LossyTransport, case: dict[str, Any]) -> Samples:
    vector = torch.ones(int(case["megabytes"] * 250_000))
    samples: Samples = {side: [] for side in (GLOO, *BOUNDS)}
    for repeat in range(case["repeats"] + 1):  # the first is a warm-up
        for side, taken in samples.items():
            vector.fill_(1.0)
            _begin_together(link)
            with _timed(taken, repeat > 0):
                if side == GLOO:
                    dist.all_reduce(vector)
                else:
                    link.launch(vector.numpy(), Bound(BOUNDS[side])).wait()
            assert bool((vector == dist.get_world_size()).all())
    return samples


def _paths(link: LossyTransport, case: dict[str, Any]) -> Samples:
    """Sum a vector by one port of each rank, by eight, and by Gloo, whose connections each have one."""
    store = dist.PrefixStore("eight ports", dist.distributed_c10d._get_default_store())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    by_eight = open_lossy_transport(store, rank, ranks, timedelta(seconds=120), 8)
    sides = {GLOO: None, "ours, one port": link, "ours, eight ports": by_eight}
    vector = torch.ones(int(case["megabytes"] * 250_000))
    samples: Samples = {side: [] for side in sides}
    for repeat in range(case["repeats"] + 1):
        for side, transport in sides.items():
            vector.fill_(1.0)
            _begin_together(link)
            with _timed(samples[side], repeat > 0):
                if transport is None:
                    dist.all_reduce(vector)
                else:
                    transport.launch(vector.numpy(), Bound(0)).wait()
            assert bool((vector == ranks).all())
    by_eight.close(5.0)
    return samples


def _layers(link: LossyTransport, case: dict[str, Any]) -> Samples:
    """Launch a step's gradients, the first layer's last, and time that one; the same without priorities in turn."""
    rank, num_layers = dist.get_rank(), case["layers"]
    load = dist.new_group(backend="gloo")
    is_over = threading.Event()

    def load_the_port() -> None:  # rank 1 sends to rank 0, and so into a port that all send to
        block = torch.zeros(64 * 1024)
        while rank == 0 and not block[0]:
            dist.recv(block, 1, group=load)
        while rank == 1 and not block[0]:
            block.fill_(float(is_over.is_set()))  # the last one says so
            dist.send(block, 0, group=load)

    threads = [threading.Thread(target=load_the_port)] if rank < 2 else []
    for thread in threads:
        thread.start()
    backs = [torch.ones(int(case["megabytes"] * 250_000)).numpy() for _ in range(num_layers)]
    front = torch.ones(FRONT_BYTES // 4).numpy()
    classes = [1 + i * 3 // num_layers for i in range(num_layers)]
    samples: Samples = {"without priorities": [], "with priorities": []}
    for repeat in range(case["repeats"] + 1):
        for name, taken in samples.items():
            has_classes = name == "with priorities"
            _begin_together(link)
            begun_s = time.perf_counter()
            with _timed(taken, repeat > 0) as sample:
                launched = [
                    link.launch(back, Bound(0.05, priority=level * has_classes))
                    for back, level in zip(backs, classes, strict=True)
                ]
                link.launch(front, Bound(0.05, priority=5 * has_classes)).wait()
                sample["first_layer_ms"] = round((time.perf_counter() - begun_s) * 1e3, 2)
                for one in launched:
                    one.wait()
    _begin_together(link)
    is_over.set()
    for thread in threads:
        thread.join(20)
    return samples


def _steps(link: LossyTransport, case: dict[str, Any]) -> Samples:
    """Train a VGG-16 whose layers sleep, by each side once a round; its gradients and their traffic are real."""
    from paceline_lab.bench.layer_profile import default_profile
    from paceline_lab.bench.timed_model import SleepingOptimizer, TimedModel, gradient_bytes

    profile = default_profile("vgg16").taking(case["compute_s"])
    scale = gradient_bytes(profile) / (case["megabytes"] * 1e6)
    sides: dict[str, dict[str, Any] | None] = case.get("sides", STEP_SIDES)
    trainees = {}
    for side, bounded in sides.items():
        module = TimedModel(profile, dist.get_rank(), scale)
        model = _wrapped(side, bounded, module, scale)
        trainees[side] = (module, model, SleepingOptimizer(module.parameters(), profile.optimizer_s))
    samples: Samples = {side: [] for side in sides}
    turns = list(sides)
    for repeat in range(-_WARM_UP_STEPS, case["repeats"]):
        random.Random(repeat).shuffle(
            turns
        )  # no side has the same predecessor every time; alike on all ranks
        for side in turns:
            _, model, optimizer = trainees[side]
            _begin_together(link)
            with _timed(samples[side], repeat >= 0) as sample:
                optimizer.zero_grad(set_to_none=True)
                model(torch.zeros(1, requires_grad=True)).sum().backward()
                optimizer.step()
                _begin_together(link)  # the slowest rank's step
            if sides[side] is not None:
                sample["lost"] = round(model.reduction.losses.ratio, 6)
    for side, (module, *_) in trainees.items():
        _check(side, module, (sides[side] or {}).get("bound", 0.0))
    return samples


def _in_a_row(link: LossyTransport, case: dict[str, Any]) -> Samples:
    """Train the same model, some steps in a row by each side once a round.

    A sample has three times in milliseconds. The first is a step's, without the first step. The second includes all
    communication after the last step. The third is how long the front layer's forward waits: from the backward before,
    less what that and the optimizer sleep.
    """
    from paceline.optim import overlap
    from paceline_lab.bench.layer_profile import default_profile
    from paceline_lab.bench.timed_model import TimedModel, gradient_bytes
    from paceline_lab.experiments.step.forward_overlap_sides import ProportionalSleep

    profile = default_profile("vgg16").taking(case["compute_s"])
    scale = gradient_bytes(profile) / (case["megabytes"] * 1e6)
    slept_s = sum(layer.backward_s for layer in profile.layers) + profile.optimizer_s
    fronts: dict[str, list[float]] = {}
    trainees = {}
    for side, (bounded, overlaps) in OVERLAP_SIDES.items():
        module = TimedModel(profile, dist.get_rank(), scale)
        model = _wrapped(side, bounded, module, scale, overlap_forward="always" if overlaps else False)
        optimizer: Any = ProportionalSleep(module.parameters(), profile.optimizer_s)
        if overlaps:
            optimizer = overlap(optimizer, model, per_parameter=True)
        fronts[side] = []
        _note_calls(next(iter(module)), fronts[side])
        trainees[side] = (module, model, optimizer)
    samples: Samples = {side: [] for side in OVERLAP_SIDES}
    turns = list(OVERLAP_SIDES)
    for repeat in range(-2, case["repeats"]):  # the ranks agree on an order in the first
        random.Random(repeat).shuffle(turns)
        for side in turns:
            _, model, optimizer = trainees[side]
            begun_s, backward_s = [], []
            fronts[side].clear()
            _begin_together(link)
            for _ in range(_IN_A_ROW):
                begun_s.append(time.perf_counter())
                optimizer.zero_grad(set_to_none=True)
                output = model(torch.zeros(1, requires_grad=True)).sum()
                backward_s.append(time.perf_counter())
                output.backward()
                optimizer.step()
            model.flush()
            _begin_together(link)  # the slowest rank's
            ended_s = time.perf_counter()
            waits = [
                front - since - slept_s for since, front in zip(backward_s, fronts[side][1:], strict=False)
            ]
            sample = {
                "ms": round(1e3 * (begun_s[-1] - begun_s[1]) / (_IN_A_ROW - 2), 2),
                "drained_ms": round(1e3 * (ended_s - begun_s[0]) / _IN_A_ROW, 2),
                "front_ms": round(1e3 * statistics.median(waits), 2),
            }
            if OVERLAP_SIDES[side][0] is not None:
                sample["lost"] = round(model.reduction.losses.ratio, 6)
            if repeat >= 0:
                samples[side].append(sample)
    for side, (module, *_) in trainees.items():
        _check(side, module, (OVERLAP_SIDES[side][0] or {}).get("bound", 0.0))
    return samples


def _note_calls(layer: Any, moments: list[float]) -> None:
    """Append the time whenever a layer's own forward begins, behind all that waits in front of it."""
    forward = layer.forward

    def noted(*arguments: Any) -> Any:
        moments.append(time.perf_counter())
        return forward(*arguments)

    layer.forward = noted


def _check(side: str, module: Any, bound: float) -> None:
    """Refuse times of wrong gradients; lost elements are wrong by their own size."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    error = module.expected_error(gradients, dist.get_world_size())
    assert error <= 1e-6 + math.sqrt(bound), f"{side} is {error:.2g} off"


def _wrapped(
    side: str, bounded: dict[str, Any] | None, module: Any, scale: float, overlap_forward: bool | str = False
) -> Any:
    """A model under data parallelism, with its wrapper's default buckets, scaled like its gradients."""
    from paceline import DistributedDataParallel
    from paceline.planning.bucket_assignment import BucketCaps
    from paceline.reductions import Mean
    from paceline_lossy import BoundedLoss

    mebibyte = 2**20
    if side == TORCH:
        caps: list[Any] = [cap / scale for cap in (1.0, 25.0)]  # torch says int, and takes parts of one
        return torch.nn.parallel.DistributedDataParallel(module, init_sync=False, bucket_cap_mb_list=caps)
    whole = sum(4 * p.numel() for p in module.parameters()) * scale
    num_ranks = torch.distributed.get_world_size()
    found = BucketCaps.default(
        int(whole),
        any_on_cpu=True,
        on_one_host=False,
        num_ranks=num_ranks,
        overlaps_forward=bool(overlap_forward),
    )
    caps = [cap / scale / mebibyte for cap in found.caps_bytes]
    reduction = Mean() if bounded is None else BoundedLoss(**bounded)
    return DistributedDataParallel(
        module,
        init_sync=bool(overlap_forward),
        bucket_cap_mb_list=caps,
        reduction=reduction,
        overlap_forward=overlap_forward,
    )


if __name__ == "__main__":
    main()

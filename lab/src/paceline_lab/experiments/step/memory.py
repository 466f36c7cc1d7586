"""Measure how much memory gradients need at the peak of a step, relative to their own size.

Method. Every side runs in fresh processes. The floor is the same model whose gradients are dropped one by one, as soon
as autograd has produced them. Its peak holds parameters, activations and the one gradient being computed, which every
side needs. The excess of a side's peak over the floor's is the cost of keeping and reducing gradients: 1.0 is one copy
of all gradients. The report also shows the peak above that of a forward alone, with the one gradient being computed.
Optimizer: SGD without momentum, which allocates nothing.

Two instruments err in different ways:

1. `profiler` sums the allocations and frees of torch's CPU allocator on the training thread, byte by byte, from before
   the model is wrapped. It does not see other threads, or memory that is no tensor, such as Gloo's buffers. Gloo's
   thread may free what the constructor broadcasts, so the models are wrapped with init_sync=False (LOG.md).
2. `resident` is the process's peak resident set (VmHWM, reset through /proc/self/clear_refs). Its malloc maps and
   unmaps every tensor of 64 KiB or more. It sees everything, to the page; Linux only.

Both look at steps after the third: torch re-buckets in the first ones.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks
from paceline_lab.bench.sides import labels, parse_sides, wrap
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, Ranks, ReportFolder, Sides
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import look_of, workload_name
from paceline_lab.report.panels import Bar, Bars
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.workloads import Workload, make_workload

BARE = "none"  # no data parallelism: it keeps gradients only until the optimizer has used them
FLOOR = "floor"  # gradients are dropped as they appear
DEFAULT_SIDES = "none,torch,torch-view,torch-batched,ours,ours-unused"
COLUMNS = {
    "profiled_peak_bytes": "peak (profiler)",
    "resident_peak_bytes": "peak (resident)",
    "profiled_rest_bytes": "between steps (profiler)",
    "profiled_above_forward": "peak above forward (profiler)",
}
MODELS = ("wide_mlp", "transformer")
NUM_WARM_UP_STEPS = 3
NUM_STEPS = 3
TARGET_RATIO = 1.05
GLOO_GRACE_S = 0.1
ENVIRONMENT = {**ENVIRONMENTS[Allocator.EXACT], "KINETO_LOG_LEVEL": "99"}


@dataclass(frozen=True)
class Config:
    """One launch."""

    model: str
    side_name: str
    quick: bool


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank. Profiled: since before wrapping. Resident: absolute; 0: cannot be measured."""

    gradient_bytes: int
    profiled_peak_bytes: int
    profiled_rest_bytes: int  # between steps, gradients dropped
    profiled_forward_bytes: int  # peak of a forward, and no more, of the bare module
    resident_peak_bytes: int


class Training:
    """A wrapped model and plain SGD; with the floor, a model whose gradients vanish."""

    def __init__(self, config: Config, module: nn.Module, batch: object) -> None:
        self.workload = make_workload(config.model, config.quick)
        self.batch = batch
        self.model = module if config.side_name == FLOOR else wrap(config.side_name, module, init_sync=False)
        if config.side_name == FLOOR:
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=False)

    def steps(self, num_steps: int) -> None:
        """Train; ends with gradients dropped."""
        for _ in range(num_steps):
            loss, _ = self.workload.loss(self.model, self.batch, None)
            loss.backward()
            del loss
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def measure(config: Config, tell: TellProgress) -> Footprint:
    """Measure one side with both instruments. Collective."""
    resident_peak_bytes = _resident_peak_bytes(config)
    gc.collect()
    tell(0.5)
    module, batch = _module_and_batch(config)
    workload = make_workload(config.model, config.quick)
    forward_bytes, _ = _profiled_bytes(lambda: _forward(workload, module, batch))
    training: list[Training] = []

    def warm_up() -> None:
        training.append(Training(config, module, batch))
        training[0].steps(NUM_WARM_UP_STEPS)

    _, live_bytes = _profiled_bytes(warm_up)
    peak_bytes, end_bytes = _profiled_bytes(lambda: training[0].steps(NUM_STEPS))
    gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return Footprint(
        gradient_bytes, live_bytes + peak_bytes, live_bytes + end_bytes, forward_bytes, resident_peak_bytes
    )


def _module_and_batch(config: Config) -> tuple[nn.Module, object]:
    workload = make_workload(config.model, config.quick)
    torch.manual_seed(0)
    return workload.make_model(), workload.make_batch(0, 0)


def _forward(workload: Workload, module: nn.Module, batch: object) -> None:
    workload.loss(module, batch, None)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _profiled_bytes(work: Callable[[], None]) -> tuple[int, int]:
    """Return the peak and the final sum of what `work` allocated and freed through torch's CPU allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
        # Gloo's thread ends its last record after its work; torch 2.13 crashes when that meets the profiler's end.
        time.sleep(GLOO_GRACE_S)
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    events = (
        [event for event in results.events() if event.name() == "[memory]"] if results is not None else []
    )
    live_bytes = peak_bytes = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes, live_bytes


def _resident_peak_bytes(config: Config) -> int:
    training = Training(config, *_module_and_batch(config))
    training.steps(NUM_WARM_UP_STEPS)
    clear_refs = Path("/proc/self/clear_refs")
    try:
        clear_refs.write_text("5")  # VmHWM starts again from what is resident now
    except OSError:
        return 0
    training.steps(NUM_STEPS)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


Footprints = dict[str, dict[str, list[Footprint]]]  # by model, by side (and the floor), by rank


def run(side_names: tuple[str, ...], num_ranks: int, quick: bool) -> Footprints:
    """Launch every side on every model."""
    found: Footprints = {}
    for model in MODELS[:1] if quick else MODELS:
        found[model] = {}
        for name in (FLOOR, *dict.fromkeys(side_names)):
            title = f"memory, {model}, {name}"
            found[model][name] = LoopbackRanks(num_ranks).run(
                measure, Config(model, name, quick), title, ENVIRONMENT
            )
    return found


def ratio_above_floor(side: list[Footprint], floor: list[Footprint], field: str) -> float:
    """Return the worst rank's bytes above the floor's, in gradients."""
    pairs = zip(side, floor, strict=True)
    ratios: list[float] = [
        (getattr(mine, field) - getattr(its, field)) / mine.gradient_bytes for mine, its in pairs
    ]
    return max(ratios)


def report(found: Footprints, side_names: tuple[str, ...], num_ranks: int, quick: bool) -> Report:
    """Turn the footprints into one row per model and side."""
    rows, verdicts = [], []
    summaries: dict[str, dict[str, dict[str, float]]] = {}
    for model, by_side in found.items():
        summaries[model] = {}
        for name in labels(tuple(dict.fromkeys(side_names))):
            fields = ("profiled_peak_bytes", "profiled_rest_bytes", "resident_peak_bytes")
            ratios = {field: ratio_above_floor(by_side[name], by_side[FLOOR], field) for field in fields}
            summaries[model][name] = ratios
            ratios["profiled_above_forward"] = max(
                (mine.profiled_peak_bytes - mine.profiled_forward_bytes) / mine.gradient_bytes
                for mine in by_side[name]
            )
            megabytes = by_side[name][0].gradient_bytes / 1e6
            rows.append((model, name, f"{megabytes:.1f}", *[f"{ratios[field]:.3f}" for field in COLUMNS]))
            if name.startswith("ours"):
                verdicts.append(
                    Verdict(
                        f"{model}, {name}, peak", ratios["profiled_peak_bytes"], TARGET_RATIO, "x gradients"
                    )
                )
    return Report(
        name=f"memory-{num_ranks}ranks" + ("-quick" if quick else ""),
        question="How much memory do gradients need, relative to their size, above a run that keeps none?",
        columns=("model", "side", "gradients MB", *COLUMNS.values()),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=(
            "the resident peak includes Gloo's buffers and a few MB of noise; the floor does not communicate",
            "CPU memory: says nothing about an accelerator's caching allocator",
        ),
        config={"side_names": side_names, "num_ranks": num_ranks, "quick": quick},
        summaries=summaries,
        samples={
            model: {name: [asdict(rank) for rank in ranks] for name, ranks in by_side.items()}
            for model, by_side in found.items()
        },
        provenance=collect(num_ranks),
    )


def main(
    sides: Sides = DEFAULT_SIDES,
    ranks: Ranks = 2,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Compare the peak memory of each side with a run that keeps no gradients."""
    side_names = parse_sides(sides)
    result = report(run(side_names, ranks, quick), side_names, ranks, quick)
    conclude(result, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw a panel a model, a bar a side."""
    key, panels, pairs = "profiled_peak_bytes", [], []
    for model, found in record["summaries"].items():
        bars = [
            Bar(look_of(side).name, value[key], look_of(side).color)
            for side, value in found.items()
            if side != BARE
        ]
        panels.append(Bars(workload_name(model), "peak, as a multiple of the gradients' size", bars))
        if {"ours", "torch"} <= set(found):
            pairs.append(
                f"{found['ours'][key]:.2f} instead of torch's {found['torch'][key]:.2f} ({workload_name(model)})"
            )
    return draw_figure(
        path,
        f"Peak memory, in sizes of the gradients: Paceline takes {', '.join(pairs)}"
        if pairs
        else record["question"],
        panels,
        f"{record['config']['num_ranks']} ranks on one host; what torch's allocator was asked for, at the peak of a "
        "step, beyond a run that keeps no gradients.",
        columns=1,
    )

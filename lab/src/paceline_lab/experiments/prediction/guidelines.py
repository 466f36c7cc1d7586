"""Do the guidelines of Zou et al. 2017 hold: the minibatch program, and the two lemmas?

The program: convolutions are timed by every algorithm that torch offers on a CPU, forward and backward, at several
minibatches, and the workspace that torch's allocator holds meanwhile is counted; scipy's milp chooses minibatch and
algorithms within a memory; then the chosen ones train together, and predicted throughput and memory are set beside the
measured ones. Once among all algorithms, once among those by which a workspace is worth trading.

The lemmas: their answers beside the simulator's, for ResNet-50 as published on one V100; nothing is measured there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.plan import Cluster, HostLink, ReductionPlan
from paceline.plan.lemmas import compare_efficiency, compare_servers
from paceline_lab.bench.layer_profile import default_profile
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.timed_model import planned
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    Quick,
    ReportFolder,
)
from paceline_lab.experiments.prediction.convolution_times import (
    ALGORITHMS,
    Convolution,
    run_layers,
    time_alternatives,
)
from paceline_lab.experiments.prediction.minibatch import Alternative, Memory, choose_minibatch
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import CURVE_COLORS
from paceline_lab.report.panels import Line, Lines, Panel
from paceline_lab.report.publication import Report

LAYERS = (
    Convolution(3, 16, 5, 32, is_first=True),
    Convolution(16, 32, 3, 32),
    Convolution(32, 64, 3, 16),
    Convolution(64, 64, 3, 16),
)
MINIBATCHES = (1, 2, 4, 8, 16, 32, 64)
SETS = {"all algorithms": tuple(ALGORITHMS), "workspaces only": ("without oneDNN", "im2col and GEMM", "FFT")}
MEMORIES_MIB = (16, 32, 64)
GPUS = (2, 8, 32)
REPEATS = 9
WORKERS, SERVER_RATES = 8, (1.25e9, 3.125e9)
_MIB = 2**20
WEIGHT_COPIES = 3  # weights, gradients, momentum


@dataclass(frozen=True)
class Config:
    """What was asked."""

    minibatches: tuple[int, ...]
    memories_mib: tuple[int, ...]
    repeats: int


def main(quick: Quick = False, as_json: AsJson = False, report_folder: ReportFolder = REPORT_FOLDER) -> None:
    """Measure, choose, check; compare the lemmas."""
    torch.set_num_threads(1)
    config = Config(MINIBATCHES[:3] if quick else MINIBATCHES, MEMORIES_MIB, 2 if quick else REPEATS)
    summaries: dict[str, Any] = {}
    rows = []
    measured = {
        X: time_alternatives(LAYERS, X, tuple(ALGORITHMS), config.repeats) for X in config.minibatches
    }
    for name, algorithms in SETS.items():
        for row, summary in _minibatches(name, algorithms, config, measured):
            rows.append(row)
            summaries[row[0]] = summary
    for row, summary in _lemmas():
        rows.append(row)
        summaries[row[0]] = summary
    report = Report(
        name="guidelines" + "-quick" * quick,
        question="Do the guidelines of Zou et al. 2017 hold?",
        columns=("case", "chosen, or the paper says", "predicted, or the simulator says", "measured"),
        rows=tuple(rows),
        verdicts=(),
        notes=(
            "one thread's processor time, forward and backward, the least of the repeats",
            "workspaces and memory as torch's allocator holds them; what NNPACK allocates by itself is not seen",
        ),
        config=config,
        summaries=summaries,
        samples={
            str(X): [[asdict(alternative) for alternative in layer] for layer in layers]
            for X, layers in measured.items()
        },
        provenance=collect(1),
    )
    conclude(report, report_folder, as_json, draw)


def _minibatches(
    name: str,
    algorithms: tuple[str, ...],
    config: Config,
    measured: Mapping[int, Sequence[Sequence[Alternative]]],
) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    among = {
        X: [[alternative for alternative in layer if alternative.name in algorithms] for layer in layers]
        for X, layers in measured.items()
    }
    fixed = WEIGHT_COPIES * sum(layer.weight_bytes for layer in LAYERS)
    sample = sum(layer.sample_bytes for layer in LAYERS)
    found: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    for mib in config.memories_mib:
        best, every = choose_minibatch(Memory(mib * _MIB, fixed, sample), among)
        assert best.choice is not None
        seconds, held = run_layers(LAYERS, best.X, best.choice.names, config.repeats)
        fits = max(x.X for x in every if x.choice is not None)
        modelled = fixed + best.X * sample + best.choice.workspace_bytes
        counted = fixed + held
        row = (
            f"{name}, {mib} MiB",
            f"X {best.X} (largest that fits: {fits}), {', '.join(best.choice.names)}",
            f"{best.samples_per_s:,.0f} samples/s, {modelled / _MIB:.1f} MiB",
            f"{best.X / seconds:,.0f} samples/s, {counted / _MIB:.1f} MiB",
        )
        summary = {
            "X": best.X,
            "largest_X": fits,
            "names": list(best.choice.names),
            "predicted_per_s": best.samples_per_s,
            "measured_per_s": best.X / seconds,
            "error": best.samples_per_s * seconds / best.X - 1,
            "modelled_bytes": modelled,
            "counted_bytes": counted,
            "every": [asdict(x) | {"samples_per_s": x.samples_per_s} for x in every],
        }
        found.append((row, summary))
    return found


def _lemmas() -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    workload, plan = planned(default_profile("resnet50")), ReductionPlan()

    def grow(number: int) -> Cluster:
        return Cluster.of_equal_hosts(number, HostLink(25e9 / 8, 3e-5))

    found: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    for beside in compare_efficiency(workload, grow, plan, GPUS):
        row = (
            f"lemma 3.1, {beside.num_ranks} GPUs share a batch",
            f"{beside.lemma:.1%} efficiency",
            f"{beside.simulated:.1%}",
            "-",
        )
        found.append((row, {"lemma": beside.lemma, "simulated": beside.simulated}))
    for rate in SERVER_RATES:
        answers = compare_servers(workload, grow(WORKERS), plan, rate)
        row = (
            f"lemma 3.2, {WORKERS} workers, servers of {rate * 8e-9:.3g} Gbit/s",
            f"{answers.lemma} servers",
            f"{answers.half_duplex} (half-duplex), {answers.duplex} (duplex)",
            "-",
        )
        found.append((row, asdict(answers)))
    return found


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw the predicted throughput over the minibatch for each memory, and what was measured of the best one."""
    drawn: list[Panel] = []
    for name in SETS:
        lines = []
        for mib, color in zip(record["config"]["memories_mib"], CURVE_COLORS, strict=False):
            found = record["summaries"][f"{name}, {mib} MiB"]
            fitting = [
                (size["X"], size["samples_per_s"]) for size in found["every"] if size["choice"] is not None
            ]
            lines.append(Line(f"{mib} MiB", fitting, color, "-", "o"))
            lines.append(Line("", [(found["X"], found["measured_per_s"])], color, "", "x"))
        ticks = {X: str(X) for X in record["config"]["minibatches"]}
        drawn.append(Lines(name, "minibatch", "samples per second", lines, ticks, log_x=True))
    chosen = {
        mib: record["summaries"][f"all algorithms, {mib} MiB"]["X"]
        for mib in record["config"]["memories_mib"]
    }
    title = "The best minibatch within " + ", ".join(f"{mib} MiB is {X}" for mib, X in chosen.items())
    return draw_figure(path, title, drawn, "lines: predicted; crosses: measured, all layers together")

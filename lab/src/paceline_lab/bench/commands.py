"""The commands `paceline bench step`, `allreduce`, `profile` and `workloads`, from checked options to a report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import quantities
from paceline.errors import ConfigurationError
from paceline.given import check_output
from paceline.host.processes import available_bytes
from paceline_lab.bench import allreduce_report
from paceline_lab.bench.allreduce import ReduceConfig, run_launches
from paceline_lab.bench.allreduce_sides import parse_reduce_sides, parse_sizes
from paceline_lab.bench.layer_profile import PUBLISHED, Profile, default_profile
from paceline_lab.bench.profile_recording import check_recordable, record
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator
from paceline_lab.bench.provenance import load_average
from paceline_lab.bench.ranks import Ranks
from paceline_lab.bench.sides import SIDES, parse_sides
from paceline_lab.bench.step import StepConfig, StepOutcome, check, measure
from paceline_lab.bench.step_report import draw, report
from paceline_lab.report import ReportFolder
from paceline_lab.report.publication import Report, figure_path, publish
from paceline_lab.report.terminal import progress_bar
from paceline_lab.workloads import WORKLOADS, make_workload
from paceline_plan import RecordedWorkload
from paceline_plan.script_recording import record_script

# What ranks need of memory, in copies of all gradients: a side that waits for its turn keeps its buckets, and what its
# hook or its constructor wrote; the one whose turn it is has gradients besides, and something in flight. Real compute
# also has parameters and momentum for every side.
_WAITING = {"none": 0.0, "ours": 1.0, "torch": 1.0, "accelerate": 2.0, "deepspeed": 1.0, "torchft": 1.0}
_HOOK = {"powersgd": 2.0}
_ACTIVE = 2.0
_REAL = 2.0  # parameters and momentum
DEFAULT_WORKLOAD = "resnet50"
_RECORDED_STEPS = 20  # of a script
_MARGIN_BYTES = 400e6  # a process with torch


@dataclass(frozen=True)
class StepOptions:
    """`paceline bench step`'s options, as typed."""

    workload: str | None
    vs: str
    rounds: int
    steps: int
    compute: str
    compute_s: str | None
    profile: Path | None
    scale: float
    recording: Path | None = None

    def config(self) -> StepConfig:
        """Check and resolve.

        Raises:
            ConfigurationError: Something cannot be measured.
        """
        if self.compute not in ("timed", "real"):
            raise ConfigurationError(
                f"--compute {self.compute!r} is neither timed nor real. Pass one of them."
            )
        if self.recording is not None:
            given = {"--workload": self.workload, "--profile": self.profile}
            others = [f"{name} {value}" for name, value in given.items() if value is not None]
            if self.compute == "real":
                others.append("--compute real")
            if others:
                raise ConfigurationError(
                    f"--recording {self.recording} says which model and how long it computes, and so does "
                    f"{', '.join(others)}. Leave out one of them."
                )
        if self.compute == "real" and (self.profile is not None or self.compute_s is not None):
            raise ConfigurationError(
                "--profile and --compute-s say how long timed compute sleeps; with --compute real nothing does. "
                "Drop them, or pass --compute timed."
            )
        sides = ("ours", *parse_sides(self.vs, "--vs"))
        if "none" in sides:
            raise ConfigurationError(
                "--vs none does not synchronize the ranks, so its steps cannot be compared. Computing "
                "alone is always measured. Leave it out."
            )
        if self.rounds < 2 or self.steps < 1:  # refused before a script is run
            StepConfig("tiny", sides, self.rounds, self.steps, baseline=1)
        profile = self._profile() if self.compute == "timed" else None
        workload = (
            profile.workload if self.recording is not None and profile else self.workload or DEFAULT_WORKLOAD
        )
        return StepConfig(workload, sides, self.rounds, self.steps, profile, self.scale, baseline=1)

    def _profile(self) -> Profile:
        workload = self.workload or DEFAULT_WORKLOAD
        if self.recording is not None:
            is_script = self.recording.suffix == ".py"
            load = record_script(self.recording, (), _RECORDED_STEPS) if is_script else None
            profile = Profile.of_recording(load or RecordedWorkload.load(self.recording))
        elif self.profile is not None:
            profile = Profile.load(self.profile, workload)
        else:
            profile = default_profile(workload)
        if self.compute_s is None:
            return profile
        return profile.taking(quantities.seconds(self.compute_s, "--compute-s", is_bare_possible=True))


def bench_step(options: StepOptions, place: Ranks, folder: Path, as_json: bool) -> Report:
    """Measure, check, publish.

    Raises:
        ConfigurationError: Something asked for is not possible; nothing was started.
        WrongAnswerError: A side's ranks disagree, or its mean is wrong.
    """
    config = options.config()
    check_memory(config, place.num_ranks, available_bytes() or None)
    prepared = ReportFolder.prepare(folder)
    load_before = load_average()
    with place as ranks:
        outcome = run_step(config, ranks)
        result = report(config, outcome, ranks, load_before)
    publish(result, prepared.path, as_json)
    draw(result.record(), figure_path(result, prepared.path))
    return result


def run_step(config: StepConfig, ranks: Ranks) -> StepOutcome:
    """Measure one configuration on ranks that are there already, and check that all answers are right."""
    title = f"{config.workload} on {ranks.num_ranks} ranks: {', '.join(config.side_names)}"
    outcome = ranks.run(measure, config, title, ENVIRONMENTS[Allocator.KEEP])[0]
    check(outcome)
    return outcome


def bench_allreduce(
    sizes: str, vs: str, rounds: int, place: Ranks, folder: Path, as_json: bool, *, explain: bool = False
) -> Report:
    """Measure all-reduces, check their sums, publish; say which algorithms ours took if asked to `explain`.

    Raises:
        ConfigurationError: Something asked for is not possible; nothing was started.
        WrongAnswerError: A side's sum is wrong.
    """
    config = ReduceConfig(parse_reduce_sides(vs), parse_sizes(sizes), rounds)
    prepared = ReportFolder.prepare(folder)
    load_before = load_average()
    with place as ranks:
        measured = run_launches(config, ranks)
        choices = allreduce_report.explain(config, ranks) if explain else ()
        result = allreduce_report.report(config, measured, ranks, load_before, choices)
    publish(result, prepared.path, as_json)
    allreduce_report.draw(result.record(), figure_path(result, prepared.path))
    return result


def bench_profile(workload: str, out: Path, device: str, steps: int) -> Profile:
    """Record a profile and write it.

    Raises:
        ConfigurationError: Something asked for is not possible; nothing was started.
    """
    make_workload(workload)
    check_recordable(device, steps)
    check_output(out, "--out")
    with progress_bar(f"profile of {workload} on {device}") as show:
        profile = record(workload, device, steps, show)
    profile.save(out)
    return profile


def workload_rows() -> list[dict[str, Any]]:
    """Return the workloads: their sizes, and how long timed compute takes by default."""
    rows = []
    for name in WORKLOADS:
        profile = default_profile(name)
        shapes = [shape for layer in profile.layers for shape in layer.shapes]
        rows.append(
            {
                "workload": name,
                "tensors": len(shapes),
                "parameters": sum(math.prod(shape) for shape in shapes),
                "compute_s": profile.forward_s + profile.backward_s,
                "from": "published" if name in PUBLISHED else "operations",
                "source": profile.source,
            }
        )
    return rows


def needed_bytes(config: StepConfig, num_ranks: int) -> float:
    """Return about how much memory all ranks of a run take together: an estimate, before anything starts."""
    copies = _ACTIVE
    for name in ("none", *config.side_names):
        side = SIDES[name]
        copies += _WAITING[side.family] + _HOOK.get(side.hook or "", 0.0)
        copies += _REAL if config.profile is None else 0.0
    return num_ranks * (copies * config.gradient_bytes + _MARGIN_BYTES)


def check_memory(config: StepConfig, num_ranks: int, available: float | None) -> None:
    """Refuse a run that would not fit; the kernel's answer would be SIGKILL.

    Raises:
        ConfigurationError: The ranks do not fit; it has the numbers, and what would fit.
    """
    needed = needed_bytes(config, num_ranks)
    if available is None or needed <= available:
        return
    advice = "fewer sides or ranks"
    if config.profile is not None:
        least = max(2.0, config.scale * needed / available)
        advice = (
            f"--scale {least:.0f} (it divides the gradients' bytes; divide --rate as well to keep the proportions), "
            f"or {advice}"
        )
    raise ConfigurationError(
        f"{num_ranks} ranks of {config.workload} with {len(config.side_names)} sides need about {needed / 1e9:.1f} GB "
        f"of memory, and {available / 1e9:.1f} GB are available. Pass {advice}."
    )

"""Report of `paceline bench step`: a row for each side, the limit next to it, and a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline_lab.bench.limit import StepLimit, backward_and_communication_s, ring_bytes_per_rank
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.ranks import Ranks
from paceline_lab.bench.sides import SIDES, StepTimes, labels, shown
from paceline_lab.bench.step import StepConfig, StepOutcome, per_round
from paceline_lab.bench.timed_model import scaled
from paceline_lab.report.figures import draw_figure, show_ratio
from paceline_lab.report.look import look_of, workload_name
from paceline_lab.report.panels import STEP_TIME, Bars, bars_of
from paceline_lab.report.publication import Report
from paceline_lab.report.summary import Summary, ratios, slowest_rank

_NOISE = 0.1  # of a step without overlap
_SLEEP_S = 0.02  # that a few hundred sleeps may take too long
PHASES = ("forward_s", "backward_s", "optimizer_s")
COLUMNS = ("side", "step ms", "ratio", "beyond computing ms", "of ideal overlap", "error of the mean")


@dataclass(frozen=True)
class SideSummary:
    """One side over all rounds.

    Attributes:
        step_s: Mean of a round's steps, each the slowest rank's.
        ratio: Ratio to the baseline, round by round.
        exposed_s: Step less computing alone, round by round.
        realised: Share of the ideal overlap, round by round.
        error: Distance from the exact mean, relative; None where it is not known.
        bucket_bytes: Bytes of the buckets in the order of launch.
    """

    step_s: Summary
    ratio: Summary
    exposed_s: Summary
    realised: Summary
    error: float | None
    bucket_bytes: tuple[int, ...]


@dataclass(frozen=True)
class StepFindings:
    """The limit, and the summary of each side.

    Attributes:
        limit: Limit of a step from the medians of what was measured alone.
        link_s: Bytes per rank over the slowest link's rate; None without a rate.
        reachable_s: Least step of any implementation, which cannot hide what is ready last; None if it is unknown.
        bytes_per_rank: Bytes that each rank sends in a ring.
        sides: Summaries by label.
        disturbed: Why the measured parts contradict each other; empty if they do not.
    """

    limit: StepLimit
    link_s: float | None
    reachable_s: float | None
    bytes_per_rank: float
    sides: Mapping[str, SideSummary]
    disturbed: str = ""

    @property
    def link_ideal_s(self) -> float | None:
        """The ideal step if communication ran at the link's rate."""
        if self.link_s is None:
            return None
        limit = self.limit
        return limit.forward_s + max(limit.backward_s, self.link_s) + limit.optimizer_s


def findings(config: StepConfig, outcome: StepOutcome, ranks: Ranks) -> StepFindings:
    """Summarise; sides are compared within a round."""
    alone = [_phase_rounds(outcome.alone, phase, config) for phase in PHASES]
    communication = per_round(slowest_rank(outcome.communication_s), 1)
    limits = [
        StepLimit(forward, backward, communicating, optimizer)
        for forward, backward, optimizer, communicating in zip(*alone, communication, strict=True)
    ]
    names = [shown(label) for label in labels([side.name for side in outcome.sides])]
    steps = {name: _rounds(side.per_rank, config) for name, side in zip(names, outcome.sides, strict=True)}
    base = steps[names[config.baseline]]
    num_bytes = ring_bytes_per_rank(ranks.num_ranks, config.gradient_bytes)
    limit = StepLimit(*(Summary.of(x).median for x in (alone[0], alone[1], communication, alone[2])))
    found = StepFindings(
        limit=limit,
        reachable_s=_reachable_s(config, limit),
        link_s=num_bytes / ranks.rate_bytes_per_s if ranks.rate_bytes_per_s else None,
        bytes_per_rank=num_bytes,
        sides={
            name: SideSummary(
                Summary.of(steps[name]),
                Summary.of(ratios(steps[name], base)),
                Summary.of([step - x.compute_s for step, x in zip(steps[name], limits, strict=True)]),
                Summary.of([x.realised(step) for step, x in zip(steps[name], limits, strict=True)]),
                side.error,
                side.bucket_bytes,
            )
            for name, side in zip(names, outcome.sides, strict=True)
        },
    )
    return replace(found, disturbed=_disturbed(config, found))


def _disturbed(config: StepConfig, found: StepFindings) -> str:
    """Say which result cannot be true; empty if all can.

    A step cannot be shorter than its computing. With the job's own group and all bytes, it cannot be shorter than ideal
    overlap either. What is measured beyond a tenth of the step is no noise of an idle machine.
    """
    limit = found.limit
    noise_s = _NOISE * limit.no_overlap_s
    for name, side_name in zip(found.sides, config.side_names, strict=True):
        step_s = found.sides[name].step_s.median
        if step_s < limit.compute_s - noise_s:
            return f"a step of {name} took {step_s * 1e3:.1f} ms, and computing alone {limit.compute_s * 1e3:.1f} ms"
        side = SIDES[side_name]
        sends_all = side.backend is None and not side.hook and "compression" not in side.arguments
        if sends_all and step_s < limit.ideal_s - noise_s:
            return (
                f"a step of {name} took {step_s * 1e3:.1f} ms, and the ideal is {limit.ideal_s * 1e3:.1f} ms"
            )
    if config.profile is not None:
        given_s = config.profile.forward_s + config.profile.backward_s + config.profile.optimizer_s
        if limit.compute_s > given_s + max(_NOISE * limit.no_overlap_s, 0.25 * given_s, _SLEEP_S):
            return f"layers that sleep for {given_s * 1e3:.1f} ms took {limit.compute_s * 1e3:.1f} ms"
    return ""


def _reachable_s(config: StepConfig, limit: StepLimit) -> float | None:
    profile = config.profile
    if profile is None:
        return None
    slower = limit.backward_s / profile.backward_s if profile.backward_s else 1.0
    layers = [
        (layer.backward_s * slower, sum(4 * math.prod(scaled(shape, config.scale)) for shape in layer.shapes))
        for layer in reversed(profile.layers)
    ]
    return limit.forward_s + backward_and_communication_s(layers, limit.communication_s) + limit.optimizer_s


def _rounds(per_rank: tuple[StepTimes, ...], config: StepConfig) -> list[float]:
    return per_round(slowest_rank([times.totals_s() for times in per_rank]), config.steps_per_turn)


def _phase_rounds(per_rank: tuple[StepTimes, ...], phase: str, config: StepConfig) -> list[float]:
    return per_round(slowest_rank([getattr(times, phase) for times in per_rank]), config.steps_per_turn)


def report(config: StepConfig, outcome: StepOutcome, ranks: Ranks, load_before: float) -> Report:
    """Turn an outcome into rows, notes and JSON."""
    found = findings(config, outcome, ranks)
    compute = "real" if config.profile is None else "timed"
    base = tuple(found.sides)[config.baseline]
    return Report(
        name=f"step-{config.workload}-{ranks.label}-{compute}",
        question=f"How long is a step of {config.workload} on {ranks.num_ranks} ranks ({compute} compute)?",
        columns=tuple(f"ratio to {base}" if column == "ratio" else column for column in COLUMNS),
        rows=tuple(
            _row(name, side, is_disturbed=bool(found.disturbed)) for name, side in found.sides.items()
        ),
        verdicts=(),
        notes=(*_limit_notes(config, found, ranks), *_compute_notes(config), *outcome.notes),
        config=config,
        summaries={
            "compute": compute,
            "disturbed": found.disturbed,
            "limit": {
                **asdict(found.limit),
                "no_overlap_s": found.limit.no_overlap_s,
                "ideal_s": found.limit.ideal_s,
                "bytes_per_rank": found.bytes_per_rank,
                "reachable_s": found.reachable_s,
                "link_s": found.link_s,
                "link_ideal_s": found.link_ideal_s,
            },
            "sides": {name: asdict(side) for name, side in found.sides.items()},
        },
        samples={
            "alone": [asdict(times) for times in outcome.alone],
            "communication_s": list(outcome.communication_s),
            "sides": {
                name: [asdict(times) for times in side.per_rank]
                for name, side in zip(found.sides, outcome.sides, strict=True)
            },
        },
        provenance=collect(ranks.num_ranks, load_before),
        place=ranks.describe(),
    )


def _row(name: str, side: SideSummary, *, is_disturbed: bool) -> tuple[str, ...]:
    """Return a side's row. With disturbed parts, only the ratio: load hits both of its sides alike in every round."""
    error = "" if side.error is None else ("0" if side.error == 0 else f"{side.error:.1e}")
    if is_disturbed:
        return (name, "", side.ratio.text(digits=3), "", "", error)
    return (
        name,
        side.step_s.text(1e3, 1),
        side.ratio.text(digits=3),
        side.exposed_s.text(1e3, 1),
        side.realised.text(),
        error,
    )


def _limit_notes(config: StepConfig, found: StepFindings, ranks: Ranks) -> tuple[str, ...]:
    limit = found.limit
    if found.disturbed:
        words = f"only ratios are shown, because the machine was busy: {found.disturbed}, which cannot be. "
        return (words + "Measure again while it does nothing else, or with more --rounds",)
    measured = (
        f"alone: forward {limit.forward_s * 1e3:.1f}, backward {limit.backward_s * 1e3:.1f}, optimizer "
        f"{limit.optimizer_s * 1e3:.1f}, communication {limit.communication_s * 1e3:.1f} ms; without overlap "
        f"{limit.no_overlap_s * 1e3:.1f}, with an ideal one {limit.ideal_s * 1e3:.1f} ms"
    )
    if found.reachable_s is not None:
        measured += (
            f"; what is ready last cannot be hidden, so no implementation goes below {found.reachable_s * 1e3:.1f} ms, "
            f"{limit.realised(found.reachable_s):.2f} of the ideal overlap"
        )
    size = (
        f"{config.gradient_bytes / 1e6:.1f} MB of float32 gradients; a flat ring sends 2(P-1)/P of them, "
        f"{found.bytes_per_rank / 1e6:.1f} MB per rank"
    )
    if found.link_s is None or found.link_ideal_s is None:
        return measured, f"{size}; no link has a rate here, so the network's limit is not known"
    rate = (ranks.rate_bytes_per_s or 0) * 8e-6
    limit_line = (
        f"limit: {size}, over {rate:,.0f} Mbit/s: {found.link_s * 1e3:.1f} ms (communication alone reached "
        f"{found.link_s / limit.communication_s:.0%} of the rate); an ideal step is then "
        f"{found.link_ideal_s * 1e3:.1f} ms"
    )
    return measured, limit_line


def _compute_notes(config: StepConfig) -> tuple[str, ...]:
    if config.profile is None:
        return ("real compute: ranks and Gloo's threads share the cores, as they would not on accelerators",)
    scaled = f"; gradients divided by {config.scale:g}, times not" if config.scale != 1 else ""
    return (
        f"timed compute: layers sleep, gradients and traffic are real{scaled}; times from: {config.profile.source}",
    )


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw a bar a side, and lines at computing alone, the ideal and no overlap. Returns whether it was drawn.

    Args:
        record: A report of this module, as it is stored.
        path: Gets the picture.
    """
    limit, sides = record["summaries"]["limit"], record["summaries"]["sides"]
    if record["summaries"].get("disturbed"):
        panel = Bars(
            "",
            "step time, divided by the baseline's",
            bars_of({name: side["ratio"] for name, side in sides.items()}, 1.0),
        )
        return draw_figure(path, _finding(record), [panel], _condition(record))
    compute_s = limit["forward_s"] + limit["backward_s"] + limit["optimizer_s"]
    marks = {"computing alone": compute_s}
    if limit["reachable_s"] is None or limit["reachable_s"] < 1.01 * limit["ideal_s"]:
        marks["ideal overlap"] = limit["ideal_s"]
    else:
        marks |= {"ideal overlap": limit["ideal_s"], "lower bound": limit["reachable_s"]}
    marks["no overlap"] = limit["no_overlap_s"]
    bars = bars_of({name: side["step_s"] for name, side in sides.items()}, 1e3)
    panel = Bars("", STEP_TIME, bars, {name: 1e3 * mark for name, mark in marks.items()})
    return draw_figure(path, _finding(record), [panel], _condition(record))


def _finding(record: Mapping[str, Any]) -> str:
    sides = record["summaries"]["sides"]
    names = list(sides)
    base, workload = names[record["config"]["baseline"]], workload_name(record["config"]["workload"])
    ours = next((name for name in names if name.startswith(("paceline", "ours"))), names[0])
    ratio = sides[ours]["ratio"]["median"]
    whose = f"{look_of(base).name}'s"
    words = f"A step of {workload} with {look_of(ours).name} is {show_ratio(ratio, whose)}"
    best = min(names, key=lambda name: sides[name]["ratio"]["median"])
    if best not in (ours, base, f"{ours} (again)"):
        words += f"; with {look_of(best).name} it is {show_ratio(sides[best]['ratio']['median'], whose)}"
    return words


def _condition(record: Mapping[str, Any]) -> str:
    place, summaries = record["place"], record["summaries"]
    if "hosts x ranks" in place:
        hosts, ranks = place["hosts x ranks"].split(" x ")
        rate = "no rate" if place["rate"].startswith("no") else place["rate"]
        each = "one rank" if ranks == "1" else f"{ranks} ranks"
        where = f"{hosts} emulated hosts with {each} each, links: {rate}"
    else:
        where = f"{place['ranks']} ranks on one host"
    computing = {
        "timed": "layers sleep for their published time, gradients and traffic are real",
        "real": "layers compute, on cores that communication takes part of",
    }[summaries["compute"]]
    megabytes = summaries["limit"]["bytes_per_rank"] / 1e6
    repeated = any("(again)" in name for name in summaries["sides"])
    twice = " (again): the same once more, to show the noise." if repeated else ""
    size = f"A ring sends {megabytes:,.0f} MB per rank and step."
    return f"{where}; {computing}. {size} Medians; whiskers: quartiles.{twice}"

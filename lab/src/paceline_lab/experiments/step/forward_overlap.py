"""Measure how much shorter a step is whose gradients the next forward hides as well.

    torch            torch's DistributedDataParallel: backward hides communication
    deepspeed        DeepSpeed, ZeRO stage 0, which reduces after backward
    ours             Paceline: backward hides communication
    ours-forward     Paceline with overlap_forward, the optimizer through paceline.optim.overlap
    none             without data parallelism: a rank's computation

Timed compute sleeps (any number of ranks fits on a few cores), real compute is a workload's own. Gradients and their
traffic are real, on the hosts of an emulated cluster. All sides live in the same processes and alternate.

A turn is several consecutive steps without a barrier between them. It ends when the last gradient has arrived and the
last parameter has been stepped. So the last step pays for what is put off into the next one (the drain). The step in
the steady state is the median time from one step's beginning to the next one's. The first step of each turn does not
count: no communication was put off into it.

`least` is a lower bound for any order of sending (`planning.forward_overlap.least_step_s`). `least without` is the same
if backward alone hides communication. Both use the link's rate less headers (5 %) and a ring's bytes, 2 (P-1)/P. Of
real compute only the larger of computation and communication is known.

`--ratio 1` divides the gradients so that sending them takes as long as backward. `--slow-rank 1.15 --jitter 0.2` tests
whether a plan made for even ranks still gains where they are not. The side `deepspeed` needs DeepSpeed installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigurationError
from paceline_lab.bench.layer_profile import default_profile
from paceline_lab.bench.limit import ring_bytes_per_rank
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.ranks import Ranks
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    ComputeS,
    Hosts,
    Quick,
    Rate,
    ReportFolder,
    Rounds,
    Steps,
)
from paceline_lab.experiments.runner import cluster_or_loopback, conclude
from paceline_lab.experiments.step.forward_overlap_floor import least_step_s, step_without_s
from paceline_lab.experiments.step.forward_overlap_sides import (
    ALONE,
    FORWARD,
    Config,
    SideOutcome,
    measure,
    parse_names,
)
from paceline_lab.report.figures import draw_figure, show_ratio
from paceline_lab.report.look import look_of
from paceline_lab.report.panels import STEP_TIME, Bars, bars_of
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary

PAYLOAD_RATIO = 0.95
TARGET_TO_TORCH = 0.82  # ResNet-50 on 4 hosts behind 1 Gbit/s
TARGET_NO_SLOWER = 1.02
TARGET_TO_LEAST = 1.05


@dataclass(frozen=True)
class Floor:
    """A lower bound of a step for any order of sending, in seconds, and its parts.

    Attributes:
        computation_s: Forward, backward and the optimizer of the slowest rank.
        communication_s: All gradients' way through the link.
        least_s: The floor.
        without_s: The floor if backward alone hides communication; None: not known.
    """

    computation_s: float
    communication_s: float
    least_s: float
    without_s: float | None

    @property
    def words(self) -> str:
        """Return how it is derived."""
        larger_s = max(self.computation_s, self.communication_s)
        text = (
            f"least {self.least_s * 1e3:.0f} ms: the larger of computation {self.computation_s * 1e3:.0f} and "
            f"communication {self.communication_s * 1e3:.0f} ms, and {(self.least_s - larger_s) * 1e3:.0f} that no "
            "order can hide"
        )
        if self.without_s is None:
            return text
        return f"{text}; least without forward overlap {self.without_s * 1e3:.0f} ms"


def floor_of(config: Config, place: Ranks, outcomes: Sequence[SideOutcome] = ()) -> Floor | None:
    """Derive it from the profile, or from the side that only computes; None where nothing is known."""
    if place.rate_bytes_per_s is None:
        return None
    sent = ring_bytes_per_rank(place.num_ranks, config.num_bytes)
    reduced_per_s = PAYLOAD_RATIO * place.rate_bytes_per_s * config.num_bytes / sent
    communication_s = config.num_bytes / reduced_per_s
    if config.profile is not None:
        layers, optimizer_s = config.layers(), config.profile.optimizer_s
        computation_s = sum(layer.forward_s + layer.backward_s for layer in layers) + optimizer_s
        return Floor(
            computation_s,
            communication_s,
            least_step_s(layers, optimizer_s, reduced_per_s),
            step_without_s(layers, optimizer_s, reduced_per_s),
        )
    for side in outcomes:
        if side.name == ALONE:
            computation_s = Summary.of(side.steady_s).median
            return Floor(computation_s, communication_s, max(computation_s, communication_s), None)
    return None


def at_ratio(config: Config, place: Ranks, ratio: float) -> Config:
    """Return the same with gradients that take `ratio` times as long as backward.

    Raises:
        ConfigurationError: The link has no rate, or the whole gradients do not take that long.
    """
    whole = floor_of(config, place)
    if whole is None or config.profile is None or ratio <= 0:
        raise ConfigurationError(
            f"--ratio {ratio} is communication over backward: it needs --hosts, --rate and --compute timed, and is "
            "above 0."
        )
    scale = whole.communication_s / (ratio * config.profile.backward_s)
    if scale < 1:
        raise ConfigurationError(
            f"--ratio {ratio}: all gradients take {whole.communication_s:.2f} s, which is {ratio * scale:.2f} times "
            "backward. Pass a smaller ratio, a slower --rate or less --compute-s."
        )
    return replace(config, scale=scale)


def report(config: Config, outcomes: Sequence[SideOutcome], place: Ranks, suffix: str) -> Report:
    """Turn the outcomes into one row a side."""
    floor = floor_of(config, place, outcomes)
    first = Summary.of(outcomes[0].steady_s).median
    first_turn = Summary.of(outcomes[0].turn_s).median
    rows, verdicts, summaries = [], [], {}
    for side in outcomes:
        steady, turn = Summary.of(side.steady_s), Summary.of(side.turn_s)
        summaries[side.name] = {
            "steady_s": asdict(steady),
            "turn_s": asdict(turn),
            "to_first": steady.median / first,
            "to_least": None if floor is None else steady.median / floor.least_s,
            "is_on": side.is_on,
        }
        rows.append(
            (
                side.name,
                steady.text(1e3, 0),
                f"{steady.median / first:.2f}",
                turn.text(1e3, 0),
                f"{turn.median / first_turn:.2f}",
                "-" if floor is None else f"{steady.median / floor.least_s:.3f}",
                "-" if side.is_on is None else ("on" if side.is_on else "off"),
            )
        )
        if side.name == FORWARD:
            is_promised = (config.workload, place.label, suffix) == ("resnet50", "4x1-1000mbit", "")
            target = TARGET_TO_TORCH if is_promised else TARGET_NO_SLOWER
            verdicts.append(Verdict(f"step / {outcomes[0].name}'s", steady.median / first, target, "x"))
            if floor is not None:
                verdicts.append(Verdict("step / least", steady.median / floor.least_s, TARGET_TO_LEAST, "x"))
    return Report(
        name=f"forward_overlap-{config.workload}-{place.label}{suffix}",
        question="How much shorter is a step whose gradients the next forward hides as well?",
        columns=("side", "step ms", "/ first", "with drain ms", "/ first", "/ least", "overlap"),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=_notes(config, outcomes, floor),
        config=config,
        summaries={
            "sides": summaries,
            "least_s": None if floor is None else floor.least_s,
            "least_without_s": None if floor is None else floor.without_s,
            "floor": None if floor is None else asdict(floor),
        },
        samples={side.name: asdict(side) for side in outcomes},
        provenance=collect(place.num_ranks),
        place=place.describe(),
    )


def _notes(config: Config, outcomes: Sequence[SideOutcome], floor: Floor | None) -> tuple[str, ...]:
    what, how = f"{config.num_bytes / 1e6:.1f} MB of gradients", "ranks compute"
    if config.profile is not None:
        compute_s = config.profile.forward_s + config.profile.backward_s
        what += (
            f", {compute_s * 1e3:.0f} ms of compute, {config.profile.optimizer_s * 1e3:.0f} ms of optimizer"
        )
        how = "computation sleeps"
    notes = [
        f"{what}; {config.num_steps} consecutive steps a turn, the first of which is not in the steady state",
        f"{how}; gradients and traffic are real; no side has a barrier within a turn",
    ]
    if config.is_uneven:
        notes.append(
            f"the last rank takes {config.slow_rank_ratio:g} times as long; every layer's time varies by up to "
            f"{config.jitter_ratio:.0%}"
        )
    if floor is not None:
        notes.append(floor.words)
    for side in outcomes:
        for word, gain in (("predicted, without the optimizer", side.predicted), ("seen", side.seen)):
            if gain is not None:
                with_ms, without_ms = gain["with_s"] * 1e3, gain["without_s"] * 1e3
                notes.append(
                    f"{side.name} {word}: {with_ms:.0f} ms a step, {without_ms:.0f} ms without overlap"
                )
    return tuple(notes)


def main(
    workload: str = "resnet50",
    sides: Annotated[
        str, typer.Option(help="Sides, comma-separated: torch, deepspeed, `ours`, `ours-forward`, none.")
    ] = "torch,ours,ours-forward",
    compute: Annotated[str, typer.Option(help="timed: layers sleep; real: they compute.")] = "timed",
    hosts: Hosts = 4,
    rate: Rate = "1Gbit",
    cpu: Annotated[
        str,
        typer.Option(
            help="Number of cores of a host: 0.4 or 40% is less than half a core.", show_default="all"
        ),
    ] = "",
    compute_s: ComputeS = 0.9,
    scale: Annotated[float, typer.Option(help="Divisor of the gradients' bytes.")] = 1.0,
    ratio: Annotated[
        float | None, typer.Option(help="Communication divided by backward, instead of --scale.")
    ] = None,
    rounds: Rounds = 3,
    steps: Steps = 8,
    always: Annotated[
        bool, typer.Option("--always", help="Use forward overlap even if it does not pay.")
    ] = False,
    slow_rank: Annotated[
        float, typer.Option(help="Computing time of the last rank, divided by that of the others.")
    ] = 1.0,
    jitter: Annotated[float, typer.Option(help="Largest relative deviation of each layer's time.")] = 0.0,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Compare steps with and without forward overlap."""
    if compute not in ("timed", "real"):
        raise ConfigurationError(f"--compute {compute} is neither timed nor real.")
    if quick:
        compute_s, scale, ratio, rounds, steps, always, hosts = 0.02, 64.0, None, 2, 3, True, 0
    profile = default_profile(workload).taking(compute_s) if compute == "timed" else None
    names = parse_names(sides)
    config = Config(workload, profile, names, rounds, steps, scale, always, slow_rank, jitter, quick)
    place = cluster_or_loopback(hosts, rate, cpu)
    if ratio is not None:
        config = at_ratio(config, place, ratio)
    words = [compute * (compute == "real"), f"ratio{ratio:g}" if ratio else "", "uneven" * config.is_uneven]
    words += ["forced" * (always and not quick), "quick" * quick]
    suffix = "".join(f"-{word}" for word in words if word)
    with place as where:
        outcomes = where.run(measure, config, f"forward overlap, {workload}", ENVIRONMENTS[Allocator.KEEP])[0]
    for side in outcomes:
        side.check()
    result = report(config, outcomes, place, suffix)
    conclude(result, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each side's steps and the least that is possible, from a stored report."""
    summaries = record["summaries"]
    steps = {
        side: Summary(**found["steady_s"]) for side, found in summaries["sides"].items() if side != ALONE
    }
    first, last = next(iter(steps)), list(steps)[-1]
    marks = {} if summaries["least_s"] is None else {"lower bound": 1e3 * summaries["least_s"]}
    panel = Bars(
        "",
        STEP_TIME,
        bars_of({side: asdict(step) for side, step in steps.items()}, 1e3),
        marks,
    )
    words = show_ratio(steps[last].median / steps[first].median, f"{look_of(first).name}'s")
    note = "; ".join(record["notes"][:2])
    if marks:
        note += ". Lower bound: no order of sending allows a shorter step"
    title = f"With {look_of(last).option} a step is {words}"
    if summaries["sides"][last]["is_on"] is False:
        title = f"Forward overlap stays off; a step with Paceline is {words}"
    return draw_figure(path, title, [panel], f"{note}.")

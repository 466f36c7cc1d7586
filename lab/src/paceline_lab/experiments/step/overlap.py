"""Measure which share of the ideal overlap of backward and communication is realised.

    no overlap  = forward + backward + communication + optimizer
    ideal       = forward + max(backward, communication) + optimizer
    realised    = (no overlap - measured) / (no overlap - ideal)

Computation is a timed sleep in every layer's forward and backward, so it does not compete with Gloo for two cores.
Gradients and their traffic are real. On plain loopback, communication itself is cores copying, and competes with the
copies of gradients. `--rate 1Gbit` puts each rank on a host of an emulated cluster. Forward, backward and optimizer are
measured alone (the same module, unwrapped). Communication is measured alone by reducing buffers of the side's own
bucket sizes, all launched at once. All of that alternates with the measured steps, round by round.

The ideal cannot be reached, since the gradients that are reduced last become ready last. `bound` is the realised share
of a perfect implementation with these buckets, on a network that serves them one after another. The implementation
loses what is missing to the bound. The bucket sizes lose the rest.

Source: Li et al., VLDB 2020, figure 6, in which torch realises 0.84 to 0.96 of the ideal gain. `--caps`
sweeps bucket sizes (figures 7 and 8).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from paceline.errors import ConfigurationError
from paceline.quantities import rate, show_rate
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator, turns
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import choose_place, gather
from paceline_lab.bench.sides import bucket_bytes, labels, parse_sides, wrap
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, Ranks, ReportFolder, Rounds, Sides
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import look_of
from paceline_lab.report.panels import Line, Lines
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary, slowest_rank

WARM_UP_STEPS = 4
TARGET_SHARE = 0.95
DEFAULT_CAP = "default"


@dataclass(frozen=True)
class Config:
    """The settings of a measurement: every ratio with every cap."""

    side_names: tuple[str, ...]
    comm_to_backward_ratios: tuple[float, ...]
    caps: tuple[str, ...]  # MiB, or "default"
    num_layers: int
    floats_per_layer: int
    num_rounds: int
    rate: str | None  # of the wire; None: as fast as loopback


class _Sleep(torch.autograd.Function):
    """The identity on `x`; takes time, and gives `weight` a gradient of its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, layer: "SleepLayer") -> Tensor:
        ctx.layer = layer
        time.sleep(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.layer.backward_s)
        return gradients[0], ctx.layer.gradient.clone(), None


class SleepLayer(nn.Module):
    """One weight, and the seconds that its forward and backward take."""

    def __init__(self, num_floats: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_floats))
        self.gradient = torch.randn(num_floats)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, later."""
        result: Tensor = _Sleep.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return result


def make_model(config: Config, backward_s: float) -> nn.Sequential:
    """Return layers whose backwards sleep `backward_s` together, and whose forwards sleep half of that."""
    per_layer_s = backward_s / config.num_layers
    return nn.Sequential(
        *[SleepLayer(config.floats_per_layer, per_layer_s / 2, per_layer_s) for _ in range(config.num_layers)]
    )


@dataclass
class Phases:
    """Wall seconds of each timed step of one subject."""

    forward_s: list[float]
    backward_s: list[float]
    optimizer_s: list[float]


class Trainer:
    """A model with plain SGD; times its phases."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        self.phases = Phases([], [], [])

    def step(self, timed: bool = True) -> None:
        """Run one step behind a barrier."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(torch.zeros(1, requires_grad=True)).sum()
        after_forward = time.perf_counter()
        loss.backward()
        after_backward = time.perf_counter()
        self.optimizer.step()
        if timed:
            self.phases.forward_s.append(after_forward - start)
            self.phases.backward_s.append(after_backward - after_forward)
            self.phases.optimizer_s.append(time.perf_counter() - after_backward)


class Communication:
    """Buffers of given sizes that are reduced all at once; times that."""

    def __init__(self, bucket_bytes: Sequence[int]) -> None:
        self.buffers = [torch.zeros(num_bytes // 4) for num_bytes in bucket_bytes]
        self.times_s: list[float] = []

    def step(self, timed: bool = True) -> None:
        """Reduce behind a barrier."""
        dist.barrier()
        start = time.perf_counter()
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in self.buffers]:
            work.wait()
        if timed:
            self.times_s.append(time.perf_counter() - start)


@dataclass(frozen=True)
class SideOutcome:
    """One side in one case; a value per timed step, of the slowest rank."""

    bucket_bytes: tuple[int, ...]
    step_s: list[float]
    communication_s: list[float]  # its buckets alone


@dataclass(frozen=True)
class CaseOutcome:
    """One ratio and one cap."""

    comm_to_backward_ratio: float
    cap: str
    forward_s: list[float]  # alone
    backward_s: list[float]
    optimizer_s: list[float]
    sides: tuple[SideOutcome, ...]


def measure(config: Config, tell: TellProgress) -> list[CaseOutcome]:
    """Run all cases. Collective; every rank returns the same."""
    reference_s = _calibrate(config)
    cases = [(ratio, cap) for ratio in config.comm_to_backward_ratios for cap in config.caps]
    outcomes = []
    for num_done, (ratio, cap) in enumerate(cases):
        outcomes.append(_measure_case(config, ratio, cap, reference_s / ratio))
        tell((num_done + 1) / len(cases))
    return outcomes


def _calibrate(config: Config) -> float:
    """Return seconds of communication, agreed on by all ranks, for choosing how long backward sleeps."""
    communication = Communication([4 * config.floats_per_layer] * config.num_layers)
    for step in range(7):
        communication.step(timed=step >= 2)
    return max(gather(Summary.of(communication.times_s).median))


def _measure_case(config: Config, ratio: float, cap: str, backward_s: float) -> CaseOutcome:
    arguments = {} if cap == DEFAULT_CAP else {"bucket_cap_mb": float(cap)}
    alone = Trainer(make_model(config, backward_s))
    trainers = [
        Trainer(wrap(name, make_model(config, backward_s), **arguments)) for name in config.side_names
    ]
    for trainer in trainers:
        for _ in range(WARM_UP_STEPS):
            trainer.step(timed=False)
    buckets = [bucket_bytes(trainer.model) for trainer in trainers]
    communications = [Communication(sizes) for sizes in buckets]
    subjects: list[Callable[[], None]] = [
        alone.step,
        *[c.step for c in communications],
        *[t.step for t in trainers],
    ]
    for subject in subjects:
        subject()  # the first time of everything is dropped below
    for turn in turns(len(subjects), config.num_rounds):
        subjects[turn.side_index]()
    compute = _slowest(alone.phases)
    return CaseOutcome(
        ratio,
        cap,
        compute.forward_s,
        compute.backward_s,
        compute.optimizer_s,
        tuple(
            SideOutcome(sizes, _totals(_gathered_totals(trainer)), _totals(gather(communication.times_s)))
            for sizes, trainer, communication in zip(buckets, trainers, communications, strict=True)
        ),
    )


def _slowest(phases: Phases) -> Phases:
    per_rank = gather(phases)
    lists = [
        _totals([getattr(mine, name) for mine in per_rank])
        for name in ("forward_s", "backward_s", "optimizer_s")
    ]
    return Phases(*lists)


def _gathered_totals(trainer: Trainer) -> list[list[float]]:
    phases = trainer.phases
    mine = [sum(step) for step in zip(phases.forward_s, phases.backward_s, phases.optimizer_s, strict=True)]
    return gather(mine)


def _totals(per_rank: list[list[float]]) -> list[float]:
    return slowest_rank(per_rank)[1:]


def realised_shares(case: CaseOutcome, side: SideOutcome) -> list[float]:
    """Return, for each round, the share of the possible gain that the side has made (a round's two steps averaged)."""
    forward_s, backward_s, optimizer_s = (
        _per_round(x) for x in (case.forward_s, case.backward_s, case.optimizer_s)
    )
    shares = []
    for forward, backward, comm, optimizer, measured in zip(
        forward_s,
        backward_s,
        _per_round(side.communication_s),
        optimizer_s,
        _per_round(side.step_s),
        strict=True,
    ):
        no_overlap = forward + backward + comm + optimizer
        ideal = forward + max(backward, comm) + optimizer
        shares.append((no_overlap - measured) / (no_overlap - ideal))
    return shares


def _per_round(steps: list[float]) -> list[float]:
    return [(first + second) / 2 for first, second in zip(steps[::2], steps[1::2], strict=True)]


def bound(bucket_bytes: Sequence[int], backward_s: float, communication_s: float) -> float:
    """Return the realised share of a perfect implementation with these buckets (see the file's docstring).

    Gradients become ready evenly over backward; the wire serves one bucket after another, in order, at one rate.
    """
    total_bytes, ready_bytes, wire_free_s = sum(bucket_bytes), 0, 0.0
    for num_bytes in bucket_bytes:
        ready_bytes += num_bytes
        ready_s = backward_s * ready_bytes / total_bytes
        wire_free_s = max(wire_free_s, ready_s) + communication_s * num_bytes / total_bytes
    return (backward_s + communication_s - max(wire_free_s, backward_s)) / min(backward_s, communication_s)


def report(config: Config, cases: list[CaseOutcome], num_ranks: int, quick: bool) -> Report:
    """Turn the cases into one row per case and side."""
    rows, verdicts, summaries = [], [], []
    for case in cases:
        for name, side in zip(labels(config.side_names), case.sides, strict=True):
            share = Summary.of(realised_shares(case, side))
            backward, comm = Summary.of(case.backward_s), Summary.of(side.communication_s)
            limit = bound(side.bucket_bytes, backward.median, comm.median)
            step = Summary.of(side.step_s)
            key = {"comm_to_backward_ratio": case.comm_to_backward_ratio, "cap": case.cap, "side": name}
            summaries.append({**key, "share": asdict(share), "bound": limit, "step_s": asdict(step)})
            sizes = "+".join(f"{num_bytes / 2**20:.0f}" for num_bytes in side.bucket_bytes[:8]) + (
                "+.." if len(side.bucket_bytes) > 8 else ""
            )
            times = (f"{backward.median * 1e3:.0f}", f"{comm.median * 1e3:.0f}", f"{step.median * 1e3:.0f}")
            rows.append(
                (
                    f"{case.comm_to_backward_ratio:g}",
                    case.cap,
                    name,
                    *times,
                    sizes,
                    f"{limit:.2f}",
                    share.text(),
                )
            )
            if name.startswith("ours"):
                verdicts.append(
                    Verdict(
                        f"{name}, comm/backward {case.comm_to_backward_ratio:g}, cap {case.cap}",
                        share.median,
                        TARGET_SHARE,
                        "of ideal",
                    )
                )
    return Report(
        name=f"overlap-{num_ranks}ranks{_suffix(config)}" + ("-quick" if quick else ""),
        question="Which share of the ideal overlap is realised?",
        columns=(
            "comm/backward",
            "cap MiB",
            "side",
            "backward ms",
            "comm ms",
            "step ms",
            "buckets MiB",
            "bound",
            "realised",
        ),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=(
            "computation sleeps: it takes no core from Gloo, as a GPU would not; gradients and traffic are real",
            f"hosts of an emulated cluster, each behind {config.rate}: no added latency and no loss"
            if config.rate
            else "loopback: no latency and no loss; both directions share what two cores can copy",
        ),
        config=config,
        summaries={"cases": summaries},
        samples={"cases": [asdict(case) for case in cases]},
        provenance=collect(num_ranks),
    )


def _suffix(config: Config) -> str:
    return (f"-{config.rate.lower()}" if config.rate else "") + ("-caps" if len(config.caps) > 1 else "")


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw the realised share of the ideal overlap, by proportion of communication or by bucket cap."""
    config, cases = record["config"], record["summaries"]["cases"]
    by_cap = len(config["caps"]) > 1
    points: dict[tuple[str, float], list[tuple[float, Summary]]] = {}
    for case in cases:
        if by_cap and case["cap"] == DEFAULT_CAP:
            continue
        x = float(case["cap"]) if by_cap else case["comm_to_backward_ratio"]
        key = case["side"], case["comm_to_backward_ratio"] if by_cap else 0.0
        points.setdefault(key, []).append((x, Summary(**case["share"]).times(100)))
    lines = [
        Line.of(look_of(side).name + (f", {ratio:g}" if ratio else ""), found, look_of(side).color)
        for (side, ratio), found in points.items()
    ]
    xs = dict.fromkeys(x for found in points.values() for x, _ in found)
    panel = Lines(
        "",
        "bucket cap, MiB" if by_cap else "communication over backward: how much there is to hide",
        "% of the ideal overlap",
        lines,
        {x: f"{x:g}" if by_cap else f"{x:g} x" for x in xs},
        log_x=True,
        top=100,
        levels={} if by_cap else {"target": 100 * TARGET_SHARE},
    )
    worst = {side: min(s.median for _, s in found) for (side, _), found in points.items()}
    words = ", ".join(
        f"{look_of(side).name} hides at least {share:.0f} %"
        for side, share in sorted(worst.items(), key=lambda x: -x[1])
    )
    where = (
        f"emulated hosts behind {show_rate(rate(config['rate'], '--rate'))}" if config["rate"] else "loopback"
    )
    return draw_figure(
        path,
        f"Of the communication that could be hidden behind backward, {words}",
        [panel],
        f"{record['provenance']['num_ranks']} ranks, {where}; layers sleep. Medians, in the band of their quartiles.",
    )


def _floats(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError(f"{text!r} is not a list of numbers such as 0.5,1,2.") from error


def main(
    sides: Sides = "torch,ours",
    ranks: Ranks = 2,
    rounds: Rounds = 12,
    ratios: Annotated[
        str, typer.Option(help="Communication divided by backward, comma-separated.")
    ] = "0.5,1,2",
    caps: Annotated[
        str, typer.Option(help="Bucket caps in MiB, comma-separated; 'default' leaves the argument out.")
    ] = DEFAULT_CAP,
    layers: Annotated[int, typer.Option(min=2)] = 96,
    floats_per_layer: Annotated[int, typer.Option(min=1)] = 2**18,
    rate: Annotated[
        str | None,
        typer.Option(help="Rate of each host's link on an emulated cluster, for example 1Gbit."),
    ] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Compare how much communication the sides hide behind backward."""
    cap_names = tuple(cap.strip() for cap in caps.split(","))
    _floats(",".join(cap for cap in cap_names if cap != DEFAULT_CAP) or "0")
    config = Config(parse_sides(sides), _floats(ratios), cap_names, layers, floats_per_layer, rounds, rate)
    place = choose_place(None, ranks_per_host=ranks) if rate is None else choose_place(ranks, rate=rate)
    if quick:
        config = Config(config.side_names, (1.0,), (DEFAULT_CAP,), 4, 2**10, 2, rate)
    with place as where:
        cases = where.run(measure, config, "overlap", ENVIRONMENTS[Allocator.KEEP])[0]
    result = report(config, cases, ranks, quick)
    conclude(result, report_folder, as_json, draw)

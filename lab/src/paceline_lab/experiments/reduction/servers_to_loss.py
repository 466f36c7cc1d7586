"""Measure how soon a training with parameter servers comes down to a loss, where packets are lost.

Workers and servers are hosts of an emulated cluster, behind ports of 64 KiB, so pushes to a server meet there. A small
network learns the digits that Paceline ships: real gradients, real steps of Adam, and nothing sleeps. In the same
processes all sides train the same samples from the same parameters, step by step in turn. A side's clock counts its own
steps: each from its begin on the last rank until its end on the last rank. The result is that clock's time when the
training loss, a mean of 8 steps, first falls to the target. The target is the loss that the worst side reaches within
7/8 of the steps. So a side that needs more steps because gradients were lost pays for them.

    paceline study servers-to-loss --loss 3%
    paceline study servers-to-loss --loss 3% --tcp tuned --servers 2

Each seed is a job of its own, with its own parameters and samples: `--parts FOLDER` keeps what is finished. Over tuned
TCP only the sides that it changes are measured, and two bounds.

Limits: all hosts share this machine's cores, see "busy". DLCP's switches, which drop by priority, are missing:
`priorities` order what a sender sends.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigurationError
from paceline_lab.bench.provenance import collect
from paceline_lab.experiments.datagrams.rank_jobs import TCP
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, PartsFolder, Quick, ReportFolder
from paceline_lab.experiments.reduction.server_jobs import run_workers, told_to_worker
from paceline_lab.experiments.runner import conclude, measured, refuse_unequal
from paceline_lab.experiments.unequal.time_to_loss_outcome import smoothed
from paceline_lab.report.figures import draw_figure, show_ratio
from paceline_lab.report.look import CURVE_COLORS, OURS, look_of
from paceline_lab.report.panels import Bar, Bars
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary, ratios

if TYPE_CHECKING:
    from paceline_lossy import LossyTransport

TORCH, ALL_REDUCE, DATAGRAMS, SERVERS = "torch", "all-reduce", "all-reduce, UDP, exact", "servers"
EXACT, BOUNDED = "servers, UDP, exact", "servers, UDP, 5 %"
OVER_TCP = (TORCH, ALL_REDUCE, SERVERS)
BOUNDS: dict[str, dict[str, Any]] = {
    EXACT: {"bound": 0.0},
    "servers, UDP, 1 %": {"bound": 0.01},
    BOUNDED: {"bound": 0.05},
    "servers, UDP, 10 %": {"bound": 0.1},
    "servers, UDP, 5 %, early": {"bound": 0.05, "deliver": "early"},
    "servers, UDP, 10 %, early": {"bound": 0.1, "deliver": "early"},
    "servers, UDP, 5 %, priorities": {"bound": 0.05, "priorities": True},
    "servers, UDP, 5 %, early, priorities": {"bound": 0.05, "deliver": "early", "priorities": True},
}
SIDES = {
    "cubic": (*OVER_TCP, DATAGRAMS, *BOUNDS),
    "tuned": (*OVER_TCP, EXACT, BOUNDED),
}
PUBLISHED_GAIN = 0.843  # DLCP's most with parameter servers
WARM_UP_STEPS = 2  # whose gradients are thrown away
_PATIENCE_S = 1200.0


@dataclass(frozen=True)
class Job:
    """The training of one seed.

    Attributes:
        num_workers: Hosts with a rank.
        num_servers: Hosts with a server, behind links like the workers'.
        rate: Rate of every host's link.
        loss: Share of packets that each link loses.
        tcp: Key of `rank_jobs.TCP`.
        num_steps: Steps of each side.
        num_samples: Samples of a rank's batch.
        width: Width of two hidden layers.
        seed: Seed of parameters and samples.
    """

    num_workers: int
    num_servers: int
    rate: str
    loss: str
    tcp: str
    num_steps: int
    num_samples: int = 32
    width: int = 256
    seed: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the gradients."""
        widths = (64, self.width, self.width, 10)
        return sum(4 * (a + 1) * b for a, b in itertools.pairwise(widths))


# ---- on a worker's host


@dataclass
class _Trained:
    """The begins and ends of one side's steps on this rank, by this machine's clock, and their losses."""

    begun_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)


class _Trainee:
    """One side on this rank."""

    def __init__(self, side: str, job: Job, addresses: Sequence[str]) -> None:
        import torch
        from torch import nn

        from paceline_lab.bench.sides import wrap
        from paceline_lossy import BoundedLoss
        from paceline_servers import ParameterServers

        torch.manual_seed(job.seed)
        self.network = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, job.width),
            nn.ReLU(),
            nn.Linear(job.width, job.width),
            nn.ReLU(),
            nn.Linear(job.width, 10),
        )
        how: dict[str, Any] = {}
        if side == SERVERS:
            how["reduction"] = ParameterServers(addresses)
        elif side == DATAGRAMS:
            how["reduction"] = BoundedLoss(0.0)
        elif side in BOUNDS:
            how["reduction"] = BoundedLoss(**BOUNDS[side], servers=ParameterServers(addresses))
        self.model: Any = wrap("torch" if side == TORCH else "ours", self.network, **how)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3)
        self.seen = _Trained()

    def step(self, x: Any, y: Any, is_counted: bool) -> None:
        """Train a step; without `is_counted` its gradients are thrown away."""
        from torch.nn import functional

        begun_s = time.perf_counter()
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(x), y)
        loss.backward()
        if not is_counted:
            return
        self.optimizer.step()
        self.seen.begun_s.append(begun_s)
        self.seen.ended_s.append(time.perf_counter())
        self.seen.loss.append(float(loss.detach()))
        losses = getattr(getattr(self.model, "reduction", None), "losses", None)
        self.seen.lost.append(0.0 if losses is None else losses.ratio)


def worker() -> None:
    """A worker's process: train all sides in turn; rank 0 prints, by side, what `_together` returns."""
    import torch
    import torch.distributed as dist

    from paceline_lab.bench.ranks import gather
    from paceline_lab.bench.sides import digest
    from paceline_lab.workloads import load_images
    from paceline_lossy import open_lossy_transport

    told = told_to_worker()
    job = Job(**told["job"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = dist.PrefixStore("steps", dist.distributed_c10d._get_default_store())
    link = open_lossy_transport(store, rank, job.num_workers, timedelta(seconds=300))
    images = load_images("digits")
    x, y = torch.from_numpy(images.train_images).float(), torch.from_numpy(images.train_labels)
    trainees = {side: _Trainee(side, job, told["addresses"]) for side in SIDES[job.tcp]}
    dice = torch.Generator().manual_seed(job.seed)  # the same on every rank
    for number in range(-WARM_UP_STEPS, job.num_steps):
        chosen = torch.randint(len(x), (job.num_workers, job.num_samples), generator=dice)[rank]
        for side in sorted(trainees, reverse=number % 2 == 0):
            _begin_together(link)
            trainees[side].step(x[chosen], y[chosen], number >= 0)
    found = {
        side: _together(gather((trainee.seen, digest(trainee.network.parameters()))))
        for side, trainee in trainees.items()
    }
    if rank == 0:
        print(json.dumps(found), flush=True)
    link.close(5.0)
    dist.barrier()
    dist.destroy_process_group()


def _begin_together(link: LossyTransport) -> None:
    """Wait for all ranks, over datagrams: a barrier over TCP would let some wait for a lost segment."""
    import numpy as np

    from paceline_lossy import Bound

    link.launch(np.zeros(1, np.float32), Bound(0)).wait()


def _together(everyone: Sequence[tuple[_Trained, str]]) -> dict[str, Any]:
    """Return of one side's steps: seconds from the last begin to the last end, mean loss, lost share."""

    def each(name: str, combine: Callable[[Sequence[float]], float]) -> list[float]:
        return [combine(step) for step in zip(*(getattr(seen, name) for seen, _ in everyone), strict=True)]

    begun_s, ended_s = each("begun_s", max), each("ended_s", max)
    return {
        "steps_s": [end - begin for begin, end in zip(begun_s, ended_s, strict=True)],
        "loss": each("loss", lambda losses: sum(losses) / len(losses)),
        "lost": each("lost", max),
        "ranks_equal": len({digest for _, digest in everyone}) == 1,
    }


# ---- the cluster


def measure(job: Job) -> tuple[dict[str, Any], float]:
    """Train one seed; by side what `_together` returns, and how busy this machine was."""
    from paceline_lab.emulation import ClusterSpec

    spec = ClusterSpec.parse(
        hosts=job.num_workers + job.num_servers,
        rate=job.rate,
        loss=job.loss,
        queue="64KiB",  # of a switch's port: pushes meet in a shallow one
        offload=False,
        **TCP[job.tcp],
    )
    found, busy = run_workers(spec, job.num_workers, __name__, {"job": asdict(job)}, _PATIENCE_S)
    refuse_unequal(side for side, trained in found.items() if not trained["ranks_equal"])
    return found, busy


def main(
    loss: Annotated[str, typer.Option(help="Share of packets that each link loses, for example 1%.")] = "1%",
    tcp: Annotated[str, typer.Option(help="TCP of the hosts: cubic or tuned.")] = "cubic",
    workers: Annotated[int, typer.Option(min=2, max=8, help="Number of hosts with a rank.")] = 4,
    servers: Annotated[int, typer.Option(min=1, max=4, help="Number of hosts with a server.")] = 1,
    rate: Annotated[str, typer.Option(help="Rate of each host's link.")] = "100mbit",
    steps: Annotated[int, typer.Option(min=16, help="Number of steps of each training.")] = 40,
    seeds: Annotated[int, typer.Option(min=1, help="Number of trainings of each side.")] = 5,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
    parts: PartsFolder = None,
) -> None:
    """Train with every side, each seed on a cluster of its own."""
    if tcp not in TCP:
        raise ConfigurationError(f"--tcp {tcp!r} must be one of {', '.join(TCP)}.")
    job = Job(workers, servers, rate, loss, tcp, steps)
    if quick:
        job, seeds = Job(2, 1, rate, loss, tcp, 16, num_samples=8, width=32), 1
    jobs = [Job(**asdict(job) | {"seed": seed}) for seed in range(seeds)]
    found = [measured(parts, each, partial(measure, each)) for each in jobs]
    report = _report(job, [trained for trained, _ in found], [busy for _, busy in found], quick)
    conclude(report, report_folder, as_json, draw)


def summarise(trainings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return for each side over the seeds: seconds to the target and to TCP's, steps to it, a step, what was lost."""
    sides = list(trainings[0])
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    steps: dict[str, list[float]] = {side: [] for side in sides}
    for trained in trainings:
        losses = {side: smoothed(trained[side]["loss"]) for side in sides}
        within = len(losses[sides[0]]) * 7 // 8
        target = max(min(loss[:within]) for loss in losses.values())
        for side, loss in losses.items():
            number = next(step for step, value in enumerate(loss) if value <= target) + 1
            steps[side].append(number)
            seconds[side].append(sum(trained[side]["steps_s"][:number]))
    return {
        "seconds": {side: asdict(Summary.of(values)) for side, values in seconds.items()},
        "each": seconds,
        "steps": {side: Summary.of(values).median for side, values in steps.items()},
        "step_ms": {side: 1e3 * Summary.of(_all(trainings, side, "steps_s")).median for side in sides},
        "lost": {side: Summary.of(_all(trainings, side, "lost")).median for side in sides},
        "to_tcp_servers": {
            side: Summary.of(ratios(seconds[side], seconds[SERVERS])).median for side in sides
        },
        "to_exact": {side: Summary.of(ratios(seconds[side], seconds[EXACT])).median for side in sides},
    }


def _all(trainings: Sequence[Mapping[str, Any]], side: str, name: str) -> list[float]:
    return [value for trained in trainings for value in trained[side][name]]


def _report(job: Job, trainings: Sequence[Mapping[str, Any]], busy: Sequence[float], quick: bool) -> Report:
    found = summarise(trainings)
    where = f"{job.num_workers}x{job.num_servers}-{job.loss.removesuffix('%')}-{job.tcp}"
    return Report(
        name=f"servers-to-loss-{where}" + "-quick" * quick,
        question="How soon does a training with parameter servers come down to a loss, where packets are lost?",
        columns=("side", "to the loss, s", "/ TCP servers", "/ exact", "steps", "step ms", "lost, %"),
        rows=tuple(
            (
                side,
                Summary(**seconds).text(),
                f"{found['to_tcp_servers'][side]:.3f}",
                f"{found['to_exact'][side]:.3f}",
                f"{found['steps'][side]:g}",
                f"{found['step_ms'][side]:.0f}",
                f"{100 * found['lost'][side]:.1f}",
            )
            for side, seconds in found["seconds"].items()
        ),
        verdicts=(
            Verdict(
                "time to the loss with a bound of 5 % / over TCP (DLCP's most: 84.3 % faster)",
                found["to_tcp_servers"][BOUNDED],
                round(1 / (1 + PUBLISHED_GAIN), 3),
                "x",
            ),
            Verdict("the same / exact datagrams", found["to_exact"][BOUNDED], 1.0, "x"),
        ),
        notes=(
            (
                f"{job.num_workers} workers, {job.num_servers} servers, {job.rate}, loss {job.loss}, TCP {job.tcp}; "
                f"{job.num_bytes / 1e6:.2f} MB of gradients"
            ),
            f"{len(trainings)} seeds, {job.num_steps} steps each; medians over the seeds, ratios within one",
            f"busy {', '.join(f'{part:.0%}' for part in busy)} of this machine's cores",
        ),
        config=job,
        summaries=found,
        samples={f"seed {seed}": dict(trained) for seed, trained in enumerate(trainings)},
        provenance=collect(job.num_workers),
    )


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each side's seconds to the loss from a stored report."""
    summaries, job = record["summaries"], record["config"]
    names = {TORCH: "all-reduce, TCP (torch)", ALL_REDUCE: "all-reduce, TCP", SERVERS: "servers, TCP"}
    colors = {TORCH: look_of("torch").color, SERVERS: CURVE_COLORS[2]}
    bars = [
        Bar(names.get(side, side), Summary(**seconds), colors.get(side, OURS))
        for side, seconds in summaries["seconds"].items()
    ]
    words = show_ratio(summaries["to_tcp_servers"][EXACT], "over TCP")
    bounded = show_ratio(summaries["to_exact"][BOUNDED], "exact")
    title = f"At {job['loss']} loss, exact UDP makes the time to one loss {words}; with a bound of 5 % it is {bounded}"
    panel = Bars("", "seconds to the same training loss; lower is better", bars)
    return draw_figure(path, title, [panel], record["notes"][0])

"""Measure steps whose optimizer is divided among the ranks, beside torch's two classes and the plain optimizer.

    torch            torch's DistributedDataParallel, every rank steps all parameters
    torch-zero       the same with ZeroRedundancyOptimizer, which divides whole parameters
    plain            Paceline's wrapper, every rank steps all parameters
    shard            paceline.optim.shard
    shard-overlap    the same with overlap_forward="always": only between hosts

All sides train the same model on the same batches, in turn, in the same processes. A turn is several steps behind a
barrier, with all that a deferred step leaves to be done (the drain). State is what a rank keeps for its optimizer. The
optimizer's CPU time is that of all threads of a rank's process while `step()` runs, so it includes the exchange.

With `--compute-s` layers sleep as long as a profile says. Gradients, traffic and the optimizer's step are real. So four
ranks on two cores do not wait for each other's forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError
from paceline.optim import shard
from paceline_lab.bench.layer_profile import default_profile
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import Ranks, choose_place, gather
from paceline_lab.bench.sides import SEED, digest
from paceline_lab.bench.timed_model import TimedWorkload
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    ComputeS,
    Hosts,
    Quick,
    Rate,
    ReportFolder,
    Rounds,
)
from paceline_lab.experiments.options import Ranks as NumRanks
from paceline_lab.experiments.runner import conclude, refuse_unequal, train_in_turn
from paceline_lab.report.figures import draw_figure, show_ratio
from paceline_lab.report.look import BASELINE, OURS, PAPER
from paceline_lab.report.panels import Bar, Bars
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary, slowest_rank
from paceline_lab.workloads import Workload, make_workload

TORCH, ZERO, PLAIN, SHARD, BEHIND = SIDES = ("torch", "torch-zero", "plain", "shard", "shard-overlap")
COLOURS = {TORCH: BASELINE, ZERO: PAPER, PLAIN: PAPER, SHARD: OURS, BEHIND: OURS}
WARM_UP_STEPS = 3
NUM_BATCHES = 4


@dataclass(frozen=True)
class Config:
    """The settings of a measurement."""

    workload: str
    optimizer: str  # "AdamW" or "Muon"; with Muon, AdamW steps what is no matrix
    steps_per_turn: int
    sides: tuple[str, ...]
    compute_s: float  # of forward and backward, which sleep; 0: they compute
    quick: bool

    def make(self, rank: int) -> Workload:
        """Return the workload of one rank."""
        if not self.compute_s:
            return make_workload(self.workload, self.quick)
        return TimedWorkload(default_profile(self.workload).taking(self.compute_s), rank)


@dataclass(frozen=True)
class Found:
    """The times and the state of one side; the same on every rank."""

    step_s: list[float]  # of the slowest rank
    optimizer_s: list[float]  # that a rank spends in `step()`, of the slowest
    optimizer_cpu_s: list[float]  # of all threads of a rank meanwhile, of the rank with the most
    state_bytes: list[int]  # by rank
    are_equal: bool  # bitwise, the parameters of all ranks
    digest: str


class Trainee:
    """One side."""

    def __init__(self, side: str, config: Config) -> None:
        self.side = side
        self.workload = config.make(dist.get_rank())
        torch.manual_seed(SEED)
        module = self.workload.make_model()
        if side in (TORCH, ZERO):
            self.model: Any = TorchDDP(module, gradient_as_bucket_view=True)
        else:
            self.model = DistributedDataParallel(
                module, overlap_forward="always" if side == BEHIND else False
            )
        self.optimizers = [self._made(kind, group) for kind, group in _kinds(module, config.optimizer)]
        self.batches = [self.workload.make_batch(dist.get_rank(), step) for step in range(NUM_BATCHES)]
        self.carry: Any = None
        self.step_s: list[float] = []
        self.optimizer_s: list[float] = []
        self.optimizer_cpu_s: list[float] = []

    def _made(self, kind: type[torch.optim.Optimizer], parameters: list[nn.Parameter]) -> Any:
        if self.side == ZERO:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(parameters, kind, lr=1e-3)
        made: Any = kind
        optimizer = made(parameters, lr=1e-3)
        return shard(optimizer, self.model) if self.side in (SHARD, BEHIND) else optimizer

    def turn(self, num_steps: int, timed: bool = True) -> None:
        """Train some steps behind a barrier, up to the last parameter. Collective."""
        dist.barrier()
        began_s, within_s, cpu_s = time.perf_counter(), 0.0, 0.0
        for step in range(num_steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss, self.carry = self.workload.loss(self.model, self.batches[step % NUM_BATCHES], self.carry)
            loss.backward()
            before_s, before_cpu_s = time.perf_counter(), time.process_time()
            for optimizer in self.optimizers:
                optimizer.step()
            within_s += time.perf_counter() - before_s
            cpu_s += time.process_time() - before_cpu_s
        if self.side == BEHIND:
            self.model.flush()
        if timed:
            self.step_s.append((time.perf_counter() - began_s) / num_steps)
            self.optimizer_s.append(within_s / num_steps)
            self.optimizer_cpu_s.append(cpu_s / num_steps)

    def state_bytes(self) -> int:
        """Return the bytes of this rank's optimizer state."""
        kept = [vars(getattr(optimizer, "optim", optimizer))["state"] for optimizer in self.optimizers]
        values = [value for each in kept for state in each.values() for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _kinds(
    module: nn.Module, optimizer: str
) -> Iterable[tuple[type[torch.optim.Optimizer], list[nn.Parameter]]]:
    parameters = list(module.parameters())
    if optimizer == "AdamW":
        return [(torch.optim.AdamW, parameters)]
    matrices = [each for each in parameters if each.dim() == 2]
    others = [each for each in parameters if each.dim() != 2]
    pairs = [(torch.optim.Muon, matrices), (torch.optim.AdamW, others)]
    return [(kind, group) for kind, group in pairs if group]


def measure(arguments: tuple[Config, int], tell: TellProgress) -> dict[str, Found]:
    """Train all sides in turn. Collective; the same on every rank."""
    config, num_rounds = arguments
    trainees = [Trainee(side, config) for side in config.sides]
    for trainee in trainees:
        trainee.turn(WARM_UP_STEPS, timed=False)
    train_in_turn(trainees, num_rounds, config.steps_per_turn, tell)
    found = {}
    for each in trainees:
        digests = gather(digest([p.detach() for p in each.model.parameters()]))
        found[each.side] = Found(
            slowest_rank(gather(each.step_s)),
            slowest_rank(gather(each.optimizer_s)),
            slowest_rank(gather(each.optimizer_cpu_s)),
            gather(each.state_bytes()),
            len(set(digests)) == 1,
            digests[0],
        )
    return found


def report(config: Config, found: dict[str, Found], place: Ranks) -> Report:
    """A row a side."""
    steps = {side: Summary.of(each.step_s) for side, each in found.items()}
    within = {side: Summary.of(each.optimizer_s) for side, each in found.items()}
    cpu = {side: Summary.of(each.optimizer_cpu_s) for side, each in found.items()}
    state = {side: max(each.state_bytes) for side, each in found.items()}
    last = list(found)[-1]
    equal = ", ".join(side for side, each in found.items() if each.digest == found[TORCH].digest)
    return Report(
        name=f"sharded-steps-{config.workload}-{config.optimizer.lower()}-{place.label}"
        + "-timed" * bool(config.compute_s)
        + "-quick" * config.quick,
        question="How long is a step whose optimizer is divided among the ranks, and what does each of them keep?",
        columns=(
            "side",
            "step ms",
            "in step() ms",
            "CPU of step() ms",
            "state of a rank MB",
            "step / torch's",
        ),
        rows=tuple(
            (
                side,
                steps[side].text(1e3, 1),
                within[side].text(1e3, 1),
                cpu[side].text(1e3, 1),
                f"{state[side] / 1e6:.1f}",
                f"{steps[side].median / steps[TORCH].median:.2f}",
            )
            for side in found
        ),
        verdicts=(
            Verdict("step / torch's", steps[last].median / steps[TORCH].median, 0.85, "x"),
            Verdict("state / plain's", state[SHARD] / state[PLAIN], 1.02 / place.num_ranks, "x"),
            Verdict("CPU time of step() / plain's", cpu[SHARD].median / cpu[PLAIN].median, 0.3, "x"),
        ),
        notes=(
            f"bitwise torch's parameters: {equal}",
            f"layers sleep for {config.compute_s:g} s a step" if config.compute_s else "layers compute",
            *make_workload(config.workload, config.quick).notes(),
        ),
        config=config,
        summaries={
            "step_s": {side: asdict(each) for side, each in steps.items()},
            "optimizer_s": {side: asdict(each) for side, each in within.items()},
            "optimizer_cpu_s": {side: asdict(each) for side, each in cpu.items()},
            "state_bytes": state,
            "step_ratios": {side: each.median / steps[TORCH].median for side, each in steps.items()},
            "optimizer_ratios": {side: each.median / within[PLAIN].median for side, each in within.items()},
            "cpu_ratios": {side: each.median / cpu[PLAIN].median for side, each in cpu.items()},
            "plain_ratios": {side: each.median / steps[PLAIN].median for side, each in steps.items()},
        },
        samples={side: asdict(each) for side, each in found.items()},
        provenance=collect(place.num_ranks),
        place=place.describe(),
    )


def main(
    workload: Annotated[str, typer.Option(help="As of `paceline bench workloads`.")] = "wide_mlp",
    optimizer: Annotated[str, typer.Option(help="AdamW or Muon.")] = "AdamW",
    hosts: Hosts = 0,
    ranks: NumRanks = 1,
    rate: Rate = "1Gbit",
    compute_s: ComputeS = 0.0,
    rounds: Rounds = 5,
    steps_per_turn: Annotated[int, typer.Option(min=1, help="Number of consecutive steps per turn.")] = 4,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Time steps of a divided optimizer, on this machine or on hosts of an emulated cluster."""
    if optimizer not in ("AdamW", "Muon") or not hasattr(torch.optim, optimizer):
        raise ConfigurationError(f"--optimizer {optimizer}: give AdamW or Muon, which torch has from 2.9 on.")
    if quick:
        workload, hosts, rounds, steps_per_turn = "tiny", 0, 2, 1
    sides = SIDES if hosts else SIDES[:-1]
    config = Config(workload, optimizer, steps_per_turn, sides, compute_s, quick)
    each = ranks if hosts else max(ranks, 2)
    with choose_place(hosts or None, ranks_per_host=each, rate=rate if hosts else None) as place:
        environment = ENVIRONMENTS[Allocator.KEEP]
        found = place.run(measure, (config, rounds), "steps of a divided optimizer", environment)[0]
    refuse_unequal(side for side, each in found.items() if not each.are_equal)
    conclude(report(config, found, place), report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each side's steps, from a stored report."""
    steps = {side: Summary(**found) for side, found in record["summaries"]["step_s"].items()}
    bars = [Bar(side, step.times(1e3), COLOURS[side]) for side, step in steps.items()]
    last = list(steps)[-1]
    words = show_ratio(steps[last].median / steps[TORCH].median, "torch's")
    title = f"A step with a divided optimizer is {words}"
    config, load = record["config"], record["provenance"]["load_average_before"]
    return draw_figure(
        path,
        title,
        [Bars("", "step time, ms", bars)],
        f"{config['workload']}, {config['optimizer']}. Medians and quartiles; load average {load:.1f}.",
    )

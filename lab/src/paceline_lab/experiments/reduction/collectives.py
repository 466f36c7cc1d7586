"""Measure torch's collectives of ordinary tensors over the backend `paceline`, and over Gloo, on one host.

Three ways to call. *Back to back*: calls follow each other, so all ranks are there. *Alone*: the ranks sleep 2 ms and
meet at a barrier of Gloo's before each call. So threads that wait for work are asleep, as in a training step. *Fresh*:
as alone, on a tensor that was allocated just before. A case's sides alternate (A B B A), and a time is the slowest
rank's. A step is that of FSDP2 on a small transformer: parameters are gathered and gradients scattered for each of its
layers.
"""

import dataclasses
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from paceline_lab.bench.protocol import turns
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks, gather
from paceline_lab.emulation.quantities import show_size
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    Quick,
    ReportFolder,
    Rounds,
)
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.publication import Report
from paceline_lab.report.summary import Summary, ratios, slowest_rank

SIDES = ("gloo", "paceline")
WAYS = ("back to back", "alone", "fresh")
SIZES = (1024, 65536, 2**20, 4 * 2**20, 25 * 2**20)
_PAUSE_S = 0.002
_BYTES_A_TURN, _MOST_A_TURN = 8 * 2**20, 50

Call = Callable[[], object]


def _all_reduce(size: int, group: Any) -> Call:
    tensor = torch.zeros(size)
    return lambda: dist.all_reduce(tensor, group=group)


def _waited_for(size: int, group: Any) -> Call:
    tensor = torch.zeros(size)

    def call() -> None:
        work: Any = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()

    return call


def _reduce_scatter(size: int, group: Any) -> Call:
    whole, part = torch.zeros(size), torch.zeros(size // dist.get_world_size())
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def _all_gather(size: int, group: Any) -> Call:
    whole, part = torch.zeros(size), torch.zeros(size // dist.get_world_size())
    return lambda: dist.all_gather_into_tensor(whole, part, group=group)


def _broadcast(size: int, group: Any) -> Call:
    tensor = torch.zeros(size)
    return lambda: dist.broadcast(tensor, 0, group=group)


def _all_to_all(size: int, group: Any) -> Call:
    sent, received = torch.zeros(size), torch.zeros(size)
    return lambda: dist.all_to_all_single(received, sent, group=group)


KINDS: dict[str, Callable[[int, Any], Call]] = {
    "all-reduce": _all_reduce,
    "all-reduce, async_op": _waited_for,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
    "broadcast": _broadcast,
    "all-to-all": _all_to_all,
}
"""By name: makes a call from a number of float32 elements, of the larger tensor, and a group."""


@dataclass(frozen=True)
class Config:
    """The settings of a measurement."""

    num_ranks: int
    num_rounds: int
    sizes_bytes: tuple[int, ...]
    step_width: int


def measure(config: Config, tell: TellProgress) -> dict[str, list[list[float]]]:
    """Return, by case, the seconds of a call by side and turn. Collective."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames its functions
    groups: dict[str, Any] = {side: dist.new_group(backend=side) for side in SIDES}
    cases = [
        (kind, size, way)
        for kind in KINDS
        for size in config.sizes_bytes
        for way in WAYS
        if _is_asked(kind, size, way)
    ]
    found = {}
    for number, (kind, size, way) in enumerate(cases):
        found[f"{kind} of {show_size(size)}, {way}"] = _measure(kind, size, way, groups, config.num_rounds)
        tell(number / len(cases))
    found["step of FSDP2"] = _measure_step(config.step_width, groups, config.num_rounds)
    return found


def _is_asked(kind: str, size_bytes: int, way: str) -> bool:
    return (
        way == "back to back"
        or (way == "alone" and size_bytes <= 2**20)
        or (way == "fresh" and kind == "all-reduce")
    )


def _measure(
    kind: str, size_bytes: int, way: str, groups: dict[str, Any], num_rounds: int
) -> list[list[float]]:
    calls = {side: KINDS[kind](size_bytes // 4, group) for side, group in groups.items()}
    count = max(1, min(_MOST_A_TURN, _BYTES_A_TURN // size_bytes))
    seconds: list[list[float]] = [[] for _ in SIDES]
    for turn in turns(len(SIDES), num_rounds + 1):
        side = SIDES[turn.side_index]
        if way == "back to back":
            taken = _back_to_back_s(calls[side], count)
        else:
            taken = _alone_s(KINDS[kind](size_bytes // 4, groups[side]) if way == "fresh" else calls[side])
        if turn.round_index:  # the first is to warm up
            seconds[turn.side_index].append(taken)
    by_rank = gather(seconds)
    return [slowest_rank([rank[index] for rank in by_rank]) for index in range(len(SIDES))]


def _back_to_back_s(call: Call, count: int) -> float:
    call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _alone_s(call: Call) -> float:
    time.sleep(_PAUSE_S)
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _measure_step(width: int, groups: dict[str, Any], num_rounds: int) -> list[list[float]]:
    def make(group: Any) -> Call:
        torch.manual_seed(0)
        layers = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(4)
        ]
        model = nn.Sequential(*layers)
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x: Tensor = torch.randn(2, 16, width)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step

    calls = {side: make(group) for side, group in groups.items()}
    seconds: list[list[float]] = [[] for _ in SIDES]
    for turn in turns(len(SIDES), num_rounds):
        seconds[turn.side_index].append(_back_to_back_s(calls[SIDES[turn.side_index]], 2))
    by_rank = gather(seconds)
    return [slowest_rank([rank[index] for rank in by_rank]) for index in range(len(SIDES))]


def report(config: Config, found: dict[str, list[list[float]]]) -> Report:
    """Turn the samples into one row a case."""
    rows, summaries = [], {}
    for case, (gloo, ours) in found.items():
        of_gloo, of_ours = (Summary.of([1e6 * s for s in side]) for side in (gloo, ours))
        ratio = Summary.of(ratios(ours, gloo))
        summaries[case] = {"gloo_us": of_gloo, "paceline_us": of_ours, "ratio": ratio}
        rows.append((case, of_gloo.text(digits=0), of_ours.text(digits=0), ratio.text()))
    return Report(
        name=f"collectives-{config.num_ranks}ranks" + ("-quick" if len(config.sizes_bytes) == 1 else ""),
        question="How long does a collective of ordinary tensors take on one host?",
        columns=("call", "gloo us", "paceline us", "paceline / gloo"),
        rows=tuple(rows),
        verdicts=(),
        notes=("bytes are those of the larger tensor of a rank; two cores serve all ranks",),
        config=config,
        summaries=summaries,
        samples=found,
        provenance=collect(config.num_ranks),
    )


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Number of processes.")] = 2,
    rounds: Rounds = 10,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Time torch's collectives over Gloo and over our backend."""
    config = Config(ranks, rounds, SIZES, 384)
    if quick:
        config = dataclasses.replace(config, num_rounds=2, sizes_bytes=SIZES[:1], step_width=16)
    found = LoopbackRanks(ranks).run(measure, config, "collectives")[0]
    conclude(report(config, found), report_folder, as_json)

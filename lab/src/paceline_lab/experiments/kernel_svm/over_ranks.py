"""What does each of 1 to 64 ranks do in one fit, and how long would it take behind a network? Counted, then predicted.

Real fits of one problem cut into P parts, few rows each: the ranks are threads of this process that hand arrays to
each other, so working sets, kernel values and bytes are those of P processes, while times would mean nothing. The
prediction takes the processor time of one rank, measured here: what every rank repeats (the pair updates of a working
set) grows with their number, what is shared shrinks with the largest number of kernel values of any rank, and a
collective costs LATENCY_S * log2(P) and its bytes, from all ranks to each, at RATE_BYTES_PER_S. It is a prediction,
never seen.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from paceline.quantities import show_rate
from paceline_lab.bench.provenance import collect
from paceline_lab.experiments.kernel_svm.data_sets import HELP, Split, load
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    Quick,
    ReportFolder,
)
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure, show_time
from paceline_lab.report.look import OURS
from paceline_lab.report.panels import Line, Lines
from paceline_lab.report.publication import Report

LATENCY_S = 30e-6
RATE_BYTES_PER_S = 1.25e9  # 10 Gbit/s


@dataclass(frozen=True)
class Config:
    """What is counted."""

    data: str
    latency_s: float = LATENCY_S
    rate_bytes_per_s: float = RATE_BYTES_PER_S


@dataclass(frozen=True)
class Count:
    """What P ranks did; per rank where it says so, of the busiest rank."""

    num_ranks: int
    num_turns: int
    num_kernel_values: int
    num_collectives: int
    num_bytes: int
    objective: float
    gap: float
    predicted_s: float


def fit(split: Split, num_ranks: int) -> tuple[list[Any], float, float]:
    """Return every rank's solution, the seconds it took, and those for what every rank repeats (one rank only)."""
    from paceline_lab.doubles.in_process import InProcessWorld
    from paceline_svm.communicator import GroupCommunicator
    from paceline_svm.kernels import Kernel
    from paceline_svm.problem import Extent, Problem, SolverSettings
    from paceline_svm.sample_forms import DenseSamples
    from paceline_svm.solver import Solver
    from paceline_svm.working_set import SubProblem

    repeated_s = [0.0]

    class Timed(SubProblem):
        def solve(self, *arguments: Any) -> Any:
            started_s = time.process_time()
            answer = super().solve(*arguments)
            repeated_s[0] += time.process_time() - started_s
            return answer

    def task(group: Any) -> Any:
        communicator = GroupCommunicator(group)
        communicator.introduce(None, "beginning")
        ids = np.arange(communicator.rank, len(split.y), num_ranks)
        y = np.where(split.y == 1, 1.0, -1.0)
        squares = np.einsum("ij,ij->i", split.X, split.X, dtype=np.float64)
        most_numbers = -(-len(y) // num_ranks) * (split.X.shape[1] + 1)
        problem = Problem(
            kernel=Kernel("rbf", split.gamma),
            samples=DenseSamples.of(split.X[ids], ids),
            extent=Extent(float(split.X.size), most_numbers, float(squares.max())),
            linear=-y[None],
            lower=np.minimum(0.0, y * split.cost)[None],
            upper=np.maximum(0.0, y * split.cost)[None],
            start=np.zeros((1, len(y))),
        )
        solver = Solver(problem, SolverSettings(), communicator)
        if num_ranks == 1:
            solver._sub_problem = Timed(problem.kernel)
        return solver.solve()

    started_s = time.process_time()
    solutions = InProcessWorld(num_ranks).run(task)
    return solutions, time.process_time() - started_s, repeated_s[0]


def count(split: Split, all_ranks: list[int], config: Config) -> list[Count]:
    """Fit on every number of ranks, and predict from the first, which is one."""
    fit(split, 1)
    alone, seconds, repeated_s = fit(split, 1)
    first, found = alone[0].counters, []
    for num_ranks in all_ranks:
        solutions = fit(split, num_ranks)[0]
        counters = [solution.counters for solution in solutions]
        values, num_bytes = max(c.num_kernel_values for c in counters), max(c.num_bytes for c in counters)
        calls = counters[0].num_collectives if num_ranks > 1 else 0
        network_s = calls * config.latency_s * np.log2(num_ranks)
        network_s += (num_ranks - 1) * num_bytes / config.rate_bytes_per_s
        shared_s = (seconds - repeated_s) * values / first.num_kernel_values
        predicted_s = repeated_s * counters[0].num_exchanges / first.num_exchanges + shared_s + network_s
        found.append(
            Count(
                num_ranks,
                counters[0].num_exchanges,
                values,
                calls,
                num_bytes if num_ranks > 1 else 0,
                solutions[0].objective,
                solutions[0].gap,
                float(predicted_s),
            )
        )
    return found


def main(
    data: Annotated[str, typer.Option(help=f"One of: {HELP}.")] = "synthetic-8000x20",
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the real data sets, see kernel_svm/data_sets.py.")
    ] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Count what 1 to 64 ranks do, and predict their time."""
    config = Config("synthetic-4000x8" if quick else data)
    all_ranks = [1, 2, 3] if quick else [1, 2, 4, 8, 16, 32, 64]
    counts = count(load(config.data, folder), all_ranks, config)
    one = counts[0]
    result = Report(
        name=f"svm-ranks{'-quick' if quick else ''}",
        question=f"What does each of P ranks do in a fit of {config.data}, and how long would it take?",
        columns=(
            "ranks",
            "working sets",
            "kernel values a rank",
            "collectives",
            "bytes a rank",
            "objective -",
            "predicted s",
        ),
        rows=tuple(
            (
                str(found.num_ranks),
                str(found.num_turns),
                f"{found.num_kernel_values:,}",
                str(found.num_collectives),
                f"{found.num_bytes:,}",
                f"{abs(found.objective / one.objective - 1):.1e}",
                f"{found.predicted_s:.4f}",
            )
            for found in counts
        ),
        verdicts=(),
        notes=(
            "counted on threads that exchange arrays, few rows each; times are predicted, not measured",
            f"network: {LATENCY_S * 1e6:.0f} us * log2(P) a collective, {RATE_BYTES_PER_S * 8 / 1e9:.0f} Gbit/s",
        ),
        config=config,
        summaries={str(found.num_ranks): asdict(found) for found in counts},
        samples={str(found.num_ranks): asdict(found) for found in counts},
        provenance=collect(1),
    )
    conclude(result, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw the predicted time over the ranks."""
    points = [(float(ranks), 1e3 * found["predicted_s"]) for ranks, found in record["summaries"].items()]
    fastest, least_ms = min(points, key=lambda point: point[1])
    ticks = {ranks: f"{ranks:g}" for ranks, _ in points}
    config = record["config"]
    rate, latency = show_rate(8 * config["rate_bytes_per_s"]), show_time(config["latency_s"])
    line = Line("predicted", points, OURS, "--")
    return draw_figure(
        path,
        f"{config['data']}: {fastest:g} ranks would fit it fastest, {points[0][1] / least_ms:.1f} times as fast as one "
        "(predicted)",
        [Lines("", "ranks", "time of a fit, ms", [line], ticks, log_x=True)],
        f"Work is counted, time is predicted from one rank's: behind links of {rate}, {latency} a message.",
    )

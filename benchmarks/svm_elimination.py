"""Which elimination heuristic is fastest, on which set? The paper's question, on every set, in one table.

None, each static heuristic (single and multi, thresholds in pair updates and per cent of the samples) and `adaptive`,
all to the same optimum: with no kernel-row cache, which is the paper's setting, and with the default one. One process,
one thread; heuristics take turns, after a fit of each that is not counted. Ratios are of medians, over `none`.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.options import RESULTS_FOLDER, AsJson, Quick, ResultsFolder, Rounds, run_cli
from benchmarks.svm import NO_CACHE_MEGABYTES, OBJECTIVE_RTOL, TOL
from benchmarks.svm_data import HELP, load
from paceline.lab.bench.protocol import WrongAnswerError
from paceline.lab.bench.provenance import collect, load_average
from paceline.lab.bench.rank_program import TellProgress
from paceline.lab.bench.ranks import LoopbackRanks
from paceline.lab.report.publication import Report, publish

HEURISTICS = (
    "none",
    *(
        f"{kind}-{threshold}"
        for kind in ("single", "multi")
        for threshold in ("500", "1000", "5%", "10%", "50%")
    ),
    "adaptive",
)
CACHES: dict[str, float | str] = {"no cache": NO_CACHE_MEGABYTES, "default": "auto"}


@dataclass(frozen=True)
class Config:
    """What is measured."""

    data: str
    folder: str | None
    num_rounds: int


def measure(config: Config, tell: TellProgress) -> dict[str, dict[str, list[float]]]:
    """Fit with every heuristic; returns seconds by cache and heuristic."""
    from paceline.svm import SVC

    split = load(config.data, Path(config.folder) if config.folder else None)
    found: dict[str, dict[str, list[float]]] = {}
    for done, (cache, size) in enumerate(CACHES.items()):
        times: dict[str, list[float]] = {name: [] for name in HEURISTICS}
        objectives: dict[str, float] = {}
        for turn in range(config.num_rounds + 1):
            for name in HEURISTICS[:: 1 if turn % 2 else -1]:
                settings: dict[str, Any] = {"C": split.cost, "gamma": split.gamma, "tol": TOL}
                model = SVC(**settings, cache_size=size, elimination=name)
                started_s = time.perf_counter()
                model.fit(split.X, split.y)
                if turn:
                    times[name].append(time.perf_counter() - started_s)
                objectives[name] = model.objective_[0] if turn == 0 else objectives[name]
        least = min(objectives.values())
        if max(objectives.values()) - least > OBJECTIVE_RTOL * abs(least):
            raise WrongAnswerError(f"{config.data}, {cache}: objectives {objectives}; times mean nothing.")
        found[cache] = times
        tell((done + 1) / len(CACHES))
    return found


def main(
    data: Annotated[
        str, typer.Option(help=f"Comma-separated, of two classes: {HELP}.")
    ] = "synthetic-8000x20",
    folder: Annotated[Path | None, typer.Option(help="Where real sets lie; see svm_data.py.")] = None,
    rounds: Rounds = 2,
    quick: Quick = False,
    as_json: AsJson = False,
    results_folder: ResultsFolder = RESULTS_FOLDER,
) -> None:
    """Compare the heuristics on every set."""
    names, rounds = (["synthetic-4000x8"], 1) if quick else (data.split(","), rounds)
    load_before, samples, rows = load_average(), {}, []
    summaries: dict[str, dict[str, dict[str, float]]] = {}
    for name in names:
        config = Config(name, str(folder.absolute()) if folder else None, rounds)
        samples[name] = LoopbackRanks(1).run(measure, config, f"elimination, {name}")[0]
        for cache, times in samples[name].items():
            seconds = {heuristic: statistics.median(found) for heuristic, found in times.items()}
            ratios = {heuristic: found / seconds["none"] for heuristic, found in seconds.items()}
            summaries.setdefault(cache, {})[name] = {"none_s": seconds["none"], **ratios}
            rows.append(
                (cache, name, f"{seconds['none']:.3f}", *(f"{ratios[x]:.2f}" for x in HEURISTICS[1:]))
            )
    for cache, of_sets in summaries.items():
        means = {x: statistics.geometric_mean(found[x] for found in of_sets.values()) for x in HEURISTICS[1:]}
        rows.append((cache, "geometric mean", "", *(f"{mean:.2f}" for mean in means.values())))
    report = Report(
        name=f"svm-elimination{'-quick' if quick else ''}",
        question="How long does a fit take with each elimination heuristic, over none?",
        columns=("cache", "data", "none s", *HEURISTICS[1:]),
        rows=tuple(rows),
        verdicts=(),
        notes=("one process, one thread; below 1 is faster than without elimination",),
        config=Config(",".join(names), None, rounds),
        summaries=summaries,
        samples=samples,
        provenance=collect(1, load_before),
    )
    publish(report, results_folder, as_json)


if __name__ == "__main__":
    run_cli(main)

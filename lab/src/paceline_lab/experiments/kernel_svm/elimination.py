"""Measure which shrinking heuristic is cheapest on which set: the paper's question, on every set, in one table.

Sides are no heuristic, each heuristic with a threshold, and `auto`, all to the same optimum. Heuristics are single,
multi and adaptive; thresholds are pair updates or per cent of the samples. Each is measured with no kernel-row cache,
which is the paper's setting, and with the default one. One process, one thread. Heuristics take turns, after a fit of
each that is not counted. Ratios are over `none`: of the medians of times, and of the numbers of kernel values computed.
Those numbers are the same in every run.

`--clock cpu` counts processor time, for a busy machine. With `--parts` it can be stopped, or called for some sets at a
time: a call that names them all reports what is there. Sets named with `--once` take minutes: each heuristic fits once,
four in a process, and the first fit counts.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline_lab.bench.protocol import WrongAnswerError
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks
from paceline_lab.experiments.kernel_svm.data_sets import HELP, load
from paceline_lab.experiments.kernel_svm.fitting import CLOCKS, NO_CACHE_MEGABYTES, OBJECTIVE_RTOL, TOL, Clock
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, PartsFolder, Quick, ReportFolder, Rounds
from paceline_lab.experiments.runner import conclude, measured
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, OURS
from paceline_lab.report.panels import Dots
from paceline_lab.report.publication import Report
from paceline_svm.shrinking import ShrunkSamples

HEURISTICS = (
    "none",
    *(
        f"{kind}-{threshold}"
        for kind in ("single", "multi", "adaptive")
        for threshold in ("2", "500", "1000", "5%", "10%", "50%")
    ),
    "auto",
)
_AT_ONCE = 4  # heuristics in a process that fit once
CACHES: dict[str, float | str] = {"no cache": NO_CACHE_MEGABYTES, "default": "auto"}


@dataclass(frozen=True)
class Config:
    """The settings of a measurement."""

    data: str
    folder: str | None
    num_rounds: int
    clock: str
    cache: str = ""
    heuristics: tuple[str, ...] = HEURISTICS


@dataclass(frozen=True)
class Cost:
    """The times of the fits with one heuristic, and the objective they reached."""

    times_s: list[float]
    objective: float
    num_kernel_values: int
    num_steps: int
    num_reconstructions: int
    reconstruction_s: tuple[float, ...] = ()
    num_reconstruction_values: int = 0


class _Reconstructions:
    """Times every reconstruction of gradients, and counts its kernel values, since it was last asked."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._took_s, self._num_values = 0.0, 0
        unshrink = ShrunkSamples.unshrink

        def timed(shrunk: ShrunkSamples, *arguments: Any) -> Any:
            started_s, before = now_s(), shrunk.num_kernel_values
            found = unshrink(shrunk, *arguments)
            self._took_s += now_s() - started_s
            self._num_values += shrunk.num_kernel_values - before
            return found

        ShrunkSamples.unshrink = timed  # type: ignore[method-assign, assignment]

    def take(self) -> tuple[float, int]:
        found, self._took_s, self._num_values = (self._took_s, self._num_values), 0.0, 0
        return found


def measure(config: Config, tell: TellProgress) -> dict[str, Cost]:
    """Fit with each of the heuristics; returns costs by heuristic."""
    from paceline_svm import SVC

    split = load(config.data, Path(config.folder) if config.folder else None)
    now_s, size = CLOCKS[config.clock], CACHES[config.cache]
    settings: dict[str, Any] = {"C": split.cost, "gamma": split.gamma, "tol": TOL, "cache_size": size}
    models = {name: SVC(**settings, shrinking=name) for name in config.heuristics}
    times: dict[str, list[float]] = {name: [] for name in config.heuristics}
    reconstructions = _Reconstructions(now_s)
    of_fits: dict[str, list[tuple[float, int]]] = {name: [] for name in config.heuristics}
    for turn in range(config.num_rounds + 1):
        for name in config.heuristics[:: 1 if turn % 2 else -1]:
            started_s = now_s()
            models[name].fit(split.X, split.y)
            times[name].append(now_s() - started_s)
            of_fits[name].append(reconstructions.take())
        tell((turn + 1) / (config.num_rounds + 1))
    first = int(config.num_rounds > 0)
    return {name: _cost(model, times[name][first:], of_fits[name][first:]) for name, model in models.items()}


def _cost(model: Any, times_s: list[float], reconstructions: list[tuple[float, int]]) -> Cost:
    of, (took_s, num_values) = model.counters_[0], zip(*reconstructions, strict=True)
    counted = (of.num_kernel_values, of.num_steps, of.num_unshrinks)
    return Cost(times_s, float(model.objective_[0]), *counted, took_s, num_values[-1])


def _costs_of(config: Config, parts: Path | None) -> dict[str, dict[str, Cost]]:
    """Costs of one set by cache and heuristic, all at the same optimum."""
    heuristics = config.heuristics
    found: dict[str, dict[str, Cost]] = {}
    for cache in CACHES:
        found[cache] = {}
        num = len(heuristics) if config.num_rounds else _AT_ONCE
        for some in (heuristics[k : k + num] for k in range(0, len(heuristics), num)):
            part = replace(config, cache=cache, heuristics=some)
            run = partial(LoopbackRanks(1).run, measure, part, f"elimination, {config.data}, {cache}")
            found[cache] |= measured(parts, part, run)[0]
        objectives = {name: cost.objective for name, cost in found[cache].items()}
        least = min(objectives.values())
        if max(objectives.values()) - least > OBJECTIVE_RTOL * abs(least):
            raise WrongAnswerError(f"{config.data}, {cache}: objectives {objectives}; times mean nothing.")
    return found


def _ratios(costs: dict[str, Cost]) -> dict[str, dict[str, float]]:
    """Return ratios over `none` by measure and heuristic; for reconstructions, the part of the fit's own time."""
    seconds = {name: statistics.median(cost.times_s) for name, cost in costs.items()}
    values = {name: cost.num_kernel_values for name, cost in costs.items()}
    return {
        "time": {name: found / seconds["none"] for name, found in seconds.items()},
        "kernel values": {name: found / values["none"] for name, found in values.items()},
        "reconstruction's time": {
            name: statistics.median(cost.reconstruction_s) / seconds[name] for name, cost in costs.items()
        },
        "reconstruction's kernel values": {
            name: cost.num_reconstruction_values / values[name] for name, cost in costs.items()
        },
    }


def main(
    data: Annotated[
        str, typer.Option(help=f"Comma-separated, of two classes: {HELP}.")
    ] = "synthetic-8000x20",
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the real data sets, see kernel_svm/data_sets.py.")
    ] = None,
    once: Annotated[str, typer.Option(help="Further heuristics that take minutes, comma-separated.")] = "",
    heuristics: Annotated[
        str, typer.Option(help="Which to compare with `none`, comma-separated; all if left out.")
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the result's files.")] = "svm-elimination",
    rounds: Rounds = 2,
    clock: Clock = "wall",
    parts: PartsFolder = None,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Compare the heuristics on every set."""
    names, rounds = (["synthetic-4000x8"], 1) if quick else (data.split(","), rounds)
    where = str(folder.absolute()) if folder else None
    turns = dict.fromkeys(names, rounds) | dict.fromkeys(once.split(",") if once else [], 0)
    chosen = ("none", *heuristics.split(",")) if heuristics else HEURISTICS
    config = Config(",".join(turns), where, rounds, clock, heuristics=chosen)
    costs = {
        data_set: _costs_of(replace(config, data=data_set, num_rounds=turn), parts)
        for data_set, turn in turns.items()
    }
    result = report(costs, config, f"{name}{'-quick' if quick else ''}")
    conclude(result, report_folder, as_json, draw)


def report(costs: dict[str, dict[str, dict[str, Cost]]], config: Config, name: str) -> Report:
    """Turn costs by set, cache and heuristic into rows: two for each set and cache."""
    rows: list[tuple[str, ...]] = []
    summaries: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for cache in CACHES:
        ratios = {name: _ratios(of_caches[cache]) for name, of_caches in costs.items()}
        for what in next(iter(ratios.values())):
            of_sets = {name: found[what] for name, found in ratios.items()}
            mean = statistics.mean if what.startswith("rec") else statistics.geometric_mean
            means = {x: mean(of[x] for of in of_sets.values()) for x in config.heuristics}
            summaries.setdefault(cache, {})[what] = of_sets | {
                "mean" if what.startswith("rec") else "geometric mean": means
            }
            for data_set, of in summaries[cache][what].items():
                rows.append((cache, data_set, what, *(f"{of[x]:.2f}" for x in config.heuristics[1:])))
    return Report(
        name=name,
        question="What does a fit cost with each shrinking heuristic, over none?",
        columns=("cache", "data", "ratio of", *config.heuristics[1:]),
        rows=tuple(rows),
        verdicts=(),
        notes=(f"one process, one thread, {config.clock} clock; below 1 is cheaper than without shrinking",),
        config=config,
        summaries=summaries,
        samples={
            name: {cache: {x: asdict(cost) for x, cost in of.items()} for cache, of in of_caches.items()}
            for name, of_caches in costs.items()
        },
        provenance=collect(1),
    )


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each heuristic's cost without a cache and with the default one, from a stored report."""
    of = {
        (cache, what): record["summaries"][cache][what]["geometric mean"]
        for cache in CACHES
        for what in ("kernel values", "time")
    }
    names = [name for name in of["no cache", "time"] if name != "none"]
    panels = [
        Dots(
            "",
            f"{title}, divided by those without shrinking; lower is better",
            names,
            [
                ("no cache", OURS, [of["no cache", what][name] for name in names]),
                ("default cache", BASELINE, [of["default", what][name] for name in names]),
            ],
            {0.7: "0.7", 0.8: "0.8", 0.9: "0.9", 1.0: "1", 1.2: "1.2", 1.4: "1.4"},
            ("no shrinking", 1.0),
        )
        for what, title in (("kernel values", "kernel values"), ("time", "seconds"))
    ]
    with_cache = min(of["default", "kernel values"][name] for name in names)
    saved = 1 - min(of["no cache", "kernel values"].values())
    title = f"Shrinking saves up to {saved:.0%} of the kernel values without a cache"
    title += ", and nothing with the default one" if with_cache >= 1 else ""
    sets = len(record["summaries"]["no cache"]["time"]) - 1
    config = record["config"]
    note = f"Geometric means of {sets} sets; {config['clock']} clock, {config['num_rounds']} fits each."
    return draw_figure(path, title.replace("%", " %"), panels, note, columns=1)

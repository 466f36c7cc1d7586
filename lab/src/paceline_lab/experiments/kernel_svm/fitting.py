"""Measure how long a kernel SVM takes to fit and to predict, compared with others, at the same optimum.

Same C, gamma and tol; one thread per process; sides take turns in the same processes. Peers and `one` fit on rank 0
while the others wait; `ranks` fits on all, rows dealt out. Every side fits once before it is timed, so compiled code
and touched memory are there. A side whose first fit (Paceline's: second) takes longer than `--long-s` fits no more.
With two classes every side's dual objective is computed from its coefficients in double precision. A side that is not
at the optimum ends the benchmark. `memory-none` and `memory-auto` are `ranks` without a row cache, without and with
shrinking; `cache-500` and `cache-auto` are `one` with so many megabytes for kernel rows.

`--clock cpu` counts the seconds of rank 0's process instead of the wall's. On a busy machine that leaves out the
waiting for a core, not the cost of shared caches. It is meaningless with several ranks, which wait for each other.

With `--hosts` the ranks are on hosts of an emulated cluster, one each; `--cpu` limits their cores, `--rate` the links.

`gemm s` is the time that the matrix products behind the computed kernel values would take at the peak measured here.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import scipy.sparse as sp
import torch.distributed as dist
import typer
from sklearn import svm as theirs
from sklearn.metrics.pairwise import rbf_kernel

from paceline_lab.bench.protocol import WrongAnswerError
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import choose_place
from paceline_lab.experiments.kernel_svm.data_sets import HELP, Split, load
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, Ranks, ReportFolder, Rounds
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import OURS, look_of
from paceline_lab.report.panels import Dots, three_digits
from paceline_lab.report.publication import Report

TOL = 1e-3
OBJECTIVE_RTOL = 1e-4  # between two solutions at that tolerance
NUM_PREDICTED = 2_000
NO_CACHE_MEGABYTES = 1e-6
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Clock = Annotated[
    str, typer.Option(help="wall: seconds that pass; cpu: seconds of the process, for a busy machine.")
]
PATIENCE = timedelta(hours=2)  # of ranks that wait for a long fit of rank 0


@dataclass(frozen=True)
class Config:
    """The settings of a measurement."""

    data: str
    folder: str | None
    num_ranks: int
    num_rounds: int
    sides: tuple[str, ...]
    cache_megabytes: float
    clock: str
    long_s: float
    place: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """The times of all sides on one data set, in seconds."""

    shape: tuple[int, int]
    num_classes: int
    fit_s: dict[str, list[float]]
    predict_s: dict[str, float]
    objective: dict[str, float]
    accuracy: dict[str, float]
    num_support: int
    gap: float
    num_kernel_values: dict[str, int]
    gemm_limit_s: float


def _model(side: str, split: Split, config: Config) -> Any:
    from paceline_svm import SVC

    settings: dict[str, Any] = {
        "C": split.cost,
        "gamma": split.gamma,
        "tol": TOL,
        "cache_size": config.cache_megabytes,
    }
    if side == "sklearn":
        return theirs.SVC(**settings)
    if side == "sklearnex":
        import sklearnex.svm

        return sklearnex.svm.SVC(**settings)
    if side.startswith("memory-"):
        settings |= {"cache_size": NO_CACHE_MEGABYTES, "shrinking": side.removeprefix("memory-")}
    if side.startswith("cache-"):
        size = side.removeprefix("cache-")
        settings["cache_size"] = size if size == "auto" else float(size)
    return SVC(**settings, rows="all" if _is_everyones(side) else "alone")


def _is_everyones(side: str) -> bool:
    return side == "ranks" or side.startswith("memory-")


def objective(split: Split, model: Any) -> float:
    """Return the dual objective, to be minimised, from a fitted model's coefficients alone."""
    found = model.dual_coef_  # of sparse rows scikit-learn's are sparse
    at, beta = model.support_, np.asarray(found.toarray() if sp.issparse(found) else found).ravel()
    total = sum(
        float(
            beta[k : k + 1000]
            @ (rbf_kernel(split.X[at[k : k + 1000]], split.X[at], gamma=split.gamma) @ beta)
        )
        for k in range(0, len(at), 1000)
    )
    return 0.5 * total - float(np.abs(beta).sum())


def _peak_flops_per_s(width: int) -> float:
    left, right = (np.random.default_rng(0).random((512, width), np.float32) for _ in range(2))
    out, best = np.empty((512, 512), np.float32), np.inf
    for _ in range(20):
        started_s = time.perf_counter()
        np.dot(left, right.T, out=out)
        best = min(best, time.perf_counter() - started_s)
    return 2 * 512 * 512 * width / best


def measure(config: Config, tell: TellProgress) -> Outcome:
    """Fit all sides in turn. Collective; rank 0's outcome counts."""
    split, rank = load(config.data, Path(config.folder) if config.folder else None), dist.get_rank()
    if "sklearnex" in config.sides:
        import daal4py

        daal4py.daalinit(nthreads=1)
    patient = dist.new_group(timeout=PATIENCE)
    models = {side: _model(side, split, config) for side in config.sides}
    now_s = CLOCKS[config.clock]
    fit_s: dict[str, list[float]] = {side: [] for side in config.sides}
    for turn in range(config.num_rounds + 1):
        for side in config.sides[:: 1 if turn % 2 else -1]:
            is_long = np.array([_is_long(side, fit_s[side], config.long_s)], np.int64)
            if bool(_rank_0s(is_long, patient)[0]):
                continue
            dist.barrier(patient)
            started_s = now_s()
            if rank == 0 or _is_everyones(side):
                models[side].fit(split.X, split.y)
            if config.clock == "wall":
                dist.barrier(patient)
            fit_s[side].append(now_s() - started_s)
        tell((turn + 1) / (config.num_rounds + 1))
    fitted = {side: model for side, model in models.items() if rank == 0 or _is_everyones(side)}
    ours = {side: model for side, model in fitted.items() if not side.startswith("sklearn")}
    num_values = {
        side: sum(counters.num_kernel_values for counters in model.counters_) for side, model in ours.items()
    }
    first = next(iter(ours.values()), None)
    return Outcome(
        shape=split.X.shape,
        num_classes=len(np.unique(split.y)),
        fit_s={side: times if len(times) == 1 else times[1:] for side, times in fit_s.items()},
        predict_s={side: _predict_s(model, split, now_s) for side, model in fitted.items()},
        objective={side: objective(split, model) for side, model in fitted.items() if split.y.max() == 1},
        accuracy={side: float(model.score(split.X_test, split.y_test)) for side, model in fitted.items()},
        num_support=len(first.support_) if first else 0,
        gap=float(np.max(first.gap_)) if first else 0.0,
        num_kernel_values=num_values,
        gemm_limit_s=next(iter(num_values.values()), 0)
        * 2
        * split.X.shape[1]
        / _peak_flops_per_s(split.X.shape[1]),
    )


def _is_long(side: str, times: list[float], long_s: float) -> bool:
    """Return whether a side need not fit again. Paceline's first fit may have waited for the compiler."""
    needed = 1 if side.startswith("sklearn") else 2
    return len(times) >= needed and min(times) > long_s


def _rank_0s(array: np.ndarray, group: dist.ProcessGroup) -> np.ndarray:
    import torch

    tensor = torch.from_numpy(array)
    dist.broadcast(tensor, 0, group)
    return tensor.numpy()


def _predict_s(model: Any, split: Split, now_s: Callable[[], float]) -> float:
    times = []
    for _ in range(3):
        started_s = now_s()
        model.predict(split.X_test[:NUM_PREDICTED])
        times.append(now_s() - started_s)
    return min(times)


def report(outcomes: dict[str, Outcome], config: Config, name: str) -> Report:
    """Turn the outcomes into rows: one per data set. Ratios are the first side's times over the others'."""
    first, *others = config.sides
    rows: list[tuple[str, ...]] = []
    summaries: dict[str, dict[str, dict[str, Any]]] = {}
    for data, outcome in outcomes.items():
        best = min(outcome.objective.values(), default=0.0)
        if outcome.gap > TOL or any(
            abs(value - best) > OBJECTIVE_RTOL * abs(best) for value in outcome.objective.values()
        ):
            raise WrongAnswerError(
                f"{data}: objectives {outcome.objective}, our violation {outcome.gap}; times mean nothing."
            )
        seconds = {side: statistics.median(times) for side, times in outcome.fit_s.items()}
        faster = {side: seconds[first] / seconds[side] for side in others}
        predicts = {
            side: outcome.predict_s[first] / outcome.predict_s[side]
            for side in others
            if side in outcome.predict_s
        }
        summaries[data] = {
            "fit_s": seconds,
            "faster": faster,
            "faster_at_prediction": predicts,
            "kernel_values": outcome.num_kernel_values,
        }
        rows.append(
            (
                data,
                f"{outcome.shape[0]} x {outcome.shape[1]}, {outcome.num_classes}",
                str(outcome.num_support),
                *(f"{seconds[side]:.4f}" for side in config.sides),
                *(f"{faster[side]:.2f}" for side in others),
                *(f"{predicts.get(side, 0):.1f}" for side in others),
                "/".join(f"{num / 1e6:.0f}" for num in outcome.num_kernel_values.values()),
                f"{outcome.gemm_limit_s:.4f}",
                "/".join(f"{outcome.accuracy[side]:.4f}" for side in outcome.accuracy),
                f"{max(outcome.objective.values(), default=0) - best:.1e}",
            )
        )
    notes = [
        f"geometric mean over {len(outcomes)} set(s), {first} over {side}: "
        f"{statistics.geometric_mean([summaries[data]['faster'][side] for data in outcomes]):.2f}, "
        f"least {min(summaries[data]['faster'][side] for data in outcomes):.2f}"
        for side in others
    ]
    return Report(
        name=name,
        question=f"How many times faster than {first} are {', '.join(others)} on {config.num_ranks} rank(s)?",
        columns=(
            "data",
            "rows x features, classes",
            "SVs",
            *(f"{side} s" for side in config.sides),
            *(f"x {side}" for side in others),
            *(f"predict x {side}" for side in others),
            "kernel values of ours, millions",
            "gemm s",
            "accuracy",
            "objective -",
        ),
        rows=tuple(rows),
        verdicts=(),
        notes=(
            *notes,
            f"times by the {config.clock} clock",
            f"medians; every side was warm, but those whose only fit took more than {config.long_s:g} s",
        ),
        config=config,
        summaries=summaries,
        samples={data: asdict(outcome) for data, outcome in outcomes.items()},
        provenance=collect(config.num_ranks),
    )


def main(
    data: Annotated[str, typer.Option(help=f"Comma-separated: {HELP}.")] = "digits,synthetic-20000x20",
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the real data sets, see kernel_svm/data_sets.py.")
    ] = None,
    sides: Annotated[
        str,
        typer.Option(
            help="Sides, comma-separated: sklearn, sklearnex, one, ranks, memory-none, memory-auto, cache-MB."
        ),
    ] = "sklearn,one",
    ranks: Ranks = 1,
    rounds: Rounds = 3,
    cache_size: Annotated[float, typer.Option(help="Megabytes for kernel rows, of every side.")] = 500.0,
    clock: Clock = "wall",
    long_s: Annotated[float, typer.Option(help="A side whose fit takes longer fits no more.")] = 4.0,
    hosts: Annotated[
        int | None, typer.Option(help="Number of hosts of an emulated cluster, instead of --ranks.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Rate of each host's link, for example 1Gbit.")] = None,
    cpu: Annotated[
        str | None, typer.Option(help="Number of cores of a host: 0.45 or 45% is less than half a core.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the result's files.")] = "svm",
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Compare fits and predictions on several data sets."""
    names, rounds = (["digits:bin"], 2) if quick else (data.split(","), rounds)
    chosen = [
        side for side in sides.split(",") if side != "sklearnex" or importlib.util.find_spec("sklearnex")
    ]
    outcomes = {}
    with choose_place(hosts, ranks_per_host=None if hosts else ranks, rate=rate, cpu=cpu) as place:
        where = str(folder.absolute()) if folder else None
        for set_name in names:
            config = Config(
                set_name,
                where,
                place.num_ranks,
                rounds,
                tuple(chosen),
                cache_size,
                clock,
                long_s,
                place.describe(),
            )
            outcomes[set_name] = place.run(measure, config, f"svm, {set_name}")[0]
    result = report(outcomes, config, f"{name}{'-quick' if quick else ''}")
    conclude(result, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw a row a data set, a dot a side: how many times as fast as the first side."""
    found, sides = record["summaries"], record["config"]["sides"]
    base, *others = sides
    found = dict(sorted(found.items(), key=lambda one: -one[1]["faster"][others[-1]]))
    names = {"memory-none": "no shrinking", "memory-auto": "shrinking"}
    names |= {
        side: f"{side.removeprefix('cache-')} MB of cache" for side in sides if side.startswith("cache-")
    }
    names |= {"cache-auto": "a cache that grows"}
    if base == "one":
        names |= {"one": "one process", "ranks": f"{record['config']['num_ranks']} processes"}
    colors = {side: OURS if side in names else look_of(side).color for side in others}
    means = {
        side: statistics.geometric_mean(one["faster"][side] for one in found.values()) for side in others
    }
    columns = {side: [one["faster"].get(side) for one in found.values()] for side in others}
    dots = [(names.get(side, look_of(side).name), colors[side], columns[side]) for side in others]
    values = [value for column in columns.values() for value in column] + [1.0]
    steps = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    if max(values) < 4 * min(values):
        steps = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.6, 2.0)
    ticks = {x: f"{x:g} x" for x in steps if min(values) / 1.1 <= x <= 1.1 * max(values)}
    whom = names.get(base, look_of(base).name)
    last, *rest = [
        (names.get(side, look_of(side).name), three_digits(means[side])) for side in reversed(others)
    ]
    words = f"Fits with {last[0]} are {last[1]} times as fast as with {whom}"
    words += "".join(f"; with {name} {times} times" for name, times in rest)
    if not rest and means[others[-1]] < 1:
        words = f"Fits with {last[0]} take {1 / means[others[-1]]:.2f} times as long as with {whom}"
    sets = f"geometric mean of {len(found)} sets" if len(found) > 1 else _set_name(next(iter(found)))
    return draw_figure(
        path,
        f"{words} ({sets})",
        [Dots("", f"times as fast as {whom}", list(map(_set_name, found)), dots, ticks, (whom, 1.0))],
        f"Warm fits, medians, {record['config']['clock']} clock; more is better. Numbers are rows, if a set is cut.",
    )


def _set_name(data: str) -> str:
    """Return a data set's name, its rows if it is cut, and whether two of its classes were kept."""
    name, *parts = data.split(":")
    rows = [f" {int(part):,}" for part in parts if part.isdigit()]
    return "".join([name, *rows, ", 2 classes" * ("bin" in parts)])

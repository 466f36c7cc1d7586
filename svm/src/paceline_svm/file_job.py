"""The work of `paceline svm fit` and `cross-validate` on every rank: `python -m paceline_svm.file_job JOB.json`.

The command line reads the data once, in LIBSVM's sparse format or CSV, and leaves it in a folder. Every rank takes its
part from there. A mistake in a data file is named with its line.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import math
import re
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import scipy.sparse as sp
import torch.distributed as dist
from numpy.typing import NDArray
from sklearn.datasets import load_svmlight_file
from sklearn.model_selection import KFold, StratifiedKFold

from paceline.errors import ConfigurationError
from paceline_svm.classifier import SVC
from paceline_svm.problem import Progress
from paceline_svm.single_problem import SVR, OneClassSVM

ESTIMATORS = {"classify": SVC, "regress": SVR, "novelty": OneClassSVM}
_PAUSE_S = 1.0
_MOST_SHOWN = 40  # characters of a cell


@dataclass(frozen=True)
class Table:
    """Rows and targets of a file.

    Attributes:
        X: Shape (N, D), dense from CSV, CSR from LIBSVM's format.
        y: Targets, shape (N,): numbers, or words if not all are numbers.
    """

    X: Any
    y: NDArray[Any]


@dataclass(frozen=True)
class Job:
    """A job; every rank reads the same file.

    Attributes:
        folder: Where the data is, and where rank 0 leaves the result.
        task: `classify`, `regress` or `novelty`.
        parameters: Of the estimator.
        num_folds: Cross-validate with as many folds; 0 fits on all rows.
        seed: Of the folds.
        is_quiet: Whether to print no progress.
    """

    folder: str
    task: str
    parameters: dict[str, Any]
    num_folds: int = 0
    seed: int = 0
    is_quiet: bool = False

    @property
    def model_file(self) -> Path:
        return Path(self.folder, "model.joblib")

    @property
    def result_file(self) -> Path:
        return Path(self.folder, "result.json")

    def save(self, table: Table) -> Path:
        """Write the data and this job; returns the job's file."""
        folder = Path(self.folder)
        if sp.issparse(table.X):
            sp.save_npz(folder / "X.npz", table.X, compressed=False)
        else:
            np.save(folder / "X.npy", table.X)
        np.save(folder / "y.npy", table.y)
        path = folder / "job.json"
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return path

    def load_table(self) -> Table:
        folder = Path(self.folder)
        sparse = folder / "X.npz"
        X = sp.load_npz(sparse) if sparse.exists() else np.load(folder / "X.npy", mmap_mode="r")
        return Table(X, np.load(folder / "y.npy"))


@dataclass
class Log:
    """Progress of a fit: printed now and then, kept for the figure."""

    is_quiet: bool
    points: list[Progress] = field(default_factory=list)
    printed_s: float = 0.0

    def __call__(self, progress: Progress) -> None:
        self.points.append(progress)
        now_s = time.monotonic()
        if not self.is_quiet and now_s - self.printed_s >= _PAUSE_S:
            self.printed_s = now_s
            print(  # noqa: T201 - a command's progress
                f"{progress.elapsed_s:6.1f} s: violation {progress.gap:.3g}, {progress.num_active} active samples, "
                f"{progress.num_support} support vectors",
                file=sys.stderr,
                flush=True,
            )


def check(
    task: str, parameters: dict[str, Any], table: Table, num_ranks: int, num_folds: int = 0, seed: int = 0
) -> None:
    """Refuse what would fail later, as a fit would.

    Raises:
        ConfigurationError: A parameter is out of its range, or these rows cannot be fitted, cut or shared that way.
    """
    num_rows = len(table.y)
    if num_folds > num_rows // (2 if task == "regress" else 1):
        each = "2 rows in each part" if task == "regress" else "a row in each part"
        raise ConfigurationError(
            f"--folds {num_folds} for {num_rows} rows: there has to be {each}. Pass fewer folds."
        )
    num_fitted = num_rows - -(-num_rows // num_folds) if num_folds else num_rows
    if num_ranks > num_fitted:
        raise ConfigurationError(
            f"--ranks-per-host {num_ranks} for {num_fitted} rows to fit: a rank needs a row or more. Pass fewer."
        )
    if task == "regress" and table.y.dtype.kind != "f":
        raise ConfigurationError(f"--task regress takes numbers as targets, and {str(table.y[0])!r} is none.")
    if task == "classify" and len(np.unique(table.y)) == 1:
        raise ConfigurationError(
            f"every row has the target {table.y[0]}: a classifier takes two classes or more."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fit itself will warn
            ESTIMATORS[task](**parameters, rows="all")._checked(table.X, table.y, None)
            _check_parts(task, table, num_folds, seed)
    except (ValueError, TypeError) as error:  # scikit-learn's words
        raise ConfigurationError(str(error)) from error


def _check_parts(task: str, table: Table, num_folds: int, seed: int) -> None:
    """Return whether every fit of a cross-validation has samples of two classes."""
    if not num_folds or task != "classify":
        return
    largest = int(np.unique(table.y, return_counts=True)[1].max())
    if num_folds > largest:
        raise ConfigurationError(
            f"--folds {num_folds}: the largest class has {largest} rows, and every part needs one. Pass fewer folds."
        )
    if any(len(np.unique(table.y[train])) < 2 for train, _ in _parts(task, table, num_folds, seed)):
        raise ConfigurationError(
            f"--folds {num_folds}: without one of its parts only one class is left to fit."
        )


def _parts(task: str, table: Table, num_folds: int, seed: int) -> Any:
    folds: Any = StratifiedKFold if task == "classify" else KFold
    return folds(num_folds, shuffle=True, random_state=seed).split(np.zeros(len(table.y)), table.y)


def read_model(path: Path) -> Any:
    """Return the estimator that `fit` left in a file.

    Raises:
        ConfigurationError: There is none.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no model {path}. Make one: paceline svm fit DATA --model {path}")
    try:
        found = joblib.load(path)
    except Exception as error:  # unpickling raises whatever the bytes happen to say
        raise ConfigurationError(
            f"{path} is not a model that can be read ({type(error).__name__}). Make one: paceline svm fit DATA "
            f"--model {path}"
        ) from error
    if not isinstance(found, tuple(ESTIMATORS.values())) or not hasattr(found, "n_features_in_"):
        raise ConfigurationError(
            f"{path} holds a {type(found).__name__}, no model that `paceline svm fit` wrote. Pass another file."
        )
    return found


def check_columns(path: Path, table: Table, model: Any) -> None:
    """Refuse rows of another width than the model's.

    Raises:
        ConfigurationError: Says both.
    """
    if table.X.shape[1] != model.n_features_in_:
        raise ConfigurationError(
            f"{path} has {table.X.shape[1]} columns and a target, but the model was fitted to {model.n_features_in_}."
        )


def run(job: Job) -> None:
    """Perform the job with the ranks there are; rank 0 writes the result."""
    table = job.load_table()
    rank = dist.get_rank() if dist.is_initialized() else 0
    result = _cross_validate(job, table) if job.num_folds else _fit(job, table, rank)
    if rank == 0:
        job.result_file.write_text(json.dumps(result))


def _estimator(job: Job, log: Log) -> Any:
    return ESTIMATORS[job.task](**job.parameters, rows="all", verbose=log)


def _fit(job: Job, table: Table, rank: int) -> dict[str, Any]:
    log = Log(job.is_quiet)
    started_s = time.monotonic()
    model = _estimator(job, log).fit(table.X, table.y)
    elapsed_s = time.monotonic() - started_s
    if rank == 0:
        model.verbose = False  # the log belongs to this fit
        joblib.dump(model, job.model_file)
    return {
        "num_samples": model.shape_fit_[0],
        "num_features": model.shape_fit_[1],
        "num_support": len(model.support_),
        "fit_s": elapsed_s,
        "tol": model.tol,
        "gap": np.atleast_1d(model.gap_).tolist(),
        "objective": np.atleast_1d(model.objective_).tolist(),
        "converged": model.fit_status_ == 0,
        "counters": [counters._asdict() for counters in model.counters_],
        "progress": [dataclasses.asdict(point) for point in log.points],
    }


def _cross_validate(job: Job, table: Table) -> dict[str, Any]:
    scores = []
    for train, test in _parts(job.task, table, job.num_folds, job.seed):
        model = _estimator(job, Log(job.is_quiet)).fit(table.X[train], table.y[train])
        if job.task == "novelty":
            scores.append(float(np.mean(model.predict(table.X[test]) == 1)))
        else:
            scores.append(float(model.score(table.X[test], table.y[test])))
    return {"num_samples": len(table.y), "scores": scores, "mean": float(np.mean(scores))}


def read_table(path: Path, num_features: int | None = None) -> Table:
    """Read a file; `.csv` is CSV with the target in the last column, anything else is LIBSVM's format.

    The first row of CSV may be a header: a name for every column, none of them a number.

    Args:
        path: The file.
        num_features: Columns to make room for in LIBSVM's format, whose rows end at their last non-zero.

    Raises:
        ConfigurationError: It is not there, or is not in that format; names the line, and the column of CSV.
    """
    if not path.is_file():
        raise ConfigurationError(
            f"there is no file {path}. Check the path; LIBSVM's format and CSV can be read."
        )
    table = _read_csv(path) if path.suffix.lower() == ".csv" else _read_libsvm(path, num_features)
    if table.X.shape[0] == 0:
        raise ConfigurationError(f"{path} has no rows.")
    return table


def _read_libsvm(path: Path, num_features: int | None) -> Table:
    try:
        X, y = load_svmlight_file(str(path), n_features=num_features, zero_based=False)
    except (ValueError, OverflowError, MemoryError) as error:
        raise _first_mistake(path, num_features, error) from error
    if not (np.isfinite(X.data).all() and np.isfinite(y).all()):
        raise _first_mistake(path, num_features, "a value is not finite")
    return Table(sp.csr_matrix(X), y)


def _first_mistake(path: Path, num_features: int | None, error: Exception | str) -> ConfigurationError:
    """Read slowly, to say in which line it is."""
    lines = path.read_bytes().decode(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        last = 0
        for at, word in enumerate(words):
            try:
                index, _, value = word.rpartition(":") if at else ("1", ":", word)
                if not math.isfinite(float(value)):
                    return _wrong(path, number, f"{word!r} is not finite")
                position = int(index)
            except ValueError:
                return _wrong(path, number, f"{word!r} is not {'index:value' if at else 'a number'}")
            if at and position <= last:
                return _wrong(path, number, f"index {position} after {last}; indices start at 1 and grow")
            if at and num_features is not None and position > num_features:
                return _wrong(path, number, f"index {position}, but the model has {num_features} features")
            last = position if at else 0
    return ConfigurationError(f"{path} cannot be read as LIBSVM's format: {error}")


def _read_csv(path: Path) -> Table:
    rows: list[list[float]] = []
    targets: list[str] = []
    lines: list[int] = []
    header: tuple[int, list[str]] | None = None
    width = 0
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as stream:
        reader = csv.reader(stream)
        for cells in reader:
            if not cells:
                continue
            if not width and all(map(_is_name, cells)):
                width, header = len(cells), (reader.line_num, cells)
                continue
            row = _numbers(path, reader.line_num, cells[:-1])
            width = width or len(cells)
            if len(cells) != width or width < 2:
                raise _wrong(path, reader.line_num, f"{len(cells)} columns, expected {max(width, 2)}")
            rows.append(row)
            targets.append(cells[-1])
            lines.append(reader.line_num)
    if header is not None and header[1][-1] in targets:  # no name of a column, but a row's target
        _numbers(path, header[0], header[1][:-1])
    y = np.array(targets)
    with contextlib.suppress(ValueError):
        y = y.astype(np.float64)
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        at = int(np.flatnonzero(~np.isfinite(y))[0])
        raise _wrong(path, f"{lines[at]}, column {width}", f"{targets[at]!r} is not finite")
    return Table(np.array(rows), y)


def _is_name(cell: str) -> bool:
    """Return whether it can head a column: it is no number and does not begin like one, as a mistyped one does."""
    with contextlib.suppress(ValueError):
        float(cell)
        return False
    return any(map(str.isalpha, cell)) and not re.match(r"\s*[-+]?[.,]?\d", cell)


def _numbers(path: Path, line: int, cells: list[str]) -> list[float]:
    row = []
    for column, cell in enumerate(cells, 1):
        try:
            row.append(float(cell))
        except ValueError:
            raise _wrong(path, f"{line}, column {column}", f"{cell!r} is not a number") from None
        if not math.isfinite(row[-1]):
            shown = cell if len(cell) < _MOST_SHOWN else f"{cell[:_MOST_SHOWN]}..."
            raise _wrong(path, f"{line}, column {column}", f"{shown!r} is not finite")
    return row


def _wrong(path: Path, line: int | str, what: str) -> ConfigurationError:
    return ConfigurationError(f"{path}, line {line}: {what}. Correct the line, or remove it.")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(Job(**json.loads(Path(sys.argv[1]).read_text())))
    dist.destroy_process_group()

"""What `paceline svm fit` and `cross-validate` do on every rank: `python -m paceline.svm.job JOB.json`.

The command line reads the data once and leaves it in a folder; every rank takes its part from there.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import scipy.sparse as sp
import torch.distributed as dist
from sklearn.model_selection import KFold, StratifiedKFold

from paceline.svm.classifier import SVC
from paceline.svm.files import Table
from paceline.svm.novelty import OneClassSVM
from paceline.svm.problem import Progress
from paceline.svm.regressor import SVR

ESTIMATORS = {"classify": SVC, "regress": SVR, "novelty": OneClassSVM}
_PAUSE_S = 1.0


@dataclass(frozen=True)
class Job:
    """What to do; every rank reads the same file.

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


def run(job: Job) -> None:
    """Do the job with the ranks there are; rank 0 writes the result."""
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
    folds: Any = StratifiedKFold if job.task == "classify" else KFold
    scores = []
    splits = folds(job.num_folds, shuffle=True, random_state=job.seed).split(np.zeros(len(table.y)), table.y)
    for train, test in splits:
        model = _estimator(job, Log(job.is_quiet)).fit(table.X[train], table.y[train])
        if job.task == "novelty":
            scores.append(float(np.mean(model.predict(table.X[test]) == 1)))
        else:
            scores.append(float(model.score(table.X[test], table.y[test])))
    return {"num_samples": len(table.y), "scores": scores, "mean": float(np.mean(scores))}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(Job(**json.loads(Path(sys.argv[1]).read_text())))
    dist.destroy_process_group()

"""A kernel SVM that many processes train, exactly: scikit-learn's estimators over torch's process groups.

Which module answers what, from the outside in:

    estimators      classifier, regressor and novelty, on estimator (fit, predict) and validation; pairs and votes are
                    one-vs-one training and prediction
    data            training_set (all ranks' samples, numbered), sample_forms (dense, CSR, Gram)
    where           placement (on one rank, or on all together), world (the collectives of a fit)
    small problems  small_problems (each solved as a whole by one thread)
    the solver      problem, solver, gradients, row_cache, stopping (the optimality check, and limits)
    working set     working_set (which variables), sub_problem and smo (how they are optimised)
    elimination     elimination (when), reconstruction (which samples, and their gradients)
    kernels         kernels (blocks), kernel_rows (single rows), sparse_expansion (sums over sparse rows), gaussian;
                    compiled and thread_pool run them
    the compiler    compiled (numba's options), compilation (shows it), next_compiled (by a fork), plain (what stands in
                    meanwhile), ahead_of_time (before anybody waits)
    command line    file_job
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use

if TYPE_CHECKING:
    from paceline_svm.classifier import SVC
    from paceline_svm.novelty import OneClassSVM
    from paceline_svm.problem import Counters, Progress
    from paceline_svm.regressor import SVR

__all__ = ["SVC", "SVR", "Counters", "OneClassSVM", "Progress"]

# So that `paceline --help`, which lists this package's command, imports neither torch nor scikit-learn.
__getattr__ = on_first_use(
    __name__,
    {
        "SVC": "classifier",
        "SVR": "regressor",
        "Counters": "problem",
        "OneClassSVM": "novelty",
        "Progress": "problem",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)

"""A kernel SVM that many processes train, exactly: scikit-learn's estimators over torch's process groups.

Which module answers what, from the outside in:

    estimators      classifier and single_problem, on estimator (fit, predict) and validation; one_vs_one trains and
                    asks a problem for each pair of classes
    data            training_set (all ranks' samples, numbered), sample_forms (dense, CSR, Gram)
    where           placement (on one rank, or on all together), communicator (the collectives of a fit)
    small problems  small_problems (each solved as a whole by one thread)
    the solver      problem, solver, gradients (and their cache), stopping (the optimality check, and limits)
    working set     working_set (which variables, and their sub-problem), smo (pair updates)
    shrinking       shrinking (when, which samples, and their gradients afterwards)
    kernels         kernels (blocks), kernel_rows (single rows), gaussian; compiled and thread_pool run them
    command line    cli, file_job
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use

if TYPE_CHECKING:
    from paceline_svm.classifier import SVC
    from paceline_svm.problem import Counters, Progress
    from paceline_svm.single_problem import SVR, OneClassSVM

__all__ = ["SVC", "SVR", "Counters", "OneClassSVM", "Progress"]

# So that `paceline --help`, which lists this package's command, imports neither torch nor scikit-learn.
__getattr__ = on_first_use(
    __name__,
    {
        "classifier": "SVC",
        "problem": "Counters Progress",
        "single_problem": "OneClassSVM SVR",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)

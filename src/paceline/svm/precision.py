"""In which precision are kernel rows? The check of the optimum is in double precision, whatever they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.svm.problem import Problem
from paceline.svm.world import World

_SINGLE_TOL = 1e-4
_SINGLE_EXPONENT = 1e4
_SAFETY = 4.0  # so C up to 2,000 for a tol of 0.001


def rows_dtype(problem: Problem, tol: float, world: World) -> np.dtype[Any]:
    """Single precision where a Gaussian kernel is well scaled, and neither `tol` small nor coefficients large.

    A gradient errs by an epsilon for each unit of a coefficient: where that is near `tol`, pair updates go round in
    circles. Alike on all ranks. Collective.
    """
    kernel = problem.kernel
    exponent = kernel.gamma * float(problem.samples.squares.max(initial=0.0))
    largest = float(np.maximum(problem.upper, -problem.lower).max(initial=0.0))
    error = _SAFETY * float(np.finfo(np.float32).eps) * largest
    wants = kernel.name != "rbf" or tol < _SINGLE_TOL or exponent > _SINGLE_EXPONENT or error > tol
    wanted = world.total(np.array([int(wants)]), "agreeing on the precision")[0]
    return np.dtype(np.float64 if wanted else np.float32)

"""In which precision are kernel rows? The check of the optimum is in double precision, whatever they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.svm.problem import Problem
from paceline.svm.world import World

_SINGLE_TOL = 1e-4
_SINGLE_EXPONENT = 1e4


def rows_dtype(problem: Problem, tol: float, world: World) -> np.dtype[Any]:
    """Single precision where a Gaussian kernel is well scaled and `tol` not small; alike on all ranks. Collective."""
    kernel = problem.kernel
    exponent = kernel.gamma * float(problem.samples.squares.max(initial=0.0))
    wants = kernel.name != "rbf" or tol < _SINGLE_TOL or exponent > _SINGLE_EXPONENT
    wanted = world.total(np.array([int(wants)]), "agreeing on the precision")[0]
    return np.dtype(np.float64 if wanted else np.float32)

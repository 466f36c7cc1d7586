"""Everything compiled before anybody waits for it: `paceline svm compile`, in an image or after an installation."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from paceline.numba_cache import waiting
from paceline_svm.classifier import SVC
from paceline_svm.compilation import Compilation, shown
from paceline_svm.regressor import SVR

OTHER_KERNELS = ("linear", "poly", "sigmoid")  # than rbf
_LARGE = 3_100  # rows of a problem that is too large to be solved as a whole


def compile_all() -> Compilation:
    """Compile what estimators of dense and sparse rows with any kernel need, by small fits and predictions.

    Where the code is there already it takes about a second.
    """
    generator = np.random.default_rng(0)
    X, wide = generator.normal(size=(_LARGE, 4)), generator.normal(size=(_LARGE, 64))
    X[np.abs(X) < 0.1] = 0.0
    y = (X[:, 0] + X[:, 1] ** 2 > 0.5).astype(int)
    three = y + (X[:, 2] > 1)
    with waiting(), shown(always=True) as listener:
        for rows, labels in ((X[:200], y[:200]), (X[:200], three[:200]), (X, y), (wide, y)):
            for form in (rows, sp.csr_matrix(rows)):
                SVC(rows="alone").fit(form, labels).predict(form[:10])
        for kernel in OTHER_KERNELS:
            for num in (200, _LARGE):
                SVC(kernel=kernel, gamma=0.1, rows="alone", tol=1.0).fit(X[:num], y[:num]).predict(X[:10])
        SVR(rows="alone", tol=0.1).fit(X[:200], X[:200, 0])
    return listener

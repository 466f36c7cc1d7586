"""A kernel SVM that many processes train, exactly: scikit-learn's estimators over torch's process groups."""

from __future__ import annotations

from paceline.errors import ConfigurationError

try:
    from paceline.svm.classifier import SVC
    from paceline.svm.novelty import OneClassSVM
    from paceline.svm.problem import Counters, Progress
    from paceline.svm.regressor import SVR
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in ("sklearn", "scipy", "numba", "joblib"):
        raise
    raise ConfigurationError(
        f"paceline.svm needs {error.name}, which is not installed. pip install 'paceline[svm]'"
    ) from error

__all__ = ["SVC", "SVR", "Counters", "OneClassSVM", "Progress"]

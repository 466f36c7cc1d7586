"""Probabilities from decision values: a sigmoid for each pair of classes, and one distribution from all pairs.

The sigmoids are fitted to decision values of samples that the deciding model was not trained on: folds of the training
set, dealt out by `random_state` alone, so that any number of ranks gives the same probabilities.

Source:
    Platt 1999 with the targets of Lin, Lin & Weng 2007; pairwise coupling: Wu, Lin & Weng 2004, second method.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, log_expit

from paceline.errors import ConfigurationError

NUM_FOLDS = 5


def folds(labels: NDArray[np.float64], seed: int | None) -> NDArray[np.int64]:
    """The fold of every sample, each class spread evenly over all folds.

    Args:
        labels: Of all samples, the same on every rank.
        seed: Decides who is with whom.
    """
    counts = np.unique(labels, return_counts=True)[1]
    if counts.min() < 2:
        raise ConfigurationError(
            "probability=True fits models on parts of the training set, so every class needs at least 2 samples; "
            f"one has {counts.min()}. Add samples, or leave probability out."
        )
    generator = np.random.default_rng(seed)
    fold = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        fold[generator.permutation(members)] = np.arange(len(members)) % min(NUM_FOLDS, counts.min())
    return fold


def sigmoid(decisions: NDArray[np.float64], is_first: NDArray[np.bool_]) -> tuple[float, float]:
    """(A, B), such that 1 / (1 + exp(A d + B)) is the probability of the first class at decision value d."""
    num_first, num_second = is_first.sum(), (~is_first).sum()
    target = np.where(is_first, (num_first + 1) / (num_first + 2), 1 / (num_second + 2))

    def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        z = parameters[0] * decisions + parameters[1]
        value = -(target * log_expit(-z) + (1 - target) * log_expit(z)).sum()
        slope = target - expit(-z)
        return float(value), np.array([(slope * decisions).sum(), slope.sum()])

    start = np.array([0.0, np.log((num_second + 1) / (num_first + 1))])
    found = minimize(loss, start, jac=True, method="L-BFGS-B").x
    return float(found[0]), float(found[1])


def coupled(pairwise: NDArray[np.float64], num_classes: int) -> NDArray[np.float64]:
    """One distribution from the probabilities of pairs.

    Args:
        pairwise: P(first | first or second) of each pair, in the order of `itertools.combinations`, shape (N, pairs).
        num_classes: K.

    Returns:
        Shape (N, K): p with the least sum over pairs of (r_ji p_i - r_ij p_j)^2, not negative, of sum 1.
    """
    if num_classes == 2:
        return np.hstack([pairwise, 1 - pairwise])
    pairwise = np.clip(pairwise, 1e-7, 1 - 1e-7)
    Q = np.zeros((len(pairwise), num_classes + 1, num_classes + 1))
    for pair, (i, j) in enumerate(itertools.combinations(range(num_classes), 2)):
        r = pairwise[:, pair]
        Q[:, i, i] += (1 - r) ** 2
        Q[:, j, j] += r**2
        Q[:, i, j] = Q[:, j, i] = -r * (1 - r)
    Q[:, -1, :-1] = Q[:, :-1, -1] = 1.0
    wanted = np.zeros((len(pairwise), num_classes + 1, 1))
    wanted[:, -1] = 1.0
    p = np.maximum(np.linalg.solve(Q, wanted)[:, :-1, 0], 0.0)
    return np.asarray(p / p.sum(axis=1, keepdims=True))

"""Chooses a minibatch and the algorithm of every layer for it, within a memory: an integer program.

    M_bound(X) = M_device - M_fixed - X M_sample

is what a minibatch of X leaves for workspaces: M_fixed are weights, gradients and the optimizer's state, M_sample the
feature maps of one sample. Layer k computed by algorithm l takes `T[k,l](X)` seconds and a workspace of `M[k,l](X)`
bytes:

    minimise   sum over k, l of x[k,l] T[k,l]
    subject to sum over k, l of x[k,l] M[k,l] <= M_bound(X),  sum over l of x[k,l] = 1 for every k,  x binary.

For every X that is asked about, this is solved exactly; the X with the most samples a second is taken. A larger X is
not always faster: it leaves less memory for the algorithms that need some.

Source: Zou et al. 2017, from memory: its full text was not to be had (solved there with GLPK, here with scipy's HiGHS).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import LinearConstraint, milp

from paceline.errors import ConfigurationError


@dataclass(frozen=True)
class Alternative:
    """One way to compute a layer at one minibatch."""

    name: str
    time_s: float
    workspace_bytes: float

    def __post_init__(self) -> None:
        if not (0 <= self.time_s < float("inf") and 0 <= self.workspace_bytes < float("inf")):
            raise ConfigurationError(f"{self}: a time and a workspace are finite and 0 or more.")


@dataclass(frozen=True)
class Choice:
    """An algorithm for every layer.

    Attributes:
        names: One a layer.
        time_s: Of all layers.
        workspace_bytes: Of all layers.
    """

    names: tuple[str, ...]
    time_s: float
    workspace_bytes: float


@dataclass(frozen=True)
class Memory:
    """The memory of a device, and what training takes of it."""

    device_bytes: float
    fixed_bytes: float
    sample_bytes: float

    def bound(self, X: int) -> float:
        """Return M_bound, the bytes that a minibatch of X leaves for workspaces; below 0 if it does not fit."""
        return self.device_bytes - self.fixed_bytes - X * self.sample_bytes


def choose_algorithms(layers: Sequence[Sequence[Alternative]], bound_bytes: float) -> Choice | None:
    """Return the fastest algorithms whose workspaces fit together; None if none do.

    Raises:
        ConfigurationError: A layer has no alternative.
    """
    if not layers or not all(layers):
        raise ConfigurationError("every layer needs at least one measured algorithm to choose from.")
    flat = [alternative for layer in layers for alternative in layer]
    times_s = np.array([x.time_s for x in flat])
    spaces = np.array([x.workspace_bytes for x in flat])
    owner = np.repeat(np.arange(len(layers)), [len(layer) for layer in layers])
    one_each = (owner == np.arange(len(layers))[:, None]).astype(float)
    unit = max(spaces.max(), abs(bound_bytes), 1.0)  # so that the solver's tolerance means something
    scale_s = times_s.max() or 1.0
    solved = milp(
        times_s / scale_s,
        integrality=np.ones(len(flat)),
        bounds=(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(spaces[None, :] / unit, -np.inf, bound_bytes / unit),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if solved.x is None:
        return None
    chosen = [alternative for alternative, x in zip(flat, solved.x, strict=True) if x > 0.5]
    return Choice(
        tuple(x.name for x in chosen),
        sum(x.time_s for x in chosen),
        sum(x.workspace_bytes for x in chosen),
    )


@dataclass(frozen=True)
class Minibatch:
    """One size, and the best that can be done with it.

    Attributes:
        X: Samples.
        bound_bytes: For workspaces.
        choice: None: it does not fit.
    """

    X: int
    bound_bytes: float
    choice: Choice | None

    @property
    def samples_per_s(self) -> float:
        """Return the samples per second, or 0 if it does not fit."""
        if self.choice is None:
            return 0.0
        return self.X / self.choice.time_s if self.choice.time_s else float("inf")


def choose_minibatch(
    memory: Memory, measured: Mapping[int, Sequence[Sequence[Alternative]]]
) -> tuple[Minibatch, tuple[Minibatch, ...]]:
    """Return the minibatch with the most samples per second, and every minibatch that was asked about.

    Args:
        memory: The device's memory.
        measured: For each size, every layer's alternatives at that size.

    Raises:
        ConfigurationError: None of the sizes fits; the message says how much is missing.
    """
    if not measured or min(measured) < 1:
        raise ConfigurationError("a minibatch is chosen among sizes of 1 or more, and none was given.")
    found = tuple(
        Minibatch(X, memory.bound(X), choose_algorithms(layers, memory.bound(X)))
        for X, layers in sorted(measured.items())
    )
    if all(x.choice is None for x in found):
        smallest = found[0]
        least = sum(min(a.workspace_bytes for a in layer) for layer in measured[smallest.X])
        raise ConfigurationError(
            f"no minibatch fits: {smallest.X} samples leave {smallest.bound_bytes / 2**20:,.0f} MiB for workspaces, "
            f"and the smallest of every layer need {least / 2**20:,.0f} MiB. Pass a smaller minibatch or more memory."
        )
    return max(found, key=lambda x: x.samples_per_s), found

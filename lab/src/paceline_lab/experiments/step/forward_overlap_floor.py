"""The least time of a step whose gradients the next forward hides, and of one where backward alone does.

They hold for whatever order gradients are sent in, so a measured step is compared with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer's forward and backward, and the bytes of its gradients."""

    forward_s: float
    backward_s: float
    num_bytes: int


def least_step_s(layers: Sequence[Layer], optimizer_s: float, rate_bytes_per_s: float) -> float:
    """Return a lower bound of a step in the steady state, for any order of sending.

    The gradients of layers 0 to j are there when backward has come down to layer j. All of them have to be sent after
    that, and before forward goes on with layer j. So for every j a step takes at least three parts. They are backward
    of the layers from the last to j, sending layers 0 to j, and forward of the layers from j on. A step also takes at
    least its computation.

    Args:
        layers: Layers in the order of forward.
        optimizer_s: Time of the optimizer's step, which is computation.
        rate_bytes_per_s: Bytes of gradients that the link can reduce in a second.
    """
    least_s = sum(layer.forward_s + layer.backward_s for layer in layers) + optimizer_s
    above_s = sum(layer.forward_s + layer.backward_s for layer in layers)  # of the layers from j to the last
    below_bytes = 0
    for layer in layers:
        below_bytes += layer.num_bytes
        least_s = max(least_s, above_s + below_bytes / rate_bytes_per_s)
        above_s -= layer.forward_s + layer.backward_s
    return least_s


def step_without_s(layers: Sequence[Layer], optimizer_s: float, rate_bytes_per_s: float) -> float:
    """Return the least step whose gradients backward alone hides: each layer is sent as soon as it is there."""
    now_s = free_s = 0.0
    for layer in reversed(layers):
        now_s += layer.backward_s
        free_s = max(free_s, now_s) + layer.num_bytes / rate_bytes_per_s
    return max(now_s, free_s) + sum(layer.forward_s for layer in layers) + optimizer_s

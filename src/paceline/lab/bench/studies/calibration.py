"""How large must the emulated model be for communication and computing to have the published proportion?

Two cores cannot feed 16 links of 100 Gbit/s, but only proportions matter: a step is

    compute + communication = compute + 2 (P-1)/P * N / (scale * rate)

so a model whose N bytes are divided by `scale` behaves on a slow link as the whole one on a link `scale` times as
fast. What does not shrink is what a reduction costs whatever its size: a round of messages takes a fraction of a
millisecond, and more where ranks share cores. Steps are therefore made longer than published, too (`compute_s`), so
that this stays about as small a part of a step as it was.
"""

from __future__ import annotations

import math

from paceline.lab.bench.layer_profile import Profile
from paceline.lab.bench.limit import StepLimit, ring_bytes_per_rank
from paceline.lab.bench.timed_model import gradient_bytes

GOODPUT = 0.93  # of a link's rate, for payload; measured


def scale_for(
    profile: Profile,
    num_ranks: int,
    rate_bytes_per_s: float,
    communication_to_compute: float,
    num_bytes: int = 0,
) -> float:
    """Return what the gradients' bytes have to be divided by.

    Args:
        profile: How long the model computes.
        num_ranks: Where the proportion is to hold.
        rate_bytes_per_s: Of each link.
        communication_to_compute: An all-reduce of all gradients, to forward and backward.
        num_bytes: What the gradients send unscaled; 0: 4 a number.
    """
    compute_s = profile.forward_s + profile.backward_s
    affordable = communication_to_compute * compute_s * rate_bytes_per_s * GOODPUT
    return max(1.0, ring_bytes_per_rank(num_ranks, num_bytes or gradient_bytes(profile)) / affordable)


def realisable(profile: Profile, communication_to_compute: float) -> float:
    """Return the share of the ideal overlap's gain that the order of the gradients leaves possible.

    A gradient can leave when its layer's backward is done, and the link carries one after the other: what is ready
    last has nothing left to hide behind. 1 for a model whose last gradients are small, 0 for one with all at the end.
    """
    compute_s = profile.forward_s + profile.backward_s
    communication_s = communication_to_compute * compute_s
    num_bytes = gradient_bytes(profile)
    ready_s = sent_s = 0.0
    for layer in reversed(profile.layers):
        ready_s += layer.backward_s
        own = sum(4 * math.prod(shape) for shape in layer.shapes)
        sent_s = max(sent_s, ready_s) + communication_s * own / num_bytes
    limit = StepLimit(profile.forward_s, profile.backward_s, communication_s, profile.optimizer_s)
    return limit.realised(profile.forward_s + max(sent_s, profile.backward_s) + profile.optimizer_s)

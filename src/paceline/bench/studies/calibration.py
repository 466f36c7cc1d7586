"""How large must the emulated model be for communication and computing to have the published proportion?

Two cores cannot feed 16 links of 100 Gbit/s, but only proportions matter: a step is

    compute + communication = compute + 2 (P-1)/P * N / (scale * rate)

so a model whose N bytes are divided by `scale` behaves on a slow link as the whole one on a link `scale` times as
fast. What does not shrink is what a reduction costs whatever its size: a round of messages takes a fraction of a
millisecond, and more where ranks share cores. Steps are therefore made longer than published, too (`compute_s`), so
that this stays about as small a part of a step as it was.
"""

from __future__ import annotations

from paceline.bench.limit import ring_bytes_per_rank
from paceline.bench.profile import Profile
from paceline.bench.timed import gradient_bytes

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

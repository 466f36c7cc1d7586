"""Numbers of papers' figures, and the scale at which an emulated model has their ratio of communication to computing.

Numbers are read off the pictures, to within a few per cent.

Two cores cannot feed 16 links of 100 Gbit/s, but only proportions matter: a step is

    compute + communication = compute + 2 (P-1)/P * N / (scale * rate)

So a model with N / `scale` bytes on a slow link behaves like the whole one on a link `scale` times as fast. The fixed
cost of a reduction does not shrink: a round of messages takes a fraction of a millisecond, and more where ranks share
cores. Steps are therefore made longer than published, too (`compute_s`). So this cost stays about as small a part of a
step as it was.

`ddp` below is Li et al., "PyTorch Distributed", VLDB 2020, figures 6 to 12. `mlstm` is Puri et al., "Large Scale
Language Modeling", 2018, and the sentiment-discovery repository's page on scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline_lab.bench.layer_profile import Profile
from paceline_lab.bench.limit import StepLimit, backward_and_communication_s, ring_bytes_per_rank
from paceline_lab.bench.timed_model import gradient_bytes


@dataclass(frozen=True)
class Breakdown:
    """Figure 6, 32 GPUs: phases as shares of the step without overlap, and the step with it."""

    forward: float
    backward: float
    communication: float
    optimizer: float
    overlapped: float

    @property
    def communication_to_compute(self) -> float:
        return self.communication / (self.forward + self.backward)

    @property
    def ideal(self) -> float:
        return self.forward + max(self.backward, self.communication) + self.optimizer

    @property
    def realised(self) -> float:
        """Share of the gain that perfect overlap would bring."""
        total = self.forward + self.backward + self.communication + self.optimizer
        return (total - self.overlapped) / (total - self.ideal)


Case = tuple[str, str]  # workload and backend
BREAKDOWN: dict[Case, Breakdown] = {
    ("resnet50", "NCCL"): Breakdown(0.15, 0.40, 0.44, 0.014, 0.62),
    ("resnet50", "Gloo"): Breakdown(0.118, 0.277, 0.595, 0.010, 0.735),
    ("bert", "NCCL"): Breakdown(0.088, 0.42, 0.477, 0.014, 0.648),
    ("bert", "Gloo"): Breakdown(0.059, 0.25, 0.68, 0.010, 0.786),
}

# Figures 7 and 8: seconds a step by bucket cap in MB, on 16 and on 32 GPUs.
BUCKET_CAPS: dict[str, tuple[float, ...]] = {
    "resnet50": (0, 5, 10, 25, 50),
    "bert": (0, 5, 10, 25, 50, 100, 200),
}
BUCKET_SECONDS: dict[tuple[str, str, int], tuple[float, ...]] = {
    ("resnet50", "NCCL", 16): (0.1649, 0.1263, 0.1178, 0.1171, 0.1288),
    ("resnet50", "Gloo", 16): (0.242, 0.1588, 0.1704, 0.1747, 0.2108),
    ("resnet50", "NCCL", 32): (0.190, 0.122, 0.1208, 0.1208, 0.1184),
    ("resnet50", "Gloo", 32): (0.344, 0.157, 0.162, 0.1875, 0.217),
    ("bert", "NCCL", 16): (0.505, 0.469, 0.450, 0.440, 0.429, 0.435, 0.442),
    ("bert", "Gloo", 16): (0.850, 0.764, 0.798, 0.855, 0.987, 0.838, 0.930),
    ("bert", "NCCL", 32): (0.567, 0.450, 0.440, 0.452, 0.469, 0.452, 0.454),
    ("bert", "Gloo", 32): (1.002, 0.774, 0.793, 0.827, 0.889, 0.903, 0.875),
}

# Figure 9: seconds a step by GPUs; a shared cluster beyond 32.
SCALING_GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SCALING_SECONDS: dict[Case, tuple[float, ...]] = {
    ("resnet50", "NCCL"): (0.149, 0.172, 0.175, 0.195, 0.218, 0.255, 0.252, 0.261, 0.304),
    ("resnet50", "Gloo"): (0.160, 0.212, 0.255, 0.275, 0.291, 0.372, 0.394, 0.441, 0.497),
    ("bert", "NCCL"): (0.324, 0.462, 0.522, 0.564, 0.720, 0.558, 0.594, 0.618, 0.786),
    ("bert", "Gloo"): (0.324, 0.852, 1.158, 1.284, 1.404, 1.716, 1.794, 2.08, 2.334),
}

# Figure 10: ResNet-50, seconds a step on 256 GPUs by steps between synchronizations; alone 0.161 s.
SKIPPED_EVERY = (1, 2, 4, 8)
SKIPPED_ALONE_S = 0.161
SKIPPED_SECONDS: dict[str, tuple[float, ...]] = {
    "NCCL": (0.3055, 0.229, 0.191, 0.197),
    "Gloo": (0.515, 0.362, 0.266, 0.224),
}

# Figure 12: seconds a step on 16 GPUs by process groups that take turns.
GROUPS = (1, 3, 5)
GROUP_SECONDS: dict[Case, tuple[float, ...]] = {
    ("resnet50", "NCCL"): (0.1168, 0.1166, 0.1164),
    ("resnet50", "Gloo"): (0.169, 0.166, 0.169),
    ("bert", "NCCL"): (0.4365, 0.344, 0.327),
    ("bert", "Gloo"): (0.894, 0.953, 1.048),
}

# The mLSTM page's chart: speed-up by GPUs; None where the picture does not tell.
MLSTM_GPUS = (1, 8, 16, 32, 64, 128)
MLSTM_SPEED_UP: dict[str, tuple[float | None, ...]] = {
    "4k, InfiniBand": (1, None, 13.5, 27.4, 55.9, 108.9),
    "8k, InfiniBand": (1, 7.85, 15.9, 31.5, 61.3, 120.7),
    "4k, Ethernet": (1, None, 11.75, 23.5, 45.7, 92.6),
}
# A step without overlap is compute + communication, so 72 % on Ethernet says that communication in 16 bits took this
# much of compute: 1/0.72 - 1.
MLSTM_SLOW_COMMUNICATION_TO_COMPUTE = MLSTM_GPUS[-1] / 92.6 - 1


GOODPUT = 0.93  # of a link's rate, for payload; measured


def scale_for(
    profile: Profile,
    num_ranks: int,
    rate_bytes_per_s: float,
    communication_to_compute: float,
    num_bytes: int = 0,
) -> float:
    """Return the divisor of the gradients' bytes.

    Args:
        profile: Times of the model.
        num_ranks: Number of ranks at which the proportion is to hold.
        rate_bytes_per_s: Rate of each link.
        communication_to_compute: An all-reduce of all gradients, to forward and backward.
        num_bytes: Unscaled bytes of the gradients on the wire; 0: 4 per number.
    """
    compute_s = profile.forward_s + profile.backward_s
    affordable = communication_to_compute * compute_s * rate_bytes_per_s * GOODPUT
    return max(1.0, ring_bytes_per_rank(num_ranks, num_bytes or gradient_bytes(profile)) / affordable)


def realisable(profile: Profile, communication_to_compute: float) -> float:
    """Return the share of the ideal overlap's gain that the order of the gradients leaves possible.

    A gradient can leave when its layer's backward is done, and the link carries one after the other. The gradients that
    are ready last have nothing left to hide behind. The share is 1 for a model whose last gradients are small, 0 for
    one with all at the end.
    """
    compute_s = profile.forward_s + profile.backward_s
    communication_s = communication_to_compute * compute_s
    layers = [
        (layer.backward_s, sum(4 * math.prod(shape) for shape in layer.shapes))
        for layer in reversed(profile.layers)
    ]
    backward_s = backward_and_communication_s(layers, communication_s)
    limit = StepLimit(profile.forward_s, profile.backward_s, communication_s, profile.optimizer_s)
    return limit.realised(profile.forward_s + backward_s + profile.optimizer_s)

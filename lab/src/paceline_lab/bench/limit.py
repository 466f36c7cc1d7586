"""The limits of a training step and of an all-reduce: how fast could it be? Arithmetic only.

    bytes per rank = 2 (P-1)/P * N, the least without help from the network (a flat ring)
    communication  = bytes per rank / the slowest link's rate
    no overlap     = forward + backward + communication + optimizer
    ideal          = forward + max(backward, communication) + optimizer
    realised       = (no overlap - measured) / (no overlap - ideal)

With several ranks on a host, a flat ring of consecutive ranks sends that many bytes over each host's link, too.
Reducing within hosts first would need 2 (H-1)/H * N only, for H hosts. Headers (4 to 5 % with an MTU of 1,500) are
not counted. A side that sends fewer bytes (a cast, a low rank) may realise more than 1.

Not all of the ideal can be reached: the gradients that become ready last have nothing left to hide behind.
`backward_and_communication_s` is what a perfect implementation takes that sends each layer's gradients at once.

Source: Li et al., VLDB 2020, figure 6, in which torch realises 0.84 to 0.96.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from paceline.planning.replay import Wire, replay


def ring_bytes_per_rank(num_ranks: int, num_bytes: int) -> float:
    """Return what each rank sends in a ring all-reduce of `num_bytes`."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


def bus_rate(num_ranks: int, num_bytes: int, seconds: float) -> float:
    """Return nccl-tests' busbw in bytes a second: the rate at which every rank sends, whatever their number."""
    return ring_bytes_per_rank(num_ranks, num_bytes) / seconds


def backward_and_communication_s(layers: Sequence[tuple[float, int]], communication_s: float) -> float:
    """Return the least time from the start of backward to the last byte.

    Args:
        layers: Seconds of backward and bytes of gradients, in the order of backward.
        communication_s: Time of all bytes; the wire serves them in the order in which they are ready, at one rate.
    """
    num_bytes = sum(size for _, size in layers)
    ready_s = list(accumulate(layer_s for layer_s, _ in layers))
    sent_s = [communication_s * size / num_bytes for _, size in layers]
    done = replay(ready_s, [Wire(0.0, seconds, seconds) for seconds in sent_s], ready_s[-1])
    return done.end_s


@dataclass(frozen=True)
class StepLimit:
    """The parts of a step when nothing overlaps.

    Attributes:
        forward_s: Time of forward alone.
        backward_s: Time of backward alone.
        communication_s: Time of reducing all gradients in float32, alone.
        optimizer_s: Time of the optimizer alone.
    """

    forward_s: float
    backward_s: float
    communication_s: float
    optimizer_s: float

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def no_overlap_s(self) -> float:
        return self.compute_s + self.communication_s

    @property
    def ideal_s(self) -> float:
        return self.forward_s + max(self.backward_s, self.communication_s) + self.optimizer_s

    def realised(self, measured_s: float) -> float:
        """Return the share of the possible gain that a measured step has made; 0 without a possible gain."""
        possible_s = self.no_overlap_s - self.ideal_s
        return (self.no_overlap_s - measured_s) / possible_s if possible_s > 0 else 0.0

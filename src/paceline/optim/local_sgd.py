"""Local SGD: each rank trains by itself, and every so many steps all take the mean of their parameters."""

from __future__ import annotations

from paceline.optim.flat_parameters import FlatParameters
from paceline.optim.local_steps import LocalSteps


class LocalSGD(LocalSteps):
    """Steps `optimizer` on this rank's gradients, and averages parameters every `every` steps.

    For links where even compressed gradients take too long: it sends 1/every of the bytes. The ranks' models drift
    apart in between, so accuracy falls at some `every`; try 2, 4, 8. With `every=1` and plain SGD (no momentum) it
    equals averaging gradients, up to rounding.

    Limits first: nothing overlaps with backward; two copies of the parameters are kept; each rank keeps its own
    momentum, which is not averaged.

    Args:
        optimizer: Any optimizer that needs no closure. Schedulers and GradScaler may be given either it or this.
        every: Steps between two synchronizations.
        process_group: Over whom; None for the default group.
        buffers: Averaged with the parameters, for example `model.buffers()`; counters become rank 0's. Left out, each
            rank keeps its own running statistics.
        compression: Send fewer bytes for the changes, as for `DistributedDataParallel`.

    Contract:
        The model is not wrapped. Collective: the constructor (parameters become rank 0's), the first `step`, every
        `every`-th, and `synchronize`. Afterwards parameters are bitwise equal on all ranks.

    Raises:
        ConfigurationError: A setting cannot be.
        ReplicaMismatchError: The ranks' parameters differ in number, shape or dtype; on every rank.
        ProtocolError: The ranks took different numbers of steps; on every rank.
        PeerLostError: A rank died or hangs.

    Source:
        Stich: "Local SGD Converges Fast and Communicates Little", ICLR 2019, algorithm 1.
    """

    def _move(self, index: int, flat: FlatParameters) -> None:
        """The mean change is the change."""

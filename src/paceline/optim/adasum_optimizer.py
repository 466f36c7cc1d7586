"""`AdasumOptimizer`: each rank steps its own optimizer, and Adasum combines the updates instead of the gradients.

Rules
1. Those of `across_ranks`.
2. A step is: keep the parameters, step the optimizer, take the change, combine the changes of all ranks by Adasum,
   and add the result to what was kept. What was kept is bitwise the same on all ranks, so the parameters stay so.

Source: Maleki et al. 2021, "Scaling distributed training with adaptive summation", section 4 (post-optimizer form).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from paceline.optim.across_ranks import AcrossRanks
from paceline.reductions.adasum import Adasum


class AdasumOptimizer(AcrossRanks):
    """Steps `optimizer` on this rank's gradients, and combines all ranks' updates by Adasum.

    For optimizers with state: what Adam makes of a combined gradient is not what combining the ranks' Adam steps makes.
    With plain SGD (no momentum, no weight decay) it equals `DistributedDataParallel(reduction="adasum")` up to
    rounding.

    Limits first: nothing overlaps with backward; two copies of the parameters are kept; buffers (running
    statistics) stay each rank's own; a rank whose gradients overflow under a GradScaler adds nothing to that step.

    Args:
        optimizer: Any optimizer that needs no closure, over parameters that are laid out alike on all ranks. Schedulers
            and GradScaler may be given either it or this.
        process_group: Over whom; None for the default group.
        reduction: How updates are combined; for example `Adasum(hosts="auto")`.

    Attributes:
        optimizer: The one that was given.
        reduction: `reduction.orthogonality` tells how much the ranks' updates agree.

    Contract:
        Collective: the constructor, `step` and `add_param_group`. The constructor overwrites the parameters by rank
        0's. Afterwards, and after each `step`: parameters are bitwise equal on all ranks.

    Raises:
        ConfigurationError: The optimizer needs a closure, or it is not one.
        ReplicaMismatchError: The ranks' parameters differ in number, shape or dtype; on every rank.
        PeerLostError: A rank died or hangs; the parameters are those of before the step.
    """

    reduction: Adasum
    _when_lost = "The parameters are those of before this step."
    _not_local = (
        'To combine gradients instead of updates, wrap it with reduction="adasum" and use the optimizer as it is. See '
        "docs/guide/adasum.md."
    )

    def __init__(
        self, optimizer: Optimizer, process_group: ProcessGroup | None = None, reduction: Adasum | None = None
    ) -> None:
        super().__init__(optimizer, process_group, Adasum() if reduction is None else reduction)

    def _settings(self) -> str:
        return repr(self.reduction)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the optimizer here, and replace its update by the Adasum of all ranks' updates.

        Args:
            closure: Handed to the optimizer.

        Contract:
            Collective: every rank.  Blocks: yes.  Mutates: the parameters, this rank's optimizer state.
            Afterwards: parameters are bitwise equal on all ranks.

        Raises:
            ConfigurationError: The gradients are the same on all ranks. Nothing was changed.
            PeerLostError: A rank died or hangs. The parameters are those of before, the state is one step ahead.
        """
        self._check_step()
        for flat in self._flats:
            flat.take()
        loss = self._step_here(closure)
        try:
            self._combine()
        except BaseException:
            for flat in self._flats:
                flat.put_back()
            raise
        self._num_steps += 1
        return loss

    def _combine(self) -> None:
        self.reduction.begin_step()
        for flat in self._flats:
            flat.take_update()
        launched = [
            self.reduction.launch(flat.message(index, len(self._flats), self._group))
            for index, flat in enumerate(self._flats)
        ]
        for pending in launched:
            self._peers.wait(pending, f"combining the updates of step {self._num_steps + 1}")
        for flat in self._flats:
            flat.apply_update()
        self.reduction.note_step()

    def __repr__(self) -> str:
        return f"AdasumOptimizer({self.optimizer!r}, {self.reduction!r})"

"""`AdasumOptimizer`: each rank steps its own optimizer, and Adasum combines the updates instead of the gradients.

Rules
1. Those of `paceline.optim.exchanging_optimizer`.
2. A step keeps the parameters, steps the optimizer and takes the change. It combines the changes of all ranks by
   Adasum, and adds the result to what was kept. What was kept is bitwise the same on all ranks, so the parameters
   stay so.
3. With `overlap` all but the last of that is done during backward, bucket by bucket (`during_backward`).

Source: Maleki et al. 2021, "Scaling distributed training with adaptive summation", section 4 (post-optimizer form).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from paceline.comm import Work
from paceline.errors import ConfigurationError
from paceline.optim import ExchangingOptimizer, FlatParameters, why_not_by_parameter
from paceline_adasum.adasum import Adasum
from paceline_adasum.during_backward import DuringBackward, cut


class AdasumOptimizer(ExchangingOptimizer):
    """Steps `optimizer` on this rank's gradients, and combines all ranks' updates by Adasum.

    For optimizers with state: what Adam makes of a combined gradient is not what combining the ranks' Adam steps makes.
    With plain SGD (no momentum, no weight decay) it equals `DistributedDataParallel(reduction="adasum")` up to
    rounding.

    Limits first: nothing overlaps with backward, unless `overlap` is set. Two copies of the parameters are kept, with
    `overlap` one of the optimizer's state as well. Buffers (running statistics) stay each rank's own. A rank whose
    gradients overflow under a GradScaler adds nothing in that step.

    Args:
        optimizer: Any optimizer that needs no closure, over parameters that are laid out alike on all ranks. Schedulers
            and GradScaler may be given either it or this.
        process_group: Over whom; None for the default group.
        reduction: How updates are combined; for example `Adasum(hosts="auto")`.
        overlap: Step parameters as soon as backward has their gradients, and combine updates while it runs. For
            optimizers that step each parameter by its own gradient and state, as `paceline.optim.overlap`. Settings
            count as they are during backward. Clipping and GradScaler are rejected. Parameters still change in `step`.

    Attributes:
        optimizer: The one that was given.
        reduction: `reduction.orthogonality` tells how much the ranks' updates agree.

    Contract:
        Collective: the constructor, `step`, `abort_step` and `add_param_group`. The constructor overwrites the
        parameters by rank 0's. Afterwards, and after each `step`: parameters are bitwise equal on all ranks.

    Raises:
        ConfigurationError: The optimizer needs a closure, or it is not one; or it cannot step during backward.
        ReplicaMismatchError: The ranks' parameters differ in number, shape or dtype; on every rank.
        PeerLostError: A rank died or hangs; the parameters are those of before the step.
    """

    reduction: Adasum
    _during: DuringBackward | None
    when_lost = "The parameters are those of before this step."
    not_local = (
        'To combine gradients instead of updates, wrap it with reduction="adasum" and use the optimizer as it is. '
        "`paceline explain bitwise the same gradients` says more."
    )

    def __init__(
        self,
        optimizer: Optimizer,
        process_group: ProcessGroup | None = None,
        reduction: Adasum | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        if overlap and (why := why_not_by_parameter(type(optimizer))):
            raise ConfigurationError(f"AdasumOptimizer(overlap=True): {why}. Leave out overlap.")
        self._overlaps, self._during = overlap, None
        reduction = Adasum() if reduction is None else reduction
        reduction.is_apart = reduction.is_apart or overlap
        super().__init__(optimizer, process_group, reduction)

    def settings(self) -> str:
        return f"{self.reduction!r}, overlap={self._overlaps}"

    def cut(self, parameters: Sequence[Tensor]) -> list[FlatParameters]:
        return cut(super().cut(list(reversed(parameters)))) if self._overlaps else super().cut(parameters)

    def adopt(self) -> None:
        if self._during is not None:
            self._during.remove()
        super().adopt()
        if self._overlaps and self.process_group.size() > 1:
            self._during = DuringBackward(self.optimizer, self.flats, self._launch())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate alone in backwards in this context: with `overlap`, in all of a step but the last. Local."""
        was_armed = self._during is not None and self._during.is_armed
        if self._during is not None:
            self._during.is_armed = False
        try:
            yield
        finally:
            if self._during is not None:
                self._during.is_armed = was_armed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the optimizer here, and replace its update by the Adasum of all ranks' updates.

        Args:
            closure: Handed to the optimizer.

        Contract:
            Collective: every rank.  Blocks: yes.  Mutates: the parameters, this rank's optimizer state.
            Afterwards: parameters are bitwise equal on all ranks.

        Raises:
            ConfigurationError: The gradients are the same on all ranks, or `overlap` cannot be with a closure or a
                GradScaler: nothing was changed. Or gradients were changed after they had been used.
            PeerAbortedError: They were on another rank: the step was dropped on all.
            PeerLostError: A rank died or hangs. The parameters are those of before. So is the state with `overlap`;
                otherwise it is one step ahead.
        """
        self._check_overlap(closure)
        self.check_step()
        if self._during is not None and self._during.has_launched:
            self._during.finish(self._await, self._tell)
            self._apply()
            return None
        for flat in self.flats:
            flat.take()
        loss = self.step_locally(closure)
        try:
            for flat in self.flats:
                flat.take_update()
            self._await(list(map(self._launch(), range(len(self.flats)))))
        except BaseException:
            for flat in self.flats:
                flat.put_back()
            raise
        self._apply()
        return loss

    def abort_step(self) -> None:
        """Skip a batch, instead of `step`: drop the gradients, and with `overlap` what backward made of them.

        For a batch whose forward or backward raised (out of memory, say), on one rank or on several. The ranks agree to
        skip it; then all call this, also those whose backward went well or has not begun.

        Contract:
            Collective with `overlap`: every rank.  Blocks: yes.  Mutates: the gradients. Parameters and the optimizer's
            state are those of before the batch.

        Raises:
            PeerLostError: A rank died or hangs.
        """
        if self._during is not None and self._during.is_armed:
            self._during.abort(self._await)
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._check_nothing_is_under_way("zero_grad")
        super().zero_grad(set_to_none)

    def _launch(self) -> Callable[[int], Work]:
        return partial(_launch_update, self.reduction, self.flats, self.process_group)

    def _await(self, launched: Sequence[Work]) -> None:
        for pending in launched:
            self.peers.wait(pending, f"combining the updates of step {self.num_steps + 1}")

    def _tell(self, is_changed: bool) -> list[bool]:
        """Return every rank's answer. Collective; blocks."""
        return [answer != b"\0" for answer in self.gather_bytes(bytes([is_changed]))]

    @torch.no_grad()
    def _apply(self) -> None:
        for flat in self.flats:
            flat.apply_update()
        self.reduction.note_step()
        self.num_steps += 1
        if self._during is not None:
            self._during.is_armed = self.saw_local_gradients
            self._during.hook_unfrozen()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, as `LocalSGD` does. Local.

        It is refused while updates are under way, as the state is then one step ahead.
        """
        self._check_nothing_is_under_way("state_dict")
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's state, as `LocalSGD` does; refused while updates are under way. Local."""
        self._check_nothing_is_under_way("load_state_dict")
        super().load_state_dict(state_dict)

    def _check_nothing_is_under_way(self, method: str) -> None:
        if self._during is not None and self._during.has_launched:
            raise ConfigurationError(
                f"AdasumOptimizer(overlap=True).{method}(): backward has updates under way that other ranks take part "
                "in. Call step() first; or abort_step(), on all ranks, to skip this batch."
            )

    def _check_overlap(self, closure: Callable[[], float] | None) -> None:
        """Refuse what comes too late for steps that are made during backward."""
        if self._overlaps and closure is not None:
            raise ConfigurationError(
                "AdasumOptimizer(overlap=True).step() was given a closure. Call backward, then step(), which has "
                "nothing left to evaluate."
            )
        if self._overlaps and getattr(self, "grad_scale", None) is not None:
            raise ConfigurationError(
                "AdasumOptimizer(overlap=True) steps during backward, before a GradScaler can divide gradients by its "
                "scale. Leave out overlap, or the scaler (bfloat16 needs none)."
            )

    def __repr__(self) -> str:
        return f"AdasumOptimizer({self.optimizer!r}, {self.reduction!r})"


def _launch_update(
    reduction: Adasum, flats: Sequence[FlatParameters], process_group: ProcessGroup, index: int
) -> Work:
    """Start combining the updates that bucket `index` has taken."""
    if index == 0:
        reduction.begin_step(process_group.size())
    return reduction.launch(flats[index].message(index, len(flats), process_group))

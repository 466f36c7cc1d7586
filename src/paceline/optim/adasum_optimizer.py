"""The delta form of Adasum: each rank steps its own optimizer on its own gradients, and the *updates* are combined.

Rules
1. Gradients are local. The model is not wrapped (or every backward is under `no_sync`); the first step that has
   gradients looks whether they are the same on all ranks, and refuses if so.
2. A step is: keep the parameters, step the optimizer, take the change, combine the changes of all ranks by Adasum,
   and add the result to what was kept. What was kept is bitwise the same on all ranks, so the parameters stay so.
3. Every parameter of every group takes part in every step, also frozen ones and those without a gradient (they count
   as zero). So what is sent depends on the groups alone.
4. State (momentum, second moments) is each rank's own, and saved by each rank.

Source: Maleki et al. 2021, "Scaling distributed training with adaptive summation", section 4 (post-optimizer form).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from paceline.errors import ConfigurationError, PeerLostError, ReplicaMismatchError
from paceline.optim.flat_parameters import FlatParameters, flatten
from paceline.reductions import Pending, RollCall
from paceline.reductions.adasum import Adasum
from paceline.reductions.collectives import device_for_words, launch_broadcast, launch_gather
from paceline.reductions.roll_call import next_name

_DIGEST_BYTES = 32
_NO_GRADIENT = bytes(_DIGEST_BYTES)


class AdasumOptimizer(Optimizer):
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

    _step_supports_amp_scaling = (
        True  # so that GradScaler calls `step` on every rank, also on one that overflowed
    )

    def __init__(
        self, optimizer: Optimizer, process_group: ProcessGroup | None = None, reduction: Adasum | None = None
    ) -> None:
        _check_optimizer(optimizer)
        self.optimizer = optimizer
        self.reduction = Adasum() if reduction is None else reduction
        self._group = _default_group() if process_group is None else process_group
        self._flats: list[FlatParameters] = []
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._follow()
        self._roll_call = RollCall(
            self._group, next_name(self._group, is_collective=True), "making its optimizer"
        )
        self._num_steps = 0
        self._saw_local_gradients = self._group.size() == 1
        self._adopt()

    def _follow(self) -> None:
        """Groups and state are the optimizer's own objects, which loading replaces."""
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _adopt(self) -> None:
        """Compare the ranks' parameters and take rank 0's. Collective."""
        parameters = self._parameters()
        self.reduction.prepare(
            {f"parameter {index}": parameter for index, parameter in enumerate(parameters)},  # type: ignore[misc]
            self._group,
        )
        words = repr([(tuple(p.shape), p.dtype) for p in parameters]) + repr(self.reduction)
        digests = self._gather(hashlib.sha256(words.encode()).digest())
        if len(set(digests)) > 1:
            other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            raise ReplicaMismatchError(
                f"rank {other} gave its AdasumOptimizer other parameters, or another reduction, than rank 0. This is "
                f"rank {self._group.rank()} with {len(parameters)} parameters of "
                f"{sum(p.numel() for p in parameters):,} elements and {self.reduction!r}. Every rank gives the same "
                "parameters in the same order."
            )
        self._flats = flatten(parameters)
        if self._group.size() > 1:
            for flat in self._flats:
                flat.take()
                self._wait(launch_broadcast(flat.kept, self._group, 0), "receiving rank 0's parameters")
                flat.put_back()

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
        self._check_gradients_are_local()
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

    def _step_here(self, closure: Callable[[], float] | None) -> float | None:
        """The local step; none if a GradScaler found an overflow in this rank's gradients."""
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if overflow is not None and bool(overflow):
            return None
        if scale is not None:
            gradients = [p.grad for p in self._parameters() if p.grad is not None]
            torch._foreach_div_(gradients, float(scale))
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def _combine(self) -> None:
        self.reduction.begin_step()
        for flat in self._flats:
            flat.take_update()
        launched = [
            self.reduction.launch(flat.message(index, len(self._flats), self._group))
            for index, flat in enumerate(self._flats)
        ]
        for pending in launched:
            self._wait(pending, f"combining the updates of step {self._num_steps + 1}")
        for flat in self._flats:
            flat.apply_update()
        self.reduction.note_step()

    def _check_gradients_are_local(self) -> None:
        """Rule 1, until gradients have been seen."""
        if self._saw_local_gradients:
            return
        digests = self._gather(_digest([p.grad for p in self._parameters()]))
        if len(set(digests)) > 1:
            self._saw_local_gradients = True
        elif digests[0] != _NO_GRADIENT:
            raise ConfigurationError(
                f"all {len(digests)} ranks have bitwise the same gradients, so they have been reduced already, or "
                "every rank trains on the same batch. AdasumOptimizer combines what each rank makes of its own batch: "
                "do not wrap the model in DistributedDataParallel (or run every backward under its no_sync()), and "
                "give each rank its part of the data. To combine gradients instead of updates, wrap it with "
                'reduction="adasum" and use the optimizer as it is. See docs/guide/adasum.md.'
            )

    def _gather(self, digest: bytes) -> list[bytes]:
        """Every rank's digest. Collective; blocks."""
        device = device_for_words(self._group, self._parameters()[0].device)
        row = torch.tensor(list(digest), dtype=torch.uint8, device=device)
        rows = [torch.empty_like(row) for _ in range(self._group.size())]
        if len(rows) == 1:
            return [digest]
        self._wait(launch_gather(rows, row, self._group), "comparing the ranks' parameters or gradients")
        return [bytes(each.tolist()) for each in rows]

    def _wait(self, pending: Pending, doing: str) -> None:
        in_slices = self._parameters()[0].device.type == "cpu"
        try:
            if in_slices:
                self._roll_call.wait_in_slices(pending)
            else:
                pending.wait()
        except RuntimeError as error:
            who = self._roll_call.who_is_gone(doing)
            raise PeerLostError(
                f"rank {self._group.rank()} was {doing} when communication failed: {who}. The parameters are those of "
                "before this step; restart from the last checkpoint. "
                f"The backend said: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; collective: the new parameters become rank 0's."""
        if not self._flats:
            super().add_param_group(param_group)  # within the constructor
            return
        self.optimizer.add_param_group(param_group)
        self._follow()
        self._adopt()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, with its rank and the number of ranks: to be saved by every rank. Local."""
        return {
            "rank": self._group.rank(),
            "num_ranks": self._group.size(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on the same rank of as many ranks. Local.

        Raises:
            ConfigurationError: It is another rank's state, that of another number of ranks, or of another optimizer;
                nothing was changed.
        """
        mine = {"rank": self._group.rank(), "num_ranks": self._group.size()}
        if {*mine, "optimizer"} - set(state_dict):
            raise ConfigurationError(
                "this is not the state of an AdasumOptimizer: it holds rank, num_ranks and optimizer. The state of a "
                "plain optimizer, the same on all ranks, goes into `.optimizer.load_state_dict`."
            )
        if any(state_dict[key] != value for key, value in mine.items()):
            raise ConfigurationError(
                f"rank {mine['rank']} of {mine['num_ranks']} was given the optimizer state of rank "
                f"{state_dict['rank']} of {state_dict['num_ranks']}. The state differs between ranks, so each saves "
                "and loads a file of its own. After a change of the number of ranks, either start with fresh state, "
                "or give all ranks the same one: `.optimizer.load_state_dict(state['optimizer'])`."
            )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._follow()

    def __repr__(self) -> str:
        return f"AdasumOptimizer({self.optimizer!r}, {self.reduction!r})"


def _check_optimizer(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, AdasumOptimizer):
        raise ConfigurationError(
            f"AdasumOptimizer wraps a torch.optim.Optimizer, once; it was given {optimizer!r}."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"AdasumOptimizer cannot wrap {type(optimizer).__name__}: its step needs a closure, which it evaluates as "
            "often as it likes, so the ranks' steps would not be comparable. Use an optimizer that takes one step from "
            "the gradients, such as SGD or Adam."
        )


def _default_group() -> ProcessGroup:
    if not dist.is_initialized():
        raise ConfigurationError(
            "AdasumOptimizer combines the updates of several ranks, and there is no process group: call "
            "torch.distributed.init_process_group first, or pass process_group."
        )
    group: ProcessGroup = dist.distributed_c10d._get_default_group()
    return group


def _digest(gradients: Sequence[Tensor | None]) -> bytes:
    """Of the gradients' bits; zeros where nothing differs from zero."""
    state = hashlib.sha256()
    is_something = False
    for gradient in gradients:
        if gradient is None:
            continue
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        is_something = is_something or bool(dense.any())
        state.update(dense.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return state.digest() if is_something else _NO_GRADIENT

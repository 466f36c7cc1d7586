"""Base of optimizers that step on each rank's own gradients and exchange what comes of it: LocalSGD, DiLoCo, Adasum.

Rules
1. Gradients are local. The model is not wrapped, or every backward is under `no_sync`. The first step that has
   gradients compares them over all ranks, and refuses if they are the same.
2. Every parameter of every group takes part in every exchange, also frozen ones and those without a gradient. So what
   is sent depends on the groups alone.
3. State (momentum, second moments) is each rank's own, and saved by each rank.
"""

from __future__ import annotations

import hashlib
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from paceline import version
from paceline.comm.collectives import broadcast, device_for_metadata
from paceline.comm.peers import Peers, next_name
from paceline.errors import ConfigurationError, ReplicaMismatchError
from paceline.reductions import Message, Reduction

_DIGEST_BYTES = 32
_NO_GRADIENT = bytes(_DIGEST_BYTES)


class ExchangingOptimizer(Optimizer, ABC):
    """Base of optimizers that wrap another one. Final classes say in `step` what is exchanged, and when.

    Args:
        optimizer: Any optimizer that needs no closure, over parameters that are laid out alike on all ranks.
        process_group: Over whom; None for the default group.
        reduction: How what is exchanged is combined.

    Attributes:
        flats: The parameters as the vectors that are exchanged.
        peers: Waits for a collective, and raises PeerLostError if a rank died or hangs.
        num_steps: Steps taken so far; the final class counts.
        saw_local_gradients: Whether rule 1 is known to hold.
    """

    # Torch's name: GradScaler then calls `step` on every rank, also on one whose gradients overflowed.
    _step_supports_amp_scaling = True
    when_lost: str
    """For messages: what the parameters are when a rank was lost."""
    not_local: str
    """For messages: what to do instead with gradients that are reduced already."""

    def __init__(
        self, optimizer: Optimizer, process_group: ProcessGroup | None, reduction: Reduction
    ) -> None:
        _check_optimizer(type(self).__name__, optimizer)
        self.optimizer = optimizer
        self.reduction = reduction
        self.process_group = _default_group(type(self).__name__) if process_group is None else process_group
        self.flats: list[FlatParameters] = []
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._follow()
        me = weakref.ref(self)  # the optimizer within may outlive it
        optimizer.register_load_state_dict_post_hook(lambda _: None if (it := me()) is None else it._follow())
        self.peers = Peers(
            self.process_group,
            next_name(self.process_group, is_collective=True),
            in_slices=self.parameters()[0].device.type == "cpu",
            first_act="making its optimizer",
            consequence=f"{self.when_lost} Restart from the last checkpoint.",
        )
        self.num_steps = 0
        self.saw_local_gradients = self.process_group.size() == 1
        self.adopt()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ConfigurationError(
            f"{type(self).__name__} exchanges parameters with other ranks and cannot be copied: the copy would "
            "exchange the same ones. Copy the model, make an optimizer for the copy and wrap that, on every rank."
        )

    @abstractmethod
    def settings(self) -> str:
        """Return the settings that have to be equal on all ranks, besides the parameters."""

    def cut(self, parameters: Sequence[Tensor]) -> list[FlatParameters]:
        """Return the buffers that are exchanged, each at once."""
        return flatten(parameters)

    def _follow(self) -> None:
        """Take over the groups and the state of the optimizer within. Loading replaces these objects."""
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def adopt(self) -> None:
        """Compare the ranks' parameters, take rank 0's and make `flats`. Collective."""
        parameters = self.parameters()
        self.reduction.prepare(
            {f"parameter {index}": parameter for index, parameter in enumerate(parameters)},  # type: ignore[misc]
            self.process_group,
        )
        settings = f"{self.settings()}, Paceline {version.__version__}"
        layout = repr([(tuple(p.shape), p.dtype) for p in parameters]) + settings
        digests = self.gather_bytes(hashlib.sha256(layout.encode()).digest())
        if len(set(digests)) > 1:
            other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            raise ReplicaMismatchError(
                f"rank {other} gave its {type(self).__name__} other parameters, or another reduction, setting or "
                f"version, than rank 0. This is rank {self.process_group.rank()} with {len(parameters)} parameters of "
                f"{sum(p.numel() for p in parameters):,} elements and {settings}. Every rank gives the same "
                "parameters in the same order."
            )
        self.flats = self.cut(parameters)
        self._num_adopted = len(parameters)
        if self.process_group.size() > 1:
            for flat in self.flats:
                flat.take()
                pending = broadcast(flat.kept.view(torch.uint8), self.process_group, 0)
                self.peers.wait(pending, "receiving rank 0's parameters")
                flat.put_back()

    def step_locally(self, closure: Callable[[], float] | None) -> float | None:
        """Take the local step; none if a GradScaler found an overflow in this rank's gradients."""
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if overflow is not None and bool(overflow):
            return None
        if scale is not None:
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            torch._foreach_div_(gradients, float(scale))
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def check_step(self) -> None:
        """Raise ConfigurationError if rule 1 or 2 does not hold; call it before anything is changed."""
        if (found := len(self.parameters())) != self._num_adopted:
            raise ConfigurationError(
                f"{type(self).__name__} was given {self._num_adopted} parameters, and its optimizer now has {found}. "
                "Those that were added to the optimizer within are not exchanged. Add them by this object's own "
                "add_param_group, on all ranks."
            )
        if self.saw_local_gradients:
            return
        digests = self.gather_bytes(digest_of([p.grad for p in self.parameters()]))
        if len(set(digests)) > 1:
            self.saw_local_gradients = True
        elif digests[0] != _NO_GRADIENT:
            raise ConfigurationError(
                f"all {len(digests)} ranks have bitwise the same gradients, so they have been reduced already, or "
                f"every rank trains on the same batch. {type(self).__name__} combines what each rank makes of its own "
                "batch. Do not wrap the model in DistributedDataParallel, or run every backward under its no_sync(). "
                f"Give each rank its part of the data. {self.not_local}"
            )

    def gather_bytes(self, given: bytes) -> list[bytes]:
        """Return the bytes that each rank passes. All pass equally many. Collective; blocks."""
        if self.process_group.size() == 1:
            return [given]
        device = device_for_metadata(self.process_group, self.parameters()[0].device)
        row = torch.tensor(list(given), dtype=torch.uint8, device=device)
        rows = self.peers.rows_of_all(row, self.process_group, "comparing the ranks' parameters or gradients")
        return [bytes(each.tolist()) for each in rows]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's; collective: the new parameters become rank 0's."""
        if not self.flats:
            super().add_param_group(param_group)  # within the constructor
            return
        self.optimizer.add_param_group(param_group)
        self._follow()
        self.adopt()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, with its rank and the number of ranks: to be saved by every rank. Local."""
        return {
            "rank": self.process_group.rank(),
            "num_ranks": self.process_group.size(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on the same rank, with the same number of ranks. Local.

        Raises ConfigurationError for the state of another rank, number of ranks or optimizer; nothing was changed.
        """
        self._check_state(state_dict)
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._follow()

    def _check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if this state cannot be loaded here."""
        mine = {"rank": self.process_group.rank(), "num_ranks": self.process_group.size()}
        if {*mine, "optimizer"} - set(state_dict):
            raise ConfigurationError(
                f"this is not the state of an {type(self).__name__}: it holds rank, num_ranks and optimizer. The "
                "state of a plain optimizer, the same on all ranks, goes into `.optimizer.load_state_dict`."
            )
        if any(state_dict[key] != value for key, value in mine.items()):
            raise ConfigurationError(
                f"rank {mine['rank']} of {mine['num_ranks']} was given the optimizer state of rank "
                f"{state_dict['rank']} of {state_dict['num_ranks']}. The state differs between ranks, so each saves "
                "and loads a file of its own. After a change of the number of ranks, either start with fresh state, "
                "or give all ranks the same one: `.optimizer.load_state_dict(state['optimizer'])`."
            )


def _check_optimizer(owner: str, optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, ExchangingOptimizer):
        raise ConfigurationError(f"{owner} wraps a torch.optim.Optimizer, once; it was given {optimizer!r}.")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"{owner} cannot wrap {type(optimizer).__name__}: its step needs a closure, which it evaluates as "
            "often as it likes, so the ranks' steps would not be comparable. Use an optimizer that takes one step from "
            "the gradients, such as SGD or Adam."
        )


def _default_group(owner: str) -> ProcessGroup:
    if not dist.is_initialized():
        raise ConfigurationError(
            f"{owner} combines the updates of several ranks, and there is no process group: call "
            "torch.distributed.init_process_group first, or pass process_group."
        )
    group: ProcessGroup = dist.distributed_c10d._get_default_group()
    return group


def digest_of(tensors: Sequence[Tensor | None]) -> bytes:
    """Return a hash of the tensors' bits; zeros if every element is zero."""
    state = hashlib.sha256()
    is_something = False
    for tensor in tensors:
        if tensor is None:
            continue
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        is_something = is_something or bool(dense.any())
        state.update(dense.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return state.digest() if is_something else _NO_GRADIENT


# ---- parameters as flat vectors, one per dtype and device


class FlatParameters:
    """Two flat vectors for parameters of one dtype and device: their values, and a change of them."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        real = self._real()
        num_elements = sum(part.numel() for part in real)
        self.kept = torch.empty(num_elements, dtype=real[0].dtype, device=real[0].device)
        """What the parameters were at `take`."""
        self.update = torch.empty_like(self.kept)
        """The change since `take`; after an exchange, the change that all ranks apply instead."""
        self._kept_views = _views(self.kept, real)
        self._update_views = _views(self.update, real)

    def _real(self) -> list[Tensor]:
        """Return aliases of the parameters, made anew each time: `module.to` gives parameters other memory."""
        return [_real(parameter) for parameter in self.parameters]

    def take(self) -> None:
        """Keep the parameters' values."""
        torch._foreach_copy_(self._kept_views, self._real())

    def put_back(self) -> None:
        """Give the parameters the values that were kept."""
        torch._foreach_copy_(self._real(), self._kept_views)

    def take_update(self) -> None:
        """Take the change since `take`."""
        torch._foreach_copy_(self._update_views, self._real())
        self.update.sub_(self.kept)

    def apply_update(self) -> None:
        """Give the parameters what was kept, changed by `update`, which is used up."""
        self.update.add_(self.kept)
        torch._foreach_copy_(self._real(), self._update_views)

    def message(self, index: int, num_messages: int, process_group: ProcessGroup) -> Message:
        """Return the update as the message number `index`, to be reduced."""
        parameters: Any = self.parameters
        flat, views, is_last = self.update, self._update_views, index == num_messages - 1
        return Message(index, is_last, flat, flat.numel(), views, parameters, process_group)


def flatten(parameters: Sequence[Tensor]) -> list[FlatParameters]:
    """Return the flat vectors of these parameters, in the order of their first parameters."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [FlatParameters(members) for members in alike.values()]


def _real(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([part.numel() for part in like])
    return [piece.view(part.shape) for piece, part in zip(pieces, like, strict=True)]

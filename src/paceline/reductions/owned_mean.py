"""The mean of each gradient element on one rank alone, the element's owner: half the bytes of an all-reduce.

Rules
1. Over Gloo, elements of 32 bits or more are summed on a ring (`comm.ring`). In other cases each rank sends every other
   rank the elements that the other rank owns. It folds what it receives in the order of ranks, 16-bit elements in
   float32. Status words travel behind each message, and all ranks fold all of them. Over several hosts of several ranks
   each, the backend `paceline` folds within hosts first (`joins_hosts`), if shares are about equally long. With
   compression 16-bit elements travel, and status words separately (`OwnedCompressed`).
2. A bucket with an element that has no owner is all-reduced. So is every bucket before the first owner is known.
3. Elements that another rank owns are 0 afterwards. A parameter with such elements is of a class whose `.grad` raises:
   code that reads gradients would take a part for the whole. To drop them is allowed, as `zero_grad` does. A GradScaler
   may read them: each element is unscaled by its owner, and all ranks hear of an overflow first.
4. Gradients of two backwards cannot be added up, since the owner has the sum of the first and every rank a part of the
   second. So a backward raises if the ones before have been neither used nor dropped.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from paceline.comm.collectives import (
    Chain,
    Work,
    all_reduce,
    all_reduce_max,
    all_to_all,
    joins_hosts,
    reduce_scatter,
)
from paceline.comm.device import keep_for_current_streams
from paceline.comm.ring import has_ring, reduce_scatter_on_ring
from paceline.compression import Cast, accumulation_dtype
from paceline.errors import ConfigurationError
from paceline.reductions.ordered_mean import sum_in_order
from paceline.reductions.reduction import Mean, Message, Reduction, StepEnd, real_numel

_ZERO_GRADS = (Module.zero_grad.__code__, inspect.unwrap(Optimizer.zero_grad).__code__)
_MOST_PADDED = 1.02  # of the elements, for rows of one length
_UNSCALES = torch.amp.GradScaler._unscale_grads_.__code__
# Of scattered parameters: the reduction of their gradients
_means: WeakIdKeyDictionary = WeakIdKeyDictionary()


class ScatteredParameter(Parameter):
    """A parameter of whose gradient this rank has the elements that it owns (rule 3)."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if getattr(getattr(func, "__self__", None), "__name__", "") != "grad":
            # `nn.Parameter(p)` compares the class of this with p's, and then sets `_is_param`.
            is_copied = func is Tensor.detach and sys._getframe(1).f_code is Parameter.__new__.__code__
            return result.as_subclass(cls) if is_copied else result
        if func.__name__ != "__get__":
            args[0].__class__ = Parameter  # the script has set or dropped it
        elif result is not None and (reader := sys._getframe(1).f_code) not in _ZERO_GRADS:
            if reader is _UNSCALES:
                _means[args[0]].tell_overflow()
                return result
            raise ConfigurationError(
                "this rank has a part of the gradient that was read. The optimizer is sharded, and each rank has the "
                "mean of the elements that it steps. To clip, call model.clip_grad_norm_(max_norm). To have whole "
                "gradients on every rank, as for logging, pass shard(..., whole_gradients=True). That sends half as "
                "many bytes again."
            )
        return result

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_is_param":
            self.__class__ = Parameter  # type: ignore[assignment]  # an ordinary one
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """Return an ordinary one."""
        with torch._C.DisableTorchFunctionSubclass():
            values = self.detach().clone(memory_format=torch.preserve_format)
        memo[id(self)] = copied = Parameter(values, self.requires_grad)
        return copied


def is_scattered(parameter: Tensor) -> bool:
    """Return whether this rank has a part of the parameter's gradient. Local."""
    return parameter.__class__ is ScatteredParameter


@dataclass(frozen=True)
class _Layout:
    """The places of each rank's elements in a bucket: by rank, their runs of its body."""

    runs: tuple[tuple[tuple[int, int], ...], ...]

    def of(self, rank: int, body: Tensor) -> list[Tensor]:
        """Return views of the elements that this rank owns."""
        return [body[start:stop] for start, stop in self.runs[rank]]

    def length(self, rank: int) -> int:
        """Return how many elements this rank owns."""
        return sum(stop - start for start, stop in self.runs[rank])


class Owned(Reduction):
    """The part of a mean for owners that does not depend on what is sent. Put in front of the mean's class."""

    pieces_at_once = 0
    in_place_of: Reduction | None = None
    """The mean that the model had before."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # By a parameter's id, complete ones alone
        self._owners: dict[int, Sequence[tuple[int, int, int]]] = {}
        self._scattered: dict[int, Parameter] = {}  # in the step under way or the last one
        self._has_told_overflow = False  # in this step
        self._group: ProcessGroup | None = None
        # By a bucket's index: its parameters, and where each rank's elements lie, as long as neither changes
        self._layouts: dict[int, tuple[Sequence[Parameter], _Layout | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the owners: a copy of the model has parameters of its own."""
        # Python 3.10 has no default
        state: dict[str, Any] = getattr(super(), "__getstate__", lambda: vars(self))()
        return {**state, "_owners": {}, "_scattered": {}, "_layouts": {}, "_group": None}

    def own(self, owners: Mapping[Parameter, Sequence[tuple[int, int, int]]]) -> None:
        """Divide these elements so from the next backward on: rank, start, stop of each run. Local; on every rank."""
        self._owners.update(
            {id(parameter): sorted(runs, key=lambda run: run[1]) for parameter, runs in owners.items()}
        )
        self._layouts.clear()

    def disown(self, parameters: Iterable[Tensor]) -> None:
        """Reduce the gradients of these parameters for all ranks again. Local; on every rank."""
        for parameter in parameters:
            self._owners.pop(id(parameter), None)
        self._layouts.clear()

    def follow(
        self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup, are_alike: bool
    ) -> None:
        self._owners.clear()  # ranks have other numbers now
        self._layouts.clear()
        super().follow(named_parameters, process_group, are_alike)

    # ---- a step

    def begin_step(self, num_ranks: int, active_ratio: float = 1.0, share: float | None = None) -> float:
        for parameter in self._scattered.values():
            if is_scattered(parameter):
                with torch._C.DisableTorchFunctionSubclass():
                    is_left = parameter.grad is not None and bool(parameter.grad.any())
                if is_left:
                    raise ConfigurationError(
                        "a backward began while gradients of the one before were neither used nor dropped. Each rank "
                        "has a part of these, to which nothing can be added. Call optimizer.zero_grad() first. To "
                        "accumulate, use model.accumulate or no_sync()."
                    )
                parameter.__class__ = Parameter
        self._scattered.clear()
        self._has_told_overflow = False
        return super().begin_step(num_ranks, active_ratio, share)

    def _divide(self, message: Message) -> _Layout | None:
        """Return who owns which elements of a bucket that is launched; None if some have no owner (rule 2)."""
        parameters, layout = self._layouts.get(message.index, ((), None))
        if parameters is not message.parameters:
            layout = self._lay_out(message)
            self._layouts[message.index] = message.parameters, layout
        if layout is not None:
            self._scattered.update((id(parameter), parameter) for parameter in message.parameters)
            self._group = message.process_group
        return layout

    def _lay_out(self, message: Message) -> _Layout | None:
        if message.process_group.size() == 1:
            return None
        runs: list[list[tuple[int, int]]] = [[] for _ in range(message.process_group.size())]
        offset = 0
        for parameter in message.parameters:
            owners = self._owners.get(id(parameter))
            if owners is None:
                return None
            for rank, start, stop in owners:
                own, begin = runs[rank], offset + start
                if own and own[-1][1] == begin:
                    begin = own.pop()[0]
                own.append((begin, offset + stop))
            offset += real_numel(parameter)
        return _Layout(tuple(map(tuple, runs)))

    def end_step(self, ended: StepEnd) -> None:
        for parameter in self._scattered.values():
            parameter.__class__ = ScatteredParameter
            _means[parameter] = self
        super().end_step(ended)

    def take(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """Let the caller read these parameters' gradients. Return those of which this rank has a part. Local."""
        taken = [*filter(is_scattered, parameters)]
        for parameter in taken:
            parameter.__class__ = Parameter
        return taken

    # ---- all of the gradients

    def norm_of_parts(self, gradients: Mapping[Parameter, Tensor], norm_type: float) -> Tensor:
        """Return the norm of all ranks' elements as one vector; `gradients` are this rank's. Collective; blocks."""
        group, is_max = self._group, norm_type == float("inf")
        if group is None:
            return torch.nn.utils.get_total_norm(list(gradients.values()), norm_type)
        # A gradient that arrived late is whole, so a rank counts its own elements. Of others rank 0 counts all.
        mine: list[Tensor] = []
        for parameter, gradient in gradients.items():
            if id(parameter) in self._scattered:
                mine += self._own_elements(parameter, gradient, group.rank())
            elif group.rank() == 0:
                mine.append(gradient)
        known = (*gradients.values(), *self._scattered.values())
        dtypes = [each.dtype.to_real() for each in known] or [torch.float32]
        kind = functools.reduce(torch.promote_types, dtypes)
        if not mine:  # the step may have taken them all, or this rank owns none
            mine = [torch.zeros(1, dtype=kind, device=known[0].device if known else "cpu")]
        own = torch.nn.utils.get_total_norm(mine, norm_type)
        total = (own.double() ** (1.0 if is_max else norm_type)).reshape(1)
        (all_reduce_max if is_max else all_reduce)(total, group).wait()
        return (total[0] if is_max else total[0] ** (1.0 / norm_type)).to(kind)  # the same on all ranks

    def _own_elements(self, parameter: Parameter, gradient: Tensor, rank: int) -> list[Tensor]:
        """Return aliases of the elements of a gradient that this rank owns."""
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        memory = real.as_strided((real.numel(),), (1,))
        return [memory[start:stop] for owner, start, stop in self._owners[id(parameter)] if owner == rank]

    def tell_overflow(self) -> None:
        """Make each gradient infinite on all ranks that is not finite on one. Collective, once a step; blocks."""
        if self._has_told_overflow or self._group is None:
            return
        self._has_told_overflow = True
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            gradients = [parameter.grad for parameter in self._scattered.values()]
            there = [each for each in gradients if each is not None and each.numel()]
            overflows = torch.stack([each.isfinite().all().logical_not().float() for each in there])
            all_reduce_max(overflows, self._group).wait()
            for gradient, overflow in zip(there, overflows.unbind(), strict=True):
                first = gradient.as_strided((1,), (1,))
                first.copy_(torch.where(overflow > 0, torch.inf, first))


class OwnedMean(Owned, Mean):
    """The mean of each element for its owner, and of an element without owner for all ranks.

    Cost:
        (P-1)/P of a bucket's bytes a rank, half of an all-reduce: on a ring over Gloo, else one all-to-all.

    Source:
        Rajbhandari et al., "ZeRO", 2020, stage 2, which divides gradients like the optimizer's state.
    """

    def __repr__(self) -> str:
        return "Mean"  # as which it begins, also on a rank that comes later

    def launch(self, message: Message) -> Work:
        layout = self._divide(message)
        return super().launch(message) if layout is None else Chain(exchange(message, layout), num_stages=1)


def for_owners(reduction: Reduction) -> Owned | None:
    """Return what takes the same mean of each element for its owner alone; None if nothing does. Local."""
    if isinstance(reduction, Owned):
        return reduction
    if type(reduction) is Mean:
        return OwnedMean()
    if isinstance(getattr(reduction, "compressor", None), Cast):
        from paceline.reductions.compressed import OwnedCompressed  # noqa: PLC0415  it imports this module

        return OwnedCompressed.of(reduction)
    return None


def exchange(message: Message, layout: _Layout, divisor: int = 1) -> Iterator[Work]:
    """Send each rank its elements, then fold those of this rank (rule 1), and divide them before they are rounded."""
    group, body, words = message.process_group, message.body, message.flat[message.num_gradient_elements :]
    num_ranks, rank = group.size(), group.rank()
    theirs = [layout.length(to) + words.numel() for to in range(num_ranks)]
    wide = accumulation_dtype(body.dtype)
    if joins_hosts(group) and wide == body.dtype and max(theirs) * num_ranks <= _MOST_PADDED * sum(theirs):
        rows = body.new_zeros(num_ranks, max(theirs))
        for to, row in enumerate(rows):
            torch.cat([*layout.of(to, body), words], out=row[: theirs[to]])
        yield reduce_scatter(total := torch.empty_like(rows[0]), [*rows], group)
        total = total[: theirs[rank]]
    elif divisor == 1 and wide == body.dtype and has_ring(group, body):
        yield reduce_scatter_on_ring([[*layout.of(to, body), words] for to in range(num_ranks)], group)
        if others := [each for to in range(num_ranks) if to != rank for each in layout.of(to, body)]:
            torch._foreach_zero_(others)
        return
    else:
        # On a ring 16-bit elements would be rounded after each addition, which `Compressed` does once. Or they would
        # travel in 32 bits, and compression would save nothing.
        sent = torch.cat([piece for to in range(num_ranks) for piece in (*layout.of(to, body), words)])
        received = sent.new_empty((own := theirs[rank]) * num_ranks)
        sizes = [[each * sent.itemsize for each in lengths] for lengths in ([own] * num_ranks, theirs)]
        # As bytes, since Gloo's knows few dtypes
        yield all_to_all(received.view(torch.uint8), sent.view(torch.uint8), group, *sizes)
        if not body.is_cpu:  # two threads, each with a stream, launch and fold what is compressed
            keep_for_current_streams([sent, received, body])
        total = sum_in_order(list(received.split(own)))
    total = (total if divisor == 1 else total.div_(divisor)).to(body.dtype)
    body.zero_()
    pieces = [*layout.of(rank, body), words]
    torch._foreach_copy_(pieces, list(total.split([piece.numel() for piece in pieces])))

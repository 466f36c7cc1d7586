"""A bucket of dense gradients, which live in one flat buffer and are reduced in one message.

Rules
1. A gradient enters the buffer once. A large one enters, scaled, as soon as autograd has it. Autograd adds small ones
   into the buffer directly where it can. They are scaled together when the bucket leaves.
2. From `make_message` until `set_gradients` no parameter of the bucket has a `.grad`. So autograd cannot write into a
   buffer that is on the wire. What it produces meanwhile (reentrant checkpointing) is fresh, hence *late*, and is added
   afterwards.
3. A view aliases the buffer without being an autograd view of it, so `.grad.detach_()` works. The version counters of
   the small ones count what autograd has written there.
4. A parameter that no rank used gets back exactly what `.grad` it had. One for which autograd finds no gradient (a
   function that returns None) was not used, although autograd calls its hooks. So a buffer into which autograd adds is
   filled with -0.0: adding a gradient to it gives that gradient. If autograd wrote fewer gradients than hooks fired, a
   view that still is all -0.0 received none. From then on the bucket leaves `.grad` to autograd, which says None.
5. A gradient that the script keeps, while `.grad` is None or another one, is not written again. Before a backward a
   view with more references than the bucket's own gets memory of its own. The bucket takes another view.
"""

from __future__ import annotations

import collections
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import Work
from paceline.ddp.bucket import gradient_views, is_large, launch_late
from paceline.errors import ConfigurationError
from paceline.reductions import Message, Reduction
from paceline.reductions.reduction import real_numel

# For `map`, without the interpreter; the descriptor's own `__get__` takes three times as long as an attrgetter.
_set_gradient = vars(torch._C.TensorBase)["grad"].__set__
_gradient_of = operator.attrgetter("grad")
_version_of = operator.attrgetter("_version")

_FILLING = -0.0
_FEW_MEMBERS = 16  # which are counted faster than looked at


def _is_filling(view: Tensor) -> bool:
    """Return whether autograd has not written there, or gradients that are all -0.0."""
    numbers = torch.view_as_real(view) if view.is_complex() else view
    return bool((numbers == 0).all()) and bool(numbers.signbit().all())


def _set_gradients(parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """`parameter.grad = gradient` for each pair, for many pairs; stops with the shorter."""
    try:
        collections.deque(map(_set_gradient, parameters, gradients), maxlen=0)
    except RuntimeError as error:
        raise ConfigurationError(
            "a parameter was converted or resized after the module had been wrapped: its gradient's memory is still "
            "the former. Convert the module first, then wrap it."
        ) from error


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LEAST = {size: torch.iinfo(integers).min for size, integers in _INTEGERS.items()}  # has the bits of -0.0


class _Sample:
    """The first elements of the gradients that lie in a buffer, `sizes` elements each."""

    def __init__(self, flat: Tensor, sizes: Sequence[int]) -> None:
        places = [sum(sizes[:place]) for place, size in enumerate(sizes) if size > 0]
        self._flat = flat
        self._places = torch.tensor(places, dtype=torch.long, device=flat.device)
        self._zeros = flat.new_zeros(len(places))

    def take(self) -> Tensor:
        """Return the elements as they are now, shape (gradients,). Does not wait for the device."""
        return self._flat.index_select(0, self._places)

    def times_zero(self, elements: Tensor) -> Tensor:
        """Return zero if all are finite, otherwise NaN; shape (). Does not wait for the device."""
        return elements.dot(self._zeros)


def _has_negative_zero(elements: Tensor) -> bool:
    """Return whether an element is -0.0. On an accelerator this waits for the device."""
    numbers = elements.view(_INTEGERS[elements.itemsize])
    return len(numbers) > 0 and numbers.min().item() == _LEAST[elements.itemsize]


@dataclass(frozen=True)
class _Kept:
    """The former `.grad` of an unused parameter: the object and, where that aliases the buffer, its values."""

    gradient: Tensor
    values: Tensor | None


class DenseBucket:
    """Dense gradients of one (dtype, device): a `Bucket` with a buffer."""

    def __init__(
        self,
        index: int,  # place in the launch order
        members: Sequence[int],  # parameter indices in layout order: all large ones, then all small ones
        parameters: Sequence[Parameter],  # the members' parameters
        message: Tensor,  # real, contiguous; holds the members' gradients and, behind them, the status words
        num_words: int = 0,  # how many of these; only in the last bucket
    ) -> None:
        """Take `message` as the buffer of the members' gradients."""
        self.index = index
        self.members = list(members)
        self.parameters = list(parameters)
        self.message = message
        self.body = body = message[: message.numel() - num_words]
        self.size_bytes = body.numel() * body.element_size()
        self.words = message[body.numel() :] if num_words else None
        self.views = gradient_views(body, self.parameters)
        self.num_large = sum(is_large(parameter) for parameter in self.parameters)
        num_large_elements = sum(real_numel(parameter) for parameter in self.parameters[: self.num_large])
        self._small = body[num_large_elements:]
        self._small_parameters = self.parameters[self.num_large :]
        self._small_views = self.views[self.num_large :]
        self._sample = _Sample(body, [real_numel(parameter) for parameter in self.parameters])
        self._num_references = list(map(sys.getrefcount, self.views))  # while nothing else refers to a view
        self._slots = {id(parameter): slot for slot, parameter in enumerate(self.parameters)}

        # State of one backward.
        self.finished: list[Tensor] = []
        self.num_expected = 1
        self.has_message = self.is_skipped = False
        self.ready_s = 0.0
        self._is_whole = False  # known to have been finished once each, with a gradient
        self._seen: Tensor | None = None  # of each gradient an element, not scaled yet
        self._num_finished_before = 0
        self._entered: set[int] = set()  # large slots already in the buffer, scaled
        self._is_detached = False  # small parameters have no `.grad` until `set_gradients`
        self._are_aliased = False  # small gradients were None and now alias the filled buffer
        self._may_alias = True  # autograd has found a gradient for all that it has finished so far
        self._num_writes_before = 0  # when they were installed
        self._unused: list[int] = []
        self._kept: dict[int, _Kept] = {}  # untouched slots that had a gradient
        self._with_graph: dict[int, Tensor] = {}  # made under create_graph: the graph outlives the step
        self.not_finite: Tensor | None = None

    def arm(self, num_expected: int) -> None:
        """Start a backward. Autograd may add small gradients straight into the buffer."""
        self.finished.clear()
        self.num_expected = num_expected
        self.has_message = self.is_skipped = False
        self.ready_s = 0.0
        self._is_whole, self._seen, self.not_finite = False, None, None
        self._entered.clear()
        self._unused, self._kept, self._with_graph = [], {}, {}
        self._leave_kept_gradients()
        self._are_aliased = self._alias_grads()

    def expect(self, count: int) -> None:
        self.num_expected = count

    def mark_ready(self, ready_s: float) -> None:
        self.ready_s = ready_s

    def skip(self) -> None:
        self.is_skipped, self._num_finished_before = True, 0
        self._unused = list(range(len(self.members)))

    def _leave_kept_gradients(self) -> None:
        """Give gradients that the script keeps memory of their own (rule 5)."""
        num_references = list(map(sys.getrefcount, self.views))
        if num_references == self._num_references:
            return
        for slot, (now, plain) in enumerate(zip(num_references, self._num_references, strict=True)):
            kept = self.views[slot]
            if now > plain and self.parameters[slot].grad is not kept:
                memory = kept.untyped_storage(), kept.storage_offset(), kept.shape, kept.stride()
                self.views[slot] = torch.empty(0, dtype=kept.dtype, device=kept.device).set_(*memory)
                kept.data = kept.detach().clone()
        self._small_views = self.views[self.num_large :]

    def _alias_grads(self) -> bool:
        """Let the small gradients alias the filled buffer, so that autograd adds into it; only if all are None."""
        if not (self._may_alias and all(map(operator.is_, self._small_gradients(), itertools.repeat(None)))):
            return False
        self._small.fill_(_FILLING)
        _set_gradients(self._small_parameters, self._small_views)
        self._num_writes_before = sum(map(_version_of, self._small_views))
        return True

    def _small_gradients(self) -> Iterable[Tensor | None]:
        return map(_gradient_of, self._small_parameters)

    def _num_writes(self) -> int:
        """Return how often autograd has added to a small gradient in this backward, if nothing else wrote there."""
        num_writes: int = sum(map(_version_of, self._small_views)) - self._num_writes_before
        return num_writes

    def disarm(self) -> None:
        self.num_expected = 1
        self.finished.clear()
        self.has_message = False

    def finished_slots(self) -> list[int]:
        return [self._slots[id(parameter)] for parameter in self.finished]

    def slots_with_gradients(self) -> set[int]:
        if self._has_all_gradients():
            return set(range(len(self.members)))
        slots = self.finished_slots()
        num_small = sum(slot >= self.num_large for slot in slots)
        may_be_filling = self._are_aliased and self._num_writes() != num_small
        finished = set(slots)
        found = {slot for slot in finished if self._has_gradient(slot, may_be_filling)}
        self._may_alias = self._may_alias and found == finished
        return found

    def _has_gradient(self, slot: int, may_be_filling: bool) -> bool:
        gradient = self.parameters[slot].grad
        if may_be_filling and slot >= self.num_large and gradient is self.views[slot]:
            return not _is_filling(gradient)
        return gradient is not None or slot in self._entered

    def _has_all_gradients(self) -> bool:
        """Return whether each member was finished once and has a gradient; without the interpreter for each of them."""
        if len(self.finished) != len(self.members):
            return False
        if not self._is_whole:
            self._is_whole = (len(self.members) > _FEW_MEMBERS and self._is_written()) or self._is_counted()
        return self._is_whole

    def _is_written(self) -> bool:
        """Return whether each member has a gradient. This is a cheap check, on the CPU only."""
        if not (self._are_aliased and self._small.is_cpu and len(self._entered) == self.num_large):
            return False
        self._seen = self._sample.take()
        return not _has_negative_zero(self._seen[self.num_large :])

    def _is_counted(self) -> bool:
        if not self._is_touched_once():
            return False
        if self._are_aliased:
            has_small = self._num_writes() == len(self._small_parameters)
        else:
            has_small = all(map(operator.is_not, self._small_gradients(), itertools.repeat(None)))
        return has_small and all(self._has_gradient(slot, False) for slot in range(self.num_large))

    def is_complete(self) -> bool:
        return self._has_all_gradients() or self._is_touched_once()

    def _is_touched_once(self) -> bool:
        return len(set(map(id, self.finished))) == len(self.finished)

    def copy_in(self, slot: int, scale: float) -> None:
        """Move a large gradient that autograd has just finished into the buffer, scaled (rule 1)."""
        if self.has_message:
            return
        parameter, view = self.parameters[slot], self.views[slot]
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or gradient.requires_grad:
            return
        if slot in self._entered:
            if scale:
                view.add_(gradient, alpha=scale)
        elif gradient is view:
            _multiply(view, scale)
        else:
            _write(view, gradient, scale)
        self._entered.add(slot)
        parameter.grad = None

    def accumulate(self, slot: int) -> None:
        """Keep a large gradient in the buffer, unscaled, with `.grad` as its view."""
        parameter, view = self.parameters[slot], self.views[slot]
        gradient = parameter.grad
        if gradient is None or gradient is view or gradient.is_sparse or gradient.requires_grad:
            return
        view.copy_(gradient)
        parameter.grad = view

    def make_message(self, scale: float, mean_scale: float, used_before: set[int], has_ended: bool) -> None:
        """Make the message (rule 2). Once backward has ended, small parameters may keep their `.grad`."""
        self._num_finished_before = len(self.finished)
        if not self._has_all_gradients():
            self._keep_unused(used_before)
        for slot in range(self.num_large):
            if slot not in self._entered:
                self._gather(slot)
                _multiply(self.views[slot], scale)
                self.parameters[slot].grad = None
        has_strays = not all(map(operator.is_, self._small_gradients(), self._small_views))
        if has_strays:
            self._gather_strays()
        self._is_detached = not has_ended or has_strays
        if not has_ended:
            _set_gradients(self._small_parameters, itertools.repeat(None))
        if self._small_parameters:
            _multiply(self._small, scale)
        seen = self._seen if self._is_whole and scale != 0.0 else None
        self.not_finite = self._sample.times_zero(self._sample.take() if seen is None else seen)
        self.has_message, self.is_skipped = True, False

    def _keep_unused(self, used_before: set[int]) -> None:
        """Find the members that this rank's step has not used, and keep what they have as `.grad` (rule 4)."""
        used = self.slots_with_gradients()
        used.update(slot for slot, parameter in enumerate(self.parameters) if id(parameter) in used_before)
        self._unused = [slot for slot in range(len(self.members)) if slot not in used]
        for slot in self._unused:
            gradient, view = self.parameters[slot].grad, self.views[slot]
            is_filling = self._are_aliased and slot >= self.num_large and gradient is view
            if gradient is not None and not is_filling:
                self._kept[slot] = _Kept(gradient, view.clone() if gradient is view else None)

    def _gather_strays(self) -> None:
        """Copy small gradients into the buffer that autograd or the script has put elsewhere."""
        is_stray = map(operator.is_not, self._small_gradients(), self._small_views)
        slots = [slot for slot, stray in enumerate(is_stray, start=self.num_large) if stray]
        plain = []
        for slot in slots:
            gradient = self.parameters[slot].grad
            if gradient is None or gradient.is_sparse or gradient.requires_grad:
                self._gather(slot)
            else:
                plain.append(slot)
        if plain:
            gradients = [self.parameters[slot].grad for slot in plain]
            torch._foreach_copy_([self.views[slot] for slot in plain], gradients)  # type: ignore[arg-type]
        for slot in slots:
            self.parameters[slot].grad = None

    def _gather(self, slot: int) -> None:
        """Make the view hold the gradient, unscaled; zeros if there is none."""
        view, gradient = self.views[slot], self.parameters[slot].grad
        if gradient is None:
            view.zero_()
        elif gradient is not view:
            if gradient.requires_grad:
                self._with_graph[slot] = gradient
                gradient = gradient.detach()
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def launch(self, reduction: Reduction, group: ProcessGroup, is_last: bool) -> Work:
        flat, numel = self.message if reduction.carries_status else self.body, self.body.numel()
        return reduction.launch(Message(self.index, is_last, flat, numel, self.views, self.parameters, group))

    def launch_piece(self, reduction: Reduction, group: ProcessGroup, start: int, stop: int) -> Work:
        """Start reducing elements start <= i < stop, as `launch` does."""
        flat = self.body[start:stop]
        return reduction.launch(
            Message(self.index, False, flat, stop - start, self.views, self.parameters, group, start)
        )

    def set_gradients(self, is_used: Callable[[int], bool]) -> None:
        if self.is_skipped:
            self.drop_unwritten()
            return
        attached = len(self.members) if self._is_detached else self.num_large
        _set_gradients(self.parameters[:attached], self.views)
        for slot in self._unused:
            if not is_used(self.members[slot]):
                self._restore(slot)
        for slot, gradient in self._with_graph.items():
            gradient.data.copy_(self.views[slot])
            self.parameters[slot].grad = gradient

    def _restore(self, slot: int) -> None:
        kept = self._kept.get(slot)
        self.parameters[slot].grad = None if kept is None else kept.gradient
        if kept is not None and kept.values is not None:
            self.views[slot].copy_(kept.values)

    def unused_members(self) -> list[int]:
        if not self._unused:
            return []
        late = set(self.finished_slots()[self._num_finished_before :])
        self._unused = [slot for slot in self._unused if slot not in late]
        return [self.members[slot] for slot in self._unused]

    def has_late_gradients(self) -> bool:
        return (self.has_message or self.is_skipped) and len(self.finished) > self._num_finished_before

    def launch_late(self, scale: float, group: ProcessGroup) -> Work:
        late = self.parameters if self.has_late_gradients() else []
        return launch_late(self.body, late, scale, group)

    def drop_unwritten(self) -> None:
        if not self._are_aliased:
            return
        finished = self.slots_with_gradients()
        small = zip(self._small_parameters, self._small_views, strict=True)
        for slot, (parameter, view) in enumerate(small, start=self.num_large):
            if slot not in finished and parameter.grad is view:
                parameter.grad = None

    def take_over(self, gradients: Mapping[int, Tensor]) -> None:
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = gradients.get(id(parameter))
            if gradient is not None:
                parameter.grad = view.copy_(gradient)


def _multiply(flat: Tensor, scale: float) -> None:
    """Multiply in place. Scale 0 writes 0, even over NaN, which a mean over no tokens is."""
    if scale == 0.0:
        flat.zero_()
    elif scale != 1.0:
        flat.mul_(scale)


def _write(view: Tensor, gradient: Tensor, scale: float) -> None:
    if scale == 0.0:
        view.zero_()
    elif scale == 1.0:
        view.copy_(gradient)
    elif gradient.dtype == view.dtype:
        torch.mul(gradient, scale, out=view)
    else:
        view.copy_(gradient).mul_(scale)

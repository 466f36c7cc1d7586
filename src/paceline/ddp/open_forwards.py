"""The forwards of the wrapped module that wait for their backward, and the one to which a backward belongs.

Rules
1. A backward belongs to the forwards whose nodes it passes. Mostly it passes an output, whose hook says so.
2. Where it passes none that was found (a loss in a global, say), its graph is searched from the tensors it began with.
   A thread numbers the nodes it makes, so a forward's are those between its beginning and its end.
3. A graph that passes an output and no parameter (a batch that no expert was given) is a backward, too: the rank counts
   as zero. Not so if the forward could train nothing, and for `torch.autograd.grad`, which asks for other tensors.
4. A loss that touches no output (zero times all parameters) is attributed to the newest forward before it without a
   backward. If there is none, the graph was made around the wrapper, as by `model.module(...)`: it stays local.
5. Ranks that have left different numbers of forwards in training mode without a backward are not in the same step.
   A rank may pass one forward in a backward, and another rank several.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType

import torch
from torch.autograd.graph import GradientEdge

NOT_COUNTED = 15  # small enough for a status word to be exact in every float type
_NUM_REMEMBERED = 256
_LEAF = 2**63  # nodes that accumulate into a leaf are numbered from here on
_BACKWARD, _GRAD = torch.autograd.backward.__code__, torch.autograd.grad.__code__


sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the number of the next node that this thread makes."""


@dataclass(frozen=True)
class Owner:
    """A forward to which a backward belongs."""

    # It ran within a backward (the whole module is checkpointed), so its own is a nested one.
    is_recomputed: bool = False
    forward: Forward | None = None  # None: it is not known which


@dataclass(eq=False)
class Forward:
    """One forward of the wrapped module."""

    counts: bool  # whether a backward should follow, on every rank; until all forwards are forgotten
    epoch: int  # how often everything had been forgotten before it
    begin: int = field(default_factory=sequence_number)  # the sequence number of its first node
    end: int = _LEAF  # that after its last node
    thread: int = field(default_factory=threading.get_ident)  # which ran it
    # It ran within a backward
    is_recomputed: bool = field(default_factory=lambda: torch._C._current_graph_task_id() >= 0)
    has_outputs: bool = False  # tensors were found that its backward will pass
    is_passed: bool = False  # a backward has passed it, or stood for it
    is_followed: bool = False  # a backward of any forward has come since, and no forward has
    weight: float | None = None  # what its batch counts; None: it is not weighed
    was_weighed: bool = False  # a backward of it has told the other ranks of its step
    # First nodes of graphs that passed no output and were attributed to it (rule 4).
    stood_by: set[int] = field(default_factory=set)

    def begin_step(self) -> bool:
        """Return whether this is its first weighed backward: a second one is of no step of the data. Local."""
        is_first, self.was_weighed = not self.was_weighed, True
        return is_first

    def is_open(self, epoch: int) -> bool:
        """Return whether this forward counts and has had no backward."""
        return self.counts and not self.is_passed and self.epoch == epoch

    def may_be_stood_for(self, first_node: int) -> bool:
        """Return whether a graph that begins with this node, and passes no output, may be attributed to it (rule 4)."""
        is_over = self.is_passed or (self.has_outputs and self.is_followed)
        return not is_over or first_node in self.stood_by


class OpenForwards:
    """The forwards of one module on one rank."""

    def __init__(self) -> None:
        self.count = 0  # forwards that should have a backward, and have had none
        self._backward_is_announced = False
        self._epoch = 0
        self._forwards: deque[Forward] = deque(maxlen=_NUM_REMEMBERED)

    # ---- forwards

    def begin(self, counts: bool) -> None:
        self._backward_is_announced = False
        forward = Forward(counts, self._epoch)
        if self._forwards:
            self._forwards[-1].end = min(self._forwards[-1].end, forward.begin)  # it has raised, if not ended
        self._forwards.append(forward)
        self.count += counts

    def weigh_last(self, weight: float) -> None:
        self._forwards[-1].weight = weight

    def end(self, has_outputs: bool) -> Forward:
        """Note that the last forward has returned. Return it, to be closed when a backward reaches its outputs."""
        forward = self._forwards[-1] if self._forwards else Forward(counts=False, epoch=self._epoch)
        forward.end, forward.has_outputs = sequence_number(), has_outputs
        return forward

    @property
    def begin_of_last(self) -> int:
        """Return the sequence number with which the last forward began."""
        return self._forwards[-1].begin

    # ---- backwards

    def close(self, forward: Forward) -> None:
        """Note that a backward passes this forward."""
        self.count -= forward.is_open(self._epoch)
        forward.is_passed = True

    def announce_backward(self) -> None:
        """Attribute the next backward to this module. Frameworks that run backward within forward call this before."""
        self._backward_is_announced = True

    def note_backward(self) -> None:
        """Note that a backward begins which belongs to a forward."""
        if self._forwards:
            self._forwards[-1].is_followed = True

    def owner_of_running_backward(self) -> Owner | None:
        """Close the forwards to which the running backward belongs, though it has passed no output that was found.

        Returns None if the backward has been made around the wrapper.
        """
        threads = {forward.thread for forward in self._forwards}
        numbers = _nodes_of_running_backward() if len(threads) <= 1 else None
        # Not begun by `torch.autograd.backward`, or nodes are numbered by several threads: it cannot be known.
        is_known = numbers is not None
        newest_open = [forward for forward in self._forwards if not forward.is_passed][-1:]
        passed = newest_open if numbers is None else self._passed_by(numbers)
        for forward in passed:
            self.close(forward)
        is_announced, self._backward_is_announced = self._backward_is_announced, False
        if passed or is_announced or (self._forwards and not is_known):
            newest = [*self._forwards, *passed][-1:]
            return Owner(any(forward.is_recomputed for forward in passed), *newest)
        return None

    def _passed_by(self, numbers: list[int]) -> list[Forward]:
        """Return the forwards whose nodes are among these; without any, the one that rule 4 names."""
        passed = [f for f in self._forwards if any(f.begin <= number < f.end for number in numbers)]
        if passed or not numbers:
            return passed
        first = min(numbers)
        before = [forward for forward in self._forwards if forward.begin <= first][-1:]
        stood_for = [forward for forward in before if forward.may_be_stood_for(first)]
        for forward in stood_for:
            forward.stood_by.add(first)
        return stood_for

    # ---- all ranks

    def forget(self) -> None:
        """Forget all forwards: all ranks begin the next step together."""
        self.count = 0
        self._epoch += 1

    def word(self, by_autograd: bool) -> int:
        """Return the number of open forwards, modulo NOT_COUNTED, for the other ranks; or NOT_COUNTED."""
        return self.count % NOT_COUNTED if by_autograd else NOT_COUNTED


def differences(words: Mapping[int, int]) -> dict[int, int]:
    """Return by how much each rank's number of open forwards differs from the first rank's."""
    first = next(iter(words.values()))
    half = NOT_COUNTED // 2
    return {rank: (word - first + half) % NOT_COUNTED - half for rank, word in words.items()}


def out_of_step(counts: Mapping[int, int]) -> str:
    """Return which rank is ahead of which, from the ranks' words; nothing if none is (rule 5)."""
    if len(set(counts.values())) <= 1:
        return ""
    ahead = differences(counts)
    most = max(ahead, key=ahead.__getitem__)
    least = min(ahead, key=ahead.__getitem__)
    return (
        f"the ranks are not in the same step: rank {most} has run {ahead[most] - ahead[least]} forward(s) in training "
        f"mode without a backward more than rank {least}. If rank {most} skipped a backward or caught an exception "
        "before its backward reached the module, its batches are ahead of the others'. If it ran a forward by itself, "
        "that belongs under torch.no_grad() or in evaluation mode."
    )


def _nodes_of_running_backward() -> list[int] | None:
    """Return the numbers of the nodes, without leaves, of the outermost running backward; None: not found."""
    call = next(reversed(_running_calls(_BACKWARD)), None)
    if call is None:
        return None
    roots = call.f_locals[_BACKWARD.co_varnames[0]]
    roots = (roots,) if isinstance(roots, (torch.Tensor, GradientEdge)) else tuple(roots)
    todo = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    todo = [node for node in todo if node is not None]
    seen = set(todo)
    numbers = []
    while todo:
        node = todo.pop()
        number = node._sequence_nr()
        if number < _LEAF:
            numbers.append(number)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                todo.append(child)
    return numbers


def accumulates_everywhere() -> bool:
    """Return whether the running backward is one of `torch.autograd.backward` without `inputs`."""
    call = next(iter(_running_calls(_BACKWARD, _GRAD)), None)
    return call is not None and call.f_code is _BACKWARD and not call.f_locals["inputs"]


def _running_calls(*functions: CodeType) -> list[FrameType]:
    """Return the calls of these functions for which this thread works, innermost first.

    On a CPU it runs in this thread. The engine's own threads, one a device, work for a call in another one.
    """
    frames = sys._current_frames()
    mine = frames.pop(threading.get_ident())
    if isinstance(threading.current_thread(), threading._DummyThread):
        others = [calls for frame in frames.values() if (calls := _calls_in(frame, functions))]
        if others:
            return others[0] if len(others) == 1 else []
    return _calls_in(mine, functions)


def _calls_in(frame: FrameType | None, functions: Sequence[CodeType]) -> list[FrameType]:
    calls = []
    while frame is not None:
        if frame.f_code in functions:
            calls.append(frame)
        frame = frame.f_back
    return calls

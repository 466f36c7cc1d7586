"""Which buckets a step leaves out: those that no rank needs, as the ranks agree before the first bucket leaves.

Rules
1. When a synchronized backward begins, every rank says which gradients it needs, in one small sum ahead of all buckets.
   Backward hardly waits for it: the first full bucket does, 2 ms at most (what a sum takes if no rank is late; there
   may be no later bucket to leave with). Then full buckets leave with the next one; the end of backward waits. So
   clocks say when buckets leave. Over a group of the script's, over which its layers may communicate within backward,
   that must not be: there the first full bucket waits as long as it takes.
2. A rank needs no gradient of what it has declared to be skipped (`model.skip`), nor, if `looks`, of what the autograd
   engine says this backward does not reach; but all that earlier backwards of the step have used. A bucket of which no
   rank needs anything is left out. Its gradients stay what they were, as those of parameters that no rank has used.
3. Where ranks have declared different layers, all of them read so in the same sum: no rank launches anything, all
   raise, and say so if the ranks are not in the same step (they would draw alike, but for different steps). A rank
   that runs no backward of its own (joined, or giving up) has no say, and follows.
4. A gradient of a declared parameter is an error. One that the engine has not foreseen (reentrant checkpointing) is
   late (rule 5 of `reducer`), and from then on this rank needs everything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module

from paceline.comm.backward import Backward
from paceline.comm.collectives import device_for_metadata, launch_sum
from paceline.comm.gradient_group import is_beside
from paceline.comm.peers import Peers
from paceline.comm.pending import Done, Pending
from paceline.ddp.arrivals import Expectations
from paceline.ddp.bucket import Bucket, Scales
from paceline.ddp.droppable import Parts, Unit, flat
from paceline.ddp.layout import ManagedParameters
from paceline.ddp.open_forwards import OpenForwards, out_of_step
from paceline.errors import ConfigurationError, SkipError

_BITS = 48  # of one word, which float64 sums exactly
_UNITS = 5  # the units' bits begin here; before them: whether a rank has a say, and in four its open forwards
_MOST_NAMED = 5
PATIENCE_S = 0.002


class Skipping:
    """What one module's steps skip, on one rank.

    Args:
        module: Whose.
        units: What can be skipped.
        looks: What a backward does not reach is not needed (`skip_all_reduce_unused_params`).
    """

    def __init__(self, module: Module, units: Sequence[Unit], looks: bool) -> None:
        self.looks = looks
        self._parts, self._units = Parts(module), units
        self._owners = {id(p): number for number, unit in enumerate(units) for p in unit.parameters}
        self._contexts: list[frozenset[int]] = []  # numbers of units, of each `with` that is open
        self._managed: ManagedParameters
        self._members: list[frozenset[int]] = []  # parameter indices of each unit
        self._group: ProcessGroup
        self._peers: Peers
        self._open_forwards: OpenForwards
        # Of the synchronized backward under way.
        self._declared: frozenset[int] = frozenset()  # numbers of units
        self._skipped: frozenset[int] = frozenset()  # their parameters' indices
        self._words = torch.zeros(0)
        self._pending: Pending | None = None
        self._has_arrived = threading.Event()
        self._is_private = False
        self._patience_s = PATIENCE_S
        self._needed: list[bool] | None = None  # by any rank, once agreed on
        self._disagreement = ""

    def follow(
        self,
        managed: ManagedParameters,
        groups: Sequence[ProcessGroup],
        peers: Peers,
        open_forwards: OpenForwards,
    ) -> None:
        """These parameters are reduced from now on, over these groups; the first agrees. Local."""
        indices = {id(parameter): index for index, parameter in enumerate(managed.parameters)}
        self._members = [
            frozenset(indices[id(p)] for p in unit.parameters if id(p) in indices) for unit in self._units
        ]
        self._managed, self._group, self._peers, self._open_forwards = (
            managed,
            groups[0],
            peers,
            open_forwards,
        )
        self._is_private = all(map(is_beside, groups))

    # ---- declared by the caller

    @contextmanager
    def skip(self, *what: Any) -> Iterator[None]:
        """As `DistributedDataParallel.skip`."""
        numbers = self._numbers_of(what)
        self._contexts.append(numbers)
        try:
            yield
        finally:
            self._contexts.remove(numbers)

    def _numbers_of(self, what: Any) -> frozenset[int]:
        parts = [self._parts.part(given) for given in flat(what)]
        ids = {id(parameter) for _, parameters in parts for parameter in parameters}
        owned = [self._owners[each] for each in ids if each in self._owners]
        numbers = frozenset(owned)
        if not len(ids) == len(owned) == sum(len(self._units[number].parameters) for number in numbers):
            names = ", ".join(name for name, _ in parts)
            can = ", ".join(unit.name for unit in self._units) or "nothing"
            raise ConfigurationError(
                f"skip({names}): what is skipped has to consist of entries of droppable=, which are {can}. They have "
                "buckets of their own; all ranks have to know them from the start, so give them to the constructor."
            )
        return numbers

    # ---- a synchronized backward

    def begin(self, backward: Backward, expected: Expectations, used_before: set[int], asks: bool) -> None:
        """A backward begins: take down what is declared, and what this rank needs if it `synchronizes`.

        Args:
            backward: This one.
            expected: What it reaches; told of what it skips.
            used_before: Indices of parameters that earlier, unsynchronized backwards of this step have touched.
            asks: Whether to `ask` the others now. Local without it.
        """
        self._declared = frozenset().union(*self._contexts) if backward.by_autograd else frozenset()
        self._skipped = frozenset().union(*(self._members[number] for number in self._declared))
        self._pending, self._needed, self._disagreement = None, None, ""
        expected.skipped = self._skipped
        if backward.synchronizes:
            self._propose(backward.by_autograd, expected.reached() if self.looks else None, used_before)
            if asks:
                self.ask()

    def _propose(self, by_autograd: bool, reached: list[bool] | None, used_before: set[int]) -> None:
        rank, num_ranks = self._group.rank(), self._group.size()
        needs = [
            index in used_before
            or (by_autograd and index not in self._skipped and (reached is None or reached[index]))
            for index in range(len(self._managed))
        ]
        declared = sum(1 << _UNITS + number for number in self._declared)
        mask = 1 | self._open_forwards.word(by_autograd) << 1 | declared if by_autograd else 0
        said = [0] * (num_ranks * self._num_words)
        for place in range(self._num_words):
            said[rank * self._num_words + place] = mask >> (place * _BITS) & ((1 << _BITS) - 1)
        where = device_for_metadata(self._group, self._managed.parameters[0].device)
        self._words = torch.tensor([*needs, *said], dtype=torch.float64, device=where)

    @property
    def _num_words(self) -> int:
        """That say what one rank has declared."""
        return (_UNITS + len(self._units) - 1) // _BITS + 1

    def ask(self) -> None:
        """Launch the sum of what all ranks need.

        Contract:
            Collective: every rank, once a synchronized backward, before its buckets.  Blocks: no.
        """
        self._has_arrived, self._patience_s = threading.Event(), PATIENCE_S
        self._pending = Done() if self._group.size() == 1 else launch_sum(self._words, self._group)
        self._pending.on_done(self._has_arrived.set)

    def lets_launch(self, buckets: Sequence[Bucket]) -> bool:
        """Whether it is known which of these leave, and which are `left_out`. Local; waits once a backward (rule 1)."""
        if self._needed is None and self._pending is not None:
            patience_s, self._patience_s = self._patience_s, 0.0
            if not self._is_private or self._has_arrived.wait(patience_s):
                self._read(self._pending, buckets)
        return self._needed is not None and not self._disagreement

    def agree(self, buckets: Sequence[Bucket]) -> None:
        """Know which of these buckets leave.

        Contract:
            Collective, if `ask` has not been called yet.  Blocks: yes.

        Raises:
            SkipError: The ranks have declared different layers; on every rank.
        """
        if self._pending is None:
            self.ask()
        if self._needed is None and self._pending is not None:
            self._read(self._pending, buckets)
        if self._disagreement:
            raise SkipError(self._disagreement)

    def _read(self, pending: Pending, buckets: Sequence[Bucket]) -> None:
        self._peers.wait(pending, "agreeing on what this step skips")
        num_parameters = len(self._managed)
        counts = [round(word) for word in self._words.tolist()]
        self._needed = [count > 0 for count in counts[:num_parameters]]
        for bucket in buckets:
            if not any(self._needed[index] for index in bucket.members):
                bucket.leave_out()
        said, width = counts[num_parameters:], self._num_words
        masks = {
            rank: sum(said[rank * width + place] << (place * _BITS) for place in range(width))
            for rank in range(self._group.size())
        }
        masks = {rank: mask for rank, mask in masks.items() if mask & 1}
        if len({mask >> _UNITS for mask in masks.values()}) > 1:
            self._disagreement = self._describe(masks)
            self._open_forwards.forget()

    def _describe(self, masks: dict[int, int]) -> str:
        found = []
        for number, unit in enumerate(self._units):
            skip = [rank for rank, mask in masks.items() if mask & (1 << _UNITS + number)]
            if 0 < len(skip) < len(masks):
                do_not = [rank for rank in masks if rank not in skip]
                found.append(f"{unit.name} on {_ranks(skip)} but not on {_ranks(do_not)}")
        more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        advice = "Draw them from the same seed on every rank, such as random.Random(f'{seed} {step}'), not a rank's."
        open_forwards = (1 << _UNITS - 1) - 1
        if cause := out_of_step({rank: mask >> 1 & open_forwards for rank, mask in masks.items()}):
            advice = f"Perhaps because {cause}"
        layers = "; ".join(found[:_MOST_NAMED]) + more
        return (
            f"rank {self._group.rank()}: the ranks skip different layers: {layers}. {advice} "
            "Nothing was reduced; the gradients of this step were dropped on every rank, parameters are untouched."
        )

    # ---- backward has ended

    def error_of_used(self, buckets: Sequence[Bucket]) -> SkipError | None:
        """What to raise if this backward has made gradients of what was declared to be skipped."""
        touched = {b.members[slot] for b in buckets for slot in b.touched_slots()} if self._skipped else set()
        used = [self._units[n].name for n in sorted(self._declared) if self._members[n] & touched]
        if not used:
            return None
        names = [self._managed.names[index] for index in sorted(self._skipped & touched)][:_MOST_NAMED]
        return SkipError(
            f"rank {self._group.rank()}: {', '.join(used[:_MOST_NAMED])} was declared to be skipped, but this backward "
            f"has made gradients of {', '.join(names)}. Let the forward leave out what `with model.skip(...)` names "
            "(also where a parameter is shared with another layer). The gradients of this step were dropped on every "
            "rank, parameters are untouched."
        )

    def undeclared(self, unused: Sequence[int]) -> list[int]:
        """Of these parameter indices those that were not declared to be skipped."""
        return [index for index in unused if index not in self._skipped]


def collect_late(bucket: Bucket) -> None:
    """Make the message of a bucket that was left out, of zeros; what has come nevertheless counts as late (rule 4).

    So does what was there before: autograd has added to it, here or on another rank.
    """
    bucket.drop_installed()
    touched = list(bucket.touched)
    late = [(p, p.grad.detach().clone()) for p in bucket.parameters if p.grad is not None]
    for slot in bucket.slots_with_gradients():
        bucket.parameters[slot].grad = None
    bucket.touched.clear()
    bucket.collect(Scales(0.0, 0.0), set(), has_ended=False)
    bucket.touched.extend(touched or [parameter for parameter, _ in late])
    for parameter, gradient in late:
        parameter.grad = gradient


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

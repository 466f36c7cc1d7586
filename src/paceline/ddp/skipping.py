"""Steps that skip buckets which no rank needs, as the ranks agree before the first bucket leaves.

Rules
1. When a synchronized backward begins, every rank says which gradients it needs, in one small sum ahead of all buckets.
   The first full bucket waits up to 2 ms for the agreement: what a sum takes if no rank is late, and there may be no
   later bucket to leave with. If it is late, full buckets wait for the next bucket or for the end of backward.
2. Launch order, relative to other collectives within backward, then depends on timing. If layers share the group, that
   could deadlock. So over a group of the script's the first full bucket waits without limit. Besides weights and the
   end of backward, only there may autograd's thread wait for the network.
3. A rank needs no gradient of a part that it has declared to be skipped (`model.skip`). If `looks`, it needs none that
   the autograd engine says this backward does not reach. It needs all that earlier backwards of the step have used. A
   bucket that no rank needs is skipped. Its gradients stay as they were, as those of parameters that no rank has used.
4. Where ranks have declared different layers, all of them read so in the same sum. No rank launches anything, and all
   raise. The error says if the ranks are not in the same step: they would draw alike, but for different steps. A rank
   that runs no backward of its own (joined, or giving up) has no say, and follows.
5. A gradient of a declared parameter is an error. One that the engine has not foreseen (reentrant checkpointing) is
   late (rule 5 of `reducer`), and from then on this rank needs everything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module

from paceline.comm.collectives import Chain, Work, all_reduce, device_for_metadata
from paceline.comm.gradient_group import is_beside
from paceline.comm.peers import Peers
from paceline.ddp.bucket import Bucket, make_skipped_message
from paceline.ddp.droppable import Parts, Unit, flat
from paceline.ddp.gradient_sync import BucketSync, SyncFactory
from paceline.ddp.layout import ManagedParameters
from paceline.ddp.membership import Groups
from paceline.ddp.open_forwards import OpenForwards, out_of_step
from paceline.ddp.step import BackwardPass, GradientSync
from paceline.ddp.verdict import describe_ranks
from paceline.errors import ConfigurationError, SkipError
from paceline.observe import StepTimings
from paceline.observe.device_times import DeviceTimes
from paceline.reductions import Reduction

_BITS = 48  # of one word, which float64 sums exactly
_UNITS = 5  # the units' bits begin here; before them: whether a rank has a say, and in four its open forwards
_MOST_NAMED = 5
PATIENCE_S = 0.002


class Skipping(SyncFactory):
    """The factory of syncs that skip buckets, for one module on one rank."""

    def __init__(self, module: Module, units: Sequence[Unit], looks: bool) -> None:
        super().__init__()
        self._looks = looks
        self._parts, self._units = Parts(module), units
        self._owners = {id(p): number for number, unit in enumerate(units) for p in unit.parameters}
        self._contexts: list[frozenset[int]] = []  # numbers of units, of each `with` that is open
        self._ranks: _Ranks

    def follow(
        self,
        managed: ManagedParameters,
        groups: Groups,
        peers: Peers,
        open_forwards: OpenForwards,
        timings: StepTimings,
    ) -> None:
        """Reduce these parameters from now on. The ranks agree over the group for numbers."""
        super().follow(managed, groups, peers, open_forwards, timings)
        indices = {id(parameter): index for index, parameter in enumerate(managed.parameters)}
        members = [
            frozenset(indices[id(p)] for p in unit.parameters if id(p) in indices) for unit in self._units
        ]
        is_private = groups.for_numbers is not None or all(map(is_beside, groups.for_gradients))
        looks, units = self._looks, self._units
        self._ranks = _Ranks(managed, groups.numbers, peers, open_forwards, units, members, is_private, looks)

    def begin(self, backward: BackwardPass, buckets: Sequence[Bucket]) -> GradientSync:
        """Note which layers are declared unused, and ask the other ranks whether this one may launch now."""
        declared = frozenset[int]().union(*self._contexts) if backward.by_autograd else frozenset[int]()
        plain = backward.reduction, self._groups, self._peers, buckets, self._times()
        sync = SkippingSync(self._ranks, declared, *plain)
        if backward.plan.synchronizes:
            sync.propose(
                backward.by_autograd, backward.reached() if self._looks else None, backward.step.used_before
            )
            if backward.launches_early:
                sync.ask()
        return sync

    # ---- declared by the caller

    @contextmanager
    def skip(self, *what: Any) -> Iterator[None]:
        """Declare parts to be skipped, as `DistributedDataParallel.skip` says."""
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


@dataclass(frozen=True)
class _Ranks:
    """The ranks that agree, and the units on which they agree."""

    managed: ManagedParameters
    group: ProcessGroup  # over which the ranks agree
    peers: Peers
    open_forwards: OpenForwards  # say which rank is ahead
    units: Sequence[Unit]  # what can be skipped
    members: Sequence[frozenset[int]]  # parameter indices of each unit
    is_private: bool  # no other code communicates over the groups (rule 2)
    looks: bool  # parameters that a backward does not reach are skipped (rule 3)

    @property
    def num_words(self) -> int:
        """Return the number of words in which one rank declares its layers."""
        return (_UNITS + len(self.units) - 1) // _BITS + 1


class SkippingSync(BucketSync):
    """A plain sync without the buckets that no rank needs."""

    def __init__(
        self,
        ranks: _Ranks,  # who agrees
        declared: frozenset[int],  # numbers of the units that this rank has declared to be skipped
        reduction: Reduction,
        groups: Sequence[ProcessGroup],
        peers: Peers,
        buckets: Sequence[Bucket],
        times: DeviceTimes | None,
    ) -> None:
        super().__init__(reduction, groups, peers, buckets, times)
        self._ranks, self._buckets = ranks, buckets
        self._declared = declared
        # Indices of their parameters
        self.not_expected: frozenset[int] = frozenset().union(*(ranks.members[number] for number in declared))
        self._words = torch.zeros(0)
        self._pending: Work | None = None
        self._has_arrived = threading.Event()
        self._patience_s = PATIENCE_S
        self._is_agreed = False
        self._disagreement = ""

    # ---- agreeing

    def propose(self, by_autograd: bool, reached: list[bool] | None, used_before: set[int]) -> None:
        """Write down the gradients that this rank needs. Local."""
        group, managed, num_words = self._ranks.group, self._ranks.managed, self._ranks.num_words
        needs = [
            id(managed.parameters[index]) in used_before
            or (by_autograd and index not in self.not_expected and (reached is None or reached[index]))
            for index in range(len(managed))
        ]
        declared = sum(1 << _UNITS + number for number in self._declared)
        mask = 1 | self._ranks.open_forwards.word(by_autograd) << 1 | declared if by_autograd else 0
        said = [0] * (group.size() * num_words)
        for place in range(num_words):
            said[group.rank() * num_words + place] = mask >> (place * _BITS) & ((1 << _BITS) - 1)
        where = device_for_metadata(group, managed.parameters[0].device)
        self._words = torch.tensor([*needs, *said], dtype=torch.float64, device=where)

    def ask(self) -> Work:
        """Launch the sum of what all ranks need. Collective: once a synchronized backward, before its buckets."""
        group = self._ranks.group
        self._pending = Chain() if group.size() == 1 else all_reduce(self._words, group)
        self._pending.on_done(self._has_arrived.set)
        return self._pending

    def may_launch(self) -> bool:
        """Return whether the first buckets may leave now. Waits once a backward (rules 1 and 2)."""
        if not self._is_agreed and self._pending is not None:
            patience_s, self._patience_s = self._patience_s, 0.0
            if not self._ranks.is_private or self._has_arrived.wait(patience_s):
                self._read(self._pending)
        return self._is_agreed and not self._disagreement

    def _read(self, pending: Work) -> None:
        ranks = self._ranks
        ranks.peers.wait(pending, "agreeing on what this step skips", on_host=self._words.is_cpu)
        num_parameters, width = len(ranks.managed), ranks.num_words
        counts = [round(word) for word in self._words.tolist()]
        self._last = None
        for bucket in self._buckets:
            if any(counts[index] for index in bucket.members):
                self._last = bucket
            else:
                bucket.skip()
        self._is_agreed = True
        said = counts[num_parameters:]
        masks = {
            rank: sum(said[rank * width + place] << (place * _BITS) for place in range(width))
            for rank in range(ranks.group.size())
        }
        masks = {rank: mask for rank, mask in masks.items() if mask & 1}
        if len({mask >> _UNITS for mask in masks.values()}) > 1:
            self._disagreement = self._describe(masks)
            ranks.open_forwards.forget()

    def _describe(self, masks: dict[int, int]) -> str:
        found = []
        for number, unit in enumerate(self._ranks.units):
            skip = [rank for rank, mask in masks.items() if mask & (1 << _UNITS + number)]
            if 0 < len(skip) < len(masks):
                do_not = [rank for rank in masks if rank not in skip]
                found.append(f"{unit.name} on {describe_ranks(skip)} but not on {describe_ranks(do_not)}")
        more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        advice = "Draw them from the same seed on every rank, such as random.Random(f'{seed} {step}'), not a rank's."
        open_forwards = (1 << _UNITS - 1) - 1
        if cause := out_of_step({rank: mask >> 1 & open_forwards for rank, mask in masks.items()}):
            advice = f"Perhaps because {cause}"
        layers = "; ".join(found[:_MOST_NAMED]) + more
        return (
            f"rank {self._ranks.group.rank()}: the ranks skip different layers: {layers}. {advice} "
            "Nothing was reduced; the gradients of this step were dropped on every rank, parameters are untouched."
        )

    @property
    def tells_by_launching(self) -> bool:
        """Return whether the ranks have agreed, and the last bucket carries the statuses."""
        return self._is_agreed and super().tells_by_launching

    def agree(self) -> Exception | None:
        """Agree on the buckets to send. Return the error if this rank uses a skipped layer."""
        super().agree()
        if not self._is_agreed:
            self._read(self._pending or self.ask())
        if self._disagreement:
            raise SkipError(self._disagreement)
        return self._error_of_used()

    def _error_of_used(self) -> SkipError | None:
        buckets, units, members = self._buckets, self._ranks.units, self._ranks.members
        finished = (
            {b.members[slot] for b in buckets for slot in b.finished_slots()} if self._declared else set()
        )
        used = [units[number].name for number in sorted(self._declared) if members[number] & finished]
        if not used:
            return None
        names = [self._ranks.managed.names[index] for index in sorted(self.not_expected & finished)]
        return SkipError(
            f"rank {self._ranks.group.rank()}: {', '.join(used[:_MOST_NAMED])} was declared to be skipped, but this "
            f"backward has made gradients of {', '.join(names[:_MOST_NAMED])}. Let the forward leave out what "
            "`with model.skip(...)` names (also where a parameter is shared with another layer). The gradients of this "
            "step were dropped on every rank, parameters are untouched."
        )

    # ---- sending

    def is_needed(self, bucket: Bucket) -> bool:
        return not bucket.is_skipped

    def launch(self, bucket: Bucket) -> None:
        if bucket.is_skipped:
            self.skip(bucket)
        else:
            super().launch(bucket)

    def launch_late(self, bucket: Bucket, scale: float) -> Work:
        if bucket.is_skipped:
            make_skipped_message(bucket)
        return super().launch_late(bucket, scale)

    def unexplained(self, unused: list[int]) -> list[int]:
        return [] if self._ranks.looks else [index for index in unused if index not in self.not_expected]

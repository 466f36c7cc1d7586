"""Did every rank's backward end well? The metadata that ranks sum with the last bucket, and what follows from it.

Status words are metadata in the last bucket's message, summed with its gradients, so agreeing costs no message of its
own. Where any rank's gradients are on an accelerator they are a message of their own, between hosts. In a bucket they
would make every step wait for the device.

Word i (i < number of parameters) is 1 on a rank that used parameter i, so the sum counts these ranks. Then comes one
word a rank, zero on all others, that says how its backward ended. The last word counts ranks whose buffers have other
shapes than agreed.

Gradients that are not finite
1. Before a bucket leaves, one element of each gradient is checked. All elements would take as long as a copy.
2. The result is part of the status words. Only if a rank has found some, all ranks look closer.
3. Loss scaling skips steps with such gradients. So a rank warns at the next forward, and only if the parameter is not
   finite by then. Overlooked ones are in all ranks' gradients one step later: then no rank is named.
4. An accelerator's values arrive later: a rank tells the others in the first step after that. By then the parameters
   show whether they are finite, and which gradient was the first is not known.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.collectives import all_reduce
from paceline.comm.device import AsyncValue
from paceline.comm.peers import Peers, describe
from paceline.ddp.open_forwards import NOT_COUNTED, OpenForwards, out_of_step
from paceline.errors import PeerAbortedError, PeerOutOfMemoryError, ProtocolError
from paceline.recording.model_facts import is_finite
from paceline.reductions import Reduction


class NonFiniteChecks:
    """The checks for gradients that are not finite, whose results the other ranks do not know yet."""

    def __init__(self) -> None:
        self._under_way: deque[AsyncValue] = deque()  # of accelerators, a number a step (rule 4)

    def any_of(self, buckets: Sequence[Tensor]) -> bool:
        """Return whether one of these is NaN. On accelerators, look at values of earlier calls that have arrived.

        Shape () each: NaN for a bucket with gradients that are not finite, else zero. Does not wait for a device.
        """
        found = any(math.isnan(bucket.item()) for bucket in buckets if bucket.is_cpu)
        while self._under_way and self._under_way[0].has_arrived():
            found = bool(self._under_way.popleft().read().isnan()) or found
        on_device = [bucket for bucket in buckets if not bucket.is_cpu]
        if on_device:
            first, several = on_device[0], len(on_device) > 1
            self._under_way.append(
                AsyncValue(torch.stack([b.to(first) for b in on_device]).sum() if several else first)
            )
        return found


@dataclass(frozen=True)
class NonFiniteReport:
    """A step whose gradients are not all finite."""

    step: int  # its number
    ranks: list[int]  # whose gradients were not
    name: str  # of the first parameter, in backward's order, whose gradient is not
    parameter: Tensor
    is_old: bool  # parameters were not finite before that step
    # it was one of the steps before `step`; `name` is that of the first parameter (rule 4)
    is_late: bool = False

    @classmethod
    def of(
        cls, step: int, ranks: list[int], named: Sequence[tuple[str, Tensor]], is_late: bool = False
    ) -> NonFiniteReport | None:
        """Find the first of these gradients, if told late of these parameters, that is not finite."""
        if is_late:
            found = next(((name, one) for name, one in named if not is_finite(one)), None)
            return None if found is None else cls(step, ranks, *found, is_old=False, is_late=True)
        for name, parameter in named:
            with torch._C.DisableTorchFunctionSubclass():
                gradient = parameter.grad
            if gradient is not None and not is_finite(gradient):
                return cls(step, ranks, name, parameter, not all(is_finite(one) for _, one in named))
        return None


class Status(IntEnum):
    """The end of a rank's backward."""

    GOOD = 0
    LATE_GRADIENTS = 1  # some gradients arrived after their bucket had left: all ranks reduce once more
    ABORTED = 2  # an exception ended it: no rank may use this step's gradients
    OUT_OF_MEMORY = 3  # likewise, and smaller batches may help


# A rank's word packs four numbers, the least significant first: the status; how many forwards are open; whether
# gradients are not finite; the module's number. Narrow dtypes store that number modulo what fits.
_OPEN_FORWARD = 4
_NOT_FINITE = _OPEN_FORWARD * (NOT_COUNTED + 1)
_MODULE = 2 * _NOT_FINITE
_NOT_FINITE_ANY_MORE = "not finite"  # a warning; no suspicion after it


@functools.cache
def _num_remainders(dtype: torch.dtype) -> int:
    return int(2 / torch.finfo(dtype).eps / _MODULE)


@dataclass(frozen=True)
class RankStatuses:
    """The statuses of all ranks for one backward. The message is written anew in the next step."""

    words: tuple[int, ...] = ()  # a rank's each; empty if no rank has anything to say
    # Of each parameter, how many ranks used it; empty if this rank has used all, and none is late
    uses: tuple[float, ...] = ()
    buffers_have_changed: bool = False  # whether those of any rank have other shapes than agreed

    def ranks_with(self, status: Status) -> list[int]:
        """Return the ranks whose backward ended so."""
        return [rank for rank, word in enumerate(self.words) if word % _OPEN_FORWARD == status]

    @property
    def open_forwards(self) -> dict[int, int]:
        """Return each rank's number of forwards without a backward, of the ranks that count them."""
        counts = {rank: word % _NOT_FINITE // _OPEN_FORWARD for rank, word in enumerate(self.words)}
        return {rank: count for rank, count in counts.items() if count != NOT_COUNTED}

    @property
    def ranks_not_finite(self) -> list[int]:
        """Return the ranks whose own gradients are not all finite."""
        return [rank for rank, word in enumerate(self.words) if word % _MODULE >= _NOT_FINITE]

    @property
    def modules(self) -> list[int]:
        """Return the number of the module that each rank has synchronized."""
        return [word // _MODULE + 1 for word in self.words]

    def is_used(self, index: int) -> bool:
        """Return whether any rank used this parameter; without `uses` this rank has used all."""
        return not self.uses or self.uses[index] > 0

    @property
    def only_out_of_memory(self) -> tuple[int, ...]:
        """Return the ranks that ran out of memory, if no backward raised anything else."""
        return () if self.ranks_with(Status.ABORTED) else tuple(self.ranks_with(Status.OUT_OF_MEMORY))


_NOTHING_SAID = RankStatuses()


class StatusVector:
    """This rank's status words, and after the reduction their sum over all ranks."""

    def __init__(
        self,
        num_parameters: int,
        num_ranks: int,
        rank: int,
        module_number: int,
        # Where they lie, if they are a message of their own; None: behind the gradients of the last bucket
        apart_on: torch.device | None = None,
    ) -> None:
        self.apart_on = apart_on
        self._seen = NonFiniteChecks()
        self._num_parameters = num_parameters
        self._rank = rank
        self.num_words = num_parameters + num_ranks + 1
        self._module_number = module_number
        self.words = torch.zeros(self.num_words)
        self._all_used = torch.cat([torch.ones(num_parameters), torch.zeros(num_ranks + 1)])

    def place(self, words: Tensor) -> None:
        """Use `words`, shape (num_words,), from now on: the end of the last bucket's buffer, or a tensor of its own."""
        self.words = words.copy_(self.words)  # so that the last step's can still be read
        self._all_used = self._all_used.to(words)

    def write(
        self,
        unused: Sequence[int],
        status: Status,
        num_open_forwards: int,
        not_finite: Sequence[Tensor] = (),
        buffers_have_changed: bool = False,
    ) -> None:
        """Write into the status which parameters this rank did not use, and how its backward ended.

        `not_finite` is NaN for each bucket with gradients that are not finite, as far as seen, else zero. On an
        accelerator it is said in a later step's words.
        """
        self.words.copy_(self._all_used)
        word = status + _OPEN_FORWARD * num_open_forwards + _MODULE * self._module_remainder()
        if self._seen.any_of(not_finite):
            word += _NOT_FINITE
        if word:
            self.words[self._num_parameters + self._rank] = float(word)
        if buffers_have_changed:
            self.words[-1] = 1.0
        for index in unused:
            self.words[index] = 0.0

    def read(self, asks_uses: bool = False) -> RankStatuses:
        """Return what the ranks have said, once their words are summed; `asks_uses`: of each parameter, too."""
        *words, num_changed = self.words[self._num_parameters :].tolist()
        plain = _MODULE * self._module_remainder()
        said = () if words == [plain] * len(words) else tuple(round(word) for word in words)
        if not (said or asks_uses or num_changed):
            return _NOTHING_SAID
        # Also if ranks have something to say: late gradients may be of a bucket that was left out as unused.
        uses = tuple(self.words[: self._num_parameters].tolist())
        return RankStatuses(said, uses, num_changed > 0)

    def _module_remainder(self) -> int:
        """Return the module's number less 1, modulo the room that a status word has for it."""
        return max(self._module_number - 1, 0) % _num_remainders(self.words.dtype)


class Verdict:
    """The conclusions from all ranks' statuses, for one module on one rank. `named` are the parameters, by index."""

    def __init__(
        self,
        rank: int,
        named: Sequence[tuple[str, Tensor]],
        status: StatusVector,
        open_forwards: OpenForwards,
    ) -> None:
        self.status, self.open_forwards = status, open_forwards
        self._rank = rank
        self._named = named
        self._suspicion: NonFiniteReport | None = None
        self._warned: set[str] = set()

    def exchange(self, process_group: ProcessGroup, peers: Peers) -> None:
        """Sum the words by themselves, where no bucket carries them. Collective; blocks."""
        if process_group.size() > 1:
            pending = all_reduce(self.status.words, process_group)
            peers.wait(pending, "waiting for the ranks' statuses", on_host=self.status.words.is_cpu)

    def reach(self, step: int, reduction: Reduction, asks_uses: bool) -> RankStatuses:
        """Return what all ranks have said. PeerAbortedError, on all ranks, if the step's gradients are of no use."""
        statuses = self.status.read(asks_uses)
        if statuses.words:
            self._raise_if_another_module(statuses)
            self._raise_if_aborted(statuses, step)
            self._raise_if_out_of_step(statuses, step)
            if late := statuses.ranks_with(Status.LATE_GRADIENTS):
                self._raise_if_not_linear(late[0], reduction)
        return statuses

    def _raise_if_another_module(self, statuses: RankStatuses) -> None:
        modules = statuses.modules
        for rank, module in enumerate(modules):
            if module != modules[0]:
                raise ProtocolError(
                    f"rank {self._rank}: the ranks synchronize different modules: rank 0 number {modules[0]} and rank "
                    f"{rank} number {module} of those that were wrapped over this group. Run the backwards of several "
                    "modules in the same order on every rank, or give each a process group of its own. The gradients "
                    "of this step are undefined, the parameters are untouched."
                )

    def _raise_if_aborted(self, statuses: RankStatuses, step: int) -> None:
        aborted = statuses.ranks_with(Status.ABORTED)
        if full := statuses.only_out_of_memory:
            raise PeerOutOfMemoryError(
                f"rank {self._rank}: {describe_ranks(full)} ran out of memory in step {step}. This step's gradients "
                "are undefined on every rank and were dropped; parameters are untouched. Give that rank smaller "
                'batches, or let balance="auto" do so.',
                full,
            )
        if aborted:
            raise PeerAbortedError(
                f"rank {self._rank}: the backward of rank {aborted[0]} raised an exception in step {step}. This "
                "step's gradients are undefined on every rank and were dropped; parameters are untouched. Look at "
                "that rank's output for the cause; training may go on with the next batch."
            )

    def _raise_if_out_of_step(self, statuses: RankStatuses, step: int) -> None:
        found = out_of_step(statuses.open_forwards)
        if not found:
            return
        self.open_forwards.forget()
        raise PeerAbortedError(
            f"rank {self._rank}: {found} The gradients of step {step} were dropped on every rank; parameters are "
            "untouched."
        )

    def _raise_if_not_linear(self, late: int, reduction: Reduction) -> None:
        if not reduction.is_linear:
            raise PeerAbortedError(
                f"rank {self._rank}: gradients of rank {late} arrived after their bucket had left, which "
                f"{reduction!r} cannot add afterwards. This step's gradients were dropped on every rank; parameters "
                "are untouched. Pass static_graph=True if every step uses the same graph. Otherwise go on with the "
                "next batch: from now on that rank's buckets wait for the end of backward."
            )

    # ---- gradients that are not finite

    def suspect_first_not_finite(self, statuses: RankStatuses, step: int, order: Sequence[int]) -> None:
        """Find the first gradient in backward's order that is not finite, if ranks have seen one. Warn later."""
        ranks = statuses.ranks_not_finite
        if ranks and self._suspicion is None and _NOT_FINITE_ANY_MORE not in self._warned:
            is_late = self.status.apart_on is not None
            named = [self._named[index] for index in order]
            self._suspicion = NonFiniteReport.of(step, ranks, named, is_late)

    def confirm_suspicion(self) -> str:
        """Warn, at the next forward, if the parameter is not finite either.

        Returns its name, once, if it may have been this rank's gradient; else "".
        """
        suspicion, self._suspicion = self._suspicion, None
        if suspicion is None or is_finite(suspicion.parameter):
            return ""
        self._warn_of_not_finite(suspicion)
        return suspicion.name if suspicion.is_old or self._rank in suspicion.ranks else ""

    # ---- warnings, each once

    def warn_of_late_gradients(self) -> None:
        self._warn(
            "late",
            "gradients arrived after their bucket had been reduced (a parameter used twice under reentrant "
            "checkpointing does that). They were reduced again and the result is right, but from now on nothing is "
            "reduced before backward has ended. Pass static_graph=True, if the graph is static, to overlap again.",
        )

    def warn_of_unused(self, indices: Sequence[int]) -> None:
        names = [name for name, _ in self._named]
        self._warn(
            "unused",
            f"this backward did not use {describe(indices, names)}. They count as zero on this "
            "rank, so the mean is right; pass find_unused_parameters=True if that is intended.",
        )

    def _warn_of_not_finite(self, suspicion: NonFiniteReport) -> None:
        ranks = " and ".join(map(str, suspicion.ranks))
        found = (
            f"In step {suspicion.step} gradients of rank {ranks} were not, before they were averaged with the others'; "
            f"the first in backward's order was that of {suspicion.name}. Look at rank {suspicion.ranks[0]}'s batch "
            "and loss in that step."
        )
        if suspicion.is_late:
            found = (
                f"Shortly before step {suspicion.step} gradients of rank {ranks} were not, before they were averaged "
                f"with the others'. Look at rank {suspicion.ranks[0]}'s batches and losses there."
            )
        unknown = (
            f"They were already not finite before step {suspicion.step}. Which rank caused it is unknown, because "
            "only one element per gradient is checked."
        )
        self._warn(
            _NOT_FINITE_ANY_MORE,
            f"parameters are not finite any more. {unknown if suspicion.is_old else found} To go on, restart from "
            "the last checkpoint, and skip such steps: `if model.gradients_are_finite(): optimizer.step()`.",
        )

    def warn_of_local_backward(self) -> None:
        self._warn(
            "local",
            "a backward reached the parameters without a forward of the wrapped model, as after `model.module(...)`. "
            "Its gradients stay on this rank, as with torch; call the wrapped model to have them averaged.",
        )

    def warn_of_unequal_batches(self, own: int, first: int) -> None:
        self._warn(
            "unequal",
            f"this rank's batch has {own} samples, rank 0's has {first}, but both ranks' gradients count the same. "
            f"Samples are the first dimension of the model's first tensor. Say what a batch "
            "counts: DistributedDataParallel(..., weight=len), or model.accumulate(batches, weight=...).",
        )

    def warn_of_none_unused(self) -> None:
        found = "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters"
        advice = (
            "in the forward pass. Looking costs a little in every step; leave it out if there never are any."
        )
        self._warn("none unused", f"{found} {advice}")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"rank {self._rank}: {text}", UserWarning, stacklevel=2)


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return which ranks, in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

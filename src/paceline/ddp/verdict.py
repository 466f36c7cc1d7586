"""Did every rank's backward end well? The metadata that ranks sum with the last bucket, and what follows from it.

Control words are metadata in the last bucket's message, summed with its gradients, so agreeing costs no message of its
own. Word i (i < number of parameters) is 1 on a rank that used parameter i, so the sum counts the ranks that did; then
comes one status word a rank, zero on all others.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from paceline.comm.peers import describe
from paceline.errors import PeerAbortedError, PeerOutOfMemoryError
from paceline.reductions import Reduction


class Status(IntEnum):
    """How a rank's backward ended."""

    GOOD = 0
    LATE_GRADIENTS = 1  # some gradients arrived after their bucket had left: everybody reduces once more
    ABORTED = 2  # an exception ended it: nobody may use this step's gradients
    OUT_OF_MEMORY = 3  # likewise, and smaller batches may help


_OPEN_FORWARD = 4  # a status word is a status plus this many times the number of open forwards
_MANY = 14
NOT_COUNTED = 15  # small enough to be exact in every float type


class ControlWords:
    """This rank's words, and after the reduction everybody's."""

    def __init__(self, num_parameters: int, num_ranks: int, rank: int) -> None:
        self._num_parameters = num_parameters
        self._rank = rank
        self.num_words = num_parameters + num_ranks
        self.words = torch.zeros(self.num_words)
        self._status_words: list[int] = []

    def place(self, words: Tensor) -> None:
        """Use `words`, shape (num_words,), from now on: the end of the last bucket's buffer, or a tensor of its own."""
        self.words = words

    def write(self, unused: Sequence[int], status: Status, num_open_forwards: int) -> None:
        """Say which parameters this rank did not use, how its backward ended, and what it has left undone.

        Args:
            unused: Parameter indices.
            status: Of this rank's backward.
            num_open_forwards: Forwards in training mode without a backward so far; or NOT_COUNTED.
        """
        self.words.fill_(1.0)
        self.words[self._num_parameters :] = 0.0
        if num_open_forwards != NOT_COUNTED:
            num_open_forwards = min(num_open_forwards, _MANY)
        if status is not Status.GOOD or num_open_forwards:
            self.words[self._num_parameters + self._rank] = float(status + _OPEN_FORWARD * num_open_forwards)
        for index in unused:
            self.words[index] = 0.0

    def read(self) -> None:
        """Take in the ranks' status words. On an accelerator this waits for the device."""
        words = self.words[self._num_parameters :]
        self._status_words = [round(word) for word in words.tolist()] if bool(words.any()) else []

    @property
    def is_plain(self) -> bool:
        """Whether no rank has anything to say: all ended well, with no forward open; after `read`."""
        return not self._status_words

    def ranks_with(self, status: Status) -> list[int]:
        """Ranks whose backward ended so; after `read`."""
        return [rank for rank, word in enumerate(self._status_words) if word % _OPEN_FORWARD == status]

    def open_forwards(self) -> dict[int, int]:
        """How many forwards each rank has left without a backward, of those that count; after `read`."""
        counts = {rank: word // _OPEN_FORWARD for rank, word in enumerate(self._status_words)}
        return {rank: count for rank, count in counts.items() if count != NOT_COUNTED}

    def is_used(self) -> list[bool]:
        """Whether any rank used each parameter. On an accelerator this waits for the device."""
        return [count > 0 for count in self.words[: self._num_parameters].tolist()]

    def all_used_everywhere(self) -> bool:
        """Whether every rank used every parameter."""
        num_ranks = self.num_words - self._num_parameters
        return all(round(count) == num_ranks for count in self.words[: self._num_parameters].tolist())


class _Forward:
    """A forward whose backward is still to come."""

    def __init__(self) -> None:
        self.is_open = True


class OpenForwards:
    """Counts forwards in training mode whose backward has not come: ranks that differ are not in the same step."""

    def __init__(self) -> None:
        self.count = 0
        self._last: _Forward | None = None  # until its outputs are known
        self._is_reliable = True

    def open(self) -> None:
        self._last = _Forward()
        self.count += 1

    def take_last(self, has_outputs: bool) -> _Forward | None:
        """The last forward, to be closed when a backward reaches its outputs; None if it was not counted."""
        forward, self._last = self._last, None
        if forward is not None and not has_outputs:
            self._is_reliable = False  # its backward will come unseen
        return forward

    def close(self, forward: _Forward | None) -> None:
        if forward is not None and forward.is_open:
            forward.is_open = False
            self.count -= 1

    def forget(self) -> None:
        """All ranks begin the next step together."""
        self.count = 0

    def word(self, by_autograd: bool) -> int:
        """What the other ranks are told of it."""
        return self.count if self._is_reliable and by_autograd else NOT_COUNTED


class Verdict:
    """What follows from all ranks' control words, for one module on one rank.

    Args:
        rank: This rank.
        num_ranks: All of them.
        names: Of the parameters, by index.
    """

    def __init__(self, rank: int, num_ranks: int, names: Sequence[str]) -> None:
        self.control = ControlWords(len(names), num_ranks, rank)
        self.open_forwards = OpenForwards()
        self._rank = rank
        self._names = names
        self._warned: set[str] = set()

    def reach(self, step: int, reduction: Reduction) -> bool:
        """Read the words.

        Args:
            step: The number of this step, for messages.
            reduction: Whether it is linear: then late gradients may be reduced afterwards.

        Returns:
            Whether any rank has late gradients.

        Raises:
            PeerAbortedError: This step's gradients are of no use, on every rank.
        """
        self.control.read()
        if self.control.is_plain:
            return False
        self._raise_if_aborted(step)
        self._raise_if_out_of_step(step)
        late = self.control.ranks_with(Status.LATE_GRADIENTS)
        if late:
            self._raise_if_not_linear(late[0], reduction)
        return bool(late)

    def only_out_of_memory(self) -> tuple[int, ...]:
        """Ranks that ran out of memory, if no backward raised anything else; once all words are there."""
        self.control.read()
        full = tuple(self.control.ranks_with(Status.OUT_OF_MEMORY))
        return () if self.control.ranks_with(Status.ABORTED) else full

    def _raise_if_aborted(self, step: int) -> None:
        aborted = self.control.ranks_with(Status.ABORTED)
        full = tuple(self.control.ranks_with(Status.OUT_OF_MEMORY))
        if full and not aborted:
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

    def _raise_if_out_of_step(self, step: int) -> None:
        counts = self.control.open_forwards()
        if len(set(counts.values())) <= 1:
            return
        self.open_forwards.forget()
        most = max(counts, key=counts.__getitem__)
        least = min(counts, key=counts.__getitem__)
        raise PeerAbortedError(
            f"rank {self._rank}: the ranks are not in the same step: rank {most} has run {counts[most]} forward(s) in "
            f"training mode without a backward, rank {least} {counts[least]}. Either rank {most} skipped a backward or "
            "caught an exception before its backward reached the module, so that its batches are one ahead of the "
            "others'; or it ran a forward by itself, which belongs under torch.no_grad() or in evaluation mode. The "
            f"gradients of step {step} were dropped on every rank; parameters are untouched."
        )

    def _raise_if_not_linear(self, late: int, reduction: Reduction) -> None:
        if not reduction.is_linear:
            raise PeerAbortedError(
                f"rank {self._rank}: gradients of rank {late} arrived after their bucket had left, which "
                f"{reduction!r} cannot add afterwards. This step's gradients were dropped on every rank; parameters "
                "are untouched. Pass static_graph=True if every step uses the same graph. Otherwise go on with the "
                "next batch: from now on that rank's buckets wait for the end of backward."
            )

    # ---- warnings, each once

    def warn_of_late_gradients(self) -> None:
        self._warn(
            "late",
            "gradients arrived after their bucket had been reduced (a parameter used twice under reentrant "
            "checkpointing does that). They were reduced again and the result is right, but from now on nothing is "
            "reduced before backward has ended. Pass static_graph=True, if the graph is static, to overlap again.",
        )

    def warn_of_unused(self, indices: Sequence[int]) -> None:
        self._warn(
            "unused",
            f"this backward did not use {describe(indices, self._names)}. They count as zero on this "
            "rank, so the mean is right; pass find_unused_parameters=True if that is intended.",
        )

    def warn_of_unequal_batches(self, own: int, first: int) -> None:
        self._warn(
            "unequal",
            f"this rank's batch has {own} samples, rank 0's has {first} (the first dimension of the first tensor that "
            "the model was given), but both ranks' gradients count the same, so that samples do not. Say what a batch "
            "counts: DistributedDataParallel(..., weight=len), or model.accumulate(batches, weight=...).",
        )

    def warn_of_none_unused(self) -> None:
        self._warn(
            "none unused",
            "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters "
            "in the forward pass. Looking costs a little in every step; leave it out if there never are any.",
        )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"rank {self._rank}: {text}", UserWarning, stacklevel=2)


def describe_ranks(ranks: Sequence[int]) -> str:
    """Which ranks, in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

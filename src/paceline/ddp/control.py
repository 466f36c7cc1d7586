"""The words that travel behind the last bucket's gradients: which parameters a rank used, and how its backward ended.

They are summed with the gradients, so agreeing costs no message of its own. Word i (i < number of parameters) is 1 on
a rank that used parameter i, so the sum counts the ranks that did; then one status word a rank, zero on all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor


class Status(IntEnum):
    """How a rank's backward ended."""

    GOOD = 0
    LATE_GRADIENTS = 1  # some gradients arrived after their bucket had left: everybody reduces once more
    ABORTED = 2  # an exception ended it: nobody may use this step's gradients


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
        open_forwards = (
            num_open_forwards if num_open_forwards == NOT_COUNTED else min(num_open_forwards, _MANY)
        )
        if status is not Status.GOOD or open_forwards:
            self.words[self._num_parameters + self._rank] = float(status + _OPEN_FORWARD * open_forwards)
        for index in unused:
            self.words[index] = 0.0

    def read(self) -> None:
        """Take in the ranks' status words. On an accelerator this waits for the device."""
        words = self.words[self._num_parameters :]
        self._status_words = [round(word) for word in words.tolist()] if bool(words.any()) else []

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

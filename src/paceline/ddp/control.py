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


class ControlWords:
    """This rank's words, and after the reduction everybody's."""

    def __init__(self, num_parameters: int, num_ranks: int, rank: int) -> None:
        self._num_parameters = num_parameters
        self._rank = rank
        self.num_words = num_parameters + num_ranks
        self.words = torch.zeros(self.num_words)

    def place(self, words: Tensor) -> None:
        """Use `words`, shape (num_words,), from now on: the end of the last bucket's buffer, or a tensor of its own."""
        self.words = words

    def write(self, unused: Sequence[int], status: Status) -> None:
        """Say which parameters this rank did not use, and how its backward ended."""
        self.words.fill_(1.0)
        self.words[self._num_parameters :] = 0.0
        if status is not Status.GOOD:
            self.words[self._num_parameters + self._rank] = float(status)
        for index in unused:
            self.words[index] = 0.0

    def statuses(self) -> dict[int, Status]:
        """Ranks whose backward did not end well. On an accelerator this waits for the device."""
        statuses = self.words[self._num_parameters :]
        if not bool(statuses.any()):
            return {}
        return {rank: Status(round(word)) for rank, word in enumerate(statuses.tolist()) if word != 0.0}

    def is_used(self) -> list[bool]:
        """Whether any rank used each parameter. On an accelerator this waits for the device."""
        return [count > 0 for count in self.words[: self._num_parameters].tolist()]

    def all_used_everywhere(self) -> bool:
        """Whether every rank used every parameter."""
        num_ranks = self.num_words - self._num_parameters
        return all(round(count) == num_ranks for count in self.words[: self._num_parameters].tolist())

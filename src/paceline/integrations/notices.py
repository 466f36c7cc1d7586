"""Lets the loops of frameworks leave on a notice: all ranks together, behind the same step, after a checkpoint.

These loops cannot go on with fewer ranks. So a notice to one rank is one to all. At the end of a step each rank says
whether it was told. It reads the answer of all a step later, so no step waits for it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

from paceline.elastic.watcher import NOTICES, when_noticed

LEFT = 128 + signal.SIGTERM
"""Exit code of a rank that has left: what SIGTERM means to every engine."""

Notice = Callable[[], object] | str | os.PathLike[str]


class NoticeVote:
    """The ranks' agreement to leave. Hears SIGTERM and SIGUSR1 unless handled, and asks `notice` once a second.

    Args:
        notice: The path of a file that appears, or a function that returns something true, when this machine goes soon.
        replaces_sigterm: Whether to take SIGTERM from a handler that is there. Lightning's communicates within it,
            between any two lines of a step.

    Contract:
        Collective: the constructor, and `asks_to_leave`.
    """

    def __init__(self, notice: Notice | None = None, *, replaces_sigterm: bool = False) -> None:
        self._is_told = False
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._asked: tuple[dist.Work, torch.Tensor] | None = None
        is_main = threading.current_thread() is threading.main_thread()  # no other one may handle signals
        taken = [each for each in NOTICES if is_main and signal.getsignal(each) is signal.SIG_DFL]
        if is_main and replaces_sigterm:
            taken.append(signal.SIGTERM)
        self._before = {number: signal.signal(number, self._take) for number in dict.fromkeys(taken)}
        if notice is not None:
            when_noticed(notice, lambda: self._take(signal.SIGTERM))

    def _take(self, _: int, __: FrameType | None = None) -> None:
        self._is_told = True

    def asks_to_leave(self) -> bool:
        """Return whether a rank was told to end, by what all said a step ago. Call it once a step."""
        if self._group is None:
            return self._is_told
        asked, word = self._asked, torch.tensor([float(self._is_told)])
        work = dist.all_reduce(word, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._asked = work, word
        if asked is None:
            return False
        asked[0].wait()
        return bool(asked[1])

    def leave(self) -> None:
        """Exit with the code of a rank that has left, once all ranks are here. Raises SystemExit."""
        if self._group is not None:
            dist.barrier(self._group)
        raise SystemExit(LEFT)

    def close(self) -> None:
        """Restore the signals' former handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._asked is not None:
            self._asked[0].wait()
            self._asked = None

"""`Peers`: waits for collectives, and raises an error that names the lost ranks when one fails.

`failure_detection.py` finds these ranks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.collectives import Work, all_gather, timeout_of
from paceline.comm.failure_detection import GRACE_S, SLICE_S, CalledError, FailureDetection
from paceline.comm.forked import keep_when_forked
from paceline.errors import CollectiveMismatchError, PeerLostError, ServerLostError
from paceline.observe.progress import counter

_GRADIENTS_ARE_UNDEFINED = (
    "The gradients of this step are undefined, the parameters are untouched. Look at the output of the rank "
    "named here first; restart from the last checkpoint (torchrun --max-restarts does that by itself)."
)
_num_named: dict[str, int] = {}
_witnesses: list[Callable[[], str | None]] = []


def ask_first(witness: Callable[[], str | None]) -> None:
    """Add a witness that failure detection asks first which ranks are gone; None: it does not know. Local."""
    _witnesses.append(witness)


def next_name(process_group: ProcessGroup, is_collective: bool) -> str:
    """Return a name for what is being made: the same on every rank of the group, not used before.

    Copies are counted apart (not `is_collective`), as a rank may make some by itself.
    """
    members = _registered_ranks(process_group) or list(range(process_group.size()))
    kind = f"{'wrapped' if is_collective else 'copied'}/{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}"
    _num_named[kind] = _num_named.get(kind, 0) + 1
    return f"{kind}/{_num_named[kind]}"


def _registered_ranks(process_group: ProcessGroup) -> list[int]:
    """Return the ranks of a group by their numbers in the job; none of a group that c10d does not know."""
    try:
        return dist.get_process_group_ranks(process_group)
    except (KeyError, ValueError, RuntimeError):
        return []


class Peers:
    """The other ranks of a process group, for code that waits for collectives with them."""

    def __init__(
        self,
        process_group: ProcessGroup,  # messages name its ranks
        name: str,  # identifies what waits (a module, an optimizer); the same on every rank
        # Whether a wait may be cut into slices, to poll between them. Not NCCL's, which does not block the host.
        in_slices: bool,
        first_act: str = "wrapping its model",  # what a rank that was never heard of has not got as far as
        consequence: str = _GRADIENTS_ARE_UNDEFINED,  # what a failure means, and what to do next
    ) -> None:
        keep_when_forked(process_group)
        self._rank = process_group.rank()
        ranks = _registered_ranks(process_group)
        self._count = counter(name, ranks) if ranks else None  # its launcher reads its progress there
        self._has_others = process_group.size() > 1
        self._in_slices = in_slices and self._has_others
        self._consequence = consequence
        self._timeout_s = timeout_of(process_group).total_seconds()
        self._failure_detection = FailureDetection(process_group, name, first_act)

    def note_step(self, number: int) -> None:
        """Remember how far this rank has got, to tell waiting ranks when it leaves. Local."""
        self._failure_detection.progress.num_steps = number

    def rows_of_all(self, row: Tensor, process_group: ProcessGroup, doing: str) -> list[Tensor]:
        """Return the `row` of every rank; all have the same shape. Collective; blocks and raises as `wait`."""
        rows = [torch.empty_like(row) for _ in range(process_group.size())]
        self.wait(all_gather(rows, row, process_group), doing)
        return rows

    def wait(self, pending: Work, doing: str, consequence: str | None = None, on_host: bool = False) -> None:
        """Wait for a collective, at most for the group's timeout, `GRACE_S` and failure detection, whatever it is.

        The error says what this rank was `doing` and the `consequence`, where that is not the usual one. `on_host`: it
        is of tensors of the host, so that this wait may be cut into slices. Raises as `fail`.
        """
        if self._count is not None:
            self._count.enter(doing, self._failure_detection.progress.next_step)
        try:
            if self._in_slices or (on_host and self._has_others):
                until_s, is_late = time.monotonic() + self._timeout_s + GRACE_S, False
                while not pending.wait(SLICE_S):
                    self._failure_detection.raise_if_called()
                    if is_late:
                        raise _LateError(
                            f"it has not ended {self._timeout_s:g} s, the process group's timeout, after rank "
                            f"{self._rank} began to wait"
                        )
                    is_late = time.monotonic() > until_s  # if this process stood still, it waits once more
            else:
                pending.wait()
        except RuntimeError as error:
            self.fail(error, doing, consequence)
        if self._count is not None:
            self._count.leave()
        if self._failure_detection.still_asks:
            self._failure_detection.learn()

    def leave(self, why: str) -> None:
        """Tell the ranks that wait for this one, now or later, that it has left: they raise PeerLostError. Local."""
        self._failure_detection.leave(why)

    def lost_behind(self, error: Exception, doing: str) -> PeerLostError | None:
        """Return the error that names ranks which have left or died, if this error may come from that. Local."""
        failure = self._failure(error, doing, None) if self._failure_detection.some_have_ended() else error
        return failure if isinstance(failure, PeerLostError) else None

    def fail(self, error: Exception, doing: str, consequence: str | None = None) -> NoReturn:
        """Start failure detection, or join it, and raise. Arguments as of `wait`.

        Raises:
            CollectiveMismatchError: The ranks were in different collectives.
            PeerLostError: It names the ranks that are gone, or says what the backend said.
            RuntimeError: `error` itself. Every rank still answers, and no backend raises errors of this class.
        """
        failure = self._failure(error, doing, consequence)
        if failure is error:
            raise error
        raise failure from error

    def _failure(self, error: Exception, doing: str, consequence: str | None) -> Exception:
        if isinstance(error, ServerLostError):  # every rank is connected to it, and sees the same
            return ServerLostError(
                f"rank {self._rank} was {doing} when communication failed: {error}. {consequence or self._consequence}"
            )
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        told = next(filter(None, (witness() for witness in _witnesses)), None)
        if told is not None:
            return PeerLostError(
                f"rank {self._rank} was {doing} when communication failed: {told}. {consequence or self._consequence} "
                f"The backend said: {said}"
            )
        reason = None
        if not isinstance(error, CalledError):
            who_says = "'s backend said" if _may_be_the_network(error) else f" raised {type(error).__name__}"
            reason = f"rank {self._rank}{who_says}: {said}"
        named = error.peer if isinstance(error, PeerLostError) else None
        who, answer = self._failure_detection.who_is_gone(doing, named, reason)
        if isinstance(error, CollectiveMismatchError) or (answer and not _may_be_the_network(error)):
            return error
        return PeerLostError(
            f"rank {self._rank} was {doing} when communication failed: {who}. {consequence or self._consequence} "
            f"The backend said: {said}"
        )


def _may_be_the_network(error: Exception) -> bool:
    """Return whether a backend may have raised this because it lost a peer: not a hook's error, or one of our own."""
    return type(error) is RuntimeError or isinstance(error, _OF_BACKENDS)


class _LateError(RuntimeError):
    """The timeout is over. Parts of a collective have timeouts of their own, and work between them has none."""


_OF_BACKENDS = (dist.DistError, PeerLostError, CalledError, _LateError)


def describe(indices: Sequence[int], names: Sequence[str], limit: int = 5) -> str:
    """Name parameters in a message: the first few, and how many more."""
    named = ", ".join(names[index] for index in indices[:limit])
    return named + (f" and {len(indices) - limit} more" if len(indices) > limit else "")

"""The protocol of a server with the ranks of one model: frames in, frames out. Opens no socket and reads no clock.

Rules
1. Ranks push the same pieces in the same order, and number them. When all ranks have pushed a piece, all get the
   answer.
2. If a rank is gone or late, or pushes something else than another rank, the session is over. All ranks are told whose
   fault it is, and get no other answer.
3. With an optimizer, a step is provisional until the next one begins, or state is fetched. Then ranks say whether they
   have used it. So ranks may abandon a step whose backward failed on one of them (`SteppedKeys`).
4. Backpressure: once `most_held_bytes` of unanswered pieces are held, frames are read only from ranks that owe the
   oldest piece. So that piece is answered, and memory is bounded by the limit and one turn of each connection. The
   death of a rank that is not read from is noticed when it is read from again.
5. A rank that is late because it waits for another server is not blamed. The silent server is, `DOUBT_S` later than a
   rank would be: it may be waiting for a rank, and then reports that first.
6. Ranks announce their sums by datagrams (`DatagramSums`), in the same order. The session does nothing else for them.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import ConfigurationError, PacelineError, PeerLostError, ProtocolError
from paceline_servers.ordered_sum import Bytes, OrderedSum
from paceline_servers.wire import KEY, WIDTHS, DType, Frame, Kind, pack, pack_state, unpack, unpack_state

if TYPE_CHECKING:  # these import torch and numba, which takes seconds
    from paceline_servers.datagram_sums import DatagramSums
    from paceline_servers.stepping import SteppedKeys

MOST_HELD_BYTES = 1 << 30
_MOST_NAMED = 16  # late ranks in one message
DOUBT_S = 1.0  # shorter than the ranks' extra patience with servers (`link.GRACE_S`)

_BEGINS = {"account of the last step": ("used", "unused"), "settings of the optimizer": ("groups",)}
"""The subjects that ranks must agree on when a step begins, and their fields."""

Outgoing = list[tuple[int, Frame]]
"""Frames to send, each with its rank."""


@dataclass
class _Announced:
    """A sum by datagrams that some ranks have announced."""

    ranks: set[int]
    first_rank: int
    since_s: float
    is_done: bool = False


@dataclass
class _Push:
    """A piece that some ranks have pushed."""

    first_rank: int
    keys: bytes
    num_bytes: int
    dtype: DType
    total: OrderedSum
    since_s: float


class Session:
    """The ranks of one model on one server.

    `timeout_s` is the longest time from the first push of a piece to the last. At most `most_held_bytes` of incomplete
    pieces are held. `make_steps` and `make_sums` are called when ranks first need an optimizer, or sums by datagrams.
    `names` describe the ranks' processes. `failure` is the frame that all ranks get once the session is over.
    """

    def __init__(
        self,
        num_ranks: int,
        timeout_s: float,
        make_steps: Callable[[dict[str, Any]], SteppedKeys],
        make_sums: Callable[[], DatagramSums] | None = None,
        most_held_bytes: int = MOST_HELD_BYTES,
    ) -> None:
        self.num_ranks = num_ranks
        self.names: dict[int, str] = {}
        self.failure: Frame | None = None
        self._timeout_s = timeout_s
        self._make_steps = make_steps
        self._make_sums = make_sums
        self._sums: DatagramSums | None = None
        self._announced: dict[int, _Announced] = {}
        self._most_held_bytes = most_held_bytes
        self._held_bytes = 0
        self._steps: SteppedKeys | None = None
        self._pushes: dict[int, _Push] = {}
        self._said: dict[
            str, tuple[int, bytes, set[int]]
        ] = {}  # by subject: first rank, its value, all ranks so far
        self._left: dict[int, str] = {}
        self._awaited: dict[int, str] = {}  # by rank: the other server that it waits for
        self._missed: dict[int, str] = {}  # by rank: why its datagrams are missing
        self._in_doubt_s: float | None = None  # the time since which every late rank reports a silent server

    def receive(self, rank: int, frame: Frame, now_s: float) -> Outgoing:
        """Take a frame of a rank. Return the frames to send."""
        if self.failure is not None:
            return [(rank, self.failure)]
        try:
            return self._receive(rank, frame, now_s)
        except (ProtocolError, ConfigurationError) as error:
            kind = "configuration" if isinstance(error, ConfigurationError) else "protocol"
            return self._fail(kind, rank, str(error))
        except Exception as error:  # noqa: BLE001  other sessions of this server go on
            return self._fail("protocol", rank, f"a server could not take what rank {rank} sent: {error!r}")

    def _receive(self, rank: int, frame: Frame, now_s: float) -> Outgoing:
        if frame.kind is Kind.PUSH:
            return self._push(rank, frame, now_s)
        body = frame.body[0] if frame.body else b""
        if frame.kind is Kind.SET_UP:
            if self._agree("optimizer", rank, bytes(body)) == 1:
                self._steps = self._make_steps(unpack(body))
            return [(rank, Frame(Kind.SET_UP, frame.number))]
        if frame.kind in (Kind.JOIN, Kind.SUM):
            return self._join(rank, frame) if frame.kind is Kind.JOIN else self._announce(rank, frame, now_s)
        if frame.kind is Kind.BEGIN:
            self._begin(rank, unpack(body))
        elif frame.kind is Kind.PARAMETERS:
            keys, values = _keys_and_rest(frame)
            self._stepping().set_parameters(np.frombuffer(keys, "<u4").tolist(), values)
        elif frame.kind is Kind.LOAD:
            self._stepping().load(*unpack_state(body))
        elif frame.kind is Kind.FETCH:
            words, state = self._stepping().fetch(unpack(body))
            return [(rank, Frame(Kind.FETCH, frame.number, body=(pack_state(words), *state)))]
        elif frame.kind is Kind.BYE:
            return self.leave(rank, "left: its program ended, or dropped the model, while others went on")
        elif frame.kind is Kind.WAITS:
            self._awaited[rank] = str(unpack(body).get("server", ""))
        elif frame.kind is Kind.FAILED:
            words = unpack(body)
            lost, said = words.get("rank"), f"{words.get('words')} (rank {rank} says so)"
            kind, about = ("lost", lost) if isinstance(lost, int) else ("server", rank)
            return self._fail(kind, about, said)
        else:
            raise ProtocolError(f"a server does not take a frame of kind {frame.kind.name}")
        return []

    def _begin(self, rank: int, words: dict[str, Any]) -> None:
        """Note that a rank begins a step. The step begins here with the last rank."""
        num_ranks = 0
        for subject, names in _BEGINS.items():
            num_ranks = self._agree(subject, rank, pack({name: words[name] for name in names}))
        if num_ranks == self.num_ranks:
            for subject in _BEGINS:
                del self._said[subject]
            self._stepping().begin(words)

    def _push(self, rank: int, frame: Frame, now_s: float) -> Outgoing:
        keys, values = _keys_and_rest(frame)
        if values.nbytes % WIDTHS[frame.dtype]:
            raise ProtocolError(f"{values.nbytes} bytes are no whole number of {frame.dtype.name} elements")
        if frame.number not in self._pushes:
            if self._left:
                gone, words = next(iter(self._left.items()))
                return self._fail("lost", gone, self._describe(gone, words))
            total = OrderedSum(self.num_ranks, frame.dtype)
            self._pushes[frame.number] = _Push(rank, bytes(keys), values.nbytes, frame.dtype, total, now_s)
        push = self._pushes[frame.number]
        if rank in push.total.arrived:
            raise ProtocolError(f"rank {rank} pushed piece {frame.number} twice")
        if (bytes(keys), values.nbytes, frame.dtype) != (push.keys, push.num_bytes, push.dtype):
            raise ProtocolError(
                f"rank {rank} pushed {values.nbytes} bytes of {len(keys) // KEY.size} keys as piece {frame.number}, "
                f"and rank {push.first_rank} {push.num_bytes} bytes of {len(push.keys) // KEY.size}, or other keys. "
                f"The dtypes are {frame.dtype.name} and {push.dtype.name}. "
                "Ranks push the same in the same order: do they hold the same model?"
            )
        self._held_bytes -= push.total.held_bytes
        push.total.add(rank, values)
        if not push.total.is_complete:
            self._held_bytes += push.total.held_bytes
            return []
        del self._pushes[frame.number]
        answer = push.total.result()
        if self._steps is not None:
            answer = self._steps.step(np.frombuffer(push.keys, "<u4").tolist(), answer)
        reply = Frame(Kind.PUSH, frame.number, dtype=frame.dtype, body=(answer,))
        return [(each, reply) for each in range(self.num_ranks)]

    def _join(self, rank: int, frame: Frame) -> Outgoing:
        if self._sums is None:
            if self._make_sums is None:
                raise ProtocolError("this session sums nothing by datagrams")
            self._sums = self._make_sums()
        announcement = self._sums.join(rank, unpack(frame.body[0]))
        if announcement is None:
            return []
        return [(each, Frame(Kind.JOIN, body=(pack(announcement),))) for each in range(self.num_ranks)]

    def _announce(self, rank: int, frame: Frame, now_s: float) -> Outgoing:
        if self._sums is None:
            raise ProtocolError(f"rank {rank} announced a sum by datagrams, and has not joined")
        if self._left and frame.number not in self._announced:
            gone, words = next(iter(self._left.items()))
            return self._fail("lost", gone, self._describe(gone, words))
        said = bytes(frame.body[0])
        if self._agree(f"sum by datagrams, number {frame.number},", rank, said) == 1:
            self._announced[frame.number] = _Announced(set(), rank, now_s)
            self._sums.launch(frame.number, unpack(said))
        self._announced[frame.number].ranks.add(rank)
        return []

    def _answer_sums(self) -> Outgoing:
        """Answer the sums that are done."""
        assert self._sums is not None, "ranks have joined"
        outgoing: Outgoing = []
        try:
            for number in self._sums.take_finished():
                self._announced[number].is_done = True
        except PeerLostError as error:
            self._missed = {-1 if error.peer is None else error.peer: str(error)}
            return []
        except PacelineError as error:
            return self._fail("protocol", -1, str(error))
        for number, announced in list(self._announced.items()):
            if announced.is_done and len(announced.ranks) == self.num_ranks:  # datagrams may come first
                del self._announced[number], self._said[f"sum by datagrams, number {number},"]
                outgoing += [(rank, Frame(Kind.SUM, number)) for rank in range(self.num_ranks)]
        return outgoing

    def close(self) -> None:
        """Close the datagram link, after the last rank has gone."""
        if self._sums is not None:
            self._sums.close()

    @property
    def is_full(self) -> bool:
        """Return whether the limit of held bytes is reached."""
        return self._held_bytes >= self._most_held_bytes

    def accepts_from(self, rank: int) -> bool:
        """Return whether to read the frames of a rank, or to leave them in the network for now (rule 4)."""
        oldest = next(iter(self._pushes.values()), None)
        return oldest is None or not self.is_full or rank not in oldest.total.arrived

    def _agree(self, subject: str, rank: int, said: bytes) -> int:
        """Check that a rank says the same about a subject as the others. Return how many ranks have said it."""
        first, words, ranks = self._said.setdefault(subject, (rank, said, set()))
        if words != said:
            raise ConfigurationError(
                f"rank {rank} has another {subject} than rank {first}: {bytes(said[:300]).decode(errors='replace')} "
                f"instead of {bytes(words[:300]).decode(errors='replace')}. All ranks make the same one, change its "
                "settings (the rate, say) at the same step, and complete the same steps."
            )
        ranks.add(rank)
        return len(ranks)

    def _stepping(self) -> SteppedKeys:
        if self._steps is None:
            raise ProtocolError("this session has no optimizer")
        return self._steps

    # ---- lost and late ranks

    def leave(self, rank: int, words: str) -> Outgoing:
        """Note that a rank has gone. That is a failure if others wait for it, now or later."""
        if self.failure is not None or rank in self._left:
            return []
        self._left[rank] = words
        awaited = [push.total.arrived for push in self._pushes.values()]
        awaited += [announced.ranks for announced in self._announced.values()]
        if any(rank not in arrived for arrived in awaited):
            return self._fail("lost", rank, self._describe(rank, words))
        return []

    def lose(self, rank: int, words: str) -> Outgoing:
        """Note that a connection broke without a BYE, and tell all other ranks at once."""
        if self.failure is not None or rank in self._left:
            return []
        self._left[rank] = words
        return self._fail("lost", rank, self._describe(rank, words))

    def check(self, now_s: float) -> Outgoing:
        """Return answers that are ready, and a failure if a rank is late. Called regularly."""
        if self.failure is not None:
            return []
        outgoing = [] if self._sums is None else self._answer_sums()
        late = {} if self.failure is not None else self._late(now_s)
        if not late:
            self._in_doubt_s = None
            return outgoing
        blamed = [rank for rank in late if not self._awaited.get(rank)]
        if blamed:
            return outgoing + self._fail("lost", blamed[0], _listed([late[rank] for rank in blamed]))
        self._in_doubt_s = now_s if self._in_doubt_s is None else self._in_doubt_s
        if now_s - self._in_doubt_s < DOUBT_S:
            return outgoing
        rank = next(iter(late))
        words = f"{self._awaited[rank]} does not answer rank {rank}: its process may be stopped"
        return outgoing + self._fail("server", rank, words)

    def _late(self, now_s: float) -> dict[int, str]:
        """Return the ranks that others have waited for longer than the timeout, with a description."""
        found = dict(self._missed)
        for number, announced in self._announced.items():
            if now_s - announced.since_s > self._timeout_s:
                words = f"has not announced sum {number} {self._timeout_s:g} s after rank {announced.first_rank} did"
                found = found or self._describe_missing(announced.ranks, words)
        for number, push in self._pushes.items():
            if now_s - push.since_s > self._timeout_s:
                words = (
                    f"has not pushed piece {number} {self._timeout_s:g} s after rank {push.first_rank} did"
                )
                found = found or self._describe_missing(push.total.arrived, words)
        return found

    def _describe_missing(self, arrived: Container[int], words: str) -> dict[int, str]:
        """Return a description of every rank that has not arrived."""
        return {rank: self._describe(rank, words) for rank in range(self.num_ranks) if rank not in arrived}

    def _describe(self, rank: int, words: str) -> str:
        if rank not in self.names:
            return f"rank {rank} has never connected"
        return f"rank {rank} {self.names[rank]} {words}"

    def _fail(self, kind: str, rank: int, words: str) -> Outgoing:
        self.failure = Frame(Kind.FAILED, body=(pack({"kind": kind, "rank": rank, "words": words}),))
        self._pushes.clear()
        self._announced.clear()
        self._held_bytes = 0
        return [(each, self.failure) for each in self.names if each not in self._left]


def _listed(stories: list[str]) -> str:
    more = len(stories) - _MOST_NAMED
    return "; ".join(stories[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _keys_and_rest(frame: Frame) -> tuple[bytes, Bytes]:
    body = np.asarray(frame.body[0] if frame.body else np.empty(0, np.uint8))
    cut = frame.num_keys * KEY.size
    rest = body[cut:]
    return body[:cut].tobytes(), rest if rest.ctypes.data % 8 == 0 else rest.copy()

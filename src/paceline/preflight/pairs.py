"""A check of every pair of ranks: whether they reach each other, the time of a message and the rate of the link.

Rules
1. Two ranks talk over a connection of their own, and each rank has one partner at a time, so that no link is shared.
   The pairs of a round follow the circle method of tournaments. After P-1 rounds every rank has met every other.
2. A rank listens on its address towards the job's master only. It talks only to peers that know the secret which the
   ranks have exchanged through the job's store. Bytes that arrive are counted, never interpreted.
3. Nothing waits for ever: a connection, an answer and a round have time limits, and what failed is what was found out.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

_PATIENCE_S = 5.0  # of a connection or an answer
_ROUND_S = 60.0
_JOB_S = 300.0
_WORD_BYTES = 16
_NUM_PINGS = 21
_SIZES_BYTES = tuple(1 << exponent for exponent in (16, 18, 20, 22, 24, 26))
_LONG_ENOUGH_S = 0.1
_NUM_LARGEST = 3  # of which the fastest counts: others may use the host for a moment
_CHUNK = bytes(1 << 18)


@dataclass(frozen=True)
class Link:
    """The measured link from one rank to another."""

    source: int  # the sending rank
    target: int  # the receiving rank
    latency_s: float = 0.0  # half of a round trip of one byte
    bytes_per_s: float = 0.0  # rate of the largest message, over one TCP connection
    error: str = ""  # why there is no connection, in words; "": there is one


@dataclass(frozen=True)
class RankAddress:
    """The address of a rank, with facts about its host."""

    host: str
    address: str
    port: int
    word: str


def measure(store: Any, rank: int, num_ranks: int, address: str) -> tuple[list[Link], list[RankAddress]]:
    """Measure the links from this rank to all others, which connect to `address`. Return them and all addresses.

    Collective over the ranks of the job's `store`. Blocks: about a second a rank.
    """
    with socket.create_server((address, 0)) as listener:
        own = RankAddress(
            socket.gethostname(), address, listener.getsockname()[1], secrets.token_hex(_WORD_BYTES)
        )
        store.set(f"card/{rank}", json.dumps(asdict(own)))
        keys = [f"card/{other}" for other in range(num_ranks)]
        store.wait(keys, timedelta(seconds=_JOB_S))
        cards = [RankAddress(**json.loads(store.get(key))) for key in keys]
        links = []
        for number, partners in enumerate(rounds(num_ranks)):
            partner = partners.get(rank)
            if partner is not None:
                links.append(_meet(listener, rank, partner, cards))
            if store.add(f"round/{number}", 1) == num_ranks:
                store.set(f"round/{number}/over", "")
            store.wait([f"round/{number}/over"], timedelta(seconds=_ROUND_S))
    return sorted(links, key=lambda link: link.target), cards


def rounds(num_ranks: int) -> Iterator[dict[int, int]]:
    """Yield the pairs of ranks of each round; with an odd number one rank pauses."""
    places: list[int | None] = list(range(num_ranks))
    if num_ranks % 2:
        places.append(None)
    half = len(places) // 2
    for _ in range(len(places) - 1):
        found: dict[int, int] = {}
        for one, other in zip(places[:half], reversed(places[half:]), strict=True):
            if one is not None and other is not None:
                found |= {one: other, other: one}
        yield found
        places = [places[0], places[-1], *places[1:-1]]


def _meet(listener: socket.socket, rank: int, partner: int, cards: Sequence[RankAddress]) -> Link:
    """Connect two ranks, the lower one to the other. Both measure, one after the other."""
    try:
        if rank < partner:
            line = _connect(cards[partner])
        else:
            line = _accept(listener, cards[rank].word)
        with line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if rank < partner:
                found = _probe(line)
                _serve(line)
            else:
                _serve(line)
                found = _probe(line)
        return Link(rank, partner, *found)
    except TimeoutError:
        where = f"{cards[partner].address}:{cards[partner].port}"
        words = f"no answer from {where} within {_PATIENCE_S:.0f} s" if rank < partner else "it did not come"
        return Link(rank, partner, error=words)
    except OSError as error:
        return Link(rank, partner, error=error.strerror or str(error))


def _connect(card: RankAddress) -> socket.socket:
    line = socket.create_connection((card.address, card.port), timeout=_PATIENCE_S)
    line.sendall(bytes.fromhex(card.word))
    return line


def _accept(listener: socket.socket, word: str) -> socket.socket:
    until_s = time.monotonic() + 2 * _PATIENCE_S  # the other one may have been held up
    while True:
        listener.settimeout(max(0.01, until_s - time.monotonic()))
        line, _ = listener.accept()
        line.settimeout(_PATIENCE_S)
        with contextlib.suppress(OSError):
            if hmac.compare_digest(_receive(line, _WORD_BYTES), bytes.fromhex(word)):
                return line
        line.close()  # a stranger


def _probe(line: socket.socket) -> tuple[float, float]:
    trip_s = statistics.median(_timed(line, 0) for _ in range(_NUM_PINGS))
    for size in _SIZES_BYTES:
        took_s = _timed(line, size)
        if took_s > _LONG_ENOUGH_S:
            break
    took_s = min(took_s, *(_timed(line, size) for _ in range(_NUM_LARGEST - 1)))
    rate = size / max(took_s - trip_s, 1e-9)
    line.sendall((2**64 - 1).to_bytes(8, "big"))  # that was all
    return trip_s / 2, rate


def _timed(line: socket.socket, num_bytes: int) -> float:
    began_s = time.perf_counter()
    line.sendall(num_bytes.to_bytes(8, "big"))
    left = num_bytes
    while left:
        left -= line.send(_CHUNK[:left])
    _receive(line, 1)
    return time.perf_counter() - began_s


def _serve(line: socket.socket) -> None:
    room = bytearray(len(_CHUNK))
    while (left := int.from_bytes(_receive(line, 8), "big")) <= max(_SIZES_BYTES):
        while left:
            got = line.recv_into(room, min(left, len(room)))
            if not got:
                raise ConnectionResetError("it left in the middle")
            left -= got
        line.sendall(b"x")


def _receive(line: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        more = line.recv(num_bytes - len(found))
        if not more:
            raise ConnectionResetError("it left in the middle")
        found += more
    return found

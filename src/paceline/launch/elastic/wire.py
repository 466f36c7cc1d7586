"""Messages between agents as JSON. Every field is checked when it is read, and nothing is unpickled."""

from __future__ import annotations

import functools
import json
from dataclasses import astuple, dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.errors import ProtocolError
from paceline.launch.elastic.decision import AgentInfo
from paceline.launch.elastic.vote import Message

_types_of = functools.cache(get_type_hints)  # agents read packets all the time, and finding types takes 30 µs


@dataclass(frozen=True)
class Packet:
    """One message between agents, and what its sender says about itself in each."""

    job: str  # which one; the first agent has made it up
    sender: AgentInfo  # who
    epoch: int  # of the newest decision that the sender knows; `NOT_STARTED`: it knows none
    is_done: bool = False  # whether its ranks have ended well, so that its leaving is no loss
    has_paused: bool = False  # whether no rank of its host was lost or stopped within a step
    message: Message | None = None  # of the vote; None: a heartbeat
    script: str = ""  # what its host runs: hosts that run different scripts are no job
    arguments: str = ""  # with what
    sent_s: float = 0.0  # when, by the sender's clock
    heard_s: float = 0.0  # `sent_s` of the last packet that the sender has heard from this receiver
    record: str = ""  # what the record of the job says on its host: without a shared folder it is another one


def encode(packet: Packet) -> bytes:
    """Return a packet as JSON: of each record within the values of its fields, in their order."""
    return json.dumps(astuple(packet), separators=(",", ":")).encode()


def decode(body: bytes) -> Packet:
    """Return the packet that `encode` was given. Raises ProtocolError if it is something else."""
    try:
        packet: Packet = _read(json.loads(body), Packet)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"{body[:80]!r} is no message of an agent: {error!r}") from error
    return packet


def _read(value: Any, kind: Any) -> Any:
    """Return the value of this type that JSON says: a record, a tuple, a number, text, or None where it may be."""
    if get_origin(kind) is UnionType:
        return None if value is None else _read(value, get_args(kind)[0])
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{value!r} is not one of {get_args(kind)}")
        return value
    if kind in (str, int, float, bool):
        if type(value) is not kind or (kind is str and not value.isprintable()):
            raise TypeError(f"{value!r} is no {kind.__name__}")
        return value
    if type(value) is not list:
        raise TypeError(f"{value!r} is no list")
    is_tuple = get_origin(kind) is tuple
    kinds = get_args(kind) if is_tuple else tuple(_types_of(kind).values())
    if ... in kinds:
        kinds = kinds[:1] * len(value)
    fields = [_read(*each) for each in zip(value, kinds, strict=True)]
    return tuple(fields) if is_tuple else kind(*fields)

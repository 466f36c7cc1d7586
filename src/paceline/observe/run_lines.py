"""A record as a line of JSON, and back: what is not whole is refused, what is not known is left out. No torch."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, TypeVar

from paceline.observe.run_records import (
    BucketTiming,
    Health,
    HostFacts,
    Interval,
    Labels,
    LinkCounters,
    Neighbour,
    RankHeader,
    Record,
    Sample,
    StepRecord,
)

_KINDS: dict[str, type[Any]] = {
    "rank": RankHeader,
    "step": StepRecord,
    "sample": Sample,
    "labels": Labels,
    "health": Health,
}
_NAME_OF = {kind: name for name, kind in _KINDS.items()}
_WITHIN: dict[str, type[Any]] = {
    "intervals": Interval,
    "buckets": BucketTiming,
    "links": LinkCounters,
    "neighbours": Neighbour,
}
_FITS: dict[str, Any] = {
    "float": (int, float),
    "int": int,
    "str": str,
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
}
_Made = TypeVar("_Made")


def to_line(record: Record) -> bytes:
    """Return a record as one line of JSON: fields by name, those of records within by their order."""
    if isinstance(record, StepRecord):
        return _step_line(record)
    named = {name: _plain(value) for name, value in vars(record).items()}
    return json.dumps({"kind": _NAME_OF[type(record)], **named}, separators=(",", ":")).encode() + b"\n"


def _step_line(step: StepRecord) -> bytes:
    """Return the line of a step as `to_line` does, in a third of the time: there is one per step."""
    intervals = ",".join([f'["{x.phase}",{x.start_s:.6f},{x.end_s:.6f}]' for x in step.intervals])
    buckets = ",".join(
        [
            f"[{x.index},{x.size_bytes},{x.ready_s:.6f},{x.launched_s:.6f},{x.done_s:.6f},{x.waited_s:.6f}]"
            for x in step.buckets
        ]
    )
    gradients = ",".join([f"[{index},{at_s:.6f}]" for index, at_s in step.gradients])
    host = "null"
    if (facts := step.host) is not None:
        counts = f"{facts.major_faults},{facts.preemptions}"
        host = f"[{facts.cpu_s:.6f},{facts.queued_s:.6f},{facts.throttled_s:.6f},{counts}]"
    samples = "null" if step.num_samples is None else step.num_samples
    tokens = "null" if step.num_tokens is None else step.num_tokens
    return (
        f'{{"kind":"step","step":{step.step},"began_s":{step.began_s:.6f},"work_ended_s":{step.work_ended_s:.6f},'
        f'"ended_s":{step.ended_s:.6f},"intervals":[{intervals}],"buckets":[{buckets}],"gradients":[{gradients}],'
        f'"num_samples":{samples},"num_tokens":{tokens},"host":{host}}}\n'
    ).encode()


def from_line(line: bytes) -> Record | None:
    """Return the record of a line, without unknown fields; None for an unknown kind. Raises ValueError."""
    found = json.loads(line)
    kind = found.pop("kind", None) if isinstance(found, dict) else None
    if not isinstance(kind, str):
        raise ValueError("it is not a record")  # noqa: TRY004  the caller's one kind of failure
    return None if kind not in _KINDS else made(_KINDS[kind], found)


def made(kind: type[_Made], named: dict[str, Any]) -> _Made:
    """Return a record with these fields, read from JSON. Raises ValueError if one is missing or of another type."""
    known: dict[str, Any] = {}
    try:
        for x in fields(kind):  # type: ignore[arg-type]
            if x.name in named:
                known[x.name] = _value(x.name, str(x.type), named[x.name])
        record = kind(**known)
        if isinstance(record, StepRecord) and not record.began_s <= record.work_ended_s <= record.ended_s:
            raise ValueError("its times are out of order")
    except TypeError as error:
        raise ValueError(str(error)) from error
    return record


def _value(name: str, declared: str, value: Any) -> Any:
    if name == "host" and isinstance(value, list):
        return _positional(HostFacts, value)
    if name in _WITHIN and value is not None:
        return tuple(_positional(_WITHIN[name], x) for x in value)
    if isinstance(value, list):
        return tuple(tuple(x) if isinstance(x, list) else x for x in value)
    if not isinstance(value, _FITS.get(declared, object)):
        raise ValueError(f"{name} is no {declared}")  # noqa: TRY004  the caller's one kind of failure
    return value


def _positional(kind: type[Any], values: list[Any]) -> Any:
    for x, value in zip(fields(kind), values, strict=True):
        if not isinstance(value, _FITS.get(str(x.type), object)):
            raise ValueError(f"{x.name} is no {x.type}")  # noqa: TRY004  the caller's one kind of failure
    return kind(*values)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    return [_plain(x) for x in vars(value).values()] if hasattr(value, "__dict__") else value

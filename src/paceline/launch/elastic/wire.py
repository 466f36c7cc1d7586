"""Messages between agents as JSON. Every field is checked when it is read, and nothing is unpickled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from paceline.errors import ProtocolError
from paceline.launch.elastic.decree import Candidate, Decree, Voter
from paceline.launch.elastic.plan import Address, Member
from paceline.launch.elastic.vote import Ballot, Message, Promise, Report

_KINDS = ("ask", "promise", "offer", "vote", "decree", "join")


@dataclass(frozen=True)
class Packet:
    """One message between agents, and what its sender says about itself in each."""

    job: str  # which one; the first agent has made it up
    sender: Voter  # who
    epoch: int  # of the newest decree that the sender knows; `NOT_STARTED`: it knows none
    is_done: bool = False  # whether its ranks have ended well, so that its leaving is no loss
    has_paused: bool = False  # whether no rank of its host was lost or stopped within a step
    message: Message | None = None  # of the vote; None: a heartbeat


def encode(packet: Packet) -> bytes:
    """Return a packet as JSON."""
    fields = [packet.job, _of_voter(packet.sender), packet.epoch, packet.is_done, packet.has_paused]
    if (message := packet.message) is not None:
        promise = message.promise
        fields += [
            [
                *(message.kind, message.sender, message.to, message.epoch, message.ballot),
                None if promise is None else _of_promise(promise),
                _of_decree(message.decree),
            ]
        ]
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(body: bytes) -> Packet:
    """Return the packet that `encode` was given. Raises ProtocolError if it is something else."""
    try:
        job, sender, epoch, is_done, has_paused, *rest = json.loads(body)
        return Packet(
            _text(job),
            _voter(sender),
            _whole(epoch),
            is_done is True,
            has_paused is True,
            _message(*rest) if rest else None,
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"{body[:80]!r} is no message of an agent: {error!r}") from error


def _of_voter(voter: Voter) -> list[Any]:
    return [
        voter.name,
        *voter.address,
        *voter.store,
        *voter.start,
        voter.num_ranks,
        voter.leaves,
        voter.can_save,
    ]


def _of_candidate(candidate: Candidate) -> list[Any]:
    return [*candidate.member, candidate.epoch, candidate.step]


def _of_decree(decree: Decree | None) -> list[Any] | None:
    if decree is None:
        return None
    members, voters = map(_of_candidate, decree.members), map(_of_voter, decree.voters)
    return [decree.epoch, list(members), list(voters), decree.tie_breaker, decree.trained, decree.saver]


def _of_promise(promise: Promise) -> list[Any]:
    report = promise.report
    candidates = [_of_candidate(each) for each in report.candidates]
    return [_of_voter(report.voter), candidates, promise.ballot, _of_decree(promise.decree)]


def _message(value: Any) -> Message:
    kind, sender, to, epoch, ballot, promise, decree = value
    if kind not in _KINDS:
        raise ValueError(f"no kind of message: {kind!r}")
    return Message(
        kind, _text(sender), _text(to), _whole(epoch), _ballot(ballot), _promise(promise), _decree(decree)
    )


def _voter(value: Any) -> Voter:
    name, host, port, store_host, store_port, start_host, start_port, num_ranks, leaves, can_save = value
    return Voter(
        _text(name),
        Address(_text(host), _whole(port)),
        Address(_text(store_host), _whole(store_port)),
        Address(_text(start_host), _whole(start_port)),
        _whole(num_ranks),
        leaves is True,
        can_save is True,
    )


def _candidate(value: Any) -> Candidate:
    host, number, epoch, step = value
    return Candidate(Member(_text(host), _whole(number)), _whole(epoch), _whole(step))


def _ballot(value: Any) -> Ballot:
    number, proposer = value
    return _whole(number), _text(proposer)


def _decree(value: Any) -> Decree | None:
    if value is None:
        return None
    epoch, members, voters, tie_breaker, trained, saver = value
    decree = Decree(
        _whole(epoch),
        tuple(_candidate(each) for each in members),
        tuple(_voter(each) for each in voters),
        _text(tie_breaker),
        _whole(trained),
        _text(saver),
    )
    hosts = {candidate.member.host for candidate in decree.members}
    if tie_breaker not in decree.names or not hosts <= set(decree.names):
        raise ValueError("a decree whose tie-breaker or members are of no voter")
    return decree


def _promise(value: Any) -> Promise | None:
    if value is None:
        return None
    voter, candidates, ballot, decree = value
    report = Report(_voter(voter), tuple(_candidate(each) for each in candidates))
    return Promise(report, _ballot(ballot), _decree(decree))


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or not value.isprintable():
        raise TypeError(f"{value!r} is not text")
    return value

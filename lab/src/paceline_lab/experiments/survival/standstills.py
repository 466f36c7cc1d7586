"""Standstills of a training, with their cause: from a rank's death to the next step that is completed without it.

Rules
1. A rank that never trained, a replacement that is starting or replaying, stops no other: its death begins no
   standstill.
2. Deaths before the next completed step belong to one standstill, which begins with the first of them.
3. The time that a rank itself takes to die counts. A rank that raises prints its error and ends threads. One that runs
   out of memory fills that first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline_lab.experiments.survival.job import Outcome

ONE, RAISED, MEMORY = "one death", "one that raised", "one out of memory"
TWO, AGAIN = "two at once", "another in the recovery"
STOPPED, COMING = "a stopped rank", "as a rank comes in"
KINDS = (ONE, RAISED, MEMORY, TWO, AGAIN, STOPPED, COMING)
_STOPS = ("SIGSTOP", "pause")
_OUTSIDE = ("rendezvous", "constructing", "coming in", "replaying")  # where a rank is in no membership
_COMES_IN = (
    "recovery",
    "following",
    "receiving",
)  # without a death, all wait for a rank that comes in
_AT_ONCE_S = 0.02  # between two deaths that no rank has told from one


@dataclass(frozen=True)
class Standstill:
    """One standstill of all ranks.

    Attributes:
        kind: Kind of `KINDS`.
        seconds: Time from the first death; of a stopped rank from its stop, so the time until it counts as lost.
        since_last_s: Time from the last death in it.
    """

    kind: str
    seconds: float
    since_last_s: float


@dataclass(frozen=True, order=True)
class _Blow:
    at: float
    how: str
    moment: str

    @property
    def is_deadly(self) -> bool:
        """A stop may be: for 20 s it always is."""
        return self.how != "pause"


def standstills(outcome: Outcome) -> list[Standstill]:
    """Return the standstills after the first completed step."""
    done = sorted(
        (note["at"], note["under"]) for notes in outcome.notes for note in notes if note["what"] == "done"
    )
    blows = [each for each in _blows(outcome) if done and each.at > done[0][0]]
    found = []
    while blows:
        first = blows[0]
        under = max(epoch for at, epoch in done if at <= first.at)
        until = next((at for at, epoch in done if at > first.at and epoch > under), None)
        within = [each for each in blows if until is not None and each.at <= until]
        if first.is_deadly and until is not None:
            last = max(each.at for each in within)
            found.append(Standstill(_kind(within), until - first.at, until - last))
        blows = blows[len(within) if first.is_deadly and within else 1 :]
    return found


def _blows(outcome: Outcome) -> list[_Blow]:
    found = [_Blow(at, "SIGKILL", "from without") for at in outcome.kills]
    for notes in outcome.notes:
        has_trained = False
        for note in notes:
            has_trained = has_trained or note["what"] == "try"
            if note["what"] == "fault" and (has_trained or note["moment"] not in _OUTSIDE):
                found.append(_Blow(note["at"], note["how"], note["moment"]))
    return sorted(found)


def _kind(blows: Sequence[_Blow]) -> str:
    if any(each.how in _STOPS for each in blows):
        return STOPPED
    if blows[0].moment in _COMES_IN:
        return COMING
    if len(blows) > 1:
        return TWO if blows[-1].at - blows[0].at < _AT_ONCE_S else AGAIN
    return {"memory": MEMORY, "error": RAISED}.get(blows[0].how, ONE)

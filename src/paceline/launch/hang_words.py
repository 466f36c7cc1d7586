"""A hang in words: who is missing, where it is, and what the others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.host.stacks import Stack
from paceline.launch.standstill import Standstill
from paceline.observe.progress import Entered

LAUNCHER = -1  # the launcher waits, and no rank of its machine does
MOST_SHOWN = 4
_MOST_FRAMES = 12
NEXT = (
    "Nothing has been ended: the others fail at their group's timeout, or end the launch now (Ctrl-C). "
    "`paceline explain hang` says more."
)


def headline(what: Standstill, quiet_s: float) -> str:
    """Return which ranks are missing, or that ranks are in different collectives."""
    if not what.missing:
        where = "; ".join(f"rank {each.rank} is {_act(each)}" for each in what.waiting[:MOST_SHOWN])
        return f"hang: the ranks are in different collectives, and each waits for the others: {where}."
    first, *others = what.missing
    who = f"hang: {names_of(what.missing)} are missing" if others else f"hang: rank {first} is missing"
    waits = waiting(what)
    comma = "," if what.waiting[0].step >= 0 else ""
    return f"{who}. {waits[0].upper()}{waits[1:]}{comma} for {quiet_s:.1f} s."


def headline_of_all(what: Standstill, num_ranks: int, quiet_s: float) -> str:
    """Return the sentence for a hang in which every rank here is in the same collective."""
    who = "every rank" if num_ranks else "every rank of this machine"
    rest = (
        "So the network between them does not carry it"
        if num_ranks
        else "So a rank of another machine is missing, or the network does not carry it"
    )
    return f"hang: {who} is {_act(what.waiting[0])}, and nothing has moved for {quiet_s:.0f} s. {rest}."


def waiting(what: Standstill) -> str:
    """Return which ranks wait, and what for."""
    first = what.waiting[0]
    names = names_of([each.rank for each in what.waiting])
    return f"{names} {'has' if len(what.waiting) == 1 else 'have'} been {_act(first)}"


def _act(entered: Entered) -> str:
    return f"{entered.what}, step {entered.step}" if entered.step >= 0 else entered.what


def names_of(ranks: Sequence[int]) -> str:
    """Return a name such as `rank 1`, `ranks 0 and 2` or `the launcher`."""
    if list(ranks) == [LAUNCHER]:
        return "the launcher"
    shown = [str(rank) for rank in ranks[:MOST_SHOWN]]
    more = f" and {len(ranks) - MOST_SHOWN} more" if len(ranks) > MOST_SHOWN else ""
    words = ", ".join(shown) + more if more or len(shown) < 2 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


def describe(rank: int, pid: int, stack: Stack) -> list[str]:
    """Return lines about where a missing rank is."""
    if not stack.frames:
        return [
            f"  rank {rank} (process {pid}) {stack.kernel or 'does nothing'}; its Python stack is unknown: {stack.by}"
        ]
    lines = [
        f"  rank {rank} (process {pid}) {stack.kernel or 'does nothing'}, in, innermost first ({stack.by}):"
    ]
    return lines + [f"    {frame}" for frame in stack.frames[:_MOST_FRAMES]]


def describe_briefly(waits: Entered, stack: Stack) -> list[str]:
    """Return a line about where a waiting rank is, or none."""
    return [f"  rank {waits.rank} waits in {place(stack)}"] if stack.frames else []


def place(stack: Stack) -> str:
    """Return the innermost function of the user's own."""
    own = [frame for frame in stack.frames if frame.is_of_user] or list(stack.frames)
    return str(own[0]) if own else "a place that could not be read"

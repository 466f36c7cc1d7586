"""Checks of the ranks' numbers: whether they still train the same model, and whose gradients were not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from paceline.observe.run_reading import Run
from paceline.observe.run_records import Health


def health_of(run: Run) -> tuple[str, ...]:
    """Return what is wrong with the ranks' numbers, in words; nothing if they agree."""
    return (
        *_apart(run, "parameters", lambda x: x.fingerprint),
        *_apart(run, "buffers", lambda x: x.buffers),
        *_not_finite(run),
    )


def _apart(run: Run, what: str, of: Callable[[Health], str]) -> Sequence[str]:
    """The first step after which ranks' fingerprints differ, and who differs from most."""
    by_step: dict[int, dict[int, str]] = {}
    for rank in run.ranks:
        for found in rank.health:
            if of(found):
                by_step.setdefault(found.step, {})[rank.header.rank] = of(found)
    last_equal = 0
    for step in sorted(by_step):
        words = by_step[step]
        common, count = Counter(words.values()).most_common(1)[0]
        if count == len(words):
            last_equal = step
            continue
        if what == "buffers":
            others = "They are kept by each rank alone, as statistics of batch normalization are"
        else:
            others = (
                "Gradients are the same on all ranks, so something else wrote into them, or began from others"
            )
        if 2 * count <= len(words):
            who = "the ranks' " + what + " differ from each other"
        else:
            odd = [str(rank) for rank, word in sorted(words.items()) if word != common]
            who = f"the {what} of rank {', '.join(odd)} differ from the other ranks'"
        since = f"still equal after step {last_equal}" if last_equal else "from the first comparison on"
        return [f"After step {step} {who} ({since}). {others}."]
    return []


def _not_finite(run: Run) -> list[str]:
    """Name the rank whose gradients were the first. If every rank's were, the parameters may be the cause."""
    found = [(x.step, rank, x.not_finite) for rank in run.ranks for x in rank.health if x.not_finite]
    if not found:
        return []
    first = min(step for step, _, _ in found)
    ranks = {rank.header.rank: name for step, rank, name in found if step == first}
    name = next(iter(ranks.values()))
    is_late = any(rank.header.device != "cpu" for _, rank, _ in found)
    when = f"In step {first} or shortly before" if is_late else f"In step {first}"
    if 1 < len(ranks) == len(run.ranks):
        words = (
            f"{when} every rank's own gradients were not finite, the first in backward's order being that of {name}. "
            "Which rank caused it is unknown: parameters may have been so before."
        )
        return [words]
    who = " and ".join(f"rank {rank}'s" for rank in sorted(ranks))
    words = (
        f"{when} {who} own gradient of {name} was not finite, the first in backward's order. Parameters are not finite "
        "since. Look at that rank's batch and loss in that step, and restart from a checkpoint before it."
    )
    return [words]

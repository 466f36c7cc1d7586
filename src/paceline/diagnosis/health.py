"""Whether the ranks still train the same model, and whose gradients were not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from paceline.observe.run_reading import Run
from paceline.observe.run_records import Health


def health_of(run: Run) -> tuple[str, ...]:
    """What is wrong with the ranks' numbers, in words; nothing if they agree."""
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
    found = [
        (x.step, rank.header.rank, x.not_finite) for rank in run.ranks for x in rank.health if x.not_finite
    ]
    if not found:
        return []
    step, rank, parameter = min(found)
    return [f"In step {step} rank {rank}'s own gradient of {parameter} was the first that was not finite."]

"""Performs random programs on ranks, beside bare copies of the model that one process trains on every rank's batch.

Rules
1. All ranks compare at the same places and go on after a mismatch, so that none waits for another.
2. A bare copy knows nothing of ranks: gradients of the whole batch come from autograd alone, in float64.
3. What is compared was read as soon as backward had returned, and one rank may be late: what is not waited for is seen.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Sequence

from harness.program_comparison import Comparison
from harness.program_dropped import dropped
from harness.program_free import free
from harness.program_kinds import gan, local_steps, with_torch
from harness.program_model import LEFT
from harness.program_overlapped import forward_overlap, overlapped_pair
from harness.program_resumed import resumed
from harness.program_sharded import sharded
from harness.random_programs import Program, shrink
from harness.ranks import Ranks

KINDS: dict[str, Callable[[Program, int, int, Comparison], None]] = {
    "free": free,
    "torch": with_torch,
    "mixed precision": with_torch,
    "gan": gan,
    "local steps": local_steps,
    "overlap": forward_overlap,
    "sharded": sharded,
    "overlapped pair": overlapped_pair,
    "dropped": dropped,
    "resumed": resumed,
}


# ---- many programs, on ranks


def perform(rank: int, num_ranks: int, programs: Sequence[str]) -> list[list[str]]:
    """Return the errors of each program on this rank. Collective."""
    warnings.simplefilter("ignore")
    results = []
    for text in programs:
        program = Program.from_json(text)
        compare = Comparison(program)
        try:
            KINDS[program.kind](program, rank, num_ranks, compare)
            results.append(compare.across_ranks())
        except Exception as error:
            raise AssertionError(
                f"program of seed {program.seed}, {compare.where}: {type(error).__name__}: {error}"
            ) from error
        finally:
            LEFT.clear()
    return results


NOT_REPEATED = "not repeated: "


def find_failures(
    programs: Sequence[Program], ranks: Ranks, deadline_s: float = 120.0
) -> dict[Program, list[str]]:
    """Perform programs of one number of ranks. Return the failed ones with every rank's errors."""
    outcomes = ranks.outcomes(perform, [one.to_json() for one in programs], deadline_s=deadline_s)
    if all(outcome.clean for outcome in outcomes):
        failures = {}
        for index, program in enumerate(programs):
            words = [f"rank {o.rank}: {line}" for o in outcomes for line in o.value[index][:3]]
            if words:
                failures[program] = words
        return failures
    if len(programs) == 1:
        return {programs[0]: [outcome.story() for outcome in outcomes if not outcome.clean]}
    half = len(programs) // 2
    found = {
        **find_failures(programs[:half], ranks, deadline_s),
        **find_failures(programs[half:], ranks, deadline_s),
    }
    if found:
        return found
    return {programs[0]: [NOT_REPEATED + "\n".join(o.story() for o in outcomes if not o.clean)]}


def explain(
    program: Program, words: Sequence[str], pool: Callable[[int], Ranks], max_tries: int = 150
) -> str:
    """Return a failure's report: the seed, the smallest failing program, and the command that repeats it."""

    def fails(candidate: Program) -> bool:
        return bool(find_failures([candidate], pool(candidate.num_ranks), 40.0))

    smallest = shrink(program, fails, max_tries)
    last = find_failures([smallest], pool(smallest.num_ranks), 40.0).get(smallest, ["not repeated alone"])
    return "\n".join(
        [
            f"seed {program.seed}: {words[0][:6000]}",
            f"smallest: {smallest.kind} on {smallest.num_ranks} ranks, {smallest.blocks}, {smallest.options}",
            *[f"  {name} ({seed})" for name, seed in smallest.operations],
            *[f"  -> {line[:1500]}" for line in last],
            "repeat: paceline study fuzz --program " + shlex.quote(smallest.to_json()),
        ]
    )

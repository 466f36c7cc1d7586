"""Random training programs: whatever a script does, its gradients are those of one process on the whole batch.

`random_programs` draws them, `program_oracle` performs them beside bare copies and torch's class.
"""

from dataclasses import replace

import pytest

from harness.program_model import HEADS
from harness.program_oracle import explain, find_failures
from harness.random_programs import Program, draw, shrink
from harness.ranks import pool

FIRST_SEED, NUM_PROGRAMS = 1000, 30  # `paceline study fuzz` draws thousands


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)  # shrinking, where something fails
def test_random_programs():
    """Thirty programs on 2 to 4 ranks; what fails is shrunk and printed with the command that repeats it."""
    programs = [draw(seed) for seed in range(FIRST_SEED, FIRST_SEED + NUM_PROGRAMS)]
    reports = []
    for num_ranks in (2, 3, 4):
        mine = [one for one in programs if one.num_ranks == num_ranks]
        failures = find_failures(mine, pool(num_ranks)) if mine else {}
        reports += [
            explain(program, words, pool, max_tries=40) for program, words in list(failures.items())[:2]
        ]
        reports += [f"and {len(failures) - 2} more"] if len(failures) > 2 else []
    assert not reports, "\n\n".join(reports)


def rare_programs():
    """Static graphs of several buckets; backwards that reach a nested one before they reach any parameter."""
    programs = list(map(draw, range(FIRST_SEED, FIRST_SEED + 200)))
    static = [one for one in programs if one.kind == "torch" and "static_graph" in one.options]
    hidden = [one for one in programs if one.outputs != "plain" and "tied" not in "".join(one.blocks)]
    return [
        *[replace(one, options={**one.options, "bucket_cap_mb": 0.0001}) for one in static[:5]],
        *[replace(one, blocks=(*one.blocks, HEADS), num_ranks=2) for one in hidden[:8]],
    ]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_programs_that_are_drawn_too_rarely():
    """A static graph that is counted too low, and a reentrant checkpoint that ends a backward early, are seen here."""
    programs = rare_programs()
    assert len(programs) == 13
    for num_ranks in (2, 3):
        mine = [one for one in programs if one.num_ranks == num_ranks]
        failures = find_failures(mine, pool(num_ranks)) if mine else {}
        assert not failures, [(one.to_json(), words[0]) for one, words in failures.items()]


def sharded(seed, optimizer, options, blocks, *operations):
    """Return a program on two ranks whose optimizer is sharded as between hosts."""
    options = {"optimizer": optimizer, "hosts": "several", **options}
    return Program(seed, "sharded", 2, 6, blocks, "plain", options, operations)


SHARDED = [  # found by a search
    # A late gradient is whole on every rank, and its norm was counted on every rank.
    sharded(
        100028,
        "Adafactor",
        {"bucket_cap_mb": 0.0001, "find_unused_parameters": True},
        ("nested",),
        ("train, clip", 2),
    ),
    # An optimizer sharded while parts of gradients were left took them for whole ones.
    sharded(
        100039,
        "Adafactor",
        {"weight": True},
        ("tied reentrant",),
        ("train, overflow", 6),
        ("save and load", 7),
        ("train on two micro-batches", 9),
    ),
]


@pytest.mark.processes
def test_sharded_programs_that_have_failed():
    """Faults that a search has found stay away."""
    failures = find_failures(SHARDED, pool(2))
    assert not failures, [(one.to_json(), words[0]) for one, words in failures.items()]


def test_programs_are_drawn_from_their_seed_and_survive_writing():
    """A seed says everything; so does the line that is printed."""
    for seed in range(50):
        assert draw(seed).to_json() == draw(seed).to_json()
        assert Program.from_json(draw(seed).to_json()).to_json() == draw(seed).to_json()


def test_shrinking_leaves_what_fails():
    """Of a long program with options, the two operations that are wrong together, and nothing else."""
    program = next(p for p in map(draw, range(1000)) if p.kind == "free" and p.blocks and p.options)
    guilty = {program.operations[1], program.operations[-2]}
    smallest = shrink(program, lambda candidate: guilty <= set(candidate.operations))
    assert set(smallest.operations) == guilty
    assert (smallest.options, smallest.blocks, smallest.num_ranks) == ({}, (), 2)

"""Random training programs: what there is to draw, how one is drawn from a seed, written down, and made smaller.

Rules
1. A program is data: a kind, a model, options of the wrapper and a list of operations. Performing it
   (`program_oracle`) draws data and branches from (program's seed, operation's seed, rank) alone.
2. Any part may be left out and what remains is still a program: so a failing one can be shrunk by trying.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

OUTPUTS = ("plain", "plain", "object", "attribute", "global")
BLOCKS = ("linear", "reentrant", "checkpoint", "nested", "twice", "tied", "norm")
LATE = "tied reentrant"  # a gradient that arrives when its bucket has left; only the mean takes it
STATE = "state"  # a buffer that each forward changes and the next one's gradients depend on
SHORTER = (
    "auto",
    "auto",
    "bf16",
    "fp16",
    "int8",
    "int8 with feedback",
    "onebit",
    "topk",
    "randomk",
    "powersgd",
)
SHORTER_CHANGES = ("bf16", "fp16", "int8", "all of topk")  # of parameters: compared without residuals
SOURCES = ("shuffle", "tokens", "stream", "stream with state")
DIVIDED = ("by model", "by dimension", "by dimension", "not at all")  # parameters among optimizers
CHUNKS = (3, 16, 64)  # elements of a message on a ring: a step then has many, and the last one is shorter
HOOKS = ("allreduce", "fp16", "fp16 around allreduce", "fresh", "noop")

# Operations of each kind of program, with how often they are drawn.
OPERATIONS: dict[str, dict[str, int]] = {
    # Anything between two backwards; each gradient is compared after each synchronization.
    "free": {
        "forward": 6,
        "backward": 6,
        "backward, keep the graph": 2,
        "backward without synchronization": 3,
        "zero to None": 2,
        "zero in place": 2,
        "scale": 1,
        "clone": 1,
        "evaluate": 1,
        "set": 1,
        "freeze": 1,
        "unfreeze": 1,
        "freeze the start": 1,
        "unfreeze the start": 2,  # it was frozen when the module was wrapped
        "forward, routed": 3,  # some ranks use no parameter
        "evaluate on some ranks": 2,
        "replace": 1,
        "replace nothing": 1,
        "sync_gradients": 1,
        "around the wrapper": 2,
        "accumulate": 2,
        "accumulate, evaluate within": 1,
        "accumulate, unfreeze within": 1,
        "raise in forward": 1,
        "raise before backward": 1,
        "raise in backward": 2,
        "train": 2,
    },
    # What torch's class can do as well; compared with it, too.
    "torch": {
        "train": 6,
        "train on two micro-batches": 2,
        "evaluate": 1,
        "train twice forward": 1,
        "train, backward twice": 1,
    },
    # Two wrapped models whose backwards alternate.
    "gan": {"discriminate": 3, "generate": 3, "generate, frozen critic": 2, "both": 2, "step": 2},
    # Parameters instead of gradients.
    "local steps": {"train": 6, "evaluate": 1, "synchronize": 1},
    # The optimizer's step is deferred into the next forward.
    "overlap": {
        "train": 6,
        "train on two micro-batches": 2,
        "accumulate": 2,
        "evaluate": 1,
        "read": 1,
        "read one": 4,
    },
    # The optimizer's state and step are divided among the ranks.
    "sharded": {
        "train": 6,
        "train on two micro-batches": 2,
        "accumulate": 2,
        "train, clip": 2,
        "train, scale": 1,
        "train, overflow": 1,
        "train, zero in place": 1,
        "evaluate": 1,
        "read": 1,
        "read one": 2,
        "change rates": 1,
        "freeze": 1,
        "unfreeze": 2,
        "save and load": 1,
        "checkpoint": 1,
    },
    # Two models with deferred steps, with optimizers that have parameters of both.
    "overlapped pair": {
        "train both": 6,
        "train the critic": 2,
        "train the maker": 2,
        "train one after the other": 2,
        "evaluate": 1,
        "read": 1,
        "read one": 2,
    },
    # Models that are dropped, and wrapped anew.
    "dropped": {
        "train": 6,
        "drop": 3,
        "drop, collect": 1,
        "collect": 1,
        "open a group": 2,
        "close a group": 2,
    },
    "mixed precision": {"train": 6, "train on two micro-batches": 2, "evaluate": 1},
    # Samplers and streams that are saved anywhere and resumed with other shares.
    "resumed": {"train": 8, "train again": 1, "change shares": 1, "resume": 4, "go back": 1},
}
NUM_OPERATIONS = {
    "free": 14,
    "torch": 4,
    "gan": 6,
    "local steps": 7,
    "overlap": 9,
    "sharded": 10,
    "overlapped pair": 9,
    "dropped": 8,
    "mixed precision": 3,
    "resumed": 10,
}
WEIGHTS = {
    "free": 10,
    "torch": 5,
    "gan": 3,
    "local steps": 2,
    "overlap": 3,
    "sharded": 4,
    "overlapped pair": 3,
    "dropped": 2,
    "mixed precision": 1,
    "resumed": 3,
}


@dataclass(frozen=True, eq=False)  # found again by identity
class Program:
    """A program that every rank performs.

    Attributes:
        seed: The seed of data, parameters and branches.
        kind: A key of `OPERATIONS`.
        num_ranks: Number of processes.
        width: The width of the trunk. Gradients of a wide trunk are copied while backward runs.
        blocks: The layers after the trunk, out of `BLOCKS`, `LATE`, `STATE`.
        outputs: The form of a forward's outputs: plain tensors, or objects that no library looks into.
        options: The options of the wrapper or the optimizer, by name.
        operations: The operations in order, each with the seed of its data.
        slow_rank: A rank that comes late to each backward, so that a missing wait on another rank shows.
    """

    seed: int
    kind: str
    num_ranks: int
    width: int
    blocks: tuple[str, ...]
    outputs: str
    options: dict[str, Any]
    operations: tuple[tuple[str, int], ...]
    slow_rank: int | None = None

    def to_json(self) -> str:
        """Return the program on one line, for a command."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Return the program that `to_json` wrote."""
        fields = json.loads(text)
        fields["blocks"] = tuple(fields["blocks"])
        fields["operations"] = tuple((str(name), int(seed)) for name, seed in fields["operations"])
        return cls(**fields)


def draw(seed: int, only: str | None = None) -> Program:
    """Return the program of a seed, the same in every process and on every machine; of one kind alone if given."""
    source = random.Random(seed)
    kind = only or source.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    options = dict(_options(kind, source))
    names, often = list(OPERATIONS[kind]), list(OPERATIONS[kind].values())
    takes_turns = "auto" in options.values()  # what was chosen changes from step to step
    chosen = source.choices(names, often, k=NUM_OPERATIONS[kind] * (2 if takes_turns else 1))
    num_ranks = source.choice((2, 3, 4) if "hosts" in options else (2, 3))
    return Program(
        seed,
        kind,
        num_ranks,
        width=source.choice((6, 6, 1400 if kind in ("free", "torch", "gan") else 6)),
        blocks=tuple(_blocks(kind, options, source)),
        outputs=source.choice(OUTPUTS) if kind == "free" else "plain",
        options=options,
        operations=tuple((name, place) for place, name in enumerate(chosen)),
        slow_rank=source.choice((None, *range(num_ranks))),
    )


def _options(kind: str, source: random.Random) -> Iterator[tuple[str, Any]]:
    if kind == "local steps":
        yield "optimizer", source.choice(("LocalSGD", "DiLoCo"))
        yield "every", source.randint(1, 4)
        if source.random() < 0.2:
            yield "compression", source.choice(SHORTER_CHANGES)
        return
    if source.random() < 0.5:
        yield "bucket_cap_mb", 0.0001
    if kind in ("overlap", "overlapped pair"):
        yield "overlap_forward", "always"
        yield "optimizer", source.choice(("SGD", "AdamW"))
        if kind == "overlapped pair":
            yield "divided", source.choice(DIVIDED)
        return
    if kind == "sharded":
        yield from _sharded_options(source)
        return
    if kind == "dropped":
        yield from _dropped_options(source)
        return
    if kind == "resumed":
        yield "source", source.choice(SOURCES)
        yield "num_samples", source.randint(4, 20)
        yield "size", source.randint(3, 8)
        return
    if source.random() < 0.2:
        yield "broadcast_buffers", False
    if kind == "mixed precision":
        yield "mixed_precision", "bfloat16"
        return
    extra = source.choice(
        ("none", "compression", "compression", "hook", "static_graph", "find_unused", "weight")
    )
    if extra == "compression":
        yield extra, source.choice(SHORTER)
    elif extra == "hook":
        yield extra, source.choice(HOOKS if kind == "torch" else HOOKS[:-1])
    elif (extra == "static_graph" and kind in ("torch", "gan")) or (extra == "weight" and kind == "torch"):
        yield extra, True
    elif extra == "find_unused":
        yield "find_unused_parameters", True
        if source.random() < 0.5:
            yield "skip_all_reduce_unused_params", True


def _sharded_options(source: random.Random) -> Iterator[tuple[str, Any]]:
    yield "optimizer", source.choice(("SGD", "AdamW", "AdamW", "Adagrad", "Adafactor", "LAMB"))
    if source.random() < 0.7:
        yield "hosts", "several"
        yield "chunk_elements", source.choice(CHUNKS)
    if source.random() < 0.2:
        yield "whole_gradients", True
    extra = source.choice(
        (
            "overlap_forward",
            "overlap_forward",
            "compression",
            "weight",
            "find_unused",
            "mixed_precision",
            "none",
            "none",
        )
    )
    if extra == "overlap_forward":
        yield extra, "always"
    elif extra == "compression":
        yield extra, "bf16"
    elif extra == "weight":
        yield extra, True
    elif extra == "mixed_precision":
        yield extra, "bfloat16"
    elif extra == "find_unused":
        yield "find_unused_parameters", True


def _dropped_options(source: random.Random) -> Iterator[tuple[str, Any]]:
    if source.random() < 0.5:
        yield "part", True
    extra = source.choice(("overlap_forward", "overlap_forward", "compression", "find_unused", "none"))
    if extra == "overlap_forward":
        yield extra, "always"
    elif extra == "compression":
        yield extra, source.choice([name for name in SHORTER if name != "auto"])
    elif extra == "find_unused":
        yield "find_unused_parameters", True


def _blocks(kind: str, options: dict[str, Any], source: random.Random) -> list[str]:
    """Up to three. Batch norm amplifies the rounding of 16 bits, and depends on who has which samples."""
    known = list(BLOCKS[:-1] if kind in ("mixed precision", "resumed", "sharded") else BLOCKS)
    if not {"compression", "hook"} & set(options):
        known.append(LATE)
    if kind == "free":
        known.append(STATE)
    return [source.choice(known) for _ in range(source.randrange(4))]


def shrink(program: Program, fails: Callable[[Program], bool], max_tries: int = 150) -> Program:
    """Return the smallest program found that still fails, by leaving out operations, options and layers.

    Args:
        program: A program that fails.
        fails: Performs a program, and returns whether it fails.
        max_tries: How often `fails` may be called.
    """
    tries = 0
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(program):
            tries += 1
            if tries > max_tries:
                return program
            if fails(smaller):
                program, progress = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield the program with parts left out, large parts first."""
    count = len(program.operations)
    size = count // 2
    while size:
        for start in range(0, count, size):
            left = program.operations[:start] + program.operations[start + size :]
            if left:
                yield replace(program, operations=left)
        size //= 2
    for name in program.options:
        if name not in ("optimizer", "every") and (name != "overlap_forward" or program.kind == "dropped"):
            yield replace(program, options={k: v for k, v in program.options.items() if k != name})
    for place in range(len(program.blocks)):
        yield replace(program, blocks=program.blocks[:place] + program.blocks[place + 1 :])
    if program.outputs != "plain":
        yield replace(program, outputs="plain")
    if program.width != 6:
        yield replace(program, width=6)
    if program.slow_rank is not None:
        yield replace(program, slow_rank=None)
    if program.num_ranks > 2:
        yield replace(program, num_ranks=program.num_ranks - 1)

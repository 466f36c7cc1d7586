"""A collective as data: rounds of point-to-point transfers between ranks, and functions that build rounds from rounds.

Rules
1. The message, a flat buffer of the same length on every rank, is cut into `num_blocks` blocks (`cut`).
2. A round's transfers are concurrent: each sends what its source held before the round. The target folds what
   arrives into its own blocks, in the order of the round, or overwrites them.
3. Folding is commutative, and the smaller rank's value is the left operand. So two ranks that exchange and fold the
   same two values hold the same bits.
4. What overwrites is final. A rank that sent a block so, or received it so, neither folds into it nor sends it
   to be folded again. (A 16-bit message relies on it: partial sums travel as 32 bits, results as 16.)
5. A rank does not overwrite, in one round, a block that it sends or receives otherwise in that round.

Tests follow every schedule, and check that it keeps these rules. Nothing checks them while training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import NamedTuple

HEADER_BYTES = 128
"""Size of the header that describes its sender's collective. It is sent with a rank's first message, and with the
first message that a rank receives (`Schedule.introduces`), so that ranks in different collectives notice."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of one round: blocks `first` to `last` (excluded) go from `source` to `target`."""

    source: int
    target: int
    first: int
    last: int
    fold: bool
    """Whether the target folds what it receives into its own blocks; else it overwrites them."""


Round = tuple[Transfer, ...]
Rounds = tuple[Round, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The rounds of one collective over `num_ranks` ranks; equal only to itself."""

    name: str
    num_ranks: int
    num_blocks: int
    rounds: tuple[Round, ...]

    @cached_property
    def partial(self) -> tuple[tuple[bool, ...], ...]:
        """Return which transfers carry a partial result, by round: one that was folded before and is folded again."""
        folded: set[tuple[int, int]] = set()
        answer = []
        for transfers in self.rounds:
            answer.append(
                tuple(
                    transfer.fold and any((transfer.source, block) in folded for block in _blocks(transfer))
                    for transfer in transfers
                )
            )
            for transfer in transfers:
                if transfer.fold:
                    folded.update((transfer.target, block) for block in _blocks(transfer))
        return tuple(answer)

    @cached_property
    def introduces(self) -> tuple[tuple[bool, ...], ...]:
        """Return which transfers are their source's first sent or their target's first received, by round."""
        sent: set[int] = set()
        received: set[int] = set()
        answer = []
        for transfers in self.rounds:
            answer.append(tuple(t.source not in sent or t.target not in received for t in transfers))
            sent.update(transfer.source for transfer in transfers)
            received.update(transfer.target for transfer in transfers)
        return tuple(answer)

    @cached_property
    def folds(self) -> bool:
        """Return whether anything is folded."""
        return any(transfer.fold for transfers in self.rounds for transfer in transfers)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.num_ranks} ranks, {self.num_blocks} blocks"]
        for number, transfers in enumerate(self.rounds):
            words = ", ".join(
                f"{t.source}{'+>' if t.fold else '->'}{t.target} [{t.first},{t.last})" for t in transfers
            )
            lines.append(f"  round {number}: {words}")
        return "\n".join(lines)


def _blocks(transfer: Transfer) -> range:
    return range(transfer.first, transfer.last)


def cut(num_elements: int, num_blocks: int) -> tuple[int, ...]:
    """Return where blocks begin and end: block b is elements [cut[b], cut[b + 1]).

    Sizes differ by at most 1, and the first blocks are the longer ones. A message may have no elements.
    """
    size, longer = divmod(num_elements, num_blocks)
    return tuple(block * size + min(block, longer) for block in range(num_blocks + 1))


def mirror(rounds: Iterable[Round]) -> Rounds:
    """Run backwards: the last round first, targets send to sources, and what overwrote is folded (or vice versa).

    The copies of a block spread from its owner along a tree. Backwards, every rank's contribution follows the
    same tree to the owner: an all-gather becomes a reduce-scatter, a broadcast a reduce, at the same cost.
    """
    return tuple(
        tuple(replace(t, source=t.target, target=t.source, fold=not t.fold) for t in transfers)
        for transfers in reversed(tuple(rounds))
    )


class Collectives(NamedTuple):
    """An all-gather, and the all-reduce that follows from it, each for a number of ranks."""

    all_gather: Callable[[int], Schedule]
    all_reduce: Callable[[int], Schedule]


def from_gather(name: str, gather: Callable[[int], Rounds]) -> Collectives:
    """Derive an all-reduce from the rounds of an all-gather, in which rank r's block r reaches every rank.

    Their mirror image is a reduce-scatter: it leaves block r of the reduction on rank r. An all-reduce is both.
    """

    @lru_cache(maxsize=32)
    def all_gather(num_ranks: int) -> Schedule:
        return Schedule(f"all_gather_{name}", num_ranks, num_ranks, gather(num_ranks))

    @lru_cache(maxsize=32)
    def all_reduce(num_ranks: int) -> Schedule:
        rounds = gather(num_ranks)
        return Schedule(name, num_ranks, num_ranks, mirror(rounds) + rounds)

    return Collectives(all_gather, all_reduce)


def place(rounds: Iterable[Round], ranks: Sequence[int], first_block: int) -> Rounds:
    """Let `ranks` play ranks 0, 1, ... of `rounds`, on the blocks from `first_block` on."""
    return tuple(
        tuple(
            Transfer(ranks[t.source], ranks[t.target], first_block + t.first, first_block + t.last, t.fold)
            for t in transfers
        )
        for transfers in rounds
    )


def side_by_side(parts: Iterable[Rounds]) -> Rounds:
    """Return the first rounds of all `parts` as one round, then the second ones, and so on."""
    return tuple(
        tuple(transfer for transfers in together for transfer in transfers)
        for together in zip_longest(*parts, fillvalue=())
    )

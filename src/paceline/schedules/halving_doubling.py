"""Recursive halving-doubling, with binary blocks for any number of ranks.

Halving, round t: ranks at distance 2^t, which hold the same range, send each other the half that they do not
keep. After log2 P rounds each holds a P-th, reduced; the all-gather is the mirror image.
Binary blocks: the ranks form groups of the sizes of P's binary digits, the largest first, and each group halves by
itself. A group that is done sends its result, range by range, to the next larger group. It does so in a round that the
larger group needs anyway, as its members already know which range they will keep. So a number of ranks that is no
power of two takes no further round.

Rounds: 2 floor(log2 P).
Bytes sent per rank of a group of s ranks, n the message: 2(s-1)/s n, and n/s more for each neighbour group.
The first, largest messages go to the nearest ranks, which may share a host.

Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 4.1, where the groups are
joined in an extra round each way; Thakur, Rabenseifner & Gropp 2005.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from paceline.schedules.schedule import Round, Rounds, Schedule, Transfer, mirror


def _groups(num_ranks: int) -> list[range]:
    groups = []
    first = 0
    for exponent in reversed(range(num_ranks.bit_length())):
        if num_ranks >> exponent & 1:
            groups.append(range(first, first + (1 << exponent)))
            first += 1 << exponent
    return groups


def kept(member: int, num_halvings: int, num_blocks: int) -> tuple[int, int]:
    """Return the range that a group's member holds after so many halvings: bit t of its number chose half t."""
    first, size = 0, num_blocks
    for t in range(num_halvings):
        size //= 2
        first += (member >> t & 1) * size
    return first, first + size


def _halve(group: range, t: int, num_blocks: int) -> list[Transfer]:
    """Let every member send its partner at distance 2^t the half that the partner keeps."""
    return [
        Transfer(group[i], group[i ^ 1 << t], *kept(i ^ 1 << t, t + 1, num_blocks), fold=True)
        for i in range(len(group))
    ]


def _join(larger: range, smaller: range, num_blocks: int) -> list[Transfer]:
    owner = {
        kept(i, _log2(smaller), num_blocks)[0] * len(smaller) // num_blocks: rank
        for i, rank in enumerate(smaller)
    }
    transfers = []
    for i, target in enumerate(larger):
        first, last = kept(i, _log2(larger), num_blocks)
        transfers.append(Transfer(owner[first * len(smaller) // num_blocks], target, first, last, fold=True))
    return transfers


def _log2(group: range) -> int:
    return len(group).bit_length() - 1


def _reduce_to_owners(num_ranks: int) -> tuple[int, Rounds]:
    groups = _groups(num_ranks)
    num_blocks = len(groups[0])
    rounds: list[Round] = []
    for t in range(_log2(groups[0])):
        transfers = [
            transfer for group in groups if t < _log2(group) for transfer in _halve(group, t, num_blocks)
        ]
        for larger, smaller in pairwise(groups):
            if t == _log2(smaller):
                transfers += _join(larger, smaller, num_blocks)
        rounds.append(tuple(transfers))
    return num_blocks, tuple(rounds)


@lru_cache(maxsize=32)
def all_reduce(num_ranks: int) -> Schedule:
    """Halve to a reduce-scatter in the largest group, then the same backwards."""
    num_blocks, reduce = _reduce_to_owners(num_ranks)
    return Schedule("halving_doubling", num_ranks, num_blocks, reduce + mirror(reduce))

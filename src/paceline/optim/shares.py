"""The division of parameters among ranks: which rank steps which elements, and in which messages they travel.

Rules
1. A parameter is seen as its memory: elements in the order in which they lie there. A `Part` is a run of them.
2. Where an optimizer works element by element, every rank owns as many elements as any other, give or take `ALIGNED`
   for each boundary. Boundaries are multiples of `ALIGNED`. So vector instructions treat each element as they would in
   the whole parameter, and a fused step has the same bits.
3. Where an optimizer needs whole parameters, each is owned by one rank. The costliest is given first, always to the
   rank that has least to do.
4. The division depends on the parameters and the number of ranks alone, so all ranks compute the same one.
5. A parameter is complete on its owner before its first message leaves.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.reductions.reduction import real_numel

ALIGNED = 64  # elements
LARGE_ELEMENTS = 1024 * 1024  # a parameter with more has exchanges of its own, and is gathered where it lies
MESSAGE_ELEMENTS = 2 * 1024 * 1024  # of one rank, at most, in shared memory
# Between hosts, where a ring passes on each part of a message as it arrives. Shorter messages let the forward begin
# earlier, but each costs an optimizer's call. With a quarter of it, steps on four hosts take about a tenth longer.
NETWORK_ELEMENTS = 1024 * 1024


@dataclass(frozen=True)
class Part:
    """The elements start <= i < stop of the memory of a parameter, by its index among the optimizer's."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Exchange:
    """One all-gather: what each rank sends, in order, padded to `length` elements.

    With `in_place` each rank has one part, all as long, and it is sent and received where it lies.
    """

    parts: tuple[tuple[Part, ...], ...]
    length: int
    in_place: bool = False


@dataclass(frozen=True)
class Division:
    """The exchanges that bring every parameter to every rank, and what each rank steps before each of them."""

    exchanges: tuple[Exchange, ...]
    # By exchange, by rank: the parts to step; whole parameters where the optimizer needs these.
    stepped: tuple[tuple[tuple[Part, ...], ...], ...]

    def owned_by(self, rank: int) -> list[Part]:
        """Return all parts that this rank steps."""
        return [part for by_rank in self.stepped for part in by_rank[rank]]


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's elements lie in its memory without gaps or overlaps, in any order."""
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride() and not tensor.is_sparse


def can_be_cut(parameter: Tensor) -> bool:
    """Return whether a boundary may lie within the parameter."""
    return not parameter.is_complex() and parameter.numel() > ALIGNED


def memory_of(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements as they lie in memory: an alias, real, shape (N,)."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def real_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of the tensor's memory."""
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def divide(
    parameters: Sequence[Tensor], indices: Sequence[int], num_ranks: int, between_hosts: bool = False
) -> Division:
    """Divide these parameters of an optimizer that works element by element (rule 2)."""
    most = NETWORK_ELEMENTS if between_hosts else MESSAGE_ELEMENTS
    large = num_ranks * most if between_hosts else LARGE_ELEMENTS
    exchanges: list[Exchange] = []
    stepped: list[tuple[tuple[Part, ...], ...]] = []
    rest: list[Part] = []
    for index in indices:
        parameter = parameters[index]
        length, start = real_numel(parameter), 0
        if length > large and can_be_cut(parameter):
            share = length // num_ranks // ALIGNED * ALIGNED
            parts = tuple((Part(index, share * rank, share * (rank + 1)),) for rank in range(num_ranks))
            start = share * num_ranks
            for begin in range(0, share, most):
                end = min(begin + most, share)
                sent = tuple((Part(index, own.start + begin, own.start + end),) for (own,) in parts)
                exchanges.append(Exchange(sent, end - begin, in_place=True))
                stepped.append(((),) * num_ranks if begin else parts)
        if start < length:
            rest.append(Part(index, start, length))
    for alike in _by_kind(parameters, rest):
        for message in filter(None, _cut(parameters, alike, _evenly(alike, num_ranks * most))):
            shares = _cut(parameters, message, _evenly_into(message, num_ranks))
            exchanges.append(Exchange(tuple(map(tuple, shares)), max(map(_length, shares))))
            stepped.append(exchanges[-1].parts)
    return Division(tuple(exchanges), tuple(stepped))


def divide_whole(
    parameters: Sequence[Tensor],
    indices: Sequence[int],
    num_ranks: int,
    costs: Sequence[float],
    between_hosts: bool = False,
) -> Division:
    """Give each of these parameters to one rank as a whole (rule 3); `costs` are theirs, in any unit."""
    owner, load = {}, [0.0] * num_ranks
    for cost, index in sorted(zip(costs, indices, strict=True), key=lambda pair: (-pair[0], pair[1])):
        owner[index] = rank = load.index(min(load))
        load[rank] += cost
    exchanges: list[Exchange] = []
    whole = [Part(index, 0, real_numel(parameters[index])) for index in indices]
    for alike in _by_kind(parameters, whole):
        queues = [[part for part in alike if owner[part.index] == rank] for rank in range(num_ranks)]
        cut = [_chunks(queue, NETWORK_ELEMENTS if between_hosts else MESSAGE_ELEMENTS) for queue in queues]
        messages = itertools.zip_longest(*cut, fillvalue=[])
        exchanges += [Exchange(tuple(map(tuple, shares)), max(map(_length, shares))) for shares in messages]
    stepped = [
        tuple(tuple(Part(p.index, 0, real_numel(parameters[p.index])) for p in own if not p.start) for own in e.parts)
        for e in exchanges
    ]  # fmt: skip
    return Division(tuple(exchanges), tuple(stepped))


def _length(parts: Iterable[Part]) -> int:
    return sum(map(len, parts))


def _by_kind(parameters: Sequence[Tensor], parts: Iterable[Part]) -> list[list[Part]]:
    """Return the parts that may travel in one message: of one dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Part]] = {}
    for part in parts:
        parameter = parameters[part.index]
        kinds.setdefault((real_dtype(parameter), parameter.device), []).append(part)
    return list(kinds.values())


def _evenly(parts: Sequence[Part], step: int) -> list[int]:
    return list(range(step, _length(parts), step))


def _evenly_into(parts: Sequence[Part], count: int) -> list[int]:
    length = _length(parts)
    return [length * place // count for place in range(1, count)]


def _chunks(parts: Sequence[Part], most: int) -> list[list[Part]]:
    """Cut parts into messages. The cuts may be anywhere, because nothing is stepped by them."""
    return [chunk for chunk in _split(parts, _evenly(parts, most)) if chunk]


def _cut(parameters: Sequence[Tensor], parts: Sequence[Part], places: Sequence[int]) -> list[list[Part]]:
    """Cut a sequence of parts near these places, which count elements: at boundaries that rule 2 allows."""
    starts = list(itertools.accumulate(map(len, parts), initial=0))
    allowed = []
    for place in places:
        number = bisect.bisect_right(starts, place) - 1
        part = parts[number]
        if can_be_cut(parameters[part.index]):
            within = (part.start + place - starts[number]) // ALIGNED * ALIGNED - part.start
            allowed.append(starts[number] + max(within, 0))
        else:
            nearer_start = place - starts[number] < starts[number + 1] - place
            allowed.append(starts[number] if nearer_start else starts[number + 1])
    return _split(parts, allowed)


def _split(parts: Sequence[Part], places: Sequence[int]) -> list[list[Part]]:
    """Cut a sequence of parts at exactly these places, in ascending order; a piece may be empty."""
    pieces: list[list[Part]] = [[]]
    ends = iter([*places, _length(parts)])
    end, passed = next(ends), 0
    for part in parts:
        start = part.start
        while passed + part.stop - start > end:
            if end > passed:
                pieces[-1].append(Part(part.index, start, start + end - passed))
                start += end - passed
                passed = end
            pieces.append([])
            end = next(ends)
        if start < part.stop:
            pieces[-1].append(Part(part.index, start, part.stop))
            passed += part.stop - start
    pieces += [[] for _ in range(len(places) + 1 - len(pieces))]
    return pieces

"""Adasum of any number of inputs within one process: the reference that Adasum over ranks equals up to rounding.

The tree, for any n: Adasum(g[0:n]) = Adasum(Adasum(g[0:h]), Adasum(g[h:n])) with h = ceil(n / 2), each child weighted
by the number of its inputs (`operator.py`). For a power of two all weights are equal and it is the paper's tree.

What holds for every n
* Mutually orthogonal inputs: their sum. (By induction: both children lie in orthogonal subspaces.)
* Parallel inputs c_i v: their mean, as long as no partial mean is zero, for example when all c_i have one sign. (By
  induction: the weighted operator takes the mean of h inputs and that of n - h inputs to the mean of all.)
* Zero inputs: as without that rank, but for its weight. All zero: zero.
* Scaling all inputs scales the output.
* Swapping the two children of a node changes no bit if both have equally many inputs; nor does swapping the two inputs
  of a pair. Other permutations change the result: Adasum is not associative.
* Per tensor: no tensor's result depends on another tensor, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import ConfigurationError
from paceline_adasum.operator import (
    Segments,
    add_dots,
    add_peaks,
    coefficients,
    combine_into,
    new_dots,
    scales_of,
)


@torch.no_grad()
def combine(inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Adasum of several lists of tensors, one list a rank.

    Args:
        inputs: At least one list; tensor t has the same shape, dtype and device in all of them. Floating or complex
            (a complex tensor is a real vector of twice the length); unchanged.

    Returns:
        A new list of tensors like those of each input.

    Contract:
        Local. Equal to what `reduction="adasum"` gives `len(inputs)` ranks, up to rounding.

    Raises:
        ConfigurationError: No input, lists of different lengths, or a tensor that differs in shape, dtype or device.
    """
    _check(inputs)
    results: list[Tensor] = [torch.empty(0)] * len(inputs[0])
    for members in _alike(inputs[0]):
        flats = [_flatten([tensors[index] for index in members]) for tensors in inputs]
        segments = Segments(tuple(_real(inputs[0][index]).numel() for index in members))
        flat = _fold(flats, segments)
        for index, piece in zip(members, flat.split(segments.sizes), strict=True):
            results[index] = _like(piece, inputs[0][index])
    return results


def _fold(flats: list[Tensor], segments: Segments) -> Tensor:
    """Combine flat vectors as a tree does. Overwrites them."""
    if len(flats) == 1:
        return flats[0]
    left, right = (len(flats) + 1) // 2, len(flats) // 2
    a, b = _fold(flats[:left], segments), _fold(flats[left:], segments)
    chunks = segments.chunks(0, a.numel())
    scales = None
    if a.dtype == torch.float64:
        peaks = torch.zeros(len(segments.sizes), dtype=torch.float64, device=a.device)
        add_peaks(peaks, a, b, chunks)
        scales = scales_of(peaks)
    dots = new_dots(len(segments.sizes), a.device)
    add_dots(dots, a, b, chunks, scales)
    of_a, of_b = coefficients(dots, left, right)
    combine_into(a, b, of_a, of_b, chunks)
    return a


def _check(inputs: Sequence[Sequence[Tensor]]) -> None:
    if not inputs:
        raise ConfigurationError("Adasum of no input: give at least one list of tensors.")
    for number, tensors in enumerate(inputs):
        if len(tensors) != len(inputs[0]):
            raise ConfigurationError(
                f"input {number} has {len(tensors)} tensors, input 0 has {len(inputs[0])}; Adasum combines tensor by "
                "tensor."
            )
        for index, (mine, first) in enumerate(zip(tensors, inputs[0], strict=True)):
            if (mine.shape, mine.dtype, mine.device) != (first.shape, first.dtype, first.device):
                raise ConfigurationError(
                    f"tensor {index} of input {number} has shape {tuple(mine.shape)}, {mine.dtype} on {mine.device}; "
                    f"of input 0 {tuple(first.shape)}, {first.dtype} on {first.device}. They must be alike."
                )
            if mine.is_sparse or not (mine.is_floating_point() or mine.is_complex()):
                raise ConfigurationError(
                    f"tensor {index} of input {number} is {'sparse' if mine.is_sparse else mine.dtype}; Adasum needs "
                    "dense floating or complex tensors."
                )


def _alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of tensors of one dtype and device, which can share a flat vector."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)
    return list(groups.values())


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_real(tensor).reshape(-1) for tensor in tensors])


def _like(piece: Tensor, tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(piece.view(*tensor.shape, 2))
    return piece.view(tensor.shape)

"""Facts about a model and its inputs for recorders: names of layers, counts of samples, fingerprints of numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

_MOST_BYTES = 4096  # of a tensor
_MOST_TENSORS = 256


def fingerprint(module: Module) -> tuple[str, str]:
    """Return those of the parameters and of the buffers: equal bits give equal ones. Local; waits for a device.

    Of each tensor a part is taken, at most some thousand elements evenly spaced: a large model costs a millisecond.
    """
    return _of(module.parameters()), _of(module.buffers())


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite. Waits for a device."""
    return bool((tensor._values() if tensor.is_sparse else tensor).isfinite().all())


def _of(tensors: Iterable[Tensor]) -> str:
    every = [x.detach() for x in tensors if x.numel() and x.layout is torch.strided and not x.is_complex()]
    every = every[:: max(1, -(-len(every) // _MOST_TENSORS))]
    digest = hashlib.blake2b(digest_size=8)
    for tensor in every:
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()
        stride = max(1, flat.numel() * flat.element_size() // _MOST_BYTES)
        digest.update(flat[::stride].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if every else ""


def samples_and_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the numbers of samples and of tokens in a batch, None if unknown. Local; reads shapes only."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim():
            has_tokens = value.dim() > 1 and not value.is_floating_point() and not value.is_complex()
            return value.size(0), value.numel() if has_tokens else None
    return None, None


class BatchCounts:
    """The numbers of samples and tokens in the forwards of one step; None if unknown."""

    has_begun = False  # a forward was counted
    samples: int | None = None
    tokens: int | None = None

    def add(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        samples, tokens = samples_and_tokens(inputs, kwargs)
        if not self.has_begun:
            self.samples, self.tokens = samples, tokens
        elif samples is not None:
            self.samples = (self.samples or 0) + samples
            self.tokens = None if tokens is None else (self.tokens or 0) + tokens
        self.has_begun = True


_MOST = 64


def layer_of_each(module: Module) -> tuple[list[str], list[tuple[Parameter, int]]]:
    """Return the layers' names, in the order of registration, and for each trainable parameter its layer's index."""
    owners = [
        (name.rpartition(".")[0], parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    depth = _depth([owner for owner, _ in owners])
    labels: dict[str, int] = {}
    found = []
    for owner, parameter in owners:
        label = _cut(owner, depth) or type(module).__name__
        found.append((parameter, labels.setdefault(label, len(labels))))
    return list(labels), found


def range_of(names: Iterable[str]) -> str:
    """Return a name for the parameters of one bucket: their layer, or the first and the last one."""
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    if not owners:
        return ""
    return owners[0] if len(owners) == 1 else f"{owners[0]} to {owners[-1]}"


def _depth(owners: list[str]) -> int:
    deepest = max((owner.count(".") + 1 for owner in owners), default=1)
    return next(
        (depth for depth in range(deepest, 1, -1) if len({_cut(x, depth) for x in owners}) <= _MOST), 1
    )


def _cut(owner: str, depth: int) -> str:
    return ".".join(owner.split(".")[:depth])

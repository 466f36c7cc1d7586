"""Finding the tensors in what a forward returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.rpc import is_available as rpc_is_available
from torch.nn.utils.rnn import PackedSequence


def find_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, mappings, dataclasses, packed sequences; nothing from other objects."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, PackedSequence):
        yield output.data
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from find_tensors(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from find_tensors(getattr(output, field.name, None))
    elif rpc_is_available():
        yield from _remote_tensors(output)


def _remote_tensors(output: Any) -> Iterator[Tensor]:
    from torch.distributed.rpc import RRef  # noqa: PLC0415 (not in every build)

    if isinstance(output, RRef) and output.is_owner():
        yield from find_tensors(output.local_value())

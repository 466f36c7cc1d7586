"""A sharded optimizer's state as `torch.distributed.checkpoint` saves and loads it: each rank's own parts.

Rules
1. The keys are those that torch's functions give to an optimizer's state: "state", a parameter's name, the name of the
   value. So a plain optimizer's checkpoint loads into a sharded one, and the other way round.
2. A part is a run of a parameter's memory. It is described as boxes of the parameter's shape, for any strides. So the
   checkpoint has one tensor of that shape, whatever the number of ranks.
3. What is loaded is what the checkpoint's metadata list. So a parameter that had no state then gets none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim import Optimizer

from paceline.errors import ConfigurationError
from paceline.optim.shard import Sharded
from paceline.optim.shard_state import OwnPart
from paceline.optim.shares import Part
from paceline.reductions.reduction import real_numel


def sharded_state_dict(
    optimizer: Optimizer, model: Any, saved: Metadata | None = None, key: str = "optimizer"
) -> dict[str, Any]:
    """Return this rank's parts of an optimizer's state, for `torch.distributed.checkpoint` to save or to fill.

    To save, give what is returned to `dcp.save` or `dcp.async_save`. To load, pass the checkpoint's metadata, give what
    is returned to `dcp.load`, and then to `optimizer.load_state_dict`. Any number of ranks may load. The keys are those
    of torch's functions for the state of an optimizer, also for one that is not sharded.

    Args:
        optimizer: What `shard` returned, or a plain optimizer.
        model: The wrapped model whose parameters it steps.
        saved: What `dcp.FileSystemReader(folder).read_metadata()` returned: return memory for that checkpoint.
        key: The name under which that checkpoint has the optimizer's state.

    Contract:
        Every rank, between two steps.  Blocks: if the ranks have changed, until their parts have moved.

    Raises:
        ConfigurationError: The checkpoint has no state under that name, or one of other shapes; nothing was changed.
    """
    if isinstance(optimizer, Sharded):
        own = optimizer.own_parts(moves=saved is None)
    else:
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = [
            OwnPart(each, Part(index, 0, real_numel(each)), is_whole=True, kept=optimizer.state.get(each, {}))
            for index, each in enumerate(stepped)
        ]
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    for group in optimizer.param_groups:
        for each in group["params"]:
            if id(each) not in names:
                raise ConfigurationError(
                    f"sharded_state_dict(optimizer, model): a parameter of shape {tuple(each.shape)} is not the "
                    "model's. Pass the model whose parameters this optimizer steps."
                )
    by_name: dict[str, list[OwnPart]] = {}
    for part in own:
        by_name.setdefault(names[id(part.parameter)], []).append(part)
    if saved is not None:
        return _memory_for(saved, key, by_name)
    state = {name: {value: _held(parts, value) for value in parts[0].kept} for name, parts in by_name.items()}
    groups = [
        {**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": {name: kept for name, kept in state.items() if kept}, "param_groups": groups}


def _held(parts: Sequence[OwnPart], name: str) -> Any:
    """Return what this rank keeps under a name for a parameter: its elements, or what all parts have alike."""
    values = [part.kept[name] for part in parts]
    if any(map(OwnPart.has_elements, parts, values)):
        return HeldParts.of_runs(parts, values[0] if len(values) == 1 else torch.cat(values))
    return values[0]


def _memory_for(saved: Metadata, key: str, by_name: dict[str, list[OwnPart]]) -> dict[str, Any]:
    """Return the tensors of these parts that `dcp.load` fills from what a checkpoint has under a key (rule 3)."""
    root, found = tuple(key.split(".")), {}
    for flat, path in (saved.planner_data or {}).items():
        if isinstance(path, tuple) and path[: len(root)] == root:
            found[path[len(root) :]] = saved.state_dict_metadata[flat]
    if not found:
        names = sorted(
            {str(path[0]) for path in (saved.planner_data or {}).values() if isinstance(path, tuple)}
        )
        raise ConfigurationError(
            f"sharded_state_dict(..., key={key!r}): the checkpoint has nothing of that name, but {names}. Pass the "
            "name under which the optimizer's state was given to dcp.save."
        )
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for path, stored in found.items():
        if path[0] == "param_groups":
            groups.setdefault(int(path[1]), {})[str(path[2])] = _memory(stored, None, key)
        elif path[0] == "state" and path[1] in by_name:
            name, value = str(path[1]), str(path[2])
            state.setdefault(name, {})[value] = _memory(stored, by_name[name], f"{name}, {value}")
    return {"state": state, "param_groups": [groups[place] for place in sorted(groups)]}


def _memory(stored: Any, parts: Sequence[OwnPart] | None, what: str) -> Any:
    if not isinstance(stored, TensorStorageMetadata):
        return None  # which dcp.load replaces
    dtype = stored.properties.dtype
    if parts is None or not stored.size:
        return torch.empty(stored.size, dtype=dtype)
    parameter = parts[0].parameter
    has_its_shape = stored.size == parameter.shape
    if parts[0].is_whole:
        like = parameter if has_its_shape else torch.empty(stored.size, device=parameter.device)
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    if not has_its_shape:
        raise ConfigurationError(
            f"the checkpoint's optimizer state has the shape {tuple(stored.size)} for {what}, and the parameter has "
            f"{tuple(parameter.shape)}. Load the checkpoint of a model like this one."
        )
    length = sum(len(each.part) for each in parts)
    return _PartsToLoad.of_runs(parts, torch.empty(length, dtype=dtype, device=parameter.device))


class HeldParts(Tensor):
    """The elements of a parameter's state that this rank holds, run behind run, shape (N,).

    `torch.distributed.checkpoint` takes it for boxes of a tensor of the parameter's shape, through the methods that it
    asks a `DTensor` for.
    """

    parts: list[tuple[int, int, int]]  # of the optimizer's parameters: index, start and stop
    shape_of_all: tuple[int, ...]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]  # where each begins, and how large it is
    memory_order: list[int]  # the dimensions, that of the largest stride first

    @classmethod
    def of_runs(cls, parts: Sequence[OwnPart], elements: Tensor) -> HeldParts:
        """Return an alias of the elements, which are those of these parts."""
        parameter = parts[0].parameter
        held = elements.detach().as_subclass(cls)
        held.parts = [(each.part.index, each.part.start, each.part.stop) for each in parts]
        held.shape_of_all = tuple(parameter.shape)
        held.memory_order = sorted(range(parameter.dim()), key=parameter.stride().__getitem__, reverse=True)
        in_order = [parameter.shape[dim] for dim in held.memory_order]
        held.boxes = []
        for box in itertools.chain.from_iterable(
            _boxes(start, stop, in_order) for _, start, stop in held.parts
        ):
            start, size = (
                [values[held.memory_order.index(d)] for d in range(parameter.dim())] for values in box
            )
            held.boxes.append((tuple(start), tuple(size)))
        return held

    def of(self, part: Part) -> Tensor:
        """Return an alias of one part's elements."""
        if (wanted := (part.index, part.start, part.stop)) not in self.parts:
            raise ConfigurationError(
                f"load_state_dict(state): the state was made for the parts {self.parts} (parameter, start, stop) of "
                f"this rank, which steps {wanted} now. Call sharded_state_dict(optimizer, model, saved) and dcp.load "
                "again, with the parameters in the order in which they were saved."
            )
        before = itertools.takewhile(lambda each: each != wanted, self.parts)
        begin = sum(stop - start for _, start, stop in before)
        return self.as_subclass(Tensor)[begin : begin + len(part)]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.as_subclass(Tensor))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.shape_of_all)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        begin = 0
        for start, size in self.boxes:
            if torch.Size(start) == index.offset:
                strides, stride = [0] * len(size), 1
                for dim in reversed(self.memory_order):
                    strides[dim], stride = stride, stride * size[dim]
                memory = self.as_subclass(Tensor)
                return memory.as_strided(size, strides, memory.storage_offset() + begin)
            begin += math.prod(size)
        raise LookupError(f"{index.fqn}: this rank holds no box that begins at {index.offset}")


class _PartsToLoad(HeldParts):
    """Such elements that `dcp.load` fills. It compares their size with that in the checkpoint."""

    def size(self, *_: Any) -> Any:
        return torch.Size(self.shape_of_all)


def _boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Cut a run of a contiguous tensor's memory into boxes, in order: the place where each begins, and its shape."""
    if not shape:
        yield [], []
        return
    row = math.prod(shape[1:])
    while start < stop:
        first, within = divmod(start, row)
        num_rows = 0 if within else (stop - start) // row
        if num_rows:
            yield [first, *[0] * len(shape[1:])], [num_rows, *shape[1:]]
            start += num_rows * row
        else:
            end = min(stop, (first + 1) * row)
            for place, size in _boxes(within, within + end - start, shape[1:]):
                yield [first, *place], [1, *size]
            start = end

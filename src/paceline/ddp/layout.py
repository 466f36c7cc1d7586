"""The layout of gradients: a buffer per dtype and device, cut into buckets, and again once the order is known."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from paceline.ddp.bucket import Bucket, is_large, real_dtype
from paceline.ddp.dense_bucket import DenseBucket
from paceline.ddp.droppable import Unit
from paceline.ddp.sparse_bucket import SparseBucket
from paceline.ddp.verdict import StatusVector
from paceline.planning.bucket_assignment import BucketCaps, GradientSpec, assign_buckets
from paceline.reductions.reduction import real_numel

Key = tuple[torch.dtype, torch.device]
Allocate = Callable[[int, torch.dtype, torch.device], Tensor]  # zeros, 1-D, where communication likes them


@dataclass(frozen=True)
class ManagedParameters:
    """The parameters whose gradients are synchronized, in registration order."""

    parameters: tuple[Parameter, ...]  # each once, however often the module refers to it
    names: tuple[str, ...]  # their names in the module
    sparse: tuple[bool, ...]  # whether the gradient is expected to be a sparse tensor
    delayed: frozenset[int] = frozenset()  # indices of those that are to be reduced after all others
    # By index, the number of what can be skipped as a whole, for those that belong to such a unit.
    units: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: Module,
        ignored: set[str],
        delayed: Sequence[Parameter],
        droppable: Sequence[Unit] = (),
        kept: Container[int] = (),
    ) -> ManagedParameters:
        """Return a module's parameters that are trainable, or `kept` by `id`, and not ignored by name; each once."""
        delayed_ids = {id(parameter) for parameter in delayed}
        unit_of = {id(p): number for number, unit in enumerate(droppable) for p in unit.parameters}
        found: dict[int, tuple[Parameter, str, bool]] = {}
        for prefix, child in module.named_modules():
            sparse = isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.sparse
            for local_name, parameter in child.named_parameters(recurse=False):
                name = f"{prefix}.{local_name}" if prefix else local_name
                is_wanted = parameter.requires_grad or id(parameter) in kept
                if is_wanted and name not in ignored and id(parameter) not in found:
                    found[id(parameter)] = (parameter, name, sparse)
        return cls(
            parameters=tuple(parameter for parameter, _, _ in found.values()),
            names=tuple(name for _, name, _ in found.values()),
            sparse=tuple(sparse for _, _, sparse in found.values()),
            delayed=frozenset(index for index, key in enumerate(found) if key in delayed_ids),
            units={index: unit_of[key] for index, key in enumerate(found) if key in unit_of},
        )

    def __len__(self) -> int:
        return len(self.parameters)

    def named(self) -> dict[str, Parameter]:
        return dict(zip(self.names, self.parameters, strict=True))

    def key(self, index: int) -> Key:
        parameter = self.parameters[index]
        return parameter.dtype, parameter.device

    def specs(self) -> list[GradientSpec]:
        return [
            GradientSpec(
                size_bytes=parameter.numel() * parameter.element_size(),
                key=(self.key(index), index in self.delayed),
                sparse=self.sparse[index],
                unit=self.units.get(index),
            )
            for index, parameter in enumerate(self.parameters)
        ]


class GradientMemory:
    """The flat buffers, made by `allocate`. Cutting them anew moves no memory: only the boundaries change."""

    def __init__(
        self, managed: ManagedParameters, caps: BucketCaps, status: StatusVector, allocate: Allocate
    ) -> None:
        self._managed = managed
        self._caps = caps
        self._status = status
        self._has_been_cut = False
        self._flat: dict[Key, Tensor] = {}
        for key, num_elements in self._elements_by_key().items():
            dtype, device = key
            self._flat[key] = allocate(num_elements + status.num_words, real_dtype(dtype), device)

    def _elements_by_key(self) -> dict[Key, int]:
        elements: dict[Key, int] = {}
        for index, parameter in enumerate(self._managed.parameters):
            if not self._managed.sparse[index]:
                key = self._managed.key(index)
                elements[key] = elements.get(key, 0) + real_numel(parameter)
        return elements

    def cut(self, order: Sequence[int]) -> list[Bucket]:
        """Lay the gradients out for this ready order; the status words lie behind the last bucket where that is dense.

        Gradients that are alive move along; old buckets' views are worthless afterwards. Local; the same on every rank.
        """
        managed = self._managed
        with torch._C.DisableTorchFunctionSubclass():  # a part of a gradient moves along, too
            alive = self._take_alive()
        first = [index for index in order if index not in managed.delayed]
        last = [index for index in order if index in managed.delayed]
        plan = assign_buckets(managed.specs(), first + last, self._caps)
        used = dict.fromkeys(self._flat, 0)
        buckets: list[Bucket] = []
        for place, members in enumerate(plan):
            parameters = [managed.parameters[index] for index in members]
            if managed.sparse[members[0]]:
                buckets.append(SparseBucket(place, members[0], parameters[0]))
                continue
            large_first = sorted(members, key=lambda index: not is_large(managed.parameters[index]))
            has_words = place == len(plan) - 1 and self._status.apart_on is None
            num_words = self._status.num_words if has_words else 0
            buckets.append(self._dense_bucket(place, large_first, used, num_words))
        words = buckets[-1].words
        if words is None:
            where = self._status.apart_on or buckets[-1].parameters[0].device
            words = torch.zeros(self._status.num_words, device=where)
        self._status.place(words)
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in buckets:
                bucket.take_over(alive)
        return buckets

    def _take_alive(self) -> dict[int, Tensor]:
        alive: dict[int, Tensor] = {}
        for parameter in self._managed.parameters if self._has_been_cut else ():
            gradient = parameter.grad
            # One with a graph (create_graph) is a tensor of its own, and stays one.
            if gradient is not None and not (gradient.is_sparse or gradient.requires_grad):
                alive[id(parameter)] = gradient.clone()
                parameter.grad = None
        self._has_been_cut = True
        return alive

    def _dense_bucket(
        self, place: int, members: list[int], used: dict[Key, int], num_words: int
    ) -> DenseBucket:
        key = self._managed.key(members[0])
        parameters = [self._managed.parameters[index] for index in members]
        start = used[key]
        stop = start + sum(real_numel(parameter) for parameter in parameters)
        used[key] = stop
        return DenseBucket(place, members, parameters, self._flat[key][start : stop + num_words], num_words)

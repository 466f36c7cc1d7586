"""Data parallelism within a larger device mesh, whose other dimensions shard the parameters of some layers.

Rules
1. The wrapper, optimizers and checkpoints see the local shard of such a parameter: an ordinary `Parameter`.
2. The layer finds a `DTensor` of that shard under the parameter's name, also after forward: activation checkpointing
   runs the layer again within backward.
3. Every forward can make the `DTensor`, also an evaluation, and it always leads gradients to the shard. Torch's is
   made once. If that is in an evaluation, the parameter never gets a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def make_shards_local(module: Module, device_mesh: Any) -> None:
    """Put local shards in the place of `DTensor` parameters, if the mesh is a part of a larger one. Local."""
    if device_mesh is None or _root_of(device_mesh) == device_mesh:
        return
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 (heavy)

    shards: dict[Tensor, Parameter] = {}
    found: list[_ShardedParameter] = []
    for part in module.modules():
        own: dict[str, Any] = part._parameters
        for name, parameter in own.items():
            if isinstance(parameter, DTensor):
                shard = Parameter(parameter.to_local().detach(), parameter.requires_grad)
                own[name] = shards.setdefault(parameter, shard)
                found.append(_ShardedParameter(part, name, parameter._spec))
    if found:
        module.register_forward_pre_hook(_SeeDTensors(found))


def _root_of(device_mesh: Any) -> Any:
    if hasattr(device_mesh, "_get_root_mesh"):
        return device_mesh._get_root_mesh()
    meshes: Any = torch.distributed.device_mesh  # torch 2.8 keeps roots in a table
    return meshes._mesh_resources.get_root_mesh(device_mesh)


@dataclass
class _ShardedParameter:
    """An attribute of a layer: a shard among its parameters, and a `DTensor` of it in front of that."""

    part: Module
    name: str
    spec: DTensorSpec  # how the whole is sharded
    made_of: tuple[int, int, bool] = (0, 0, False)  # of which tensor and memory, and whether gradients pass

    def refresh(self) -> None:
        """Let the layer see a `DTensor` of what is its parameter now: the shard, or what replaces it for a call."""
        shard: Any = self.part._parameters.get(self.name)
        if shard is None:
            return
        now = id(shard), shard.data_ptr(), shard.requires_grad
        if self.made_of != now or self.name not in self.part.__dict__:
            with torch.inference_mode(False), torch.enable_grad():
                self.part.__dict__[self.name] = self._whole(shard)
            self.made_of = now

    def _whole(self, shard: Tensor) -> DTensor:
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 (heavy)
        from torch.distributed.tensor.parallel._data_parallel_utils import sync_grad_hook  # noqa: PLC0415

        passing = shard.view_as(shard)
        if passing.requires_grad:
            passing.register_hook(sync_grad_hook)
        spec = self.spec
        return DTensor.from_local(
            passing, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )


class _SeeDTensors:
    """The hook in front of the module's forward."""

    def __init__(self, found: list[_ShardedParameter]) -> None:
        self._parameters_seen = found

    def __call__(self, _module: Module, _inputs: Any) -> None:
        for each in self._parameters_seen:
            each.refresh()

    # Dynamo would not see what is put in front of parameters. This is what `torch.compiler.disable` sets.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]

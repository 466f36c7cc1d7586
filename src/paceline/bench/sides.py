"""Who is compared with whom?

A side is a name for a way of wrapping a module. `--sides torch,torch` compares torch with itself: whatever
ratio that shows is noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.bench.errors import UnknownNameError


@dataclass(frozen=True)
class Side:
    """One way of wrapping a module."""

    family: str  # "none", "torch" or "ours"
    arguments: Mapping[str, Any] = field(default_factory=dict)


SIDES: dict[str, Side] = {
    "none": Side("none"),
    "torch": Side("torch"),
    "torch-view": Side("torch", {"gradient_as_bucket_view": True}),
    "torch-batched": Side("torch", {"gradient_as_bucket_view": True, "batched_grad_copy": True}),
    "torch-static": Side("torch", {"static_graph": True}),
    "torch-unused": Side("torch", {"find_unused_parameters": True}),
    "ours": Side("ours"),
    "ours-view": Side("ours", {"gradient_as_bucket_view": True}),
    "ours-static": Side("ours", {"static_graph": True}),
    "ours-2": Side("ours", {"bucket_cap_mb_list": [1, 2]}),  # fine buckets, as for several hosts
    "torch-2": Side("torch", {"bucket_cap_mb_list": [1, 2]}),
    "ours-unused": Side("ours", {"find_unused_parameters": True}),
}


def wrap(side_name: str, module: nn.Module, **arguments: Any) -> nn.Module:
    """Return `module` under data parallelism of the named side; `arguments` are added to the side's own.

    Contract:
        Collective (the parameters are broadcast), except for "none".
    """
    side = SIDES[side_name]
    if side.family == "none":
        return module
    if side.family == "torch":
        return TorchDDP(module, **{**side.arguments, **arguments})
    from paceline import DistributedDataParallel as OurDDP  # late: a torch-only run needs no paceline

    return OurDDP(module, **{**side.arguments, **arguments})


def parse_sides(text: str) -> tuple[str, ...]:
    """Turn "torch,ours" into names.

    Raises:
        UnknownNameError: a name is not in the table.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in SIDES]
    if unknown or not names:
        raise UnknownNameError(
            f"--sides {text!r} has no side called {unknown}. There are: {', '.join(SIDES)}."
        )
    return names


def labels(side_names: tuple[str, ...]) -> tuple[str, ...]:
    """Return one distinct label per side, so that torch can be compared with itself."""
    seen: dict[str, int] = {}
    result = []
    for name in side_names:
        seen[name] = seen.get(name, 0) + 1
        result.append(
            name if seen[name] == 1 else f"{name} (again)" if seen[name] == 2 else f"{name} ({seen[name]})"
        )
    return tuple(result)

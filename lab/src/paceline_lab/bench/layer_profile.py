"""Computing times of a model's layers: recorded, given, or from published timings; kept as a JSON file.

Without a file, a total is divided. Forward gets a third and backward two thirds, since backward has two products for
each one of forward. The layers get parts in proportion to their operations.

A layer is a module that owns parameters itself, or one item of a ParameterList. A parameter that several modules
share belongs to the first one, which is the last to finish its gradient. Sizes and operations are found on torch's
meta device, without memory or arithmetic.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.errors import ConfigurationError
from paceline.given import parse_json
from paceline_lab.workloads import make_workload
from paceline_lab.workloads.workload import SizedWorkload, Workload
from paceline_plan import LayerTimes, RecordedWorkload

Shape = tuple[int, ...]
_TOUCHED_OPERATIONS = 4.0  # operations counted for each element that a normalisation or an embedding touches
BACKWARD_TO_FORWARD = 2.0
OPTIMIZER_TO_COMPUTE = 0.025  # Li et al. 2020, figure 6: .014 of .014 + .15 + .40
DEFAULT_OPERATIONS_PER_S = 7.5e12  # ResNet-50's below, 32 images: what one V100 did in float32


@dataclass(frozen=True)
class Layer:
    """One layer: its gradients become ready together.

    Attributes:
        name: The module's name in the model.
        shapes: One a parameter.
        operations: Floating-point operations of its forward, for one step of the workload's published size.
    """

    name: str
    shapes: tuple[Shape, ...]
    operations: float


def layers_of(workload: SizedWorkload) -> tuple[Layer, ...]:
    """Return the layers in the order of their registration, which is about that of forward."""
    with torch.device("meta"):
        model = workload.make_model()
    operations = workload.published().operations() or _count(workload.published())
    layers = []
    for name, (module, parameters) in owners(model).items():
        shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        if isinstance(module, nn.ParameterList):
            work = operations.get(name.rpartition(".")[0], 0.0) / len(module)
        else:
            work = operations.get(name, 0.0)
        layers.append(Layer(name, shapes, work))
    return tuple(layers)


def owners(model: nn.Module) -> dict[str, tuple[nn.Module, list[nn.Parameter]]]:
    """Return the layers of a model by name: the module and the parameters it owns, in the order of registration."""
    found: dict[str, tuple[nn.Module, list[nn.Parameter]]] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(id(parameter) for parameter in own)
        if isinstance(module, nn.ParameterList):
            found |= {f"{name}.{i}": (module, [parameter]) for i, parameter in enumerate(own)}
        elif own:
            found[name] = (module, own)
    return found


def _count(workload: Workload) -> Mapping[str, float]:
    """Run one forward on the meta device and count the operations of each module that owns parameters."""
    batch = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, workload.make_batch(0, 0))
    counted: dict[str, float] = {}
    with torch.device("meta"):
        model = workload.make_model()
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_hook(_counter(name, counted))
        workload.loss(model, batch, None)
        lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ParameterList)]
    for name, module in lists:  # containers, which have no forward
        counted[name] = float(sum(parameter.numel() for parameter in module.parameters()))
    return counted


def _counter(name: str, counted: dict[str, float]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if isinstance(module, nn.Conv2d | nn.Linear):
            each = 2.0 * module.weight[0].numel()  # a multiplication and an addition for each weight
        else:
            each = _TOUCHED_OPERATIONS
        counted[name] = counted.get(name, 0.0) + each * output.numel()

    return hook


@dataclass(frozen=True)
class Published:
    """Seconds of one step's forward and backward on one device, and who says so."""

    compute_s: float
    source: str


PUBLISHED = {
    "resnet50": Published(0.105, "Li et al. 2020, figure 7, fitted: one V100"),
    "bert": Published(0.324, "Li et al. 2020, figure 9: one V100"),
    "mlstm-4k": Published(
        0.94, "Puri et al. 2018: 40 GB in 20 h on 8 V100, 256 segments of 256 bytes, mixed precision"
    ),
    "mlstm-8k": Published(3.71, "mlstm-4k's published time, times the operations' ratio of 3.95"),
}


@dataclass(frozen=True)
class LayerTime:
    """One layer's gradients and seconds."""

    name: str
    shapes: tuple[Shape, ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Profile:
    """The computing times of a workload's layers.

    Attributes:
        workload: Name of the workload.
        source: Origin of the times, in words for a report.
        layers: The layers in the order of forward. Backward takes them in reverse.
        optimizer_s: Time of the optimizer after backward.
    """

    workload: str
    source: str
    layers: tuple[LayerTime, ...]
    optimizer_s: float

    def __post_init__(self) -> None:
        times = [self.optimizer_s, *[s for layer in self.layers for s in (layer.forward_s, layer.backward_s)]]
        if not self.layers or any(not 0 <= seconds < float("inf") for seconds in times):
            raise ConfigurationError(
                f"the profile of {self.workload} has {len(self.layers)} layers and times from {min(times)} to "
                f"{max(times)} s. It needs at least one layer, and no time below 0."
            )

    @property
    def forward_s(self) -> float:
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        return sum(layer.backward_s for layer in self.layers)

    def taking(self, compute_s: float) -> Profile:
        """Return the same proportions, with forward and backward of `compute_s` together."""
        if not 0 <= compute_s < float("inf"):
            raise ConfigurationError(f"--compute-s {compute_s} is not a time. Pass seconds, 0 or more.")
        before_s = self.forward_s + self.backward_s
        factor = compute_s / before_s if before_s else 0.0
        layers = tuple(
            dataclasses.replace(x, forward_s=x.forward_s * factor, backward_s=x.backward_s * factor)
            for x in self.layers
        )
        source = f"{compute_s:g} s, in the proportions of: {self.source}"
        return dataclasses.replace(self, layers=layers, optimizer_s=self.optimizer_s * factor, source=source)

    def save(self, path: Path) -> None:
        """Write it as a recorded workload, which `paceline plan` reads, with shapes beside the bytes."""
        layers = tuple(
            LayerTimes(x.name, x.forward_s, x.backward_s, tuple(4 * math.prod(shape) for shape in x.shapes))
            for x in self.layers
        )
        RecordedWorkload(self.workload, self.source, layers, self.optimizer_s).save(path)
        record = json.loads(path.read_text())
        for layer, timed in zip(record["layers"], self.layers, strict=True):
            layer["shapes"] = timed.shapes
        path.write_text(json.dumps(record, indent=1) + "\n")

    @classmethod
    def of_recording(cls, recorded: RecordedWorkload) -> Profile:
        """Return a recorded step as a chain of layers: its times, its bytes, its order of gradients.

        The micro-steps before the one that synchronizes, and loading, pass before the first layer's forward.
        """
        chain = [recorded.layers[index] for index in reversed(recorded.order)]
        layers = [
            LayerTime(
                x.name,
                tuple((max(1, math.ceil(size / 4)),) for size in x.gradient_bytes),
                x.forward_s,
                x.backward_s,
            )
            for x in chain
        ]
        before_s = recorded.num_micro_steps * recorded.other_s
        before_s += (recorded.num_micro_steps - 1) * (recorded.forward_s + recorded.backward_s)
        layers[0] = dataclasses.replace(layers[0], forward_s=layers[0].forward_s + before_s)
        return cls(recorded.name, recorded.source, tuple(layers), recorded.optimizer_s)

    @classmethod
    def load(cls, path: Path, workload: str) -> Profile:
        """Read a profile and check that it is one of this workload.

        Raises:
            ConfigurationError: It cannot be read, or its layers are not the model's.
        """
        try:
            record = parse_json(path.read_bytes())
            profile = cls(
                record["name"],
                record["source"],
                tuple(_layer_time(layer) for layer in record["layers"]),
                float(record["optimizer_s"]),
            )
        except OSError as error:
            raise ConfigurationError(f"the profile {path} cannot be read ({error.strerror}).") from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(
                f"{path} is not a profile ({type(error).__name__}: {error}). "
                f"`paceline bench profile --workload {workload} --out {path}` records one."
            ) from error
        profile.check_fits(layers_of(make_workload(workload)), path)
        return dataclasses.replace(profile, workload=workload)

    def check_fits(self, layers: tuple[Layer, ...], path: Path) -> None:
        """Refuse a profile whose layers are not these."""
        ours, theirs = [(x.name, x.shapes) for x in self.layers], [(x.name, x.shapes) for x in layers]
        if ours == theirs:
            return
        pairs = zip(ours, theirs, strict=False)
        different = next((pair for pair in pairs if pair[0] != pair[1]), None)
        detail = (
            f"it has {len(ours)} layers, the model {len(theirs)}"
            if different is None
            else f"it has {different[0][0]!r} {different[0][1]}, the model {different[1][0]!r} {different[1][1]}"
        )
        raise ConfigurationError(
            f"the profile {path} (of {self.workload}) does not fit the model: {detail}. Record one of this "
            "workload with `paceline bench profile`."
        )


def default_profile(workload: str) -> Profile:
    """Share out the published time of a step, or one from the number of operations, among the layers."""
    layers = layers_of(make_workload(workload))
    operations = sum(layer.operations for layer in layers)
    assumed_s = operations * (1 + BACKWARD_TO_FORWARD) / DEFAULT_OPERATIONS_PER_S
    published = PUBLISHED.get(workload) or Published(
        assumed_s, f"{operations:.3g} operations forward, three times that in all, at 7.5e12 a second"
    )
    forward_s = published.compute_s / (1 + BACKWARD_TO_FORWARD)
    shares = [layer.operations / operations for layer in layers]
    return Profile(
        workload,
        published.source,
        tuple(
            LayerTime(x.name, x.shapes, forward_s * share, forward_s * BACKWARD_TO_FORWARD * share)
            for x, share in zip(layers, shares, strict=True)
        ),
        published.compute_s * OPTIMIZER_TO_COMPUTE,
    )


def _layer_time(record: Any) -> LayerTime:
    shapes = tuple(tuple(int(size) for size in shape) for shape in record["shapes"])
    return LayerTime(record["name"], shapes, float(record["forward_s"]), float(record["backward_s"]))

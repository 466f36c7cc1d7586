"""Records a training script's steps as a trace that the planner reads: when each layer's forward and gradient is done.

Nothing of the script changes: torch's global hooks see the outermost module with parameters run forward, every
parameter's gradient arrive, and the optimizer step. A step's line is written when its optimizer is done, so that a
script that dies leaves what it had done. A forward after gradients that no optimizer has taken is a step's next
micro-step; the layers' times are the last one's.

The file's first line is a header with the layers, every other one a step: see `paceline_plan.workload`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from paceline.comm import RANKS_OF_HOST
from paceline.errors import ConfigurationError
from paceline.observe.device_times import DeviceClock, name_of
from paceline_plan.workload import NUM_WARM_UP, TRACE_FORMAT, TRACE_VERSION


class HostClock:
    """Times of a device that computes when it is told to."""

    def mark(self) -> Any:
        """Note this moment."""
        return time.perf_counter()

    def between_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks."""
        return float(end - start)


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """Return the clock for what this device computes."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


def record_workload(
    path: Path | str, num_steps: int | None = None, name: str | None = None
) -> WorkloadRecording:
    """Record from now on; the one line that a training script needs.

    Args:
        path: The trace to write; what was there is replaced by the first step.
        num_steps: Recorded after the warm-up; then recording ends. None: until `stop`, or the end of the process.
        name: The workload's; None: the script's file without its ending.

    Returns:
        What is recording: a context manager, or call its `stop`.

    Contract:
        Local: on one rank of a job, usually rank 0. Some hooks a layer slow steps down; on a GPU each is waited for.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    return WorkloadRecording(Path(path), num_steps, name)


class WorkloadRecording:
    """Hooks that are installed, and the step that is under way."""

    def __init__(self, path: Path, num_steps: int | None, name: str | None) -> None:
        try:
            self._file = path.open("w")
        except OSError as error:
            raise ConfigurationError(
                f"the trace {path} cannot be written ({error.strerror}). Pass another file."
            ) from error
        self._left = None if num_steps is None else num_steps + NUM_WARM_UP
        self._name = name
        self._on_end: Callable[[], None] | None = None
        self._model: _Model | None = None
        self._depth = 0
        self._idle_since: Any = None
        self.num_forwards = self.num_steps = 0
        self._handles: list[Any] = [
            torch_module.register_module_forward_pre_hook(self._before_forward),
            torch_module.register_module_forward_hook(self._after_forward, always_call=True),
            torch_optimizer.register_optimizer_step_pre_hook(self._before_step),
            torch_optimizer.register_optimizer_step_post_hook(self._after_step),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def when_done(self, action: Callable[[], None]) -> None:
        """Call `action` once the last step asked for has been written."""
        self._on_end = action

    def stop(self) -> None:
        """Take the hooks away and close the file. May be called twice."""
        for handle in [*self._handles, *(self._model.handles if self._model else ())]:
            handle.remove()
        self._handles = []
        self._file.close()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._depth == 0:
            trains = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
            if not trains or (self._model is not None and self._model.module is not module):
                return  # evaluation, a loss, or another model
            if self._model is None:
                self._model = _Model(module)
            self.num_forwards += 1  # so that a recording without steps can say what it saw
            self._model.begin(inputs)
        self._depth += 1

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._depth == 0:
            return
        assert self._model is not None
        self._depth -= 1
        self._model.note_forward(module)
        if self._depth == 0:
            self._model.after_forward = self._model.clock.mark()

    def _before_step(self, optimizer: Any, arguments: Any, more: Any) -> None:
        if self._model is None:
            return
        if self._model.gradient_marks:
            self._model.before_step = self._model.clock.mark()
        else:
            self._model.earlier.clear()  # whatever they were, this step is none that can be told

    def _after_step(self, optimizer: Any, arguments: Any, more: Any) -> None:
        model = self._model
        if model is None or model.before_step is None or not model.gradient_marks:
            return
        end = model.clock.mark()
        if self.num_steps == 0:
            self._write({"format": TRACE_FORMAT, "version": TRACE_VERSION, **model.header(self._name)})
        self._write({"warm_up": self.num_steps < NUM_WARM_UP, **model.line(self._idle_since, end)})
        self._idle_since = end
        model.earlier.clear()
        model.gradient_marks.clear()
        model.before_step = None
        self.num_steps += 1
        if self._left is not None and self.num_steps >= self._left:
            self.stop()
            if self._on_end is not None:
                self._on_end()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


@dataclass(frozen=True)
class _MicroStep:
    """The marks of a micro-step that is done, and its samples; None if unknown."""

    start: Any
    last_gradient: Any
    samples: int | None


class _Model:
    """The model's layers, and the marks of the step under way."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        first = next(p for p in module.parameters() if p.requires_grad)
        self.device = first.device
        self.clock = clock_of(self.device)
        self.layers = _layers(module)
        self.used: list[str] = []
        self._name_of = {id(owner): name for name, (owner, _) in self.layers.items()}
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(name))
            for name, (_, parameters) in self.layers.items()
            for parameter in parameters
        ]
        self.earlier: list[_MicroStep] = []  # of this step, before the one under way
        self.samples: int | None = None
        self.last_gradient: Any = None
        self.start: Any = None
        self.after_forward: Any = None
        self.before_step: Any = None
        self.forward_marks: dict[str, Any] = {}
        self.gradient_marks: dict[str, Any] = {}

    def _gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            self.gradient_marks[name] = self.last_gradient = self.clock.mark()

        return hook

    def begin(self, inputs: Any) -> None:
        if self.gradient_marks:
            self.earlier.append(self._micro_step())
        batch = next((x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.dim()), None)
        self.samples = None if batch is None else int(batch.shape[0])
        self.forward_marks.clear()
        self.gradient_marks.clear()
        self.start = self.clock.mark()

    def _micro_step(self) -> _MicroStep:
        return _MicroStep(self.start, self.last_gradient, self.samples)

    def note_forward(self, module: nn.Module) -> None:
        name = self._name_of.get(id(module))
        if name is not None:
            self.forward_marks[name] = self.clock.mark()

    def header(self, name: str | None) -> dict[str, Any]:
        """Return the header of a trace: the layers that got a gradient in the first step."""
        self.used = [layer for layer in self.layers if layer in self.gradient_marks]
        num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return {
            "name": name or Path(sys.argv[0]).stem,
            "device": f"{name_of(self.device)}, torch {torch.__version__}",
            "num_ranks": num_ranks,
            "ranks_of_host": _ranks_of_host(num_ranks),
            "layers": [
                {"name": x, "gradient_bytes": [p.numel() * p.element_size() for p in self.layers[x][1]]}
                for x in self.used
            ],
        }

    def line(self, idle_since: Any, end: Any) -> dict[str, Any]:
        """Return the seconds and samples of the step that ended. `idle_since` is the end of the step before, if any."""
        seconds = self.clock.between_s

        def since(start: Any, marks: dict[str, Any]) -> list[float]:
            return [seconds(start, marks[x]) if x in marks else 0.0 for x in self.used]

        micro_steps = [*self.earlier, self._micro_step()]
        samples = [x.samples for x in micro_steps if x.samples is not None]
        ends = [idle_since, *[x.last_gradient for x in self.earlier]]
        pauses = [(x, y.start) for x, y in zip(ends, micro_steps, strict=True) if x is not None]
        return {
            "samples": sum(samples) if len(samples) == len(micro_steps) else None,
            "earlier_s": [seconds(x.start, x.last_gradient) for x in self.earlier],
            "other_s": sum(seconds(*pause) for pause in pauses),
            "forward_s": seconds(self.start, self.after_forward),
            "forward_ends_s": since(self.start, self.forward_marks),
            "backward_s": seconds(self.after_forward, self.last_gradient),
            "ready_s": since(self.after_forward, self.gradient_marks),
            "optimizer_s": seconds(self.last_gradient, end),
        }


def _ranks_of_host(num_ranks: int) -> list[int] | None:
    """Return how many ranks each host has, by the launcher's variables; None where they do not say."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if num_ranks == 1 or here == str(num_ranks):
        return [num_ranks]
    told = os.environ.get(RANKS_OF_HOST, "").split(",")
    if all(words.isdecimal() and int(words) for words in told) and sum(map(int, told)) == num_ranks:
        return list(map(int, told))
    hosts = os.environ.get("GROUP_WORLD_SIZE", "")  # torchrun's: its agents, one a host
    if not (here.isdecimal() and hosts.isdecimal()) or int(here) * int(hosts) != num_ranks:
        return None  # also torchrun's hosts of unequal numbers, of which a rank knows its own only
    return [int(here)] * int(hosts)


def _layers(model: nn.Module) -> dict[str, tuple[nn.Module, list[nn.Parameter]]]:
    """Return the modules that own trainable parameters themselves, by name. The first owner has a shared parameter."""
    found: dict[str, tuple[nn.Module, list[nn.Parameter]]] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(id(parameter) for parameter in own)
        if own:
            found[name or type(module).__name__] = (module, own)
    return found

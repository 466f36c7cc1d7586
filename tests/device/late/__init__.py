"""The emulated accelerator "late": asynchronous, and lazy by design. A forgotten wait is a wrong number in every run.

`start()` builds it if need be and makes it torch's accelerator in this process. Nothing that is queued runs before
somebody waits for it (`source/runtime.h`); freed memory is filled with NaN (`source/memory.h`); races are found
whatever ran when (`source/clocks.h`).

Environment: LATE_DEVICES (1), LATE_CACHE (where the build is kept).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from device.late import batch_norm, build, dropout, recurrent

DEVICE = "late"
SCHEDULES = ("latest", "others")
"""Under which a program is tested: neither finds all missing waits, both together do."""


class RaceError(AssertionError):
    """Accesses to the same bytes that nothing orders."""


@functools.cache
def start() -> types.ModuleType:
    """Make "late" torch's accelerator in this process; returns the extension. A second call does nothing.

    Raises:
        NoCompilerError: it is not built, and cannot be.
    """
    extension = build.extension()
    torch.utils.rename_privateuse1_backend(DEVICE)
    extension.register_device()
    torch._register_device_module(DEVICE, _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    for composed in (recurrent, batch_norm, dropout):
        composed.register(_library())
    return extension


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("aten", "IMPL")  # one that is dropped takes its kernels back


# ---- what tests ask


@contextlib.contextmanager
def scheduled(name: str) -> Iterator[None]:
    """Run what is queued by this schedule: "latest", "others" or "eager"."""
    extension = start()
    drain()
    before = extension.set_schedule(name)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # what went wrong within has been raised there
            drain()
        extension.set_schedule(before)


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Raise RaceError, at the end, with both operators and stacks of every race within."""
    extension = start()
    drain()
    extension.take_races()
    extension.check_races(True)
    try:
        yield
        races = extension.take_races()
    finally:
        extension.check_races(False)
        extension.take_races()
    if races:
        raise RaceError(f"{len(races)} races, the first of them:\n" + "\n".join(races[:3]))


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the host's waits for the device within, by cause; the counter is filled at the end."""
    extension = start()
    extension.take_counts()
    causes: Counter[str] = Counter()
    try:
        yield causes
    finally:
        causes.update(extension.take_counts())


def drain() -> None:
    """Run all that is queued on any stream; the host then knows of it."""
    extension = start()
    for device in range(extension.device_count()):
        torch.accelerator.synchronize(device)


# ---- what a process group needs


def host_alias(tensor: Tensor) -> Tensor:
    """The device's memory as a CPU tensor, without waiting: for functions that are queued."""
    alias: Tensor = start().host_alias(tensor)
    return alias


def queue(
    function: Callable[[], None], name: str, stream: torch.Stream, uses: Sequence[Sequence[Tensor]]
) -> int:
    """Queue a function on a stream; returns its number there. It runs on the thread that demands it.

    Args:
        function: May block; touches the device's memory through `host_alias` alone.
        name: Of the task, in messages.
        stream: On which.
        uses: The tensors that it reads, and those that it writes.
    """
    number: int = start().queue_function(function, name, index_of(stream), *map(list, uses))
    return number


def index_of(stream: torch.Stream) -> int:
    """The stream's number among all devices'."""
    return stream.stream_id or stream.device_index


# ---- what torch asks of a device's module


def _module(extension: types.ModuleType) -> Any:
    def index(device: Any = None) -> int:
        if device is None:
            current: int = extension.current_device()
            return current
        if isinstance(device, int):
            return device
        asked = torch.device(device).index
        return index() if asked is None else asked

    def seed_all(seed: int) -> None:
        for device in range(extension.device_count()):
            extension.manual_seed(seed, device)

    module: Any = types.ModuleType(f"torch.{DEVICE}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = extension.device_count
    module.current_device = extension.current_device
    module.set_device = lambda device: extension.set_device(index(device))
    module.device = lambda device: torch.accelerator.device_index(index(device))
    module.manual_seed = lambda seed: extension.manual_seed(seed, index())
    module.manual_seed_all = seed_all
    module.get_rng_state = lambda device=None: extension.rng_state(index(device))
    module.set_rng_state = lambda state, device=None: extension.set_rng_state(state, index(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(index(device))
    module.set_stream = torch.accelerator.set_stream
    module.synchronize = lambda device=None: torch.accelerator.synchronize(index(device))
    module.Stream = lambda device=None, **_: torch.Stream(f"{DEVICE}:{index(device)}")
    module.stream = lambda stream: stream  # a torch.Stream is a context
    module.Event = torch.Event
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_device_name = lambda *_: DEVICE
    module.empty_cache = lambda: None
    return module

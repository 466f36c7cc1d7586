"""An accelerator's streams: what runs on which, what waits for what, and when the host may look at a value.

Rules
1. A device computes later, in the order of each of its streams. Code that uses a tensor on another stream than the one
   that wrote it orders the two by a `StreamEvent`. Code that drops a tensor which another stream still uses tells the
   allocator (`keep_for_current_streams`).
2. The host waits for a device in `to_host`, `AsyncValue.read` and `StreamEvent.block`, and nowhere else here.
3. What a device copies to or from the host lies in pinned memory; in other memory a copy blocks the host.
4. torch's names for any accelerator alone (`torch.accelerator`, `torch.Stream`, `torch.Event`): no vendor is known
   here. On a CPU there are no streams, and all of this does nothing.

Every wait, record and host synchronization of Paceline's is a call of this module. So tests can leave out each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Devices = Sequence[torch.device]


def devices_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the accelerators on which some of these tensors lie, each once. Tensors of the host add none."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if is_accelerator(tensor.device)))


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes later than it is told to: all but the CPU, and `meta`."""
    return device.type not in ("cpu", "meta")


def accelerator_type() -> str | None:
    """Return the type of accelerator that this process can use, such as "cuda"; None if this build has none."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def why_without_streams(device: torch.device) -> str | None:
    """Return why this process cannot order work on an accelerator by streams, in words; None: it can."""
    here = accelerator_type()
    if here != device.type:
        return f"this process's accelerator is {here or 'none'}"
    try:
        torch.accelerator.current_stream(device).record_event()
    except (RuntimeError, NotImplementedError) as error:
        return f"torch has no streams and events for it ({str(error).splitlines()[0]})"
    return None


class StreamEvent:
    """A place in the current streams of `devices`, behind all that they were told; past already without any."""

    __slots__ = ("_events",)

    def __init__(self, devices: Devices) -> None:
        self._events = [torch.accelerator.current_stream(device).record_event() for device in devices]

    def order(self) -> None:
        """Let the current streams of these devices wait for this place. The host does not wait."""
        for event in self._events:
            torch.accelerator.current_stream(event.device).wait_event(event)

    def is_past(self) -> bool:
        """Return whether the devices have passed this event. Does not wait."""
        return all(event.query() for event in self._events)

    def block(self) -> None:
        """Wait, on the host, until the devices have passed this place."""
        for event in self._events:
            if not event.query():
                event.synchronize()


class SideStreams:
    """A stream beside the current one, on each device; made at the first use.

    For work that neither waits for what the main stream is told later, nor delays it.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    @contextmanager
    def current(self, devices: Devices, after: StreamEvent) -> Iterator[None]:
        """Run the code within on these streams, behind `after`."""
        streams = [self._of(device) for device in devices]
        index = torch.accelerator.current_device_index()
        before = [torch.accelerator.current_stream(device) for device in devices]
        try:
            for stream in streams:
                torch.accelerator.set_stream(stream)  # and makes its device the current one
            after.order()
            yield
        finally:
            for stream in before:
                torch.accelerator.set_stream(stream)
            torch.accelerator.set_device_index(index)

    def _of(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]


class ProducerStreams:
    """The streams on which devices produce values. A consumer lets its own stream wait for all of them."""

    def __init__(self) -> None:
        self._streams: dict[torch.Stream, None] = {}

    def note(self, device: torch.device) -> None:
        """Add the device's current stream to the producer streams."""
        if is_accelerator(device):
            self._streams[torch.accelerator.current_stream(device)] = None

    def order(self) -> None:
        """Let the current stream wait for the other producer streams, usually none."""
        for stream in self._streams:
            current = torch.accelerator.current_stream(stream.device)
            if stream != current:
                current.wait_event(stream.record_event())


def keep_for_current_streams(tensors: Iterable[Tensor]) -> None:
    """Tell the allocator that the current streams use these tensors of other streams, so that it keeps their memory.

    Needed where a tensor may be dropped before the stream that it was made on has been ordered behind the use.
    """
    for tensor in tensors:
        if not tensor.is_cpu:
            # torch records dense tensors alone
            for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
                part.record_stream(torch.accelerator.current_stream(tensor.device))


def is_capturing(device: torch.device) -> bool:
    """Return whether what this device is told now is captured into a graph, which runs later, without this code."""
    asks = getattr(torch.get_device_module(device), "is_current_stream_capturing", bool)
    return is_accelerator(device) and bool(asks())


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's generators, on the CPU and on this device. Does not wait for the device."""
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        torch.get_device_module(device).manual_seed(seed)


def empty_cache(device: torch.device) -> None:
    """Give the memory of a device that is not used back to it, where its allocator keeps any."""
    empty = getattr(torch.get_device_module(device), "empty_cache", None) if is_accelerator(device) else None
    if empty is not None:
        empty()


# ---- values on the host


@functools.cache
def _can_pin() -> bool:
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except (RuntimeError, NotImplementedError):
        return False  # an accelerator without such memory: copies then block the host


def host_memory(like: Tensor) -> Tensor:
    """Return memory of the host with the shape and dtype of `like`; pinned if that is on an accelerator. Undefined."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=not like.is_cpu and _can_pin())


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor of an accelerator into memory of the host, behind the current stream's work. Waits for the copy."""
    host = host_memory(tensor).copy_(tensor.detach(), non_blocking=True)
    StreamEvent([tensor.device]).block()
    return host


@torch.no_grad()
def to_device(target: Tensor, host: Tensor) -> None:
    """Copy values of the host into `target`, on the current stream of its device. The host does not wait.

    `host` may be dropped at once. It may not be written before the device has made the copy.
    """
    target.copy_(host.view(target.shape), non_blocking=True)


class AsyncValue:
    """A small value of a device, on its way to the host; it may be written again at once, and read on arrival."""

    def __init__(self, value: Tensor) -> None:
        self._host = host_memory(value).copy_(value.detach(), non_blocking=True)
        self._mark = StreamEvent(devices_of([value]))

    def has_arrived(self) -> bool:
        """Return whether `read` would not wait. Does not wait."""
        return self._mark.is_past()

    def read(self) -> Tensor:
        """Return the value, on the host. Waits for the device, if it has not arrived."""
        self._mark.block()
        return self._host

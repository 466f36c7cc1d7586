"""Two clocks for what a device computes: the host's, and one whose marks are queued between its kernels."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch


class HostClock:
    """Times of a device that computes when it is told to."""

    def mark(self) -> Any:
        """Note this moment."""
        return time.perf_counter()

    def is_past(self, mark: Any) -> bool:
        """Return whether the device has come there."""
        return True

    def between_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks."""
        return float(end - start)


class DeviceClock:
    """Times of an accelerator, which computes later: marks are queued between its kernels, on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Note the moment at which the device gets here."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def is_past(self, mark: Any) -> bool:
        """Return whether the device has come there. Does not wait."""
        return bool(mark.query())

    def between_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; waits for the second."""
        if not end.query():
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """The clock for what this device computes."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


def name_of(device: torch.device) -> str:
    """Return a device's name, in words."""
    if device.type == "cpu":
        return f"{platform.machine()} CPU"
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))

"""Ranks with the device, two as a rule, which all suites of this folder share, and what a case of theirs is.

A case is a function `case(here)` that returns tensors. It is performed on the CPU over Gloo, and on the device over a
backend, under a schedule and with the race check on. The bits have to be the same.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from device import late, nccl
from device.late import build
from device.nccl.exchange import FOLDER
from harness.ranks import Ranks

Case = Callable[["Here"], Sequence[Tensor]]


@dataclass(frozen=True)
class Here:
    """Where a case is performed.

    Attributes:
        rank: This rank.
        device: Of the model and the batches.
        group: That reaches it.
    """

    rank: int
    device: torch.device
    group: dist.ProcessGroup

    def another_group(self) -> Any:
        """Of the same ranks and the same backend, with an order of its own."""
        return _group("gloo" if self.device.type == "cpu" else self.group.name(), "another")

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor of the host, as a data loader brings it: from page-locked memory, without waiting."""
        if self.device.type == "cpu":
            return tensor.clone()
        return tensor.pin_memory().to(self.device, non_blocking=True)


@functools.cache
def ranks(number: int = 2) -> Ranks:
    """Ranks that stay up between tests. Their store waits without polling.

    The device is built before: ranks have a deadline.
    """
    build.ensure()
    env = {"LATE_DEVICES": "2", FOLDER: str(folder())}
    return Ranks(number, store="tcp", group_timeout_s=20.0, env=env)


@functools.cache
def folder() -> Path:
    """A folder in shared memory for all that this process's ranks send each other; `remove_folder` removes it."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="late-", dir=shared if shared.is_dir() else None))


def remove_folder() -> None:
    """Remove the folder, if there is one: ranks are killed, and remove nothing."""
    if folder.cache_info().currsize:
        shutil.rmtree(folder(), ignore_errors=True)


def on_cpu(rank: int) -> Here:
    return Here(rank, torch.device("cpu"), _group("gloo"))


def on_device(rank: int, backend: str, index: int = 0) -> Here:
    nccl.register()
    return Here(rank, torch.device(late.DEVICE, index), _group(backend))


@contextlib.contextmanager
def as_the_device_computes() -> Iterator[None]:
    """Neither fused attention nor oneDNN, which torch uses for tensors that it knows to be the CPU's."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def differences(
    case: Case, rank: int, backend: str, schedule: str, tolerance: float = 0.0, index: int = 0
) -> str:
    """Perform a case on both; says what differs, or nothing.

    Args:
        case: What.
        rank: This one.
        backend: Of the device's group.
        schedule: Of the device.
        tolerance: For what the CPU computes in another way; then the device's bits are compared with those that it has
            where nothing is late.
        index: Of the device in this process, which has two.

    Raises:
        RaceError: Accesses that nothing orders.
    """
    # First: autograd counts the devices at the first backward of the process.
    there = on_device(rank, backend, index)
    with as_the_device_computes():
        expected = [tensor.detach().clone() for tensor in case(on_cpu(rank))]
        if tolerance:
            in_order = _on_device(case, there, "eager")
            for i, (one, other) in enumerate(zip(expected, in_order, strict=True)):
                if not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
                    return f"tensor {i} of shape {tuple(one.shape)} is not the CPU's: {one} and {other}"
            expected = in_order
        with late.checked():
            found = _on_device(case, there, schedule)
    return _compared(expected, found)


def _on_device(case: Case, there: Here, schedule: str) -> list[Tensor]:
    with late.scheduled(schedule):
        return [tensor.detach().cpu() for tensor in case(there)]


def _compared(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    if len(expected) != len(found):
        return f"{len(found)} tensors instead of {len(expected)}"
    wrong = [i for i, pair in enumerate(zip(expected, found, strict=True)) if not _same_bits(*pair)]
    if not wrong:
        return ""
    i = wrong[0]
    gap = (expected[i].to(torch.complex128) - found[i].to(torch.complex128)).abs().max().item()
    return f"{len(wrong)} of {len(found)} tensors differ; number {i} of shape {tuple(found[i].shape)} by {gap:.3g}"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8) if flat.numel() else flat


_groups: dict[str, Any] = {}  # by backend and use; of the ranks' own group that is open now


def _group(backend: str, use: str = "") -> Any:
    """A group of that backend for a use, opened once for each time that the ranks' own group is."""
    world = dist.group.WORLD
    if _groups.get("") is not world:
        _groups.clear()
        _groups[""] = world
    if backend == "gloo" and not use:
        return world
    if backend + use not in _groups:
        _groups[backend + use] = dist.new_group(backend=backend)
    return _groups[backend + use]

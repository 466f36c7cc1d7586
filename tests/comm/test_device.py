"""Without an accelerator nothing of `comm/device.py` waits, copies or fails; tests/device has the rest."""

import torch

from paceline.comm.device import (
    AsyncValue,
    StreamEvent,
    devices_of,
    host_memory,
    is_accelerator,
    keep_for_current_streams,
    to_device,
    why_without_streams,
)
from paceline.ddp.verdict import NonFiniteChecks

CPU = torch.device("cpu")


def test_the_cpu_and_meta_are_no_accelerators():
    assert devices_of([torch.zeros(1), torch.zeros(1, device="meta")]) == []
    assert not is_accelerator(CPU)
    assert is_accelerator(torch.device("xpu", 1))


def test_a_mark_of_no_device_is_past():
    mark = StreamEvent([])
    mark.order()
    mark.block()
    assert mark.is_past()
    keep_for_current_streams([torch.zeros(2)])


def test_a_value_of_the_host_has_arrived_as_it_was():
    """It may be written again at once."""
    value = torch.tensor([1.0, 2.0])
    later = AsyncValue(value)
    value.zero_()
    assert later.has_arrived()
    assert later.read().tolist() == [1.0, 2.0]


def test_memory_of_the_host_is_contiguous():
    like = torch.zeros(2, 3).t()
    host = host_memory(like)
    assert host.shape == (3, 2)
    assert host.is_contiguous()
    to_device(like, torch.arange(6.0))
    assert like.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def test_a_device_that_is_not_here_has_no_streams():
    assert "this process's accelerator is" in (why_without_streams(torch.device("xpu", 0)) or "")


def test_what_was_seen_on_the_host_is_said_at_once():
    seen = NonFiniteChecks()
    assert not seen.any_of([torch.tensor(0.0)])
    assert seen.any_of([torch.tensor(0.0), torch.tensor(float("nan"))])

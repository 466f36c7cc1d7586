"""Kinds of missing waits on the device, and who finds them: the schedules, and the race check."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from dataclasses import dataclass

import pytest
import torch

from device import late
from device.marks import device, on_rank_0
from harness.ranks import Ranks

pytestmark = device


@dataclass(frozen=True)
class Streams:
    """The current stream and one beside it, which the host has waited for."""

    main: torch.Stream
    side: torch.Stream

    def after(self, first: torch.Stream, then: torch.Stream, waits: bool = True) -> None:
        if waits:
            then.wait_event(first.record_event())


def streams() -> Streams:
    late.drain()
    return Streams(torch.accelerator.current_stream(), torch.Stream(late.DEVICE))


def ones() -> torch.Tensor:
    return torch.ones(64, device=late.DEVICE)


def host_sum(tensor: torch.Tensor) -> float:
    return tensor.sum().item()


def read_after_write(waits):
    s, x = streams(), ones()
    s.after(s.main, s.side, waits)
    with s.side:
        return host_sum(x + 1) == 128


def write_after_read(waits):
    s, x = streams(), ones()
    s.after(s.main, s.side)
    with s.side:
        y = x + 1
    s.after(s.side, s.main, waits)
    x.zero_()
    s.after(s.side, s.main)
    return host_sum(y) == 128


def write_after_read_reader_demanded(waits):
    s, x = streams(), ones()
    s.after(s.main, s.side)
    with s.side:
        y = x + 1
    s.after(s.side, s.main, waits)
    x.zero_()
    with s.side:
        return host_sum(y) == 128


def write_after_write(waits):
    s, x = streams(), torch.empty(64, device=late.DEVICE)
    s.after(s.main, s.side)
    with s.side:
        x.fill_(1.0)
    s.after(s.side, s.main, waits)
    x.fill_(2.0)
    s.after(s.side, s.main)
    return host_sum(x) == 128


def freed(waits):
    """`waits`: the side stream is recorded on the memory."""
    s, x = streams(), ones()
    s.after(s.main, s.side)
    with s.side:
        y = x + 1
    if waits:
        x.record_stream(s.side)
    del x
    torch.zeros(64, device=late.DEVICE)
    s.after(s.side, s.main)
    return host_sum(y) == 128


def freed_reader_demanded(waits):
    s, x = streams(), ones()
    s.after(s.main, s.side)
    with s.side:
        y = x + 1
    if waits:
        x.record_stream(s.side)
    del x
    torch.zeros(64, device=late.DEVICE)
    with s.side:
        return host_sum(y) == 128


def pinned_read_too_early(waits):
    s, host = streams(), torch.zeros(64, pin_memory=True)
    host.copy_(ones(), non_blocking=True)
    if waits:
        s.main.synchronize()
    return host.sum().item() == 64


def pinned_overwritten_too_early(waits):
    s, host = streams(), torch.ones(64).pin_memory()
    on_device = host.to(late.DEVICE, non_blocking=True)
    if waits:
        s.main.synchronize()
    host.zero_()
    return host_sum(on_device) == 64


HAZARDS = {
    read_after_write: {"latest"},
    write_after_read: {"latest"},
    write_after_read_reader_demanded: {"others"},
    write_after_write: {"latest"},
    freed: {"latest"},
    freed_reader_demanded: {"others"},
    pinned_read_too_early: {"latest", "others"},
    pinned_overwritten_too_early: {"latest", "others"},
}
"""By kind, the schedules under which a missing wait gives a wrong number, every time."""


@pytest.mark.parametrize("schedule", ["eager", *late.SCHEDULES])
@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.__name__)
@on_rank_0
def test_a_missing_wait_is_a_wrong_number(hazard, schedule):
    """With its waits a program is right under each schedule; without, wrong each time under those of the table."""
    with late.scheduled(schedule):
        assert all(hazard(True) for _ in range(3))
        found = [not hazard(False) for _ in range(3)]
    assert found == [schedule in HAZARDS[hazard]] * 3


@pytest.mark.parametrize("schedule", ["eager", *late.SCHEDULES])
@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.__name__)
@on_rank_0
def test_a_missing_wait_is_a_race(hazard, schedule):
    """The race check finds each under each schedule, names both sides, and finds none in the right program."""
    with late.scheduled(schedule):
        with late.checked():
            hazard(True)
        with pytest.raises(late.RaceError) as raised, late.checked():
            hazard(False)
    assert str(raised.value).count(f" {hazard.__name__}\n") >= 1, raised.value
    assert "nothing orders" in str(raised.value)


@on_rank_0
def test_a_race_names_both_operators_and_their_stacks():
    """Who reads it knows which two lines to order."""
    s, x = streams(), ones()
    with pytest.raises(late.RaceError) as raised, late.checked():
        x.mul_(2)
        with s.side:
            x.add_(1)
    text = str(raised.value)
    assert "stream" in text
    assert "aten::add" in text
    assert "aten::mul" in text
    assert text.count("test_a_race_names_both_operators_and_their_stacks") == 2


def test_both_schedules_together_find_every_kind():
    """Neither schedule alone does: that is why there are two."""
    assert all(HAZARDS.values())
    assert not any(all(schedule in found for found in HAZARDS.values()) for schedule in late.SCHEDULES)


@pytest.mark.parametrize("waits_again", [True, False])
@on_rank_0
def test_an_event_that_is_recorded_again_stands_for_both(waits_again):
    """Who waited for the first recording does not wait for what came between the two."""
    s, x, event = streams(), ones(), torch.Event(late.DEVICE)
    with late.scheduled("latest"):
        event.record()
        s.side.wait_event(event)
        x.add_(1)
        event.record()
        if waits_again:
            s.side.wait_event(event)
        with s.side:
            assert (host_sum(x) == 128) is waits_again


@on_rank_0
def test_time_passes_on_the_device():
    """Timing events need to be reached by the device before their time is asked for; asking for a query ends."""
    first, second = (torch.Event(late.DEVICE, enable_timing=True) for _ in range(2))
    with late.scheduled("latest"):
        first.record()
        ones().add_(1)
        second.record()
        with pytest.raises(RuntimeError, match="must be completed"):
            first.elapsed_time(second)
        assert any(second.query() for _ in range(10))  # a thread of its own has a second for it
        assert first.elapsed_time(second) >= 0


@on_rank_0
def test_the_host_s_waits_are_counted_by_cause():
    """What makes the host wait for the device is counted; what does not is not."""
    pinned = torch.zeros(64, pin_memory=True)
    late.drain()
    with late.counted() as causes:
        x = ones()
        pinned.copy_(x, non_blocking=True)
        on_device = torch.ones(64).to(late.DEVICE, non_blocking=True)
        torch.accelerator.current_stream().record_event()
        (x + on_device).mul_(2)
    assert not causes
    with late.counted() as causes:
        x.sum().item()
        (x > 0).nonzero()
        x.cpu()
        torch.ones(64).to(late.DEVICE)
        torch.accelerator.current_stream().record_event().synchronize()
    assert causes == {
        "item": 1,
        "aten::nonzero (no shape)": 1,
        "copy to the host": 1,
        "copy from the host": 1,
        "event.synchronize": 1,
    }


@on_rank_0
def test_copies_of_pageable_memory_are_done_when_the_call_returns():
    """As the driver's: asked not to block, the one to the host does; what is to come from it has been taken."""
    host, there = torch.ones(64), torch.empty(64)
    with late.scheduled("latest"), late.counted() as causes:
        x = host.to(late.DEVICE, non_blocking=True)
        host.zero_()
        there.copy_(x * 2, non_blocking=True)
        assert there.sum() == 128
    assert causes == {"copy to the host": 1}


@on_rank_0
def test_an_error_comes_when_the_host_waits():
    """As on other devices, it names the operator, and is told once."""
    with late.scheduled("latest"):
        rows = ones()[torch.tensor([70], device=late.DEVICE)]
        assert rows.shape == (1,)
        with pytest.raises(
            RuntimeError, match=r"aten::index.*queued earlier, failed: index 70 is out of bounds"
        ):
            late.drain()
        assert host_sum(ones()) == 64


@on_rank_0
def test_memory_is_reused_at_once_on_its_stream():
    """As a caching allocator would; what was in it is gone, and other streams get other memory."""
    s, x = streams(), ones()
    with late.scheduled("latest"):
        where = x.data_ptr()
        del x
        again = torch.empty(64, device=late.DEVICE)
        assert again.data_ptr() == where
        assert again.isnan().all().item()
        del again
        with s.side:
            assert torch.empty(64, device=late.DEVICE).data_ptr() != where


def touching(rank, _num_ranks):
    """Rank 0 reads device memory by its address, rank 1 writes it; both have waited for the device."""
    faulthandler.disable()  # which says much more
    late.start()
    x = torch.zeros(64, device=late.DEVICE)
    late.drain()
    if rank == 0:
        ctypes.string_at(x.data_ptr() + 8, 1)
    ctypes.memset(x.data_ptr(), 1, 4)


def test_the_host_cannot_touch_device_memory():
    """It is a fault, as on other devices, that says what was touched and where."""
    with Ranks(2, env={"LATE_DEVICES": "1"}) as two:
        outcomes = two.outcomes(touching)
    for outcome, words in zip(
        outcomes, ("reads device memory, byte 8", "writes device memory, byte 0"), strict=True
    ):
        assert outcome.exit_code == -signal.SIGSEGV
        assert f"late: the host {words} of a block of 512" in outcome.log
        assert "test_streams.py" in outcome.log.partition("late: the host")[2]


@on_rank_0
def test_a_forked_process_drops_device_memory_in_peace():
    """As a data loader's worker does with what its parent held; the parent's memory stays as it is."""
    x = torch.ones(64, device=late.DEVICE)
    with late.scheduled("eager"):
        if not (child := os.fork()):
            del x
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert host_sum(x) == 64


def allocated(_rank, _num_ranks):
    """Return by how many bytes the device's use grows with a tensor of 4 KiB, and without it."""
    late.start()
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1024, device=late.DEVICE)
    with_it = torch.accelerator.memory_allocated()
    del x
    return with_it - before, torch.accelerator.memory_allocated() - before


def test_what_is_allocated_is_counted():
    """`torch.accelerator.memory_allocated` says what tensors hold now. A fresh process: threads of other tests free."""
    with Ranks(1, env={"LATE_DEVICES": "1"}) as alone:
        assert alone.run(allocated) == [(4096, 0)]


@on_rank_0
@pytest.mark.parametrize("schedule", late.SCHEDULES)
def test_two_devices_of_a_process(schedule):
    """A copy between them is in the order of both; each has a current stream, and memory of its own."""
    assert torch.accelerator.device_count() == 2
    with late.scheduled(schedule), late.checked():
        first = torch.full((8,), 3.0, device="late:0")
        second = torch.full((8,), 4.0, device="late:1")
        second.copy_(first * 2)
        first.zero_()
        assert host_sum(second + 1) == 56
        assert host_sum(second.to("late:0") + first) == 48
        with pytest.raises(RuntimeError, match="there is no device 2 of 2"):
            torch.empty(1, device="late:2")

"""What recorders write of real steps, and that recording changes no bit and leaves nothing behind."""

from __future__ import annotations

import copy
import os
import socket
import threading
import time
from collections import deque
from contextlib import nullcontext
from html import escape
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from harness.held import held_at_rest
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.diagnosis.findings import diagnose_folder
from paceline.observe import spans
from paceline.observe.run_folder import DETACHED, VARIABLE, begin_run
from paceline.observe.run_reading import read_run
from paceline.observe.run_records import Interval
from paceline.recording import peer_sockets
from paceline.recording import recorder as recording
from paceline.recording.model_facts import layer_of_each, range_of, samples_and_tokens
from paceline.recording.peer_sockets import PeerSockets
from paceline.recording.recorder import Recorder, header_of_rank
from paceline.recording.torch_ddp import RecordedTorchDDP
from paceline.report.page import page_of


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def train(model, rank, num_steps, late_s=0.0, micro_steps=1):
    """Steps with noise of this rank's own; every backward is synchronized but those of earlier micro-steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for micro_step in range(micro_steps):
            with model.no_sync() if micro_step < micro_steps - 1 else nullcontext():
                time.sleep(late_s)
                model(torch.randn(5, 6, generator=draw)).square().mean().backward()
        optimizer.step()


def torch_recorded(rank, num_ranks, folder, micro_steps):
    """A recorded training, one that is not, and what is left on the model afterwards.

    A model of ours is in the same process: both note the steps of optimizers.
    """
    DistributedDataParallel(net())
    models = [TorchDDP(net()) for _ in range(2)]
    header = header_of_rank(Path(folder), "torch", "cpu", rank, num_ranks)
    recorded = RecordedTorchDDP(models[0], Recorder(header, Path(folder)))
    train(models[0], rank, 8, micro_steps=micro_steps)
    copied = copy.deepcopy(models[0].module)
    recorded.detach()
    train(models[1], rank, 8, micro_steps=micro_steps)
    same = all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True))
    hooks = [p._post_accumulate_grad_hooks for p in [*models[0].parameters(), *copied.parameters()]]
    return same, [hook for hook in hooks if hook]


@pytest.mark.processes
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_steps_of_torchs_ddp(tmp_path, micro_steps):
    begin_run(tmp_path, ["x"])
    assert pool(2).run(torch_recorded, str(tmp_path), micro_steps) == [(True, [])] * 2
    run = read_run(tmp_path)
    assert run.notes == ()
    assert [row[0].step for row in run.rows()] == [
        2,
        3,
        4,
        5,
        6,
        7,
        8,
    ]  # the first one's beginning is not known
    for rank in run.ranks:
        assert rank.labels == ("0", "2", "4")
        for step in rank.steps:
            phases = [x.phase for x in step.intervals if x.phase not in {"recording", "garbage"}]
            assert phases == ["optimizer", *["forward", "backward"] * micro_steps]
            assert [layer for layer, _ in step.gradient_marks] == [2, 1, 0]
            assert step.num_samples == 5 * micro_steps
            assert step.work_ended_s == step.gradient_marks[-1][1]
            assert sum(step.phases_s().values()) == pytest.approx(step.step_s)


def facts_recorded(rank, num_ranks, folder):
    model = TorchDDP(net())
    header = header_of_rank(Path(folder), "torch", "cpu", rank, num_ranks)
    with mock.patch.object(recording, "_FACTS_S", 0.0):
        recorded = RecordedTorchDDP(model, Recorder(header, Path(folder)))
        train(model, rank, 4)
    recorded.detach()


@pytest.mark.processes
def test_what_the_kernel_says_is_read_every_step_where_steps_are_long(tmp_path):
    begin_run(tmp_path, ["x"])
    pool(2).run(facts_recorded, str(tmp_path))
    for rank in read_run(tmp_path).ranks:
        assert all(step.host.cpu_s > 0 for step in rank.steps)


def ours_recorded(rank, num_ranks, folder, late_s):
    with mock.patch.dict(os.environ, {VARIABLE: folder}), mock.patch.object(recording, "_written_by", 0):
        model = DistributedDataParallel(net(), bucket_cap_mb=0.002)
    train(model, rank, 24, late_s * (rank == 1))
    return model.doctor()


@pytest.mark.processes
def test_the_wrapper_is_recorded_and_says_who_is_late(tmp_path):
    """By what each rank remembers, and by what it wrote down; the same on every rank."""
    begin_run(tmp_path, ["x"])
    first, second = pool(2).run(ours_recorded, str(tmp_path), 0.02)
    assert first.finding.sentence == second.finding.sentence
    assert (first.finding.rank, first.finding.phase, first.finding.cause) == (1, "other", "waits")
    run = read_run(tmp_path)
    assert [rank.header.wrapper for rank in run.ranks] == ["paceline"] * 2
    for rank in run.ranks:
        last = rank.steps[-1]
        assert len(last.buckets) == len(rank.labels) > 1
        assert rank.labels[0].startswith("4")
        assert last.work_ended_s == pytest.approx(max(bucket.ready_s for bucket in last.buckets))


def poisoned(rank, _num_ranks, folder, make, is_skipped=False):
    """The sixth step's batch has a NaN on rank 1."""
    with mock.patch.dict(os.environ, {VARIABLE: folder}), mock.patch.object(recording, "_written_by", 0):
        if make is TorchDDP:
            model = make(net())
            header = header_of_rank(Path(folder), "torch", "cpu", rank, 2)
            recorded = RecordedTorchDDP(model, Recorder(header, Path(folder)))
        else:
            model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(1, 9):
        optimizer.zero_grad()
        x = torch.randn(5, 6)
        x[3, 2] += float("nan") if step == 6 and rank == 1 else 0.0
        model(x).square().mean().backward()
        if not is_skipped or all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()
    if make is TorchDDP:
        recorded.detach()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [DistributedDataParallel, TorchDDP])
def test_a_gradient_that_is_not_finite_is_told_with_its_rank_step_and_parameter(tmp_path, make):
    """In what the doctor says and on the page; nothing where the step was skipped, as no parameter has it."""
    for is_skipped in (False, True):
        folder = tmp_path / str(is_skipped)
        begin_run(folder, ["x"])
        pool(2).run(poisoned, str(folder), make, is_skipped)
        health = diagnose_folder(folder).health
        if is_skipped:
            assert health == ()
            continue
        assert len(health) == 1
        assert health[0].startswith("In step 6 rank 1's own gradient of 4.bias was not finite")
        assert escape(health[0]) in page_of(read_run(folder))


def unasked(rank, _num_ranks):
    model = DistributedDataParallel(net())
    train(model, rank, 3)
    return len(model._paceline_coordinator.recording.recorder.lines().splitlines()), model.doctor().silence


@pytest.mark.processes
def test_without_a_folder_the_last_steps_are_kept():
    for num_lines, silence in pool(2).run(unasked):
        assert num_lines >= 2  # who, and what buckets hold; steps as short as these are not all kept
        assert "12 are needed" in silence


def test_files_of_the_clock_close_with_the_last_recorder():
    recorders = [Recorder(header_of_rank(None, "ours", "cpu", 0, 1)) for _ in range(2)]
    before = held_at_rest()
    for ended_s in range(1, 4):
        for recorder in recorders:
            recorder.end_step(recording.Work(float(ended_s), float(ended_s)))
    while recorders:
        assert held_at_rest().num_descriptors > before.num_descriptors
        recorder = recorders.pop()
        del recorder
    assert held_at_rest().num_descriptors == before.num_descriptors


def test_garbage_collection_while_phases_are_read_does_not_end_recording(monkeypatch):
    monkeypatch.setattr(spans, "_noted", deque([("forward", 1.0, 2.0), ("backward", 2.0, 3.0)], maxlen=4))

    def collecting(*fields):
        spans.note("garbage", 2.5, 2.6)
        return Interval(*fields)

    monkeypatch.setattr(spans, "Interval", collecting)
    assert [x.phase for x in spans.between(0.0, 9.0)] == ["forward", "backward"]


def test_of_short_steps_ranks_keep_some_in_common():
    assert [recording._every(x) for x in (1.0, 0.02, 0.019, 0.006, 0.001, 0.0)] == [1, 1, 2, 4, 32, 64]


def detached(rank, num_ranks, folder):
    model = TorchDDP(net())
    header = header_of_rank(Path(folder), "torch", "cpu", rank, num_ranks)
    recorder = Recorder(header, Path(folder))
    recorded = RecordedTorchDDP(model, recorder)
    with mock.patch.object(recording, "_LOOKED_S", 0.0):
        train(model, rank, 5)
        dist.barrier()
        if rank == 0:
            Path(folder, DETACHED).touch()
        dist.barrier()
        train(model, rank, 5)
        dist.barrier()
        if rank == 0:
            Path(folder, DETACHED).unlink()
        dist.barrier()
        train(model, rank, 5)
    recorded.detach()


@pytest.mark.processes
def test_recording_pauses_while_the_folder_says_so(tmp_path):
    begin_run(tmp_path, ["x"])
    pool(2).run(detached, str(tmp_path))
    for rank in read_run(tmp_path).ranks:
        assert [step.step for step in rank.steps] == [2, 3, 4, 5, 12, 13, 14, 15]


def test_a_large_model_has_few_layers_to_tell():
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(60)])
    labels, layers = layer_of_each(blocks)
    assert labels == [str(i) for i in range(60)]
    assert len(layers) == 240
    assert layer_of_each(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))[0] == ["0", "1"]
    assert layer_of_each(nn.Linear(2, 2))[0] == ["Linear"]


def test_a_bucket_is_called_by_its_layers():
    assert range_of(["body.1.weight", "body.1.bias"]) == "body.1"
    assert range_of(["head.weight", "body.1.bias", "body.0.weight"]) == "head to body.0"
    assert range_of([]) == ""


def test_samples_and_tokens():
    assert samples_and_tokens((torch.zeros(4, 3),), {}) == (4, None)
    assert samples_and_tokens((None, torch.zeros(4, 3, dtype=torch.long)), {}) == (4, 12)
    assert samples_and_tokens((), {"x": torch.zeros(4, dtype=torch.long)}) == (4, None)
    assert samples_and_tokens(("words",), {}) == (None, None)


def test_how_fast_data_arrive_from_another_host_is_seen_at_its_end_alone(monkeypatch):
    """Two addresses are two hosts. The thread that looks ends with whoever it looks for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0))
        here, _ = server.accept()
    with here, there:
        sockets = PeerSockets()
        sockets.find()
        sockets.counters()
        with monkeypatch.context() as patched:
            patched.setattr(peer_sockets.time, "sleep", lambda _: there.sendall(bytes(1000)))
            sockets.look_at_arrivals()
        peaks = {x.local.split(":")[0]: x.arrival_bytes_per_s for x in sockets.counters()}
        assert peaks.pop("127.0.0.1") > 0.0
        assert peaks == {"127.0.0.2": 0.0}
        monkeypatch.setattr(peer_sockets, "_BREAK_S", 0.001)
        before = set(threading.enumerate())
        sockets.watch()
        (thread,) = set(threading.enumerate()) - before
        del sockets
        thread.join(30.0)
        assert not thread.is_alive()


def test_a_rate_counts_only_the_time_in_which_data_arrive(monkeypatch):
    """5 kB each millisecond; and 50 kB at once, seen in two looks, with a break of eight."""
    now_ms = 0

    def sleep(_):
        nonlocal now_ms
        now_ms += 1

    steady, bursts = 7, 8
    monkeypatch.setattr(peer_sockets.time, "sleep", sleep)
    monkeypatch.setattr(peer_sockets.time, "perf_counter", lambda: 1e-3 * now_ms)
    monkeypatch.setattr(
        peer_sockets,
        "_arrived",
        lambda file: 5000 * now_ms if file == steady else 25_000 * (2 * (now_ms // 10) + min(now_ms % 10, 2)),
    )
    sockets = PeerSockets()
    sockets._ends = {steady: ("a:1", "b:1"), bursts: ("a:2", "c:1")}
    sockets._asked_s = peer_sockets.time.monotonic()
    for _ in range(4):
        sockets.look_at_arrivals()
    rates = [peer_sockets._rate(sockets._arrivals[ends]) for ends in sockets._ends.values()]
    assert rates == [pytest.approx(5e6, rel=0.05), pytest.approx(50e6, rel=0.15)]

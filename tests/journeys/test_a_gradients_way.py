"""A real backward passes the stations of docs/explain/a-gradients-way.md, in their order, on each of four ways.

And it is short: counted are the files and lines of paceline that run between `backward()` and `.grad`.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import sys
import threading
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
import paceline_adasum
from harness.models import generator
from harness.ranks import pool
from harness.terminal import REPOSITORY
from paceline import DistributedDataParallel
from paceline.observe import BucketTiming, StepTiming
from paceline.optim import overlap

PAGE = REPOSITORY / "docs" / "explain" / "a-gradients-way.md"
_ROW = re.compile(
    r"^\| \d \| `(\w+)` \| [^|]+ \| (?:`([^`]+)`|[^|]*) \| (?:`(\w+)\.(\w+)`)? ?\|$", re.MULTILINE
)

# Arguments of the wrapper, the group's backend, and how far the way is: files, and lines of the functions passed.
WAYS = {
    "plain": ({}, "gloo", (13, 605)),
    "shared memory": ({}, "paceline", (23, 950)),
    "int8": ({"compression": "int8"}, "gloo", (18, 865)),
    "adasum": ({"reduction": "adasum"}, "gloo", (23, 1022)),
}


def stations():
    """The page's table: (station, label in the profiler or None, class and field of the timings or None)."""
    return [
        (name, label or None, (kind, field) if field else None)
        for name, label, kind, field in _ROW.findall(PAGE.read_text())
    ]


def trainee(rank, arguments, backend):
    """A model of several buckets, large and small gradients, over a group of its own."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 4))
    group = dist.new_group(timeout=timedelta(seconds=20), backend=backend)
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}):  # no shared memory beside Gloo
        model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.05, **arguments)
    assert model.reducer.process_groups == [group]

    def step(number, around=None):
        model.zero_grad()
        output = model(torch.randn(4, 8, generator=generator(rank, number))).sum()
        if around is None:
            output.backward()
            return
        around(output.backward)

    return model, step


def recorded(rank, _num_ranks, arguments, backend):
    """Labels as the profiler saw them in one step, its timings, and how many buckets there are."""
    model, step = trainee(rank, arguments, backend)
    for number in range(2):
        step(number)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(2)
    known = {label for _, label, _ in stations()}
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [e.name for e in events if e.name in known], model.timings.last, len(model.reducer.buckets)


def first_and_last(names):
    """The names in the order of their first occurrence, and in that of their last."""
    return list(dict.fromkeys(names)), list(dict.fromkeys(reversed(names)))[::-1]


@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
def test_the_stations_are_passed_in_the_order_of_the_page(way):
    """Once a step or once a bucket, under their labels, and at times that rise from field to field."""
    arguments, backend, _ = WAYS[way]
    labels = [label for _, label, _ in stations() if label is not None]
    assert len(labels) == 6
    for names, timing, num_buckets in pool(2).run(recorded, arguments, backend):
        assert first_and_last(names) == (labels, labels)
        assert num_buckets > 1
        for station, label, _ in stations():
            per_bucket = station in ("ready", "launched", "waited")
            assert label is None or names.count(label) == (num_buckets if per_bucket else 1), station
        assert len(timing.buckets) == num_buckets
        moments = ("ready_s", "launched_s", "done_s")
        assert [field for _, _, (_, field) in stations()[2:5]] == list(moments)
        for bucket in timing.buckets:
            times = [timing.started_s, *(getattr(bucket, moment) for moment in moments)]
            assert times == sorted(times)
            assert bucket.waited_s >= 0
        assert timing.forward_s > 0


def test_the_timings_have_the_stations_names():
    """Station `x` is the field `x_s` of a step's or a bucket's timings, and the label `paceline:x`."""
    fields = {
        kind.__name__: {field.name for field in dataclasses.fields(kind)}
        for kind in (StepTiming, BucketTiming)
    }
    found = stations()
    assert [name for name, _, _ in found] == [
        "forward",
        "started",
        "ready",
        "launched",
        "done",
        "waited",
        "attached",
    ]
    for name, label, timing in found:
        assert label in (f"paceline:{name}", None) or name == "forward"
        if timing is not None:
            kind, field = timing
            assert field == f"{name}_s"
            assert field in fields[kind]


HOME = str(Path(paceline.__file__).parent) + os.sep
ADASUM = str(Path(paceline_adasum.__file__).parent) + os.sep
# What writes a step down for the doctor once its gradients are there; no gradient passes it.
_AFTERWARDS = tuple(
    HOME + place
    for place in ("recording/", "host/thread_times.py", "observe/run_records.py", "observe/spans.py")
)


def is_on_the_way(code):
    return code.co_filename.startswith((HOME, ADASUM)) and not code.co_filename.startswith(_AFTERWARDS)


def passed(rank, _num_ranks, arguments, backend):
    """What a backward runs of paceline, on all its threads: {file to open: lines}, and lines of all files.

    The least of eight: who has to wait for the other rank for long looks whether it is still there. No garbage is
    collected meanwhile: models of tests before would say goodbye within the backward.
    """
    runs, is_on = [], []

    def profile(frame, event, _):
        if is_on and event == "call" and is_on_the_way(frame.f_code):
            runs[-1].add(frame.f_code)

    def watched(backward):
        runs.append(set())
        is_on.append(True)
        sys.setprofile(profile)
        backward()
        sys.setprofile(None)
        is_on.clear()

    gc.collect()
    gc.disable()
    threading.setprofile(profile)  # for the threads that will be started
    try:
        _, step = trainee(rank, arguments, backend)
        for number in range(2):
            step(number)
        for number in range(8):
            step(number, watched)
    finally:
        threading.setprofile(None)
        gc.enable()
    return min((count(run) for run in runs), key=lambda found: (len(found[0]), found[1]))


def count(codes):
    to_open, all_lines = {}, set()
    for code in codes:
        file = code.co_filename.removeprefix(HOME)
        lines = {(file, line) for *_, line in code.co_lines() if line and line != code.co_firstlineno}
        all_lines |= lines
        if len(lines) > 2:
            to_open.setdefault(file, set()).update(lines)
    return {file: len(lines) for file, lines in sorted(to_open.items())}, len(all_lines)


@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
def test_the_way_is_short(way):
    """Files to open, and lines to read; no file is opened for functions of one or two lines.

    They answer a question or hand on a call, but their lines count.
    """
    arguments, backend, (most_files, most_lines) = WAYS[way]
    for to_open, num_lines in pool(2).run(passed, arguments, backend):
        assert len(to_open) <= most_files, " ".join(f"{f}:{n}" for f, n in to_open.items())
        assert num_lines <= most_lines, to_open


# How many files of paceline run from `model(x)` until backward returns, functions of one line and recording included,
# with a user's defaults. With forward overlap until an optimizer has stepped every parameter in the next forward.
MOST_FILES = {"between hosts": 26, "one host": 35, "forward overlap between hosts": 33}


def files_passed(rank, _num_ranks, arguments, local_world_size):
    """The files of the step that passes the fewest, of eight; another thread may look whether a rank is alive.

    The recorder keeps none of these steps. Of long ones, on a busy machine, it would keep each.
    """
    runs, is_on = [], []

    def profile(frame, event, _):
        if is_on and event == "call" and frame.f_code.co_filename.startswith(HOME):
            runs[-1].add(frame.f_code.co_filename.removeprefix(HOME))

    def watched(run):
        runs.append(set())
        is_on.append(True)
        sys.setprofile(profile)
        run()
        sys.setprofile(None)
        is_on.clear()

    gc.collect()
    gc.disable()
    threading.setprofile(profile)  # for the threads that will be started
    not_kept = mock.patch("paceline.recording.recorder._every", return_value=1 << 30)
    not_kept.start()
    try:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 200), nn.BatchNorm1d(200), nn.Linear(200, 200), nn.Linear(200, 4))
        group = dist.new_group(timeout=timedelta(seconds=20), backend="gloo")
        with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": local_world_size}):
            model = DistributedDataParallel(module, process_group=group, **arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if model.overlaps_forward:
            optimizer = overlap(optimizer, model)

        def whole(x):
            model(x).sum().backward()
            if model.overlaps_forward:
                optimizer.step()
                model.module(torch.zeros(4, 8))

        for number in range(16):
            x = torch.randn(4, 8, generator=generator(rank, number))
            if number < 8:
                whole(x)
            else:
                watched(lambda x=x: whole(x))
            optimizer.step()
        model.flush()
    finally:
        not_kept.stop()
        threading.setprofile(None)
        gc.enable()
    return min(runs, key=len)


@pytest.mark.processes
@pytest.mark.parametrize("way", MOST_FILES)
def test_a_step_passes_few_files(way):
    arguments = {"overlap_forward": "always"} if way.startswith("forward overlap") else {}
    local_world_size = "2" if way == "one host" else "1"
    for found in pool(2).run(files_passed, arguments, local_world_size):
        print(way, len(found))
        assert len(found) <= MOST_FILES[way], " ".join(sorted(found))

"""A run folder says what it can of what was written, whatever became of its writers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from paceline.errors import ConfigurationError
from paceline.observe.run_folder import RankWriter, begin_run
from paceline.observe.run_lines import from_line, to_line
from paceline.observe.run_reading import clock_offsets, read_run
from paceline.observe.run_records import (
    BucketTiming,
    Health,
    HostFacts,
    Interval,
    Labels,
    LinkCounters,
    Neighbour,
    RankHeader,
    Sample,
    StepRecord,
)

STEP = StepRecord(
    7,
    10.0,
    10.5,
    10.75,
    (
        Interval("loading", 10.0, 10.125),
        Interval("forward", 10.125, 10.25),
        Interval("backward", 10.25, 10.75),
    ),
    (BucketTiming(0, 4096, 10.375, 10.375, 10.625, 0.0), BucketTiming(1, 512, 10.5, 10.5, 10.75, 0.25)),
    ((1, 10.3125), (0, 10.5)),
    32,
    None,
    HostFacts(0.25, 0.125, 0.0625, 3, 11),
)
SAMPLE = Sample(
    7,
    10.75,
    1e9,
    (LinkCounters("10.0.0.1:1", "10.0.0.2:2", 5000, 6000, 0.5, 2, 0.001, 0.0005, "udp"),),
    (Neighbour(812, "postgres", 0.5),),
    4,
)


def header(run_id, rank, num_ranks=2, **other):
    of_it = {"host": "a", "boot_id": "b", "pid": 10 + rank, "num_cpus": 2, "num_threads": 1}
    of_it |= {
        "wrapper": "torch",
        "device": "cpu",
        "torch": "2.13",
        "began_s": 1.0,
        "began_unix_s": 1e9,
    } | other
    return RankHeader(run_id, rank, num_ranks, **of_it)


def step(number, at_s=None):
    at_s = float(number) if at_s is None else at_s
    return StepRecord(number, at_s, at_s + 0.5, at_s + 0.75)


def written(folder, num_ranks=2, num_steps=5, ranks=None):
    run = begin_run(folder, ["torchrun", "train.py"])
    for rank in range(num_ranks) if ranks is None else ranks:
        writer = RankWriter(folder, header(run.run_id, rank, num_ranks))
        for number in range(1, num_steps + 1):
            writer.write(step(number))
        writer.close()
    return run


@pytest.mark.parametrize(
    "record",
    [
        STEP,
        replace(STEP, host=None, num_samples=None, num_tokens=64, buckets=()),
        SAMPLE,
        replace(SAMPLE, neighbours=None),
        Labels(("a", "b")),
        Health(64, "ff", "", "l0.weight"),
        header("x", 3),
    ],
)
def test_a_record_is_what_its_line_says(record):
    assert from_line(to_line(record)) == record


def test_what_is_read_is_what_was_written(tmp_path):
    written(tmp_path)
    run = read_run(tmp_path)
    assert run.header.command == ("torchrun", "train.py")
    assert [rank.header.rank for rank in run.ranks] == [0, 1]
    assert [row[0].step for row in run.rows()] == [1, 2, 3, 4, 5]
    assert run.notes == ()


def test_phases_add_up_to_the_step():
    parts = replace(STEP, intervals=(*STEP.intervals, Interval("garbage", 10.1875, 10.21875))).phases_s()
    assert parts["garbage"] == 0.03125
    assert parts["forward"] == 0.125 - 0.03125
    assert parts["backward"] == 0.25  # until its own last gradient
    assert sum(parts.values()) == pytest.approx(STEP.step_s)


def test_a_file_that_is_cut_off_keeps_its_whole_lines(tmp_path):
    written(tmp_path)
    path = tmp_path / "rank1.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    run = read_run(tmp_path)
    assert [len(rank.steps) for rank in run.ranks] == [5, 4]
    assert len(run.rows()) == 4
    assert run.notes == ("rank 1's file is cut off in mid-write, after step 4",)


@pytest.mark.processes
def test_a_killed_writer_leaves_what_it_had_done(tmp_path):
    run = begin_run(tmp_path, ["x"])
    program = (
        "import os, signal, sys; sys.path[:0] = sys.argv[3].split(':')\n"
        "from pathlib import Path\nfrom paceline.observe.run_folder import RankWriter\n"
        "from paceline.observe.run_records import RankHeader, StepRecord\n"
        "h = RankHeader(sys.argv[2], 0, 1, 'a', 'b', 1, 1, 1, 'torch', 'cpu', '2', 1.0, 1.0)\n"
        "w = RankWriter(Path(sys.argv[1]), h)\n"
        "for n in range(1, 4): w.write(StepRecord(n, n, n + .5, n + .7))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    words = [sys.executable, "-c", program, str(tmp_path), run.run_id, ":".join(sys.path)]
    assert subprocess.run(words, timeout=60, check=False).returncode == -9
    assert [x.step for x in read_run(tmp_path).ranks[0].steps] == [1, 2, 3]


def test_ranks_without_a_record_are_named(tmp_path):
    written(tmp_path, num_ranks=4, ranks=[0, 2])
    run = read_run(tmp_path)
    assert run.num_ranks == 4
    assert run.notes == ("ranks 1, 3 of 4 left no record",)


def test_a_run_in_which_nothing_was_trained_says_so(tmp_path):
    begin_run(tmp_path, ["true"])
    run = read_run(tmp_path)
    assert run.rows() == []
    assert "no rank has recorded anything" in run.notes[0]


def test_a_rank_that_ended_before_its_first_step_says_so(tmp_path):
    written(tmp_path, num_ranks=1, num_steps=0)
    assert read_run(tmp_path).notes == ("rank 0 has completed no step",)


def test_a_folder_is_for_one_run(tmp_path):
    written(tmp_path)
    with pytest.raises(ConfigurationError, match="holds a run already"):
        begin_run(tmp_path, ["y"])


def test_lines_of_another_job_are_left_out_and_counted(tmp_path):
    written(tmp_path)
    other = RankWriter(tmp_path, header("other", 0))
    other.write(step(6))
    other.close()
    run = read_run(tmp_path)
    assert [len(rank.steps) for rank in run.ranks] == [5, 5]
    assert run.notes == (
        "rank0.jsonl: 2 lines of another job, which writes into the same folder, were left out",
    )


def test_a_rank_that_is_started_again_counts_from_there(tmp_path):
    run = written(tmp_path)
    again = RankWriter(tmp_path, header(run.run_id, 1, pid=99))
    again.write(step(1, 100.0))
    again.close()
    found = read_run(tmp_path)
    assert [x.began_s for x in found.ranks[1].steps] == [100.0]
    assert found.notes == ("rank 1 was started 2 times; its last life counts",)


def test_unknown_kinds_and_broken_lines_are_left_out_and_counted(tmp_path):
    written(tmp_path)
    with (tmp_path / "rank0.jsonl").open("ab") as file:
        file.write(b'{"kind":"of a later version","x":1}\n{"kind":"step","step":"six"}\n\xff\xfe\n')
        file.write(b'{"kind":"step","step":6,"began_s":5,"work_ended_s":4,"ended_s":6}\n[1]\n')
        file.write(to_line(step(6)).replace(b"}", b',"of a later version":1}'))
    run = read_run(tmp_path)
    assert [x.step for x in run.ranks[0].steps] == [1, 2, 3, 4, 5, 6]
    assert run.notes == (
        "rank0.jsonl: 4 lines could not be read",
        "rank0.jsonl: 1 lines of kinds that this version does not know",
    )


def test_a_run_of_another_version_is_refused_by_name(tmp_path):
    written(tmp_path)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 9, "paceline": "3.1"}))
    with pytest.raises(ConfigurationError, match=r"version 9, from Paceline 3\.1"):
        read_run(tmp_path)


@pytest.mark.parametrize("words", ["", "{", "[]", '{"format": "else"}', "[" * 9999])
def test_a_folder_without_a_run_is_refused(tmp_path, words):
    (tmp_path / "run.json").write_text(words)
    with pytest.raises(ConfigurationError, match="there is no run in"):
        read_run(tmp_path)
    with pytest.raises(ConfigurationError, match="there is no run in"):
        read_run(tmp_path / "nowhere")


def test_a_long_run_keeps_its_last_steps_in_bounded_files(tmp_path):
    run = begin_run(tmp_path, ["x"])
    writer = RankWriter(tmp_path, header(run.run_id, 0, 1), most_bytes=2000)
    writer.write(Labels(("first", "second")))
    for number in range(1, 1001):
        writer.write(step(number))
    writer.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("rank*")) <= 4000
    found = read_run(tmp_path).ranks[0]
    assert found.steps[-1].step == 1000
    assert [x.step for x in found.steps] == list(range(found.steps[0].step, 1001))
    assert found.labels == ("first", "second")


def test_a_rank_that_cannot_write_trains_on(tmp_path, capsys):
    run = begin_run(tmp_path, ["x"])
    writer = RankWriter(tmp_path / "nowhere", header(run.run_id, 0))
    writer.write(step(1))
    assert "rank 0 cannot write" in capsys.readouterr().err


def test_clocks_of_one_kernel_are_one(tmp_path):
    written(tmp_path)
    assert {x.source for x in clock_offsets(read_run(tmp_path)).values()} == {"same clock"}


def test_clocks_are_aligned_by_what_all_ranks_leave_together(tmp_path):
    run = begin_run(tmp_path, ["x"])
    for rank, ahead_s in ((0, 0.0), (1, 3600.0)):
        writer = RankWriter(tmp_path, header(run.run_id, rank, boot_id=str(rank)))
        for number in range(1, 30):
            writer.write(step(number, ahead_s + number + 0.001 * rank * (number % 2)))
        writer.close()
    found = clock_offsets(read_run(tmp_path))[1]
    assert found.source == "ends of steps"
    assert found.aligned_s(3605.0) == pytest.approx(5.0, abs=0.002)
    assert found.error_s == pytest.approx(0.0005, abs=1e-5)


def test_clocks_of_good_quartz_are_kept_together_over_minutes(tmp_path):
    run = begin_run(tmp_path, ["x"])
    for rank, rate in ((0, 1.0), (1, 1.0001)):
        writer = RankWriter(tmp_path, header(run.run_id, rank, boot_id=str(rank)))
        for number in range(1, 301):
            writer.write(step(number, rate * number))
        writer.close()
    found = clock_offsets(read_run(tmp_path))[1]
    assert [found.aligned_s(1.0001 * x) for x in (1.0, 150.0, 300.0)] == pytest.approx(
        [1, 150, 300], abs=1e-3
    )
    assert found.error_s < 1e-3

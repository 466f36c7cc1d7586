"""A timeline is what Chrome's format asks for, whatever the records say, and holds what happened."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.recorded_runs import FORWARD_S, rank_header, write_run
from paceline.errors import ConfigurationError
from paceline.observe.run_folder import RankWriter, header_of
from paceline.observe.run_reading import RankRun, Run, read_run
from paceline.observe.run_records import BucketTiming, Interval, RunHeader, StepRecord
from paceline.report.chrome_trace import timeline_of
from paceline.report.files import launched, write_timeline

# What each kind of event must have, and may have; "Trace Event Format", sections on events.
NEEDED = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "tid", "args"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}


def check_format(events):
    """Fail unless a reader of the format takes all of it: slices of a track nest, flows are whole and lie in slices."""
    slices = {}
    for event in events:
        kind = event["ph"]
        assert NEEDED[kind] <= set(event), event
        assert set(event) - NEEDED[kind] - {"ph", "args", "cat"} == set(), event
        if kind == "M":
            continue
        assert event["ts"] >= 0, event
        if kind == "X":
            assert event["dur"] > 0, event
            slices.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for spans in slices.values():
        around = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= start + 0.05:
                around.pop()
            assert not around or end <= around[-1] + 0.11, (start, end, around)
            around.append(end)
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    for number, begin in begins.items():
        assert begin["ts"] <= ends[number]["ts"]
        for event in (begin, ends[number]):
            track = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in track), event
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert set(slices) <= named


def _of(folder, **options):
    return timeline_of(read_run(folder), **options)


def test_every_rank_is_there_with_its_phases(tmp_path):
    write_run(tmp_path / "run", late_s=lambda rank, _: 0.03 * (rank == 1))
    found = _of(tmp_path / "run")
    events = json.loads(found.text)["traceEvents"]
    check_format(events)
    names = {(event["pid"], event["name"]) for event in events if event["ph"] == "X"}
    for rank in range(3):
        expected = {
            "step 1",
            "step 20",
            "forward",
            "backward",
            "waiting",
            "bucket 0 is sent",
            "bucket 1 is sent",
        }
        assert {name for pid, name in names if pid == rank} >= expected
    forward = next(event for event in events if event["name"] == "forward")
    assert forward["dur"] == pytest.approx(1e6 * FORWARD_S, abs=0.2)
    # An arrow a step to each of the two that wait for rank 1.
    assert {(event["pid"]) for event in events if event["ph"] == "s"} == {1}
    assert sum(event["ph"] == "f" for event in events) == 40


def test_kilobytes_a_step(tmp_path):
    write_run(tmp_path / "run", num_steps=100)
    found = _of(tmp_path / "run")
    assert len(found.text) / 300 < 2000
    assert _of(tmp_path / "run", most_steps=10).num_left_out == 90
    first = min(event["ts"] for event in _of(tmp_path / "run", most_steps=10).events if event["ph"] == "X")
    assert first == 0


def test_clocks_an_hour_apart(tmp_path):
    """Ranks of other hosts, whose clocks began elsewhere."""
    write_run(tmp_path / "run", late_s=lambda rank, _: 0.03 * (rank == 2), clocks_s={1: 3600.0, 2: -0.5})
    found = _of(tmp_path / "run")
    check_format(found.events)
    starts = {event["pid"]: event["ts"] for event in found.events if event["name"] == "step 1"}
    assert max(starts.values()) - min(starts.values()) < 1
    assert found.facts["clocks"]["rank 0"] == "the first rank's own"
    assert found.facts["clocks"]["rank 1"].startswith("aligned by ends of steps")
    assert {event["pid"] for event in found.events if event["ph"] == "s"} == {2}


def test_nobody_is_pointed_at_within_the_clocks_error(tmp_path):
    """Rank 1 is late by a millisecond in every other step; its clock is known to five only."""
    write_run(tmp_path / "run", num_ranks=2, late_s=lambda rank, _: 1e-3 * rank, clocks_s={1: 7.0})
    run = read_run(tmp_path / "run")
    assert [event for event in timeline_of(run).events if event["ph"] == "s"]
    for step in range(0, 20, 2):  # it leaves every other step later than rank 0
        record = run.ranks[1].steps[step]
        run.ranks[1].steps[step] = replace(record, ended_s=record.ended_s + 0.01)
    assert not [event for event in timeline_of(run).events if event["ph"] in "sf"]


def test_a_rank_that_left_nothing_and_one_that_was_cut_off(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "rank2.jsonl").unlink()
    path = tmp_path / "run" / "rank1.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    found = _of(tmp_path / "run")
    check_format(found.events)
    assert any("ranks 2 of 3 left no record" in note for note in found.facts["notes"])
    assert any("cut off in mid-write" in note for note in found.facts["notes"])


def test_a_run_without_a_step_is_an_error_that_says_why(tmp_path):
    write_run(tmp_path / "run", num_steps=0)
    with pytest.raises(ConfigurationError, match=r"no complete step yet.*has completed no step"):
        write_timeline(tmp_path / "run", tmp_path / "t.json", 10)
    assert not (tmp_path / "t.json").exists()


def test_another_versions_run(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(ConfigurationError, match="is of version 9"):
        write_timeline(tmp_path / "run", tmp_path / "t.json", 10)


def test_two_jobs_in_one_folder(tmp_path):
    """The second is refused as it begins; lines that got in all the same are left out, and counted."""
    write_run(tmp_path / "run", num_ranks=1)
    with pytest.raises(ConfigurationError, match="holds a run already"):
        write_run(tmp_path / "run", num_ranks=1)
    writer = RankWriter(tmp_path / "run", rank_header("another", 0, 1))
    writer.write(StepRecord(99, 1.0, 1.5, 2.0))
    writer.close()
    found = _of(tmp_path / "run")
    assert found.num_steps == 20
    assert any("of another job" in note for note in found.facts["notes"])
    assert header_of(tmp_path / "run").run_id != "another"


def test_the_file_is_replaced_at_once(tmp_path):
    write_run(tmp_path / "run")
    out = tmp_path / "t.json"
    out.write_text("before")
    words = write_timeline(tmp_path / "run", out, 5)
    assert "5 steps of 3 ranks, 15 earlier ones left out" in words
    json.loads(out.read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "t.json"]


@pytest.mark.parametrize(
    ("command", "first"),
    [(["train.py", "--epochs", "3"], "paceline"), (["--nproc-per-node", "2", "train.py"], "paceline")],
)
def test_a_script_is_launched(command, first):
    words = launched(command)
    assert words[1:4] == ["-m", first, "run"]
    assert words[4:] == command
    assert launched(["torchrun", "train.py"]) == ["torchrun", "train.py"]


SECONDS = st.floats(0, 10)
SPANS = st.tuples(SECONDS, SECONDS).map(sorted)


@given(
    st.lists(
        st.tuples(SPANS, st.sampled_from(["forward", "backward", "optimizer", "garbage", "new one"])),
        max_size=8,
    ),
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS).map(sorted), max_size=6),
    st.tuples(SECONDS, SECONDS, SECONDS).map(sorted),
)
def test_whatever_was_recorded_nests(spans, buckets, ends):
    """Intervals that overlap, or leave the step: the file stays readable."""
    step = StepRecord(
        1,
        *ends,
        tuple(Interval(name, *span) for span, name in spans),
        tuple(BucketTiming(number, 8, *times, 0.0) for number, times in enumerate(buckets)),
    )
    rank = RankRun(replace(rank_header("x", 0, 1), began_s=0.0), [step])
    found = timeline_of(Run(RunHeader("x", (), 0.0, "0"), (rank,)))
    slices = [event for event in found.events if event["ph"] == "X"]
    for track in {event["tid"] for event in slices}:
        around = []
        spans_of_track = [(e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == track]
        for start, end in sorted(spans_of_track, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= start + 0.05:
                around.pop()
            assert not around or end <= around[-1] + 0.11
            around.append(end)

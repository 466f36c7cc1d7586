"""The order and the time limit of `make test-gpu`. The cases themselves run on the emulated device."""

from __future__ import annotations

from device import cases, our_cases
from device.real import FIRST, Device, Report, table, try_cases


def test_what_comes_first_are_cases():
    known = {**cases.CASES, **our_cases.CASES}
    names = [name for group in FIRST.values() for name in group]
    assert set(names) <= known.keys()
    assert len(names) == len(set(names))


def test_after_the_time_nothing_begins_and_the_report_says_what_was_left_out(monkeypatch):
    monkeypatch.setattr("device.real.Ranks", None)  # which would fail if called
    report = Report({}, {}, seconds=240.0)
    try_cases(report, Device("cuda", "nccl", 1), {}, ["mlp", "failed step"], until_s=0.0)
    assert report.left_out == [
        "plain, torch, mlp",
        "plain, nccl, mlp",
        "plain, nccl, failed step",
        "plain, paceline, mlp",
        "plain, paceline, failed step",
    ]
    assert "5 were left out after 240 s" in table(report)


def test_the_table_counts_by_what_a_user_wants_to_know():
    report = Report({}, {})
    report.cases = [{"case": "mlp", "result": ""}, {"case": "overlapped", "result": "wrong"}]
    lines = [" ".join(line.split()) for line in table(report).splitlines()]
    assert "DDP 1 of 1 passed" in lines
    assert "forward overlap 0 of 1 passed" in lines
    assert "all 1 of 2 passed" in lines

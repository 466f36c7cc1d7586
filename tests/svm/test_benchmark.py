"""The benchmark runs as a user types it, at its smallest; never its times."""

from __future__ import annotations

import json

from terminal import REPOSITORY, run


def test_the_benchmark_reports_every_side(tmp_path):
    command = ["python", "-m", "benchmarks.svm", "--quick", "--json", "--results-folder", str(tmp_path)]
    done = run([*command, "--sides", "sklearn,one,ranks", "--ranks", "2"], cwd=REPOSITORY, temporary=tmp_path)
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert json.loads((tmp_path / "svm-quick.json").read_text()) == record
    assert all(len(row) == len(record["columns"]) for row in record["rows"])
    times = record["samples"]["digits:bin"]["fit_s"]
    assert list(times) == ["sklearn", "one", "ranks"]
    assert all(len(of_side) == 2 for of_side in times.values())
    assert record["samples"]["digits:bin"]["gap"] <= 1e-3

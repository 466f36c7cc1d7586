"""The benchmark runs as a user types it, at its smallest; never its times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_benchmark_reports_every_side(tmp_path):
    command = [sys.executable, "-m", "benchmarks.svm", "--quick", "--json", "--results-folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--sides", "sklearn,one,ranks", "--ranks", "2"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert json.loads((tmp_path / "svm-quick.json").read_text()) == record
    assert all(len(row) == len(record["columns"]) for row in record["rows"])
    times = record["samples"]["digits:bin"]["fit_s"]
    assert list(times) == ["sklearn", "one", "ranks"]
    assert all(len(of_side) == 2 for of_side in times.values())
    assert record["samples"]["digits:bin"]["gap"] <= 1e-3

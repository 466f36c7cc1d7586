"""The benchmark runs as a user types it, at its smallest; never its times."""

from __future__ import annotations

import json

import pytest

from harness.terminal import REPOSITORY, run
from paceline_lab.experiments.kernel_svm.elimination import HEURISTICS

pytestmark = pytest.mark.compiles


@pytest.mark.lab
def test_the_benchmark_reports_every_side(tmp_path):
    command = ["paceline", "study", "svm", "--quick", "--json", "--report", str(tmp_path)]
    done = run(
        [*command, "--sides", "sklearn,one,ranks", "--ranks-per-host", "2"],
        cwd=REPOSITORY,
        temporary=tmp_path,
    )
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert json.loads((tmp_path / "svm-quick.json").read_text()) == record
    assert all(len(row) == len(record["columns"]) for row in record["rows"])
    times = record["samples"]["digits:bin"]["fit_s"]
    assert list(times) == ["sklearn", "one", "ranks"]
    assert all(len(of_side) == 2 for of_side in times.values())
    assert record["samples"]["digits:bin"]["gap"] <= 1e-3


@pytest.mark.lab
def test_every_heuristic_is_counted_on_both_caches(tmp_path):
    """Shrinking can only save kernel values by dropping samples, and without a cache there is no other way."""
    command = ["paceline", "study", "svm-elimination", "--quick", "--json", "--parts", str(tmp_path)]
    command += ["--clock", "cpu", "--report", str(tmp_path)]
    first = run(command, cwd=REPOSITORY, temporary=tmp_path)
    assert first.code == 0, first.err
    record = json.loads(first.out)
    assert all(len(row) == len(record["columns"]) for row in record["rows"])
    for cache in ("no cache", "default"):
        costs = record["samples"]["synthetic-4000x8"][cache]
        assert len(costs) == len(HEURISTICS)
        assert all(len(cost["times_s"]) == 1 and cost["num_kernel_values"] > 0 for cost in costs.values())
        assert costs["none"]["num_reconstructions"] == 0 < costs["multi-500"]["num_reconstructions"]
        assert record["summaries"][cache]["kernel values"]["geometric mean"]["none"] == 1.0
    again = json.loads(run(command, cwd=REPOSITORY, temporary=tmp_path).out)
    assert again["samples"] == record["samples"], "what is kept is not measured again"

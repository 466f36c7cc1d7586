"""Every benchmark runs as a user types it, at its smallest, and leaves JSON of the promised shape. Never its times."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SHAPE = {
    "name",
    "question",
    "columns",
    "rows",
    "verdicts",
    "notes",
    "config",
    "summaries",
    "samples",
    "provenance",
}
ORIGIN = {"command", "date", "git_hash", "git_dirty", "torch_version", "cpu_model", "num_cores", "num_ranks"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=110
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["step_time", "--workload", "tiny", "--ranks", "2"],
        ["overhead", "--sides", "torch,ours,ours-unused"],
        ["memory", "--sides", "torch,ours"],
        ["overlap"],
        ["compression"],
        ["auto_compression"],
    ],
    ids="-".join,
)
def test_benchmark_reports(arguments: list[str], tmp_path: Path) -> None:
    """A row for every side, raw samples, a figure, and where it all comes from; the same JSON on stdout and on disk."""
    done = run(
        f"benchmarks.{arguments[0]}", *arguments[1:], "--quick", "--json", "--results-folder", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert set(record) >= SHAPE
    assert set(record["provenance"]) >= ORIGIN
    assert record["samples"]
    assert record["rows"]
    assert all(len(row) == len(record["columns"]) for row in record["rows"])
    baseline = {"compression": {"memcpy", "int8"}, "auto_compression": {"light", "loopback"}}.get(
        arguments[0], {"torch", "ours"}
    )
    assert baseline <= {cell for row in record["rows"] for cell in row}
    assert json.loads((tmp_path / f"{record['name']}.json").read_text()) == record
    assert (tmp_path / f"{record['name']}.png").exists() or not _has_matplotlib()


def test_the_benchmark_of_optimizers_reports(tmp_path: Path) -> None:
    """A row for LARS and one for LAMB, each with its peer."""
    done = run("benchmarks.optimizers", "--quick", "--json", "--results-folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert set(record) >= SHAPE
    assert [row[1:3] for row in record["rows"]] == [["LARS", "torch SGD"], ["LAMB", "torch Adam"]]


@pytest.mark.slow
def test_adasum_benchmark_reports(tmp_path: Path) -> None:
    """Over both backends, and with two ranks no more bytes than the limit, but for dot products and headers."""
    done = run("benchmarks.adasum", "--quick", "--json", "--results-folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert set(record) >= SHAPE
    assert [row[0].partition(":")[0] for row in record["rows"]] == ["gloo", "paceline"]
    assert all(1.0 <= float(row[-1]) < 1.05 for row in record["rows"])


def test_an_unknown_name_is_one_paragraph() -> None:
    """No traceback for a typing mistake; the message lists what there is."""
    done = run("benchmarks.step_time", "--workload", "resnet5")
    assert done.returncode == 1
    assert "resnet50" in done.stderr
    assert "Traceback" not in done.stderr


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None

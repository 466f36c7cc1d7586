"""Experiments run as a user types them, at their smallest, and leave JSON of the promised shape. Never its times."""

import importlib.util
import json
from pathlib import Path

import pytest

from harness.terminal import Finished, run

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


def study(*arguments: str, folder: Path) -> Finished:
    return run(["paceline", "study", *arguments], cwd=folder, temporary=folder)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["step-time", "--workload", "tiny", "--ranks-per-host", "2"],
        ["overhead", "--sides", "torch,ours,ours-unused"],
        ["memory", "--sides", "torch,ours"],
        ["overlap"],
        ["forward-overlap"],
        ["forward-overlap-loss"],
        ["skipped-layers"],
        ["compression"],
        ["auto-compression"],
        ["auto-choices"],
        ["unequal"],
        ["time-to-loss"],
    ],
    ids="-".join,
)
def test_experiment_reports(arguments: list[str], tmp_path: Path) -> None:
    """A row for every side, raw samples, a figure, and where it all comes from; the same JSON on stdout and on disk."""
    done = study(
        arguments[0],
        *arguments[1:],
        "--quick",
        "--json",
        "--report",
        str(tmp_path),
        folder=tmp_path,
    )
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert set(record) >= SHAPE
    assert set(record["provenance"]) >= ORIGIN
    assert record["samples"]
    assert record["rows"]
    assert all(len(row) == len(record["columns"]) for row in record["rows"])
    baseline = {
        "compression": {"memcpy", "int8"},
        "skipped-layers": {"torch", "ours-skip"},
        "auto-compression": {"light", "loopback"},
        "auto-choices": {"all", "bf16"},
        "unequal": {"1:4", "2"},
        "time-to-loss": {"text 1:3"},
    }.get(arguments[0], {"torch", "ours"})
    assert baseline <= {cell for row in record["rows"] for cell in row}
    assert json.loads((tmp_path / f"{record['name']}.json").read_text()) == record
    assert (tmp_path / f"{record['name']}.png").exists() or not _has_matplotlib()


@pytest.mark.lab
def test_optimizers_report(tmp_path: Path) -> None:
    """A row for LARS and one for LAMB, each with its peer."""
    done = study("optimizers", "--quick", "--json", "--report", str(tmp_path), folder=tmp_path)
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert set(record) >= SHAPE
    assert [row[1:3] for row in record["rows"]] == [["LARS", "torch SGD"], ["LAMB", "torch Adam"]]


@pytest.mark.lab
@pytest.mark.slow
def test_adasum_reports(tmp_path: Path) -> None:
    """Over Gloo no more bytes than the limit, but for dot products and headers; in shared memory none."""
    done = study("adasum", "--quick", "--json", "--report", str(tmp_path), folder=tmp_path)
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert set(record) >= SHAPE
    assert [row[0].partition(":")[0] for row in record["rows"]] == ["gloo", "paceline"]
    assert 1.0 <= float(record["rows"][0][-1]) < 1.05
    assert float(record["rows"][1][-1]) == 0.0


@pytest.mark.lab
@pytest.mark.slow
def test_collectives_report(tmp_path: Path) -> None:
    """A row for each collective and way to call it, and FSDP2's step."""
    done = study("collectives", "--quick", "--json", "--report", str(tmp_path), folder=tmp_path)
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert set(record) >= SHAPE
    names = [row[0] for row in record["rows"]]
    assert names[:3] == [f"all-reduce of 1 KiB, {way}" for way in ("back to back", "alone", "fresh")]
    assert names[-1] == "step of FSDP2"


@pytest.mark.processes
def test_flags_have_no_type_in_an_experiments_help(tmp_path: Path) -> None:
    """They take no value, as those of `paceline`'s commands."""
    done = study("overhead", "--help", folder=tmp_path)
    assert done.code == 0
    assert "--quick" in done.out
    assert "bool" not in done.out


@pytest.mark.processes
def test_an_unknown_name_is_one_paragraph(tmp_path: Path) -> None:
    """No traceback for a typing mistake; the message lists what there is."""
    done = study("step-time", "--workload", "resnet5", folder=tmp_path)
    assert done.code == 2
    assert "resnet50" in done.err
    assert "Traceback" not in done.err


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None

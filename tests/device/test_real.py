"""The order and the time limit of `make test-gpu`. The cases themselves run on the emulated device."""

from __future__ import annotations

import pytest

from device import cases, our_cases
from device.late import build
from device.real import FIRST, Device, Report, table, try_cases
from harness.terminal import REPOSITORY


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


@pytest.mark.processes
@pytest.mark.compiles
@pytest.mark.lab
@pytest.mark.timeout(600)  # the first test of a run builds the device for a minute
@pytest.mark.skipif(build.missing() is not None, reason="no C++ compiler to build the emulated device with")
@pytest.mark.filterwarnings("ignore")  # Jupyter's, about itself
def test_the_notebook_for_a_hosted_gpu_runs_and_leaves_a_report(tmp_path, monkeypatch):
    """All cells but the installation, which would change this environment; the device is the emulated one."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.reads((REPOSITORY / "examples" / "gpu_report.ipynb").read_text(), 4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", ())]
    assert len(notebook.cells) == 8
    for name, value in {
        "DEVICE": "late",
        "ARGS": "--no-times --cases mlp",
        "PACELINE_SOURCE": str(REPOSITORY),
    }.items():
        monkeypatch.setenv(name, value)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=550, kernel_name="python3", resources=where).execute()
    shown = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(shown)
    assert "exit code 0" in text, text
    assert "plain     nccl      mlp                        ok" in text
    assert (tmp_path / "paceline-late.json").exists()

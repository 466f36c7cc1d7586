"""`paceline bench` as a user types it: real processes, JSON and a figure; bad input before any work."""

from __future__ import annotations

import importlib.util
import json
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.terminal import alive, paceline, started
from paceline.cli import main

TIMED = ["--workload", "resnet50", "--scale", "100", "--compute-s", "0.01", "--rounds", "2"]


def why_no_cluster() -> str | None:
    """Say why hosts cannot be emulated here; None if they can."""
    from paceline.errors import PacelineError
    from paceline_lab.emulation import ClusterSpec, EmulatedCluster

    try:
        with EmulatedCluster(ClusterSpec(hosts=1)):
            return None
    except (PacelineError, ImportError) as error:
        return str(error)


def the_json(folder: Path, stdout: str) -> dict[str, object]:
    """The report on stdout, which is also the one on disk, beside its figure."""
    record = json.loads(stdout)
    assert json.loads((folder / f"{record['name']}.json").read_text()) == record
    if importlib.util.find_spec("matplotlib"):
        assert (folder / f"{record['name']}.png").stat().st_size > 10_000
    assert all(len(row) == len(record["columns"]) for row in record["rows"])
    return record


@pytest.mark.slow
@pytest.mark.processes
def test_step_on_loopback(tmp_path: Path) -> None:
    """Ours against two of torch's: JSON alone on stdout, provenance, the limit, and the words 'timed compute'."""
    report = tmp_path / "report"
    words = ["--vs", "torch,torch-fp16", "--ranks-per-host", "2", "--report", str(report), "--json"]
    done = paceline("bench", "step", *TIMED, *words, cwd=tmp_path)
    assert done.code == 0, done.err
    record = the_json(report, done.out)
    assert [row[0] for row in record["rows"]] == ["paceline", "torch", "torch-fp16"]
    assert record["columns"][2] == "ratio to torch"
    assert record["summaries"]["compute"] == "timed"
    assert any("timed compute" in note for note in record["notes"])
    assert record["summaries"]["limit"]["link_s"] is None
    assert record["summaries"]["sides"]["paceline"]["error"] == 0
    assert record["provenance"]["num_ranks"] == 2
    assert record["provenance"]["command"].startswith("paceline bench step")
    assert record["place"]["ranks"] == "2"


@pytest.mark.lab
@pytest.mark.processes
def test_allreduce_on_loopback(tmp_path: Path) -> None:
    """A row for every size, in a table for people."""
    report = tmp_path / "report"
    words = ["--sizes", "64KiB,1MiB", "--rounds", "2", "--report", str(report), "--explain"]
    done = paceline("bench", "allreduce", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "65,536 bytes over 2 ranks on one host: shared memory" in done.out.replace("\n", "")
    assert "How long does an all-reduce take on 2 ranks?" in done.out
    cases = json.loads((report / "allreduce-2ranks.json").read_text())["summaries"]["cases"]
    found = [(case["size_bytes"], case["side"]) for case in cases]
    assert found == [(size, side) for size in (65536, 2**20) for side in ("gloo", "paceline")]
    for case in cases:
        assert case["algbw_bytes_per_s"] == pytest.approx(case["size_bytes"] / case["time_s"]["median"])


@pytest.mark.lab
def test_step_on_an_emulated_cluster(tmp_path: Path) -> None:
    """Two hosts behind 200 Mbit/s: the limit is the bytes over the rate, and no side beats it by more than noise."""
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(f"hosts cannot be emulated here: {reason}")
    report = tmp_path / "report"
    words = ["--vs", "torch", "--hosts", "2", "--rate", "200Mbit", "--report", str(report), "--json"]
    done = paceline("bench", "step", *TIMED, *words, cwd=tmp_path)
    assert done.code == 0, done.err
    record = the_json(report, done.out)
    limit = record["summaries"]["limit"]
    assert limit["link_s"] == pytest.approx(limit["bytes_per_rank"] / 25e6)
    assert limit["communication_s"] > 0.8 * limit["link_s"]
    assert record["place"]["TCP"] == "cubic"
    assert record["summaries"]["sides"]["torch"]["error"] == 0


@pytest.mark.processes
def test_nothing_is_left_after_sigkill(tmp_path: Path) -> None:
    """Not a rank, not a temporary file: the watchdogs see to it a moment later."""
    words = [
        "--workload",
        "resnet50",
        "--scale",
        "100",
        "--rounds",
        "1000",
        "--report",
        str(tmp_path / "report"),
    ]
    with started(["paceline", "bench", "step", *words], tmp_path) as process:
        until(lambda: sum("paceline_lab.bench.rank_program" in line for line in alive(process).values()) >= 2)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        until(lambda: not alive(process) and not list((tmp_path / "tmp").glob("paceline-*")))


def until(condition: Callable[[], bool]) -> None:
    """Ask again until it holds or most of a minute has passed."""
    deadline_s = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline_s
        select.select([], [], [], 0.05)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.parametrize("peer", ["accelerate", "deepspeed", "torchft"])
def test_peer_gets_the_mean(peer: str, tmp_path: Path) -> None:
    """Where it is installed: its gradients are the mean, on every rank."""
    if importlib.util.find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed (lab/peers-requirements.txt)")
    words = ["--vs", peer, "--report", str(tmp_path / "report"), "--json"]
    done = paceline("bench", "step", *TIMED, *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads(done.out)["summaries"]["sides"][peer]["error"] == 0


@pytest.mark.slow
def test_mpi_gets_the_sum(tmp_path: Path) -> None:
    """Where it is installed: under mpirun, in launches of its own between Gloo's."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed (lab/peers-requirements.txt)")
    words = ["--sizes", "64KiB", "--vs", "gloo,mpi4py", "--rounds", "2", "--report", str(tmp_path / "report")]
    done = paceline("bench", "allreduce", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "alternating launches" in done.out


STEP, ALL = ["bench", "step", "--workload", "tiny"], ["bench", "allreduce"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*STEP, "--workload", "resnet5"], "There are: tiny"),
        ([*STEP, "--vs", "torsh"], "--vs 'torsh': there is no side called torsh"),
        ([*STEP, "--vs", "paceline-forward"], "no side called paceline-forward"),
        ([*STEP, "--vs", ""], "There are:"),
        ([*STEP, "--vs", "torch,none"], "--vs none does not synchronize"),
        ([*STEP, "--rounds", "1"], "--rounds 1 gives no spread"),
        ([*STEP, "--steps", "0"], "--steps 0 measures nothing"),
        ([*STEP, "--ranks-per-host", "0"], "--ranks-per-host 0 measures nothing"),
        ([*STEP, "--nproc-per-node", "2,1"], "--ranks-per-host 2,1 is not a whole number"),
        ([*STEP, "--rate", "1Gbit"], "Pass --hosts N"),
        ([*STEP, "--hosts", "2", "--rate", "1"], "rate"),
        ([*STEP, "--hosts", "0"], "hosts"),
        ([*STEP, "--compute", "dreamt"], "neither timed nor real"),
        ([*STEP, "--compute", "real", "--scale", "2"], "--scale divides"),
        ([*STEP, "--compute", "real", "--compute-s", "1"], "--compute timed"),
        ([*STEP, "--scale", "0.5"], "--scale 0.5"),
        ([*STEP, "--compute-s", "-1"], "--compute-s -1"),
        ([*STEP, "--profile", "no-such-file.json"], "cannot be read"),
        ([*STEP, "--workload", "mlstm-8k", "--ranks-per-host", "200"], "of memory"),
        ([*ALL, "--sizes", "64"], "--sizes"),
        ([*ALL, "--vs", "glue"], "There are: gloo"),
        ([*ALL, "--vs", "gloo,gloo"], "name each side once"),
        ([*ALL, "--rounds", "1"], "--rounds 1"),
        (
            ["bench", "profile", "--workload", "tiny", "--out", "no-such-folder/p.json"],
            "there is no folder no-such-folder",
        ),
        (
            ["bench", "profile", "--workload", "tiny", "--out", "p.json", "--device", "abacus"],
            "--device abacus",
        ),
    ],
)
def test_bad_input_is_one_paragraph_before_any_work(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, what to do next, and not even a report folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("paceline: ")
    assert expected in message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which package, and the requirements that have it."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name)
    )
    with pytest.raises(SystemExit):
        main([*STEP, "--vs", "torch,deepspeed"])
    message = capsys.readouterr().err
    assert "deepspeed is not installed; pip install -r lab/peers-requirements.txt" in message


def test_workloads_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """With their sizes; in JSON for scripts."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "workloads", "--json"])
    assert ended.value.code == 0
    rows = {row["workload"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["resnet50"]["tensors"], rows["resnet50"]["parameters"]) == (161, 25_557_032)
    assert {"bert", "vgg16", "mlstm-4k", "mlstm-8k", "wide_mlp", "transformer", "tiny"} <= set(rows)

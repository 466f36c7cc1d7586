"""`paceline demo` as a newcomer types it, and what it believes about its own numbers."""

from __future__ import annotations

import json
import os
import signal
import threading

import numpy as np
import pytest
from sklearn.datasets import load_digits

from harness.terminal import alive, paceline, started
from paceline.cli import main
from paceline.demo import images as demo_images
from paceline.demo.comparison import difference, heard
from paceline.launch import num_cores


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """One run with the defaults but fewer epochs: its folder, what it showed, and its rows."""
    folder = tmp_path_factory.mktemp("demo")
    done = paceline("demo", "--epochs", "4", "--json", cwd=folder)
    assert done.code == 0, done.err
    return folder, done.err, json.loads(done.out)


@pytest.mark.slow
@pytest.mark.processes
def test_the_demo_shows_progress_the_promise_and_where_time_goes(shown):
    folder, text, _ = shown
    for rank in (0, 1):
        assert f"rank {rank}  epoch  4/4  loss " in text
    for words in (
        "samples/s",
        "test accuracy",
        "bitwise the same",
        "summation order, as promised",
        "exposed",
    ):
        assert words in text
    assert "Warning" not in text
    # torch's compiler keeps a cache of its own as soon as an optimizer is imported.
    assert not [path for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor")]


@pytest.mark.processes
def test_the_rows_are_equal(shown):
    rows = shown[2]
    parallel, single = rows["trainings"]
    assert len(parallel["losses"]) == len(single["losses"]) == 4
    assert parallel["losses"] == pytest.approx(single["losses"], rel=1e-9)
    assert parallel["accuracy"] == single["accuracy"] > 0.8
    assert rows["ranks_bitwise_equal"]
    assert 0 < rows["difference"]["largest"] < 1e-9
    assert [rank["rank"] for rank in parallel["ranks"]] == [0, 1]


@pytest.mark.processes
def test_a_steps_parts_are_measured(shown):
    """Every part is there and none is negative; only several processes communicate."""
    parallel, single = (training["step_s"] for training in shown[2]["trainings"])
    for part in ("forward", "backward", "optimizer"):
        assert parallel[part] > 0
        assert single[part] > 0
    assert parallel["exposed communication"] > 0
    assert single["exposed communication"] == 0


@pytest.mark.slow
@pytest.mark.processes
def test_json_alone_goes_to_stdout(tmp_path):
    """Three ranks, in float32; the progress goes to stderr."""
    words = (
        "--ranks-per-host",
        "3",
        "--epochs",
        "1",
        "--seed",
        "7",
        "--dtype",
        "float32",
        "--json",
    )
    done = paceline("demo", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    rows = json.loads(done.out)
    assert rows["settings"] == {
        "data": "digits",
        "ranks": 3,
        "epochs": 1,
        "seed": 7,
        "dtype": "float32",
    }
    assert "rank 2  epoch  1/1" in done.err


@pytest.mark.lab
@pytest.mark.processes
def test_one_rank_is_bitwise_one_process(tmp_path):
    done = paceline("demo", "--ranks-per-host", "1", "--epochs", "1", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads(done.out)["difference"]["largest"] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ranks-per-host", "0"], "'--ranks-per-host' / '--nproc-per-node': it has to be at least 1"),
        (["--ranks-per-host", "9999"], f"there are {num_cores()}"),
        (["--epochs", "0"], "'--epochs': it has to be at least 1"),
        (["--seed", "-1"], "'--seed': it has to be at least 0"),
        (["--dtype", "float16"], "is not one of 'float64', 'float32'"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["demo", *words])
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_too_few_images_for_a_step(monkeypatch, capsys):
    """Refused before starting a process."""
    monkeypatch.setattr("paceline.demo.comparison.num_cores", lambda: 64)
    with pytest.raises(SystemExit) as left:
        main(["demo", "--ranks-per-host", "23"])
    assert left.value.code == 2
    assert "there are 1438 training images, and a step of 23 ranks takes 1472" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("apart", "is_rounding"), [(0.0, True), (1e-12, True), (1e-6, False), (np.nan, False)], ids=str
)
def test_only_rounding_counts_as_rounding(apart, is_rounding, tmp_path):
    weights = {"first": np.ones(3), "second": np.full(2, 2.0)}
    np.savez(tmp_path / "one.npz", **weights)
    weights["second"] = weights["second"] + np.array([0, apart])
    np.savez(tmp_path / "other.npz", **weights)
    found = difference(tmp_path / "other.npz", tmp_path / "one.npz", "float64")
    assert found["is_rounding"] is is_rounding
    assert found["scale"] == 2
    if apart:
        assert found["parameter"] == "second"


def said(rank, step):
    return {"rank": rank, "done": 0.1 + step / 3, "samples_per_s": 1e6 / 7}


def test_no_report_is_lost_or_torn(tmp_path):
    """Several writers at once, far more than the pipe holds, and a reader that is slow at first."""
    got, go = [], threading.Event()

    def receive(report):
        go.wait(timeout=60)
        got.append(report)

    def write(rank):
        with (tmp_path / "pipe").open("w", buffering=1) as pipe:
            for step in range(2_000):
                pipe.write(json.dumps(said(rank, step)) + "\n")

    with heard(tmp_path / "pipe", receive):
        writers = [threading.Thread(target=write, args=(rank,)) for rank in range(3)]
        for writer in writers:
            writer.start()
        go.set()
        for writer in writers:
            writer.join(timeout=60)
    for rank in range(3):
        assert [report for report in got if report["rank"] == rank] == [
            said(rank, step) for step in range(2_000)
        ]


def test_an_error_while_receiving_is_raised_and_does_not_block_the_ranks(tmp_path):
    def receive(report):
        raise LookupError(report["done"])

    path = tmp_path / "pipe"
    with (
        pytest.raises(LookupError, match=r"0\.1"),
        heard(path, receive),
        path.open("w", buffering=1) as pipe,
    ):
        for step in range(3_000):
            pipe.write(json.dumps(said(0, step)) + "\n")


def test_the_digits_are_those_of_scikit_learn():
    bunch, images = load_digits(), demo_images.load_digits()
    order = np.random.default_rng(0).permutation(1797)
    np.testing.assert_array_equal(images.test_labels, bunch.target[order[:359]])
    raw = bunch.images[order[359:]]
    np.testing.assert_allclose(
        images.train_images[:, 0], (raw - raw.mean()) / raw.std(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.processes
@pytest.mark.lab
def test_the_demo_does_not_need_scikit_learn(tmp_path):
    for name in ("sklearn", "scipy"):
        (tmp_path / "without" / name).mkdir(parents=True)
        (tmp_path / "without" / name / "__init__.py").write_text("raise ImportError(__name__)")
    path = os.pathsep.join([str(tmp_path / "without"), os.environ.get("PYTHONPATH", "")])
    done = paceline("demo", "--epochs", "1", cwd=tmp_path, env={"PYTHONPATH": path}, cold=True)
    assert done.code == 0, done.err


def first_report(process):
    """Read until a rank has trained an epoch."""
    for line in process.stdout:
        if line.startswith("rank "):
            return
    raise AssertionError(process.stderr.read())


def workers(process):
    return [pid for pid, line in alive(process).items() if "paceline.demo.training" in line]


@pytest.mark.processes
def test_ctrl_c_ends_every_process(tmp_path):
    with started(["paceline", "demo", "--epochs", "2000"], tmp_path) as process:
        first_report(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert not alive(process)
    assert process.returncode == 128 + signal.SIGINT
    assert "SIGINT received; all 2 rank(s)" in err
    assert "Traceback" not in err


@pytest.mark.processes
def test_a_killed_worker_ends_the_demo_and_is_named(tmp_path):
    with started(["paceline", "demo", "--epochs", "2000"], tmp_path) as process:
        first_report(process)
        os.kill(workers(process)[0], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert not alive(process)
    assert process.returncode == 1
    assert "was killed by SIGKILL" in err

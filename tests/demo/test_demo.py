"""`paceline demo` as a newcomer types it, and what it believes about its own numbers."""

from __future__ import annotations

import gzip
import json
import os
import signal
import threading

import numpy as np
import pytest
from sklearn.datasets import load_digits

from harness.terminal import alive, paceline, started
from paceline.cli import main
from paceline.demo.comparison import difference, heard
from paceline.demo.images import load_images
from paceline.errors import ConfigurationError
from paceline.launch import num_cores

PNG = b"\x89PNG\r\n\x1a\n"


def _write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def _idx_folder(folder, *, ending=".gz", num_test=90):
    """The digits as MNIST's four files."""
    folder.mkdir(parents=True, exist_ok=True)
    bunch = load_digits()
    for split, part in (("t10k", slice(num_test)), ("train", slice(num_test, None))):
        _write_idx(folder / f"{split}-images-idx3-ubyte{ending}", bunch.images[part] * 15)
        _write_idx(folder / f"{split}-labels-idx1-ubyte{ending}", bunch.target[part])
    return folder


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """One run with the defaults but fewer epochs: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, paceline("demo", "--epochs", "4", cwd=folder)


@pytest.mark.slow
@pytest.mark.processes
def test_the_demo_shows_progress_the_promise_and_where_time_goes(shown):
    folder, done = shown
    assert done.code == 0, done.err
    for rank in (0, 1):
        assert f"rank {rank}  epoch  4/4  loss " in done.out
    for words in (
        "samples/s",
        "test accuracy",
        "bitwise the same",
        "summation order, as promised",
        "exposed",
    ):
        assert words in done.out
    assert "Warning" not in done.err
    # torch's compiler keeps a cache of its own as soon as an optimizer is imported.
    assert not [path for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor")]


@pytest.mark.processes
def test_the_report_holds_figures_and_rows(shown):
    folder, _ = shown
    report = folder / "paceline-report"
    for figure in ("losses.png", "step.png"):
        content = (report / figure).read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 5_000
    rows = json.loads((report / "rows.json").read_text())
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
    rows = json.loads((shown[0] / "paceline-report" / "rows.json").read_text())
    parallel, single = (training["step_s"] for training in rows["trainings"])
    for part in ("forward", "backward", "optimizer"):
        assert parallel[part] > 0
        assert single[part] > 0
    assert parallel["exposed communication"] > 0
    assert single["exposed communication"] == 0


@pytest.mark.slow
@pytest.mark.processes
def test_json_alone_goes_to_stdout(tmp_path):
    """Three ranks of a folder's images, in float32; the progress goes to stderr."""
    data = _idx_folder(tmp_path / "images")
    words = (
        "--ranks-per-host",
        "3",
        "--epochs",
        "1",
        "--seed",
        "7",
        "--dtype",
        "float32",
        "--report",
        "deep/er",
        "--json",
    )
    done = paceline("demo", "--data", str(data), *words, cwd=tmp_path)
    assert done.code == 0, done.err
    rows = json.loads(done.out)
    assert rows == json.loads((tmp_path / "deep" / "er" / "rows.json").read_text())
    assert rows["settings"] | {"data": ""} == {
        "data": "",
        "ranks": 3,
        "epochs": 1,
        "seed": 7,
        "dtype": "float32",
        "report": "deep/er",
    }
    assert "rank 2  epoch  1/1" in done.err


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
        (["--data", "cifar"], "neither digits, fashion-mnist nor a folder"),
        (["--data", "."], "has no train-images-idx3-ubyte.gz"),
        (["--report", "a-file/report"], "cannot be made"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    with pytest.raises(SystemExit) as left:
        main(["demo", *words])
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_absent_fashion_mnist_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.demo.images.FASHION_MNIST_FOLDER", tmp_path / "absent")
    with pytest.raises(ConfigurationError, match="apt-get install dataset-fashion-mnist"):
        load_images("fashion-mnist")


def test_idx_files_are_read_gzipped_or_not(tmp_path):
    zipped, plain = (
        load_images(str(_idx_folder(tmp_path / ending, ending=ending))) for ending in (".gz", "")
    )
    np.testing.assert_array_equal(zipped.train_images, plain.train_images)
    assert zipped.train_images.shape == (1707, 1, 8, 8)
    assert zipped.num_classes == 10
    assert zipped.train_images.mean() == pytest.approx(0, abs=1e-5)
    np.testing.assert_array_equal(plain.test_labels, load_digits().target[:90])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_bytes(b"not gzip"), "cannot be read"),
        (lambda path: path.write_bytes(gzip.compress(b"")), "is not an IDX file"),
        (lambda path: path.write_bytes(path.read_bytes()[:300]), "cannot be read"),
        (lambda path: path.unlink(), "has no train-images"),
        (lambda path: _write_idx(path, np.zeros((5, 8, 8))), "5 train images"),
        (lambda path: _write_idx(path, np.zeros((1707, 8, 9))), "needs square images"),
    ],
)
def test_spoilt_files_are_refused(spoil, says, tmp_path):
    folder = _idx_folder(tmp_path / "images")
    spoil(folder / "train-images-idx3-ubyte.gz")
    with pytest.raises(ConfigurationError, match=says):
        load_images(str(folder))


@pytest.mark.processes
def test_too_few_images_for_a_step(tmp_path):
    """Refused after looking at the data and before starting a process."""
    folder = _idx_folder(tmp_path / "images", num_test=1_700)
    done = paceline("demo", "--data", str(folder), cwd=tmp_path)
    assert done.code == 2
    assert "has 97 training and 1000 test images of 8 pixels a side; a step of 2 ranks takes 128" in done.err
    assert not (tmp_path / "paceline-report").exists()


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
    bunch, images = load_digits(), load_images("digits")
    order = np.random.default_rng(0).permutation(1797)
    np.testing.assert_array_equal(images.test_labels, bunch.target[order[:359]])
    raw = bunch.images[order[359:]]
    np.testing.assert_allclose(
        images.train_images[:, 0], (raw - raw.mean()) / raw.std(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.processes
@pytest.mark.lab
def test_the_demo_needs_neither_matplotlib_nor_scikit_learn(tmp_path):
    """In words, with the line that installs the pictures."""
    for name in ("matplotlib", "sklearn", "scipy"):
        (tmp_path / "without" / name).mkdir(parents=True)
        (tmp_path / "without" / name / "__init__.py").write_text("raise ImportError(__name__)")
    path = os.pathsep.join([str(tmp_path / "without"), os.environ.get("PYTHONPATH", "")])
    done = paceline("demo", "--epochs", "1", cwd=tmp_path, env={"PYTHONPATH": path}, cold=True)
    assert done.code == 0, done.err
    assert "paceline-report/rows.json. Pictures: pip install matplotlib" in done.out
    assert [file.name for file in (tmp_path / "paceline-report").iterdir()] == ["rows.json"]


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
    assert not list((tmp_path / "paceline-report").glob("*.png"))


@pytest.mark.processes
def test_a_killed_worker_ends_the_demo_and_is_named(tmp_path):
    with started(["paceline", "demo", "--epochs", "2000"], tmp_path) as process:
        first_report(process)
        os.kill(workers(process)[0], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert not alive(process)
    assert process.returncode == 1
    assert "was killed by SIGKILL" in err

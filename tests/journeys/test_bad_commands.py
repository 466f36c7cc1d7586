"""Bad commands of the three packages: one paragraph that names what is wrong, exit code 2, before any work starts."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import joblib
import numpy as np
import pytest

from paceline.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # numba's, joblib's

# What is typed after `paceline`: a fragment of the answer.
RUN = {
    "run --master-port 99999 t.py": "--master-port 99999 is not a port",
    "run --master-port -5 t.py": "--master-port -5 is not a port",
    "run --master-port abc t.py": "invalid int value",
    "run --rdzv-conf nonsense t.py": "--rdzv-conf nonsense cannot be read: The rendezvous",
    "run --rdzv-conf timeout=abc t.py": "--rdzv-conf timeout=abc",
    "run --rdzv-conf join_timeout=-1 t.py": "--rdzv-conf join_timeout=-1",
    "run --rdzv-conf join_timeout=soon t.py": "--rdzv-conf join_timeout=soon is not a number of seconds",
    "run --rdzv-conf =3 t.py": "--rdzv-conf =3 cannot be read",
    "run --rdzv-endpoint 127.0.0.1:99999 t.py": "--rdzv-endpoint 127.0.0.1:99999 cannot be read",
    "run --rdzv-endpoint 127.0.0.1:abc t.py": "--rdzv-endpoint 127.0.0.1:abc cannot be read",
    "run --nnodes 2 --rdzv-endpoint 127.0.0.1:99999 t.py": "--rdzv-endpoint 127.0.0.1:99999",
    "run --rdzv-backend banana t.py": "--rdzv-backend banana is not one of",
    "run --monitor-interval -1 t.py": "--monitor-interval -1 is not",
    "run --monitor-interval nan t.py": "--monitor-interval nan is not",
    "run --monitor-interval inf t.py": "--monitor-interval inf is not",
    "run --signals-to-handle SIGBANANA t.py": "'SIGBANANA' is not a signal",
    "run --signals-to-handle SIGKILL t.py": "'SIGKILL' is not a signal",
    "run --signals-to-handle '' t.py": "'' is not a signal",
    "run --log-dir /dev/null t.py": "/dev/null is not a folder",
    "run --log-dir t.py/x t.py": "is not a folder",
    "run --node-rank 5 --nnodes 2 t.py": "machines are numbered from 0 to 1",
    "run --node-rank -1 --nnodes 2 t.py": "machines are numbered from 0 to 1",
    "run --node-rank 1 t.py": "machines are numbered from 0 to 0",
    "run --nproc-per-node 99999999999999999999 t.py": "is more than a machine can run",
    "run --nproc-per-node 1e3 t.py": "--nproc-per-node 1e3",
    "run --nnodes 99999999999999999999 --node-rank 0 t.py": "is not a number of machines",
    "run --tee 9 t.py": "--tee 9 cannot be read",
    "run --redirects banana t.py": "--redirects banana cannot be read",
    "run --redirects 0:9 t.py": "--redirects 0:9 cannot be read",
    "run --tee 5:1 t.py": "there is no rank 5",
    "run --local-ranks-filter x t.py": "--local-ranks-filter x cannot be read",
    "run --local-ranks-filter 7 t.py": "there is no rank 7",
    "run --logs-specs banana t.py": "--logs-specs banana",
    "run --event-log-handler banana t.py": "--event-log-handler banana is not one of",
    "run --shutdown-timeout -1 t.py": "--shutdown-timeout -1",
    "run --local-addr 300.1.1.1 t.py": "--local-addr 300.1.1.1 is not an address",
    "run -m folder..x": "is not the dotted name",
    "run --servers 99999999999999999999 t.py": "starts no parameter server",
    "run --replace-ddp --compression banana t.py": "compression='banana'",
    "run --no-python folder": "there is no program folder",
    "run folder": "there is no script folder",
    "serve --listen 127.0.0.1:99999": "is not an address",
    "serve --listen banana": "is not an address",
    "banana": "No such command 'banana'",
}
PLAN = {
    "plan deep.json": "deep.json",
    "plan binary.bin": "binary.bin",
    "plan obj.json": "obj.json",
    "plan empty": "empty",
    "plan folder": "folder",
    "plan resnet5": "resnet5",
    "plan resnet50 --to 0": "--to 0",
    "plan resnet50 --to 99999999999999999999": "--to 99999999999999999999",
    "plan resnet50 --rate nanGbit": "--rate 'nanGbit'",
    "plan resnet50 --rate 1e-300bit": "--rate 1e-300bit carries nothing",
    "plan resnet50 --latency -1us": "latency",
    "plan resnet50 --latency 1e300s": "--latency 1e300s is too long",
    "plan resnet50 --loss 200%": "loses 2.0",
    "plan resnet50 --bucket-cap-mb nan": "--bucket-cap-mb nan",
    "plan resnet50 --price nan": "--price nan",
    "plan resnet50 --algorithm banana": "banana",
    "plan resnet50 --report /dev/null": "/dev/null",
    "plan --steps 0 t.py": "--steps 0",
    "plan record --steps 99999999999999999999 t.py": "--steps 99999999999999999999",
    "plan record --out missing/x.json t.py": "--out missing/x.json cannot be written: there is no folder missing",
    "plan record --out folder t.py": "--out folder cannot be written: it is a folder",
    "plan score deep.json --report deep": "deep.json",
    "plan score binary.bin --report deep": "binary.bin",
    "plan score --report binary": "there are no predictions in binary/predictions.jsonl",
    "demo --ranks-per-host 99999999999999999999": "--ranks",
    "demo --seed -1": "--seed",
}
LAB = {
    "study loss-bound --model digits --store binary.bin": "binary.bin is no file of trials",
    "study loss-bound --model digits --store obj.json": "line 1 of obj.json is not a trial",
    "study loss-bound --model digits --store deep.json": "deep.json",
    "study loss-bound --model digits --store folder": "folder is no file of trials",
    "study loss-bound --bounds 0,nan": "--bounds nan: values are percentages from 0 to 50",
    "study loss-bound --report /dev/null": "/dev/null",
    "study auto-compression --codecs banana": "banana",
    "study redraw --report missing": "no stored reports in missing",
    "study banana": "No such command 'banana'",
    "bench step --workload banana": "banana",
    "bench step --compute-s nan": "nan",
    "bench step --scale nan": "nan",
    "bench step --profile deep.json": "deep.json",
    "bench step --profile binary.bin": "binary.bin",
    "bench step --ranks-per-host 99999999999999999999": "GB are available",
    "bench allreduce --sizes 1e30GiB": "at most 1 TiB",
    "bench profile --workload wide_mlp --out folder": "--out folder cannot be written",
    "bench profile --workload wide_mlp --out o.json --device banana": "banana",
    "emulate -- missing.py": "there is no script missing.py",
    "emulate -- -m folder..x": "there is no module folder..x",
    "emulate --hosts 99999999999 -- t.py": "--hosts",
    "emulate --queue 1e30KiB -- t.py": "up to 4 GiB",
    "emulate --cpu nan% -- t.py": "--cpu",
    "emulate --delay -1ms -- t.py": "--delay",
    "emulate --timeout -1s -- t.py": "--timeout -1s is not a time",
    "emulate --timeout 1e300s -- t.py": "--timeout 1e300s is not a time",
    "emulate --scenario binary.bin -- t.py": "binary.bin",
}
SVM = {
    "svm fit nan.csv": "nan.csv, line 4, column 2: 'nan' is not finite",
    "svm fit inf.csv": "inf.csv, line 4, column 2: 'inf' is not finite",
    "svm fit huge.csv": "huge.csv, line 3, column 1: '1111111111111111111111111111111111111111...' is not finite",
    "svm fit nan-target.csv": "line 5, column 4: 'nan' is not finite",
    "svm fit nan.svm": "nan.svm, line 1: '1:nan' is not finite",
    "svm fit index.svm": "index.svm",
    "svm fit binary.bin": "binary.bin",
    "svm fit empty": "empty has no rows",
    "svm fit folder": "there is no file folder",
    "svm fit one.csv": "takes two classes or more",
    "svm fit rows.csv --model missing/m.joblib": "--model missing/m.joblib cannot be written: there is no folder",
    "svm fit rows.csv --model folder": "--model folder cannot be written: it is a folder",
    "svm fit rows.csv --figure fig.banana": "--figure fig.banana has none of the endings",
    "svm fit rows.csv --figure fig": "--figure fig has none of the endings",
    "svm fit rows.csv --figure missing/fig.png": "--figure missing/fig.png cannot be written",
    "svm fit rows.csv --ranks-per-host 200": "--ranks-per-host 200 for 40 rows",
    "svm fit rows.csv --C nan": "'C' parameter",
    "svm fit rows.csv --gamma inf": "'gamma' parameter",
    "svm fit rows.csv --tol 0": "'tol' parameter",
    "svm fit rows.csv --cache-size nan": "'cache_size' parameter",
    "svm fit rows.csv --kernel banana": "'kernel' parameter",
    "svm fit rows.csv --shrinking banana": "banana",
    "svm fit rows.csv --task banana": "--task banana",
    "svm fit rows.csv --task regress --epsilon nan": "'epsilon' parameter",
    "svm fit rows.csv --task novelty --nu 2": "'nu' parameter",
    "svm fit words.csv --task regress": "'w0' is none",
    "svm predict rows.csv --model empty": "empty is not a model that can be read (EOFError)",
    "svm predict rows.csv --model binary.bin": "binary.bin is not a model that can be read",
    "svm predict rows.csv --model dict.joblib": "holds a dict, no model",
    "svm predict wide.csv --model m.joblib": "wide.csv has 5 columns and a target, but the model was fitted to 3",
    "svm predict nan.csv --model m.joblib": "'nan' is not finite",
    "svm predict rows.csv --model m.joblib --output missing/out": "--output missing/out cannot be written",
    "svm predict rows.csv --model m.joblib --output folder": "--output folder cannot be written",
    "svm cross-validate rows.csv --folds 41": "--folds 41 for 40 rows",
    "svm cross-validate rows.csv --folds 30": "--folds 30: the largest class has",
    "svm cross-validate rows.csv --folds 30 --task regress": "there has to be 2 rows in each part",
    "svm cross-validate rows.csv --ranks-per-host 39": "--ranks-per-host 39 for 32 rows",
    "svm cross-validate rows.csv --seed -1": "--seed",
}


def _write_csv(name, rows, targets):
    with Path(name).open("w") as stream:
        stream.writelines(
            ",".join(map(str, [*row, target])) + "\n" for row, target in zip(rows, targets, strict=True)
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files that are something else than what they are given as."""
    path, before = tmp_path_factory.mktemp("bad"), Path.cwd()
    os.chdir(path)
    Path("folder").mkdir()
    texts = {
        "t.py": "",
        "empty": "",
        "deep.json": "[" * 100_000,
        "obj.json": "{}",
        "nan.svm": "1 1:nan 2:1\n0 1:1\n",
    }
    texts |= {"index.svm": "1 99999999999:1\n0 1:1\n", "report.json": '{"samples": {"a": 1}}'}
    for name, text in texts.items():
        (path / name).write_text(text)
    (path / "binary.bin").write_bytes(bytes(range(256)) * 40)
    X = np.random.default_rng(0).normal(size=(40, 3))
    y = (X[:, 0] > 0).astype(int)
    _write_csv("rows.csv", X.tolist(), y)
    _write_csv("wide.csv", np.hstack([X, X])[:, :5].tolist(), y)
    _write_csv("one.csv", X.tolist(), 0 * y)
    _write_csv("words.csv", X.tolist(), [f"w{i}" for i in range(40)])
    for name, cell in (("nan", "nan"), ("inf", "inf")):
        _write_csv(
            f"{name}.csv",
            [[*row[:1], cell, *row[2:]] if i == 3 else row for i, row in enumerate(X.tolist())],
            y,
        )
    _write_csv("huge.csv", [["1" * 400, *row[1:]] if i == 2 else row for i, row in enumerate(X.tolist())], y)
    _write_csv("nan-target.csv", X.tolist(), ["nan" if i == 4 else str(target) for i, target in enumerate(y)])
    for name, file in (("deep", "deep.json"), ("binary", "binary.bin")):
        (path / name).mkdir()
        (path / name / "predictions.jsonl").write_bytes((path / file).read_bytes())
    joblib.dump({"a": 1}, "dict.joblib")
    os.chdir(before)
    return path


@pytest.fixture
def model(folder):
    """A model in `folder`, fitted to the three columns of rows.csv."""
    from paceline_svm import SVC

    rows = np.loadtxt(folder / "rows.csv", delimiter=",")
    joblib.dump(SVC(rows="all").fit(rows[:, :3], rows[:, 3]), folder / "m.joblib")


class _Started:
    """In the place of `subprocess.Popen`."""

    def __init__(self, words, *_args, **_settings):
        raise AssertionError(f"work has started: {words}")

    def __class_getitem__(cls, _):
        return cls


@pytest.fixture
def answer(folder, monkeypatch, capsys):
    """Run a command in this process, where it may start no other; returns its exit code and what it said."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(subprocess, "Popen", _Started)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr("paceline_svm.file_job.run", _Started)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # `emulate` takes some over

    def run(command):
        with pytest.raises(SystemExit) as left:
            main(shlex.split(command))
        return left.value.code, capsys.readouterr().err

    return run


def _are_answered(commands, answer):
    wrong = []
    for command, fragment in commands.items():
        try:
            code, said = answer(command)
        except BaseException as error:  # a traceback is what is looked for
            wrong.append(f"{command}: {type(error).__name__}: {error}")
            continue
        is_one_paragraph = said.startswith("paceline: ") and said.count("\n") == 1
        if code != 2 or not is_one_paragraph or fragment not in said:
            wrong.append(f"{command}: exit code {code}: {said!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "commands",
    [
        pytest.param(RUN, id="run", marks=pytest.mark.processes),  # it asks whether the script is a program
        pytest.param(PLAN, id="plan"),
        pytest.param(LAB, id="lab"),
    ],
)
def test_a_bad_command_is_answered_by_a_paragraph(commands, answer):
    """Before work starts: these commands can start no process, and fit nothing."""
    _are_answered(commands, answer)


@pytest.mark.lab
@pytest.mark.compiles  # the fixture fits a model
@pytest.mark.usefixtures("model")
def test_a_bad_command_of_the_svm_is_answered_by_a_paragraph(answer):
    """Before work starts, as above."""
    _are_answered(SVM, answer)


def test_what_is_no_file_of_trials_stays_as_it_was(answer, folder):
    """A last line without an end was cut off, as a trial that a stop had interrupted."""
    answer("study loss-bound --model digits --store obj.json")
    assert (folder / "obj.json").read_text() == "{}"

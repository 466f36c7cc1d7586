"""`paceline trace`, `paceline report` and `paceline doctor` before a run, as a user types them."""

from __future__ import annotations

import json

import pytest

from harness.recorded_runs import write_run
from harness.terminal import paceline
from paceline.cli import main

TRAINS = """\
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
if "early" in sys.argv:
    sys.exit(3)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(15):
    model(torch.ones(4, 8)).sum().backward()
dist.destroy_process_group()
"""


def _typed(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    return left.value.code, *capsys.readouterr()


@pytest.mark.processes
def test_a_script_is_traced(tmp_path):
    (tmp_path / "trains.py").write_text(TRAINS)
    words = ["trace", "--record", "run", "--out", "t.json", "--", "--nproc-per-node", "2", "trains.py"]
    done = paceline(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "t.json: 14 steps of 2 ranks" in done.err
    found = json.loads((tmp_path / "t.json").read_text())
    assert {event["pid"] for event in found["traceEvents"]} == {0, 1}
    assert {event["name"] for event in found["traceEvents"]} >= {"step 15", "forward", "backward", "waiting"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "t.json", "tmp", "trains.py"]


@pytest.mark.lab
@pytest.mark.processes
def test_a_script_that_ends_before_its_first_step(tmp_path):
    (tmp_path / "trains.py").write_text(TRAINS)
    done = paceline("trace", "--out", "t.json", "--", "trains.py", "early", cwd=tmp_path)
    assert done.code == 1, done.err
    assert (
        "nothing was written to t.json: no rank completed a step. no rank has recorded anything" in done.err
    )
    assert not (tmp_path / "t.json").exists()


def test_a_page_of_a_folder(tmp_path, capsys):
    write_run(tmp_path / "run")
    code, out, err = _typed(["report", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")], capsys)
    assert (code, err) == (0, "")
    assert "r.html: " in out
    assert out.endswith("3 ranks; open it in any browser\n")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trace"], "Pass a run folder, or a command behind --"),
        (["trace", "run", "--", "train.py"], "not both"),
        (["trace", "--record", "kept", "run"], "--record is for a command"),
        (["trace", "nowhere"], "there is no run in nowhere"),
        (["trace", "run", "--out", "no/such/t.json"], "--out no/such/t.json cannot be written"),
        (["report", "nowhere"], "there is no run in nowhere"),
        (["report", "run", "--out", "no/such/r.html"], "--out no/such/r.html cannot be written"),
        (["run", "--hang-after", "-1", "x.py"], "--hang-after -1 is not a possible number of seconds"),
    ],
)
def test_what_cannot_be(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    write_run(tmp_path / "run")
    code, out, err = _typed(words, capsys)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.processes
def test_this_machine(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    code, out, err = _typed(["doctor", "--json"], capsys)
    assert (code, err) == (0, "")
    found = json.loads(out)
    topics = [each["topic"] for each in found["hosts"][0]["findings"]]
    assert topics[0] == "versions"
    assert len(topics) > 15
    assert found["links"] == []
    code, out, err = _typed(["doctor"], capsys)
    assert (code, err) == (0, "")
    assert "things were looked at" in out


@pytest.mark.lab
@pytest.mark.processes
def test_every_pair_of_a_launch(tmp_path):
    done = paceline("run", "--nproc-per-node", "3", "-m", "paceline", "doctor", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [(link["source"], link["target"]) for link in found["links"]] == [
        (a, b) for a in range(3) for b in range(3) if a != b
    ]
    assert all(link["bytes_per_s"] > 0 and not link["error"] for link in found["links"])


@pytest.mark.lab
@pytest.mark.processes
def test_with_options_of_a_launch(tmp_path):
    done = paceline("doctor", "--nnodes", "1", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads(done.out)["hosts"][0]["rank"] == 0

"""`paceline doctor`: an unchanged script is recorded, the exit code is the command's, bad input is told from a run."""

from __future__ import annotations

import json
import shutil

import pytest

from harness.terminal import paceline
from paceline.cli import main
from paceline.observe.run_folder import begin_run
from paceline.observe.run_reading import read_run

SLOW = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in torch.utils.data.DataLoader(torch.zeros(40, 8), batch_size=2):
    loss = model(batch).sum()
    time.sleep(0.005 + 0.03 * dist.get_rank())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{sys.argv[1:]} {loss.item() == 0}\\n", end="")  # at once: both ranks write to one pipe
dist.barrier()  # torchrun ends a rank when the other has failed: by then both have done their last step
sys.exit(7)
"""
TWO_RANKS = ["torchrun", "--standalone", "--nproc-per-node", "2"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.processes
def test_an_unchanged_script_of_torchs_ddp(tmp_path):
    """Its output and its failure are its own; the sentence is ours, then and from the folder."""
    (tmp_path / "train.py").write_text(SLOW)
    done = paceline(
        "doctor", "--record", "run", "--", *TWO_RANKS, "train.py", "--", "-x", cwd=tmp_path, env=ONE_THREAD
    )
    assert done.code == 1  # torchrun's own for a rank that failed
    assert "['--', '-x'] False" in done.out or "['-x'] False" in done.out
    assert "paceline doctor: Rank 1 is " in done.err
    assert ", between the phases, in Python of its own, because it waits there for something else" in done.err
    run = read_run(tmp_path / "run")
    assert [len(rank.steps) for rank in run.ranks] == [19, 19]
    assert run.header.command[0] == "torchrun"


@pytest.mark.processes
def test_a_script_that_exits_before_its_first_step(tmp_path):
    (tmp_path / "train.py").write_text("print('nothing to do'); raise SystemExit(3)")
    done = paceline("doctor", "--json", "--", "python", "train.py", cwd=tmp_path)
    assert done.code == 3
    assert "nothing to do" in done.err
    found = json.loads(done.out)
    assert found["finding"] is None
    assert found["silence"] == "No rank left a record."
    assert found["notes"] == [
        "no rank has recorded anything: it trains with another wrapper, or ended before"
    ]


def refused(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.processes
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path, capsys):
    assert "there is no command nosuch" in refused(capsys, "--", "nosuch", "train.py")
    assert "there is no run in" in refused(capsys, str(tmp_path))
    assert f"paceline doctor -- torchrun {__file__}`" in refused(capsys, __file__)
    assert "behind --" in refused(capsys, str(tmp_path), "--", "true")
    assert "behind --" in refused(capsys, "--")
    assert "are for a command" in refused(capsys, "--steps", "20")
    assert "--paused needs --record" in refused(capsys, "--paused", "--", "true")
    assert "compares two run folders" in refused(capsys, "--was", str(tmp_path))
    assert "compares two run folders" in refused(capsys, "--was", str(tmp_path), "--", "true")
    assert "leave out --json" in refused(capsys, str(tmp_path), "--was", str(tmp_path), "--json")
    begin_run(tmp_path / "run", ["x"])
    taken = refused(capsys, "--record", str(tmp_path / "run"), "--", "true")
    assert "holds a run already" in taken


def test_a_run_is_read_without_torch(tmp_path, capsys):
    begin_run(tmp_path, ["x"])
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path)])
    assert ended.value.code == 0
    assert "No rank left a record." in capsys.readouterr().out


@pytest.mark.processes
def test_recording_begins_when_its_pause_ends(tmp_path):
    """From within the command, as anybody may from outside: the file goes after ten steps."""
    lines = SLOW.replace("torch.zeros(40, 8)", "torch.zeros(80, 8)").replace(
        "    optimizer.zero_grad()",
        "    count = globals().get('count', 0) + 1\n"
        "    if count == 10 and dist.get_rank() == 0: __import__('os').unlink('run/detached')\n"
        "    optimizer.zero_grad()",
    )
    (tmp_path / "train.py").write_text(lines)
    paceline(
        "doctor", "--record", "run", "--paused", "--", *TWO_RANKS, "train.py", cwd=tmp_path, env=ONE_THREAD
    )
    first = {rank.steps[0].step for rank in read_run(tmp_path / "run").ranks}
    assert all(10 < step < 40 for step in first), first


@pytest.mark.processes
def test_a_command_that_a_signal_ended(tmp_path):
    done = paceline("doctor", "--", shutil.which("sh"), "-c", "kill -9 $$", cwd=tmp_path)
    assert done.code == 137

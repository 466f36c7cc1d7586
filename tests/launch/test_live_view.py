"""`paceline run --watch`: a table in a real terminal, and the end of ranks' files read once a second."""

from __future__ import annotations

import os
import pty
import re
import subprocess

import pytest

from harness.recorded_runs import write_run
from harness.terminal import DEADLINE_S, environment, paceline
from paceline.launch.live_view import LiveView, table_of_ranks
from paceline.observe.run_folder import header_of
from paceline.observe.run_reading import read_run

TRAINS = """\
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(20):
    model(torch.ones(4, 8)).sum().backward()
if dist.get_rank() == 0:
    print("trained", flush=True)
time.sleep(1.5)
dist.destroy_process_group()
"""


def _cells(table):
    return [[str(cell) for cell in column.cells] for column in table.columns]


def test_the_last_steps_of_every_rank(tmp_path):
    """Of long files, too, of which the end is read only."""
    view = LiveView(tmp_path / "live", ["train.py"])
    write_run(tmp_path / "run", num_ranks=2, num_steps=400, late_s=lambda rank, _: 0.03 * (rank == 1))
    ours, theirs = (header_of(tmp_path / name).run_id.encode() for name in ("live", "run"))
    for rank in range(2):
        path = tmp_path / "run" / f"rank{rank}.jsonl"
        written = path.read_bytes().replace(theirs, ours) + b'{"kind":"step","st'  # being written
        (tmp_path / "live" / path.name).write_bytes(written)
        assert path.stat().st_size > 64 * 1024
    run = view.read()
    assert [rank.steps[-1].step for rank in run.ranks] == [400, 400]
    assert 20 < len(run.ranks[0].steps) < 400
    rank, host, step, takes, waits, work = _cells(table_of_ranks(run))
    assert rank == ["0", "1"]
    assert host == ["a", "a"]
    assert step == ["400", "400"]
    assert takes == ["100 ms", "100 ms"]
    assert waits == ["40%", "10%"]
    assert work[1].endswith("  backward 70 ms")


def test_nothing_yet(tmp_path):
    view = LiveView(tmp_path / "live", ["train.py"])
    (tmp_path / "live" / "rank0.jsonl").write_bytes(b"")
    (tmp_path / "live" / "rank1.jsonl").write_bytes(b"no line\n")
    assert view.read().ranks == ()
    assert "no rank has completed a step yet" in str(view._draw())


def test_many_ranks(tmp_path):
    write_run(tmp_path / "run", num_ranks=30, num_steps=5)
    assert _cells(table_of_ranks(read_run(tmp_path / "run")))[1][-1] == "and 6 more"


@pytest.mark.processes
def test_without_a_terminal(tmp_path):
    (tmp_path / "trains.py").write_text(TRAINS)
    done = paceline("run", "--watch", "trains.py", cwd=tmp_path)
    assert done.code == 2
    assert "--watch draws a table in a terminal, and stderr is none here" in done.err


@pytest.mark.processes
def test_in_a_terminal(tmp_path):
    """What ranks print stays readable, and nothing is left behind."""
    (tmp_path / "trains.py").write_text(TRAINS)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["paceline", "run", "--watch", "--nproc-per-node", "2", "trains.py"],
        cwd=tmp_path,
        env=environment(tmp_path) | {"TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    assert process.wait(DEADLINE_S) == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"rank\s+host\s+step\s+takes\s+waits\s+own work", text)
    assert re.search(r"^\s*0\s+\S+\s+20\s", text, re.MULTILINE)
    assert re.search(r"^\s*1\s+\S+\s+20\s", text, re.MULTILINE)
    assert "[default0]:trained" in text
    assert list((tmp_path / "tmp").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tmp", "trains.py"]

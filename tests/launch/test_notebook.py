"""`notebook_launcher`: ranks in fresh processes, their answers, their failures, and an end without leftovers."""

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

import paceline
from harness.terminal import DEADLINE_S, REPOSITORY
from paceline.errors import ConfigurationError
from paceline.launch import LaunchError

cloudpickle = pytest.importorskip("cloudpickle")


@pytest.fixture(autouse=True)
def _copied_by_value():
    """No rank can import a test; a notebook's functions are of no module anyway."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def add_up(base, fails=None):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.tensor([base + rank])
    dist.all_reduce(total)
    print(f"rank {rank} prints", flush=True)
    if rank == fails:
        raise ValueError("as asked")
    dist.destroy_process_group()
    return rank, total.item(), os.environ["LOCAL_RANK"]


@pytest.mark.processes
@pytest.mark.lab
def test_what_ranks_return_comes_back_in_their_order(capsys):
    answers = paceline.notebook_launcher(add_up, args=(10,), num_processes=3)
    assert answers == [(0, 33, "0"), (1, 33, "1"), (2, 33, "2")]
    said = capsys.readouterr().out
    assert all(f"rank {rank} prints" in said for rank in range(3))


@pytest.mark.lab
@pytest.mark.processes
def test_a_rank_that_fails_is_named_below_its_own_words(capsys):
    with pytest.raises(LaunchError, match=r"^rank 1 of .* exited with code 1"):
        paceline.notebook_launcher(add_up, args=(10, 1))
    assert "ValueError: as asked" in capsys.readouterr().out


def test_what_cannot_be_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigurationError, match=r"num_processes=0: .* needs at least 1 process"):
        paceline.notebook_launcher(add_up, args=(1,), num_processes=0)
    with pytest.raises(ConfigurationError, match=r"cannot copy 'add_up' to the ranks: .*lock"):
        paceline.notebook_launcher(add_up, args=(threading.Lock(),))
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigurationError, match="pip install cloudpickle"):
        paceline.notebook_launcher(add_up, args=(1,))


CELL = """\
import os, signal, sys, time
import paceline

def wait():
    os.write(1, b"rank %d\\n" % os.getpid())  # in one piece: print writes the line's end apart
    time.sleep(600)

paceline.notebook_launcher(wait)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("sent", [pytest.param(signal.SIGINT, marks=pytest.mark.lab), signal.SIGKILL])
def test_ranks_end_with_the_cell(sent):
    """An interrupt of the kernel's process alone, and its death; Jupyter interrupts the ranks as well."""
    with subprocess.Popen([sys.executable, "-c", CELL], stdout=subprocess.PIPE, text=True) as kernel:
        try:
            said = (line.split() for line in kernel.stdout if line.startswith("rank "))
            ranks = [os.pidfd_open(int(pid)) for _, (_, pid) in zip(range(2), said, strict=False)]
        except BaseException:
            kernel.kill()  # else the end of this block waits for it
            raise
        kernel.send_signal(sent)
        for rank in ranks:
            ended, _, _ = select.select([rank], [], [], DEADLINE_S)
            os.close(rank)
            assert ended, "a rank outlived its cell"


@pytest.mark.processes
@pytest.mark.lab
@pytest.mark.filterwarnings("ignore")  # Jupyter's, about itself
def test_the_quickstart_runs_from_top_to_bottom():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.reads((REPOSITORY / "examples" / "quickstart.ipynb").read_text(), 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # nobody reads a diff of outputs
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    data = [output["data"] for output in shown if "data" in output]
    text = "".join(output["text"] for output in shown if "text" in output)
    assert "epoch 3 on 2 ranks: loss 0." in text
    assert "where the time of a step goes" in text
    assert data[0]["text/plain"] == "True"

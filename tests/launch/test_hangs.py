"""`paceline run` and ranks that hang, or only take long: real ranks, seen from outside."""

from __future__ import annotations

import re
import signal

import pytest

from harness.hanging_script import TRAINS_AND_HANGS
from harness.terminal import DEADLINE_S, started

pytestmark = pytest.mark.processes


def _words(how, kind, *flags):
    return ["paceline", "run", "--nproc-per-node", "2", "--hang-after", "1", *flags, "trains.py", how, kind]


def _until(process, words):
    """What the launcher writes until a line has these words."""
    read = []
    for line in process.stderr:
        read.append(line)
        if words in line:
            return "".join(read)
    return "".join(read)


@pytest.mark.parametrize(
    ("how", "kind", "flags"),
    [
        pytest.param("sleep", "paceline", [], marks=pytest.mark.lab),
        ("gil", "torch", []),
        pytest.param("gil", "paceline", [], marks=pytest.mark.lab),
        pytest.param("sleep", "torch", [], marks=pytest.mark.lab),
        pytest.param("stop", "torch", [], marks=pytest.mark.lab),
        pytest.param("sleep", "torch", ["--replace-ddp"], marks=pytest.mark.lab),
        pytest.param("stop", "torch", ["--replace-ddp"], marks=pytest.mark.lab),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_stack(how, kind, flags, tmp_path):
    """Before any timeout; in the launcher's last message, too."""
    (tmp_path / "trains.py").write_text(TRAINS_AND_HANGS)
    with started(_words(how, kind, *flags), tmp_path) as process:
        told = _until(process, "explain hang")
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=DEADLINE_S)[1]
    ours = kind == "paceline" or flags
    waits = "bucket 0 (2 gradients, 0.0 MiB), step 4," if ours else "the other ranks' gradients, step 4,"
    assert f"hang: rank 1 is missing. Rank 0 has been waiting for {waits} for " in told
    assert re.search(r"rank 1 \(process \d+\) (sleeps|is stopped by a signal)", told)
    assert "stuck (" in told
    last = rest.splitlines()[-1]
    assert last.startswith("paceline: SIGINT received")
    assert "Before that: hang: rank 1 is missing." in last
    assert "rank 1 was in stuck (" in last


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("evaluate", "torch"),
        pytest.param("evaluate", "paceline", marks=pytest.mark.lab),
        pytest.param("save", "torch", marks=pytest.mark.lab),
    ],
)
def test_a_long_step_for_a_reason_is_no_hang(how, kind, tmp_path):
    (tmp_path / "trains.py").write_text(TRAINS_AND_HANGS)
    with started(_words(how, kind), tmp_path) as process:
        err = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 0, err
    assert "hang" not in err


@pytest.mark.lab
def test_a_rank_that_only_paused(tmp_path):
    """A false alarm is taken back, and the next one comes later."""
    (tmp_path / "trains.py").write_text(TRAINS_AND_HANGS)
    with started(_words("pause", "torch"), tmp_path) as process:
        err = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 0, err
    assert "hang: rank 1 is missing." in err
    assert re.search(r"rank 1 went on after \d\.\d s; it was no hang", err)


@pytest.mark.lab
def test_ranks_in_different_collectives(tmp_path):
    (tmp_path / "trains.py").write_text(TRAINS_AND_HANGS)
    with started(_words("barrier", "torch"), tmp_path) as process:
        told = _until(process, "explain hang")
    assert "hang: the ranks are in different collectives" in told
    assert not re.search(",[;,.]", told), told
    assert "rank 1 is in torch.distributed.barrier" in told


def test_switched_off(tmp_path):
    """Nothing is counted, and Python's path is the user's own."""
    (tmp_path / "says.py").write_text(
        "import os; print(sorted(x for x in os.environ if x in ('PYTHONPATH', 'PACELINE_PROGRESS')))"
    )
    words = ["paceline", "run", "--hang-after", "0", "says.py"]
    with started(words, tmp_path, {"PYTHONPATH": ""}) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (out, err) == ("['PYTHONPATH']\n", "")

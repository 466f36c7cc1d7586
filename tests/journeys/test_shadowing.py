"""`paceline shadow` as a user types it: all ranks are killed, the next launch has the bits of an undisturbed one."""

import os
import re
import signal
import threading

import pytest

from harness.terminal import DEADLINE_S, paceline, started

pytestmark = pytest.mark.processes

SCRIPT = """
import hashlib, os, sys, time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data import GlobalBatch, GlobalShuffle

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(960, 8), torch.randint(0, 3, (960,)))
shuffle = GlobalShuffle(data, GlobalBatch.of(64, dist.get_world_size()))
loader = DataLoader(data, batch_sampler=shuffle)
net = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3 + ("other" in sys.argv)))
model = paceline.DistributedDataParallel(net, batch_sampler=shuffle)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
more = dict(checkpoint="checkpoints") if "names" in sys.argv else {}
if "without" not in sys.argv:
    elastic = paceline.Elastic(model, optimizer, scheduler, shuffle, **more)
    print(f"pid {os.getpid()} begins after step {elastic.step}", flush=True)
    for epoch in range(shuffle.epoch, 20):
        for batches in elastic.steps(loader):
            with model.accumulate(batches) as micro_batches:
                for x, y in micro_batches:
                    torch.nn.functional.cross_entropy(model(x), y).backward()
            time.sleep(float(os.environ["PACE_S"]))
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    bits = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters())).hexdigest()
    print(f"{elastic.step} steps, bits {bits}", flush=True)
"""
SLOW, FAST = {"PACE_S": "0.2"}, {"PACE_S": "0"}
RUN = ["run", "--nproc-per-node", "2", "--min-ranks", "1", "train.py"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The bits of a run that loses nothing."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "train.py").write_text(SCRIPT)
    return bits_of(paceline(*RUN, cwd=folder, env=FAST))


def wait_for(process, stream, words):
    """Return what the process has written when it has written these words. Reads on in a thread."""
    found, lines = "", iter(getattr(process, stream).readline, "")
    for line in lines:
        found += line
        if re.search(words, found):
            threading.Thread(target=lambda: [None for _ in lines], daemon=True).start()
            return found
    raise AssertionError(f"{words!r} did not come: {found}")


def bits_of(finished):
    assert finished.code == 0, finished.err
    return set(re.findall(r"300 steps, bits ([0-9a-f]{64})", finished.out))


def test_all_ranks_are_killed_and_the_next_launch_has_the_same_bits(folder, undisturbed):
    """By a shadow of its own launch; the disk is not asked for anything while the ranks train."""
    with started(["paceline", *RUN, "a"], folder, SLOW) as job:
        pids = wait_for(job, "stdout", r"(?s)pid \d+ .*pid \d+ ")
        command = ["paceline", "shadow", "checkpoints", "--write-every", "1000s", "--", "train.py", "a"]
        with started(command, folder, SLOW) as shadow:
            wait_for(shadow, "stderr", "follows the training from step")
            for pid in re.findall(r"pid (\d+)", pids):
                os.kill(int(pid), signal.SIGKILL)
            assert shadow.wait(DEADLINE_S) == 0
        assert job.wait(DEADLINE_S) == 1
    resumed = paceline(*RUN, "a", cwd=folder, env=FAST | {"PACELINE_RESUME": "checkpoints"})
    newest = max(folder.glob("checkpoints/step-*"))
    assert set(re.findall(r"begins after step (\d+)", resumed.out)) == {str(int(newest.name[5:]))}
    assert bits_of(resumed) == undisturbed
    refused = paceline(*RUN, "other", cwd=folder, env=FAST | {"PACELINE_RESUME": "checkpoints"})
    assert refused.code == 1
    assert "holds checkpoints of another job: for this job's, it has" in refused.err


def test_the_launch_starts_a_shadow_and_waits_until_it_has_written(folder, undisturbed):
    """The launcher is interrupted. Without a shadow that is killed, no process is left."""
    with started(["paceline", "run", "--shadow", "checkpoints", *RUN[1:]], folder, SLOW) as job:
        wait_for(job, "stderr", "follows the training from step")
        job.send_signal(signal.SIGTERM)
        assert job.wait(DEADLINE_S) == 128 + signal.SIGTERM
    newest = max(folder.glob("checkpoints/step-*"))
    resumed = paceline(*RUN, "names", cwd=folder, env=FAST)
    assert f"begins after step {int(newest.name[5:])}" in resumed.out
    assert bits_of(resumed) == undisturbed


def test_what_cannot_be_followed_is_refused(folder):
    """Another script, another model, no job, a job without `Elastic`; the job trains on."""
    shadow = ["shadow", "checkpoints", "--", "train.py"]
    nothing = paceline(*shadow, "a", cwd=folder, env=FAST)
    assert (nothing.code, "trains train.py with these arguments" in nothing.err) == (2, True)
    assert paceline("shadow", "checkpoints", cwd=folder).code == 2
    with started(["paceline", *RUN, "without"], folder, FAST) as job:
        found = paceline(*shadow, "without", cwd=folder, env=FAST)
        job.wait(DEADLINE_S)
    assert found.code == 2
    with started(["paceline", *RUN, "a"], folder, SLOW) as job:
        wait_for(job, "stdout", "begins after")
        other = paceline(*shadow, "b", cwd=folder, env=FAST)
        assert (other.code, "These do:" in other.err) == (2, True)
        (folder / "train.py").write_text(SCRIPT.replace("Linear(30, 3", "Linear(30, 4"))
        changed = paceline(*shadow, "a", cwd=folder, env=FAST)
        assert changed.code == 1
        assert "the shadow runs another script or model: it has" in changed.err
        assert job.poll() is None

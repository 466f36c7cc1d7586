"""`paceline shadow` as a user types it: all ranks are killed, the next launch has the bits of an undisturbed one."""

import contextlib
import os
import re
import signal
import socket
import threading
import time

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
shuffle = GlobalShuffle(data, GlobalBatch.of(64, ranks=2))
loader = DataLoader(data, batch_sampler=shuffle)
last = torch.nn.Linear(30, 3 + ("other" in sys.argv))
net = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.ReLU(), torch.nn.Dropout(0.2), last)
torch.manual_seed(0 if "ALIKE" in os.environ else dist.get_rank())
model = paceline.DistributedDataParallel(net, batch_sampler=shuffle)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
if "shard" in sys.argv:
    from paceline.optim import shard
    shard(optimizer, model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
more = dict(checkpoint="checkpoints") if "names" in sys.argv else {}
more |= dict(shadow=1) if "spare" in sys.argv else {}
more |= dict(deterministic=True) if "logical" in sys.argv else {}
hurries = lambda: os.path.exists("hurry")
if "without" in sys.argv:
    print("runs", flush=True)
    while not hurries():
        time.sleep(0.1)
else:
    sizes = set()
    elastic = paceline.Elastic(model, optimizer, scheduler, shuffle, **more)
    print(f"pid {os.getpid()} begins after step {elastic.step}", flush=True)
    for epoch in range(shuffle.epoch, 20):
        for batches in elastic.steps(loader):
            with model.accumulate(batches) as micro_batches:
                time.sleep(0 if hurries() else float(os.environ["PACE_S"]))
                for x, y in micro_batches:
                    torch.nn.functional.cross_entropy(model(x), y).backward()
            sizes.add(dist.get_world_size())
            if dist.get_rank() == 1 and os.path.exists("dies"):
                os.rename("dies", "died")
                os.kill(os.getpid(), 9)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    bits = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters())).hexdigest()
    print(f"{elastic.step} steps, bits {bits} on {sizes} ranks\\n", end="", flush=True)
"""
SLOW, FAST = {"PACE_S": "0.2"}, {"PACE_S": "0"}
ALIKE = {"ALIKE": ""}  # all ranks draw the same, as each rank of an engine begins as rank 0
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


@pytest.fixture(scope="module")
def undisturbed_alike(tmp_path_factory):
    """The same, of ranks that are seeded alike."""
    folder = tmp_path_factory.mktemp("alike")
    (folder / "train.py").write_text(SCRIPT)
    return bits_of(paceline(*RUN, cwd=folder, env=FAST | ALIKE))


class Read:
    """What a process writes, read in a thread."""

    def __init__(self, stream):
        self.text, self._seen = "", 0
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream):
        for line in stream:
            self.text += line

    def wait_for(self, words):
        """Return the match of these words, behind those of the last call."""
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s:
            if found := re.compile(words).search(self.text, self._seen):
                self._seen = found.end()
                return found
            time.sleep(0.05)
        raise AssertionError(f"{words!r} did not come: {self.text}")


def wait_for_any(read, words):
    """Return the match of these words in what one of these processes has written."""
    until_s = time.monotonic() + DEADLINE_S
    while not (found := re.search(words, "\n".join(each.text for each in read))):
        assert time.monotonic() < until_s, f"{words!r} did not come: {[each.text for each in read]}"
        time.sleep(0.05)
    return found


def wait_for(process, stream, words):
    """Return the match of these words in what the process writes from now on. Reads on in a thread."""
    return Read(getattr(process, stream)).wait_for(words)


def steps_in(folder):
    """The steps of which there are checkpoints."""
    return sorted(int(each.name[5:]) for each in folder.glob("checkpoints/step-*"))


def bits_in(out):
    return set(re.findall(r"300 steps, bits ([0-9a-f]{64})", out))


def bits_of(finished):
    assert finished.code == 0, finished.err
    return bits_in(finished.out)


@pytest.mark.slow
def test_all_ranks_are_killed_and_the_next_launch_has_the_same_bits(folder, undisturbed):
    """By a shadow of its own launch; the disk is not asked for anything while the ranks train."""
    with started(["paceline", *RUN, "a"], folder, SLOW) as job:
        pids = wait_for(job, "stdout", r"(?s)pid \d+ .*pid \d+ ")[0]
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


@pytest.mark.lab
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.lab), None])
def test_a_shadow_takes_the_place_of_a_lost_rank_in_one_step(folder, undisturbed, number):
    """No step has one rank. The launch starts another shadow, and a second rank is lost.

    Ranks wait within a window, so one is killed there: the shadow holds the step that the others go back to. None: rank
    1 dies behind its window. The others complete the step, of which the shadow lacks a share, and random numbers.
    """
    with started(["paceline", *RUN, "names", "spare"], folder, SLOW) as job:
        out, err = Read(job.stdout), Read(job.stderr)
        pids = re.findall(r"pid (\d+)", out.wait_for(r"(?s)pid \d+ .*pid \d+ ")[0])
        err.wait_for("follows the training from step")
        if number is None:
            (folder / "dies").touch()
        else:
            os.kill(int(pids[number]), signal.SIGKILL)
        promoted = err.wait_for(r"the shadow \(pid (\d+)\) takes the place of local rank \d")[1]
        err.wait_for(r"2 ranks go on after step \d+, without rank\(s\) \d and with 1 that came in")
        out.wait_for(f"pid {promoted} begins after step")
        err.wait_for("follows the training from step")
        os.kill(int(promoted), signal.SIGKILL)
        err.wait_for(r"the shadow \(pid \d+\) takes the place of local rank \d")
        (folder / "hurry").touch()
        assert job.wait(DEADLINE_S) == 0, err.text
    assert bits_in(out.text) == undisturbed
    assert re.findall(r"on (\S+) ranks", out.text) == ["{2}", "{2}"], out.text
    assert number is None or "fell behind" not in err.text


@pytest.fixture(scope="module")
def undisturbed_logical(tmp_path_factory):
    """The bits of a run whose ranks are logical ones, with an optimizer that is not sharded."""
    folder = tmp_path_factory.mktemp("logical")
    (folder / "train.py").write_text(SCRIPT)
    return bits_of(paceline(*RUN, "logical", cwd=folder, env=FAST))


@pytest.mark.slow
@pytest.mark.parametrize("is_behind_window", [False, True])
def test_ranks_with_sharded_steps_take_the_state_of_the_shadow(folder, undisturbed_logical, is_behind_window):
    """A rank is lost with its part of the state, then one that has taken its place."""
    with started(["paceline", *RUN, "names", "spare", "logical", "shard"], folder, SLOW) as job:
        out, err = Read(job.stdout), Read(job.stderr)
        pids = re.findall(r"pid (\d+)", out.wait_for(r"(?s)pid \d+ .*pid \d+ ")[0])
        err.wait_for("follows the training from step")
        if is_behind_window:
            (folder / "dies").touch()
        else:
            os.kill(int(pids[1]), signal.SIGKILL)
        err.wait_for(r"1 ranks go on after step \d+, without rank")
        err.wait_for(r"2 ranks go on after step \d+, with 1 that came in")
        again = out.wait_for(r"pid (\d+) begins after step")[1]
        os.kill(int(again), signal.SIGKILL)
        err.wait_for(r"1 ranks go on after step \d+, without rank")
        (folder / "hurry").touch()
        assert job.wait(DEADLINE_S) == 0, err.text
    assert bits_in(out.text) == undisturbed_logical
    assert "fell behind" not in err.text


@pytest.mark.slow
def test_a_rank_with_sharded_steps_leaves_before_a_shadow_is_there(folder, undisturbed_logical):
    """It takes nothing along. Another comes in, and has its part."""
    with started(["paceline", *RUN, "names", "spare", "logical", "shard"], folder, SLOW) as job:
        out, err = Read(job.stdout), Read(job.stderr)
        pids = re.findall(r"pid (\d+)", out.wait_for(r"(?s)pid \d+ .*pid \d+ ")[0])
        os.kill(int(pids[0]), signal.SIGTERM)
        err.wait_for(r"1 ranks go on after step \d+, without rank")
        assert "follows the training" not in err.text
        err.wait_for(r"2 ranks go on after step \d+, with 1 that came in")
        (folder / "hurry").touch()
        assert job.wait(DEADLINE_S) == 0, err.text
    assert bits_in(out.text) == undisturbed_logical


def free_port(host):
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_a_shadow_follows_sharded_ranks_of_two_hosts(folder, undisturbed_logical):
    """The other host's rank is lost with its part of the state, then the one beside the shadow.

    The second time rank 0, which asks for the state, is on the other host.
    """
    hosts, words = ["127.78.0.1", "127.78.0.2"], ["names", "spare", "logical", "shard"]
    port = str(free_port(hosts[0]))
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--min-ranks", "1", "--master-addr", hosts[0]]
    options += ["--master-port", port, "--local-addr"]
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                started(
                    ["paceline", "run", "--node-rank", str(n), *options, host, "train.py", *words],
                    folder,
                    SLOW,
                )
            )
            for n, host in enumerate(hosts)
        ]
        out, err = ([Read(getattr(each, name)) for each in jobs] for name in ("stdout", "stderr"))
        pids = [int(each.wait_for(r"pid (\d+) begins after step 0")[1]) for each in out]
        err[0].wait_for("follows the training from step")
        for lost in (1, 0):
            os.kill(pids[lost], signal.SIGKILL)
            err[1 - lost].wait_for(r"1 ranks go on after step \d+, without rank")
            err[1 - lost].wait_for(r"2 ranks go on after step \d+, with 1 that came in")
            out[lost].wait_for(r"pid \d+ begins after step")  # until then the other one alone has the state
        (folder / "hurry").touch()
        assert [each.wait(DEADLINE_S) for each in jobs] == [0, 0], [each.text for each in err]
    assert [bits_in(each.text) for each in out] == [undisturbed_logical] * 2
    assert "fell behind" not in err[0].text


@pytest.mark.slow
@pytest.mark.timeout(400)  # two shadows and four ranks begin
@pytest.mark.parametrize("is_elsewhere", [False, pytest.param(True, id="elsewhere")])
def test_ranks_of_an_engine_are_all_killed_and_those_that_it_starts_have_the_same_bits(
    folder, undisturbed_alike, is_elsewhere
):
    """The shadow writes at once, follows the ranks that resume, and ends with the job. A shell is the engine here.

    The shadow may be on another host: it knows the address at which the agent of the ranks listens. Then it meets the
    ranks that resume a little later, and may need a new snapshot.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        there = f"127.0.0.1:{probe.getsockname()[1]}"
    engine = (
        SLOW | ALIKE | {"PACELINE_PEERS": there if is_elsewhere else "local", "PACELINE_RANKS_PER_HOST": "2"}
    )
    engine |= {"PACELINE_JOB": str(folder), "PACELINE_LOST_AFTER": "300"}
    command, resumes = ["python", "train.py", "a"], {"PACELINE_RESUME": "checkpoints"}
    options = ["--peers", there, "--write-every", "0.5s"] if is_elsewhere else ["--write-every", "1000s"]

    with started(command, folder, engine) as first, started(command, folder, engine) as second:
        for each in (first, second):
            wait_for(each, "stdout", "begins after step 0")
        shadow = ["paceline", "shadow", "checkpoints", "--keep", "1000", *options, "--", "train.py", "a"]
        with started(shadow, folder, engine) as following:
            err = Read(following.stderr)
            followed = int(err.wait_for(r"follows the training from step (\d+)")[1])
            time.sleep(1.0)  # some steps
            first.send_signal(signal.SIGKILL)
            second.send_signal(signal.SIGKILL)
            again = [started(command, folder, engine | resumes) for _ in range(2)]
            with again[0] as third, again[1] as fourth:
                out = [Read(each.stdout) for each in (third, fourth)]
                begun = {int(each.wait_for(r"begins after step (\d+)")[1]) for each in out}
                before = [step for step in steps_in(folder) if step <= max(begun)]
                while is_elsewhere and steps_in(folder)[-1] == before[-1]:
                    assert following.poll() is None, err.text
                    time.sleep(0.05)
                (folder / "hurry").touch()
                assert (third.wait(DEADLINE_S), fourth.wait(DEADLINE_S)) == (0, 0)
            if is_elsewhere:  # it would wait for another agent
                following.send_signal(signal.SIGTERM)
            assert following.wait(DEADLINE_S) == (128 + signal.SIGTERM if is_elsewhere else 0), err.text
    assert begun == {before[-1]}
    assert before[-1] > followed
    assert steps_in(folder)[-1] > before[-1]
    assert bits_in(out[0].text) == bits_in(out[1].text) == undisturbed_alike, err.text
    assert is_elsewhere or (len(before) == 2 and "fell behind" not in err.text)


@pytest.mark.slow
@pytest.mark.timeout(400)  # four ranks and two shadows begin
def test_the_first_host_beyond_the_most_is_the_shadow(folder, undisturbed_alike):
    """Of two hosts one may train. It is lost, and the other goes on from what its shadow writes: with the same bits."""
    hosts = ["127.77.0.1", "127.77.0.2"]
    job = SLOW | {"PACELINE_PEERS": ",".join(hosts), "PACELINE_NODES": "1:1", "PACELINE_RANKS_PER_HOST": "2"}
    job |= {"PACELINE_JOB": str(folder), "PACELINE_LOST_AFTER": "300"}
    command = ["python", "train.py", "names", "spare"]

    def begin(host):
        timeout = ("1", "15")[host]  # or the second one begins a job, too
        own = {"PACELINE_LOCAL_ADDR": hosts[host], "PACELINE_JOIN_TIMEOUT": timeout}
        ranks = [started(command, folder, job | own) for _ in range(2)]
        return [stack.enter_context(rank) for rank in ranks]

    with contextlib.ExitStack() as stack:
        first = begin(0)
        for each in first:
            wait_for(each, "stdout", "begins after step 0")
        spares = begin(1)
        err, out = ([Read(getattr(each, name)) for each in spares] for name in ("stderr", "stdout"))
        followed = int(wait_for_any(err, r"follows the training from step (\d+)")[1])
        time.sleep(1.0)  # some steps
        for each in first:
            each.send_signal(signal.SIGKILL)
        begun = {int(each.wait_for(r"begins after step (\d+)")[1]) for each in out}
        (folder / "hurry").touch()
        assert [each.wait(DEADLINE_S) for each in spares] == [0, 0]
    assert len(begun) == 1
    assert max(begun) > followed, (steps_in(folder), [each.text for each in err], [each.text for each in out])
    assert bits_in(out[0].text) == bits_in(out[1].text) == undisturbed_alike


def test_what_cannot_be_followed_is_refused(folder):
    """Another script or model, no job, one without `Elastic`, another's folder; the job trains on."""
    shadow = ["shadow", "checkpoints", "--", "train.py"]
    nothing = paceline(*shadow, "a", cwd=folder, env=FAST)
    assert (nothing.code, "trains train.py with these arguments" in nothing.err) == (2, True)
    assert paceline("shadow", "checkpoints", cwd=folder).code == 2
    words = ["shadow", "elsewhere", "--peers", "127.0.0.1:9", "--", "train.py"]
    alone = paceline(*words, cwd=folder, env=FAST | {"PACELINE_LOST_AFTER": "1"})
    assert "no host of the job answers at 127.0.0.1:9: it has ended, or has another" in alone.err
    with started(["paceline", *RUN, "without"], folder, FAST) as job:
        wait_for(job, "stdout", "runs")
        with started(["paceline", *shadow, "without"], folder, FAST) as waiting:
            err = Read(waiting.stderr)
            err.wait_for("waits for the job's ranks to reach")
            (folder / "hurry").touch()
            assert (waiting.wait(DEADLINE_S), job.wait(DEADLINE_S)) == (2, 0)
            err.wait_for("the job of train.py ended, and its ranks had not reached paceline.Elastic")
    (folder / "hurry").unlink()
    with started(["paceline", *RUN, "a"], folder, SLOW) as job:
        wait_for(job, "stdout", "begins after")
        other = paceline(*shadow, "b", cwd=folder, env=FAST)
        assert (other.code, "These do:" in other.err) == (2, True)
        (folder / "others").mkdir()
        (folder / "others" / "job.json").write_text('{"card": "torch 2\\nmodel of 9 parameters"}')
        foreign = paceline("shadow", "others", "--", "train.py", "a", cwd=folder, env=FAST)
        assert foreign.code == 1
        assert "the folder others holds checkpoints of another job: for this job's, it has" in foreign.err
        (folder / "train.py").write_text(SCRIPT.replace("Linear(30, 3", "Linear(30, 4"))
        changed = paceline(*shadow, "a", cwd=folder, env=FAST)
        assert changed.code == 1
        assert "the shadow runs another script or model: it has" in changed.err
        assert job.poll() is None


@pytest.mark.lab
@pytest.mark.timeout(400)  # a rank and three shadows begin
def test_another_model_or_script_is_refused_on_another_host(folder):
    """The job trains on, and the folder is free for the right shadow."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        there = f"127.0.0.1:{probe.getsockname()[1]}"
    job = {"PACELINE_JOB": str(folder), "PACELINE_LOST_AFTER": "300"}
    shadow = ["shadow", "checkpoints", "--peers", there, "--"]
    with started(["python", "train.py", "a"], folder, SLOW | job | {"PACELINE_PEERS": there}) as rank:
        wait_for(rank, "stdout", "begins after step 0")
        model = paceline(*shadow, "train.py", "other", cwd=folder, env=FAST | job)
        assert model.code == 1
        assert "the shadow runs another script or model: it has '" in model.err, model.err
        (folder / "changed.py").write_text(SCRIPT.replace("lr=0.01", "lr=0.1"))
        script = paceline(*shadow, "changed.py", "a", cwd=folder, env=FAST | job)
        assert script.code == 1
        assert "the shadow runs another script or model: it has 'changed.py (" in script.err, script.err
        with started(["paceline", *shadow, "train.py", "a"], folder, FAST | job) as following:
            wait_for(following, "stderr", "follows the training from step")
            (folder / "hurry").touch()
            assert rank.wait(DEADLINE_S) == 0
            following.send_signal(signal.SIGTERM)  # it would wait for another agent
            following.wait(DEADLINE_S)
    assert max(folder.glob("checkpoints/step-*")).name == "step-000000300"

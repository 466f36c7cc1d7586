"""Who is blamed: deaths while groups are made, late survivors, ranks whose program simply ended."""

import contextlib
import os
import signal
import socket
import subprocess
import textwrap
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from harness import warm
from harness.models import Mlp
from harness.ranks import Ranks
from harness.terminal import TORCHS_ABORT, run
from paceline import DistributedDataParallel
from paceline.comm import failure_detection, gradient_group, rendezvous
from paceline.comm.sealed_store import TOKEN, SealedStore
from paceline.errors import PeerLostError
from paceline.host.processes import GONE, ProcessIdentity
from paceline.transports.shared_memory import neighbours

TIMEOUT_S = 600.0  # of groups: whoever waits for it misses its pool's deadline


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def dies_while_joining(rank, _num_ranks, victim, where):
    """What a survivor is told when `victim` dies at one point of making a group."""
    target = {
        "before": (gradient_group, "group_like"),
        "named": (dist.distributed_c10d, "_new_process_group_helper"),
        "joining": (neighbours, "_map_arenas"),
    }[where]
    try:
        with mock.patch.object(*target, die) if rank == victim else contextlib.nullcontext():
            DistributedDataParallel(Mlp())
    except PeerLostError as error:
        return str(error)
    return None


@pytest.mark.processes
@pytest.mark.parametrize(
    ("num_ranks", "victim", "where"),
    [(2, 1, "before"), (2, 1, "named"), (3, 1, "joining"), (2, 0, "joining")],
)
def test_a_death_while_groups_are_made_is_named(num_ranks, victim, where):
    """In the constructor, around the group that it opens: long before the timeout, and by number and process."""
    with Ranks(num_ranks, group_timeout_s=TIMEOUT_S) as ranks:
        outcomes = ranks.outcomes(dies_while_joining, victim, where)
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.clean, outcome.story()
            assert f"rank {victim} (process " in outcome.value
            assert "has died" in outcome.value


def together(num_ranks, present, timeout_s, before=lambda _store: None):
    """The error of the first of `present` that is alone in front of the store."""
    store = dist.HashStore()
    before(SealedStore(store, "rendezvous"))
    ours = rendezvous.Rendezvous(store, present, num_ranks, timedelta(seconds=timeout_s), "joining a group")
    ours.publish("x", "here")
    with pytest.raises(PeerLostError) as caught:
        ours.collect("x")
    return caught.value


def test_who_did_not_come():
    """Never heard of; heard of and elsewhere; dead; of a host that cannot be looked at; lost by another rank."""
    nobody = together(3, 0, 0.05)
    assert "rank 0 was joining a group" in str(nobody)

    me = ProcessIdentity.of_this_process()
    elsewhere = together(2, 0, 0.6, lambda store: store.set("process/1", me.words))
    assert "rank 1" in str(elsewhere)
    assert "in another part of the program" in str(elsewhere)
    assert elsewhere.peer == 1

    dead = ProcessIdentity(me.pid, "1", me.where, "node")  # its id was given to another process
    assert "has died" in str(together(2, 0, 60.0, lambda store: store.set("process/1", dead.words)))

    far = ProcessIdentity(1, "1", "other-kernel", "far")
    words = str(together(2, 0, 0.05, lambda store: store.set("process/1", far.words)))
    assert "(process 1 on far)" in words
    assert "died" not in words
    assert "another part" not in words

    told = together(3, 0, 60.0, lambda store: store.set("failed", "2 rank 2 has died"))
    assert told.peer == 2


def test_who_ends_after_its_last_words_is_not_missing():
    """They come between two looks, at the store and at the process: the words count."""
    store = dist.HashStore()
    words = SealedStore(store, "rendezvous")
    words.set("process/1", ProcessIdentity.of_this_process().words)

    def says_it_and_ends(_card):
        words.set("x/1", "there")
        return GONE

    ours = rendezvous.Rendezvous(store, 0, 2, timedelta(seconds=60), "joining a group")
    ours.publish("x", "here")
    with mock.patch.object(ProcessIdentity, "state", says_it_and_ends):
        assert ours.collect("x") == [b"here", b"there"]


SCRIPT = """
    import os, signal, sys, time, torch, torch.distributed as dist
    from datetime import timedelta
    from paceline import DistributedDataParallel
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()

    def main():
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        for step in range(5):
            if {condition}:
                {act}
            model(torch.ones(2, 3)).sum().backward()

    try:
        main()
    except RuntimeError as error:
        print("TOLD", rank, error, flush=True)
        os._exit(0)
    {end}
"""


def run_alone(num_ranks, condition, act, shared, end=""):
    """Start ranks without a launcher, whose store rank 0 hosts; returns what each survivor was told."""
    script = textwrap.dedent(SCRIPT).format(condition=condition, act=act, end=end)
    # Bound all the while, so that the kernel gives this port to nobody else; with this option a store may listen on it.
    port_holder = socket.socket()
    port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port_holder.bind(("127.0.0.1", 0))
    environment = {
        **os.environ,
        "PATH": f"{warm.folder()}{os.pathsep}{os.environ['PATH']}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port_holder.getsockname()[1]),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PACELINE_SHARED_MEMORY": "" if shared else "0",
    }
    processes = [
        subprocess.Popen(
            ["python", "-c", script],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
        port_holder.close()
    told = {
        rank: line
        for rank, output in enumerate(outputs)
        for line in output.splitlines()
        if line.startswith("TOLD")
    }
    if not told:
        raise AssertionError("\n".join(outputs))
    return told


@pytest.mark.processes
@pytest.mark.parametrize("shared", [True, False])
def test_a_late_survivor_blames_the_dead(shared):
    """Rank 1 is killed; rank 0, who hosts the store, learns it and ends; rank 2 comes late, and names rank 1."""
    late = "time.sleep(4) if rank == 2 else os.kill(os.getpid(), signal.SIGKILL)"
    told = run_alone(3, "step == 2 and rank > 0", late, shared)
    assert set(told) == {0, 2}, told
    assert "rank 1 (process" in told[0]
    assert "has died" in told[0]
    assert "store" not in told[0]
    assert "rank 1 (process" in told[2], told[2]
    if shared:
        assert "rank 0 (process" not in told[2]


@pytest.mark.processes
@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_that_ends_is_not_dead(shared):
    """Fewer batches on rank 1, whose program ends: the other is told after which step, and of `join`."""
    end = "" if shared else "dist.destroy_process_group()"
    told = run_alone(2, "step == 2 and rank == 1", "return", shared, end)
    assert "left after step 2" in told[0]
    assert "model.join()" in told[0]
    assert "died" not in told[0]


class SlowStore:
    """Answers, but only after more than a slice."""

    def get(self, _key):
        time.sleep(failure_detection.SLICE_S + 0.3)


def test_a_store_that_is_late_is_not_gone():
    """A query that takes longer than a slice, on a busy machine, is waited for before anybody is blamed."""
    group = mock.Mock(**{"rank.return_value": 0, "size.return_value": 2})
    call = failure_detection.FailureDetection(group, "model", "wrapping")
    call._has_store = True
    call._store.set("here/1", "waiting")
    call._query = failure_detection._StoreQuery(SlowStore(), "failure_detection")
    assert call.who_is_gone("waiting", None, None) == ("every rank still answers", True)


@pytest.mark.parametrize("how", ["dead", "left", "answers and dies"])
def test_who_has_ended_is_not_waited_for(how, monkeypatch):
    """The others' grace, here longer than any test may take, is for those that may still answer."""
    monkeypatch.setattr(failure_detection, "GRACE_S", 600.0)
    group = mock.Mock(**{"rank.return_value": 0, "size.return_value": 2})
    call = failure_detection.FailureDetection(group, "model", "wrapping")
    call._has_store = True
    me = ProcessIdentity.of_this_process()
    call._store.set("who/1", (me if how == "left" else ProcessIdentity(me.pid, "1", me.where, me.host)).words)
    if how == "left":
        call._store.set("left/1", "left after step 2")
    if how == "answers and dies":

        def answers_and_dies(_card):
            call._store.set("here/1", "waiting")
            return GONE

        monkeypatch.setattr(ProcessIdentity, "state", answers_and_dies)
    told = {
        "dead": f"rank 1 (process {me.pid} on {me.host}) has died",
        "left": f"rank 1 (process {me.pid} on {me.host}) left after step 2",
        "answers and dies": "every rank still answers",
    }
    words, answer = call.who_is_gone("waiting", None, None)
    assert words.startswith(told[how])
    assert answer is (how == "answers and dies")


def test_rank_0_does_not_blame_itself():
    """The store is gone and nobody's process is known to be."""
    group = mock.Mock(**{"rank.return_value": 0, "size.return_value": 2})
    call = failure_detection.FailureDetection(group, "model", "wrapping")
    assert "rank 0" not in call._without_store(None)
    me = ProcessIdentity.of_this_process()
    call._cards[1] = ProcessIdentity(me.pid, "1", me.where, me.host)
    assert call._without_store(None).startswith(f"rank 1 (process {me.pid} on")


def test_a_stranger_in_the_store(monkeypatch):
    """Who has no token can neither call the roll nor speak for a rank, nor move what a rank has said."""
    store = dist.HashStore()
    stranger = SealedStore(store, "model")
    monkeypatch.setenv(TOKEN, "secret")
    ours, other = SealedStore(store, "model"), SealedStore(store, "optimizer")
    assert ours.get("failure_detection") is None
    store.set("failure_detection", "1")
    assert ours.get("failure_detection") is None
    stranger.set("failure_detection", "1")
    assert ours.get("failure_detection") is None
    ours.wait("failure_detection", timedelta(milliseconds=20))  # returns, and does not spin
    ours.set("failure_detection", "1")
    assert SealedStore(store, "model").get("failure_detection") == b"1"
    assert other.get("failure_detection") is None
    store.set("here/1", store.get("failure_detection"))
    assert ours.get("here/1") is None


REFUSED = """
    import atexit, sys, torch, torch.distributed as dist
    atexit.register(lambda: print("ENDED", flush=True))
    from paceline import DistributedDataParallel
    dist.init_process_group(sys.argv[1])
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    DistributedDataParallel(torch.nn.Linear(3, 3 + dist.get_rank()))
"""


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_a_refused_wrap_ends_the_program_at_once(backend, tmp_path):
    """A rank that raises does not wait for its group's timeout, and exits with 1; nothing aborts, nothing is left.

    Torchrun ends the others when it has seen one: those may not get as far.
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(REFUSED))
    done = run(["torchrun", "--standalone", "--nproc-per-node", "2", "train.py", backend], cwd=tmp_path)
    assert done.code == 1
    assert "ReplicaMismatchError: [1]: params[0]" in done.err
    assert "ENDED" in done.out
    assert TORCHS_ABORT not in done.err


HANGS = """
    import os, socket, sys, time, torch.distributed as dist
    from paceline.comm.failure_detection import _StoreQuery
    from paceline.comm.sealed_store import SealedStore
    port, port_of_signal = map(int, sys.argv[1:])
    store = SealedStore(dist.PrefixStore("of a model", dist.TCPStore("127.0.0.1", port, is_master=False)), "model")
    query = _StoreQuery(store, "hangs")
    assert query.answer(0.1) is None and query.is_alive()

    class Last:
        def __init__(self, query):
            self.signal = socket.create_connection(("127.0.0.1", port_of_signal))
            self.thread = f"/proc/self/task/{query.native_id}"
            self.write, self.exists, self.sleep, self.fd = os.write, os.access, time.sleep, self.signal.fileno()
        def __del__(self):
            self.write(self.fd, b"the interpreter ends")
            while self.exists(self.thread, 0):
                self.sleep(0.01)
            self.write(1, b"ENDED")

    sys.last_of_all = Last(query)
"""


def _answer_late(listener, signals, store_port):
    """Between a rank and its store: pass on what it asks, but a query that hangs only when the rank says so."""
    rank, _ = listener.accept()
    with rank, socket.create_connection(("127.0.0.1", store_port)) as store:

        def pass_answers():
            with contextlib.suppress(OSError):
                while words := store.recv(4096):
                    rank.sendall(words)

        answers = threading.Thread(target=pass_answers)
        answers.start()
        while words := rank.recv(4096):
            if b"hangs" in words:
                with signals.accept()[0] as signal_of_its_end:
                    signal_of_its_end.recv(1)
            store.sendall(words)
        store.shutdown(socket.SHUT_RDWR)
        answers.join()


@pytest.mark.processes
def test_a_store_that_answers_while_the_interpreter_ends_aborts_nothing(tmp_path):
    """After a cable was out, the query of a rank that has ended meanwhile came back into no interpreter: SIGABRT."""
    (tmp_path / "ends.py").write_text(textwrap.dedent(HANGS))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as signals,
    ):
        between = threading.Thread(target=_answer_late, args=(listener, signals, store.port), daemon=True)
        between.start()
        ports = [str(each.getsockname()[1]) for each in (listener, signals)]
        done = run(["python", "ends.py", *ports], cwd=tmp_path, cold=True)
        between.join(TIMEOUT_S)
    assert done.code == 0, done.err
    assert "ENDED" in done.out

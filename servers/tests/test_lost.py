"""Real processes, killed and stopped, without torch: who is lost is named to all others within the timeout."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from harness.running_servers import as_processes, in_threads
from paceline.errors import PeerLostError, ServerLostError
from paceline_servers.link import Identity, ServerLink
from paceline_servers.response_future import ResponseFuture
from paceline_servers.wire import DType, Frame, Kind

TIMEOUT_S = {
    signal.SIGKILL: 600.0,
    signal.SIGSTOP: 5.0,
}  # who is killed is named long before: the test ends earlier
# A rank that pushes to all servers, in turn with the others; its own doing, or the test's, ends it.
PUSHES = """\
import os, sys
import numpy as np
from paceline_servers import link as links
from paceline_servers.response_future import ResponseFuture
from paceline_servers.link import ServerLink, Identity
from paceline_servers.wire import DType, Frame, Kind
rank, fatal, addresses = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
links.GRACE_S = {grace}
link = ServerLink(addresses, Identity(rank, 3, "session", {timeout}, ""))
values = np.full(4, rank + 1.0, np.float32)
print("connected", flush=True)
input()  # until all are: a push waits for all ranks, and no longer than the timeout
for number in range(10**9):
    if number == 20:
        print("ready", flush=True)
        input()  # nothing is under way: a server that stops between two answers would make ranks miss each other
    if number == 22 and fatal:  # all have pushed piece 21, so all are ready
        os.kill(os.getpid(), fatal)
    answers = ResponseFuture(len(addresses))
    try:
        for server in range(len(addresses)):
            link.ask(server, Frame(Kind.PUSH, number, 0, DType.FLOAT32, (values,)), answers)
        answers.wait()
    except Exception as error:
        print(type(error).__name__, getattr(error, "peer", None), error)
        break
    assert all((body.view(np.float32) == 6).all() for body in answers.bodies)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("server", signal.SIGKILL),
        ("rank", signal.SIGSTOP),
        pytest.param("server", signal.SIGSTOP, marks=pytest.mark.lab),
        pytest.param("rank", signal.SIGKILL, marks=pytest.mark.lab),
    ],
)
def test_all_are_told_who_is_lost(victim, number):
    with as_processes(2) as (addresses, servers):
        # A rank is missed by the servers: however late they are, before the other ranks miss the servers.
        code = PUSHES.format(timeout=TIMEOUT_S[number], grace=600.0 if victim == "rank" else 2.0)
        fatal = [number if victim == "rank" and rank == 1 else 0 for rank in range(3)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), str(int(fatal[rank])), *addresses],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        try:
            assert [rank.stdout.readline() for rank in ranks] == ["connected\n"] * 3
            _go(ranks)
            assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 3
            if victim == "server":
                os.kill(servers[1].pid, number)
            _go(ranks)
            others = ranks if victim == "server" else [ranks[0], ranks[2]]
            # Not communicate(), which passes over what readline() has read ahead.
            heard = [rank.stdout.read() for rank in others]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
                rank.stdin.close()
                rank.stdout.close()
        for words in heard:
            kind, peer, said = words.split(" ", 2)
            if victim == "server":
                assert kind == "ServerLostError"
                assert said.startswith(f"parameter server 1 at {addresses[1]} "), words
            else:
                assert (kind, peer) == ("PeerLostError", "1")
                assert f"rank 1 (process {ranks[1].pid} on " in said
            is_killed = number is signal.SIGKILL
            assert ("has closed" in said or "is gone" in said) == is_killed, words
        assert [server.poll() for server in servers if server is not servers[1]] == [None], "servers go on"


def _go(ranks):
    for rank in ranks:
        rank.stdin.write("go\n")
        rank.stdin.flush()


def test_who_is_told_of_a_loss_is_not_blamed_for_leaving(monkeypatch):
    """One server misses rank 1; another, which does not yet, hears of it from the rank that was told and leaves."""
    monkeypatch.setattr("paceline_servers.link.GRACE_S", 60.0)  # no rank misses a server first
    values = np.ones(4, np.float32)
    with in_threads(2) as addresses:
        patient = ServerLink(addresses[1:], Identity(2, 3, "session", 60.0, ""))
        told = ServerLink(addresses, Identity(0, 3, "session", 0.5, ""))
        awaited = []
        for link, num_servers in ((patient, 1), (told, 2)):
            awaited.append(ResponseFuture(num_servers))
            for server in range(num_servers):
                link.ask(server, Frame(Kind.PUSH, 0, 0, DType.FLOAT32, (values,)), awaited[-1])
        for answers in awaited[::-1]:
            with pytest.raises(PeerLostError, match="rank 1 has never connected") as error:
                answers.wait()
            assert error.value.peer == 1


def test_a_link_may_be_closed_by_whoever_holds_its_lock():
    """The garbage collector runs on any thread, and may close the link of a model that is gone."""
    link = ServerLink([], Identity(0, 1, "session", 3.0, ""))

    def collect():
        with link._lock:
            link.close(0.0)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_stopped_server_is_named_and_not_the_rank_that_waits_for_it():
    """It has answered rank 0 and not rank 1, which therefore owes the other server a piece."""
    values = np.ones(4, np.float32)
    with as_processes(2) as (addresses, servers):
        waiting = ServerLink(addresses, Identity(1, 2, "session", 3.0, ""))
        ahead = ServerLink(addresses[:1], Identity(0, 2, "session", 3.0, ""))
        os.kill(servers[1].pid, signal.SIGSTOP)
        awaited = []
        for link, server in ((waiting, 1), (ahead, 0)):
            awaited.append(ResponseFuture(1))
            link.ask(server, Frame(Kind.PUSH, 0, 0, DType.FLOAT32, (values,)), awaited[-1])
        for answers in awaited:
            with pytest.raises(ServerLostError, match=f"parameter server 1 at {addresses[1]} "):
                answers.wait(20.0)


@pytest.mark.timeout(60)
def test_a_rank_that_waits_for_the_server_which_misses_it_is_named():
    """Ranks that push different pieces wait for one server, and each misses the other's there."""
    values = np.ones(4, np.float32)
    with in_threads(1) as addresses:
        awaited = []
        for rank in range(2):
            link = ServerLink(addresses, Identity(rank, 2, "session", 1.0, ""))
            awaited.append((link, ResponseFuture(1)))
            link.ask(0, Frame(Kind.PUSH, rank, 0, DType.FLOAT32, (values,)), awaited[-1][1])
        missed = "rank 1 .* has not pushed piece 0|rank 0 .* has not pushed piece 1"
        for _, answers in awaited:
            with pytest.raises(PeerLostError, match=missed):
                answers.wait(20.0)

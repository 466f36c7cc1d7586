"""Launchers of several machines: what each hears of the others' ranks. Boards share a store in memory."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest
import torch.distributed as dist

from harness.hanging_script import TRAINS_AND_HANGS
from harness.terminal import DEADLINE_S, started
from paceline.host.processes import Activity
from paceline.host.stacks import Stack
from paceline.launch import hang_watch
from paceline.launch.hang_board import Board, Correspondent, standstill
from paceline.observe.progress import Entered


def _entered(rank, count, *, waits, at_s=100.0):
    return Entered(rank, 4000 + rank, b"group", (0, 1, 2), count, at_s, 7, "in a barrier", waits)


@pytest.fixture
def boards():
    store = dist.HashStore()
    return [Board(store, "job", 3) for _ in range(2)]


def test_nobody_writes_while_nobody_asks(boards):
    for board in boards:
        assert board.look([_entered(0, 1, waits=False)], 100.0, asks=False) == []
        assert board.heard() == []


def test_who_is_asked_answers_and_both_know(boards):
    """Times are ages: the machines' clocks have nothing in common."""
    one, other = boards
    here, there = (
        [_entered(0, 5, waits=True), _entered(1, 5, waits=True)],
        [_entered(2, 4, waits=False, at_s=7.0)],
    )
    assert one.look(here, 103.0, asks=True) == []
    found = other.look(there, 10.0, asks=False)
    assert [(each.rank, each.pid, each.at_s, each.waits) for each in found] == [
        (0, 0, 7.0, True),
        (1, 0, 7.0, True),
    ]
    assert standstill([*there, *found], 3).missing == (2,)
    back = one.look(here, 103.5, asks=False)
    assert standstill([*here, *back], 3).missing == (2,)
    assert one.look(here, 120.0, asks=False) == []  # nobody has asked for long


def test_what_one_tells_the_others_hear_once(boards):
    one, other = boards
    one.tell(["hang: rank 2 is missing.", "it sleeps"])
    assert other.heard() == ["hang: rank 2 is missing.", "it sleeps"]
    assert other.heard() == one.heard() == []


def test_words_of_a_stranger(boards, monkeypatch):
    """Without the job's token they are as if they were not there."""
    one, other = boards
    one.look([_entered(0, 5, waits=True)], 103.0, asks=True)
    other._store.set("machine/0", "no seal [1]")
    assert other.look([], 10.0, asks=False) == []


def test_a_store_that_does_not_answer_delays_nobody(boards):
    """The network is cut: looks and the end go on at once; what was told meanwhile goes out when it is back."""
    one, other = boards
    is_back = threading.Event()
    add = one._store.add

    class Cut:
        def add(self, *words):
            assert is_back.wait(60)
            return add(*words)

    store, one._store = one._store, Cut()
    correspondent = Correspondent(one)
    began_s = time.monotonic()
    assert correspondent.look([], 100.0, asks=True) == ([], [])
    assert correspondent.look([], 100.5, asks=True) == ([], [])
    correspondent.tell(["hang"])
    correspondent.close()
    assert time.monotonic() - began_s < 5.0
    one._store = store
    is_back.set()
    correspondent._thread.join(60)
    assert other.heard() == ["hang"]


def test_a_store_that_is_gone_is_said_to_be(boards):
    class Gone:
        def add(self, *_):
            raise RuntimeError("connection reset by peer")

    boards[0]._store = Gone()
    with pytest.raises(RuntimeError, match="gone"):
        Correspondent(boards[0]).look([], 100.0, asks=False)


class Answers:
    """A correspondent who has heard of two ranks that were in different collectives at 100 s, and until when."""

    num_ranks = 3
    until_s = 101.0

    def look(self, own, now_s, *, asks):
        where = {"in a barrier": 5, "wrapping the model": 4}
        ranks = enumerate(where.items())
        return [
            Entered(rank, 0, b"group", (0, 1, 2), count, 100.0, 7, what, waits=True, known_s=self.until_s)
            for rank, (what, count) in ranks
        ], []

    def tell(self, lines):
        pass


@pytest.mark.parametrize("until_s", [101.0, 107.0])
def test_ranks_elsewhere_may_have_gone_on_since_they_were_asked(tmp_path, monkeypatch, until_s):
    """Answers are read for ten seconds: one of the first second is no news of the sixth."""
    own = Entered(2, os.getpid(), b"group", (0, 1, 2), 6, 101.0, 7, "in a barrier", waits=False)
    monkeypatch.setattr(hang_watch.progress, "read", lambda _: [own])
    told = []
    watch = hang_watch.HangWatch(tmp_path, "a launch", 0, hang_watch.QUIET_S, told.append)
    watch._board = Answers()
    for now_s in range(101, 108):
        watch._board.until_s = min(now_s, until_s)
        watch._look(float(now_s))
    assert bool(told) == (until_s > 106.0)
    assert all("different collectives" in words or "Nothing has been ended" in words for words in told)


@pytest.mark.parametrize("waiting", [{0: 41}, {}])
@pytest.mark.parametrize("is_busy", [True, False])
def test_a_rank_that_the_agent_waits_for_is_reported(tmp_path, monkeypatch, waiting, is_busy):
    """Outside of collectives: after a loss a rank computes for ever, or does nothing, and does not stop."""
    now_s, told = 100.0, []
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(
        hang_watch, "activity_of", lambda _: Activity(now_s * is_busy, 0.0, 0, 0, on_disk=False)
    )
    monkeypatch.setattr(hang_watch, "stack_of", lambda *_: Stack((), "py-spy", "computes"))
    watch = hang_watch.HangWatch(tmp_path, "a launch", 3, hang_watch.QUIET_S, told.append)
    until_s = None
    for _ in range(700):
        watch.note_waits(waiting, {1: 42}, "waiting for all ranks to stop")
        watch._look(now_s)
        until_s = until_s or (now_s if told else None)
        now_s += 0.5
    who = "rank 0" if waiting else "the launcher"
    if is_busy:
        assert until_s > 400
        assert told[0].startswith(
            "rank 1 has been busy for 301 s without entering a collective, while " + who
        )
        assert "py-spy dump --pid 42" in told[0]
    else:
        assert 130 < until_s < 140  # it has entered nothing yet
        assert told[0].startswith(
            f"hang: rank 1 is missing. {who.capitalize()} has been waiting for all ranks"
        )
    watch.note_waits(waiting, {}, "waiting for all ranks to stop")
    assert watch._waits == ()


@pytest.mark.lab
@pytest.mark.processes
def test_two_launchers(tmp_path):
    """The rank that hangs is alone on its machine; both launchers name it."""
    (tmp_path / "trains.py").write_text(TRAINS_AND_HANGS)
    endpoint = f"file://{tmp_path}/meet"
    words = ["paceline", "run", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--hang-after", "2"]
    with (
        started([*words, "trains.py", "sleep", "torch"], tmp_path) as one,
        started([*words, "trains.py", "sleep", "torch"], tmp_path) as other,
    ):
        told = []
        for process in (one, other):
            read = ""
            while "explain hang" not in read and (line := process.stderr.readline()):
                read += line
            told.append(read)
        for process in (one, other):
            process.send_signal(signal.SIGINT)
        last = [process.communicate(timeout=DEADLINE_S)[1].splitlines()[-1] for process in (one, other)]
    for text in told:
        assert "hang: rank 1 is missing." in text
        assert "stuck (" in text
    assert sum("That is on another machine." in text for text in told) == 1
    assert all("Before that: hang: rank 1 is missing." in words for words in last)


ELASTIC = """
import sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
import paceline
from paceline.data import GlobalBatch, GlobalShuffle
dist.init_process_group("gloo")
data = TensorDataset(torch.ones(64, 3), torch.ones(64, 1))
shuffle = GlobalShuffle(data, GlobalBatch.of(4, dist.get_world_size()))
loader, net = DataLoader(data, batch_sampler=shuffle), torch.nn.Linear(3, 1)
model = paceline.DistributedDataParallel(net, batch_sampler=shuffle)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
elastic = paceline.Elastic(model=model, optimizer=optimizer, sampler=shuffle)
for batches in elastic.steps(loader):
    with model.accumulate(batches) as micro_batches:
        for x, y in micro_batches:
            if elastic.step == 5 and dist.get_rank() == 1:
                time.sleep(600)
            (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.lab
@pytest.mark.processes
def test_two_elastic_agents(tmp_path):
    """Without a store of the launch: they ask each other in that of the membership."""
    (tmp_path / "trains.py").write_text(ELASTIC)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    words = ["paceline", "run", "--nnodes", "2", "--nproc-per-node", "1", "--min-ranks", "1"]
    words += ["--master-addr", "127.0.0.1", "--master-port", port, "--hang-after", "2", "--lost-after", "600"]
    token = {"PACELINE_TOKEN": "0123456789abcdef" * 2}
    with (
        started([*words, "--node-rank", "0", "trains.py"], tmp_path, token) as one,
        started(
            [*words, "--node-rank", "1", "--local-addr", "127.0.0.2", "trains.py"], tmp_path, token
        ) as other,
    ):
        told = []
        for process in (one, other):
            read = ""
            while "explain hang" not in read and (line := process.stderr.readline()):
                read += line
            told.append(read)
    assert all("hang: rank 1 is missing." in text for text in told), told
    assert sum("That is on another machine." in text for text in told) == 1

"""A server or a rank that stands still for a while accuses nobody whose words lay unread."""

import importlib
import select
import sys
import threading
import time

import numpy as np
import pytest

from harness.running_servers import in_threads
from paceline.errors import ConfigurationError
from paceline_lossy.datagrams.datagram_loop import compile_all
from paceline_servers.link import Identity, ServerLink
from paceline_servers.response_future import ResponseFuture
from paceline_servers.session import Session
from paceline_servers.wire import DType, Frame, Kind, pack

LIMIT_S = 30.0
VALUES = np.ones(4, np.float32)


def push(link, number=0):
    answers = ResponseFuture(1)
    link.ask(0, Frame(Kind.PUSH, number, 0, DType.FLOAT32, (VALUES,)), answers)
    return answers


class _Clock:
    """Stands still until it is told; a server looks at it once a turn."""

    now_s, num_looks = 1000.0, 0
    sleep = time.sleep

    def monotonic(self):
        self.num_looks += 1
        return self.now_s


class _Blocked:
    """Finds no module; looking for one name takes until it is told."""

    def __init__(self, name):
        self._name, self.has_begun, self.may_end = name, threading.Event(), threading.Event()

    def find_spec(self, name, path=None, target=None):
        if name == self._name:
            self.has_begun.set()
            self.may_end.wait(LIMIT_S)


@pytest.mark.compiles  # what is imported makes numba load its functions
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("module", "kind"),
    [("paceline_servers.stepping", Kind.SET_UP), ("paceline_servers.datagram_sums", Kind.JOIN)],
)
def test_a_server_goes_on_while_it_imports_what_one_job_needs(module, kind, monkeypatch):
    importlib.import_module(module)
    compile_all()  # it may take minutes, once
    monkeypatch.delitem(sys.modules, module)
    blocked = _Blocked(module)
    monkeypatch.setattr(sys, "meta_path", [blocked, *sys.meta_path])
    with in_threads(1) as addresses:
        try:
            first = ServerLink(addresses, Identity(0, 2, "slow", LIMIT_S, ""))
            awaited = ResponseFuture(1)
            first.ask(0, Frame(kind, body=(pack({"optimizer": "none"}),)), awaited)
            assert blocked.has_begun.wait(LIMIT_S)
            second = ServerLink(addresses, Identity(1, 2, "slow", LIMIT_S, ""))
            other = ServerLink(addresses, Identity(0, 1, "quick", LIMIT_S, ""))
            assert push(other).wait(LIMIT_S)
            assert not awaited.wait(0), "it has not been imported"
        finally:
            blocked.may_end.set()
        with pytest.raises(
            ConfigurationError if kind is Kind.SET_UP else Exception, match=r"servers do not step|number"
        ):
            awaited.wait(LIMIT_S)
        for link in (first, second, other):
            link.close(2.0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("comes", ["meanwhile", "afterwards"])
def test_a_server_that_stood_still_blames_nobody_for_it(comes, monkeypatch):
    clock, stands, goes_on = _Clock(), threading.Event(), threading.Event()

    class Still(Session):
        def receive(self, rank, frame, now_s):
            outgoing = super().receive(rank, frame, now_s)
            if rank == 0 and frame.kind is Kind.PUSH:
                stands.set()
                goes_on.wait(LIMIT_S)
            return outgoing

    monkeypatch.setattr("paceline_servers.server.time", clock)
    monkeypatch.setattr("paceline_servers.server.Session", Still)
    with in_threads(1) as addresses:
        links = [ServerLink(addresses, Identity(number, 2, "s", 5.0, "")) for number in range(2)]
        awaited = [push(links[0])]
        assert stands.wait(LIMIT_S)
        if comes == "meanwhile":
            before = links[1].bytes_sent[0]
            awaited.append(push(links[1]))
            while links[1].bytes_sent[0] == before:
                pass
        clock.now_s += 100.0
        goes_on.set()
        if comes == "afterwards":
            turns = clock.num_looks
            while clock.num_looks < turns + 4:
                pass
            awaited.append(push(links[1]))
        for answers in awaited:
            assert answers.wait(LIMIT_S)
        for link in links:
            link.close(2.0)


@pytest.mark.timeout(60)
def test_a_rank_that_stood_still_reads_before_it_misses_a_server(monkeypatch):
    clock, stands, goes_on = _Clock(), threading.Event(), threading.Event()
    monkeypatch.setattr("paceline_servers.link.time", clock)
    with in_threads(1) as addresses:
        links = [ServerLink(addresses, Identity(number, 2, "s", 5.0, "")) for number in range(2)]
        queue, server = links[0]._queue, links[0]._servers[0]
        sent = server.connection.bytes_sent

        def stand_still():
            queue()
            if server.connection.bytes_sent > sent and not server.connection.wants_to_send:
                stands.set()
                goes_on.wait(LIMIT_S)

        monkeypatch.setattr(links[0], "_queue", stand_still)
        awaited = [push(links[0])]
        assert stands.wait(LIMIT_S)
        awaited.append(push(links[1]))
        assert select.select([server.connection.socket], [], [], LIMIT_S)[0], "the answer is there"
        clock.now_s += 100.0
        goes_on.set()
        for answers in awaited:
            assert answers.wait(LIMIT_S)
        for link in links:
            link.close(2.0)

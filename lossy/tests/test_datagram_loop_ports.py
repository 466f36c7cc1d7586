"""The loop of several ports, interpreted, over a kernel that the test plays: which port it sends by, and waits for."""

from __future__ import annotations

import socket
import types

import numpy as np
import pytest

from harness.datagram_networks import endpoints
from paceline_lossy import Bound
from paceline_lossy.datagrams import datagram_loop as loop
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams import system_calls
from paceline_lossy.datagrams.udp_socket import socket_addresses

pytestmark = pytest.mark.compiles

PORTS = (40, 41, 42, 43)  # descriptors
WAKE = 50


class Kernel(types.SimpleNamespace):
    """Takes what leaves by each port unless its buffer is full; time goes on, mostly while somebody waits."""

    def __init__(self, full=()):
        names = [name for name in vars(system_calls) if name.isupper()]
        super().__init__(**{name: getattr(system_calls, name) for name in names})
        self.prepare_messages = system_calls.prepare_messages
        self.full, self.time_us, self.sent, self.waits = set(full), 1000, [], []

    def now_us(self, _scratch):
        self.time_us += 1
        return self.time_us

    def receive_batch(self, descriptor, _batch):
        assert descriptor == PORTS[0], "one port takes what comes"
        return -self.AGAIN

    def queued_bytes(self, _descriptor, _scratch):
        return 0

    def send_messages(self, descriptors, batch, first, made):
        port = int(batch.ports[first])
        if descriptors[port] in self.full:
            return -self.AGAIN
        same = 1
        while first + same < made and batch.ports[first + same] == port:
            same += 1
        self.sent += [int(descriptors[port])] * same
        return same

    def wait_for(self, descriptors, events, scratch, timeout_us):
        self.waits.append((int(descriptors[0]), int(events[0]), timeout_us))
        assert descriptors[1] == WAKE
        self.time_us += timeout_us
        scratch[3] = 0


@pytest.fixture
def drive(monkeypatch):
    def with_kernel(kernel, end, io, slice_us):
        monkeypatch.setattr(loop, "system", kernel)
        monkeypatch.setattr(
            loop, "_send", loop._send.py_func if hasattr(loop._send, "py_func") else loop._send
        )
        return loop.drive.py_func(end.tables, io, slice_us)

    return with_kernel


def begun():
    end = endpoints(2, ports=len(PORTS))[0]
    end.begin(np.ones(20_000, np.float32), Bound(0.0), 1000)
    end.tables.peers[1, e.P_BEGUN] = 1  # as if it had said so: else it is sent what it can keep for later
    return end, loop.new_io(PORTS, WAKE, 64, end.row_bytes, np.zeros((2, 2), np.int64), 1)


def test_a_queue_that_is_empty_whenever_one_looks_gets_more_room(drive):
    """With long datagrams the first limit has room for one: nothing would ever find that queue full."""
    end = endpoints(2, payload=8928)[0]
    end.begin(np.ones(2_000_000, np.float32), Bound(0.0), 1000)
    end.tables.peers[1, e.P_BEGUN] = 1
    kernel, io = Kernel(), loop.new_io(PORTS[:1], WAKE, 64, end.row_bytes, np.zeros((2, 2), np.int64), 1)
    assert io.local[0, 0] // end.row_bytes == 1
    drive(kernel, end, io, 3000)
    assert io.local[0, 0] // end.row_bytes >= 7
    assert len(kernel.sent) > 10, "of a first window of 16"


def test_every_port_is_sent_by_and_nothing_is_waited_for_where_all_have_room(drive):
    kernel, (end, io) = Kernel(), begun()
    assert drive(kernel, end, io, 3000) == loop.TIME_IS_UP
    assert set(kernel.sent) == set(PORTS)
    assert kernel.waits
    assert {(descriptor, events) for descriptor, events, _ in kernel.waits} == {(PORTS[0], 0)}


@pytest.mark.parametrize("full", [1, 3])
def test_the_loop_rests_until_the_port_that_is_full_has_room(drive, full):
    """And not for another, which has room at once: the loop would turn without a rest."""
    kernel, (end, io) = Kernel([PORTS[full]]), begun()
    assert drive(kernel, end, io, 3000) == loop.TIME_IS_UP
    assert (PORTS[full], kernel.POLL_OUT) in {wait[:2] for wait in kernel.waits}
    assert all(
        descriptor == PORTS[full] for descriptor, events, _ in kernel.waits if events == kernel.POLL_OUT
    )
    assert PORTS[full] not in kernel.sent
    kernel.full.clear()
    drive(kernel, end, io, 3000)
    assert set(kernel.sent) == set(PORTS)
    assert kernel.waits[-1][:2] == (PORTS[0], 0), "nothing is left to send: it waits for time alone"


def test_what_a_full_port_could_not_take_is_not_sent_by_another(drive):
    """A datagram is sealed for its port: who receives it counts what that port carries."""
    kernel, (end, io) = Kernel([PORTS[2]]), begun()
    drive(kernel, end, io, 3000)
    first = int(io.status[1])
    pending = int(io.status[0])
    assert pending > first
    assert int(io.outgoing.ports[first]) == 2
    kernel.full.clear()
    kernel.sent.clear()
    drive(kernel, end, io, 0)
    assert kernel.sent[0] == PORTS[2]


def test_each_call_of_the_kernel_takes_the_messages_of_one_port():
    """Real sockets, and the compiled calls: a receiver sees two datagrams by each of two ports."""
    receiver, *senders = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(3))
    for each in (receiver, *senders):
        each.bind(("127.0.0.1", 0))
    batch = system_calls.new_batch(8, 64, socket_addresses([receiver.getsockname()]))
    batch.sizes[:4], batch.ways[:4] = 64, [0, 0, 1, 1]
    made = system_calls.prepare_messages(batch, 4, 1, 2)
    descriptors = np.array([each.fileno() for each in senders], np.int64)
    assert made == 4
    assert [system_calls.send_messages(descriptors, batch, first, made) for first in (0, 2)] == [2, 2]
    by = [receiver.recvfrom(64)[1] for _ in range(4)]
    assert by == [senders[0].getsockname()] * 2 + [senders[1].getsockname()] * 2
    for each in (receiver, *senders):
        each.close()


class Link(Kernel):
    """Its one port's queue drains by 12.5 bytes a microsecond."""

    def __init__(self, row_bytes):
        super().__init__()
        self.row_bytes, self.filled, self.filled_us, self.sent_at_rest = row_bytes, 0.0, 0, []

    def queued_bytes(self, _descriptor, _scratch):
        self.filled = max(0.0, self.filled - 12.5 * (self.time_us - self.filled_us))
        self.filled_us = self.time_us
        return int(self.filled)

    def send_messages(self, descriptors, batch, first, made):
        taken = super().send_messages(descriptors, batch, first, made)
        self.filled += taken * self.row_bytes
        return taken

    def wait_for(self, descriptors, events, scratch, timeout_us):
        self.sent_at_rest.append(len(self.sent))
        super().wait_for(descriptors, events, scratch, timeout_us)


@pytest.fixture
def link():
    """An endpoint that may send 1,000 datagrams of 1,472 bytes, one by one; its loop's memory, and its link."""
    end = endpoints(2, payload=1432)[0]
    end.begin(np.ones(1_000_000, np.float32), Bound(0.0), 1000)
    end.tables.peers[1, e.P_BEGUN] = 1
    end.tables.rates[:, e.R_WINDOW] = 1000.0
    end.tables.rates[:, e.R_RTT] = 10.0
    io = loop.new_io(PORTS[:1], WAKE, 64, end.row_bytes, np.zeros((2, 2), np.int64), 1)
    return end, io, Link(end.row_bytes)


def test_the_queue_s_rate_is_learnt_from_what_is_in_it_after_sending(drive, link):
    end, io, kernel = link
    drive(kernel, end, io, 12_000)
    rate, _, _ = io.drain[0]
    assert 11 < rate < 14
    rests = [rest for *_, rest in kernel.waits]
    assert rests[0] == 300, "nothing is known of the link yet"
    assert 300 < max(rests) <= 900, "its queue lasts for longer than the shortest rest"


def test_a_turn_sends_on_until_all_that_there_is_room_for_has_left(drive, link):
    """A peer is given 16 datagrams at a time; a fast link takes more before the next turn, which comes soon then."""
    end, io, kernel = link
    io.local[0, 0], io.drain[0, 0] = 1000 * end.row_bytes, 12.5
    drive(kernel, end, io, 2000)
    assert kernel.sent_at_rest[0] >= 4 * 16
    assert kernel.waits[0][2] == 300, "though the queue lasts for long"

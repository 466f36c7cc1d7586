"""How a way's window shares a port with TCP cubic and with others of its kind, in virtual time.

The window's own code, interpreted, in a model of one port; nothing of the protocol around it.
"""

from __future__ import annotations

import heapq
import importlib.util
import random

import numba
import numpy as np
import pytest

from paceline_lossy.datagrams import congestion_window
from paceline_lossy.datagrams import endpoint_state as e

pytestmark = pytest.mark.compiles

RATE, PACKET_BYTES, TURN_US = 100e6, 1514, 400
PACKET_US = PACKET_BYTES * 8e6 / RATE


@pytest.fixture(scope="module")
def window():
    """The module, not compiled: compiling would take longer than all of this."""
    spec = importlib.util.spec_from_file_location("interpreted_window", congestion_window.__file__)
    module = importlib.util.module_from_spec(spec)
    was, numba.config.DISABLE_JIT = numba.config.DISABLE_JIT, True
    spec.loader.exec_module(module)
    numba.config.DISABLE_JIT = was
    return module


class Pair:
    """A way that always has something to send; it sends in turns, paced, and is late as threads are."""

    def __init__(self, window, dice):
        self.window, self.dice = window, dice
        self.way, self.rate = [0] * e.NUM_W, [0.0] * e.NUM_R
        window.reset(self.way, self.rate)
        self.flying, self.next_us, self.got = 0, 0.0, 0

    def may_send(self, now_us):
        if self.flying >= int(self.rate[e.R_WINDOW]) or self.next_us > now_us:
            return False
        pause_us = self.window.pause_us(self.way, self.rate)
        self.next_us = max(self.next_us, now_us - 8 * pause_us) + pause_us
        self.flying += 1
        self.way[e.W_NEXT] += 1
        return True

    def take(self, now_us, number, sent_us, wait_us, is_lost):
        self.flying -= 1
        if is_lost:
            self.way[e.W_ROUND_LOST] += 1
            return
        self.got += 1
        self.way[e.W_ROUND_GOOD] += 1
        is_end = number >= self.way[e.W_ROUND_END]
        if is_end or self.dice.random() < 0.2:  # as often as receivers answer
            late_us = self.dice.expovariate(1 / 300)
            way_us = int(sent_us + wait_us + late_us) & 0xFFFFFFFF
            self.window.note_round_trip(
                self.way, self.rate, now_us - sent_us + late_us, way_us - int(sent_us), int(now_us)
            )
        if is_end:
            self.window.end_round(self.way, self.rate, int(now_us))


class Cubic:
    """TCP cubic by RFC 9438, without timeouts: what is lost is known a round trip later."""

    def __init__(self):
        self.window, self.threshold, self.most, self.since_us, self.guess = 10.0, 1e9, 0.0, 0.0, 0.0
        self.flying, self.next, self.repaired_to, self.got, self.least_us = 0, 0, -1, 0, 1e12

    def may_send(self, now_us):
        if self.flying >= int(self.window):
            return False
        self.flying += 1
        self.next += 1
        return True

    def take(self, now_us, number, sent_us, wait_us, is_lost):
        self.flying -= 1
        self.got += not is_lost
        if number <= self.repaired_to:
            return
        if is_lost:
            self.repaired_to, self.since_us = self.next, 0.0
            self.most = self.window * 0.85 if self.window < self.most else self.window
            self.threshold = self.window = max(2.0, 0.7 * self.window)
            return
        self.least_us = min(self.least_us, now_us - sent_us)
        if self.window < self.threshold:
            self.window += 1
            if wait_us > 4000 and self.window >= 16:
                self.threshold = self.window
            return
        if not self.since_us:
            self.since_us, self.guess = now_us, self.window
        back_s = (
            (max(0.0, self.most - self.window) / 0.4) ** (1 / 3) if now_us == self.since_us else self.back_s
        )
        self.back_s = back_s
        after_s = (now_us - self.since_us + self.least_us) / 1e6 - back_s
        wanted = min(max(self.most, self.guess) + 0.4 * after_s**3, 1.5 * self.window)
        self.guess += 0.53 / self.window
        self.window = max(
            self.window + max((wanted - self.window) / self.window, 0.01 / self.window), self.guess
        )


class Port:
    """One port that all send into; returns what was lost a millisecond after what arrived behind it."""

    def __init__(self, senders, queue_bytes, round_trip_us, loss=0.0, seed=1):
        self.senders, self.room, self.round_trip_us = senders, queue_bytes // PACKET_BYTES, round_trip_us
        self.dice, self.loss, self.free_us, self.now_us = random.Random(seed), loss, 0.0, 0.0
        self.events, self.count, self.active, self.waits = [], 0, set(), []

    def start(self, sender):
        self.active.add(sender)
        self._plan(self.now_us, sender, None)

    def run(self, seconds):
        """Let time pass; return what arrived of each sender's, in parts of an even share."""
        until_us, before = self.now_us + seconds * 1e6, np.array([sender.got for sender in self.senders])
        self.waits = []
        while self.events and self.events[0][0] <= until_us:
            self.now_us, _, sender, packet = heapq.heappop(self.events)
            if packet is not None:
                self.senders[sender].take(self.now_us, *packet)
            elif isinstance(self.senders[sender], Pair):
                self._plan(self.now_us + TURN_US + self.dice.expovariate(1 / 300), sender, None)
                self.waits.append(max(0.0, self.free_us - self.now_us) / 1e3)
            if sender in self.active and (packet is None or isinstance(self.senders[sender], Cubic)):
                self._send(sender)
        self.now_us = until_us
        got = np.array([each.got for each in self.senders]) - before
        return got / got.mean()

    def _send(self, sender):
        one = self.senders[sender]
        for number in range(16):
            if not one.may_send(self.now_us):
                return
            at_us = self.now_us + (number * PACKET_US if isinstance(one, Pair) else 0)
            sequence = (one.way[e.W_NEXT] if isinstance(one, Pair) else one.next) - 1
            wait_us = max(0.0, self.free_us - at_us)
            is_lost = wait_us / PACKET_US + 1 > self.room
            if not is_lost:
                self.free_us = max(self.free_us, at_us) + PACKET_US
                is_lost = self.dice.random() < self.loss
            back_us = at_us + wait_us + PACKET_US + self.round_trip_us + 1000 * is_lost
            self._plan(back_us, sender, (sequence, at_us, wait_us, is_lost))

    def _plan(self, when_us, sender, packet):
        self.count += 1
        heapq.heappush(self.events, (when_us, self.count, sender, packet))


def shared_port(window, pairs, queue_kib, round_trip_us, cubics=1, **options):
    """Pairs that have sent for half a second when TCP connections join them."""
    dice = random.Random(options.get("seed", 1))
    senders = [Pair(window, dice) for _ in range(pairs)] + [Cubic() for _ in range(cubics)]
    port = Port(senders, queue_kib * 1024, round_trip_us, **options)
    for pair in range(pairs):
        port.start(pair)
    port.run(0.5)
    for cubic in range(pairs, pairs + cubics):
        port.start(cubic)
    return port


def jain(shares):
    return shares.sum() ** 2 / (len(shares) * (shares**2).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pairs", "queue_kib", "round_trip_us"), [(1, 256, 10_000), (3, 256, 500), (7, 256, 500)]
)
def test_pairs_and_a_cubic_connection_share_a_port(window, pairs, queue_kib, round_trip_us):
    """Jain's index of the mean of three runs, after 5 s; and nobody has less than half of an even share."""
    found = []
    for seed in (1, 2, 3):
        port = shared_port(window, pairs, queue_kib, round_trip_us, seed=seed)
        port.run(5.0)
        found.append(port.run(10.0))
    shares = np.mean(found, axis=0)
    assert jain(shares) > 0.9, shares
    assert shares.min() > 0.5, shares


def test_pairs_go_back_to_delay_when_the_connection_has_ended(window):
    """They yield together every 10 s, see the queue get short, and keep it so."""
    port = shared_port(window, 3, 256, 500)
    port.run(8.0)
    assert np.median(port.waits[-1000:]) > 15
    port.active.discard(3)
    port.run(12.5)
    port.run(2.0)
    assert np.median(port.waits) < 9


def test_pairs_alone_do_not_fill_the_queue(window):
    """What is long for a moment is not taken for others' doing, also where some packets are lost at random."""
    for loss in (0.0, 0.03):
        port = shared_port(window, 3, 256, 500, cubics=0, loss=loss)
        port.run(8.0)
        assert np.median(port.waits) < 9


def test_a_standing_queue_is_not_taken_for_the_way(window):
    """The least delay is known after a minute in a queue of TCP's, and ages by two clocks' drift only without it."""
    way, rate = [0] * e.NUM_W, [0.0] * e.NUM_R
    window.reset(way, rate)
    window.note_round_trip(way, rate, 1000.0, 500, 0)
    for second in range(1, 61):
        rate[e.R_MOST] = 50.0
        window.note_round_trip(way, rate, 20_000.0, 18_500, second * 1_000_000)
    assert rate[e.R_MIN_WAIT] == 0
    rate[e.R_MOST] = 0.0
    window.note_round_trip(way, rate, 20_000.0, 18_500, 70_000_000)
    assert rate[e.R_MIN_WAIT] == pytest.approx(1000)


def test_a_pause_is_no_competition(window):
    """Who sends again after a pause, and finds a queue, yields before it competes."""
    way, rate = [0] * e.NUM_W, [0.0] * e.NUM_R
    window.reset(way, rate)
    now_us = 5_000_000
    window.note_round_trip(way, rate, 1000.0, 500, now_us)
    window.end_round(way, rate, now_us)
    rate[e.R_WINDOW], way[e.W_IS_STARTING] = 100.0, 0
    now_us += 900_000
    for _ in range(3):
        now_us += 20_000
        way[e.W_ROUND_GOOD] = int(rate[e.R_WINDOW])
        window.note_round_trip(way, rate, 20_000.0, 18_500, now_us)
        window.end_round(way, rate, now_us)
    assert rate[e.R_WINDOW] < 50

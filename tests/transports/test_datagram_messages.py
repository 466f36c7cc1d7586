"""Reliable messages over the datagram protocol: endpoints in one process, on a network that the test plays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.datagram_networks import PAYLOAD, TICK_US, Mailer, Network
from paceline.transports.bounded_loss import endpoint_state as e
from paceline.transports.bounded_loss.message_endpoint import MessageEndpoint

pytestmark = pytest.mark.compiles

LONGEST_US = 400_000_000


def ends_of(ranks, silence_us=10**12):
    return [
        MessageEndpoint(
            rank,
            ranks,
            {peer: bytes([min(rank, peer), max(rank, peer)]) * 16 for peer in range(ranks) if peer != rank},
            PAYLOAD,
            silence_us,
        )
        for rank in range(ranks)
    ]


class Play:
    """Messages between some endpoints, handed in as their slots allow."""

    def __init__(self, ends, network):
        self.ends, self.network = ends, network
        self.mailer, self.now_us = Mailer(ends[0]), 1000
        self.sends = {(rank, peer): [] for rank in range(len(ends)) for peer in range(len(ends))}
        self.receives = {pair: [] for pair in self.sends}
        self.num_sent = dict.fromkeys(self.sends, 0)
        self.num_received = dict.fromkeys(self.sends, 0)

    def message(self, source, target, content, tag=None):
        self.sends[source, target].append((content, tag or len(content)))
        self.receives[source, target].append((np.zeros(len(content), np.uint8), tag or len(content)))

    def turn(self, late_us=0):
        for rank, end in enumerate(self.ends):
            for peer in range(len(self.ends)):
                going, coming = self.sends[rank, peer], self.receives[peer, rank]
                while (n := int(end.tables.peers[peer, e.P_SENDING])) < len(going) and end.can_send(peer):
                    end.begin_send(peer, *going[n])
                is_late = rank == len(self.ends) - 1 and self.now_us < late_us
                while (
                    not is_late
                    and (n := int(end.tables.peers[peer, e.P_RECEIVING])) < len(coming)
                    and end.can_receive(peer)
                ):
                    end.begin_receive(peer, *coming[n], self.now_us)
            for peer, datagram in self.mailer.take(end, self.now_us):
                self.network.carry(self.now_us, peer, datagram)
        self.now_us += TICK_US if self.network.under_way else 20 * TICK_US
        for _, peer, datagram in self.network.arrived(self.now_us):
            self.mailer.hand(self.ends[peer], [datagram], self.now_us)
        for rank, end in enumerate(self.ends):
            for is_sent, peer, _ in end.take_ended():
                count = self.num_sent if is_sent else self.num_received
                count[(rank, peer) if is_sent else (peer, rank)] += 1

    @property
    def is_done(self):
        return all(
            self.num_sent[pair] == self.num_received[pair] == len(self.sends[pair]) for pair in self.sends
        )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(2, 3),
    messages=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(1, 900)), min_size=1, max_size=24
    ),
    lose=st.sampled_from([0.0, 0.05, 0.4]),
    repeat=st.sampled_from([0.0, 0.2]),
    delay=st.sampled_from([0.0, 0.3]),
    corrupt=st.sampled_from([0.0, 0.05]),
    late_us=st.sampled_from([0, 30_000]),
)
def test_messages_arrive_whole_and_in_order(seed, ranks, messages, lose, repeat, delay, corrupt, late_us):
    """Whatever the network does, and however unequal the numbers of messages of the pairs are: every byte is there."""
    play = Play(ends_of(ranks), Network(seed, lose, repeat, delay, corrupt))
    dice = np.random.default_rng(seed)
    for source, way, size in messages:
        play.message(source % ranks, (source + way) % ranks, dice.integers(0, 256, size, np.uint8)) if (
            way % ranks
        ) else None
    while not play.is_done:
        assert play.now_us < LONGEST_US, "it does not end"
        play.turn(late_us)
    for pair, sent in play.sends.items():
        for (content, _), (received, _) in zip(sent, play.receives[pair], strict=True):
            assert (content == received).all()
    for _ in range(200):
        play.turn()
    assert all(end.is_idle and end.misfit_peer is None for end in play.ends)


def test_a_message_of_another_size_writes_nothing():
    """Of three messages the second does not fit, by its length or by its tag alone: the first arrives, memory stays."""
    for size, tag in [(200, 200), (300, 77)]:
        play = Play(ends_of(2), Network(1))
        play.message(0, 1, np.full(100, 7, np.uint8))
        play.message(0, 1, np.full(300, 8, np.uint8))
        play.receives[0, 1][1] = (np.zeros(size, np.uint8), tag)
        for _ in range(300):
            play.turn()
        assert play.ends[1].misfit_peer == 0
        assert play.num_received[0, 1] == 1
        assert not play.receives[0, 1][1][0].any()
        play.ends[1].forgive_misfit()
        assert play.ends[1].misfit_peer is None


def test_who_sends_to_a_silent_peer_names_it():
    """Rank 1 never answers; rank 2, of which nothing is needed, is not named."""
    play = Play(ends_of(3, silence_us=500_000), Network(1, lose=1.0))
    play.message(0, 1, np.ones(50, np.uint8))
    while play.ends[0].lost_peer is None:
        assert play.now_us < LONGEST_US
        play.turn()
    assert play.ends[0].lost_peer == 1
    assert play.ends[2].lost_peer is None


def test_a_peer_is_not_lost_before_anything_was_needed_of_it():
    """A process that was paused, or whose thread began late, counts silence from when it first needed the peer."""
    play = Play(ends_of(2, silence_us=500_000), Network(1))
    play.now_us = 10**9
    for _ in range(2):
        play.message(0, 1, np.ones(50, np.uint8))
        while not play.is_done:
            assert play.now_us < 2 * LONGEST_US + 10**9
            play.turn()
            assert [end.lost_peer for end in play.ends] == [None, None]
        play.now_us += 10**8  # nobody's thread runs

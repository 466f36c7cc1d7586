"""The in-memory network keeps the transport's contract, and its faults do what they say."""

from __future__ import annotations

import pytest
import torch

from harness.in_memory import InMemoryNetwork
from paceline.errors import ConfigurationError, PeerLostError, ProtocolError


def test_messages_arrive_in_order_by_size_and_are_counted():
    network = InMemoryNetwork(2)

    def rank_main(transport):
        if transport.rank == 0:
            messages = [torch.tensor([1.0]), torch.tensor([2.0, 3.0]), torch.tensor([4.0])]
            transport.exchange([(1, message) for message in messages], [], 5.0)
            return transport.bytes_sent
        short, long, last = torch.empty(1), torch.empty(2), torch.empty(1)
        order = []
        transport.exchange([], [(0, long), (0, short), (0, last)], 5.0, order.append)
        return [*long.tolist(), *short.tolist(), *last.tolist()], order

    assert network.run(rank_main) == [16, ([2.0, 3.0, 1.0, 4.0], [0, 1, 2])]


def test_a_message_that_its_sender_changes_under_way_is_caught():
    network = InMemoryNetwork(2)

    def rank_main(transport):
        message, received = torch.zeros(4), torch.empty(4)
        peer = 1 - transport.rank
        transport.exchange([(peer, message)], [(peer, received)], 5.0, lambda _: message.add_(1))

    assert all(isinstance(outcome, ProtocolError) for outcome in network.run(rank_main))


@pytest.mark.parametrize(
    "message", [torch.zeros(2, 2), torch.zeros(4)[::2], torch.zeros(0), torch.zeros(())], ids=str
)
def test_only_flat_tensors_with_something_in_them_are_messages(message):
    with pytest.raises(ConfigurationError, match="one dimension"):
        InMemoryNetwork(2).transports[0].exchange([(1, message)], [], 1.0)


@pytest.mark.parametrize("peer", [-1, 0, 2])
def test_a_rank_does_not_send_to_itself_or_to_nobody(peer):
    with pytest.raises(ConfigurationError, match=f"with rank {peer}"):
        InMemoryNetwork(2).transports[0].exchange([(peer, torch.zeros(1))], [], 1.0)


def test_what_a_lost_rank_sends_does_not_arrive():
    network = InMemoryNetwork(2)
    network.lose(0)

    def rank_main(transport):
        if transport.rank == 0:
            transport.exchange([(1, torch.zeros(1))], [], 1.0)
        else:
            transport.exchange([], [(0, torch.zeros(1))], 0.1)

    outcomes = network.run(rank_main)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], PeerLostError)
    assert outcomes[1].peer == 0

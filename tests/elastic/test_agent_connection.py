"""What a rank and its agent say to each other arrives whole; anything else is no message."""

import pytest

from paceline.elastic.agent_connection import AgentConnection, RankAssignment, Ready, Stop, decode, difference
from paceline.errors import ProtocolError


def test_messages_arrive_as_they_were_sent():
    """In order, with tuples."""
    agent, theirs = AgentConnection.pair()
    rank = AgentConnection(theirs)
    assignment = RankAssignment(3, 1, 2, 2, ("127.0.0.1", 5), (0, 2), 1, "rank 0 ended", ("a:1", "b:0"))
    agent.tell(Stop(2, "why"))
    agent.tell(assignment, waits=False)
    assert rank.hear() == Stop(2, "why")
    assert rank.hear() == assignment
    rank.tell(Ready("a card"))
    assert agent.hear() == Ready("a card")
    rank.close()
    assert agent.hear() is None
    assert not agent.tell(Stop(4, "nobody hears"))
    agent.close()


def test_an_agent_does_not_wait_for_a_rank_that_does_not_read():
    """It is told that the message was not sent."""
    agent, theirs = AgentConnection.pair()
    with theirs:
        assert not all(agent.tell(Stop(0, "x" * 1000), waits=False) for _ in range(10_000))
    agent.close()


@pytest.mark.parametrize(
    "words", [b"", b"[]", b"{}", b'{"kind": "Popen"}', b'{"kind": "Stop", "epoch": 1}', b"\xff"]
)
def test_what_is_no_message_is_refused(words):
    """Nothing of it is executed."""
    with pytest.raises(ProtocolError, match="not a message"):
        decode(words)


def test_a_card_that_differs_is_named_by_its_line():
    """The others' first, then its own."""
    assert difference("a\nb", "a\nb") is None
    assert difference("a\nb", "a\nc") == "it has 'c' where the others have 'b'"
    assert difference("a", "a\nb") == "it has 'b' besides"
    assert difference("a\nb", "a") == "the others have 'b' besides"

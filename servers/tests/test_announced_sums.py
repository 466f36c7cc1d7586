"""A server's part in sums by datagrams, without sockets: who has announced what, whose fault it is."""

import pytest

from paceline.errors import ConfigurationError, PeerLostError, ProtocolError, ServerLostError
from paceline_servers.datagram_sums import DatagramSums
from paceline_servers.link import Identity
from paceline_servers.ranks import server_sums
from paceline_servers.session import Session
from paceline_servers.stepping import SteppedKeys
from paceline_servers.wire import Frame, Kind, pack, unpack

TIMEOUT_S = 5.0


class Sums:
    """What a session asks of `DatagramSums`."""

    def __init__(self):
        self.joined, self.launched, self.finished, self.error, self.is_closed = {}, [], [], None, False

    def join(self, rank, words):
        self.joined[rank] = words
        return {"port": 7} if len(self.joined) == 3 else None

    def launch(self, number, words):
        self.launched.append((number, words))

    def take_finished(self):
        if self.error is not None:
            raise self.error
        done, self.finished = self.finished, []
        return done

    def close(self):
        self.is_closed = True


def joined():
    sums = Sums()
    made = Session(3, TIMEOUT_S, SteppedKeys, lambda: sums)
    made.names.update({rank: f"(process {100 + rank})" for rank in range(3)})
    for rank in range(2):
        assert made.receive(rank, Frame(Kind.JOIN, body=(pack({"rank": rank}),)), 0.0) == []
    outgoing = made.receive(2, Frame(Kind.JOIN, body=(pack({"rank": 2}),)), 0.0)
    assert [(rank, frame.kind, unpack(frame.body[0])) for rank, frame in outgoing] == [
        (rank, Kind.JOIN, {"port": 7}) for rank in range(3)
    ]
    return made, sums


def announce(number, size=10):
    return Frame(Kind.SUM, number, body=(pack({"size": size}),))


def failure(outgoing):
    return {rank: unpack(frame.body[0]) for rank, frame in outgoing if frame.kind is Kind.FAILED}


def test_a_sum_begins_with_the_first_announcement_and_is_answered_to_all_when_done():
    session, sums = joined()
    for rank, number in ((1, 0), (1, 1), (0, 0), (2, 0), (0, 1), (2, 1)):
        assert session.receive(rank, announce(number, 10 + number), 0.0) == []
    assert sums.launched == [(0, {"size": 10}), (1, {"size": 11})]
    assert session.check(TIMEOUT_S + 1) == [], "all have announced: the datagrams' own timeout counts"
    sums.finished = [1, 0]
    assert session.check(1.0) == [(rank, Frame(Kind.SUM, number)) for number in (0, 1) for rank in range(3)]
    assert session.receive(0, announce(0, 12), 0.0) == [], "a number is free again once its sum is done"
    assert session.failure is None
    session.close()
    assert sums.is_closed


def test_a_sum_that_is_done_before_its_last_announcement_is_not_begun_again():
    """Datagrams do not wait for TCP."""
    session, sums = joined()
    for rank in (0, 1):
        session.receive(rank, announce(0), 0.0)
    sums.finished = [0]
    assert session.check(0.1) == []
    assert session.receive(2, announce(0), 0.2) == []
    assert session.check(0.3) == [(rank, Frame(Kind.SUM, 0)) for rank in range(3)]
    assert len(sums.launched) == 1


def test_ranks_that_announce_different_sums_are_told():
    session, _ = joined()
    session.receive(0, announce(0), 0.0)
    told = failure(session.receive(1, announce(0, 11), 0.0))
    assert sorted(told) == [0, 1, 2]
    assert "rank 1 has another sum by datagrams, number 0, than rank 0" in told[2]["words"]


def test_who_does_not_announce_in_time_is_named():
    session, _ = joined()
    for rank in (0, 2):
        session.receive(rank, announce(4), 1.0)
    assert session.check(1.0 + TIMEOUT_S) == []
    told = failure(session.check(1.1 + TIMEOUT_S))
    assert (told[0]["kind"], told[0]["rank"]) == ("lost", 1)
    assert told[0]["words"] == "rank 1 (process 101) has not announced sum 4 5 s after rank 0 did"


@pytest.mark.parametrize(
    ("error", "kind", "rank"),
    [(PeerLostError("no word of rank 2", 2), "lost", 2), (ProtocolError("other lengths"), "protocol", -1)],
)
def test_what_goes_wrong_with_datagrams_is_told(error, kind, rank):
    session, sums = joined()
    session.receive(0, announce(0), 0.0)
    sums.error = error
    told = failure(session.check(0.1))
    assert [told[each]["kind"] for each in range(3)] == [kind] * 3
    assert (told[0]["rank"], told[0]["words"]) == (rank, str(error))
    assert session.check(0.2) == []


def test_who_leaves_while_others_wait_is_named_and_who_has_all_may_leave():
    session, _ = joined()
    session.receive(0, announce(0), 0.0)
    told = failure(session.receive(1, Frame(Kind.BYE), 0.0))
    assert (told[0]["kind"], told[0]["rank"]) == ("lost", 1)
    session, _ = joined()
    for rank in (0, 1):
        session.receive(rank, announce(0), 0.0)
    assert session.receive(1, Frame(Kind.BYE), 0.0) == []
    assert session.receive(2, announce(0), 0.0) == [], "its datagrams may have been there before"
    told = failure(session.receive(0, announce(1), 0.0))
    assert (told[0]["kind"], told[0]["rank"]) == ("lost", 1)


def test_a_sum_before_joining_is_refused():
    session = Session(1, TIMEOUT_S, SteppedKeys)
    session.names[0] = "(process 100)"
    told = failure(session.receive(0, announce(0), 0.0))
    assert "has not joined" in told[0]["words"]


def test_what_ranks_say_of_datagrams_has_to_fit():
    """Before a socket is open: an address of IPv4, the same servers and paths on all ranks, sums once they have met."""
    with pytest.raises(
        ConfigurationError, match="datagrams go by IPv4, and ranks reach this parameter server at ::1"
    ):
        DatagramSums(2, TIMEOUT_S, "::1")
    sums, card = DatagramSums(2, TIMEOUT_S, "127.0.0.1"), {"number": 0, "servers": 1, "ports": 1, "mtu": 1500}
    assert sums.join(0, card) is None
    with pytest.raises(ConfigurationError, match="rank 1 sums by datagrams with ports=2, and another"):
        sums.join(1, card | {"ports": 2})
    with pytest.raises(ProtocolError, match="announced before all ranks had joined"):
        sums.launch(0, {"dtype": "float32"})
    sums.close()


def test_datagrams_that_stay_away_of_a_rank_that_waits_for_another_server_are_that_servers_fault():
    session, sums = joined()
    other = "parameter server 1 at 10.0.0.9:7000"
    session.receive(0, announce(0), 0.0)
    session.receive(2, Frame(Kind.WAITS, body=(pack({"server": other}),)), 3.0)
    sums.error = PeerLostError("nothing came from rank 2", 2)
    assert session.check(4.0) == []
    told = failure(session.check(5.1))
    assert {words["kind"] for words in told.values()} == {"server"}
    assert told[1]["words"].startswith(other)


def test_a_rank_that_loses_a_server_as_it_joins_closes_its_sockets(monkeypatch):
    made = []

    class Noted(server_sums.Introduction):
        def __init__(self, *args):
            super().__init__(*args)
            made.extend(self._sockets)

    class Lost:
        """A link whose server is lost before it answers."""

        def __init__(self, *_):
            self.is_closed = False
            made.append(self)

        def address_of(self, _):
            return "127.0.0.1"

        def ask(self, _, __, answers, patience_s):
            answers.note(ServerLostError("it has gone"))

        def close(self, timeout_s):
            self.is_closed = True

    monkeypatch.setattr(server_sums, "Introduction", Noted)
    monkeypatch.setattr(server_sums, "ServerLink", Lost)
    monkeypatch.setattr(server_sums, "compile_all", lambda: None)
    with pytest.raises(ServerLostError, match="it has gone"):
        server_sums.ServerSums(["10.0.0.5:7000"], Identity(0, 2, "name", TIMEOUT_S, ""), 2)
    link, *sockets = made
    assert link.is_closed
    assert [each.fileno() for each in sockets] == [-1, -1]

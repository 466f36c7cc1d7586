"""A server's part, without sockets: sums in the order of ranks, whose fault it is, steps that are taken back."""

import itertools

import numpy as np
import pytest
import torch

from paceline.errors import ConfigurationError, ProtocolError
from paceline_servers.datagram_sums import DatagramSums
from paceline_servers.ordered_sum import OrderedSum
from paceline_servers.session import DOUBT_S, Session
from paceline_servers.stepping import ELEMENTWISE, SteppedKeys
from paceline_servers.wire import HEADER, KEY, DType, Frame, Kind, header_of, pack, unpack, unpack_state

TIMEOUT_S = 5.0


def raw(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().copy()


def push(values, number=0, keys=(3,), dtype=DType.FLOAT32):
    body = np.concatenate([np.frombuffer(b"".join(map(KEY.pack, keys)), np.uint8), raw(values)])
    return Frame(Kind.PUSH, number, len(keys), dtype, (body,))


def said(outgoing):
    return {rank: unpack(frame.body[0]) for rank, frame in outgoing if frame.kind is Kind.FAILED}


def session(num_ranks=3):
    made = Session(num_ranks, TIMEOUT_S, SteppedKeys)
    made.names.update({rank: f"(process {100 + rank})" for rank in range(num_ranks)})
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_sums_are_those_of_one_process_in_the_order_of_ranks_whoever_comes_first(dtype):
    torch.manual_seed(0)
    pushed = [torch.randn(257, dtype=torch.float64).mul(10.0**rank).to(dtype) for rank in range(4)]
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    expected = pushed[0].to(wide)
    for each in pushed[1:]:
        expected = expected + each.to(wide)
    kind = DType[str(dtype).removeprefix("torch.").upper()]
    if wide is dtype:  # sums of a few numbers of 16 bits are exact
        assert not torch.equal(expected, sum(reversed(pushed))), "the order matters here"
    for order in itertools.permutations(range(4)):
        total = OrderedSum(4, kind)
        for rank in order:
            assert not total.is_complete
            total.add(rank, raw(pushed[rank]))
        assert total.is_complete
        assert total.result().tobytes() == raw(expected.to(dtype)).tobytes(), order


def test_bfloat16_that_is_not_finite_stays_so():
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.3895e38], dtype=torch.bfloat16)
    total = OrderedSum(1, DType.BFLOAT16)
    total.add(0, raw(values))
    found = torch.frombuffer(bytearray(total.result()), dtype=torch.bfloat16)
    assert torch.equal(found.nan_to_num(7.0), values.nan_to_num(7.0))


def test_a_piece_is_answered_to_all_when_all_have_pushed_it_and_pieces_overtake():
    at = session()
    ones = torch.ones(5)
    assert at.receive(2, push(ones * 3, 1), 0.0) == []
    assert at.receive(2, push(ones, 0), 0.0) == []
    assert at.receive(0, push(ones, 1), 0.0) == []
    answers = at.receive(1, push(ones, 1), 0.0)
    assert [rank for rank, _ in answers] == [0, 1, 2]
    assert all(frame.number == 1 for _, frame in answers)
    assert np.array_equal(answers[0][1].body[0].view(np.float32), np.full(5, 5.0))


def test_while_much_is_held_only_those_who_owe_the_oldest_piece_are_heard():
    at = Session(3, TIMEOUT_S, SteppedKeys, most_held_bytes=60)
    heard = lambda: [rank for rank in range(3) if at.accepts_from(rank)]  # noqa: E731
    ones = torch.ones(5)  # 20 bytes
    at.receive(2, push(ones, 0), 0.0)
    at.receive(2, push(ones, 1), 0.0)
    assert heard() == [0, 1, 2], "40 bytes"
    at.receive(2, push(ones, 2), 0.0)
    assert heard() == [0, 1], "60 bytes"
    at.receive(0, push(ones, 0), 0.0)
    assert heard() == [1]
    assert len(at.receive(1, push(ones, 0), 0.0)) == 3
    assert heard() == [0, 1, 2], "40 bytes: what is answered is not held"
    at.receive(0, push(ones, 1), 0.0)
    at.receive(0, push(ones, 2), 0.0)
    assert heard() == [1]
    at.check(TIMEOUT_S + 0.1)
    assert heard() == [0, 1, 2], "who says goodbye, once it is over"


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (push(torch.ones(4)), "rank 1 pushed 16 bytes of 1 keys as piece 0, and rank 0 20 bytes"),
        (push(torch.ones(5), keys=(4,)), "or other keys"),
        (push(torch.ones(10).half(), dtype=DType.FLOAT16), "The dtypes are FLOAT16 and FLOAT32"),
        (push(torch.ones(4), keys=(3, 4)), "same model"),
        (push(torch.ones(3, dtype=torch.bfloat16), dtype=DType.FLOAT64), "no whole number of FLOAT64"),
        (Frame(Kind.FETCH), "no optimizer"),
        (Frame(Kind.HELLO), "does not take a frame of kind HELLO"),
        (Frame(Kind.FAILED, body=(pack({"words": "server 7 died"}),)), "server 7 died (rank 1 says so)"),
        (Frame(Kind.SET_UP, body=(b"garbage",)), "something else was received"),
        (Frame(Kind.SET_UP, body=(pack({"optimizer": "SGD"}),)), "could not take what rank 1 sent: KeyError"),
        (Frame(Kind.SET_UP, body=(pack({"optimizer": "Popen"}),)), "servers do not step 'Popen'"),
    ],
)
def test_what_does_not_fit_is_told_to_all_and_ends_the_session(frame, words):
    at = session()
    at.receive(0, push(torch.ones(5)), 0.0)
    told = said(at.receive(1, frame, 0.0))
    assert set(told) == {0, 1, 2}
    assert all(words in each["words"] and each["rank"] == 1 for each in told.values()), told
    assert said(at.receive(2, push(torch.ones(5)), 0.0))[2] == told[2]


def test_who_is_gone_or_late_is_named():
    lost = session()
    assert set(told := said(lost.lose(1, "is gone"))) == {0, 2}
    assert told[0] == {"kind": "lost", "rank": 1, "words": "rank 1 (process 101) is gone"}

    late = session()
    late.receive(2, push(torch.ones(5)), 10.0)
    late.receive(0, push(torch.ones(5)), 14.0)
    assert late.check(15.0) == []
    assert (
        "rank 1 (process 101) has not pushed piece 0 5 s after rank 2 did"
        in said(late.check(15.1))[0]["words"]
    )

    absent = session()
    del absent.names[1]
    absent.receive(0, push(torch.ones(5)), 0.0)
    absent.receive(2, push(torch.ones(5)), 0.0)
    assert "rank 1 has never connected" in said(absent.check(6.0))[0]["words"]

    leaving = session()
    assert leaving.receive(1, Frame(Kind.BYE), 0.0) == []
    assert "rank 1 (process 101) left" in said(leaving.receive(0, push(torch.ones(5)), 0.0))[0]["words"]
    awaited = session()
    awaited.receive(0, push(torch.ones(5)), 0.0)
    assert said(awaited.receive(1, Frame(Kind.BYE), 0.0))[2]["rank"] == 1


def test_frames_that_nobody_sends_are_refused():
    for header in (
        HEADER.pack(99, 0, 0, 0, 0, 0),
        HEADER.pack(2, 9, 0, 0, 0, 0),
        HEADER.pack(2, 0, 7, 0, 0, 0),
    ):
        with pytest.raises(ProtocolError):
            header_of(header)
    for num_keys, num_bytes in ((0, 1 << 40), (9, 35)):
        with pytest.raises(ProtocolError, match="at most"):
            header_of(HEADER.pack(2, 0, 0, 0, num_keys, num_bytes))


# ---- optimizers


def words_of(optimizer, keys):
    groups = [{name: group[name] for name in optimizer.defaults} for group in optimizer.param_groups]
    return {"optimizer": type(optimizer).__name__, "groups": groups, "keys": keys}


def drive(kind, cuts, num_steps=4):
    """Steps of a parameter of 200 elements that is cut so, by as many servers; the values after each step."""
    torch.manual_seed(1)
    start = torch.randn(200)
    optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(start.clone())], lr=0.05)
    bounds = list(itertools.pairwise([0, *cuts, 200]))
    servers = []
    for key, (first, last) in enumerate(bounds):
        servers.append(SteppedKeys(words_of(optimizer, [[key, 0, last - first, "torch.float32"]])))
        servers[-1].set_parameters([key], raw(start[first:last]))
    found = []
    for step in range(num_steps):
        gradient = torch.randn(200, generator=torch.Generator().manual_seed(step))
        optimizer.param_groups[0]["params"][0].grad = gradient
        optimizer.step()
        parts = []
        for key, (server, (first, last)) in enumerate(zip(servers, bounds, strict=True)):
            server.begin({"groups": words_of(optimizer, [])["groups"], "used": True, "unused": []})
            parts.append(server.step([key], raw(gradient[first:last])).view(np.float32))
        found.append((np.concatenate(parts), optimizer.param_groups[0]["params"][0].detach().numpy().copy()))
    return found


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_a_parameter_that_is_cut_is_stepped_bitwise_as_a_whole_one(kind):
    for cuts in ([], [64], [64, 128, 192]):
        for ours, torchs in drive(kind, cuts):
            assert ours.tobytes() == torchs.tobytes(), cuts


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_step_that_was_not_used_is_taken_back_with_its_state_and_may_be_fetched_as_if_not_made(kind):
    settings = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {"lr": 0.1}
    optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(6))], **settings)
    words = words_of(optimizer, [[0, 0, 3, "torch.float32"], [1, 0, 3, "torch.float32"]])
    plain, tried = SteppedKeys(words), SteppedKeys(words)
    begin = {"groups": words["groups"], "used": True, "unused": []}

    def step(server, value, used=True, unused=()):
        server.begin(begin | {"used": used, "unused": list(unused)})
        return server.step([0, 1], raw(torch.full((6,), value)))

    first = step(plain, 1.0), step(tried, 1.0)
    assert np.array_equal(*first)
    wrong = step(tried, 100.0)
    assert not np.array_equal(wrong, first[0])
    not_used = {"used": False, "unused": []}
    for ours, theirs in zip(
        tried.fetch(not_used)[1], plain.fetch({"used": True, "unused": []})[1], strict=True
    ):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(step(plain, 2.0), step(tried, 2.0, used=False))
    # Nobody used key 1: it stays, with its state, where it was; key 0 moves.
    after = step(plain, 3.0), step(tried, 3.0)
    again = step(plain, 4.0), step(tried, 4.0, unused=[1])
    assert np.array_equal(again[0][:12], again[1][:12])
    assert not np.array_equal(again[0][12:], again[1][12:])
    assert np.array_equal(*after)


def test_an_optimizer_refuses_what_it_was_not_made_for():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(6))], lr=0.1)
    server = SteppedKeys(words_of(optimizer, [[0, 0, 6, "torch.float32"]]))
    with pytest.raises(ProtocolError, match="key 5 does not live"):
        server.step([5], raw(torch.zeros(6)))
    with pytest.raises(ProtocolError, match="24 bytes, and 20 came"):
        server.step([0], raw(torch.zeros(5)))
    with pytest.raises(ValueError, match="complex64"):
        SteppedKeys(words_of(optimizer, [[0, 0, 6, "torch.complex64"]]))


def test_what_no_rank_of_ours_says_is_a_fault_of_whoever_says_it():
    """The same piece twice, sums by datagrams where there are none, words that are a state, a state that is words."""
    at = session()
    at.receive(2, push(torch.ones(5)), 0.0)
    twice = said(at.receive(2, push(torch.ones(5)), 0.0))
    assert "rank 2 pushed piece 0 twice" in twice[0]["words"]
    joins = said(session().receive(0, Frame(Kind.JOIN, body=(pack({}),)), 0.0))
    assert "this session sums nothing by datagrams" in joins[1]["words"]
    for nonsense in (b"[1]", b"{", b"\xff" * 9):
        with pytest.raises(ProtocolError, match="metadata were expected, and something else was received"):
            unpack(nonsense)
        with pytest.raises(ProtocolError, match="was received"):
            unpack_state(nonsense)


def waits(server):
    return Frame(Kind.WAITS, body=(pack({"server": server}),))


def test_a_rank_that_waits_for_another_server_is_not_blamed_but_that_server():
    made, values, other = session(), torch.ones(2), "parameter server 1 at 10.0.0.9:7000"
    assert made.receive(0, push(values), 0.0) == []
    assert made.receive(1, waits(other), 0.6 * TIMEOUT_S) == []
    assert made.receive(2, push(values), 0.0) == []
    assert made.check(TIMEOUT_S + 0.1) == [], "that server may miss a rank, and say so now"
    assert made.check(TIMEOUT_S + DOUBT_S) == []
    told = said(made.check(TIMEOUT_S + 0.1 + DOUBT_S))
    assert set(told) == {0, 1, 2}
    assert all(words["kind"] == "server" and words["words"].startswith(other) for words in told.values())


@pytest.mark.parametrize("silent", [0, 2])
def test_of_two_late_ranks_the_one_that_waits_for_no_server_is_blamed(silent):
    made = session()
    assert made.receive(1, push(torch.ones(2)), 0.0) == []
    assert made.receive(2 - silent, waits("parameter server 1 at 10.0.0.9:7000"), 3.0) == []
    told = said(made.check(TIMEOUT_S + 0.1))
    assert {words["rank"] for words in told.values()} == {silent}


def test_a_rank_that_was_answered_is_blamed_again_and_doubts_begin_anew():
    made, values = session(2), torch.ones(2)
    made.receive(0, push(values), 0.0)
    made.receive(1, waits("parameter server 1 at 10.0.0.9:7000"), 3.0)
    assert made.check(TIMEOUT_S + 0.1) == []
    assert len(made.receive(1, push(values), TIMEOUT_S + 0.2)) == 2, "it was late, and is answered"
    assert made.check(TIMEOUT_S + 0.3) == []
    begun_s = 10 * TIMEOUT_S
    made.receive(0, push(values, 1), begun_s)
    assert made.check(begun_s + TIMEOUT_S + 0.1) == [], "a doubt of long ago says nothing"
    made.receive(1, waits(""), begun_s + TIMEOUT_S + 0.2)
    told = said(made.check(begun_s + TIMEOUT_S + 0.3))
    assert {(words["kind"], words["rank"]) for words in told.values()} == {("lost", 1)}


def test_a_failure_is_told_to_those_who_have_come_and_names_a_few():
    """However many ranks there are said to be: a list of all would hold up every job of the server."""
    made = Session(10**9, TIMEOUT_S, SteppedKeys)
    made.names.update({0: "(process 1)", 1: "(process 2)"})
    assert set(said(made.lose(1, "is gone"))) == {0}
    late = Session(40, TIMEOUT_S, SteppedKeys)
    late.names[0] = "(process 1)"
    late.receive(0, push(torch.ones(2)), 0.0)
    (words,) = said(late.check(TIMEOUT_S + 0.1)).values()
    assert words["words"].endswith("rank 16 has never connected; and 23 more")


@pytest.mark.parametrize("wrong", [{"servers": 10**9}, {"number": 2}, {"ports": 10**6}, {"ports": 0}])
def test_numbers_of_sums_by_datagrams_are_checked_before_anything_is_opened(wrong):
    sums = DatagramSums(1, TIMEOUT_S, "127.0.0.1")
    with pytest.raises(ConfigurationError, match="There are at most 1024 servers, and 16 ports"):
        sums.join(0, {"number": 0, "servers": 2, "ports": 1, "mtu": 1500} | wrong)

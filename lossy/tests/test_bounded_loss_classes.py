"""Classes of datagrams: what is sent first, what switches may drop, and what the IP header says."""

from __future__ import annotations

import ast
import contextlib
import socket
import struct
from pathlib import Path

import numpy as np
import pytest

from harness.datagram_networks import Mailer, endpoints
from paceline.errors import ConfigurationError
from paceline_lossy import Bound
from paceline_lossy.datagrams import datagram as d
from paceline_lossy.datagrams import system_calls as system
from paceline_lossy.datagrams.udp_socket import socket_addresses

pytestmark = pytest.mark.compiles

ECT = 2


def kinds_of(datagrams):
    """Triples of kind, collective and type of service."""
    words = [datagram.view(np.uint32) for datagram in datagrams]
    return [
        (int(word[d.SENDER_KIND]) >> 16 & 0xFF, int(word[d.COLLECTIVE]), int(d.tos_of(word)))
        for word in words
    ]


def test_the_front_layer_overtakes_what_was_launched_before():
    """Three sums of classes 1, 2 and 5 begin one after the other: the last one's chunks all leave first."""
    one, _ = ends = endpoints(2)
    for end in ends:
        for level in (1, 2, 5):
            end.begin(np.ones(200, np.float32), Bound(0.2, priority=level), 1000)
    sent, now_us = [], 1000
    mailer = Mailer(one)
    for _ in range(18):  # up to the first timeout, of 40 ms
        sent += [datagram for _, datagram in mailer.take(one, now_us)]
        now_us += 2000
    order = [collective for kind, collective, _ in kinds_of(sent) if kind == d.DATA]
    assert order == [2] * 7 + [1] * 7  # a first window of 16: each has 100 elements in 7 chunks, and an END
    assert {tos for kind, collective, tos in kinds_of(sent) if (kind, collective) == (d.DATA, 2)} == {5 << 5}


def test_what_is_to_be_summed_leaves_before_sums_of_what_is_older():
    """Of two collectives, both phases: the sum of the first would be ready while the second's parts still leave."""
    ends = endpoints(2)
    for end in ends:
        for _ in range(2):
            end.begin(np.ones(3000, np.float32), Bound(0.0), 1000)
    mailer, sent, now_us = Mailer(ends[0]), [], 1000
    while not ends[0].is_idle or not ends[1].is_idle:
        for end, other in (ends, ends[::-1]):
            for _, datagram in mailer.take(end, now_us):
                sent += [datagram] if end.rank == 0 else []
                mailer.hand(other, [datagram], now_us)
            end.take_finished()
        now_us += 500
        assert now_us < 1_000_000
    words = [datagram.view(np.uint32) for datagram in sent]
    data = [word for word in words if int(word[d.SENDER_KIND]) >> 16 & 0xF == d.DATA]
    order = [(int(word[d.SENDER_KIND]) >> 24 & d.GATHER, int(word[d.COLLECTIVE])) for word in data]
    assert len(set(order)) == 4
    assert order == sorted(order)


def test_what_must_arrive_is_never_droppable():
    """Protected chunks, repetitions, ENDs, sums and answers are ECN-capable, and with p = 0 everything is."""
    seen = {}
    for ratio, protected in [(0.3, 0.5), (0.0, 0.0)]:
        one, two = ends = endpoints(2)
        vectors = [np.linspace(0, 1, 400, dtype=np.float32) for _ in ends]
        for end, vector in zip(ends, vectors, strict=True):
            end.begin(vector, Bound(ratio, protected, priority=3), 1000)
        mailer, hands, now_us, first = Mailer(one), Mailer(one), 1000, set()
        for turn in range(400):
            for end, other in ((one, two), (two, one)):
                for _, datagram in mailer.take(end, now_us):
                    word = datagram.view(np.uint32)
                    who = int(word[d.SENDER_KIND])
                    kind, flags, tos = who >> 16 & 0xFF, who >> 24, int(d.tos_of(word))
                    which = (end.rank, flags & d.GATHER, int(word[d.CHUNK]))
                    is_first = kind == d.DATA and which not in first
                    may_drop = is_first and not flags & (d.GATHER | d.PROTECTED) and ratio > 0
                    assert tos & 3 == (0 if may_drop else ECT)
                    assert tos >> 5 == (3 if kind in (d.DATA, d.END) else 6)
                    seen[ratio, kind, may_drop] = True
                    if kind == d.DATA:
                        first.add(which)
                    if turn > 20 or not is_first or which[2] % 3:  # every third chunk is lost at first
                        hands.hand(other, [datagram], now_us)
            now_us += 2000
        assert vectors[0].tobytes() == vectors[1].tobytes()
        assert one.take_finished()
    assert (0.3, d.DATA, True) in seen
    assert (0.3, d.DATA, False) in seen
    assert (0.0, d.DATA, True) not in seen


def test_the_default_has_no_class():
    """Without a priority everything is ECN-capable, with DSCP 0, as before."""
    one, two = endpoints(2)
    for end in (one, two):
        end.begin(np.ones(100, np.float32), Bound(0.5), 1000)
    assert {tos for *_, tos in kinds_of([datagram for _, datagram in Mailer(one).take(one, 1000)])} == {ECT}


@pytest.mark.parametrize("segments", [1, 40])
def test_the_ip_header_carries_it(segments):
    """Datagrams of three types of service, sent in one call, with segmentation offload and without."""
    flags = [0, 0, 3 << 3 | d.DROPPABLE, 3 << 3 | d.DROPPABLE, 3 << 3 | d.DROPPABLE, 5 << 3 | d.PROTECTED]
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as target,
    ):
        target.bind(("127.0.0.1", 0))
        target.setsockopt(socket.IPPROTO_IP, 13, 1)  # IP_RECVTOS
        target.settimeout(5)
        batch = system.new_batch(8, 104, socket_addresses([target.getsockname()]))
        for i, flag in enumerate(flags):
            d.write_header(batch.words[i], d.DATA, 0, flag, 0, 0, i, 0, 0, 0, 1, 0)
            batch.sizes[i] = 104
        made = system.prepare_messages(batch, len(flags), segments, 1)
        assert made == (3 if segments > 1 else len(flags))
        assert system.send_messages(np.array([source.fileno()]), batch, 0, made) == made
        for flag in flags:
            data, control, *_ = target.recvmsg(2048, 64)
            assert len(data) == 104
            assert struct.unpack("<I", data[32:36])[0] >> 24 == flag
            assert control[0][2][0] == (flag >> 3 & 7) << 5 | (0 if flag & d.DROPPABLE else ECT)


def test_datagrams_leave_by_the_socket_of_their_way():
    """Of two ports: to peer 0 by either, then to peer 1 by the second."""
    with contextlib.ExitStack() as stack:
        source = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(4)]
        for each in source:
            each.bind(("127.0.0.1", 0))
            each.settimeout(5)
        ports, targets = source[:2], source[2:]
        batch = system.new_batch(8, 104, socket_addresses([target.getsockname() for target in targets]))
        batch.ways[:4] = 0, 0, 1, 3
        batch.sizes[:4] = 104
        made = system.prepare_messages(batch, 4, 40, 2)
        descriptors, sent = np.array([port.fileno() for port in ports]), 0
        while sent < made:
            sent += system.send_messages(descriptors, batch, sent, made)
        came = [target.recvfrom(200)[1][1] for target in (targets[0],) * 3 + (targets[1],)]
        names = [port.getsockname()[1] for port in ports]
        assert came == [names[0], names[0], names[1], names[1]]


def test_a_priority_that_networks_keep_for_themselves_is_refused():
    for level in (-1, 6, 7):
        with pytest.raises(ConfigurationError, match="class selectors"):
            Bound(0.1, priority=level)


def _is_marked(node, *names):
    return any(
        isinstance(mark, ast.Name) and mark.id in names for mark in getattr(node, "decorator_list", [])
    )


def test_what_python_cannot_call_is_called_by_compiled_code_alone():
    """Code without its entrance from Python ends a process that calls it from there."""
    trees = {path.name: ast.parse(path.read_text()) for path in Path(system.__file__).parent.glob("*.py")}
    inner = {node.name for tree in trees.values() for node in tree.body if _is_marked(node, "inner")}
    assert {"reply", "judge", "_send_burst"} < inner
    for name, tree in trees.items():
        entered = [node for node in tree.body if not _is_marked(node, "inner", "compiled")]
        calls = [node.func for top in entered for node in ast.walk(top) if isinstance(node, ast.Call)]
        modules = ("d", "e", "system", "window")
        called = {call.id for call in calls if isinstance(call, ast.Name)} | {
            call.attr
            for call in calls
            if isinstance(call, ast.Attribute)
            and isinstance(call.value, ast.Name)
            and call.value.id in modules
        }
        assert not called & inner, f"{name} calls {called & inner} from Python"

"""Links between ranks, measured over real sockets; the ranks are threads of this process."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from paceline.preflight import pairs
from paceline.preflight.pairs import measure, rounds


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_everyone_meets_everyone_once(num_ranks):
    met = [pair for found in rounds(num_ranks) for pair in found.items()]
    assert sorted(met) == [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    for found in rounds(num_ranks):
        assert all(found[other] == one for one, other in found.items())


@pytest.fixture
def brief(monkeypatch):
    """Short messages and patience."""
    monkeypatch.setattr(pairs, "_SIZES_BYTES", (1 << 16,))
    monkeypatch.setattr(pairs, "_PATIENCE_S", 0.5)


def _all(num_ranks, store, address="127.0.0.1"):
    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(measure, store, rank, num_ranks, address) for rank in range(num_ranks)]
        return [future.result(30)[0] for future in futures]


def test_every_link_in_both_directions(brief):
    links = _all(3, dist.HashStore())
    assert [[link.target for link in own] for own in links] == [[1, 2], [0, 2], [0, 1]]
    for link in (link for own in links for link in own):
        assert link.error == ""
        assert link.latency_s > 0
        assert link.bytes_per_s > 0


class _Elsewhere(dist.Store):
    """A store in which rank 1's card names a port that nobody listens on."""

    def __init__(self):
        super().__init__()
        self._kept = dist.HashStore()
        with socket.create_server(("127.0.0.1", 0)) as closed:
            self._port = closed.getsockname()[1]

    def set(self, key, value):
        if key == "card/1":
            value = json.dumps(json.loads(value) | {"port": self._port})
        self._kept.set(key, value)

    def __getattribute__(self, name):
        if name in ("get", "add", "wait"):
            return getattr(self._kept, name)
        return super().__getattribute__(name)


def test_a_rank_that_cannot_be_reached(brief):
    """Both ends say so, nobody waits for ever, and the other pairs are measured."""
    links = _all(3, _Elsewhere())
    errors = {(link.source, link.target): link.error for own in links for link in own}
    assert errors[0, 1] == "Connection refused"
    assert errors[1, 0] == "it did not come"
    assert errors[0, 2] == errors[2, 0] == ""


def test_a_stranger_who_comes_first(brief):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        word = "00" * 16
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(pairs._accept, listener, word)
            with socket.create_connection(listener.getsockname()) as stranger:
                stranger.sendall(b"x" * 16)
                assert stranger.recv(1) == b""
            with pairs._connect(pairs.RankAddress("here", *listener.getsockname(), word)):
                accepted.result(10).close()

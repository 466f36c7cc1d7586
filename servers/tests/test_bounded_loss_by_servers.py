"""`BoundedLoss(servers=ParameterServers(...))`: pushes that may lose, exact pulls; real servers, ranks and sockets."""

import copy
import random
import socket
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from harness.models import Mlp, digest, generator, squares
from harness.ranks import pool
from harness.running_servers import in_threads
from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError
from paceline_lossy import BoundedLoss
from paceline_lossy.datagrams import datagram as d
from paceline_lossy.datagrams.datagram_loop import compile_all
from paceline_servers import ParameterServers, ServerOptimizer, datagram_sums

pytestmark = pytest.mark.processes

CAP_MB = 0.0005
BOUND = 0.3
SIZE = 40_000


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """The first process of a machine compiles, for a while; before anyone waits for it."""
    compile_all()


def _gradients(reduction, rank, dtype):
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp().to(dtype), reduction=reduction, bucket_cap_mb=CAP_MB)
    found = []
    for step in range(3):
        model.zero_grad()
        squares(model(torch.randn(4, 8, generator=generator(rank, step)).to(dtype))).backward()
        found.append(digest(p.grad for p in model.parameters()))
    return found, model.reduction


def _as_by_tcp(rank, _num_ranks, addresses):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        by_tcp, _ = _gradients(ParameterServers(addresses), rank, dtype)
        found, reduction = _gradients(BoundedLoss(0.0, servers=ParameterServers(addresses)), rank, dtype)
        assert found == by_tcp, dtype
    losses = reduction.losses
    return found, losses.lost, losses.sent, losses.by_rank, reduction.counters["strangers"]


def test_without_loss_gradients_are_bitwise_those_that_servers_sum_by_tcp():
    """Servers add in the order of the ranks either way; two models, one after the other, on the same servers."""
    with in_threads(2) as addresses:
        outcomes = pool(3).run(_as_by_tcp, addresses)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    _, lost, sent, by_server, strangers = outcomes[0]
    assert (lost, by_server, strangers) == (0, (0, 0), 0)
    assert sent > 0


class Relay(datagram_sums.Introduction):
    """Stands before a server's socket, and loses a part of the chunks that are pushed there."""

    def __init__(self, address, num_ports=1):
        super().__init__(address, num_ports)
        self._to = self.announcement["place"]
        self._port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._port.bind((address, 0))
        self.announcement |= {"place": self._port.getsockname(), "mtu": 1500}
        threading.Thread(target=self._forward, daemon=True).start()

    def _forward(self):
        dice = random.Random(1)
        with self._port, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            while data := self._port.recv(65536):  # an empty datagram ends it
                is_chunk = int(np.frombuffer(data[:40], np.uint32)[d.SENDER_KIND]) >> 16 & 15 == d.DATA
                if not (is_chunk and dice.random() < 0.2):
                    out.sendto(data, self._to)


class Given(torch.nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def given(rank, step):
    """Whole numbers, that no other rank has there; times 2, so that the mean of two ranks is whole, too."""
    return 2.0 * (torch.randint(1, 50, (SIZE,), generator=generator(rank, step)) * 2 + rank)


def _steps(rank, num_ranks, addresses, compensation):
    reduction = BoundedLoss(BOUND, compensation=compensation, servers=ParameterServers(addresses))
    model = DistributedDataParallel(Given(), reduction=reduction)
    found = []
    for step in range(3):
        model.zero_grad()
        model(given(rank, step)).backward()
        kept = torch.zeros(SIZE)
        if compensation == "feedback":
            (residual,) = model.reduction.state_dict()["residual"].values()
            kept = residual.clone()
        dist.all_reduce(kept)
        losses = model.reduction.losses
        found.append((model.module.weight.grad.numpy().copy(), kept.numpy(), losses))
    return found


@pytest.fixture(scope="module")
def lossy_servers():
    relays = []

    def make(*arguments):
        relays.append(Relay(*arguments))
        return relays[-1]

    with pytest.MonkeyPatch.context() as patch, in_threads(2) as addresses:
        patch.setattr(datagram_sums, "Introduction", make)
        yield addresses
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        for relay in relays:
            out.sendto(b"", relay.announcement["place"])


@pytest.mark.parametrize("compensation", ["survivors", "none", "feedback"])
def test_what_is_lost_of_a_push_is_compensated_and_told(lossy_servers, compensation):
    """Element by element: what one rank has lost is missing in the mean, by the rule, and counted; within the bound."""
    outcomes = pool(2).run(_steps, lossy_servers, compensation)
    reduced = so_far = np.zeros(SIZE, np.float32)
    for step, (own, other) in enumerate(zip(*outcomes, strict=True)):
        assert own[0].tobytes() == other[0].tobytes()
        assert own[2] == other[2]
        losses = own[2]
        assert 0.01 < losses.ratio <= BOUND
        assert len(losses.by_rank) == 2
        assert all(lost > 0 for lost in losses.by_rank)
        assert sum(losses.by_rank) == losses.lost
        one, two = (given(rank, step).numpy() / 2 for rank in (0, 1))
        reduced, so_far = reduced + own[0], so_far + one + two
        if compensation == "feedback":
            assert own[1].any()
            np.testing.assert_array_equal(reduced + own[1], so_far)
            continue
        factor = 2 if compensation == "survivors" else 1
        whole, without_one, without_two, empty = (
            own[0] == expected for expected in (one + two, factor * two, factor * one, 0)
        )
        assert (whole | without_one | without_two | empty).all()
        part = (without_one.sum() + without_two.sum() + 2 * empty.sum()) / (2 * SIZE)
        assert list(losses.by_parameter.values()) == [pytest.approx(part)]


def test_impossible_servers_are_refused():
    for wrong in ({"servers": ["127.0.0.1:1"]}, {"servers": ParameterServers(), "connect": print}):
        with pytest.raises(ConfigurationError, match=r"Give ParameterServers\(\)"):
            BoundedLoss(0.1, **wrong)
    made = BoundedLoss(0.1, servers=ParameterServers(["127.0.0.1:1"]))
    assert repr(copy.deepcopy(made)) == repr(made)
    assert "servers=ParameterServers(addresses=['127.0.0.1:1'])" in repr(made)


def _with_a_server_optimizer(_rank, _num_ranks):
    model = DistributedDataParallel(
        Mlp(), reduction=BoundedLoss(0.1, servers=ParameterServers(["127.0.0.1:1"]))
    )
    with pytest.raises(ConfigurationError, match="reduction=ParameterServers"):
        ServerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_servers_that_step_take_gradients_by_tcp():
    pool(2).run(_with_a_server_optimizer)

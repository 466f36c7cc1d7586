"""`reduction=BoundedLoss(...)` under DDP, by real processes over real sockets on the loopback interface."""

import copy
import os
import socket
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from harness.models import Mlp, digest, generator, squares
from harness.ranks import Ranks, pool
from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError
from paceline_lossy import BoundedLoss
from paceline_lossy.datagrams.datagram_loop import compile_all

pytestmark = pytest.mark.compiles


def _steps(model, rank, num_steps=3, dtype=torch.float32):
    digests = []
    for step in range(num_steps):
        model.zero_grad()
        inputs = torch.randn(4, 8, generator=generator(rank, step)).to(dtype)
        squares(model(inputs)).backward()
        digests.append(digest(p.grad for p in model.parameters()))
    return digests


def _train(rank, num_ranks):
    """Bound 0: equal to the mean over Gloo up to the order of sums, for each dtype; the same bits on all ranks."""
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.manual_seed(0)
        plain = Mlp().to(dtype)
        twin = DistributedDataParallel(copy.deepcopy(plain), reduction="mean")
        model = DistributedDataParallel(plain, reduction=BoundedLoss(0.0), bucket_cap_mb=0.0005)
        found.append(_steps(model, rank, dtype=dtype))
        _steps(twin, rank, dtype=dtype)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    losses = model.reduction.losses
    strangers = _disturb(model)
    found.append(_steps(model, rank, dtype=dtype))
    return found, (losses.lost, losses.sent > 0, len(losses.by_rank)), strangers, model.reduction.counters


def _at_senders(rank, _num_ranks):
    """Noise at all ports of a rank that sends by three; what it counts, before and after its link is closed."""
    model = DistributedDataParallel(Mlp(), reduction=BoundedLoss(0.0, paths=3))
    _steps(model, rank, 1)
    link = model.reduction._connection._link
    places = [each.getsockname() for each in link._driver._sockets]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for place in places[1:] * 50:  # more than a socket's buffer would hold
            stranger.sendto(b"noise" * 100, place)
    counted = link.counters["strangers"]
    _steps(model, rank, 1)
    dist.barrier()
    assert link.close(10.0)
    return counted, link.counters["strangers"]


@pytest.mark.processes
def test_noise_at_ports_that_only_send_is_dropped_and_counted():
    assert pool(2).run(_at_senders) == [(100, 100)] * 2


def _disturb(model):
    """Send noise, and a replay of nothing we know, to this rank's port."""
    link = model.reduction._connection._link
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for size in (0, 1, 39, 40, 600, 1500, 60000):
            stranger.sendto(np.random.default_rng(size).bytes(size), link.place)
    assert link.place[0] == "127.0.0.1"
    return 7


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """The first process of a machine compiles, for a while; before anyone waits for it."""
    compile_all()


@pytest.mark.processes
def test_gradients_are_the_mean_on_every_rank_and_strangers_are_counted():
    outcomes = pool(3).run(_train)
    digests = [value[0] for value in outcomes]
    assert all(each == digests[0] for each in digests)
    for _, losses, sent, counters in outcomes:
        assert losses == (0, True, 3)
        assert counters["strangers"] == sent
        assert counters["sent"] > 0


def test_impossible_bounds_are_refused():
    for bound in (-0.1, 1.0, 7, "0.01", None, float("nan")):
        with pytest.raises(ConfigurationError, match="is not possible"):
            BoundedLoss(bound)
    for ratio in (2, "x", None):
        with pytest.raises(ConfigurationError, match="protected_ratio"):
            BoundedLoss(0.1, protected_ratio=ratio)
    assert repr(copy.deepcopy(BoundedLoss(0.25, 0.5))) == (
        "BoundedLoss(bound=0.25, protected_ratio=0.5, compensation='survivors')"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("paths", value) for value in ("8", 2.5, 8.0, True, None, 0, 17)),
        *(("connect", value) for value in (5, "udp")),
        *(("priorities", value) for value in ("yes", 1, None)),
        *(("deliver", value) for value in ("Early", True, None, 0.5)),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(name, value):
    with pytest.raises(ConfigurationError, match=name):
        BoundedLoss(**{name: value})


def _early(rank, _num_ranks):
    """What each step of early delivery puts into .grad, loses, and keeps for the next; with the plain gradients."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Linear(200, 300, bias=False),
        reduction=BoundedLoss(0.2, compensation="feedback", deliver="early"),
    )
    found = []
    for step in range(4):
        model.zero_grad()
        inputs = torch.randn(4, 200, generator=generator(rank, step))
        model(inputs).sum().backward()
        own = inputs.sum(0).expand(300, 200)
        lost = model.reduction.losses
        (kept,) = model.reduction.state_dict()["residual"].values()
        found.append(
            (own.flatten(), model.module.weight.grad.flatten().clone(), kept.flatten().clone(), lost)
        )
    return found, repr(copy.deepcopy(model.reduction))


@pytest.mark.processes
def test_early_delivery_loses_within_the_bound_and_gives_the_rest_later():
    """Over real sockets: the same bits everywhere, and what was given is in the sum, or kept by who gave it."""
    outcomes = pool(3).run(_early)
    first, *others = [found for found, _ in outcomes]
    assert "deliver='early'" in outcomes[0][1]
    kept = torch.zeros(60_000)
    for step, (_, grad, _, lost) in enumerate(first):
        assert all((of_rank[step][1] == grad).all() and of_rank[step][3] == lost for of_rank in others)
        assert lost.lost <= 0.2 * lost.sent
        given = sum(of_rank[step][0] for of_rank in (first, *others)) / 3 + kept
        kept = sum(of_rank[step][2] for of_rank in (first, *others))
        torch.testing.assert_close(grad + kept, given, rtol=1e-5, atol=1e-4)
    assert sum(lost.lost for *_, lost in first) > 0, (
        "the bound is spent, although nothing was lost on the way"
    )


def _deaf(rank, _num_ranks):
    """Rank 1 cannot listen; nobody waits for it any longer than it takes to say so."""
    group = dist.new_group(timeout=timedelta(seconds=600))
    model = DistributedDataParallel(Mlp(), reduction=BoundedLoss(0.0), process_group=group)
    interface = mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "nowhere0"} if rank == 1 else {})
    with interface, pytest.raises(Exception, match="nowhere0") as caught:
        _steps(model, rank, 1)
    return str(caught.value)


@pytest.mark.processes
def test_a_rank_that_cannot_connect_says_so_to_all():
    with Ranks(2) as ranks:
        other, own = (outcome.value for outcome in ranks.outcomes(_deaf))
    assert "there is no interface 'nowhere0'" in own
    assert "rank 1 cannot come" in other

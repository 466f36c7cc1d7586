"""`reduction=BoundedLoss(...)` under DDP, by real processes over real sockets on the loopback interface."""

import copy
import socket

import numpy as np
import pytest
import torch

from models import Mlp, digest, generator, squares
from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError
from paceline.reductions import BoundedLoss
from paceline.transports.bounded_loss.datagram_loop import compile_all
from ranks import pool


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


def test_gradients_are_the_mean_on_every_rank_and_strangers_are_counted():
    outcomes = pool(3).run(_train)
    digests = [value[0] for value in outcomes]
    assert all(each == digests[0] for each in digests)
    for _, losses, sent, counters in outcomes:
        assert losses == (0, True, 3)
        assert counters["strangers"] == sent
        assert counters["sent"] > 0


def test_impossible_bounds_are_refused():
    for bound in (-0.1, 1.0, 7):
        with pytest.raises(ConfigurationError, match="cannot be"):
            BoundedLoss(bound)
    with pytest.raises(ConfigurationError, match="protected_ratio"):
        BoundedLoss(0.1, protected_ratio=2)
    assert repr(copy.deepcopy(BoundedLoss(0.25, 0.5))) == (
        "BoundedLoss(bound=0.25, protected_ratio=0.5, compensation='survivors')"
    )

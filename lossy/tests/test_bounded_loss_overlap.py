"""`BoundedLoss` with `overlap_forward`: pieces of a deferred step as datagrams, over real sockets.

Steps are deferred by force, and buckets cut small, so that one has several pieces.
"""

import warnings
from unittest import mock

import pytest
import torch

from harness.models import Mlp, digest, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.optim import overlap
from paceline.planning import forward_overlap as planning
from paceline_lossy import BoundedLoss

pytestmark = [pytest.mark.compiles, pytest.mark.processes]

STEPS, BOUND = 9, 0.3
OUTPUTS = 600  # of 200 inputs: pieces of several datagrams on the loopback interface


def _trained(rank, mode, reduction):
    """The bits of parameters after each step, and how many steps were deferred."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(), reduction=reduction, overlap_forward=mode, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if mode:
        optimizer = overlap(optimizer, model)
    num_deferred = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        squares(model(torch.randn(4, 8, generator=generator(rank, step)))).backward()
        optimizer.step()
        num_deferred += bool(mode) and model.forward_overlap.has_outstanding
    pieces = model.forward_overlap._agreement.pieces if mode else ()
    assert not mode or len(pieces) > len(model.reducer.buckets) > 1
    return digest(p.detach() for p in model.parameters()), num_deferred


def _exact(rank, _num_ranks):
    with mock.patch.object(planning, "PIECE_BYTES", 512):
        without = _trained(rank, False, BoundedLoss(0.0))
        return without, _trained(rank, "always", BoundedLoss(0.0, compensation="feedback", priorities=True))


def test_with_a_bound_of_0_parameters_are_bitwise_those_of_training_without_it():
    found = [each for of_rank in pool(3).run(_exact) for each in of_rank]
    assert len({bits for bits, _ in found}) == 1
    assert [deferred for _, deferred in found] == [0, STEPS - 3] * 3


class Parallel(torch.nn.Module):
    """Gradients that do not depend on parameters; one layer is used in every other step, and the last."""

    def __init__(self):
        super().__init__()
        self.front, self.rare, self.back = (torch.nn.Linear(200, OUTPUTS, bias=False) for _ in range(3))
        self.uses_rare = True

    def forward(self, x):
        layers = [self.front, *([self.rare] if self.uses_rare else []), self.back]
        return sum(layer(x).sum() for layer in layers)


def _fed_back(rank, _num_ranks):
    """For each layer all that this rank gave, by how much it changed, and what is kept; the last step's losses."""
    warnings.simplefilter("ignore")
    with mock.patch.object(planning, "PIECE_BYTES", 170_000):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            Parallel(),
            reduction=BoundedLoss(BOUND, compensation="feedback", deliver="early"),
            overlap_forward="always",
            bucket_cap_mb=0.6,  # two layers in the first bucket
            find_unused_parameters=True,
        )
        optimizer = overlap(torch.optim.SGD(model.parameters(), lr=1.0), model)
        before = [p.detach().clone() for p in model.parameters()]
        given = [torch.zeros(OUTPUTS, 200) for _ in before]
        for step in range(STEPS):
            model.module.uses_rare = step % 2 == 0
            inputs = torch.randn(4, 200, generator=generator(rank, step))
            optimizer.zero_grad()
            model(inputs).backward()
            optimizer.step()
            for place in (0, 1, 2) if model.module.uses_rare else (0, 2):
                given[place] += inputs.sum(0)
        assert model.forward_overlap.has_outstanding
        reduction = model.reduction
        residuals = reduction.state_dict()["residual"]
        kept = [residuals[name].view(OUTPUTS, 200) for name, _ in model.module.named_parameters()]
        changed = [was - p.detach() for was, p in zip(before, model.parameters(), strict=True)]
    return given, changed, kept, reduction.losses


def test_what_is_lost_of_a_piece_is_kept_for_the_next_step():
    """Also of a layer that the next forward does not need, so that its step is completed by the next backward."""
    outcomes = pool(3).run(_fed_back)
    first = outcomes[0]
    losses = first[3]
    assert 0 < losses.lost <= BOUND * losses.sent
    assert len(losses.by_bucket) == 2
    for name, lost in losses.by_parameter.items():
        layer = ("front.weight", "rare.weight", "back.weight").index(name)
        num_kept = sum(int((kept[layer] != 0).sum()) for _, _, kept, _ in outcomes)
        assert lost == pytest.approx(num_kept / (2 * 200 * OUTPUTS)), name
    for layer in range(3):
        assert all((changed[layer] == first[1][layer]).all() for _, changed, _, _ in outcomes)
        given = sum(given[layer] for given, _, _, _ in outcomes) / 3
        kept = sum(kept[layer] for _, _, kept, _ in outcomes)
        torch.testing.assert_close(first[1][layer] + kept, given, rtol=1e-4, atol=1e-3)

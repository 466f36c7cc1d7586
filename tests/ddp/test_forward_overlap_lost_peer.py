"""A peer that dies while gradients are under way: the others are told in the forward, and cannot save half a step."""

import os
import signal
import warnings

import pytest
import torch

from harness.models import Mlp, generator, squares
from harness.ranks import Ranks
from paceline import DistributedDataParallel
from paceline.optim import overlap

pytestmark = pytest.mark.processes

VICTIM = 1


class Withheld:
    """A process group that performs two sums, and never the next ones."""

    def __init__(self, group):
        self._group, self._num_sums, self.size = group, 0, group.size

    def allreduce(self, *arguments):
        self._num_sums += 1
        return self._group.allreduce(*arguments) if self._num_sums <= 2 else self

    def get_future(self):
        return torch.futures.Future()


def die_under_way(rank, _num_ranks):
    """Five good steps; in the sixth `VICTIM` sends two pieces and dies. Returns what each read of a survivor said."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(), bucket_cap_mb=0.0005, overlap_forward="always")
    optimizer = overlap(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def train(step):
        optimizer.zero_grad()
        squares(model(torch.randn(4, 8, generator=generator(step, rank)))).backward()
        optimizer.step()

    for step in range(5):
        train(step)
    model.flush()
    if rank == VICTIM:
        model.forward_overlap._piece_group = Withheld(model.forward_overlap._piece_group)
    train(5)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    said = []
    for read in (lambda: train(6), model.state_dict, optimizer.state_dict, lambda: train(7)):
        try:
            read()
        except RuntimeError as error:
            said.append((type(error).__name__, str(error)))
        else:
            said.append(("", "nothing"))
    return said


def test_a_peer_that_dies_is_named_and_no_half_step_is_saved():
    """All backwards had ended well, so `optimizer.step()` had returned: the next forward is where it comes to light."""
    ranks = Ranks(3, group_timeout_s=60.0)  # the death is named long before
    try:
        outcomes = ranks.outcomes(die_under_way, deadline_s=40.0)
    finally:
        ranks.close()
    for outcome in outcomes:
        if outcome.rank == VICTIM:
            assert outcome.exit_code == -signal.SIGKILL, outcome.story()
            continue
        assert outcome.clean, outcome.story()
        (kind, message), *later = outcome.value
        assert kind == "PeerLostError", message
        assert f"rank {VICTIM} " in message
        assert "some parameters may have taken this step and others not" in message
        assert "untouched" not in message
        for kind, words in later:
            assert kind == "ProtocolError", later
            assert "communication failed" in words

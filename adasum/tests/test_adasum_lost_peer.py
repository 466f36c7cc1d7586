"""A peer that dies under Adasum: the others raise, and name it."""

import os
import signal

import pytest
import torch

from harness.models import Mlp, digest, generator, squares
from harness.ranks import Ranks
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

VICTIM = 1


def strike_in(rank, _num_ranks):
    """Two good steps; in the third, the victim is killed when half of its buckets are on their way."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(), reduction="adasum", bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = None
    try:
        for step in range(4):
            if step == 2:
                before = digest(list(model.parameters()))
                if rank == VICTIM:
                    model.module.layers[1].weight.register_hook(
                        lambda _: os.kill(os.getpid(), signal.SIGKILL)
                    )
            optimizer.zero_grad()
            squares(model(torch.randn(4, 8, generator=generator(step, rank)))).backward()
            optimizer.step()
    except RuntimeError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return kinds, str(error), digest(list(model.parameters())) == before
    return "no error"


def test_a_killed_peer_is_named():
    """Also by ranks that exchange nothing with it in the schedule, and long before the group's timeout."""
    with Ranks(4, group_timeout_s=60.0, store="tcp") as ranks:
        for outcome in ranks.outcomes(strike_in, deadline_s=50.0):
            if outcome.rank == VICTIM:
                assert outcome.exit_code == -signal.SIGKILL, outcome.story()
                continue
            assert outcome.clean, outcome.story()
            kinds, message, untouched = outcome.value
            assert "PeerLostError" in kinds, outcome.value
            assert untouched, message
            verdict = message.partition("The gradients of this step")[0]
            named = {r for r in range(4) if r != outcome.rank and f"rank {r} " in verdict}
            assert named == {VICTIM}, message

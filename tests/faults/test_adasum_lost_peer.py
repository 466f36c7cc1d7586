"""A peer that dies or hangs under Adasum: the others raise within the group's timeout, and name it."""

import os
import signal

import pytest
import torch

from models import Mlp, digest, generator, squares
from paceline import DistributedDataParallel
from ranks import Ranks


def strike_in(rank, _num_ranks, victim, how):
    """Two good steps; in the third, `victim` is killed or stopped when half of its buckets are on their way."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(), reduction="adasum", bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = None
    try:
        for step in range(4):
            if step == 2:
                before = digest(list(model.parameters()))
                if rank == victim:
                    model.module.layers[1].weight.register_hook(lambda _: os.kill(os.getpid(), how))
            optimizer.zero_grad()
            squares(model(torch.randn(4, 8, generator=generator(step, rank)))).backward()
            optimizer.step()
    except RuntimeError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return kinds, str(error), digest(list(model.parameters())) == before
    return "no error"


@pytest.mark.parametrize(("num_ranks", "victim", "how"), [(4, 1, signal.SIGKILL), (3, 2, signal.SIGSTOP)])
def test_it_is_named(num_ranks, victim, how):
    """Also by ranks that exchange nothing with it in the schedule, and that only hear of it by the roll call."""
    timeout_s = 6.0 if how == signal.SIGSTOP else 20.0  # nobody has to wait for the end of a dead peer's time
    with Ranks(num_ranks, group_timeout_s=timeout_s, store="tcp") as ranks:
        for outcome in ranks.outcomes(strike_in, victim, how, deadline_s=40.0):
            if outcome.rank == victim:
                assert outcome.missed_deadline or outcome.exit_code == -how, outcome.story()
                continue
            assert outcome.clean, outcome.story()
            kinds, message, untouched = outcome.value
            assert "PeerLostError" in kinds, outcome.value
            assert untouched, message
            verdict = message.partition("The gradients of this step")[0]
            named = {r for r in range(num_ranks) if r != outcome.rank and f"rank {r} " in verdict}
            assert named == {victim}, message

"""A peer that is killed or stopped under `BoundedLoss`: the others raise within the timeout, and name it."""

import os
import signal

import pytest
import torch

from harness.models import Mlp, generator, squares
from harness.ranks import Ranks
from paceline import DistributedDataParallel
from paceline.comm import Completion
from paceline.optim import overlap
from paceline_lossy import BoundedLoss
from paceline_lossy.datagrams.datagram_loop import compile_all

pytestmark = pytest.mark.processes

VICTIM, TIMEOUT_S = 1, 6.0


def strike(rank, _num_ranks, number):
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(), reduction=BoundedLoss(0.2), bucket_cap_mb=0.0005)
    try:
        for step in range(3):
            if step == 2 and rank == VICTIM:
                model.module.layers[1].weight.register_hook(lambda _: os.kill(os.getpid(), number))
            squares(model(torch.randn(4, 8, generator=generator(step, rank)))).backward()
    except RuntimeError as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return "no error"


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_peer_that_falls_silent_is_named():
    compile_all()
    with Ranks(3, group_timeout_s=TIMEOUT_S, store="tcp") as ranks:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for outcome in ranks.outcomes(strike, number, deadline_s=60.0):
                if outcome.rank == VICTIM:
                    continue
                assert outcome.clean, outcome.story()
                kinds, message = outcome.value
                assert "PeerLostError" in kinds, outcome.value
                assert f"rank {VICTIM} " in message.partition("The gradients of this step")[0], message


def die_under_way(rank, _num_ranks):
    """Steps are deferred; in the sixth `VICTIM` sends no piece, and dies. Returns what two reads of a survivor said."""
    torch.manual_seed(0)
    reduction = BoundedLoss(0.2)
    model = DistributedDataParallel(
        Mlp(), reduction=reduction, bucket_cap_mb=0.0005, overlap_forward="always"
    )
    optimizer = overlap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(6):
        if step == 5 and rank == VICTIM:
            model.flush()
            reduction.launch = lambda _: Completion()
        optimizer.zero_grad()
        squares(model(torch.randn(4, 8, generator=generator(step, rank)))).backward()
        optimizer.step()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    said = []
    for read in (lambda: model(torch.randn(4, 8)), model.state_dict):
        with pytest.raises(RuntimeError) as caught:
            read()
        said.append((type(caught.value).__name__, str(caught.value)))
    return said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_peer_that_dies_under_a_deferred_step_is_named_and_half_a_step_is_not_read():
    compile_all()
    with Ranks(3, group_timeout_s=TIMEOUT_S, store="tcp") as ranks:
        for outcome in ranks.outcomes(die_under_way, deadline_s=100.0):
            if outcome.rank == VICTIM:
                continue
            assert outcome.clean, outcome.story()
            (kind, message), (later, why) = outcome.value
            assert kind == "PeerLostError", outcome.value
            assert f"rank {VICTIM} " in message, message
            assert later == "ProtocolError", outcome.value
            assert "was not completed" in why, outcome.value

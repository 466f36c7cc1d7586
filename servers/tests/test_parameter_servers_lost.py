"""A server or a rank that is killed or stopped: all ranks raise within the timeout, and name it."""

import os
import signal

import pytest
import torch

from harness.models import Mlp, digest, generator, squares
from harness.ranks import Ranks
from harness.running_servers import as_processes
from paceline import DistributedDataParallel
from paceline_lossy import BoundedLoss
from paceline_lossy.datagrams.datagram_loop import compile_all
from paceline_servers import ParameterServers

TIMEOUT_S = 6.0


def strike(rank, _num_ranks, addresses, victim, pid, number, by_datagrams=False):
    """Two good steps; in the third, when some buckets are on their way, rank 0 strikes a server or `victim` itself."""
    torch.manual_seed(0)
    servers = ParameterServers(addresses)
    reduction = BoundedLoss(0.2, servers=servers) if by_datagrams else servers
    model = DistributedDataParallel(Mlp(), reduction=reduction, bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, target = None, pid or os.getpid()
    try:
        for step in range(4):
            if step == 2:
                before = digest(list(model.parameters()))
                if rank == (victim or 0):
                    model.module.layers[1].weight.register_hook(lambda _: os.kill(target, number))
            optimizer.zero_grad()
            squares(model(torch.randn(4, 8, generator=generator(step, rank)))).backward()
            optimizer.step()
    except RuntimeError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return kinds, str(error), digest(list(model.parameters())) == before
    return "no error"


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_who_falls_silent_is_named():
    with Ranks(3, group_timeout_s=TIMEOUT_S, store="tcp") as ranks:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            with as_processes(2) as (addresses, processes):
                _all_name(
                    ranks.outcomes(strike, addresses, None, processes[1].pid, number, deadline_s=60.0),
                    f"parameter server 1 at {addresses[1]} ",
                    "ServerLostError",
                    None,
                )
        for number in (signal.SIGKILL, signal.SIGSTOP):
            with as_processes(2) as (addresses, processes):
                outcomes = ranks.outcomes(strike, addresses, 1, None, number, deadline_s=60.0)
                _all_name(outcomes, "rank 1 ", "PeerLostError", 1)
                assert all(process.poll() is None for process in processes), "servers outlive a rank"


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_who_falls_silent_is_named_where_gradients_go_by_datagrams():
    """Killed: said by TCP. Stopped: a server is missed by its datagrams first, a rank by the servers."""
    compile_all()
    with Ranks(3, group_timeout_s=TIMEOUT_S, store="tcp") as ranks:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            with as_processes(2) as (addresses, processes):
                outcomes = ranks.outcomes(
                    strike, addresses, None, processes[1].pid, number, True, deadline_s=60.0
                )
                _all_name(outcomes, f"parameter server 1 at {addresses[1]} ", "ServerLostError", None)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            with as_processes(2) as (addresses, processes):
                outcomes = ranks.outcomes(strike, addresses, 1, None, number, True, deadline_s=60.0)
                _all_name(outcomes, "rank 1 ", "PeerLostError", 1)
                assert all(process.poll() is None for process in processes), "servers outlive a rank"


def _all_name(outcomes, who, kind, victim):
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        assert outcome.clean, outcome.story()
        kinds, message, untouched = outcome.value
        assert kind in kinds, outcome.value
        assert who in message.partition("The gradients of this step")[0], message
        assert untouched, message

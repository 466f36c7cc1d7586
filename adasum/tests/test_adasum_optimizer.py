"""The delta form: against combining each rank's update in one process, and what it refuses."""

import copy
import math

import pytest
import torch
import torch.distributed as dist

from harness.models import WORKLOADS, Mlp, digest, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError, ReplicaMismatchError
from paceline_adasum import Adasum, AdasumOptimizer, combine
from paceline_recipes import LAMB

pytestmark = pytest.mark.processes

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "lamb": lambda parameters: LAMB(parameters, lr=0.01, weight_decay=0.01),
}


def backward(model, rank, step, workload):
    model.zero_grad()
    workload.loss(model(*workload.batch(generator(rank, step)))).backward()


def one_process(model, make, num_ranks, num_steps, workload):
    """Parameters after so many steps: every rank's replica with an optimizer of its own, deltas combined."""
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]
    optimizers = [make(replica.parameters()) for replica in replicas]
    for step in range(num_steps):
        start = [p.detach().clone() for p in replicas[0].parameters()]
        deltas = []
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            backward(replica, rank, step, workload)
            optimizer.step()
            deltas.append([(p - s).detach() for p, s in zip(replica.parameters(), start, strict=True)])
        after = [s + delta for s, delta in zip(start, combine(deltas), strict=True)]
        for replica in replicas:
            for parameter, value in zip(replica.parameters(), after, strict=True):
                parameter.data.copy_(value)
    return list(replicas[0].parameters())


def train_by_updates(rank, num_ranks, optimizer_name, workload_name):
    workload, make = WORKLOADS[workload_name], OPTIMIZERS[optimizer_name]
    torch.manual_seed(rank)  # the constructor takes rank 0's parameters
    model = workload.build()
    torch.manual_seed(0)
    twin = workload.build()
    optimizer = AdasumOptimizer(make(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(3):
        backward(model, rank, step, workload)
        optimizer.step()
    assert 1 / num_ranks - 0.01 < optimizer.reduction.orthogonality < 1.01 or num_ranks == 1
    expected = one_process(twin, make, num_ranks, 3, workload)
    for mine, wanted in zip(model.parameters(), expected, strict=True):
        tolerance = {2: 3e-2}.get(mine.dtype.itemsize, 1e-4)
        torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)
    scheduler.step()
    scheduler.step()
    assert math.isclose(
        optimizer.optimizer.param_groups[0]["lr"], 0.1 * make([next(iter(twin.parameters()))]).defaults["lr"]
    )
    return digest(list(model.parameters()))


@pytest.mark.parametrize(
    ("num_ranks", "optimizer", "workload"),
    [
        (1, "adam", "mlp"),
        (2, "momentum", "mixed_dtypes"),
        (2, "sgd", "sparse"),
        (3, "adam", "mlp"),
        (4, "adamw", "mlp"),
        (2, "lamb", "mlp"),
    ],
)
def test_updates_are_combined(num_ranks, optimizer, workload):
    """Adasum of what each rank's optimizer does; parameters bitwise equal on all ranks; schedulers go on working."""
    digests = pool(num_ranks).run(train_by_updates, optimizer, workload)
    assert len(set(digests)) == 1


def both_forms(rank, num_ranks, optimizer_name):
    """Largest difference of the parameters between combining gradients and combining updates."""
    make, workload = OPTIMIZERS[optimizer_name], WORKLOADS["mlp"]
    torch.manual_seed(0)
    plain = Mlp()
    wrapped = DistributedDataParallel(copy.deepcopy(plain), reduction="adasum")
    of_gradients, of_updates = make(wrapped.parameters()), AdasumOptimizer(make(plain.parameters()))
    for step in range(4):
        for model, optimizer in ((wrapped, of_gradients), (plain, of_updates)):
            backward(model, rank, step, workload)
            optimizer.step()
    pairs = zip(plain.parameters(), wrapped.parameters(), strict=True)
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


def test_with_plain_sgd_it_is_the_gradient_form():
    """Scaling all inputs scales Adasum, so with SGD both forms agree; with Adam they do not."""
    assert max(pool(3).run(both_forms, "sgd")) < 1e-6
    assert min(pool(3).run(both_forms, "adam")) > 1e-3


def misuse_optimizer(rank, num_ranks):
    parameters = list(Mlp().parameters())
    with pytest.raises(ConfigurationError, match="LBFGS: its step needs a closure"):
        AdasumOptimizer(torch.optim.LBFGS(parameters))
    with pytest.raises(ConfigurationError, match="it was given 5"):
        AdasumOptimizer(5)
    with pytest.raises(ReplicaMismatchError, match="Every rank gives the same parameters"):
        AdasumOptimizer(torch.optim.SGD(parameters[rank:], lr=0.1))
    with pytest.raises(ReplicaMismatchError, match="another reduction"):
        AdasumOptimizer(torch.optim.SGD(parameters, lr=0.1), reduction=Adasum("auto" if rank else None))
    # Gradients that have been reduced already; torch's class would do as well.
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp())
    optimizer = AdasumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="it was given AdasumOptimizer"):
        AdasumOptimizer(optimizer)
    optimizer.step()  # nobody has a gradient yet
    before = digest(list(model.parameters()))
    backward(model, rank, 0, WORKLOADS["mlp"])
    with pytest.raises(ConfigurationError, match="have been reduced already"):
        optimizer.step()
    assert digest(list(model.parameters())) == before
    with model.no_sync():
        backward(model, rank, 1, WORKLOADS["mlp"])
    optimizer.step()
    return digest(list(model.parameters()))


def test_refused():
    """Before anything is changed, on every rank, and under no_sync the wrapped model may be used."""
    values = pool(2).run(misuse_optimizer)
    assert values[0] == values[1]


def saved(rank, num_ranks):
    torch.manual_seed(0)
    model = Mlp()
    make = OPTIMIZERS["adam"]
    optimizer = AdasumOptimizer(make(model.parameters()))
    workload = WORKLOADS["mlp"]
    for step in range(2):
        backward(model, rank, step, workload)
        optimizer.step()
    state, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    assert (state["rank"], state["num_ranks"]) == (rank, num_ranks)
    # It goes on as if it had never stopped.
    again = Mlp()
    again.load_state_dict(values)
    resumed = AdasumOptimizer(make(again.parameters()))
    resumed.load_state_dict(state)
    for each, its in ((model, optimizer), (again, resumed)):
        backward(each, rank, 2, workload)
        its.step()
    assert digest(list(again.parameters())) == digest(list(model.parameters()))
    moments = digest([entry["exp_avg"] for entry in resumed.state.values()])
    before = copy.deepcopy(resumed.state_dict())
    for wrong, words in (
        ({**state, "rank": 1 - rank}, f"given the optimizer state of rank {1 - rank} of 2"),
        ({**state, "num_ranks": 3}, f"rank {rank} of 2 was given"),
        (state["optimizer"], "not the state of an AdasumOptimizer"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            resumed.load_state_dict(wrong)
    assert str(resumed.state_dict()) == str(before)
    return moments


def test_state_is_saved_and_loaded_by_rank():
    """Moments differ between ranks; another rank's, another number of ranks' and a plain optimizer's are refused."""
    first, second = pool(2).run(saved)
    assert first != second


def scaled(rank, num_ranks):
    """Rank 1's gradients overflow in the second of three steps."""
    torch.manual_seed(0)
    model = Mlp()
    twin = copy.deepcopy(model)
    optimizer = AdasumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = squares(model(torch.randn(4, 8, generator=generator(rank, step))))
        scaler.scale(loss * (torch.inf if rank == 1 and step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        # The same by hand.
        lists = []
        for other in range(num_ranks):
            twin.zero_grad()
            squares(twin(torch.randn(4, 8, generator=generator(other, step)))).backward()
            lists.append([p.grad * (step != 1 or other != 1) for p in twin.parameters()])
        for parameter, gradient in zip(twin.parameters(), combine(lists), strict=True):
            parameter.grad = gradient
        plain.step()
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-4, atol=1e-6)
    assert (scaler.get_scale() < 1024.0) == (rank == 1)
    return digest(list(model.parameters()))


def test_a_rank_that_overflows_adds_nothing():
    """GradScaler skips by rank; every rank still takes part, and parameters stay the same everywhere."""
    values = pool(2).run(scaled)
    assert values[0] == values[1]


def grown(rank, num_ranks):
    """A group of parameters that is added later; a process group over some ranks."""
    pair = dist.new_group([0, num_ranks - 1])
    if rank not in {0, num_ranks - 1}:
        return None
    torch.manual_seed(rank)
    first, second = Mlp(), Mlp()
    optimizer = AdasumOptimizer(torch.optim.SGD(first.parameters(), lr=0.1), process_group=pair)
    optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.2})
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=generator(rank, step))
        (squares(first(x)) + squares(second(x))).backward()
        optimizer.step()
    return digest([*first.parameters(), *second.parameters()])


def test_groups():
    """Parameters added later take part; ranks outside the process group do not."""
    values = [value for value in pool(3).run(grown) if value is not None]
    assert len(values) == 2
    assert values[0] == values[1]


def test_without_a_process_group():
    with pytest.raises(ConfigurationError, match="init_process_group"):
        AdasumOptimizer(torch.optim.SGD(Mlp().parameters(), lr=0.1))


def loaded_within(_rank, _num_ranks):
    optimizer = AdasumOptimizer(torch.optim.SGD(Mlp().parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    optimizer.optimizer.load_state_dict(optimizer.optimizer.state_dict())
    optimizer.step()
    scheduler.step()
    return optimizer.optimizer.param_groups[0]["lr"]


def test_a_schedule_outlives_state_loaded_into_the_optimizer_within():
    """As a message of ours advises: torch replaces the groups then, and a scheduler writes into the wrapper's."""
    assert pool(2).run(loaded_within) == [0.1, 0.1]


def added_within(_rank, _num_ranks):
    optimizer = AdasumOptimizer(torch.optim.SGD(Mlp().parameters(), lr=1.0))
    optimizer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ConfigurationError, match="Add them by this object's own"):
        optimizer.step()


def test_parameters_added_to_the_optimizer_within():
    """They would be stepped on every rank and exchanged by none."""
    pool(2).run(added_within)

"""Tensor parallelism beside data parallelism: a mesh of 2 x 2 ranks, of which the wrapper is given one dimension."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from harness.models import generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

NUM_STEPS = 3


class Layers(nn.Sequential):
    """One layer that every rank has, and two that ranks share by columns and by rows."""

    def __init__(self, is_checkpointed=False):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 2))
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        if not self.is_checkpointed:
            return super().forward(x)
        return checkpoint(lambda hidden: self[2](self[1](hidden)), self[0](x), use_reentrant=False)


def batch(step, replica):
    return torch.randn(3, 4, generator=generator(step, replica), dtype=torch.float64)


def make_layers(is_checkpointed=False):
    torch.manual_seed(0)
    return Layers(is_checkpointed).double()


def train(model, means):
    """Train with the gradients of these losses, one a step; the parameters by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        means(step).backward()
        optimizer.step()
    return {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}


def of_one_process(place):
    """What this rank should hold of each parameter after training; `place` is its own in tensor parallelism."""
    net = make_layers()
    trained = train(net, lambda step: sum(squares(net(batch(step, each))) for each in range(2)) / 2)
    for name, dim in {"1.weight": 0, "1.bias": 0, "2.weight": 1}.items():
        trained[name] = trained[name].chunk(2, dim)[place]
    return trained


def forward_without_gradients(model, how):
    """Run the first forward, which makes what the sharded layers see."""
    if how == "evaluation":
        with torch.no_grad():
            model(batch(9, 9))
    elif how == "inference mode":
        with torch.inference_mode():
            model.module(batch(9, 9))
    elif how == "a copy":
        copied = copy.deepcopy(model.module)
        with torch.no_grad():
            assert torch.equal(copied(batch(9, 9)), model(batch(9, 9)))


def train_in_a_mesh(_rank, _num_ranks):
    """The largest error of a parameter, for each way to begin."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    replica, place = mesh["replicas"].get_local_rank(), mesh["shards"].get_local_rank()
    expected = of_one_process(place)
    errors = {}
    for how in ("training", "evaluation", "inference mode", "a copy", "checkpointed", "unfrozen"):
        net = make_layers(is_checkpointed=how == "checkpointed")
        net[1].requires_grad_(how != "unfrozen")
        parallelize_module(net, mesh["shards"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
        model = DistributedDataParallel(net, device_mesh=mesh["replicas"])
        forward_without_gradients(model, how)
        if how == "unfrozen":
            squares(model(batch(9, 9))).backward()
            assert dict(net.named_parameters())["2.weight"].grad is not None
            model.requires_grad_(True)
        trained = train(model, lambda step, model=model: squares(model(batch(step, replica))))
        assert model.state_dict().keys() == {f"module.{name}" for name in expected}
        errors[how] = max((trained[name] - p).abs().max().item() for name, p in expected.items())
    return errors


def test_tensor_parallel_layers_train_as_in_one_process():
    """Also after an evaluation that comes first, with checkpointed layers, and unfrozen after wrapping."""
    for errors in pool(4).run(train_in_a_mesh):
        assert max(errors.values()) < 1e-12, errors

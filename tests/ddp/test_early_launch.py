"""Buckets leave while autograd still computes, and none too early. Only speed depends on it: messages are counted."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel

LAYER_MB = 285 / 2**20  # reached by both gradients of a layer together, in either order


@pytest.fixture(autouse=True)
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Stack(nn.Module):
    """Three layers. `launched` has how many buckets had left when a gradient reached the first layer's output."""

    def __init__(self, is_hidden):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.is_hidden, self.kept, self.launched = is_hidden, [], []

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0:
                x.register_hook(self._note)
        if self.is_hidden:
            self.kept.append(x)
            return None
        return x

    def _note(self, _):
        backward = self.reducer().step.backward
        self.launched.append(backward.sync.num_launched)


class SharedTwice(Stack):
    """The last layer runs in two reentrant checkpoints, so its parameters are finished twice before the second's."""

    def forward(self, x):
        first, other, shared = self.layers
        x = first(x)
        x.register_hook(self._note)
        x = other(x)
        for _ in range(2):
            x = checkpoint(shared, x, use_reentrant=True)
        return x


def trained(module, cap_mb, num_steps=3):
    """Train some steps and return the wrapped model."""
    model = DistributedDataParallel(module, bucket_cap_mb=cap_mb)
    module.reducer = lambda: model.reducer
    for _ in range(num_steps):
        output = model(torch.ones(2, 8))
        (module.kept.pop() if output is None else output).sum().backward()
    return model


@pytest.mark.parametrize("is_hidden", [False, True], ids=["outputs", "hidden outputs"])
def test_buckets_leave_before_backward_ends(is_hidden):
    """The buckets of the two last layers leave before the first layer's gradient, from the first step on."""
    model = trained(Stack(is_hidden), LAYER_MB)
    assert [len(bucket.members) for bucket in model.reducer.buckets] == [2, 2, 2]
    assert model.module.launched == [2, 2, 2]


def test_a_bucket_waits_for_all_of_its_gradients_if_others_come_twice():
    """As many gradients as it has members have come, but not of each. If it left, the others would be late."""
    model = trained(SharedTwice(False), 2 * LAYER_MB)
    assert [len(bucket.members) for bucket in model.reducer.buckets] == [4, 2]
    assert model.module.launched == [0, 0, 0]
    assert not model.reducer.tracker.pending.waits_for_end

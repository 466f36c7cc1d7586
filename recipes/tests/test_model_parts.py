"""What the recipe does to a model: which parameters are decayed, how blocks begin, over what is normalised."""

import copy

import pytest
import torch
from torch import nn

from harness.models import Mlp, TinyTransformer, conv_net, generator
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError
from paceline_recipes import (
    GhostBatchNorm,
    convert_ghost_batchnorm,
    init_output_layer,
    parameter_groups,
    zero_init_residual,
)


def images(num_samples, seed=0):
    return torch.randn(num_samples, 3, 8, 8, generator=generator(seed), dtype=torch.float64)


# ---- weight decay


def test_no_decay_on_biases_and_normalisations():
    """Every trainable parameter in exactly one group; only weights of convolutions, linear layers, embeddings decay."""
    for model in (conv_net(), TinyTransformer(), Mlp()):
        groups = parameter_groups(model, 1e-4, lr=0.1)
        assert [group["weight_decay"] for group in groups] == [1e-4, 0.0]
        assert all(group["lr"] == 0.1 for group in groups)
        listed = [p for group in groups for p in group["params"]]
        assert len(listed) == len(set(map(id, listed))) == len(list(model.parameters()))
        assert all(p.ndim >= 2 for p in groups[0]["params"])
        assert all(p.ndim == 1 for p in groups[1]["params"])
        optimizer = torch.optim.SGD(groups)
        model(torch.zeros(2, 8)).sum().backward() if isinstance(model, Mlp) else None
        optimizer.step()


def test_normalisations_of_any_shape_are_found():
    """LayerNorm over two dimensions, a hand-written RMSNorm; tied and frozen parameters count as they should."""

    class MyRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 1))

    class LayerScale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(4))

    model = nn.ModuleDict(
        {
            "gamma": LayerScale(),
            "norm": nn.LayerNorm((4, 4)),
            "mine": MyRMSNorm(),
            "a": nn.Linear(4, 4),
            "b": nn.Linear(4, 4),
        }
    )
    model["b"].weight = model["a"].weight
    model["b"].bias.requires_grad_(requires_grad=False)
    decayed, others = parameter_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(model["a"].weight)]
    assert len(others["params"]) == 5
    assert len(parameter_groups(nn.LayerNorm(3), 0.1)) == 1
    with pytest.raises(ConfigurationError, match="weight_decay=-1 is negative"):
        parameter_groups(model, -1)
    with pytest.raises(ConfigurationError, match="no parameter that requires a gradient"):
        parameter_groups(model.requires_grad_(requires_grad=False), 0.1)


# ---- residual blocks


class BasicBlock(nn.Module):
    """As torchvision has it: names, an activation used twice, a projection where shapes differ."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


def small_resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        BasicBlock(8, 8),
        BasicBlock(8, 16, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def test_blocks_begin_as_their_shortcuts():
    """The last scale of each branch, never the shortcut's; nothing else of the model moves, not even a statistic."""
    model = small_resnet()
    before = copy.deepcopy(model.state_dict())
    assert zero_init_residual(model, "*.bn2.weight") == ["3.bn2.weight", "4.bn2.weight"]
    for name, value in model.state_dict().items():
        expected = torch.zeros_like(value) if name in {"3.bn2.weight", "4.bn2.weight"} else before[name]
        assert torch.equal(value, expected), name
    x = torch.randn(4, 8, 6, 6, generator=generator(0))
    assert torch.equal(model[3](x), torch.relu(x))
    assert torch.equal(model[4](x), torch.relu(model[4].downsample(x)))


@pytest.mark.parametrize(
    "names", [("*.bn9.weight",), ("*.bn2.weight", "7.weight")], ids=["no such", "a matrix"]
)
def test_names_that_fit_no_scale_are_refused_and_the_model_is_left_alone(names):
    model = small_resnet()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigurationError, match="fits no parameter of one dimension in this Sequential"):
        zero_init_residual(model, *names)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_output_layer():
    """N(0, 0.01²) in the last linear layer, no bias; the others as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 500), nn.ReLU(), nn.Linear(500, 200))
    first = model[0].weight.clone()
    assert init_output_layer(model) == "2"
    assert model[2].weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert abs(model[2].weight.mean().item()) < 1e-4
    assert not model[2].bias.any()
    assert torch.equal(model[0].weight, first)
    with pytest.raises(ConfigurationError, match=r"no torch\.nn\.Linear"):
        init_output_layer(nn.Conv2d(1, 1, 1))
    with pytest.raises(ConfigurationError, match="std=-1"):
        init_output_layer(model, std=-1)


# ---- normalisation over n samples


def step(model, x):
    model.zero_grad()
    output = model(x)
    (output.square() * torch.arange(1.0, 6.0, dtype=torch.float64)).mean().backward()
    return output.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def on_a_rank(rank, num_ranks, n):
    torch.manual_seed(0)
    model = DistributedDataParallel(conv_net().double(), forward_sync_buffers=False)
    output, gradient = step(model, images(n * num_ranks)[rank * n : (rank + 1) * n])
    statistics = [b.clone() for name, b in model.named_buffers() if "running" in name]
    return output, gradient, statistics


@pytest.mark.processes
def test_normalisation_depends_on_n_and_not_on_the_ranks():
    """Two ranks of n = 4 and one rank of 8 with ghost batches of 4: the same outputs, gradients and mean statistics.

    The wrong variant, one rank that normalises all 8 together, is another function.
    """
    ranks = pool(2).run(on_a_rank, 4)
    torch.manual_seed(0)
    whole = conv_net().double()
    ghost = convert_ghost_batchnorm(copy.deepcopy(whole), 4)
    output, gradient = step(ghost, images(8))
    assert torch.allclose(output, torch.cat([found for found, _, _ in ranks]), rtol=0, atol=1e-12)
    assert torch.allclose(gradient, ranks[0][1], rtol=0, atol=1e-12)
    statistics = [b for name, b in ghost.named_buffers() if "running" in name]
    for found, first, second in zip(statistics, ranks[0][2], ranks[1][2], strict=True):
        assert torch.allclose(found, (first + second) / 2, rtol=0, atol=1e-12)
    wrong_output, wrong_gradient = step(whole, images(8))
    assert (wrong_output - output).abs().max() > 1e-3
    assert (wrong_gradient - gradient).abs().max() > 1e-3


def test_identical_shards_give_one_shards_result_for_every_k():
    """Outputs, gradients and running statistics are those of k = 1."""
    torch.manual_seed(0)
    layer, x = GhostBatchNorm(3, num_samples=4).double(), images(4)
    one = copy.deepcopy(layer)
    output = one(x)
    for k in (2, 5):
        many = copy.deepcopy(layer)
        assert torch.allclose(many(x.repeat(k, 1, 1, 1)), output.repeat(k, 1, 1, 1), rtol=0, atol=1e-14)
        assert torch.allclose(many.running_var, one.running_var, rtol=0, atol=1e-15)
        assert many.num_batches_tracked == 1


@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}],
    ids=["default", "cumulative", "no scale", "no statistics"],
)
def test_one_group_is_torchs_layer(settings):
    """In training and evaluation, with its settings; the state fits, and converting keeps parameters and modes."""
    torchs = nn.BatchNorm2d(3, **settings).double()
    ours = convert_ghost_batchnorm(copy.deepcopy(torchs), 4)
    assert isinstance(ours, GhostBatchNorm)
    for seed in range(3):
        assert torch.allclose(ours(images(4, seed)), torchs(images(4, seed)), rtol=0, atol=1e-14)
    for theirs, mine in zip(torchs.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.allclose(theirs, mine, rtol=0, atol=1e-14)
    assert torch.allclose(ours.eval()(images(3)), torchs.eval()(images(3)), rtol=0, atol=1e-14)
    nn.BatchNorm2d(3, **settings).load_state_dict(ours.state_dict())
    evaluated = convert_ghost_batchnorm(nn.Sequential(nn.BatchNorm1d(3)).eval(), 4)
    assert not evaluated[0].training
    assert "num_samples=4" in repr(evaluated)


def test_ghosts_refused():
    """Batches that cannot be cut, nothing to convert, statistics over ranks."""
    layer = GhostBatchNorm(3, num_samples=4)
    for size in (6, 0):
        with pytest.raises(
            ConfigurationError, match=f"a batch of {size} samples cannot be cut into groups of 4"
        ):
            layer(torch.zeros(size, 3))
    with pytest.raises(ConfigurationError, match="num_samples=0"):
        GhostBatchNorm(3, num_samples=0)
    with pytest.raises(ConfigurationError, match="Mlp has no batch normalisation"):
        convert_ghost_batchnorm(Mlp(), 4)
    with pytest.raises(ConfigurationError, match="SyncBatchNorm"):
        convert_ghost_batchnorm(nn.Sequential(nn.BatchNorm2d(2), nn.SyncBatchNorm(2)), 4)

"""Frameworks that train a sharded optimizer: they clip as with a plain one, or a gradient's part raises by name."""

import importlib.util
import tempfile
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from harness.ranks import Ranks, pool
from integrations import test_accelerate, test_lightning, test_trainer
from paceline.errors import ConfigurationError
from paceline.optim import shard

pytestmark = pytest.mark.processes


def needs(name):
    """Mark a test that is left out where a framework is not installed."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def outcome(train):
    """Return what a training returns, or whether its error names the remedy."""
    try:
        return train()
    except ConfigurationError as error:
        return "model.clip_grad_norm_(max_norm)" in str(error) and "whole_gradients=True" in str(error)


def with_accelerate(is_sharded, **how):
    """Train one epoch with clipping: prepare the model, shard, and prepare the optimizer."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    with paceline.patch_torch():
        accelerator = Accelerator(cpu=True)
        model, loader = accelerator.prepare(
            test_accelerate.a_model(), DataLoader(test_accelerate.data(), batch_size=8)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    optimizer = accelerator.prepare(shard(optimizer, model, **how) if is_sharded else optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def accelerate_on(rank, num_ranks):
    test_accelerate.as_launched(rank, num_ranks)
    ways = ((False, {}), (True, {}), (True, {"whole_gradients": True}))
    return [outcome(lambda way=way: with_accelerate(way[0], **way[1])) for way in ways]


def with_lightning(is_sharded, folder):
    """Train one epoch with gradient_clip_val, and an optimizer that is sharded when training begins."""

    def shards(module):
        if is_sharded:
            shard(module.trainer.optimizers[0], module.trainer.strategy.model)

    made = test_lightning.a_module()
    type(made).on_train_start = shards
    with mock.patch.object(test_lightning, "a_module", return_value=made):
        module, _ = test_lightning.fit(folder, "paceline", gradient_clip_val=0.1)
    return module.result()


def lightning_on(rank, num_ranks, folder):
    test_lightning.as_launched(rank, num_ranks)
    return [outcome(lambda on=on: with_lightning(on, folder)) for on in (False, True)]


def with_trainer(is_sharded, folder):
    """Train three steps with max_grad_norm, and an optimizer that a callback shards when training begins."""
    from transformers import TrainerCallback

    class Shards(TrainerCallback):
        def on_train_begin(self, _arguments, _state, _control, *, optimizer, **_):
            if is_sharded:
                shard(optimizer.optimizer, trainer.model_wrapped)

    with paceline.patch_torch():
        trainer = test_trainer.a_trainer(folder, 3, [Shards()], max_grad_norm=0.1, save_only_model=True)
        trainer.train()
    return test_trainer.curve(trainer)


def trainer_on(rank, num_ranks, folder):
    test_accelerate.as_launched(rank, num_ranks)
    return [outcome(lambda on=on: with_trainer(on, f"{folder}/{on}")) for on in (False, True)]


FRAMEWORKS = [
    pytest.param(accelerate_on, False, marks=needs("accelerate")),
    pytest.param(lightning_on, True, marks=needs("pytorch_lightning")),
    pytest.param(trainer_on, True, marks=needs("transformers")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("train", "writes"), FRAMEWORKS)
def test_frameworks_clip_whole_gradients_and_refuse_parts(train, writes):
    """On one host parameters are those of the plain optimizer; between hosts clipping raises, and names the remedy."""
    with tempfile.TemporaryDirectory() as folder:
        given = (folder,) if writes else ()
        for plain, sharded, *_ in pool(2).run(train, *given, deadline_s=110):
            assert sharded == plain
        with Ranks(2, env={"LOCAL_WORLD_SIZE": "1"}) as on_two_hosts:
            for _, parts, *whole in on_two_hosts.run(train, *given, deadline_s=110):
                assert parts is True
                assert all(isinstance(each, list) for each in whole)

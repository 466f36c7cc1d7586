"""Accelerate's released package over our wrapper, compared bitwise with what it does over torch's."""

import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from harness.ranks import pool

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"),
]


def as_launched(rank, num_ranks):
    """What a launcher would have put into the environment; the group itself is open already."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1"
    )
    os.environ.update(MASTER_PORT="29500", ACCELERATE_USE_CPU="true")


@contextlib.contextmanager
def side(name, **options):
    """Whose wrapper Accelerate finds."""
    with paceline.patch_torch(**options) if name == "ours" else contextlib.nullcontext():
        yield


def a_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def data():
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(96, 6, generator=generator), torch.randint(3, (96,), generator=generator)
    )


class Training:
    """A loop as Accelerate's guide writes it."""

    def __init__(self, handlers=(), accumulate=1):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, kwargs_handlers=list(handlers)
        )
        model = a_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, DataLoader(data(), batch_size=8)
        )
        self.losses = []

    def epoch(self):
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self

    def result(self):
        return [*self.losses, *torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()]


def train_with_accelerate(rank, num_ranks):
    from accelerate import DistributedDataParallelKwargs
    from accelerate.utils import DDPCommunicationHookType

    as_launched(rank, num_ranks)
    seen = {}
    for accumulate in (1, 3):
        for name in ("torch", "ours"):
            with side(name):
                training = Training(accumulate=accumulate).epoch()
                seen[name, accumulate] = training.epoch().result()
                seen[name, "is ours"] = isinstance(training.model, paceline.DistributedDataParallel)
                bare = training.accelerator.unwrap_model(training.model)
                seen[name, "unwrapped"] = type(bare) is nn.Sequential
    for name in ("torch", "ours"):
        handler = DistributedDataParallelKwargs(
            find_unused_parameters=True, bucket_cap_mb=1, comm_hook=DDPCommunicationHookType.FP16
        )
        with side(name):
            training = Training([handler]).epoch()
            seen[name, "hook"] = training.result()
            seen[name, "kwargs"] = (training.model.find_unused_parameters, training.model.bucket_bytes_cap)
    with side("ours", compression="powersgd"):
        training = Training().epoch()
        seen["codec"] = type(training.model.reduction).__name__
        seen["compressed"] = training.result()
    return seen


def test_training_accumulation_and_handlers():
    """Two epochs, with and without accumulation; torch's communication hook; ours, by an argument of the patch."""
    for seen in pool(2).run(train_with_accelerate, deadline_s=110):
        assert [seen[name, "is ours"] for name in ("torch", "ours")] == [False, True]
        assert seen["ours", "unwrapped"]
        for what in (1, 3, "hook"):
            assert seen["ours", what] == seen["torch", what], what
        assert seen["ours", 1] != seen["ours", 3]
        assert seen["ours", "kwargs"] == seen["torch", "kwargs"] == (True, 1 << 20)
        assert seen["codec"] == "PowerSGD"
        assert seen["compressed"] != seen["ours", 1][: len(seen["compressed"])]


def train_by_our_recipe(rank, num_ranks):
    """Windows counted by samples, and a rate that follows the global batch; both beside what Accelerate prepared."""
    from paceline_recipes import Curve, LargeMinibatch

    as_launched(rank, num_ranks)
    with side("ours"):
        training = Training()
    model, optimizer = training.model, training.optimizer
    recipe = LargeMinibatch(
        optimizer.optimizer, reference_batch=8, batch=8, accumulation=3, curve=Curve(total=8, warmup=2)
    )
    rates = []
    for batches in paceline.windows(training.loader, steps=3):
        with model.accumulate(batches, weight=lambda batch: len(batch[0])) as micro_batches:
            for x, y in micro_batches:
                training.accelerator.backward(nn.functional.cross_entropy(model(x), y))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        recipe.step()
    return rates, optimizer.param_groups[0]["lr"], micro_batches.total_weight


def test_our_recipe_and_windows():
    for rates, last, weight in pool(2).run(train_by_our_recipe, deadline_s=110):
        assert weight == 2 * 3 * 8
        assert rates == pytest.approx([0.02, 0.07])
        assert last == pytest.approx(6 * 0.02)  # 48 samples a step instead of 8


def resume(rank, num_ranks, folder):
    as_launched(rank, num_ranks)
    seen = {}
    for name in ("torch", "ours"):
        with side(name):
            straight = Training().epoch()
            straight.accelerator.save_state(f"{folder}/{name}")
            straight.accelerator.wait_for_everyone()
            seen[name, "files"] = sorted(path.name for path in Path(folder, name).iterdir())
            seen[name, "straight"] = straight.epoch().result()[len(straight.loader) :]
    for saved, loaded in (("torch", "torch"), ("ours", "ours"), ("torch", "ours")):
        with side(loaded):
            resumed = Training()
            resumed.accelerator.load_state(f"{folder}/{saved}")
            seen[saved, loaded] = resumed.epoch().result()
    return seen


def test_saving_and_resuming():
    """What is saved goes on bit by bit; what was saved with torch's class goes on with ours."""
    with tempfile.TemporaryDirectory() as folder:
        for seen in pool(2).run(resume, folder, deadline_s=110):
            assert seen["ours", "files"] == seen["torch", "files"]
            straight = seen["torch", "straight"]
            assert straight == seen["ours", "straight"]
            for pair in (("torch", "torch"), ("ours", "ours"), ("torch", "ours")):
                assert seen[pair] == straight, pair


def train_our_samples(rank, num_ranks):
    """Two epochs of shares that differ, then the rest of the second one from a state, with loaders of both kinds."""
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader
    from accelerate.state import AcceleratorState

    from paceline.data import GlobalBatch, GlobalShuffle
    from paceline.errors import ConfigurationError

    as_launched(rank, num_ranks)
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)

    def a_loader():
        shuffle = GlobalShuffle(45, GlobalBatch((3, 5)), rank=rank)
        return shuffle, DataLoader(torch.arange(45), batch_sampler=shuffle)

    bare = list(a_loader()[1])
    seen = {}
    for kind, prepare in (
        ("prepared", accelerator.prepare),
        ("alone", lambda loader: prepare_data_loader(loader, num_processes=1, process_index=0)),
    ):
        shuffle, loader = a_loader()
        loader = prepare(loader)
        first, second = ([batch.tolist() for batch in loader] for _ in range(2))
        assert first == [batch.tolist() for batch in bare]
        assert len(loader) == len(first)
        again, loader = a_loader()
        again.load_state_dict({**shuffle.state_dict(), "epoch": 1, "position": 16})
        seen[kind] = first, second, [batch.tolist() for batch in prepare(loader)]
    with pytest.raises(ConfigurationError, match="dispatch_batches=True"):
        prepare_data_loader(a_loader()[1], num_processes=2, dispatch_batches=True, put_on_device=True)
    return seen


def test_samples_that_are_divided_already_are_not_divided_again():
    """Every sample is trained once an epoch; a place that was loaded counts; also in one process."""
    ranks = pool(2).run(train_our_samples, deadline_s=110)
    for kind in ("prepared", "alone"):
        epochs = [
            sorted(sample for seen in ranks for batch in seen[kind][epoch] for sample in batch)
            for epoch in range(2)
        ]
        assert epochs == [[*range(45)], [*range(45)]]
        for seen in ranks:
            first, second, resumed = seen[kind]
            assert first != second
            assert resumed == second[2:]


def wrap_twice(rank, num_ranks):
    from paceline.errors import ConfigurationError

    as_launched(rank, num_ranks)
    with side("ours"):
        training = Training()
        wrapped = paceline.DistributedDataParallel(a_model())
        with pytest.raises(ConfigurationError, match="A module is synchronized by one wrapper"):
            training.accelerator.prepare(wrapped)
        training.epoch()  # the refusal leaves the group in order
    with side("torch"), pytest.raises(ConfigurationError, match="A module is synchronized by one wrapper"):
        Training().accelerator.prepare(wrapped)
    return len(training.losses)


def test_a_model_that_is_wrapped_already_is_refused():
    """Accelerate wraps what it is given; a wrapper around ours, of either class, would communicate twice."""
    assert pool(2).run(wrap_twice, deadline_s=110) == [6, 6]


def elastic_after_prepare(rank, num_ranks):
    from paceline.data import GlobalBatch, GlobalShuffle
    from paceline.errors import ConfigurationError

    as_launched(rank, num_ranks)
    shuffle = GlobalShuffle(range(48), GlobalBatch.of(8, num_ranks))
    with side("ours"):
        training = Training()
        for model, optimizer in (
            (training.model, torch.optim.SGD(training.model.parameters(), lr=0.1)),
            (paceline.DistributedDataParallel(a_model(), batch_sampler=shuffle), training.optimizer),
        ):
            with pytest.raises(
                ConfigurationError, match="was prepared by Accelerate, which counts the ranks once"
            ):
                paceline.Elastic(model, optimizer, sampler=shuffle)
    return True


def test_elastic_rejects_what_accelerate_has_prepared():
    assert pool(2).run(elastic_after_prepare, deadline_s=110) == [True, True]

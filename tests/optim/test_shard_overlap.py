"""Sharded steps behind the next forward: nothing reads a parameter before its step, whoever reads it, and how."""

import contextlib
import copy
import io
import os
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.models import digest, generator
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.comm.lane import ContinuedWork
from paceline.errors import PeerLostError, ProtocolError
from paceline.optim import behind_forward, full_state_dict, shard

pytestmark = pytest.mark.processes


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 700), nn.Tanh(), nn.Linear(700, 500), nn.Tanh(), nn.Linear(500, 3))


def batch(step, rank):
    return torch.randn(8, 40, generator=generator(step, rank))


@contextlib.contextmanager
def held_back():
    """Let no step begin before something waits for it. So a forgotten wait is an old parameter, in every run."""
    gate = threading.Event()
    complete = behind_forward.BehindForward.complete

    class Late(ContinuedWork):
        def __init__(self, lane, begin, *rest):
            def late():
                gate.wait(30)
                return begin()

            super().__init__(lane, late, *rest)

    def opened(holder, index, reads_gradient):
        if holder.has_outstanding:
            gate.set()
        complete(holder, index, reads_gradient)

    with (
        mock.patch.object(behind_forward, "ContinuedWork", Late),
        mock.patch.object(behind_forward.BehindForward, "complete", opened),
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}),
    ):
        yield gate


def _saved(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return list(torch.load(file, weights_only=True).values())


def _seen_by_an_extension(model):
    """Return what code finds that bypasses torch's functions, and waits for nothing."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.detach().clone() for p in model.parameters()]


READERS = {
    "forward": lambda model, _: [model.module(batch(90, 0))],
    "evaluation": lambda model, _: [
        model.module.eval()(batch(90, 0)),
        model.module.train() and torch.ones(1),
    ],
    "a layer": lambda model, _: [model.module[2](torch.ones(1, 700))],
    "a function": lambda model, _: [nn.functional.linear(torch.ones(1, 40), model.module[0].weight)],
    "a method": lambda model, _: [model.module[4].weight.norm(), model.module[0].bias.sum()],
    "data": lambda model, _: [model.module[2].weight.data.clone()],
    "numpy": lambda model, _: [torch.from_numpy(model.module[0].weight.detach().numpy().copy())],
    "state_dict": lambda model, _: _saved(model),
    "a copy": lambda model, _: list(copy.deepcopy(model.module).parameters()),
    "an average": lambda model, _: [torch.zeros(500, 700).lerp(model.module[2].weight, 0.5)],
    "flush": lambda model, _: model.flush() or _seen_by_an_extension(model),
    "the state": lambda _, optimizer: [torch.tensor(full_state_dict(optimizer) != {})],
    "clipping": lambda model, _: [model.clip_grad_norm_(1.0)],
}


def readers(rank, num_ranks, kind):
    """After each step something else reads first. Return what differed from the plain optimizer."""
    make, wrong = getattr(torch.optim, kind), []
    with held_back() as gate:
        group = dist.new_group(backend="gloo")
        models = [
            DistributedDataParallel(net(), process_group=group, overlap_forward=on)
            for on in (False, "always")
        ]
        groups = [
            [
                {"params": [p for p in model.parameters() if p.dim() == 2]},
                {"params": [p for p in model.parameters() if p.dim() != 2], "lr": 0.02},
            ]
            for model in models
        ]
        optimizers = [make(each, lr=0.01) for each in groups]
        shard(optimizers[1], models[1])
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
        for step, (name, read) in enumerate({**READERS, "again": READERS["forward"]}.items()):
            found = []
            for model, optimizer, schedule in zip(models, optimizers, schedules, strict=True):
                optimizer.zero_grad()
                model(batch(step, rank)).square().mean().backward()
                gate.clear()
                optimizer.step()
                if model is models[1] and not model.forward_overlap.has_outstanding:
                    wrong.append((name, "not deferred"))
                schedule.step()
                (optimizer if step % 2 else model).zero_grad(set_to_none=step % 3 > 0)
                found.append(digest([each.detach() for each in read(model, optimizer)]))
            if found[0] != found[1] and name != "clipping":
                wrong.append(name)
        if digest(list(models[0].parameters())) != digest(list(models[1].parameters())):
            wrong.append("parameters at the end")
        if any(type(p) is not nn.Parameter for p in models[1].parameters()):
            wrong.append("a class that was not given back")
    return wrong


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_every_reader_waits(kind):
    """Steps begin when something waits; each way of reading finds the plain optimizer's bits."""
    assert pool(2).run(readers, kind) == [[]] * 2


def modules_wait_for_their_own(rank, num_ranks):
    """Return which layers were under way when each layer's forward began."""
    seen = []
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}):
        group = dist.new_group(backend="gloo")
        model = DistributedDataParallel(
            net(), process_group=group, overlap_forward="always", bucket_cap_mb_list=[0.001]
        )
        optimizer = shard(torch.optim.AdamW(model.parameters(), lr=0.01), model)
        layers = [model.module[place] for place in (0, 2, 4)]
        is_held = model.forward_overlap.is_outstanding
        for step in range(4):
            handles = []
            if step == 3:
                handles = [
                    layer.register_forward_pre_hook(
                        lambda *_: seen.append([is_held(each.weight) for each in layers])
                    )
                    for layer in layers
                ]
            optimizer.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            for handle in handles:
                handle.remove()
    return seen


def test_a_module_waits_for_its_own_parameters():
    """The first layer's forward begins while the steps of the layers behind it are under way."""
    for seen in pool(2).run(modules_wait_for_their_own):
        assert seen == [[False, True, True], [False, False, True], [False, False, False]]


def fails(rank, num_ranks):
    """An optimizer that raises behind the forward, on one rank: reads go on raising, here and there."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}):
        group = dist.new_group(backend="gloo")
        model = DistributedDataParallel(net(), process_group=group, overlap_forward="always")
        optimizer = shard(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    model(batch(0, rank)).square().mean().backward()
    told = []
    with (
        mock.patch.object(torch.optim.AdamW, "_init_group", side_effect=ValueError("broken"))
        if rank
        else (contextlib.nullcontext())
    ):
        optimizer.step()
        if rank:
            for _ in range(2):
                try:
                    model.module[0].weight.sum()
                except (ValueError, ProtocolError) as error:
                    told.append(f"{type(error).__name__} {error}")
    if rank:
        os._exit(0)
    for _ in range(2):
        with pytest.raises((PeerLostError, ProtocolError)):
            model.module[0].weight.sum()
    return told


def test_a_half_made_step_is_never_read():
    """The rank whose optimizer raised hears that, the other one that its peer is lost, and both at every read."""
    first, second = pool(2).outcomes(fails)
    assert first.clean, first.story()
    assert second.exit_code == 0

"""Each rank's own part of a sharded optimizer's state, written and read by torch's distributed checkpoints."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from harness.models import digest
from harness.ranks import pool
from optim.test_shard import ELEMENTWISE, MOVED, WHOLE, alike, hosts, loss_of, pair, train
from paceline.optim import full_state_dict, shard_state, sharded_state_dict, shares
from paceline.optim.shard_parts import HeldParts

KINDS = {**MOVED, "sgd": ELEMENTWISE["sgd"], "adagrad": ELEMENTWISE["adagrad"]}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_boxes_are_the_runs_of_any_memory(order):
    """Every run of a tensor with permuted strides, written box by box, is that run's elements and no others."""
    shape = (3, 1, 4, 5)
    laid = torch.empty([shape[dim] for dim in order])
    whole = laid.permute([order.index(dim) for dim in range(4)])
    elements = torch.arange(60.0)
    for start, stop in itertools.combinations(range(0, 61, 3), 2):
        held = HeldParts.of_runs(
            [
                shard_state.OwnPart(torch.nn.Parameter(whole), shares.Part(0, *run), is_whole=False, kept={})
                for run in ((start, stop - 1), (stop - 1, stop))
            ],
            elements[start:stop],
        )
        laid.fill_(-1)
        for item in held.__create_write_items__("name", held):
            chunk = item.tensor_data.chunk
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            assert (whole[box] == -1).all()
            whole[box] = held.__get_tensor_shard__(item.index)
        expected = torch.full((60,), -1.0)
        expected[start:stop] = elements[start:stop]
        assert torch.equal(laid.view(-1), expected)
        assert len(held.boxes) <= 2 * 7


def save_parts(rank, num_ranks, folder, backend):
    """Save models and optimizers of both kinds after three steps, and what the whole state is."""
    with hosts(backend, num_ranks):
        for name, make in KINDS.items():
            models, optimizers = pair(make, dist.new_group(backend=backend))
            train(models, optimizers, range(3), rank)
            state = {
                "model": models[1].module.state_dict(),
                "ours": sharded_state_dict(optimizers[1], models[1]),
                "plain": get_optimizer_state_dict(models[0].module, optimizers[0]),
            }
            if name == "adam":
                saving = dcp.async_save(state, checkpoint_id=f"{folder}/{name}")
                train(models, optimizers, [3], rank)  # changes the state meanwhile
                saving.result()
            else:
                dcp.save(state, checkpoint_id=f"{folder}/{name}")


def load_parts(rank, num_ranks, folder, backend):
    """Load what was sharded and what was plain into both kinds, and train on. Return what differs."""
    wrong = []
    with hosts(backend, num_ranks):
        for (name, make), key in itertools.product(KINDS.items(), ("ours", "plain")):
            place = f"{folder}/{name}"
            saved = dcp.FileSystemReader(place).read_metadata()
            models, (plain, sharded) = pair(make, dist.new_group(backend=backend), seed=5)
            for model, optimizer in zip(models, (plain, sharded), strict=True):
                state = {
                    "model": model.module.state_dict(),
                    key: sharded_state_dict(optimizer, model, saved, key),
                }
                dcp.load(state, checkpoint_id=place)
                model.module.load_state_dict(state["model"])
                optimizer.load_state_dict(state[key])
            whole = full_state_dict(sharded)
            if whole is not None and not alike(whole, plain.state_dict()):
                wrong.append((name, key, "state"))
            train(models, (plain, sharded), range(3, 6), rank)
            if digest(list(models[0].parameters())) != digest(list(models[1].parameters())):
                wrong.append((name, key))
            # torch's own functions, with the plain optimizer. They want a state for each parameter: not for `unused`.
            theirs = make(
                [p for n, p in models[0].module.named_parameters() if n not in ("unused", "frozen")]
            )
            models[0].zero_grad()  # or torch's functions make no state
            if rank == 0 and name == "adam":
                state = {key: get_optimizer_state_dict(models[0].module, theirs)}
                del state[key]["param_groups"]
                dcp.load(state, checkpoint_id=place, no_dist=True)
                ours = sharded_state_dict(theirs, models[0], saved, key)
                if ours["state"].keys() != state[key]["state"].keys():
                    wrong.append((name, key, [*ours["state"]], [*state[key]["state"]]))
                    continue
                del ours["param_groups"]
                dcp.load({key: ours}, checkpoint_id=place, no_dist=True)
                for n, kept in state[key]["state"].items():
                    if any(not torch.equal(value, ours["state"][n][what]) for what, value in kept.items()):
                        wrong.append((n, "torch's functions"))
    return wrong


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("saving", "loading", "backend"), [(2, 3, "paceline"), pytest.param(3, 2, "gloo", marks=pytest.mark.lab)]
)
def test_parts_load_on_another_number_of_ranks(tmp_path, saving, loading, backend):
    """Each rank writes its own part. More or fewer ranks, and plain optimizers, go on with the same bits."""
    pool(saving).run(save_parts, str(tmp_path), backend)
    assert pool(loading).run(load_parts, str(tmp_path), backend) == [[]] * loading
    assert pool(1).run(load_parts, str(tmp_path), backend) == [[]]


def frozen(rank, num_ranks):
    """Freeze a parameter, save and load the state, and train the parameter again. Return what differs."""
    wrong = []
    for name in ("adagrad", "adam", "adafactor"):
        make = {**ELEMENTWISE, **WHOLE}[name]
        models, optimizers = pair(make, None)
        for phase, trains in enumerate((False, True, False, True)):
            if phase == 2:
                saved = [(full_state_dict(optimizers[1]), optimizers[0].state_dict())]
                dist.broadcast_object_list(saved, src=0)
                models, optimizers = pair(make, None)
            for model, optimizer in zip(models, optimizers, strict=True):
                model.module.frozen.requires_grad_(trains)
                if phase == 2:
                    optimizer.load_state_dict(copy.deepcopy(saved[0][model is models[0]]))
                for step in range(2):
                    optimizer.zero_grad()
                    rest = (model.module.frozen.square() * (step + rank)).sum() if trains else 0.0
                    (loss_of(model, step, rank) + rest).backward()
                    optimizer.step()
            whole = full_state_dict(optimizers[1])
            if whole is not None and not alike(whole, optimizers[0].state_dict()):
                wrong.append((name, phase, "state"))
            if digest(list(models[0].parameters())) != digest(list(models[1].parameters())):
                wrong.append((name, phase))
    return wrong


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
def test_the_state_of_a_frozen_parameter_waits():
    """It is saved, loaded, and divided when the parameter is trained again. Adagrad's is there from the start."""
    assert pool(2).run(frozen) == [[]] * 2

"""Every argument of the constructor, and what is set later, survives deepcopy and pickle."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from harness.models import digest, generator, random_batch, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.data import Balance, GlobalBatch, GlobalShuffle

pytestmark = pytest.mark.processes


class Net(nn.Module):
    """A body and a head; the large layer makes PowerSGD compress."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
        self.head = nn.Linear(64, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def weigh(x):
    return float(len(x))


def sampler():
    return GlobalShuffle(24, GlobalBatch((2, 4)))


def delayed(net):
    pairs = [("head.weight", net.head.weight)]
    return {"delay_all_reduce_named_params": pairs, "param_to_hook_all_reduce": net.head.bias}


ARGUMENTS = {
    "dim": {"dim": 1},
    "broadcast_buffers": {"broadcast_buffers": False},
    "bucket_cap_mb": {"bucket_cap_mb": 0.0001},
    "find_unused_parameters": {"find_unused_parameters": True},
    "check_reduction": {"check_reduction": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "delay_all_reduce_named_params": delayed,
    "param_to_hook_all_reduce": delayed,
    "mixed_precision": {"mixed_precision": _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.float32)},
    "skip_all_reduce_unused_params": {"skip_all_reduce_unused_params": True},
    "bucket_cap_mb_list": {"bucket_cap_mb_list": [0.0001, 0.01]},
    "batched_grad_copy": {"batched_grad_copy": True},
    "forward_sync_buffers": {"forward_sync_buffers": False},
    "lazy_bucket_allocation": {"lazy_bucket_allocation": True},
    "reduction": {"reduction": "adasum"},
    "compression": {"compression": "powersgd"},
    "weight": {"weight": weigh},
    "batch_sampler": lambda _: {"batch_sampler": sampler()},
    "balance": lambda _: {"batch_sampler": sampler(), "balance": Balance(gain_ratio=0.02)},
    "droppable": lambda net: {"droppable": [net.body]},
}
NOT_HERE = {
    "module": "what is copied",
    "device_ids": "of CUDA",
    "output_device": "of CUDA",
    "init_sync": "of the constructor",
    "process_group": "only the default one can be pickled",
    "device_mesh": "likewise",
    "overlap_forward": "needs groups of its own, which a copy cannot open by itself; gradients are the same",
}


def sum_up(state, bucket):
    """A hook that is told by its state, a tensor, what sums are divided by."""
    return (
        dist.all_reduce(bucket.buffer().div_(state), async_op=True)
        .get_future()
        .then(lambda done: done.value()[0])
    )


def add_one(_, named_buffers):
    for buffer in named_buffers.values():
        buffer.add_(1)


LATER = {
    "a hook": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "a hook and its group": lambda model: model.register_comm_hook(
        dist.group.WORLD, default_hooks.bf16_compress_hook
    ),
    "a hook and its state": lambda model: model.register_comm_hook(torch.tensor(3.0), sum_up),
    "torch's PowerSGD": lambda model: model.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1),
        powerSGD_hook.powerSGD_hook,
    ),
    "a built-in hook": lambda model: model._register_builtin_comm_hook(
        dist.BuiltinCommHookType.FP16_COMPRESS
    ),
    "a hook of buffers": lambda model: model._register_buffer_comm_hook(
        None, add_one, _BufferCommHookLocation.PRE_FORWARD
    ),
    "static graph": lambda model: model._set_static_graph(),
    "find_unused_parameters": lambda model: setattr(model, "find_unused_parameters", True),
    "no buffers": lambda model: setattr(model, "forward_sync_buffers", False),
    "no gradients": lambda model: setattr(model, "require_backward_grad_sync", False),
    "a frozen layer": lambda model: model.module.head.requires_grad_(False),
    "evaluation": nn.Module.eval,
}


def settings(model):
    """What a model was told, by name, as far as it does not refer to this model itself."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    setting = model._paceline_setting
    told = {field.name: getattr(setting, field.name) for field in dataclasses.fields(setting)}
    shares = told.pop("shares")
    told["balance"] = shares and (type(shares.sampler).__name__, repr(shares.balance))
    told = {**told, "find_unused_parameters": None, "static_graph": None}  # which follow the attributes
    told["reduction"] = (repr(told["reduction"]), type(told["reduction"]).__name__)
    told["droppable"] = [unit.name for unit in told["droppable"]]
    for each in ("parameters", "delayed"):
        told[each] = [names[id(parameter)] for parameter in told[each]]
    plain = {
        name: value for name, value in vars(model).items() if isinstance(value, bool | int | float | str)
    }
    plain.pop("_lazy_init_ran", None)
    hooks = [(hook, type(state)) for hook, state in model._comm_hooks]
    buffer_hook = model.buffer_hook and model.buffer_hook.buffer_comm_hook
    return told, plain, hooks, buffer_hook, model._paceline_hook_name


def plain_steps(model, rank):
    """Bits of the gradients and buffers of three steps with batches of another size on each rank."""
    bits = []
    for step in range(3):
        model.zero_grad()
        squares(model(random_batch(step, rank, shape=(2 + 2 * rank, 4)))).backward()
        bits.append(digest([*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]))
    return bits


def sampled_steps(models, shuffle):
    """The same of all steps of an epoch, for each model."""
    data = TensorDataset(torch.randn(24, 4, generator=generator(5)))
    bits = [[] for _ in models]
    for batches in shuffle.steps(DataLoader(data, batch_sampler=shuffle)):
        for model, own in zip(models, bits, strict=True):
            model.zero_grad()
            with model.accumulate(batches) as micro_batches:
                for (x,) in micro_batches:
                    squares(model(x)).backward()
            own.append(digest([p.grad for p in model.parameters()]))
    return bits


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def lost_arguments(rank, _num_ranks, how):
    """Arguments with which a copy was told something else, or trains in another way."""
    lost = []
    copied = {"deepcopy": copy.deepcopy, "pickle": pickled}[how]
    for name, options in ARGUMENTS.items():
        net = Net()
        given = options(net) if callable(options) else options
        model = DistributedDataParallel(net, **given)
        shuffle = given.get("batch_sampler")
        if shuffle is None:
            plain_steps(model, rank)
            model.zero_grad()
            other = copied(model)
            same = settings(model) == settings(other) and plain_steps(model, rank) == plain_steps(other, rank)
        elif how == "deepcopy":
            other = copy.deepcopy(model)  # of the same loader
            same = settings(model) == settings(other)
            first, second = sampled_steps([model, other], shuffle)
            same = same and first == second
        else:
            other, other_shuffle = pickled((model, shuffle))
            same = settings(model) == settings(other)
            same = same and sampled_steps([model], shuffle) == sampled_steps([other], other_shuffle)
        if not same:
            lost.append(name)
    return lost


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_every_argument_survives_a_copy(how):
    """The copy was told the same, and its gradients have the same bits."""
    assert pool(2).run(lost_arguments, how) == [[], []]


def test_every_argument_is_copied_here():
    """Whoever adds an argument adds it to the table above."""
    assert ARGUMENTS.keys() | NOT_HERE.keys() == set(inspect.signature(DistributedDataParallel).parameters)


def lost_settings(rank, _num_ranks, how):
    """What was set after the constructor, and is not so in a copy."""
    lost = []
    for name, act in LATER.items():
        model = DistributedDataParallel(Net())
        act(model)
        if not name.startswith("static"):
            plain_steps(model, rank)
            model.zero_grad()
        other = {"deepcopy": copy.deepcopy, "pickle": pickled}[how](model)
        same = settings(model) == settings(other)
        steps = plain_steps(model, rank), plain_steps(other, rank)
        if name == "torch's PowerSGD":  # its copy begins again, as buckets do
            steps = model._comm_hooks[0][1].iter - 3, other._comm_hooks[0][1].iter
        if not same or steps[0] != steps[1]:
            lost.append(name)
    return lost


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_what_is_set_later_survives_a_copy(how):
    """Hooks of gradients and buffers, and attributes that scripts set."""
    assert pool(2).run(lost_settings, how) == [[], []]


def of_another_rank(rank, _num_ranks):
    """Whether rank 0's pickle, loaded on every rank, hands out each rank's own samples."""
    shuffle = sampler()
    model = DistributedDataParallel(Net(), batch_sampler=shuffle)
    parcel = [pickle.dumps((model, shuffle)) if rank == 0 else None]
    dist.broadcast_object_list(parcel)
    other, other_shuffle = pickle.loads(parcel[0])
    return sampled_steps([model], shuffle) == sampled_steps([other], other_shuffle)


def test_a_pickle_of_another_rank_hands_out_this_ranks_samples():
    """A model that rank 0 saved with its sampler trains on all ranks as the original."""
    assert pool(2).run(of_another_rank) == [True, True]

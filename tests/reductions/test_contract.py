"""What every reduction keeps, and the one that the guide shows: docs/guide/write-a-reduction.md."""

from __future__ import annotations

import copy
import inspect
import re

import pytest
import torch

from harness.models import Mlp, digest, generator, squares
from harness.ranks import pool
from harness.terminal import REPOSITORY
from paceline import DistributedDataParallel
from paceline.reductions import HookReduction, Reduction
from paceline.reductions.by_name import BY_NAME, COMPRESSIONS
from paceline.reductions.ordered_mean import LogicalMean
from paceline_lossy import BoundedLoss, compile_all
from paceline_recipes.noise_scale import GradientNoiseScale

GUIDE = REPOSITORY / "docs/guide/write-a-reduction.md"


def of_the_guide():
    """The guide's class, from the block that its readers copy."""
    (source,) = re.findall(
        r'^```python title="median.py"\n(.*?)^```$', GUIDE.read_text(), re.MULTILINE | re.DOTALL
    )
    names = {"__name__": "median"}
    exec(source, names)
    return names["Median"]()


def hooked():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return HookReduction(None, allreduce_hook, overlaps=True)


MADE = {
    **BY_NAME,
    **COMPRESSIONS,
    "bounded_loss": lambda: BoundedLoss(0.0),
    "hook": hooked,
    "logical": lambda: LogicalMean(2),
    "noise scale": GradientNoiseScale,
    "the guide's": of_the_guide,
}


def step(model, rank, number):
    model.zero_grad()
    squares(model(torch.randn(4, 8, generator=generator(rank, number)))).backward()
    return digest(each.grad for each in model.parameters())


def drop_a_step(model, rank):
    """Run a backward that fails on every rank, after its first buckets have left."""

    def fail(_):
        raise ValueError("on purpose")

    batch = torch.randn(4, 8, generator=generator(rank, 99)).requires_grad_()
    batch.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        squares(model(batch)).backward()


def wrapped(module, make):
    return DistributedDataParallel(copy.deepcopy(module), reduction=make(), bucket_cap_mb=1e-4)


def kept(rank, _num_ranks):
    """By reduction: its words, and digests of steps, of the same behind a dropped step, and behind a checkpoint."""
    found = {}
    for name, make in MADE.items():
        torch.manual_seed(0)
        plain = Mlp()
        model, dropping, before, resumed = (wrapped(plain, make) for _ in range(4))
        steps = [step(model, rank, number) for number in range(4)]
        others = []
        for number in range(4):
            if number == 2:
                drop_a_step(dropping, rank)
            others.append(step(dropping, rank, number))
        again = [step(before, rank, number) for number in range(2)]
        resumed.reduction.load_state_dict(before.reduction.state_dict())
        again += [step(resumed, rank, number) for number in range(2, 4)]
        found[name] = repr(model.reduction), steps, others, again
    return found


@pytest.mark.processes
@pytest.mark.compiles
def test_ranks_agree_a_dropped_step_leaves_no_trace_and_a_checkpoint_goes_on():
    """Bitwise, in each step."""
    compile_all()
    first, second = pool(2).run(kept)
    for name, (words, steps, dropping, resumed) in first.items():
        assert (words, steps) == second[name][:2], name
        assert steps == dropping, f"{name}: a dropped step"
        assert steps == resumed, f"{name}: a checkpoint"


def test_the_interface_has_at_most_four_flags_and_nine_methods():
    flags = [name for name in vars(Reduction)["__annotations__"] if not name.startswith("_")]
    methods = [
        name for name, value in vars(Reduction).items() if inspect.isfunction(value) and name[0] != "_"
    ]
    assert len(flags) <= 4, flags
    assert len(methods) <= 9, methods
    page = GUIDE.read_text()
    assert [name for name in flags + methods if f"`{name}`" not in page] == []

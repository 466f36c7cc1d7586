"""docs/reference/combinations.md names every pair of options that exclude each other, and no other pair."""

from __future__ import annotations

import itertools
import re
import warnings
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from harness.figures import tables
from harness.ranks import pool
from harness.terminal import REPOSITORY
from paceline import DistributedDataParallel
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.errors import ServerLostError
from paceline_lossy import BoundedLoss
from paceline_recipes import GradientNoiseScale
from paceline_servers import ParameterServers

PAGE = REPOSITORY / "docs/reference/combinations.md"
_LOW = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

# The constructor's arguments, made anew for each model. Without any: a property of the model or of the loop.
OPTIONS = {
    "overlap_forward": lambda: {"overlap_forward": "always"},
    "bucket_cap_mb_list": lambda: {"bucket_cap_mb_list": [1]},
    "droppable": lambda: {"droppable": ["0"]},
    "skip_all_reduce_unused_params": lambda: {"skip_all_reduce_unused_params": True},
    "find_unused_parameters": lambda: {"find_unused_parameters": True},
    "static_graph": lambda: {"static_graph": True},
    'compression="bf16"': lambda: {"compression": "bf16"},
    'compression="auto"': lambda: {"compression": "auto"},
    'reduction="adasum"': lambda: {"reduction": "adasum"},
    "BoundedLoss": lambda: {"reduction": BoundedLoss(0.01)},
    "ParameterServers": lambda: {"reduction": ParameterServers(["127.0.0.1:1"])},  # nobody listens there
    "GradientNoiseScale": lambda: {"reduction": GradientNoiseScale()},
    "mixed_precision": lambda: {"mixed_precision": _LOW},
    "process_group=[...]": lambda: {"process_group": [dist.new_group(), dist.new_group()]},
    "init_sync=False": lambda: {"init_sync": False},
    "weight": lambda: {"weight": len},
    "batch_sampler": lambda: {"batch_sampler": GlobalShuffle(64, GlobalBatch((4, 4)))},
    "sparse gradients": dict,
    "register_comm_hook": dict,
    "join()": dict,
    "no_sync()": dict,
}
# Two of these never go together: a model has one reduction.
REDUCTIONS = {
    'compression="bf16"',
    'compression="auto"',
    'reduction="adasum"',
    "BoundedLoss",
    "ParameterServers",
    "GradientNoiseScale",
}


def _hook(_state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _refusal(names):
    """What a model with these options says when it is made, or takes a step; empty if nothing."""
    arguments = {key: value for name in names for key, value in OPTIONS[name]().items()}
    module = nn.Sequential(nn.Embedding(4, 3, sparse="sparse gradients" in names), nn.Linear(3, 1))
    try:
        model = DistributedDataParallel(module, **arguments)
        if "register_comm_hook" in names:
            model.register_comm_hook(None, _hook)
        with ExitStack() as around:
            for name in names:
                if name.endswith("()"):
                    around.enter_context(getattr(model, name[:-2])())
            model(torch.tensor([0, 1])).sum().backward()
    except ServerLostError:
        return ""
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_pairs(_rank, _num_ranks):
    warnings.simplefilter("ignore")
    alone = {name: _refusal([name]) for name in OPTIONS}
    pairs = (pair for pair in itertools.combinations(OPTIONS, 2) if not REDUCTIONS.issuperset(pair))
    refusals = {pair: _refusal(pair) for pair in pairs}
    return {
        frozenset(pair)
        for pair, words in refusals.items()
        if words and words not in {alone[name] for name in pair}
    }


def pairs_of_the_page():
    """From each row of its first table, the pairs that exclude each other."""
    table = tables(PAGE.read_text())[0]
    assert [row[0].strip("`") for row in table.rows] == list(OPTIONS)
    rows = {row[0].strip("`"): set(re.findall(r"`([^`]+)`", row[1])) for row in table.rows}
    one_way = {(name, other) for name, others in rows.items() for other in others}
    assert one_way == {(other, name) for name, other in one_way}, "a pair stands in one of its two rows only"
    return {frozenset(pair) for pair in one_way}


@pytest.mark.lab
@pytest.mark.processes
def test_the_page_names_the_pairs_that_are_refused():
    expected = pairs_of_the_page()
    for refused in pool(2).run(refused_pairs):
        assert refused == expected, sorted(map(sorted, refused ^ expected))

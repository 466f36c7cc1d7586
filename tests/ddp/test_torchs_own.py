"""Two of torch's own tests of its class, run with ours: their source is that of the installed torch.

What differs on purpose is a row of `docs/reference/differences.md`: buckets follow the first backward's order, also if
unused parameters are looked for; and on one host a sum is an event of the group in shared memory.
"""

import ast
import copy
import textwrap
import unittest
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's tests call it so
from torch import nn
from torch.autograd import DeviceType

from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

SOURCE = Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"
NAMES = {
    "test_different_graph_across_ranks": ("_test_different_graph_across_ranks",),
    "test_ddp_profiling_torch_profiler": ("_test_ddp_profiling", "get_profiling_event"),
}
ON_THE_CPU = {
    "torch.cuda.set_device(self.rank)": "pass",
    ".cuda(self.rank)": "",
    "device=self.rank": "device='cpu'",
    "device_ids=[self.rank]": "device_ids=None",
    "activities=[cpu_act, cuda_act]": "activities=[cpu_act]",
    "torch.nn.parallel.DistributedDataParallel": "DDP",
}


class Case(unittest.TestCase):
    """What torch's tests call `self`."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def assertEqual(self, first, second, *words):  # noqa: N802  unittest's name
        """Compare tensors as torch's own class does."""
        if isinstance(first, torch.Tensor):
            torch.testing.assert_close(first, second)
        else:
            super().assertEqual(first, second, *words)  # noqa: PT009  the base class has it


OURS = {
    "dist.get_backend()": "'paceline'",
    'base_model._get_ddp_logging_data().get("has_rebuilt_buckets", 0)': "False",
}


def torchs(name, ddp_class):
    """The functions of a test, for CPUs: its source names devices by rank."""
    found = {}
    changes = {**ON_THE_CPU, **(OURS if ddp_class is DistributedDataParallel else {})}
    names = {
        "DDP": ddp_class,
        "DeviceType": DeviceType,
        "F": F,
        "copy": copy,
        "dist": dist,
        "nn": nn,
        "torch": torch,
    }
    text = SOURCE.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name in (name, *NAMES[name]):
            source = textwrap.dedent(
                "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])
            )
            for before, after in changes.items():
                source = source.replace(before, after)
            exec(compile(source, str(SOURCE), "exec"), names)
            found[node.name] = names[node.name]
    return found


def run(rank, _num_ranks, name, side):
    """Run a test of torch's with a class. It raises what the test asserts."""
    warnings.simplefilter("ignore")
    ddp_class = nn.parallel.DistributedDataParallel if side == "torch's" else DistributedDataParallel
    functions = torchs(name, ddp_class)
    case = type("OnTheCpu", (Case,), functions)(rank)
    getattr(case, name)()


@pytest.mark.parametrize("side", ["torch's", "ours"])
@pytest.mark.parametrize("name", NAMES)
def test_torchs_own(name, side):
    """It passes with torch's class, so it can be trusted on CPUs; and with ours."""
    pool(2).run(run, name, side)

"""Pages of the reference that are not made from docstrings name what the source has, and nothing else."""

from __future__ import annotations

import ast
import inspect
import re

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from harness.figures import tables
from harness.terminal import REPOSITORY
from paceline import DistributedDataParallel

REFERENCE = REPOSITORY / "docs/reference"
ROOTS = ("src", "adasum/src", "lab/src", "lossy/src", "plan/src", "recipes/src", "servers/src", "svm/src")
SOURCES = [path for root in ROOTS for path in (REPOSITORY / root).rglob("*.py")]


def names_in_first_column(table):
    return [name for row in table.rows for name in re.findall(r"`([^`]+)`", row[0])]


def test_every_environment_variable_is_on_the_page():
    in_source = {
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"PACELINE_[A-Z_]+", node.value)
    }
    users, set_by_paceline, _ = tables((REFERENCE / "environment.md").read_text())
    on_page = names_in_first_column(users) + names_in_first_column(set_by_paceline)
    assert sorted(on_page) == sorted(in_source)


def test_every_argument_that_torch_does_not_have_is_on_the_page():
    added = inspect.signature(DistributedDataParallel).parameters.keys() - _arguments_of_torch()
    arguments, *_ = tables((REFERENCE / "differences.md").read_text())
    assert arguments.header[0] == "argument"
    assert set(names_in_first_column(arguments)) == added


def _arguments_of_torch():
    """Those of the installed torch, and those that newer ones have: Paceline takes them with older ones, too."""
    newer = {
        "skip_all_reduce_unused_params",
        "bucket_cap_mb_list",
        "batched_grad_copy",
        "lazy_bucket_allocation",
    }
    newer |= {"init_sync", "forward_sync_buffers", "device_mesh"}
    return inspect.signature(TorchDDP).parameters.keys() | newer

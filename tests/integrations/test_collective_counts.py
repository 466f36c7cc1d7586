"""Collectives are counted under `paceline run`; a script's calls stay what they are."""

import pytest

from harness.terminal import paceline

pytestmark = pytest.mark.processes

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(3)
dist.all_reduce(x)  # a tensor is the last argument, and is not compared with anything
dist.all_reduce(x, dist.ReduceOp.SUM, None, True).wait()
dist.all_reduce(x, async_op=True).wait()
print(x.tolist(), flush=True)
dist.destroy_process_group()
"""


def test_every_way_to_call_a_collective_works(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = paceline("run", "--nproc-per-node", "2", "train.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("[8.0, 8.0, 8.0]") == 2

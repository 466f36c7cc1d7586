"""`paceline run --min-ranks` with --tee, --log-dir and --hang-after: who writes what, and who hangs, after a loss."""

import os
import re
import signal

import pytest

from harness.terminal import DEADLINE_S, started

TRAINS = """
import os, signal, time
import torch, torch.distributed as dist
import paceline
from paceline.data import GlobalBatch, GlobalShuffle
dist.init_process_group("gloo")
data = [(torch.ones(4), torch.ones(1))] * 72
shuffle = GlobalShuffle(data, GlobalBatch.of(6, dist.get_world_size()))
net = torch.nn.Linear(4, 1)
model = paceline.DistributedDataParallel(net, batch_sampler=shuffle)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
elastic = paceline.Elastic(model=model, optimizer=optimizer, sampler=shuffle)
print("in after", elastic.step)
for batches in elastic.steps(torch.utils.data.DataLoader(data, batch_sampler=shuffle)):
    num_changes = len(model.membership.history)
    if (elastic.step, dist.get_rank(), num_changes) == (3, 0, 0):
        print("dies", os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if elastic.step == 8 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        print("hangs", os.getpid(), flush=True)
        time.sleep(600)
    with model.accumulate(batches) as micro_batches:
        for x, y in micro_batches:
            (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", elastic.step)
"""


@pytest.mark.processes
def test_a_rank_that_hangs_after_a_loss_is_named_by_its_new_number_and_each_start_has_its_logs(tmp_path):
    """Rank 0 of three dies; the last one, rank 1 from then on, hangs, and is killed by hand: the others end."""
    (tmp_path / "trains.py").write_text(TRAINS)
    words = [
        "paceline",
        "run",
        "--nproc-per-node",
        "3",
        "--min-ranks",
        "2",
        "--hang-after",
        "1",
        "--tee",
        "1",
    ]
    with started([*words, "--redirects", "2", "--log-dir", "logs", "trains.py"], tmp_path) as process:
        told = ""
        for line in process.stderr:
            told += line
            if named := re.search(r"rank 1 \(process (\d+)\) sleeps", line):
                os.kill(int(named[1]), signal.SIGKILL)
                break
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, told + err
    assert "hang: rank 1 is missing." in told
    logs = {
        str(file.relative_to(file.parents[2])): file for file in tmp_path.glob("logs/*/attempt_*/*/std*.log")
    }
    dies, hangs = (logs[f"attempt_0/{local_rank}/stdout.log"].read_text() for local_rank in (0, 2))
    assert "dies" in dies
    assert f"hangs {named[1]}" in hangs
    assert "trained 12" in logs["attempt_0/1/stdout.log"].read_text()
    assert "attempt_1/0/stdout.log" in logs  # of the first replacement
    for name in ("[default0]:dies", "[default2]:hangs", "[default1]:trained 12"):
        assert name in out

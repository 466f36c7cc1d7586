"""`paceline plan` as a job on emulated hosts: their link is measured, and is the one that is planned for."""

from __future__ import annotations

import json

import pytest

from harness.terminal import paceline

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import paceline_plan
from paceline import DistributedDataParallel as DDP

dist.init_process_group("gloo")  # with what `paceline plan` leaves of a launcher's variables: a group of one
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if dist.get_rank() == 0 and sys.argv[1:]:
    paceline_plan.record_workload(sys.argv[1], num_steps=1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("possible")
def test_the_link_between_the_hosts_is_measured(tmp_path):
    """Once by the hosts together; then rank 0 records the script by itself and predicts."""
    (tmp_path / "train.py").write_text(SCRIPT)
    hosts = ["--hosts", "2", "--ranks-per-host", "2,1", "--rate", "50Mbit", "--offload"]
    words = ["-m", "paceline", "plan", "--to", "4", "--steps", "1", "--latency", "1ms", "train.py"]
    done = paceline("emulate", *hosts, "--", *words, cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    record = json.loads((tmp_path / "paceline-report" / "plan.json").read_text())
    links = record["links"]
    assert (links["rate"]["from"], links["latency"]["from"]) == ("measured", "given")
    assert (links["measured"]["num_hosts"], links["measured"]["ranks_per_host"]) == (2, 2)
    # And not the 25 Gbit/s that would be assumed; on a busy machine it may be anything less.
    assert 0 < links["rate"]["bytes_per_s"] < 2 * 50e6 / 8
    assert done.out.count("link between hosts: ") == 1  # rank 0 alone tells
    assert (
        "(measured), 1 ms a round (given); measured over TCP between the 2 hosts here, which share a machine"
        in done.out
    )


@pytest.mark.usefixtures("possible")
def test_a_trace_says_how_ranks_lay_on_unequal_hosts(tmp_path):
    """A rank knows its own host's number only: the launcher tells it the others'."""
    (tmp_path / "train.py").write_text(SCRIPT)
    hosts = ["--hosts", "2", "--ranks-per-host", "2,1"]
    done = paceline("emulate", *hosts, "--", "train.py", "run.jsonl", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    header = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert sorted(header["ranks_of_host"]) == [1, 2]

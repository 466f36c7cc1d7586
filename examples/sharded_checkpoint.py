"""Save and load a sharded optimizer by `torch.distributed.checkpoint`, on any number of ranks.

    paceline run --nproc-per-node 2 examples/sharded_checkpoint.py
    paceline run --nproc-per-node 1 examples/sharded_checkpoint.py

The second run goes on from the folder `checkpoint` that the first one wrote.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from paceline import DistributedDataParallel
from paceline.optim import shard, sharded_state_dict

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 512))
optimizer = shard(torch.optim.AdamW(model.parameters(), lr=3e-3), model)

if Path("checkpoint").exists():
    saved = dcp.FileSystemReader("checkpoint").read_metadata()
    state = {"model": model.module.state_dict(), "optimizer": sharded_state_dict(optimizer, model, saved)}
    dcp.load(state, checkpoint_id="checkpoint")
    optimizer.load_state_dict(state["optimizer"])
    print(f"rank {dist.get_rank()} goes on, one of {dist.get_world_size()} ranks")

for _step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()

state = {"model": model.module.state_dict(), "optimizer": sharded_state_dict(optimizer, model)}
dcp.save(state, checkpoint_id="checkpoint")
dist.destroy_process_group()

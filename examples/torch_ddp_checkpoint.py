"""Save while training goes on, and resume at the exact sample, with torch's DDP and `async_save`.

    torchrun --nproc-per-node 2 examples/torch_ddp_checkpoint.py 24
    torchrun --nproc-per-node 3 examples/torch_ddp_checkpoint.py

The first run stops after step 24. The second one goes on from the checkpoint of step 20, on another number of ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline.data import GlobalBatch, GlobalShuffle

stop_at = int(sys.argv[1]) if len(sys.argv) > 1 else -1
dist.init_process_group("gloo")
num_ranks = dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(960, 8), torch.randint(0, 3, (960,)))
shuffle = GlobalShuffle(data, GlobalBatch.of(60, num_ranks))
loader = DataLoader(data, batch_sampler=shuffle)
for_saving = dist.new_group()  # a thread communicates over it while the ranks train
model = DistributedDataParallel(torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters())
step = 0


def state() -> dict[str, Any]:
    """Return all that a resumed run needs."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "shuffle": shuffle.state_dict(), "step": step}


complete = sorted(Path("torch_checkpoints").glob("*/.metadata"))  # torch writes this file last
if complete:
    saved = state()
    dcp.load(saved, checkpoint_id=complete[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    shuffle.load_state_dict(saved["shuffle"])
    step = saved["step"]
if dist.get_rank() == 0:
    print(f"{num_ranks} ranks begin after step {step}")

saving = None
for _epoch in range(shuffle.epoch, 3):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
        (loss * num_ranks / shuffle.batch.size).backward()  # the mean over the batch, whatever a rank's part
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            if saving is not None:
                saving.result()
            saving = dcp.async_save(
                state(), checkpoint_id=f"torch_checkpoints/{step:06d}", process_group=for_saving
            )
        if step == stop_at:
            break
    if step == stop_at:
        break
if saving is not None:
    saving.result()
if dist.get_rank() == 0:
    print(f"ends after step {step}")
dist.destroy_process_group()

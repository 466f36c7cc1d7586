"""A Hugging Face `transformers` GPT-2, tiny, trained from scratch on text that ships with Python.

    torchrun --nproc-per-node=2 examples/transformers_gpt2.py

To train with torch's class instead, change only the import of DDP.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from pydoc_data.topics import topics

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

from paceline import DistributedDataParallel as DDP

BLOCK_SIZE = 48


def main() -> None:
    """Train. Write a checkpoint and the loss curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", default="", help="folder for checkpoint and losses")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed + rank)

    text = torch.tensor(list("".join(topics.values()).encode()), dtype=torch.long)
    rows = text[: len(text) // BLOCK_SIZE * BLOCK_SIZE].view(-1, BLOCK_SIZE)[:2000]
    data = TensorDataset(rows)
    sampler = DistributedSampler(data, seed=options.seed, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    config = GPT2Config(
        vocab_size=256, n_positions=BLOCK_SIZE, n_embd=48, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = DDP(GPT2LMHeadModel(config))
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=2e-3)
        if options.optimizer == "adamw"
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )

    losses: list[float] = []
    epoch = 0
    while len(losses) < options.steps:
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if rank == 0 and len(losses) % 10 == 1:
                print(f"step {len(losses)}: loss {losses[-1]:.4f}", flush=True)
            if len(losses) == options.steps:
                break
        epoch += 1

    if options.out:
        if rank == 0:
            model.module.save_pretrained(f"{options.out}/model")
        Path(options.out, f"losses{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

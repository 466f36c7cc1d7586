"""A small GPT in the style of nanoGPT's training script, on text that ships with Python.

    torchrun --nproc-per-node=2 examples/nanogpt_style.py

Gradient accumulation sets `model.require_backward_grad_sync` instead of using `no_sync()`, as that script does.
To train with torch's class instead, change only the import of DDP.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from paceline import DistributedDataParallel as DDP


class CausalSelfAttention(nn.Module):
    """Attention of each position to itself and the positions before it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a layer norm before it and a residual connection around it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Gpt(nn.Module):
    """A byte-level GPT whose output layer is its embedding."""

    def __init__(self, width: int, num_heads: int, num_layers: int, block_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(self._initialize)
        self.tokens.weight = self.head.weight

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits, and the mean loss where targets are given."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Return the learning rate: a linear warm-up, then a cosine to a tenth."""
    warm_up = max(1, num_steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, num_steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def main() -> None:
    """Train. Write a checkpoint and the loss curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-steps in a step, over all ranks")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--out", default="", help="folder for checkpoint and losses")
    options = parser.parse_args()

    is_parallel = int(os.environ.get("RANK", "-1")) != -1
    rank, num_ranks = 0, 1
    if is_parallel:
        dist.init_process_group("gloo")
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if options.accumulate % num_ranks:
        raise SystemExit(f"--accumulate {options.accumulate} cannot be shared by {num_ranks} ranks")
    num_micro_steps = options.accumulate // num_ranks
    torch.set_num_threads(1)
    torch.manual_seed(options.seed + rank)

    text = torch.tensor(list("".join(topics.values()).encode()), dtype=torch.long)
    block_size, batch_size = 64, 8
    model: nn.Module = Gpt(width=64, num_heads=4, num_layers=2, block_size=block_size)
    if options.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
                {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
        )
        peak = 3e-3
    else:
        optimizer, peak = torch.optim.SGD(model.parameters(), momentum=0.9), 0.1
    if is_parallel:
        model = DDP(model)
    source = torch.Generator().manual_seed(options.seed * 1000 + rank)

    def next_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - block_size - 1, (batch_size,), generator=source)
        rows = starts[:, None] + torch.arange(block_size)
        return text[rows], text[rows + 1]

    losses = []
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, peak)
        mean_loss = 0.0
        for micro_step in range(num_micro_steps):
            if is_parallel:
                model.require_backward_grad_sync = micro_step == num_micro_steps - 1
            _, loss = model(*next_batch())
            (loss / num_micro_steps).backward()
            mean_loss += loss.item() / num_micro_steps
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(mean_loss)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {mean_loss:.4f}", flush=True)

    if options.out:
        raw = model.module if is_parallel else model
        if rank == 0:
            torch.save(
                {"model": raw.state_dict(), "optimizer": optimizer.state_dict()},
                f"{options.out}/checkpoint.pt",
            )
        Path(options.out, f"losses{rank}.json").write_text(json.dumps(losses))
    if is_parallel:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

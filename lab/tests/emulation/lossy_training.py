"""A rank of `test_bounded_loss_training`: trains over any network; prints what it got and what was lost."""

import copy
import hashlib
import json
import sys

import torch
import torch.distributed as dist

from paceline import DistributedDataParallel
from paceline_lossy import BoundedLoss

STEPS = 5


def gradients_of(model):
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def reported_steps(model, rank, reduction):
    """A line a step: a hash of the gradients' bits, and the report."""
    reduced = DistributedDataParallel(model, reduction=reduction)
    for step in range(STEPS):
        reduced.zero_grad()
        dice = torch.Generator().manual_seed(100 * step + rank)
        reduced(torch.randn(8, 64, generator=dice)).square().mean().backward()
        losses = reduction.losses
        yield (
            gradients_of(model),
            {
                "digest": hashlib.sha256(gradients_of(model).numpy().tobytes()).hexdigest(),
                "lost": losses.lost,
                "sent": losses.sent,
                "by_rank": losses.by_rank,
                "by_bucket": losses.by_bucket,
                "by_parameter": dict(losses.by_parameter),
            },
        )


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    bound = float(sys.argv[1])
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    exact = [found for found, _ in reported_steps(copy.deepcopy(plain), rank, BoundedLoss(0.0))]
    for compensation in ("survivors", "none", "feedback"):
        reduction = BoundedLoss(bound, compensation=compensation)
        model = copy.deepcopy(plain)
        for step, (found, told) in enumerate(reported_steps(model, rank, reduction)):
            residual = sum(kept.abs().sum() for kept in reduction.state_dict().get("residual", {}).values())
            told |= {
                "rank": rank,
                "compensation": compensation,
                "step": step,
                "is_exact": torch.allclose(found, exact[step], rtol=1e-5, atol=1e-8),
                "residual": float(residual),
                "counters": reduction.counters,
            }
            print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Random training programs: whatever a script does between backwards, the synchronized gradients are the mean.

A program is drawn from a seed, the same on all ranks, and with it where forwards leave their outputs; which branches a
forward uses is drawn per rank. It runs on the wrapped model and on a bare copy for each rank. After every synchronized
backward the wrapped model's gradients must be the mean of the copies', and after that the copies are given the mean, as
the ranks' models were.
"""

import copy
import random
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from models import Branches, generator
from paceline import DistributedDataParallel
from ranks import pool

NUM_OPERATIONS = 14
OPERATIONS = {
    "forward": 6,
    "backward": 6,
    "backward, keep the graph": 2,
    "backward without synchronization": 3,
    "zero to None": 2,
    "zero in place": 2,
    "scale": 1,
    "clone": 1,
    "evaluate": 1,
    "set": 1,
    "freeze": 1,
    "unfreeze": 1,
    "sync_gradients": 1,
    "around the wrapper": 3,
}
HIDING_PLACES = ["nowhere", "object", "attribute", "global", "global"]
CHECKPOINTS = [None, "reentrant", "not reentrant"]
HIDDEN = []


class Outputs:
    """What no library looks into."""

    def __init__(self, values):
        self.values = values


class Hiding(Branches):
    """Leaves its outputs where they may not be found; its trunk may be checkpointed."""

    def __init__(self, width, place, kind):
        super().__init__(width)
        self.place = place
        self.trunk = Checkpointed(self.trunk, kind)

    def forward(self, x, **used):
        outputs = super().forward(x, **used)
        if self.place == "global":
            HIDDEN.append(outputs)
        elif self.place == "attribute":
            self.kept = outputs
        else:
            return Outputs(outputs) if self.place == "object" else outputs
        return None

    def find(self, returned):
        """The outputs of the last forward."""
        if self.place == "global":
            return HIDDEN.pop()
        kept, self.kept = getattr(self, "kept", None), None
        return kept if self.place == "attribute" else getattr(returned, "values", returned)


class Checkpointed(torch.nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self, layer, kind):
        super().__init__()
        self.layer = layer
        self.weight = layer.weight
        self.kind = kind

    def forward(self, x):
        if self.kind is None or not torch.is_grad_enabled():
            return self.layer(x)
        reentrant = self.kind == "reentrant"
        return checkpoint(self.layer, x.requires_grad_(reentrant), use_reentrant=reentrant)


class Replica:
    """A model and the losses whose backward is still to come."""

    def __init__(self, model, rank):
        self.model = model
        self.rank = rank
        self.pending = []

    @property
    def bare(self):
        return getattr(self.model, "module", self.model)

    def do(self, operation, seed, step):
        """Perform one operation; data and branches depend on (seed, step, rank)."""
        bare, draw = self.bare, random.Random(f"{seed} {step} {self.rank}")
        parameters = [p for p in bare.parameters() if p.grad is not None]
        if operation == "forward":
            x = torch.randn(3, 4, generator=generator(seed, step, self.rank), dtype=torch.float64)
            used = {name: draw.random() < 0.8 for name in ("left", "right", "spare")}
            outputs = bare.find(self.model(x, **used))
            loss = sum((o**2).mean() for o in outputs if o is not None) + 0.0 * bare.trunk.weight.sum()
            self.pending.append(loss)
        elif operation == "backward, keep the graph":
            self.pending[step % len(self.pending)].backward(retain_graph=True)
        elif operation == "backward":
            self.pending.pop(step % len(self.pending)).backward()
        elif operation == "backward without synchronization":
            loss = self.pending.pop(step % len(self.pending))
            if self.model is bare:
                loss.backward()
            else:
                with self.model.no_sync():
                    loss.backward()
        elif operation.startswith("zero"):
            self.model.zero_grad(set_to_none=operation == "zero to None")
        elif operation == "scale":
            for p in parameters:
                p.grad.mul_(0.5)
        elif operation == "clone":
            for p in parameters:
                p.grad = p.grad.clone()
        elif operation == "evaluate":
            with torch.no_grad():
                bare.find(self.model(torch.ones(1, 4, dtype=torch.float64)))
        elif operation == "around the wrapper":
            if draw.random() < 0.5:
                x = torch.randn(3, 4, generator=generator(seed, step), dtype=torch.float64)
                sum((o**2).mean() for o in bare.find(bare(x))).backward()
        elif operation == "set":
            bare.left.weight.grad = torch.full_like(bare.left.weight, 0.25)
        elif operation in ("freeze", "unfreeze"):
            bare.right.requires_grad_(requires_grad=operation == "unfreeze")
        elif operation == "sync_gradients" and self.model is not bare:
            self.model.sync_gradients()


def synchronizes(operation):
    return operation in ("backward", "backward, keep the graph", "sync_gradients")


def wrong_after(wrapped, copies, is_first_mean):
    """Parameters whose gradient is not the mean of the copies'. None counts as zeros if `is_first_mean`."""
    wrong = []
    for index, (name, p) in enumerate(wrapped.named_parameters()):
        grads = [list(one.parameters())[index].grad for one in copies]
        present = [g for g in grads if g is not None]
        mean = sum(present) / len(copies) if present else None
        if mean is None:
            ok = p.grad is None or (is_first_mean and not p.grad.any())
        else:
            ok = p.grad is not None and torch.allclose(p.grad, mean, rtol=1e-12, atol=1e-12)
        if not ok:
            wrong.append(name)
        for one in copies:
            list(one.parameters())[index].grad = None if p.grad is None else p.grad.clone()
    return wrong


def run_programs(rank, num_ranks, first_seed, num_programs, width, options):
    """(seed, step, program so far, wrong parameters) of every program that went wrong."""
    warnings.simplefilter("ignore")
    failures = []
    for seed in range(first_seed, first_seed + num_programs):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        origin = Hiding(width, draw.choice(HIDING_PLACES), draw.choice(CHECKPOINTS)).double()
        replicas = [Replica(copy.deepcopy(origin), r) for r in range(num_ranks)]
        mine = Replica(DistributedDataParallel(copy.deepcopy(origin), **options), rank)
        program, local_zeroed = [], False
        for step in range(NUM_OPERATIONS):
            operation = draw.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
            if "backward" in operation and not mine.pending:
                operation = "forward"
            if operation == "around the wrapper" and mine.pending:
                operation = "backward"  # it would be taken for the one that a forward waits for, as by torch
            if operation in ("freeze", "unfreeze") and mine.pending:
                continue  # would change graphs that are under way
            program.append(operation)
            local_zeroed = local_zeroed or operation.startswith("zero")
            for one in [mine, *replicas]:
                one.do(operation, seed, step)
            if synchronizes(operation):
                wrong = wrong_after(mine.bare, [one.bare for one in replicas], local_zeroed)
                if wrong:
                    failures.append((seed, step, program, wrong))
                    break
    return failures


@pytest.mark.parametrize(
    ("num_ranks", "options", "width"),
    [
        (2, {}, 1400),
        (3, {}, 6),
        (2, {"bucket_cap_mb": 0.0001}, 6),
        (3, {"bucket_cap_mb": 0.0001}, 1400),
        (2, {"find_unused_parameters": True}, 1400),
        (3, {"find_unused_parameters": True}, 6),
    ],
    ids=lambda case: ("+".join(case) or "default") if isinstance(case, dict) else str(case),
)
def test_random_programs(num_ranks, options, width):
    """Forty programs of fourteen operations each; every pair of a number of ranks, a size and an option."""
    failures = pool(num_ranks).run(run_programs, 1000, 40, width, options)
    assert failures == [[]] * num_ranks

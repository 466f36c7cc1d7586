"""Random programs whose optimizer is divided among the ranks, on one host or as on several."""

from __future__ import annotations

import copy
import gc
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from harness.program_comparison import Comparison
from harness.program_free import accumulate, accumulate_copies
from harness.program_kinds import Cast, train_on
from harness.program_model import branches, make_net, wrap
from harness.program_overlapped import OPTIMIZERS, SEEN, evaluate, read_one
from harness.random_programs import Program
from paceline.comm import ring
from paceline.optim import full_state_dict, shard, sharded_state_dict
from paceline_recipes import LAMB

Optimizer = torch.optim.Optimizer
MAKE: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    **OPTIMIZERS,
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "LAMB": lambda p: LAMB(p, lr=1e-3, eps=1e-3),
}


def sharded(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Check parameters, outputs and states against a plain optimizer of one process on the whole batch."""
    if "hosts" not in program.options:
        _Training(program, rank, compare, None).perform()
        return
    # In a group of its own: to the default one the ranks may have shared memory before.
    group = dist.new_group(backend="gloo")
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": str(num_ranks)}),
        mock.patch.object(ring, "_CHUNK_ELEMENTS", program.options.get("chunk_elements", 1 << 18)),
        mock.patch.object(ring, "isend", wraps=vars(ring)["isend"]) as sends,
    ):
        _Training(program, rank, compare, group).perform()
    if any(name.startswith("train") for name, _ in program.operations) and not sends.called:
        compare.fail("nothing went around the ring")
    gc.collect()  # the model, whose groups end before this one
    dist.destroy_process_group(group)


class _Training:
    """A wrapped model with a sharded optimizer, and a copy with a plain one."""

    def __init__(
        self, program: Program, rank: int, compare: Comparison, group: dist.ProcessGroup | None
    ) -> None:
        self.program, self.rank, self.compare = program, rank, compare
        net = make_net(program)
        self.dtype = torch.float32 if "mixed_precision" in program.options else torch.float64
        self.alone, self.model = copy.deepcopy(net), wrap(program, net.to(self.dtype), group)
        self.theirs = self._made(self.alone)
        self.ours = self._sharded()

    def _made(self, net: nn.Module) -> Optimizer:
        """Return an optimizer of two groups."""
        own = list(net.parameters())
        groups: Any = [
            {"params": [p for p in own if (p.dim() > 1) == wide], "weight_decay": 0.01 * wide}
            for wide in (True, False)
        ]
        return MAKE[self.program.options["optimizer"]](groups)

    def _sharded(self) -> Optimizer:
        whole = True if "whole_gradients" in self.program.options else None
        return shard(self._made(self.model.module), self.model, whole_gradients=whole)

    def perform(self) -> None:
        compare = self.compare
        for name, seed in [*self.program.operations, ("read", 0)]:
            compare.where = f"{name} ({seed})"
            if name == "read":
                compare.parameters(self.model.module, self.alone)
            elif (
                name == "read one"
            ):  # mixed precision keeps tensors on parameters that torch.load does not restore
                if self.dtype == torch.float64:
                    pairs = [(self.model.module, self.alone)]
                    read_one(
                        self.program, seed, self.rank, pairs, compare, [SEEN]
                    )  # the guide names the rest
            elif name == "evaluate":
                if self.dtype == torch.float64:
                    evaluate(self.model, self.alone, compare)
            elif name == "change rates":
                for group in (*self.ours.param_groups, *self.theirs.param_groups):
                    group["lr"] = group["lr"] * 0.7
            elif name in ("freeze", "unfreeze"):
                self._freeze(seed, name == "unfreeze")
            elif name == "save and load":
                self._save_and_load()
            elif name == "checkpoint":
                self._checkpoint()
            else:
                self._train(name, seed)
        compare.where = "the state at the end"
        self._compare_states(full_state_dict(self.ours))

    # ---- a step

    def _train(self, name: str, seed: int) -> None:
        program = self.program
        overflows = self._overflow(seed) if name == "train, overflow" else None
        if name == "accumulate" and self.dtype == torch.float64:
            accumulate(program, seed, self.model, self.rank)
            accumulate_copies(program, seed, [self.alone])
        else:
            way = name if name == "train on two micro-batches" else "train"
            train_on(program, way, seed, Cast(self.model, self.dtype), [self.rank], whole=False)
            if overflows is not None:
                overflows.remove()
            train_on(program, way, seed, self.alone, range(program.num_ranks), whole=True)
        if name == "train, clip":
            self._clip(seed)
        elif name == "train, zero in place":
            for model in (self.model, self.alone):
                model.zero_grad(set_to_none=False)
        if name in ("train, scale", "train, overflow"):
            scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
            scaler.scale(torch.ones(()))
            scaler.step(self.ours)
            scaler.update()
            if (scaler.get_scale() == 0.5) != (overflows is not None):
                self.compare.fail(f"the scaler's scale is {scaler.get_scale()}")
            if overflows is not None:
                return
        else:
            self.ours.step()
        self.theirs.step()

    def _overflow(self, seed: int) -> Any:
        """Make one element of one gradient infinite on one rank, in the next backward; None if no gradient can be.

        It is a rank whose loss has a path to all of the trunk: on others no hook need be called.
        """
        source = random.Random(f"{self.program.seed} {seed} overflow")
        trained = [
            p for n, p in self.model.module.named_parameters() if n.startswith("trunk") and p.requires_grad
        ]
        able = [r for r in range(self.program.num_ranks) if self._uses_trunk(seed, r)]
        if not (trained and able):
            return None
        parameter, place = source.choice(trained), source.choice(able)
        at = source.randrange(parameter.numel())

        def overflow(gradient: Tensor) -> Tensor:
            changed = gradient.clone()
            changed.view(-1)[at] = torch.inf
            return changed

        return parameter.register_hook(overflow if place == self.rank else lambda gradient: gradient)

    def _uses_trunk(self, seed: int, rank: int) -> bool:
        used = branches(
            self.program, seed, rank
        )  # `train_on` lets a rank leave both out with forward overlap alone
        return "overlap_forward" not in self.program.options or used["left"] or used["right"]

    def _clip(self, seed: int) -> None:
        norm_type = random.Random(f"{self.program.seed} {seed} norm").choice((2.0, 1.0, float("inf")))
        found = self.model.clip_grad_norm_(0.05, norm_type)
        expected = nn.utils.clip_grad_norm_(self.alone.parameters(), 0.05, norm_type)
        self.compare.same("the norm", found, expected, float(expected))

    def _freeze(self, seed: int, trains: bool) -> None:
        """Freeze a parameter or train it again; forward overlap and codecs know their parameters beforehand."""
        if {"overlap_forward", "compression"} & set(self.program.options):
            return
        source = random.Random(f"{self.program.seed} {seed} freeze")
        pairs = list(zip(self.model.module.parameters(), self.alone.parameters(), strict=True))
        for parameter in source.choice(pairs[:-2]):
            parameter.requires_grad_(trains)
            parameter.grad = None

    # ---- states

    def _save_and_load(self) -> None:
        """Train on with another optimizer, which has loaded the whole state."""
        saved = [full_state_dict(self.ours)]
        self._compare_states(saved[0])
        dist.broadcast_object_list(saved, src=0)
        del self.ours
        self.ours = self._sharded()
        assert saved[0] is not None
        self.ours.load_state_dict(saved[0])

    def _checkpoint(self) -> None:
        """Train on with another optimizer, which has loaded a checkpoint to which each rank has written its parts."""
        folders = [tempfile.mkdtemp() if self.rank == 0 else ""]
        dist.broadcast_object_list(folders, src=0)
        dcp.save({"optimizer": sharded_state_dict(self.ours, self.model)}, checkpoint_id=folders[0])
        del self.ours
        self.ours = self._sharded()
        saved = dcp.FileSystemReader(folders[0]).read_metadata()
        state = {"optimizer": sharded_state_dict(self.ours, self.model, saved)}
        dcp.load(state, checkpoint_id=folders[0])
        self.ours.load_state_dict(state["optimizer"])
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folders[0])

    def _compare_states(self, whole: dict[str, Any] | None) -> None:
        if whole is None:
            return
        expected = self.theirs.state_dict()["state"]
        if whole["state"].keys() != expected.keys():
            self.compare.fail(f"states of the parameters {[*whole['state']]}, expected {[*expected]}")
            return
        for index, kept in expected.items():
            for name, value in kept.items():
                found = whole["state"][index][name]
                if isinstance(value, Tensor):
                    self.compare.same(f"{name} of {index}", found, value, float(value.abs().max()))

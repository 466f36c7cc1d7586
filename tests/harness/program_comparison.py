"""The expected gradients, parameters and buffers of a random program, and the bits that ranks must share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.models import digest
from harness.random_programs import Program
from paceline.reductions.kept_state import RESIDUAL
from paceline.reductions.lossy import Lossy

EXACT = 1e-11
# Inputs and parameters are of order one. A gradient like this is a singular point's: the last bit of what leads there
# is its tenth digit (seed 301888: 0.5, then 1e17 within one step).
DIVERGED = 1e12
ROUNDED = {"bf16": 0.02, "fp16": 0.005, "int8": 0.03, "fp16 around allreduce": 0.005}
"""How far gradients without error feedback may be off, relative to the largest."""

Taken = list[Tensor | None]


def take(net: nn.Module) -> Taken:
    """Return copies of all gradients, made at once. Gradients that arrive later are not among them."""
    return [None if p.grad is None else p.grad.detach().clone() for p in net.parameters()]


class Comparison:
    """The errors so far, with their places, and the bits that have to be the same on all ranks."""

    def __init__(self, program: Program) -> None:
        self.wrong: list[str] = []
        self.bits: list[str] = []
        self.where = "before the first operation"
        self.group: Any = None  # whose ranks train; the default one
        lossy = program.options.get("compression", program.options.get("hook", ""))
        self.tolerance = ROUNDED.get(lossy, EXACT)
        if "mixed_precision" in program.options:
            self.tolerance = 0.15
        self._in_use: dict[Any, dict[str, Any]] = {}  # codecs of each `compression="auto"`
        self._left_over: dict[Any, dict[str, Tensor]] = {}  # of each codec, by parameter

    def fail(self, words: str) -> None:
        """Note a mismatch."""
        self.wrong.append(f"{self.where}: {words}")

    def same(self, what: str, found: Tensor | None, expected: Tensor | None, scale: float) -> None:
        """Compare two tensors. None is not zeros. Where one process diverges, too, the values are not compared."""
        if found is None and expected is None:
            return
        if found is None or expected is None:
            told = ["None" if x is None else f"up to {float(x.abs().max()):.3g}" for x in (found, expected)]
            self.fail(f"{what} is {told[0]}, expected {told[1]}")
            return
        if not (scale < DIVERGED and bool(expected.isfinite().all())):
            return
        distance = float((found.detach().double() - expected.detach().double()).abs().max())
        if not distance <= self.tolerance * max(scale, 1e-3):
            self.fail(f"{what} differs by {distance:.3g} (largest expected {scale:.3g})")

    def gradients(self, model: Any, taken: Taken, expected: Sequence[Tensor | None]) -> None:
        """Compare the `.grad` of a wrapped model, right after backward and now, with the mean. Collective.

        With error feedback the mean includes the residuals that ranks had, less those that they have now.
        """
        net: nn.Module = model.module
        expected = self._with_left_over(model, expected)
        scale = max((float(g.abs().max()) for g in expected if g is not None), default=0.0)
        for (name, p), found, mean in zip(net.named_parameters(), taken, expected, strict=True):
            self.same(f"gradient of {name}", found, mean, scale)
            if digest([] if found is None else [found]) != digest([] if p.grad is None else [p.grad]):
                self.fail(f"gradient of {name} has changed since backward returned")
        self.note(taken)

    def local(self, model: Any, taken: Taken, alone: nn.Module) -> None:
        """Compare gradients that were not synchronized with those of this rank's copy."""
        tolerance, self.tolerance = self.tolerance, EXACT
        named = model.module.named_parameters()
        for (name, _), found, other in zip(named, taken, alone.parameters(), strict=True):
            scale = 1.0 if other.grad is None else float(other.grad.abs().max())
            self.same(f"local gradient of {name}", found, other.grad, scale)
        self.tolerance = tolerance

    def _with_left_over(self, model: Any, expected: Sequence[Tensor | None]) -> list[Tensor | None]:
        reduction = model.reduction
        in_use = getattr(reduction, "_active", reduction)  # by `compression="auto"` in the last step
        self._kept_on(reduction)
        before = self._left_over.get(in_use, {})
        codecs = [in_use, *getattr(reduction, "_running", {}).values()]
        others = {key: value for key, value in self._left_over.items() if key not in codecs}
        self._left_over = others | {codec: _left_over(codec) for codec in codecs}
        now = self._left_over[in_use]
        if not now:
            return list(expected)
        result = []
        for (name, p), mean in zip(model.module.named_parameters(), expected, strict=True):
            zeros = torch.zeros(p.numel(), dtype=torch.float64)
            change = (before.get(name, zeros) - now.get(name, zeros)).view(p.shape) / dist.get_world_size(
                self.group
            )
            dist.all_reduce(change, group=self.group)
            nothing = mean is None and not change.any()
            result.append(None if nothing else change if mean is None else mean + change)
        return result

    def forget_codecs(self) -> None:
        """Forget the codecs of a dropped wrapper."""
        self._in_use, self._left_over = {}, {}

    def _kept_on(self, reduction: Any) -> None:
        """Check that `compression="auto"` keeps the same codec object. A new one would have lost its residuals."""
        if not hasattr(reduction, "_running"):
            return
        now = dict(reduction._running)
        for name, codec in self._in_use.get(reduction, {}).items():
            if name in now and now[name] is not codec:
                self.fail(f"{name} is used further, without what it had left over")
        self._in_use[reduction] = now

    def parameters(self, net: nn.Module, alone: nn.Module) -> None:
        """Compare parameters."""
        for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
            self.same(name, p, q, float(q.detach().abs().max()))
        self.note(net.parameters())

    def buffers(self, net: nn.Module, alone: nn.Module, are_shared: bool) -> None:
        """Compare buffers with one process, and across ranks where ranks share them."""
        for (name, found), expected in zip(net.named_buffers(), alone.buffers(), strict=True):
            distance = float((found - expected).abs().max())
            if not distance <= EXACT * max(1.0, float(expected.abs().max())):
                self.fail(f"buffer {name} differs by {distance:.3g}")
        if are_shared:
            self.note(net.buffers())

    def note(self, tensors: Iterable[Tensor | None]) -> None:
        """Keep bits that all ranks must share."""
        self.bits.append(f"{self.where} {digest([t for t in tensors if t is not None])}")

    def across_ranks(self) -> list[str]:
        """Return the errors on this rank, and between ranks. Collective."""
        noted: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(noted, self.bits)
        if any(bits != noted[0] for bits in noted):
            for place, bits in enumerate(zip(*noted, strict=False)):
                if len(set(bits)) > 1:
                    self.wrong.append(f"ranks are not bitwise equal at comparison {place}: {bits}")
                    break
            else:
                self.wrong.append(f"ranks compared {[len(bits) for bits in noted]} times")
        return self.wrong


def _left_over(codec: Any) -> dict[str, Tensor]:
    """Return the residuals that a codec keeps, by parameter; empty if it keeps none."""
    return codec.state_dict()["memories"].get(RESIDUAL, {}) if isinstance(codec, Lossy) else {}

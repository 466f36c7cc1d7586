"""Estimates the gradient noise scale, and so the useful batch size, from gradients before and after reduction.

A gradient over B samples is the true gradient G plus noise of variance S / B (S is the trace of one sample's
covariance). Rank r trains the fraction w_r of the samples, and puts c_r into the bucket. The sum of all c_r is the mean
gradient g. With X = sum |c_r|² and Y = |g|² and q = sum w_r²:

    E X = q |G|² + S / B        E Y = |G|² + S / B

    |G|² = E (Y - X) / (1 - q)        S / B = E (X - q Y) / (1 - q)

With P equal ranks, q = 1 / P, this is equation A.2 of the source. The noise scale S / |G|² is the batch at which the
noise is as large as the gradient. Far below it twice the batch saves half of the steps; far above it saves nothing.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm import Chain, Work, all_reduce
from paceline.errors import ConfigurationError
from paceline.given import number
from paceline.reductions import Message, Reduction, StepEnd, choose_reduction

_FEW_STEPS = 10
_ROW = 16_384  # elements whose squares are summed in single precision
_HALVES = (torch.float16, torch.bfloat16)


class GradientNoiseScale(Reduction):
    """Measures the gradient noise scale while another reduction reduces.

    While there is one rank it measures nothing. It needs a reduction whose result is the ranks' mean up to rounding:
    not Adasum. With compression its error counts as noise. Gradients that bypass reductions (sparse and late ones) are
    left out; if the last bucket does so, steps are not measured. It measures one step's gradients, so clear them before
    each.

    Args:
        inner: The reduction that is measured: "mean" or a `Reduction`.
        shares: Each rank's fraction of the batch, if they are not equal (`GlobalBatch.shares`) and the loop weighs
            gradients by itself. What `DistributedDataParallel` weighs is known in each step.
        memory_steps: The time constant of its exponential averages, in measured steps; single ones are far too noisy.
        every: Measure one step in `every`; the others cost nothing.

    Cost:
        In a measured step: one pass over the gradients before and one after they are reduced. Then an all-reduce of 16
        bytes follows the last bucket.

    Source:
        McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1.
    """

    needs_all_buckets = True

    def __init__(
        self,
        inner: Reduction | str = "mean",
        shares: tuple[float, ...] | None = None,
        memory_steps: float = 50.0,
        every: int = 1,
    ) -> None:
        self._inner = choose_reduction(inner)
        if not number(memory_steps) >= 1:
            raise ConfigurationError(
                f"memory_steps={memory_steps!r} averages over less than a step. Give 1 or more; 50 is usual."
            )
        if not (number(every) >= 1 and number(every) % 1 == 0):
            raise ConfigurationError(f"every={every!r} measures no step. Give 1 for each, 10 for one in ten.")
        if shares is not None and not _are_fractions(shares):
            raise ConfigurationError(
                f"shares={shares!r} are not fractions of a batch: each must be positive, and their sum 1. "
                "GlobalBatch((32, 16)).shares makes them."
            )
        if not self._inner.is_linear:
            raise ConfigurationError(
                f"GradientNoiseScale({self._inner!r}): its result is not the ranks' mean, so their difference from "
                "it is not noise. Measure with the mean, or with a compression of it."
            )
        self._given_shares = shares
        self._first_parameter: Callable[[], Parameter | None] = lambda: None  # of the model; a weak reference
        self._memory_steps = memory_steps
        self._concentration = 0.0  # q, if nothing else is known
        self._prepared_share = self._share = 1.0  # of this rank: as prepared, and in the step under way
        self._agreed = torch.zeros(2, dtype=torch.float64)  # X and q of the step under way, over all ranks
        self._to_mean = 1.0
        self._parts = torch.zeros((), dtype=torch.float64)  # X of the step under way
        self._whole = torch.zeros((), dtype=torch.float64)  # Y of the step under way
        self._is_agreed = False
        self._every = every
        self._is_alone = False  # there is one rank, and nothing to compare
        # Equal on all ranks: a rank begins exactly the steps in whose collectives it takes part.
        self._num_begun_steps = 0
        self._measures = False  # the step under way
        self.num_steps = 0  # measured
        self._signal = torch.zeros((), dtype=torch.float64)  # averages, not yet divided by their total weight
        self._noise = torch.zeros((), dtype=torch.float64)

    def __repr__(self) -> str:
        shares = "" if self._given_shares is None else f", shares={self._given_shares}"
        return f"GradientNoiseScale({self._inner!r}{shares}, memory_steps={self._memory_steps:g}, every={self._every})"

    # ---- as a reduction

    @property
    def inner(self) -> Reduction:
        """Return the reduction that is measured."""
        return self._inner

    def why_not_over(self, process_group: ProcessGroup | None) -> str:
        if process_group is None and self._given_shares is not None:
            return (
                f"GradientNoiseScale with shares= is for {len(self._given_shares)} ranks alone. Leave shares= out: the "
                "wrapper tells it each step's."
            )
        own = "" if process_group is None else self._why_not_of_size(process_group.size())
        return own or self._inner.why_not_over(process_group)

    def _why_not_of_size(self, num_ranks: int) -> str:
        if self._given_shares is None or len(self._given_shares) == num_ranks:
            return ""
        return (
            f"GradientNoiseScale has the shares of {len(self._given_shares)} ranks, but the group has {num_ranks}. "
            "Give one a rank."
        )

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        self._take_shares(named_parameters, process_group)
        if self._is_alone:
            warnings.warn(
                "GradientNoiseScale compares the ranks' gradients with their mean, but there is one rank: it measures "
                "nothing until others come.",
                stacklevel=2,
            )
        self._inner.prepare(named_parameters, process_group)

    def follow(
        self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup, are_alike: bool
    ) -> None:
        self._take_shares(named_parameters, process_group)
        self._inner.follow(named_parameters, process_group, are_alike)
        self._num_begun_steps = 0

    def _take_shares(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        num_ranks = process_group.size()
        if why := self._why_not_of_size(num_ranks):
            raise ConfigurationError(why)
        shares = self._given_shares or (1.0 / num_ranks,) * num_ranks
        first = next(iter(named_parameters.values()), None)
        before = self._first_parameter()
        if before is not None and before is not first:
            raise ConfigurationError(
                "this GradientNoiseScale measures another model already, and would mix the two. Make one for each."
            )
        self._first_parameter = (lambda: None) if first is None else weakref.ref(first)
        self._is_alone = len(shares) == 1
        self._concentration = sum(share * share for share in shares)
        self._prepared_share = shares[process_group.rank()]

    @property
    def carries_status(self) -> bool:  # type: ignore[override]
        """Return whether the inner reduction carries status words."""
        return self._inner.carries_status

    def begin_step(self, num_ranks: int, active_ratio: float = 1.0, share: float | None = None) -> float:
        self._is_agreed = False
        self._share = self._prepared_share if share is None else share
        self._measures = not self._is_alone and self._num_begun_steps % self._every == 0
        self._num_begun_steps += 1
        self._parts, self._whole = torch.zeros(2, dtype=torch.float64).unbind()
        scale = self._inner.begin_step(num_ranks, active_ratio, share)
        self._to_mean = 1.0 / (scale * num_ranks)
        return scale

    def launch(self, message: Message) -> Work:
        if not self._measures:
            return self._inner.launch(message)
        self._parts = self._parts + _squared_norm(message.body) * self._to_mean**2
        bucket = self._inner.launch(message)
        # After a plain all-reduce the sum of X may be launched at once. Other reductions may launch collectives of
        # their own later, on any thread, so the order is the same on every rank only after the last bucket is done.
        agreement = self._agree(message) if message.is_last and self.carries_status else None

        def stages() -> Iterator[Work]:
            yield bucket
            self._whole = self._whole + _squared_norm(message.body)
            if message.is_last:
                yield agreement or self._agree(message)

        return Chain(stages(), num_stages=2 if message.is_last else 1)

    def _agree(self, message: Message) -> Work:
        self._is_agreed = True
        self._agreed = torch.stack([self._parts, self._parts.new_tensor(self._share**2)])
        return all_reduce(self._agreed, message.process_group)

    def launch_sparse(
        self, gradient: Tensor, process_group: ProcessGroup, keep: Callable[[Tensor], None]
    ) -> Work:
        return self._inner.launch_sparse(gradient, process_group, keep)

    def end_step(self, ended: StepEnd) -> None:
        if self._is_agreed:
            parts, concentration = self._agreed.unbind()
            self.add(parts, self._whole, concentration)
        self._inner.end_step(ended)

    # ---- the estimate

    def add(self, parts: Tensor, whole: Tensor, concentration: Tensor | None = None) -> None:
        """Add one step to the averages; one that is not finite, or that one rank trained alone, changes nothing.

        Args:
            parts: X, the sum over the ranks of the squared norms of their contributions to the mean; a scalar.
            whole: Y, the squared norm of the mean; a scalar.
            concentration: q, the sum of the squares of the ranks' shares; None: of those given to the constructor.
        """
        q = whole.new_tensor(self._concentration) if concentration is None else concentration.to(whole.device)
        fresh = 1.0 / self._memory_steps
        # not read here, so that nothing waits for the device
        counts = (parts + whole).isfinite() & (q < 1 - 1e-9)
        signal, noise = self._signal.to(whole.device), self._noise.to(whole.device)
        self._signal = torch.where(
            counts, signal * (1.0 - fresh) + (whole - parts) / (1.0 - q) * fresh, signal
        )
        self._noise = torch.where(
            counts, noise * (1.0 - fresh) + (parts - q * whole) / (1.0 - q) * fresh, noise
        )
        self.num_steps += 1

    @property
    def noise_over_signal(self) -> float:
        """S / (B |G|²): the noise scale as a multiple of the batch. Infinite while noise drowns the gradient.

        NaN before the first step. On an accelerator this waits for the device.
        """
        if self.num_steps == 0:
            return float("nan")
        signal, noise = float(self._signal), max(float(self._noise), 0.0)
        return noise / signal if signal > 0 else float("inf")

    def in_words(self, batch: int) -> str:
        """Return a sentence on the estimate, for steps of `batch` samples."""
        ratio = self.noise_over_signal
        if self.num_steps < _FEW_STEPS:
            return f"after {self.num_steps} steps there is no estimate yet; it takes {_FEW_STEPS}"
        if ratio == float("inf"):
            return f"the noise drowns the gradient: a batch of {batch:,} is far below the useful size"
        useful = ratio * batch
        if ratio >= 1:
            return (
                f"noise scale {useful:,.0f} samples: a batch {ratio:.1f} times larger would still be useful"
            )
        multiple = f"{1 / ratio:.1f} times" if ratio > 0 else "many times"
        return f"noise scale {useful:,.0f} samples: your batch of {batch:,} is {multiple} the useful size"

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the inner reduction's state. Local."""
        return {
            "num_steps": self.num_steps,
            "signal": float(self._signal),
            "noise": float(self._noise),
            "inner": self._inner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = {"num_steps", "signal", "noise", "inner"} - set(state)
        if missing:
            raise ConfigurationError(
                f"this is not the state of a GradientNoiseScale: it lacks {', '.join(sorted(missing))}. Load it into "
                "the reduction that saved it."
            )
        self._inner.load_state_dict(state["inner"])
        self.num_steps = int(state["num_steps"])
        self._signal = torch.tensor(state["signal"], dtype=torch.float64)
        self._noise = torch.tensor(state["noise"], dtype=torch.float64)


def _squared_norm(flat: Tensor) -> Tensor:
    """Return the squared norm of a vector as a float64 scalar, on its device.

    Row by row: one float32 sum over a million elements is wrong in the fourth digit, and the estimate is a difference
    of such sums.
    """
    wide = torch.float32 if flat.dtype in _HALVES else None
    whole = flat.numel() // _ROW * _ROW
    lengths: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=wide).double()
    rest: Tensor = torch.linalg.vector_norm(flat[whole:], dtype=wide).double()
    return lengths.dot(lengths) + rest.square()


def _are_fractions(shares: object) -> bool:
    """Return whether these are positive numbers whose sum is 1."""
    numbers = [number(share) for share in shares] if isinstance(shares, Sequence) else []
    return all(share > 0 for share in numbers) and abs(sum(numbers) - 1) <= 1e-6

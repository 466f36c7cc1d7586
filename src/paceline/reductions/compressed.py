"""The mean over ranks of gradients that each rank compresses by a `Compressor`; with error feedback if it is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.comm.collectives import Chain
from paceline.compression import Compressor, Layout, Seeds, accumulation_dtype
from paceline.errors import ConfigurationError
from paceline.given import number
from paceline.reductions.kept_state import RESIDUAL, VELOCITY, Memories, Memory
from paceline.reductions.lossy import Finish, Lossy, seed_of
from paceline.reductions.ordered_mean import gather_rows, launch_mean
from paceline.reductions.owned_mean import Owned, exchange
from paceline.reductions.reduction import Message, all_reduced, gathered


class Compressed(Lossy):
    """The mean of compressed gradients: payloads are all-reduced if the compressor is additive, otherwise all-gathered.

    Args:
        compressor: Compresses one rank's gradients.
        error_feedback: Add the residual, which is the gradient minus its payload, to the next step's gradient; None: if
            the compressor needs it.
        momentum: Apply momentum here, before compression; the optimizer's must then be 0. The velocity of an element
            that is not sent accumulates (momentum correction). The velocity of a sent element is set to 0 (momentum
            factor masking). For sparse compressors with error feedback.
        seed: Of random numbers; the same on every rank.

    Cost:
        On P ranks each sends 2 (P-1)/P of its payload if the compressor is additive, otherwise P-1 times its payload,
        and decompresses P payloads. So a payload that is gathered has to be shorter than 2/P of the gradients to save
        anything: int8 does so up to 7 ranks, onebit up to 63. Error feedback keeps two numbers per element, momentum
        two more.

    Source:
        Error feedback: Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, Algorithm 2. Momentum correction
        and masking: Lin et al., "Deep Gradient Compression", ICLR 2018, sections 3.1 and 3.2.
    """

    def __init__(
        self,
        compressor: Compressor,
        *,
        error_feedback: bool | None = None,
        momentum: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(compressor, Compressor):
            raise ConfigurationError(
                f"Compressed({compressor!r}): a Compressor is needed; paceline.compression has them."
            )
        feeds_back = compressor.needs_feedback if error_feedback is None else error_feedback
        if not 0 <= number(momentum) < 1:
            raise ConfigurationError(f"Compressed: momentum={momentum!r} must be at least 0 and less than 1.")
        if momentum and not (compressor.is_sparse and feeds_back):
            raise ConfigurationError(
                f"Compressed: momentum={momentum} accumulates the momentum of elements that are not sent yet, and with "
                f"{compressor!r}{'' if feeds_back else ' without error feedback'} none does. Leave the momentum to the "
                "optimizer, or take TopK or RandomK."
            )
        self.compressor = compressor
        self.momentum = momentum
        self.seed = seed
        if feeds_back:
            self._memories[RESIDUAL] = Memory()
        if momentum:
            self._memories[VELOCITY] = Memory()

    def __repr__(self) -> str:
        settings = f"error_feedback={RESIDUAL in self._memories}, momentum={self.momentum}, seed={self.seed}"
        return f"Compressed({self.compressor!r}, {settings})"

    def _check_dtype(self, name: str, dtype: torch.dtype) -> None:
        self.compressor.check(name, dtype)

    def _start(self, message: Message, names: tuple[str, ...], layout: Layout, memories: Memories) -> Finish:
        group, seeds = message.process_group, self._seeds()
        pending = self._pending(message.body, names, layout, memories)
        payload = self.compressor.compress(pending, layout, seeds)
        if self.compressor.additive:
            mean = launch_mean(payload.clone() if memories else payload, group)
            self._keep_residual(payload, names, layout, seeds, memories)
            return lambda: self._write(message.body, [mean()], group.size(), layout, seeds)
        rows = gather_rows(payload, group)
        self._keep_residual(payload, names, layout, seeds, memories)
        return lambda: self._write(message.body, rows(), 1, layout, seeds)

    def _sent_bytes(self, names: tuple[str, ...], layout: Layout) -> int:
        sent = all_reduced if self.compressor.additive else gathered
        return sent(self.compressor.payload_bytes(layout), self._place[1])

    def _seeds(self) -> Seeds:
        return Seeds(
            common=seed_of(self.seed, self._num_steps),
            private=seed_of(self.seed, self._num_steps, self._place[0]),
        )

    def _pending(self, body: Tensor, names: tuple[str, ...], layout: Layout, memories: Memories) -> Tensor:
        """Return what is compressed: the gradient, or with momentum the velocity, plus the residual."""
        if not memories:
            return body
        slot = memories[RESIDUAL].slot(names, layout)
        pending = slot.proposed.copy_(body)
        if self.momentum:
            velocity = memories[VELOCITY].slot(names, layout)
            torch.mul(velocity.kept, self.momentum, out=velocity.proposed)
            velocity.proposed.add_(pending)
            pending.copy_(velocity.proposed)
        return pending.add_(slot.kept)

    def _keep_residual(
        self, payload: Tensor, names: tuple[str, ...], layout: Layout, seeds: Seeds, memories: Memories
    ) -> None:
        """Make what was not sent the new residual; with momentum, zero the velocities of what was sent."""
        if not memories:
            return
        pending = memories[RESIDUAL].slot(names, layout).proposed
        self.compressor.add_decoded(pending, payload, layout, seeds.common, sign=-1)
        if self.momentum:
            sent = self.compressor.decompress(payload, layout, seeds.common)
            memories[VELOCITY].slot(names, layout).proposed.masked_fill_(sent != 0, 0.0)

    def _write(
        self, body: Tensor, payloads: list[Tensor], num_ranks_each: int, layout: Layout, seeds: Seeds
    ) -> None:
        """Replace `body` by the mean of all ranks' payloads, decompressed and summed in their order.

        A single payload is already the mean of `num_ranks_each` ranks.
        """
        is_wide = body.dtype == accumulation_dtype(layout.dtype)
        total = body.zero_() if is_wide else torch.zeros_like(body, dtype=accumulation_dtype(layout.dtype))
        for payload in payloads:
            self.compressor.add_decoded(total, payload, layout, seeds.common)
        if num_ranks_each != self._num_averaged:
            total.mul_(num_ranks_each / self._num_averaged)
        if not is_wide:
            body.copy_(total)


class OwnedCompressed(Owned, Compressed):
    """The mean of 16-bit gradients for each element's owner: a quarter of the bytes of a float32 all-reduce.

    Bitwise what `Compressed` computes: 16-bit elements are summed in float32 in rank order, and rounded once.
    """

    @classmethod
    def of(cls, compressed: Any) -> OwnedCompressed | None:
        """Return the form of this reduction for owners; None if it keeps residuals, or is of another class."""
        if type(compressed) is not Compressed or compressed.keeps_state:
            return None
        owned = cls(compressed.compressor)
        vars(owned).update(vars(compressed))  # which is prepared, with threads
        return owned

    @property
    def overflowed(self) -> bool:
        if self._scattered:
            raise ConfigurationError(
                "each rank has the gradients that it steps, so no rank alone knows whether all of them are finite. "
                "Call model.gradients_are_finite() on every rank."
            )
        return super().overflowed

    def _start(self, message: Message, names: tuple[str, ...], layout: Layout, memories: Memories) -> Finish:
        owned = self._divide(message)
        if owned is None:
            return super()._start(message, names, layout, memories)
        num_ranks, seeds = message.process_group.size(), self._seeds()
        payload = self.compressor.compress(message.body, layout, seeds)
        narrow = replace(message, flat=payload, num_gradient_elements=payload.numel())
        folding = Chain(exchange(narrow, owned, num_ranks), num_stages=1)

        def finish() -> None:
            folding.wait()
            self._write(message.body, [payload], num_ranks, layout, seeds)

        return finish

    def _sent_bytes(self, names: tuple[str, ...], layout: Layout) -> int:
        owned = {self._names[key] for key in self._owners if key in self._names}
        return super()._sent_bytes(names, layout) // (2 if owned.issuperset(names) else 1)

"""The mean over ranks of gradients that each rank compresses by a `Compressor`; with error feedback if it is needed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.collectives import all_gather
from paceline.comm.device import keep_for_current_streams
from paceline.compression import Compressor, Layout, Seeds, accumulation_dtype
from paceline.errors import ConfigurationError
from paceline.numbers_given import number
from paceline.reductions.kept_state import RESIDUAL, VELOCITY, Memory
from paceline.reductions.lossy import Finish, Lossy, seed_of
from paceline.reductions.ordered_mean import launch_mean
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

    def _start(self, message: Message, names: tuple[str, ...], layout: Layout) -> Finish:
        group, seeds = message.process_group, self._seeds()
        pending = self._pending(message.body, names, layout)
        payload = self.compressor.compress(pending, layout, seeds)
        if self.compressor.additive:
            mean = launch_mean(payload.clone() if self._memories else payload, group)
            self._keep_residual(payload, names, layout, seeds)
            return lambda: self._write(message.body, [mean()], group.size(), layout, seeds)
        rows = self._all_gather(payload, group)
        self._keep_residual(payload, names, layout, seeds)
        return lambda: self._write(message.body, rows(), 1, layout, seeds)

    def _sent_bytes(self, names: tuple[str, ...], layout: Layout) -> int:
        sent = all_reduced if self.compressor.additive else gathered
        return sent(self.compressor.payload_bytes(layout), self._place[1])

    def _seeds(self) -> Seeds:
        return Seeds(
            common=seed_of(self.seed, self._num_steps),
            private=seed_of(self.seed, self._num_steps, self._place[0]),
        )

    def _pending(self, body: Tensor, names: tuple[str, ...], layout: Layout) -> Tensor:
        """Return what is compressed: the gradient, or with momentum the velocity, plus the residual."""
        if not self._memories:
            return body
        slot = self._memories[RESIDUAL].slot(names, layout)
        pending = slot.proposed.copy_(body)
        if self.momentum:
            velocity = self._memories[VELOCITY].slot(names, layout)
            torch.mul(velocity.kept, self.momentum, out=velocity.proposed)
            velocity.proposed.add_(pending)
            pending.copy_(velocity.proposed)
        return pending.add_(slot.kept)

    def _keep_residual(self, payload: Tensor, names: tuple[str, ...], layout: Layout, seeds: Seeds) -> None:
        """Make what was not sent the new residual; with momentum, zero the velocities of what was sent."""
        if not self._memories:
            return
        pending = self._memories[RESIDUAL].slot(names, layout).proposed
        self.compressor.add_decoded(pending, payload, layout, seeds.common, sign=-1)
        if self.momentum:
            sent = self.compressor.decompress(payload, layout, seeds.common)
            self._memories[VELOCITY].slot(names, layout).proposed.masked_fill_(sent != 0, 0.0)

    def _all_gather(self, payload: Tensor, group: ProcessGroup) -> Callable[[], list[Tensor]]:
        if group.size() == 1:
            return lambda: [payload]
        rows = [torch.empty_like(payload) for _ in range(group.size())]
        pending = all_gather(rows, payload, group)

        def finish() -> list[Tensor]:
            pending.wait()
            if not payload.is_cpu:
                keep_for_current_streams([payload, *rows])
            return rows

        return finish

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

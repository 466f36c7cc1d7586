"""What an optimizer asks the other ranks: whether they have the same, and who is gone if they are silent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.errors import PeerLostError
from paceline.reductions import Pending, RollCall
from paceline.reductions.collectives import device_for_words, launch_gather
from paceline.reductions.roll_call import next_name

NOTHING = bytes(32)
"""The digest of tensors that are all zero, or of none."""


class RankAgreement:
    """The ranks of one optimizer.

    Args:
        process_group: Whose.
        device: Of the parameters.

    Contract:
        Collective: every method, and making one.
    """

    def __init__(self, process_group: ProcessGroup, device: torch.device) -> None:
        self._group = process_group
        self._words = device_for_words(process_group, device)
        self._in_slices = device.type == "cpu"
        name = next_name(process_group, is_collective=True)
        self._roll_call = RollCall(process_group, name, "making its optimizer")

    def gather(self, digest: bytes) -> list[bytes]:
        """Every rank's digest. Blocks."""
        row = torch.tensor(list(digest), dtype=torch.uint8, device=self._words)
        rows = [torch.empty_like(row) for _ in range(self._group.size())]
        if len(rows) == 1:
            return [digest]
        self.wait(launch_gather(rows, row, self._group), "comparing the ranks' parameters or gradients")
        return [bytes(each.tolist()) for each in rows]

    def wait(self, pending: Pending, doing: str) -> None:
        """Wait for a collective.

        Raises:
            PeerLostError: It failed, here or on another rank; names the ranks that are gone.
        """
        try:
            if self._in_slices:
                self._roll_call.wait_in_slices(pending)
            else:
                pending.wait()
        except RuntimeError as error:
            who = self._roll_call.who_is_gone(doing)
            raise PeerLostError(
                f"rank {self._group.rank()} was {doing} when communication failed: {who}. The parameters are those of "
                "before this step; restart from the last checkpoint. "
                f"The backend said: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error


def digest_of(tensors: Sequence[Tensor | None]) -> bytes:
    """A digest of the tensors' bits; NOTHING where nothing differs from zero."""
    state = hashlib.sha256()
    is_something = False
    for tensor in tensors:
        if tensor is None:
            continue
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        is_something = is_something or bool(dense.any())
        state.update(dense.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return state.digest() if is_something else NOTHING

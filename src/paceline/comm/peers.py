"""Waiting for the other ranks, and saying who it was when they do not come."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import ProcessGroup

from paceline.comm.pending import Pending
from paceline.comm.roll_call import RollCall
from paceline.errors import PeerLostError


class Peers:
    """The other ranks of one wrapped module.

    Args:
        process_group: Whom we wait for; its ranks are the ones named in messages.
        name: Identifies the module; the same on every rank.
        in_slices: Whether a wait may be cut into slices. Not for NCCL, where `wait` does not block the host.
    """

    def __init__(self, process_group: ProcessGroup, name: str, in_slices: bool) -> None:
        self._rank = process_group.rank()
        self._in_slices = in_slices and process_group.size() > 1
        self._roll_call = RollCall(process_group, name, first_act="wrapping its model")

    def wait(self, pending: Pending, doing: str) -> None:
        """Wait for a collective.

        Contract:
            Blocks: yes, at most for the process group's timeout and a roll call.

        Raises:
            PeerLostError: It failed, here or on another rank; names the ranks that are gone.
        """
        try:
            if self._in_slices:
                self._roll_call.wait_in_slices(pending)
            else:
                pending.wait()
        except RuntimeError as error:
            raise self.lost(error, doing) from error

    def lost(self, error: Exception, doing: str) -> PeerLostError:
        """Call the roll, or answer it, and put the result into words."""
        who = self._roll_call.who_is_gone(doing)
        return PeerLostError(
            f"rank {self._rank} was {doing} when communication failed: {who}. "
            "The gradients of this step are undefined, the parameters are untouched. Look at the output of the rank "
            "named here first; restart from the last checkpoint (torchrun --max-restarts does that by itself). "
            f"The backend said: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )


def describe(indices: Sequence[int], names: Sequence[str], limit: int = 5) -> str:
    """Name parameters in a message: the first few, and how many more."""
    named = ", ".join(names[index] for index in indices[:limit])
    return named + (f" and {len(indices) - limit} more" if len(indices) > limit else "")

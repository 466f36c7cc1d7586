"""The sum of sparse gradients: as sparse tensors where the backend can, dense where it cannot."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.collectives import backend_of, launch_sum
from paceline.comm.pending import Done, Pending


class _PendingSparse:
    """Hands the coalesced sum on when it has arrived."""

    def __init__(self, inner: Pending, total: Tensor, keep: Callable[[Tensor], None]) -> None:
        self._inner = inner
        self._total = total
        self._keep = keep

    def wait(self, timeout_s: float | None = None) -> bool:
        if not self._inner.wait(timeout_s):
            return False
        total = self._total if self._total.is_sparse else self._total.to_sparse(1)
        self._keep(total.coalesce())
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        self._inner.on_done(callback)


def launch_sparse_sum(gradient: Tensor, group: ProcessGroup, keep: Callable[[Tensor], None]) -> Pending:
    """Start summing a sparse COO gradient over the ranks.

    Args:
        gradient: This rank's, scaled, coalesced, sparse in its first dimension.
        group: Over whom.
        keep: Is given the sum, coalesced, when it has been waited for.

    Contract:
        Collective: every rank, same order.  Blocks: no.  Mutates: nothing.

    Cost:
        On Gloo every rank gathers every rank's coordinates and values; elsewhere a dense all-reduce.
    """
    if group.size() == 1:
        return _PendingSparse(Done(), gradient, keep)
    total = gradient.clone() if _can_sum_sparse(group, gradient) else gradient.to_dense()
    return _PendingSparse(launch_sum(total, group), total, keep)


def _can_sum_sparse(group: ProcessGroup, gradient: Tensor) -> bool:
    return gradient.device.type == "cpu" and backend_of(group) == "gloo"

"""The collectives and messages of a process group: the only functions outside `process_group` that call its methods.

They work on any c10d group, registered by name or handed over as an object. `at_once` says that the caller waits for
the collective anyway: a backend may then perform it on the caller's thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ProcessGroup

from paceline.comm import BACKEND_NAME
from paceline.comm.pending import PendingWork

# torch 2.8 knows it by its former name only.
_ALL_TO_ALL = "all_to_all_single" if hasattr(ProcessGroup, "all_to_all_single") else "alltoall_base"


def launch_sum(tensor: Tensor, group: ProcessGroup, at_once: bool = False) -> PendingWork:
    """Replace `tensor` by the sum of all ranks' tensors. Collective; does not wait, unless `at_once`."""
    options = dist.AllreduceOptions()
    options.asyncOp = not at_once
    return PendingWork(group.allreduce([tensor], options))


def sum_in_place(tensor: Tensor, group: ProcessGroup) -> None:
    """Replace `tensor` by the sum of all ranks' tensors. Collective; blocks. For layers: torch.compile can trace it."""
    dist.all_reduce(tensor, group=group)


def launch_average(tensor: Tensor, group: ProcessGroup) -> PendingWork:
    """Replace `tensor` by the mean, as the backend takes it; not all of them can. Collective; does not wait."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
    return PendingWork(group.allreduce([tensor], options))


def launch_maximum(tensor: Tensor, group: ProcessGroup) -> PendingWork:
    """Replace `tensor` by the elementwise maximum over the ranks. Collective; does not wait."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
    return PendingWork(group.allreduce([tensor], options))


def launch_broadcast(tensor: Tensor, group: ProcessGroup, source: int, at_once: bool = False) -> PendingWork:
    """Replace `tensor` by that of rank `source` of the group. Collective; does not wait, unless `at_once`."""
    options = dist.BroadcastOptions()
    options.asyncOp = not at_once
    options.rootRank, options.rootTensor = source, 0
    return PendingWork(group.broadcast([tensor], options))


def launch_gather(rows: list[Tensor], row: Tensor, group: ProcessGroup, at_once: bool = False) -> PendingWork:
    """Fill `rows` with every rank's `row`. Collective; does not wait, unless `at_once`."""
    options = AllgatherOptions()
    options.asyncOp = not at_once
    return PendingWork(group.allgather([rows], [row], options))


def launch_all_to_all(received: Tensor, sent: Tensor, group: ProcessGroup) -> PendingWork:
    """Send the i-th of equal parts of `sent` to rank i, and fill `received` with what the ranks send to this one.

    Collective; does not wait. Only where `can_all_to_all`.
    """
    exchange = getattr(group, _ALL_TO_ALL)
    return PendingWork(exchange(received, sent, [], [], dist.AllToAllOptions()))


def can_all_to_all(group: ProcessGroup) -> bool:
    """Whether the group has `launch_all_to_all`; one written in Python may not (`RoundRobin`)."""
    kind = type(group)
    return kind is ProcessGroup or getattr(kind, _ALL_TO_ALL) is not getattr(ProcessGroup, _ALL_TO_ALL)


def launch_send(tensor: Tensor, group: Any, peer: int, tag: int) -> dist.Work:
    """Send `tensor` to a rank, which receives it with the same tag. Does not wait.

    Args:
        tensor: Not to be changed until the work is done.
        group: A process group, or a backend of one.
        peer: Rank within the group.
        tag: Tells messages of two ranks apart.
    """
    work: dist.Work = group.send([tensor], peer, tag)
    return work


def launch_receive(tensor: Tensor, group: Any, peer: int, tag: int) -> dist.Work:
    """Fill `tensor` with what a rank sends with the same tag. Does not wait; arguments as of `launch_send`."""
    work: dist.Work = group.recv([tensor], peer, tag)
    return work


def allocate_zeros(
    group: ProcessGroup, num_elements: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return zeros, 1-D; in memory that the group communicates from without a copy, if it has any. Local."""
    ours: Any = group
    if getattr(group, "supports_tensor_alloc", None) is not None and ours.supports_tensor_alloc(device):
        tensor: Tensor = ours.allocate_tensor(num_elements, dtype=dtype, device=device)
        return tensor
    return torch.zeros(num_elements, dtype=dtype, device=device)


def backend_of(group: ProcessGroup) -> str:
    """The group's backend, in lower case; of a group that is not registered, what it calls itself."""
    try:
        return dist.get_backend(group)
    except (KeyError, ValueError, RuntimeError):
        return str(group.name()).lower()


def reduces_in_shared_memory(group: ProcessGroup) -> bool:
    """Whether the group is of our backend and all its ranks share one host's memory."""
    ours: Any = group
    return backend_of(group) == BACKEND_NAME and len(ours.host.hosts) == 1


def device_for_metadata(group: ProcessGroup, device: torch.device) -> torch.device:
    """Where metadata that ranks exchange should lie (counts, shapes, settings): on the host, if the group reaches it.

    Args:
        group: Over whom; Gloo gathers host tensors only, NCCL device tensors only.
        device: Of the module.
    """
    try:
        on_host = torch.device("cpu") in group._device_types
    except (AttributeError, RuntimeError):  # a process group written in Python
        on_host = False
    return torch.device("cpu") if on_host else device


def launch_session_name(process_group: ProcessGroup, device: torch.device) -> Callable[[], str]:
    """Rank 0 draws a name for connections beside the group, and broadcasts it; the result waits and returns it.

    It is rank 0's, so that ranks agree on it whatever failed before on one of them. Collective; does not wait.
    """
    number = torch.tensor([secrets.randbits(62)], device=device_for_metadata(process_group, device))
    sent = launch_broadcast(number, process_group, source=0)

    def name() -> str:
        sent.wait()
        return f"{int(number.item()):x}"

    return name

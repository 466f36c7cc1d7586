"""The choice of the group that carries gradients: shared memory instead of the script's Gloo group, on one host.

It also opens a group for gradients that are under way while the main thread communicates about other things.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from paceline.comm import BACKEND_NAME
from paceline.comm.collectives import backend_of, device_for_metadata, shares_memory
from paceline.comm.device import is_accelerator
from paceline.comm.opened_groups import close, group_like
from paceline.comm.peers import Peers
from paceline.errors import ConfigurationError
from paceline.host.addresses import is_loopback


@dataclass
class _Beside:
    """The group that was made next to another one."""

    # A group of our backend; None: it would gain nothing. Not the group itself, which would keep its own key.
    made: dist.ProcessGroup | None
    # How many have asked for it and not left. What is garbage counts: it ends at other times elsewhere.
    num_users: int = 0


_beside: WeakKeyDictionary[dist.ProcessGroup, _Beside] = WeakKeyDictionary()


def on_one_host(unknown: bool) -> bool:
    """Return whether all ranks of the job run on this host, by the launcher's variables; `unknown` without any.

    This is asked before there is a group; whether the ranks of a group share memory says `shares_memory`. Torchrun sets
    LOCAL_WORLD_SIZE. A script that starts processes itself, as by torch.multiprocessing, sets a MASTER_ADDR.
    """
    here, ranks = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if here is not None and ranks is not None:
        return here == ranks
    return is_loopback(os.environ.get("MASTER_ADDR", "")) or unknown


def gradient_groups(
    process_groups: list[dist.ProcessGroup],
    all_on_cpu: bool,
    all_know: bool,
    in_parts: bool = False,
    peers: Peers | None = None,
) -> list[dist.ProcessGroup]:
    """Return the groups that carry a module's gradients: for each of `process_groups` the one beside it, or itself.

    `all_on_cpu` and `all_know` are facts of all ranks that wrap the module. Shared memory is for CPU tensors, and a
    rank that others have left does not know the group (`knows_beside`). See `group_beside`; local unless
    `all_on_cpu`.
    """
    if not all_on_cpu:
        return process_groups
    if not all_know:
        for group in process_groups:
            _forget(group)
    return [group_beside(group, in_parts, peers) for group in process_groups]


def group_beside(
    group: dist.ProcessGroup, in_parts: bool = False, peers: Peers | None = None
) -> dist.ProcessGroup:
    """Return a `paceline` group with the ranks of `group`, or `group` itself where that would gain nothing.

    It gains where tensors go over Gloo and all ranks of the job share this host's memory. With `in_parts` a part of the
    job's ranks may have one, too. All callers with the same `group` get the same answer. It ends with the default
    group, or when all its users have left. It is collective for a Gloo group under such a launcher, and then blocks.
    Otherwise it is local.
    """
    if group not in _beside:
        if gloo_of(group) is None or group.size() == 1:  # c10d need not be initialized
            return group
        if group.size() < dist.get_world_size() and not in_parts:
            return group
        gains = on_one_host(unknown=False)
        _beside[group] = _Beside(_make_beside(group, peers) if gains else None)
    beside = _beside[group]
    beside.num_users += 1
    return group if beside.made is None else beside.made


def leave(group: dist.ProcessGroup) -> None:
    """Leave what `group_beside` returned; the last closes it. Local; all that go on, in order, nothing under way."""
    beside = _beside.get(group)
    if beside is None:
        return
    beside.num_users -= 1
    if beside.num_users == 0:
        _forget(group)


def _forget(group: dist.ProcessGroup) -> None:
    beside = _beside.pop(group, None)
    if beside is not None and beside.made is not None:
        close(beside.made)


def knows_beside(process_groups: Sequence[dist.ProcessGroup]) -> bool:
    """Return whether this rank knows what stands beside each of these groups. Local."""
    return all(group in _beside for group in process_groups)


def is_beside(group: dist.ProcessGroup) -> bool:
    """Return whether `group` was made by `group_beside`, so that no other code communicates over it. Local."""
    return any(beside.made is group for beside in _beside.values())


def _make_beside(group: dist.ProcessGroup, peers: Peers | None) -> dist.ProcessGroup | None:
    ours: Any = group_like(group, BACKEND_NAME, peers=peers)
    if not shares_memory(ours):  # the same on every rank
        if ours.host.remark and group.rank() == 0:
            why = f"gradients go over Gloo, not through shared memory: {ours.host.remark}."
            warnings.warn(why, stacklevel=2)
        # Another rank may still be connecting to the group that this one is about to close.
        dist.barrier(group)
        dist.destroy_process_group(ours)
        return None
    beside: dist.ProcessGroup = ours
    return beside


def gloo_of(group: dist.ProcessGroup) -> Any:
    """Return the Gloo backend that carries the CPU tensors of a group; None if another one does. Local."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # a group written in Python, or one that has nothing for the CPU
        return None
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def group_for_pieces(
    group: dist.ProcessGroup, device: torch.device, peers: Peers | None = None
) -> dist.ProcessGroup:
    """Return a new group with the ranks of `group`: collectives in it keep no order with those in others.

    It is Gloo's for tensors of the CPU, and one like `group` for an accelerator's. Collective as `group_like`. Raises
    ConfigurationError, on every rank, if c10d does not know `group`, or if that sends CPU tensors without Gloo. Others
    may not take launches from several threads.
    """
    if check_carries_pieces(group, device) is not None:
        return group_like(group, "gloo", peers=peers)
    name = backend_of(group)
    is_known = name in dist.Backend.backend_list and ":" not in name
    return group_like(group, name if is_known else str(dist.get_backend_config(group)), device, peers)


def check_carries_pieces(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the Gloo backend of a group, for tensors of the CPU. Local; raises as `group_for_pieces`."""
    if is_accelerator(device):
        if group not in dist.distributed_c10d._world.pg_map:
            raise ConfigurationError(
                "overlap_forward: torch.distributed did not open the process group, so it cannot open another like it "
                "for pieces of gradients. Open the group with init_process_group, or leave out overlap_forward."
            )
        return None
    gloo = gloo_of(group)
    if gloo is None:
        raise ConfigurationError(
            f"overlap_forward: the process group's backend is {group.name()!r}, and pieces of gradients travel over "
            'Gloo. Open the group with dist.init_process_group("gloo"), or leave out overlap_forward.'
        )
    return gloo


def group_for_numbers(
    group: dist.ProcessGroup, device: torch.device, peers: Peers | None = None
) -> dist.ProcessGroup | None:
    """Return a new Gloo group with the ranks of `group`, if that carries no tensors of the host; else None.

    What the hosts tell each other in a step goes over it, so that none of them has to wait for its device. None stands
    beside a group that c10d does not know. Local where nothing is opened; else as `group_for_pieces`.
    """
    is_known = group in dist.distributed_c10d._world.pg_map
    if not is_accelerator(device) or group.size() == 1 or not is_known:
        return None
    reaches_hosts = not is_accelerator(device_for_metadata(group, device))
    return None if reaches_hosts else group_like(group, "gloo", device, peers)

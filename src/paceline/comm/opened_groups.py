"""Groups that Paceline opens for itself: their names, and how they are opened and closed again.

Rules
1. Names are unique: every rank draws a number, and all take the maximum. So a rank that has died is noticed before
   another waits for it in the new group. Torch names a group over a part of the ranks after these and the number of
   open groups. Once one is closed, a later group would have the name of an open one, or find the closed one's
   values in the store.
2. The number of groups that torch counts never falls by what is closed here. Ranks close at different times, as the
   garbage collector decides, and that number names the script's own groups over a part of the ranks.
3. A group's end waits for its threads and for its collectives. So none of its own threads may end it. After a rank was
   lost, the main thread may not either: a collective of the old group may never end.
4. A group of our backend is held by its lane's thread, which ends when the group is shut down. So code that drops a
   group shuts it down, whether c10d still knows it or not.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist

from paceline.comm import BACKEND_NAME, OWN_GROUPS
from paceline.comm.collectives import all_reduce_max, device_for_metadata, timeout_of
from paceline.comm.peers import Peers

HOST = torch.device("cpu")
_NAME_BITS = 62
_HELD_HERE_ALONE = 2  # references: a list's, and that of the function that counts them
_closed: WeakSet[dist.ProcessGroup] = WeakSet()


def group_like(
    group: dist.ProcessGroup,
    backend: str | None = None,
    device: torch.device = HOST,
    peers: Peers | None = None,
) -> dist.ProcessGroup:
    """Return a new group with the ranks and the timeout of `group`; without a `backend`, of the default group's.

    `device`: that `group` can send from, if not from the host; `peers`: its ranks, to name dead ones. Collective:
    blocks until every rank has come, or raises PeerLostError. It ends with the default group, or when it is closed.
    """
    c10d: Any = dist.distributed_c10d
    number = torch.tensor([secrets.randbits(_NAME_BITS)], device=device_for_metadata(group, device))
    _agree(number, group, peers)
    ranks = dist.get_process_group_ranks(group)
    everyone = c10d._get_default_group()
    of_everyone, store = c10d._world.pg_map[everyone]
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend or of_everyone),
        store,
        f"{OWN_GROUPS}{number.item():x}",
        timeout=timeout_of(group),
        device_id=everyone.bound_device_id,
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    _agree(number, group, peers)  # who has connected might close it before others have
    return cast("dist.ProcessGroup", made)


def _agree(number: torch.Tensor, group: dist.ProcessGroup, peers: Peers | None) -> None:
    """Replace the number by the largest of any rank. Collective; blocks."""
    pending = all_reduce_max(number, group)
    if peers is None:
        pending.wait()
    else:
        peers.wait(pending, "opening a process group", on_host=number.is_cpu)


def close(group: dist.ProcessGroup) -> None:
    """Close a group opened here. Local; a second call does nothing. Waiting ranks are told that this one left."""
    if group in _closed:
        return
    _closed.add(group)
    _break(group)  # else its lane is waited for, which may wait for a rank that has died
    world: Any = dist.distributed_c10d._world
    if group in world.pg_map:
        stands_for_it = cast("Any", dist.ProcessGroup)(group.rank(), group.size())
        world.pg_names[stands_for_it] = world.pg_names[group]  # rule 2
        dist.destroy_process_group(group)
    end_aside(group)  # one of its threads may hold it by the callback of a collective that has just completed


def end_aside(group: dist.ProcessGroup) -> None:
    """Let a group end on a thread of its own, once no other reference is left (rules 3 and 4). Local."""
    _break(group)
    threading.Thread(target=_end, args=([group],), name="paceline-close", daemon=True).start()


def abort_ours() -> None:
    """Break all groups of our backend: every wait in them raises, here and on neighbours. Local; from any thread."""
    for group in list(dist.distributed_c10d._world.pg_map):
        _break(group)


def abort_on(device: torch.device) -> None:
    """Abort all groups that carry a device's tensors. Local; from any thread; may wait for what is queued there.

    The streams that wait in them go on, over old bytes. All are aborted as one call to NCCL: one by one, two
    communicators may wait for each other (pytorch issue 119797).
    """
    found: list[Any] = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # it has nothing for this device
            backend: Any = group._get_backend(device)
            if not isinstance(backend, dist.ProcessGroupGloo):  # its waits are the host's
                found.append(backend)
    together = next((each for each in found if hasattr(each, "_group_start")), None)
    if together is not None:
        together._group_start()
    for backend in found:
        backend.abort()
    if together is not None:
        together._group_end()


def _is_ours(group: Any) -> bool:
    return bool(getattr(group, "name", str)() == BACKEND_NAME)


def _break(group: Any) -> None:
    """Break a group of our backend; one of another backend stays as it is."""
    if _is_ours(group):
        group.abort()


def _end(held: list[dist.ProcessGroup]) -> None:
    """Shut a group down, if c10d has not, and drop it, once no other reference is left."""
    if _is_ours(held[0]):
        cast("Any", held[0]).shutdown()
    pause_s = 0.001
    while sys.getrefcount(held[0]) > _HELD_HERE_ALONE:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
    held.clear()

"""Registers the backend `paceline` with c10d, without importing torch for those who only `import paceline`."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from paceline.comm import BACKEND_NAME, OWN_GROUPS
from paceline.errors import ConfigurationError
from paceline.late_imports import when_imported

if TYPE_CHECKING:
    import torch.distributed as dist

_C10D = "torch.distributed.distributed_c10d"


def register() -> None:
    """Make `init_process_group("paceline")` and `new_group(backend="paceline")` work.

    Local; a second call does nothing. Before torch.distributed is imported, it is remembered until then.
    """
    when_imported(_C10D, _register_with)


def _register_with(c10d: Any) -> None:
    if c10d.is_available() if hasattr(c10d, "is_available") else True:
        backend = c10d.Backend
        if BACKEND_NAME not in backend.backend_list:
            backend.register_backend(BACKEND_NAME, _make, extended_api=True, devices=["cpu", "cuda"])


def _make(what: Any, pg_options: object) -> dist.ProcessGroup:
    """Make a group from c10d's description of it, a `_DistributedBackendOptions`."""
    if pg_options is not None:
        raise ConfigurationError(
            f"pg_options={pg_options!r}: the backend {BACKEND_NAME!r} takes no options. Leave pg_options out."
        )
    import torch.distributed as dist  # noqa: PLC0415  only those who ask for one pay for it

    from paceline.comm.rendezvous import announce  # noqa: PLC0415

    store = _store_of(what)
    announce(dist.PrefixStore("memory", store), what.group_rank)  # what is imported now may take seconds
    from paceline.process_group.backend import ProcessGroup  # noqa: PLC0415

    waits = getattr(what, "enable_reconfigure", False)  # from torch 2.14 on
    talks = not str(what.group_id).startswith(OWN_GROUPS)
    return ProcessGroup(store, what.group_rank, what.group_size, what.timeout, waits, talks)


def _store_of(what: Any) -> dist.Store:
    """Return a store of this group alone, also if an earlier group had its name: members count how often they made it.

    With `use_local_synchronization` torch names a group by its members, and by how many groups the rank is in. That
    number may differ among the members, so their numbers in the job find each other instead.
    """
    import torch.distributed as dist  # noqa: PLC0415

    store = what.store
    if re.fullmatch("[0-9a-f]{40}", what.group_id):
        members = hashlib.sha256(str(what.global_ranks_in_group).encode()).hexdigest()
        store = dist.PrefixStore(f"paceline/members/{members}", dist.distributed_c10d._get_default_store())
    return dist.PrefixStore(str(store.add(f"made/{what.group_rank}", 1)), store)

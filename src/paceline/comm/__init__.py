"""Communication over any process group: launch a collective, wait for it, detect lost ranks.

Imports torch on first use. These names are what a reduction outside of the package needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use

if TYPE_CHECKING:
    from paceline.comm.backward import Backward
    from paceline.comm.collectives import (
        C10dWork,
        Chain,
        Completion,
        Work,
        all_gather,
        all_reduce,
        all_to_all,
        broadcast,
        device_for_metadata,
        launch_session_name,
        timeout_of,
    )
    from paceline.comm.device import host_memory, to_device, to_host
    from paceline.comm.lane import ContinuedWork, Lane, LaneWork
    from paceline.comm.rendezvous import Rendezvous, store_of_job

BACKEND_NAME = "paceline"  # under which c10d knows our own backend
OWN_GROUPS = "paceline/"  # how names of groups begin that Paceline opens for itself
TOKEN = "PACELINE_TOKEN"  # noqa: S105  the variable's name
"""Environment variable: a secret that all ranks of a job share. `paceline run` makes one where there is one machine."""

RANKS_OF_HOST = "PACELINE_RANKS_OF_HOST"
"""Environment variable: the ranks of each host of the job, `4,2`, in any order. `paceline run --nnodes` sets it."""

__all__ = [
    "Backward",
    "C10dWork",
    "Chain",
    "Completion",
    "ContinuedWork",
    "Lane",
    "LaneWork",
    "Rendezvous",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "device_for_metadata",
    "host_memory",
    "launch_session_name",
    "store_of_job",
    "timeout_of",
    "to_device",
    "to_host",
]

__getattr__ = on_first_use(
    __name__,
    {
        "backward": "Backward",
        "collectives": "C10dWork Chain Completion Work all_gather all_reduce all_to_all broadcast "
        "device_for_metadata launch_session_name timeout_of",
        "device": "host_memory to_device to_host",
        "lane": "ContinuedWork Lane LaneWork",
        "rendezvous": "Rendezvous store_of_job",
    },
)

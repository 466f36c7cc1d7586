"""The mean of gradients over UDP, where a bounded part may be lost: `reduction="bounded_loss"`, and its transport.

Names are imported at their first use, because numba, which compiles the transport, takes half a second to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use

if TYPE_CHECKING:
    from paceline_lossy.bounded_loss import BoundedLoss
    from paceline_lossy.connecting import open_lossy_transport
    from paceline_lossy.datagrams.datagram_loop import compile_all
    from paceline_lossy.datagrams.lossy_link import LossyLink
    from paceline_lossy.datagrams.udp_socket import Introduction
    from paceline_lossy.loss_report import LossReport
    from paceline_lossy.lossy_transport import Bound, Losses, LossyTransport, Sum

__all__ = [
    "Bound",
    "BoundedLoss",
    "Introduction",
    "LossReport",
    "Losses",
    "LossyLink",
    "LossyTransport",
    "Sum",
    "compile_all",
    "open_lossy_transport",
]

__getattr__ = on_first_use(
    __name__,
    {
        "bounded_loss": "BoundedLoss",
        "connecting": "open_lossy_transport",
        "datagrams.datagram_loop": "compile_all",
        "datagrams.lossy_link": "LossyLink",
        "datagrams.udp_socket": "Introduction",
        "loss_report": "LossReport",
        "lossy_transport": "Bound Losses LossyTransport Sum",
    },
)

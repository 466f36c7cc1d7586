"""The path that collectives take between hosts: Gloo's TCP, or with PACELINE_BETWEEN_HOSTS=udp reliable datagrams.

Rules
1. All ranks take the same: rank 0's options or environment say which is wanted, and datagrams are used only if
   full-sized ones get through between every two ranks, both ways.
2. Where they do not, for a firewall or an MTU that lies, all fall back to TCP, and rank 0 says once why. If
   warnings are errors there, it is an error of all ranks.
"""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from paceline.errors import ConfigurationError
from paceline.process_group.connections import Gloo, check_datagrams, open_datagram_transport
from paceline.process_group.options import TCP, UDP
from paceline.transports import Transport
from paceline.transports.c10d import C10dTransport

PATH = "PACELINE_BETWEEN_HOSTS"
"""Environment variable: "tcp", the default, or "udp"; rank 0's counts."""

HANDSHAKE_S = 10.0
_TROUBLE_BYTES = 600


def wanted_path(option: str = "") -> str:
    """What this group's options ask for, or else the environment; raises ConfigurationError if that is neither path."""
    wanted = option or os.environ.get(PATH, TCP) or TCP
    if wanted not in (TCP, UDP):
        raise ConfigurationError(f'{PATH}={wanted!r}: say "udp", or "tcp", which is the default.')
    return wanted


def open_path(inner: Gloo, store: dist.Store, timeout: timedelta, wanted: str) -> Transport:
    """Open the path that rank 0 wants, the same on all ranks; TCP, with a warning, if datagrams do not get through.

    Nothing else uses `inner` and `store` meanwhile. Collective; blocks. The warning is raised on all ranks if rank 0
    takes warnings for errors.
    """
    is_wanted = torch.tensor([int(wanted == UDP)])
    inner.broadcast([is_wanted], dist.BroadcastOptions()).wait()
    if not is_wanted.item():
        return C10dTransport(inner)
    transport = None
    troubles = _gathered(inner, _obstacle(inner))  # before anyone waits for a rank that cannot come
    if not troubles:
        transport, trouble = _greet_all(inner, store, timeout)
        troubles = _gathered(inner, trouble)
    if transport is not None and not troubles:
        return cast("Transport", transport)
    if transport is not None:
        transport.close(0.0)
    _say_why(inner, troubles[0])
    return C10dTransport(inner)


def _say_why(inner: Gloo, trouble: str) -> None:
    """Warn on rank 0; if that is an error there, raise it on all ranks. Collective."""
    refused = ""
    if inner.rank() == 0:
        try:
            warnings.warn(
                f"{PATH}=udp: {trouble} All ranks of this group use TCP instead. Let UDP pass between the hosts, or "
                f"leave {PATH} out.",
                UserWarning,
                stacklevel=3,
            )
        except UserWarning as warning:
            refused = str(warning)
    for words in _gathered(inner, refused):
        raise UserWarning(words)


def _obstacle(inner: Gloo) -> str:
    """Why this rank cannot take datagrams at all; "" if it can. Local."""
    try:
        check_datagrams(inner.size())
    except Exception as error:  # noqa: BLE001  whatever it is, the others would wait for this rank
        return f"rank {inner.rank()} cannot take datagrams ({error})."
    return ""


def _greet_all(inner: Gloo, store: dist.Store, timeout: timedelta) -> tuple[Any, str]:
    """Exchange a datagram of full size with every other rank; return the transport, and what went wrong if anything."""
    transport = None
    try:
        transport = open_datagram_transport(store, inner.rank(), inner.size(), timeout)
        peers = [peer for peer in range(inner.size()) if peer != inner.rank()]
        greeting = torch.zeros(transport.payload_bytes, dtype=torch.uint8)
        transport.exchange(
            [(peer, greeting) for peer in peers],
            [(peer, torch.empty_like(greeting)) for peer in peers],
            min(HANDSHAKE_S, timeout.total_seconds() / 2),
        )
    except Exception as error:  # noqa: BLE001  as above
        return transport, f"datagrams do not get through ({error})."
    return transport, ""


def _gathered(inner: Gloo, words: str) -> list[str]:
    """Every rank's words, if it has any. Collective."""
    mine = torch.zeros(_TROUBLE_BYTES, dtype=torch.uint8)
    encoded = words.encode()[:_TROUBLE_BYTES]
    if encoded:
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(inner.size())]
    inner.allgather([rows], [mine]).wait()
    said = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
    return [each for each in said if each]

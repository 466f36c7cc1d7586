"""Checks whether this host's TCP is tuned for networks that drop packets: congestion control, smallest time-out."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from paceline.host.addresses import is_loopback

QUIET = "PACELINE_TCP_ADVICE"  # 0: no advice, because the program that starts the launchers sets TCP itself
_SYSTEM = Path("/proc/sys/net/ipv4")
_CONTROL, _TIMEOUT = "tcp_congestion_control", "tcp_rto_min_us"
_KERNELS_TIMEOUT_MS = 200.0
_GOOD_CONTROL, _GOOD_TIMEOUT_MS = "bbr", 20.0


@dataclass(frozen=True)
class TcpTuning:
    """The settings of TCP towards an address."""

    congestion_control: str  # its name; "" if it is not known
    min_timeout_ms: float  # after how long at least it repeats what was not confirmed
    can_set_timeout: bool  # whether the kernel (6.11 or later) has a setting for it, and not only routes

    @classmethod
    def towards(cls, address: str, system: Path = _SYSTEM) -> TcpTuning:
        """Read the settings of the route to `address`, else of the whole host. Local."""
        route = _route_metrics(address)
        timeout_us = _read(system / _TIMEOUT)
        own = float(str(route["rto_min"])) if "rto_min" in route else None
        whole = float(timeout_us) / 1000 if timeout_us else _KERNELS_TIMEOUT_MS
        return cls(
            congestion_control=str(route.get("congestion") or _read(system / _CONTROL)),
            min_timeout_ms=whole if own is None else own,
            can_set_timeout=bool(timeout_us),
        )

    def advice(self) -> str | None:
        """Return a line that says what to set for networks that drop packets; None if all is set."""
        found, remedies = [], []
        if self.congestion_control not in (_GOOD_CONTROL, ""):
            found.append(
                f"uses {self.congestion_control}, not bbr (net.ipv4.{_CONTROL}, or the route's congctl)"
            )
            remedies.append(f"sysctl -w net.ipv4.{_CONTROL}={_GOOD_CONTROL}")
        if self.min_timeout_ms > _GOOD_TIMEOUT_MS:
            found.append(
                f"waits {self.min_timeout_ms:g} ms before it repeats a packet (net.ipv4.{_TIMEOUT}, or the route's "
                "rto_min)"
            )
            remedies.append(
                f"sysctl -w net.ipv4.{_TIMEOUT}=5000"
                if self.can_set_timeout
                else "ip route change <the route, as ip route shows it> rto_min 5ms"
            )
        if not found:
            return None
        return (
            f"TCP here {' and '.join(found)}. If your network drops packets, that sets the pace; as root, on every "
            f"host: {'; '.join(remedies)}"
        )


def advice_towards(host: str) -> str | None:
    """Return `TcpTuning.advice` for a host's name or address; None for this machine, or where nothing is known."""
    if os.environ.get(QUIET) == "0":
        return None
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    is_here = is_loopback(address) or _route_metrics(address).get("type") == "local"
    return None if is_here or not _SYSTEM.is_dir() else TcpTuning.towards(address).advice()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _route_metrics(address: str) -> dict[str, object]:
    """Return the TCP settings of the route to an address, as `ip` prints them; empty without `ip`."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError, KeyError):
        done = subprocess.run(
            ["ip", "-j", "route", "get", address], check=True, capture_output=True, text=True, timeout=5
        )
        route = json.loads(done.stdout)[0]
        found: dict[str, object] = {"type": route.get("type", "")}
        for metrics in route.get("metrics", []):
            found |= metrics
        return found
    return {}

"""Checks of this host's network: its name, its interfaces, its kernel's settings of TCP. Imports no torch."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from paceline.host.addresses import ELSEWHERE, is_loopback, own_address_towards
from paceline.launch.tcp_tuning import TcpTuning
from paceline.preflight.check_result import CheckResult

_ROOT = Path("/")
_LEAST_WINDOW_BYTES = 4 * 2**20
_INTERFACE = "GLOO_SOCKET_IFNAME"


def name() -> CheckResult:
    """Return whether other hosts could find this one by its name."""
    own = socket.gethostname()
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(own, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        return CheckResult(
            f"{own} has no address ({error}): groups between hosts cannot be opened by it",
            "bad",
            f"echo '{own_address_towards(ELSEWHERE) or '10.0.0.5'} {own}' >> /etc/hosts",
        )
    said = f"{own} is {', '.join(found)}"
    outside = [address for address in found if not is_loopback(address)]
    if not outside and (address := own_address_towards(ELSEWHERE)):
        return CheckResult(
            f"{said}, which means each host itself. With several hosts, Gloo would listen where nobody comes",
            "note",
            f"export {_INTERFACE}={_interface_of_route() or 'eth0'}  # or in /etc/hosts: {address} {own}",
        )
    return CheckResult(said)


def interfaces(root: Path = _ROOT) -> CheckResult:
    """Interfaces that are up, and how fast they say they are."""
    found, chosen = [], os.environ.get(_INTERFACE, "")
    names = []
    for folder in sorted((root / "sys/class/net").iterdir()):
        state = (folder / "operstate").read_text().strip()
        is_loopback_one = folder.name == "lo"
        if state == "down" and not is_loopback_one:
            continue
        names.append(folder.name)
        if not is_loopback_one:
            mtu = (folder / "mtu").read_text().strip()
            found.append(f"{folder.name} (MTU {mtu}{_speed(folder)})")
    said = ", ".join(found) or "only loopback is up: ranks on this host alone"
    missing = [part for part in chosen.split(",") if part and part not in names]
    if missing:
        return CheckResult(
            f"{_INTERFACE} names {missing[0]}, which is not up; {said}", "bad", f"unset {_INTERFACE}"
        )
    return CheckResult(f"{said}; {_INTERFACE}={chosen}" if chosen else said)


def tcp(root: Path = _ROOT) -> CheckResult:
    """Congestion control, smallest time-out and largest window."""
    system = root / "proc/sys/net/ipv4"
    tuning = TcpTuning.towards(ELSEWHERE, system)
    windows = {kind: int((system / f"tcp_{kind}mem").read_text().split()[2]) for kind in ("r", "w")}
    said = (
        f"{tuning.congestion_control or 'unknown congestion control'}, time-out of at least {tuning.min_timeout_ms:g} "
        f"ms, windows up to {min(windows.values()) / 2**20:.0f} MiB"
    )
    if (small := min(windows, key=lambda kind: windows[kind])) and windows[small] < _LEAST_WINDOW_BYTES:
        return CheckResult(
            f"{said}: too small for fast links with latency",
            "note",
            f"sysctl -w net.ipv4.tcp_{small}mem='4096 131072 67108864'",
        )
    advice = tuning.advice()
    if advice is None:
        return CheckResult(said)
    return CheckResult(
        f"{said}; matters where packets are dropped", "note", advice.rpartition("on every host: ")[2]
    )


def loopback() -> CheckResult:
    """Return whether processes of this host can reach each other."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=2) as client,
    ):
        accepted, _ = listener.accept()
        with accepted:
            client.sendall(b"x")
            accepted.settimeout(2)
            if accepted.recv(1) == b"x":
                return CheckResult("127.0.0.1 carries")
    return CheckResult("127.0.0.1 does not carry", "bad", "ip link set lo up")


def _speed(folder: Path) -> str:
    try:
        speed = int((folder / "speed").read_text())
    except (OSError, ValueError):  # virtual ones do not say
        return ""
    return f", {speed / 1000:g} Gbit/s" if speed > 0 else ""


def _interface_of_route() -> str:
    """Return the interface of the default route, by the kernel's table."""
    try:
        rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        return ""
    return next((row[0] for row in rows if row[1] == "00000000"), "")

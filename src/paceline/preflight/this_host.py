"""Checks of this host: its cores, shared memory, limits, clocks, name, interfaces and settings of TCP. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from paceline.host.addresses import ELSEWHERE, interface_towards, is_loopback, own_address_towards
from paceline.host.thread_times import cpu_groups

Level = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    topic: str = field(default="", kw_only=True)  # name of the check; filled in by `looked_at`
    found: str  # the finding, with numbers
    # "bad": a training fails or is slow here. "note": it may be, depending on what it does. "good" otherwise.
    level: Level = "good"
    remedy: str = ""  # a command that mends it, or what to do; "" where nothing has to be done


def looked_at(topic: str, check: Callable[[], CheckResult]) -> CheckResult:
    """Return the result of a check. A check that fails with an error says so, and the other checks go on."""
    try:
        return replace(check(), topic=topic)
    except (OSError, ValueError, IndexError, KeyError, ImportError) as error:
        return CheckResult(f"could not be read ({type(error).__name__}: {error})", "note", topic=topic)


_GIB = 2**30
_LEAST_SHARED_BYTES = _GIB
_LEAST_FREE_BYTES = _GIB
_LEAST_FILES = 4096
_GOOD_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")
_TIME_ERROR = 5  # adjtimex: the clock is not synchronized
_ROOT = Path("/")


def threads() -> CheckResult:
    """Return how many threads a rank would compute with."""
    cores = len(os.sched_getaffinity(0))
    given = os.environ.get("OMP_NUM_THREADS")
    if given is None:
        said = f"OMP_NUM_THREADS is not set: {cores} a rank, all cores; torchrun gives 1, paceline run shares them out"
        return CheckResult(said)
    if not given.split(",")[0].isdecimal():
        return CheckResult(f"OMP_NUM_THREADS is {given!r}, no number", "bad", "unset OMP_NUM_THREADS")
    if int(given.split(",")[0]) > cores:
        return CheckResult(
            f"OMP_NUM_THREADS is {given}, and there are {cores} cores", "bad", "unset OMP_NUM_THREADS"
        )
    return CheckResult(f"OMP_NUM_THREADS is {given} on {cores} cores")


def quota(root: Path = _ROOT) -> CheckResult:
    """Return whether a cgroup gives less time than the cores that are seen, as containers do."""
    cores = len(os.sched_getaffinity(0))
    allowed = _allowed_cores(root)
    if allowed is None or allowed >= cores:
        return CheckResult("none below the number of cores")
    return CheckResult(
        f"{allowed:g} of {cores} cores: threads beyond them are stopped in the middle of a step",
        "bad",
        f"export OMP_NUM_THREADS={max(1, int(allowed))}  # or start the container with --cpus={cores}",
    )


def shared_memory(root: Path = _ROOT) -> CheckResult:
    """Check the file system in memory by which ranks of one host and loader workers exchange tensors."""
    found = os.statvfs(root / "dev/shm")
    total, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    said = f"/dev/shm has {total / _GIB:.2g} GiB, {free / _GIB:.2g} GiB free"  # noqa: S108  it is looked at
    if free >= _LEAST_SHARED_BYTES:
        return CheckResult(said)
    return CheckResult(
        f"{said}: loader workers and ranks end with a bus error once it is full",
        "bad",
        "mount -o remount,size=8G /dev/shm  # in a container: docker run --shm-size=8g",
    )


def open_files() -> CheckResult:
    """Check the limit of files and sockets that a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{_count(soft)} open files a process (at most {_count(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES:
        return CheckResult(said)
    can_raise = hard == resource.RLIM_INFINITY or hard >= _LEAST_FILES
    return CheckResult(
        f"{said}: many ranks, or loader workers that share tensors by files, need more",
        "note",
        "ulimit -n 65536" if can_raise else "set nofile in /etc/security/limits.conf, then log in again",
    )


def locked_memory() -> CheckResult:
    """Check the limit of memory that may not be swapped, as pinned memory and RDMA need it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = f"{'unlimited' if soft == resource.RLIM_INFINITY else f'{soft / 2**20:.0f} MiB'} may be locked"
    has_rdma = Path("/sys/class/infiniband").is_dir()
    if soft == resource.RLIM_INFINITY or not has_rdma:
        return CheckResult(said)
    return CheckResult(f"{said}, and RDMA needs all it sends", "bad", "ulimit -l unlimited")


def clocks(root: Path = _ROOT) -> CheckResult:
    """Check how long reading the clock takes, and whether it is synchronized with other hosts."""
    source = (root / "sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    buffer = ctypes.create_string_buffer(512)  # struct timex; mode 0 only reads
    state = ctypes.CDLL(None).adjtimex(buffer)
    is_kept = "kept in time" if state not in (-1, _TIME_ERROR) else "not synchronized with other hosts"
    said = f"clock {source}, {is_kept}"
    if source not in _GOOD_CLOCKS:
        return CheckResult(
            f"{said}: reading it takes a system call each time",
            "note",
            "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource",
        )
    if state == _TIME_ERROR:
        return CheckResult(f"{said}. Only log lines of several hosts need that", "good")
    return CheckResult(said)


def frequency(root: Path = _ROOT) -> CheckResult:
    """Check whether the governor lets cores run at their full frequency."""
    files = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))
    governors = {file.read_text().strip() for file in files}
    if not governors:
        return CheckResult("the kernel here does not set it")
    if governors & {"powersave", "conservative"} and not _is_intel_pstate(root):
        return CheckResult(
            f"governor {', '.join(sorted(governors))}: cores start slowly",
            "note",
            "cpupower frequency-set -g performance",
        )
    return CheckResult(f"governor {', '.join(sorted(governors))}")


def memory(root: Path = _ROOT) -> CheckResult:
    """Check how much memory is free, and whether something has been swapped out."""
    text = (root / "proc/meminfo").read_text()
    lines = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines()}
    used = lines["SwapTotal"] - lines["SwapFree"]
    said = f"{lines['MemAvailable'] / _GIB:.1f} of {lines['MemTotal'] / _GIB:.1f} GiB available"
    if used > lines["MemTotal"] / 50:
        said += f", {used / _GIB:.1f} GiB swapped out"
        return CheckResult(said, "note", "swapoff -a  # if it fits; or start fewer ranks and loader workers")
    return CheckResult(said)


def temporary_files() -> CheckResult:
    """Check the folders in which a launch writes its files, and torch its compiled code."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    said = f"{folder} has {free / _GIB:.1f} GiB free"
    if free >= _LEAST_FREE_BYTES:
        return CheckResult(said)
    return CheckResult(said, "note", "export TMPDIR=/a/larger/place")


def _allowed_cores(root: Path) -> float | None:
    mount = root / "sys/fs/cgroup"
    folders = [each for folder in cpu_groups(root) for each in (folder, *folder.parents)]
    limits = [_cores(folder) for folder in folders if folder.is_relative_to(mount)]
    return min((cores for cores in limits if cores is not None), default=None)


def _cores(folder: Path) -> float | None:
    if (file := folder / "cpu.max").exists():
        limit, period = file.read_text().split()
    elif (file := folder / "cpu.cfs_quota_us").exists():
        limit, period = file.read_text(), (folder / "cpu.cfs_period_us").read_text()
    else:
        return None
    return int(limit) / int(period) if limit != "max" and int(limit) > 0 else None


def _is_intel_pstate(root: Path) -> bool:
    """Return whether the driver is intel_pstate, whose `powersave` is what others call `schedutil`."""
    file = root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"
    return file.exists() and file.read_text().strip().startswith("intel_pstate")


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


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
            f"{said}, which means each host itself. With several hosts, Gloo would listen where no host connects",
            "note",
            f"export {_INTERFACE}={interface_towards(ELSEWHERE) or 'eth0'}  # or in /etc/hosts: {address} {own}",
        )
    return CheckResult(said)


def interfaces(root: Path = _ROOT) -> CheckResult:
    """Check the interfaces that are up, and how fast they say they are."""
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


_TCP = Path("/proc/sys/net/ipv4")
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
    def towards(cls, address: str, system: Path = _TCP) -> TcpTuning:
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

    def remedy(self) -> str:
        """Return the commands that tune TCP for networks that drop packets; "" if it is tuned."""
        remedies = []
        if self.congestion_control not in (_GOOD_CONTROL, ""):
            remedies.append(f"sysctl -w net.ipv4.{_CONTROL}={_GOOD_CONTROL}")
        if self.min_timeout_ms > _GOOD_TIMEOUT_MS:
            remedies.append(
                f"sysctl -w net.ipv4.{_TIMEOUT}=5000"
                if self.can_set_timeout
                else "ip route change <the route, as ip route shows it> rto_min 5ms"
            )
        return "; ".join(remedies)


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
        found: dict[str, object] = {}
        for metrics in route.get("metrics", []):
            found |= metrics
        return found
    return {}


def tcp(root: Path = _ROOT) -> CheckResult:
    """Check congestion control, smallest time-out and largest window."""
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
    if remedy := tuning.remedy():
        return CheckResult(f"{said}; matters where packets are dropped", "note", remedy)
    return CheckResult(said)


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

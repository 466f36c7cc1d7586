"""One network device: the rate and queues of what it sends, and its settings; in the current network namespace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyroute2 import IPRoute, NetlinkError
from pyroute2.ethtool import Ethtool
from pyroute2.netlink.rtnl.tcmsg import plugins, sched_pfifo

from paceline.errors import UnsupportedError
from paceline.lab.emulation import filters

# pyroute2 knows the sister that counts packets, whose message is the same.
plugins.setdefault("bfifo", sched_pfifo)

_ROOT, _WHOLE_LINK, _ONLY_CLASS = 0x10000, 0x10001, 0x10010
_FLOOR_BYTES_PER_S = 1000  # what strict priority guarantees a band: as good as nothing
_OFFLOADS = (
    "tx-tcp-segmentation",
    "tx-tcp6-segmentation",
    "tx-tcp-mangleid-segmentation",
    "tx-tcp-ecn-segmentation",
    "tx-udp-segmentation",
    "tx-generic-segmentation",
)


def shape(
    ip: IPRoute,
    name: str,
    rate_bits_per_s: float | None,
    queue_bytes: int,
    mtu: int,
    *,
    priority: bool = False,
) -> None:
    """Give what a device sends a rate and a finite queue; with `priority` one queue a DSCP class selector."""
    if rate_bits_per_s is None:
        return
    index, rate = find(ip, name), round(rate_bits_per_s / 8)
    # A burst is what may leave at once: ten packets, or what a millisecond's oversleeping would cost.
    burst = max(10 * mtu, round(rate * 0.0005))
    quantum = mtu + 100
    limits = {"ceil": rate, "cburst": burst, "quantum": quantum}
    with needs("the HTB queueing discipline (sch_htb)"):
        ip.tc("add", "htb", index, _ROOT, default=(_ONLY_CLASS + 7 if priority else _ONLY_CLASS) & 0xFFFF)
    if not priority:
        ip.tc("add-class", "htb", index, _ONLY_CLASS, parent=_ROOT, rate=rate, burst=burst, **limits)
        ip.tc("add", "bfifo", index, 0x100000, parent=_ONLY_CLASS, limit=queue_bytes)
        return
    ip.tc("add-class", "htb", index, _WHOLE_LINK, parent=_ROOT, rate=rate, burst=burst, **limits)
    for band in range(filters.NUM_BANDS):
        of_band = filters.CLASS_OF_BAND + band
        ip.tc(
            "add-class",
            "htb",
            index,
            of_band,
            parent=_WHOLE_LINK,
            rate=_FLOOR_BYTES_PER_S,
            burst=quantum,
            prio=band,
            **limits,
        )
        ip.tc("add", "bfifo", index, (0x10 + band) << 16, parent=of_band, limit=queue_bytes)
    filters.attach(filters.band_of_dscp(), index, _ROOT)


def send_single_packets(name: str) -> None:
    """Have segments cut up before the device, so that what crosses the link are packets."""
    tool = Ethtool()
    features = tool.get_features(name)
    for offload in _OFFLOADS:
        if offload in features.features:
            features.features[offload].enable = False
    tool.set_features(name, features)


@contextmanager
def needs(what: str) -> Iterator[None]:
    """Say what the kernel lacks if it refuses what follows."""
    try:
        yield
    except NetlinkError as error:
        raise UnsupportedError(
            f"this kernel lacks {what}, or does not allow them here ({error.args[1]}). Load the module, run as root, "
            "or try another machine. Nothing was created."
        ) from error


def find(ip: IPRoute, name: str) -> int:
    """The index of a device."""
    return int(ip.link_lookup(ifname=name)[0])


def quiet(name: str) -> None:
    """No IPv6 on an interface: its neighbour discovery would be counted as traffic."""
    set_kernel(f"net/ipv6/conf/{name}/disable_ipv6", "1")


def set_kernel(name: str, value: str) -> None:
    """Set a kernel parameter of the current network; one that is not there is not needed."""
    with suppress(OSError):
        (Path("/proc/sys") / name).write_text(value)

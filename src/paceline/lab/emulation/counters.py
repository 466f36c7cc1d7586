"""What went over the links, and what did not; read in the laboratory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.lab.emulation import marking

if TYPE_CHECKING:
    from pyroute2 import IPRoute

    from paceline.lab.emulation.network import Network

_CLSACT, _ROOT = 0xFFFF0000, 0x10000


def read(network: Network, pids: list[int]) -> list[dict[str, int]]:
    """One record a host, totals since the start; the fields are those of `cluster.Counters`."""
    records = []
    for host, pid in enumerate(pids):
        total: dict[str, int] = {}
        for link in range(network.num_links):
            for name, value in _of_link(network, host, link).items():
                total[name] = total.get(name, 0) + value
        records.append(total | {"retransmits": _retransmits(pid)})
    return records


def _of_link(network: Network, host: int, link: int) -> dict[str, int]:
    """Read at the switch's port, whose sending is the host's receiving."""
    port = network.port(host, link)
    stats = network.ip.get_links(port.index)[0].get_attr("IFLA_STATS64")
    drops = _drops(network.ip, port.index)
    marked, not_ecn = (0, 0) if port.marks is None else marking.read(port.marks)
    at_host = _drops(network.ip_of(host), port.index_at_host)
    hosts_stats = network.ip_of(host).get_links(port.index_at_host)[0].get_attr("IFLA_STATS64")
    return {
        "sent_bytes": stats["rx_bytes"],
        "sent_packets": stats["rx_packets"],
        "received_bytes": stats["tx_bytes"],
        "received_packets": stats["tx_packets"],
        "lost_packets": drops.get(_CLSACT, 0) - not_ecn,
        "port_drops": drops.get(_ROOT, 0),
        "host_drops": at_host.get(_ROOT, 0),
        "wire_drops": stats["tx_dropped"] + hosts_stats["tx_dropped"] if network.wires else 0,
        "marked_packets": marked,
        "not_ecn_drops": not_ecn,
    }


def _drops(ip: IPRoute, index: int) -> dict[int, int]:
    """What each queueing discipline of an interface dropped, by its handle."""
    found = {}
    for queue in ip.get_qdiscs(index):
        stats = queue.get_attr("TCA_STATS2")
        counts = None if stats is None else stats.get_attr("TCA_STATS_QUEUE")
        if counts is not None:
            found[queue["handle"]] = int(counts["drops"])
    return found


def _retransmits(pid: int) -> int:
    """TCP segments that a host sent more than once."""
    lines = [line.split() for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines()]
    names, values = (line for line in lines if line[0] == "Tcp:")
    return int(values[names.index("RetransSegs")])

"""Network of an emulated cluster: links and switches, built by pyroute2 in the laboratory, and their counters.

    host 0           switch (this namespace)              host 1
    eth0 ----------- p0 [bridge sw0r0] p1 --------------- eth0
    rate, fifo       loss in, rate and fifo out           rate, fifo

Rules
1. The current namespace is the switch; a host's is entered through its first process.
2. A link's rate is HTB's at both ends: the host's as it sends, the switch port's towards the host. What exceeds it
   waits in a byte-limited FIFO, and what exceeds that is dropped.
3. With several racks each has a bridge, joined to a bridge "spine" by a shaped link. With several links a host has
   one to each of several such networks. An address on none of them is reached over all links, flow by flow.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from paceline_lab.emulation import delay, ecn_marking
from paceline_lab.emulation.cluster_spec import ClusterSpec
from paceline_lab.emulation.namespaces import inside
from paceline_lab.emulation.scenario import Change
from paceline_lab.emulation.traffic_control import (
    EGRESS,
    INGRESS,
    QDISC_CLSACT,
    QDISC_ROOT,
    attach,
    detach,
    disable_ipv6,
    drops_by_queue,
    index_of,
    needs,
    random_loss,
    reshape,
    send_single_packets,
    set_kernel,
    shape,
)
from paceline_lab.errors import UnsupportedError

_HOST_QUEUE_BYTES = 1 << 20
_NO_PREFIX_ROUTE = 0x200
_LINK_SCOPE, _KERNEL_PROTOCOL = 253, 2
_FORWARDING = 3  # of a bridge's port, for the kernel
_RTAX_RTO_MIN = 13  # the number of a route's metric, for the kernel
_LINKS_UP_S = 5.0  # so long they are waited for


class Network:
    """The switch's side of a cluster, and the settings of the hosts' sides.

    Args:
        spec: Cluster to build.
        pids: The hosts' first processes.

    Attributes:
        ip: Talks to the kernel about the switch's network.
        wires: Processes that delay packets in user space, by host and link.
    """

    def __init__(self, spec: ClusterSpec, pids: list[int]) -> None:
        self._spec = spec
        self._pids = pids
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.ip = IPRoute()
        self._ip_of: list[IPRoute] = []
        self.wires: dict[tuple[int, int], delay.Wire] = {}
        self._marks: dict[tuple[int, int], int] = {}

    def build(self) -> None:
        """Create all of it.

        Raises:
            OSError: The kernel refused something. pyroute2's NetlinkError is raised as it is.
        """
        with needs("rights over a network namespace"):
            self._up("lo")
        self._netem = bool(self._spec.delay_s) and delay.has_netem(self.ip, self._index("lo"))
        for link in range(self._spec.links):
            self._add_switches(link)
            for host, pid in enumerate(self._pids):
                self._add_link(host, pid, link)
            self._teach_switches(link)
        for host, pid in enumerate(self._pids):
            with inside(pid, self._home):
                self._ip_of.append(IPRoute())
                self._furnish_host(self._ip_of[host], host)
        self._await_links()

    def _await_links(self) -> None:
        """Wait until all links carry packets: a busy kernel notices late that both ends are up, and drops till then."""
        until_s = time.monotonic() + _LINKS_UP_S
        while time.monotonic() < until_s:
            ports = [link for link in self.ip.get_links() if link.get_attr("IFLA_MASTER")]
            at_hosts = [
                ip.get_links(index_of(ip, f"eth{link}"))[0]
                for ip in self._ip_of
                for link in range(self._spec.links)
            ]
            if all(map(_forwards, ports)) and all(map(_is_up, at_hosts)):
                return
            time.sleep(0.01)

    def change(self, change: Change, host: int) -> None:
        """Carry out a change of a host's links that was checked."""
        if change.kind == "link":
            state = "up" if change.value else "down"
            self.ip.link("set", index=self._index(_port_name(host, change.link or 0)), state=state)
            return
        for link in range(self._spec.links) if change.link is None else [change.link]:
            port = _port_name(host, link)
            if change.kind == "rate":
                at_host = f"eth{link}"
                reshape(self.ip, port, change.value, self._spec.mtu, priority=self._spec.priority)
                reshape(self._ip_of[host], at_host, change.value, self._spec.mtu)
            elif change.kind == "loss":
                self._set_loss(self._index(port), change.value)
            elif self._netem:
                delay.set_netem(self.ip, self._index(f"f{host}.{link}"), change.value)
            else:
                self.wires[host, link].set_delay(change.value)

    def _set_loss(self, port: int, ratio: float) -> None:
        detach(port, INGRESS)
        if QDISC_CLSACT not in drops_by_queue(self.ip, port):
            with needs("the clsact queue and BPF filters (sch_ingress, cls_bpf)"):
                self.ip.tc("add", "clsact", port)
        if ratio:
            attach(random_loss(ratio), port, INGRESS)

    def counters(self) -> list[dict[str, int]]:
        """One record a host, totals since the start; the fields are those of `cluster.Counters`."""
        records = []
        for host, pid in enumerate(self._pids):
            total: dict[str, int] = {}
            for link in range(self._spec.links):
                for name, value in self._counters_of_link(host, link).items():
                    total[name] = total.get(name, 0) + value
            records.append(total | {"retransmits": _retransmits(pid)})
        return records

    def _counters_of_link(self, host: int, link: int) -> dict[str, int]:
        """Return counters of the switch's port, which receives what the host sends, and of the host's end."""
        port, at_host = self._index(_port_name(host, link)), index_of(self._ip_of[host], f"eth{link}")
        stats = self.ip.get_links(port)[0].get_attr("IFLA_STATS64")
        stats_at_host = self._ip_of[host].get_links(at_host)[0].get_attr("IFLA_STATS64")
        drops = drops_by_queue(self.ip, port)
        drops_at_host = drops_by_queue(self._ip_of[host], at_host)
        marks = self._marks.get((host, link))
        marked, not_ecn = (0, 0) if marks is None else ecn_marking.read(marks)
        return {
            "sent_bytes": stats["rx_bytes"],
            "sent_packets": stats["rx_packets"],
            "received_bytes": stats["tx_bytes"],
            "received_packets": stats["tx_packets"],
            "lost_packets": drops.get(QDISC_CLSACT, 0) - not_ecn,
            "port_drops": drops.get(QDISC_ROOT, 0),
            "host_drops": drops_at_host.get(QDISC_ROOT, 0),
            "wire_drops": stats["tx_dropped"] + stats_at_host["tx_dropped"] if self.wires else 0,
            "marked_packets": marked,
            "not_ecn_drops": not_ecn,
        }

    def _add_switches(self, link: int) -> None:
        spec = self._spec
        for rack in range(spec.racks):
            self._add_bridge(_switch_name(link, rack))
        if spec.racks == 1:
            return
        spine = f"spine{link}"
        self._add_bridge(spine)
        for rack in range(spec.racks):
            up, down = f"up{link}r{rack}", f"down{link}r{rack}"
            self._add_veth(up, {"ifname": down})
            for port, bridge in ((up, _switch_name(link, rack)), (down, spine)):
                self.ip.link("set", index=self._index(port), mtu=spec.mtu, master=self._index(bridge))
                disable_ipv6(port)
                self._single_packets(port)
                shape(self.ip, port, spec.uplink_bits_per_s, spec.queue_bytes, spec.mtu)
                self._up(port)

    def _add_bridge(self, name: str) -> None:
        with needs("bridges"):
            self.ip.link(
                "add", ifname=name, kind="bridge", mtu=self._spec.mtu, br_stp_state=0, br_mcast_snooping=0
            )
        disable_ipv6(name)
        self._up(name)

    def _add_link(self, host: int, pid: int, link: int) -> None:
        spec, port = self._spec, _port_name(host, link)
        self._add_pair(host, pid, link)
        index = self._index(port)
        self.ip.link(
            "set", index=index, mtu=spec.mtu, master=self._index(_switch_name(link, spec.rack_of(host)))
        )
        disable_ipv6(port)
        self._single_packets(port)
        rate = spec.port_rate_bits_per_s[host]
        shape(self.ip, port, rate, spec.queue_bytes, spec.mtu, priority=spec.priority)
        self._add_filters(host, link, index)
        self._up(port)

    def _add_pair(self, host: int, pid: int, link: int) -> None:
        """The two ends of a link and what lies between them: nothing, or a delay."""
        spec, port, at_host = self._spec, _port_name(host, link), f"eth{link}"
        if not spec.delay_s:
            self._add_veth(port, {"ifname": at_host, "net_ns_pid": pid})
        elif not self._netem:
            self.wires[host, link] = delay.add_wire(pid, at_host, port, self._home, spec)
        else:  # host - near [bridge] far - port, where far delays what it sends towards the port
            near, far, wire = f"n{host}.{link}", f"f{host}.{link}", f"w{host}.{link}"
            self._add_veth(near, {"ifname": at_host, "net_ns_pid": pid})
            self._add_veth(port, {"ifname": far})
            self._add_bridge(wire)
            for end in (near, far):
                index = self._index(end)
                self.ip.link("set", index=index, mtu=spec.mtu, master=self._index(wire), state="up")
                disable_ipv6(end)
                self._single_packets(end)
            delay.add_netem(self.ip, self._index(far), spec)

    def _add_veth(self, name: str, peer: dict[str, object]) -> None:
        with needs("veth links"):
            self.ip.link("add", ifname=name, kind="veth", mtu=self._spec.mtu, peer=peer)

    def _teach_switches(self, link: int) -> None:
        """Tell every bridge behind which port each host lies: there is no ARP from which it could learn that."""
        spec = self._spec
        for host in range(spec.hosts):
            home_rack = spec.rack_of(host)
            ports = {_switch_name(link, home_rack): _port_name(host, link)}
            if spec.racks > 1:
                ports |= {
                    _switch_name(link, rack): f"up{link}r{rack}"
                    for rack in range(spec.racks)
                    if rack != home_rack
                }
                ports |= {f"spine{link}": f"down{link}r{home_rack}"}
            for port in ports.values():
                self.ip.fdb("add", ifindex=self._index(port), lladdr=_hardware_address(host, link))

    def _add_filters(self, host: int, link: int, index: int) -> None:
        spec, rate = self._spec, self._spec.port_rate_bits_per_s[host]
        marks = rate is not None and (spec.mark_bytes is not None or spec.drop_bytes is not None)
        if not marks and not spec.loss_ratio[host]:
            return
        with needs("the clsact queue and BPF filters (sch_ingress, cls_bpf)"):
            self.ip.tc("add", "clsact", index)
        if spec.loss_ratio[host]:
            attach(random_loss(spec.loss_ratio[host]), index, INGRESS)
        if marks and rate is not None:
            try:
                program, self._marks[host, link] = ecn_marking.load(rate, spec.mark_bytes, spec.drop_limits())
            except PermissionError as error:
                raise UnsupportedError(
                    "--mark and --drop load a program into the kernel, which only root may do. Run as root, or leave "
                    "them out. Nothing was created."
                ) from error
            attach(program, index, EGRESS)
            os.close(program.program)

    def _furnish_host(self, ip: IPRoute, host: int) -> None:
        spec = self._spec
        ip.link("set", index=index_of(ip, "lo"), state="up")
        for link in range(spec.links):
            name = f"eth{link}"
            disable_ipv6(name)
            self._single_packets(name)
            shape(ip, name, spec.rate_bits_per_s[host], _HOST_QUEUE_BYTES, spec.mtu)
            index = index_of(ip, name)
            ip.link("set", index=index, mtu=spec.mtu, address=_hardware_address(host, link))
            if not spec.offload:  # TCP hands a queue up to 64 KiB at once, whatever the device can
                ip.link("set", index=index, gso_max_segs=1)
            ip.link("set", index=index, state="up", txqlen=delay.TAP_QUEUE_PACKETS)
            own = _link_address(host, link)
            ip.addr("add", index=index, address=own, prefixlen=24, flags=_NO_PREFIX_ROUTE)
            ip.route(
                "replace",
                dst=f"10.77.{link}.0/24",
                oif=index,
                prefsrc=own,
                scope=_LINK_SCOPE,
                proto=_KERNEL_PROTOCOL,
                metrics=self._metrics(),
            )
            self._introduce_peers(ip, host, link, index)
        if spec.mark_bytes is not None:
            set_kernel("net/ipv4/tcp_ecn", "1")
        if spec.links > 1:
            self._join_links(ip, host)

    def _introduce_peers(self, ip: IPRoute, host: int, link: int, index: int) -> None:
        """Fill the neighbour table: ARP would drop packets until it is answered, and be counted as traffic."""
        for peer in range(self._spec.hosts):
            if peer != host:
                ip.neigh(
                    "add",
                    dst=_link_address(peer, link),
                    lladdr=_hardware_address(peer, link),
                    ifindex=index,
                    state="permanent",
                )

    def _join_links(self, ip: IPRoute, host: int) -> None:
        """Give the host an address that others reach over any of its links; a flow stays on one."""
        set_kernel("net/ipv4/fib_multipath_hash_policy", "1")
        ip.link("add", ifname=self._spec.interface, kind="bridge", mtu=self._spec.mtu)
        index = index_of(ip, self._spec.interface)
        disable_ipv6(self._spec.interface)
        ip.link("set", index=index, state="up")
        ip.addr("add", index=index, address=address(self._spec, host), prefixlen=32)
        for peer in range(self._spec.hosts):
            if peer == host:
                continue
            ip.route(
                "replace",
                dst=f"{address(self._spec, peer)}/32",
                prefsrc=address(self._spec, host),
                metrics=self._metrics(),
                multipath=[
                    {"gateway": _link_address(peer, link), "oif": index_of(ip, f"eth{link}"), "hops": 0}
                    for link in range(self._spec.links)
                ],
            )

    def _metrics(self) -> dict[str, object]:
        metrics: dict[str, object] = {"cc_algo": self._spec.congestion_control}
        if self._spec.min_rto_s is not None:
            metrics["rto_min"] = round(self._spec.min_rto_s * 1000)
            # Without the lock Linux shows this timeout and keeps its own.
            metrics["lock"] = 1 << _RTAX_RTO_MIN
        return metrics

    def _single_packets(self, name: str) -> None:
        if not self._spec.offload:
            send_single_packets(name)

    def _index(self, name: str) -> int:
        return index_of(self.ip, name)

    def _up(self, name: str) -> None:
        self.ip.link("set", index=self._index(name), state="up")


def _is_up(link: Any) -> bool:
    """Return whether the kernel has noticed that an end is up; of devices of user space it does not know."""
    return link.get_attr("IFLA_OPERSTATE") in ("UP", "UNKNOWN")


def _forwards(port: Any) -> bool:
    info = port.get_attr("IFLA_LINKINFO")
    bridge = None if info is None else info.get_attr("IFLA_INFO_SLAVE_DATA")
    state = None if bridge is None else bridge.get_attr("IFLA_BRPORT_STATE")
    return _is_up(port) if state is None else bool(state == _FORWARDING)


def address(spec: ClusterSpec, host: int) -> str:
    """The address that stands for a host."""
    return _link_address(host, 0) if spec.links == 1 else f"10.78.0.{host + 1}"


def _link_address(host: int, link: int) -> str:
    return f"10.77.{link}.{host + 1}"


def _retransmits(pid: int) -> int:
    lines = [line.split() for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines()]
    names, values = (line for line in lines if line[0] == "Tcp:")
    return int(values[names.index("RetransSegs")])


def _hardware_address(host: int, link: int) -> str:
    return f"02:00:00:00:{link:02x}:{host:02x}"


def _port_name(host: int, link: int) -> str:
    return f"p{host}" if link == 0 else f"p{host}.{link}"


def _switch_name(link: int, rack: int) -> str:
    return f"sw{link}r{rack}"

"""The memory of a simulated network: tables of numbers that compiled code works on, and the names of their columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigurationError
from paceline_lab.packet_network.leaf_spine import BANDS, LeafSpine

# clock: the time in ns, the list of free packets, the events, and counts of packets
NOW, FREE, EVENTS, ORDER, SENT, DELIVERED, LOST, OVERFLOWED, SELECTED, MARKED, IS_FULL, NUM_CLOCK = range(12)
"""LOST at random, OVERFLOWED a queue, SELECTED: dropped where others would have been marked."""

# events: when, in which order among equals, what; what is a kind and an index
E_TIME, E_ORDER, E_WHAT, NUM_E = range(4)
DEPART, ARRIVE, TIMER, ACK_TIMER, PACE, APP = range(6)
KIND_SHIFT = 40

# packets
(
    K_NEXT,
    K_SIZE,
    K_SOURCE,
    K_TARGET,
    K_BAND,
    K_ECT,
    K_MARK,
    K_SPINE,
    K_CONNECTION,
    K_BYTES,
    K_SEQUENCE,
    K_TIME,
    K_IS_ACK,
    K_MARKS,
    K_BLOCKS,
) = range(15)
"""BYTES of a datagram without headers, CONNECTION -1 for those; SEQUENCE of a segment, or the first that an ACK misses;
TIME at which it was sent, or an echo; SPINE -1: any. From BLOCKS on three pairs: what has arrived behind SEQUENCE."""
NUM_K = K_BLOCKS + 6

# ports
Q_SENDING, Q_BYTES, Q_LIMIT, Q_MARK, Q_DROP, Q_WAY_NS, Q_MOST_BYTES, NUM_Q = range(8)
QR_NS_PER_BYTE, QR_LOSS, NUM_QR = range(3)

# queues: of a port, one a band
HEAD, TAIL, BYTES, NUM_QUEUE = range(4)

NOTHING = -1
_NEVER = 1 << 60


class Net(NamedTuple):
    """All of a network's memory but its TCP connections (`tcp_state`)."""

    clock: NDArray[np.int64]
    random: NDArray[np.uint64]
    events: NDArray[np.int64]  # a heap
    packets: NDArray[np.int64]
    datagrams: NDArray[np.uint8]  # their bytes, packet by packet
    ports: NDArray[np.int64]
    port_rates: NDArray[np.float64]
    queues: NDArray[np.int64]  # port, band, column
    arrived: NDArray[np.int64]  # host: a queue of datagrams
    shape: NDArray[np.int64]  # hosts, racks, spines
    rack: NDArray[np.int64]  # of each host


def new_network(spec: LeafSpine, seed: int, row_bytes: int = 8) -> Net:
    """Memory for a network in which nothing is under way; `row_bytes` is the longest datagram."""
    room = spec.most_packets
    ports, rates = np.zeros((spec.num_ports, NUM_Q), np.int64), np.zeros((spec.num_ports, NUM_QR))
    ports[:, Q_SENDING] = NOTHING
    for index, port in enumerate(spec.ports()):
        ports[index, Q_LIMIT], ports[index, Q_WAY_NS] = port.queue_bytes, round(port.way_us * 1e3)
        ports[index, Q_MARK] = _NEVER if port.mark_bytes is None else port.mark_bytes
        ports[index, Q_DROP] = _NEVER if port.drop_bytes is None else port.drop_bytes
        rates[index, QR_NS_PER_BYTE] = 8e9 / port.rate_bits_per_s
        rates[index, QR_LOSS] = port.loss_ratio
    packets = np.zeros((room, NUM_K), np.int64)
    packets[:, K_NEXT] = np.arange(1, room + 1)
    packets[-1, K_NEXT] = NOTHING
    queues = np.full((spec.num_ports, BANDS, NUM_QUEUE), NOTHING, np.int64)
    queues[:, :, BYTES] = 0
    arrived = np.full((spec.hosts, NUM_QUEUE), NOTHING, np.int64)
    arrived[:, BYTES] = 0
    return Net(
        clock=np.zeros(NUM_CLOCK, np.int64),
        random=np.array([seed * 2 + 1], np.uint64),
        events=np.zeros((2 * room + 65_536, NUM_E), np.int64),
        packets=packets,
        datagrams=np.zeros((room, -(-row_bytes // 8) * 8), np.uint8),
        ports=ports,
        port_rates=rates,
        queues=queues,
        arrived=arrived,
        shape=np.array([spec.hosts, spec.racks, spec.spines], np.int64),
        rack=np.array([spec.rack_of(host) for host in range(spec.hosts)], np.int64),
    )


def counts(net: Net) -> dict[str, int]:
    """How many packets were sent, and what became of them; `inside` are queued, on a wire, or not taken yet."""
    names = {
        "sent": SENT,
        "delivered": DELIVERED,
        "lost": LOST,
        "overflowed": OVERFLOWED,
        "selected": SELECTED,
        "marked": MARKED,
    }
    found = {name: int(net.clock[column]) for name, column in names.items()}
    free, at = 0, int(net.clock[FREE])
    while at != NOTHING:
        free, at = free + 1, int(net.packets[at, K_NEXT])
    return found | {"inside": len(net.packets) - free}


def check_room(net: Net) -> None:
    """Raise if the network had no memory for a packet."""
    if net.clock[IS_FULL]:
        raise ConfigurationError(
            f"more than {len(net.packets)} packets were under way at once. Give LeafSpine a larger most_packets."
        )

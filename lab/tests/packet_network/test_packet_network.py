"""A simulated network keeps its rules: nothing vanishes, ports serve and drop as they say, rates are the links'."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import ConfigurationError
from paceline.transports import Bound
from paceline.transports.bounded_loss import datagram as d
from paceline.transports.bounded_loss import endpoint, endpoint_state
from paceline_lab.packet_network import engine, sides, tcp
from paceline_lab.packet_network import state as s
from paceline_lab.packet_network import tcp_state as c
from paceline_lab.packet_network.datagram_hosts import DatagramHosts, JobPlan
from paceline_lab.packet_network.leaf_spine import LeafSpine
from paceline_lab.packet_network.sides import Traffic, measure
from paceline_lab.packet_network.state import counts, new_network
from paceline_lab.packet_network.tcp_flows import TcpFlows, TcpKind

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]  # random numbers wrap around

NO_TCP = c.new_connections(1)
RATE = 1e8
SIZE = 1000


def send(net, source, target, collectives, spine=0, levels=(0,), flags=0):
    """Let a host send datagrams of SIZE bytes, one of each collective."""
    rows = np.zeros((len(collectives), SIZE), np.uint8)
    words, _ = d.words_of(rows)
    for word, collective in zip(words, collectives, strict=True):
        own = flags | levels[collective % len(levels)] << d.CLASS_SHIFT
        d.write_header(word, d.DATA, 0, own, source, collective, 0, 0, 0, 0, 1, 0)
    sizes, hosts = np.full(len(rows), SIZE), np.full(len(rows), target)
    engine.send_datagrams(net, rows, words, sizes, hosts, source, len(rows), np.full(len(rows), spine))


def received(net, host):
    """The collectives of what has arrived at a host, and how many of it were marked."""
    rows = np.zeros((512, SIZE), np.uint8)
    sizes, marks = np.zeros(512, np.int64), np.zeros(512, np.int64)
    got = engine.take_datagrams(net, host, rows, sizes, marks)
    return [int(row[d.COLLECTIVE]) for row in d.words_of(rows)[0][:got]], int(marks[:got].sum())


def check_conservation(net):
    found = counts(net)
    gone = found["lost"] + found["overflowed"] + found["selected"]
    assert found["sent"] == found["delivered"] + gone + found["inside"]
    return found


def test_a_packet_takes_two_links_and_two_ways():
    """The closed form of one packet: its length at each port's rate, and each wire's time, to the nanosecond."""
    net = new_network(LeafSpine(2, rate_bits_per_s=RATE, way_us=7), 0, SIZE)
    send(net, 0, 1, [3])
    wire_ns = (SIZE + engine.DATAGRAM_HEADERS) * 80
    engine.run_until(net, NO_TCP, 2 * (wire_ns + 7000) - 1, False)
    assert received(net, 1) == ([], 0)
    engine.run_until(net, NO_TCP, 2 * (wire_ns + 7000), False)
    assert received(net, 1) == ([3], 0)
    assert check_conservation(net)["inside"] == 0


def test_ports_serve_the_first_band_first():
    """What is being sent is finished; then bands count, and within a band the order of arrival."""
    net = new_network(LeafSpine(2, rate_bits_per_s=RATE), 0, SIZE)
    send(net, 0, 1, [0, 1, 2, 3, 4, 5], levels=(0, 2, 4, 2, 6, 4))
    engine.run_until(net, NO_TCP, 10**8, False)
    assert received(net, 1)[0] == [0, 4, 2, 5, 1, 3]


def test_a_full_queue_drops_and_a_threshold_marks_or_drops_what_may_be_lost():
    """Two hosts send to a third; its port holds 20 packets, the threshold is 10."""
    wire = SIZE + engine.DATAGRAM_HEADERS
    spec = LeafSpine(
        3, rate_bits_per_s=RATE, queue_bytes=20 * wire, mark_bytes=10 * wire, drop_bytes=10 * wire
    )
    net = new_network(spec, 0, SIZE)
    for source in (0, 1):
        send(net, source, 2, range(100))
    engine.run_until(net, NO_TCP, 10**9, False)
    _, marked = received(net, 2)
    found = check_conservation(net)
    # Half of 200 are too many, but for the 20 in the queue at the end and one that was being sent.
    assert found["overflowed"] == pytest.approx(200 - 100 - 21, abs=1)
    assert found["selected"] == 0
    assert marked == found["marked"] > 60
    assert net.ports[3 + 2, s.Q_MOST_BYTES] == 20 * wire

    net = new_network(spec, 0, SIZE)
    for source, flags in ((0, d.DROPPABLE), (1, 0)):
        send(net, source, 2, range(100), flags=flags)
    engine.run_until(net, NO_TCP, 10**9, False)
    received(net, 2)
    found = check_conservation(net)
    assert found["selected"] == pytest.approx(100 - 11, abs=8), "what may be lost goes first"
    assert found["overflowed"] == 0


def test_a_flow_stays_on_its_way_and_sprayed_packets_take_all():
    """Uplinks of the first leaf that carried something."""
    spec = LeafSpine(4, racks=2, spines=4, rate_bits_per_s=RATE, uplink_bits_per_s=RATE)
    used = []
    for spine in (5, 6, -1):
        net = new_network(spec, 3, SIZE)
        send(net, 0, 3, range(100), spine)
        engine.run_until(net, NO_TCP, 10**9, False)
        assert len(received(net, 3)[0]) == 100
        used.append(net.ports[2 * 4 : 2 * 4 + 4, s.Q_MOST_BYTES] > 0)
        check_conservation(net)
    assert [of.sum() for of in used] == [1, 1, 4]
    assert (used[0] != used[1]).any()


@pytest.mark.parametrize("control", [c.CUBIC, c.DCTCP, c.BBR])
def test_one_flow_without_loss_reaches_the_links_rate(control):
    """The closed form of a single bottleneck: all segments with their headers at the link's rate."""
    net = new_network(LeafSpine(2, rate_bits_per_s=RATE, way_us=20), 0)
    flows = TcpFlows(net, TcpKind(control), [[0, 1]], 400_000, True, RATE)
    (took_ms,) = flows.run()[0]
    segments = -(-400_000 // c.SEGMENT_BYTES)
    least_ms = (400_000 + segments * c.HEADER_BYTES) * 80e-6
    assert least_ms < took_ms < 1.05 * least_ms
    found = check_conservation(net)
    assert found["lost"] == found["overflowed"] == 0


def test_a_ring_sends_its_closed_form_and_losses_are_repaired():
    """Gloo's ring sends 2 (P-1)/P of the vector over every link; where packets are lost all of it still arrives."""
    took = {}
    for loss in (0.0, 0.05):
        net = new_network(LeafSpine(3, rate_bits_per_s=RATE, way_us=20, loss_ratio=loss), 5)
        flows = TcpFlows(net, TcpKind(c.CUBIC), [[0, 1, 2]], 200_000, False, RATE)
        took[loss] = max(flows.run()[0])
        found = check_conservation(net)
        assert found["lost"] == pytest.approx(loss * found["sent"], rel=0.4)
        data = flows.tcp.connections[:3]
        assert (data[:, c.C_NEEDED] == data[:, c.C_PER_MESSAGE] * 2 * 2 * 2).all()
    least_ms = 4 / 3 * 200_000 * (1 + c.HEADER_BYTES / c.SEGMENT_BYTES) * 80e-6
    assert least_ms < took[0.0] < 1.15 * least_ms < took[0.05]


def test_a_lost_tail_waits_for_the_smallest_timeout():
    """A push that overflows a small buffer: 200 ms and more with the kernel's timeout, not with one of 5 ms."""
    spec = LeafSpine(9, rate_bits_per_s=RATE, way_us=20, queue_bytes=16 * 1024)
    traffic = Traffic([list(range(9))], 60_000, True, repeats=3)
    kernel, short = (measure(side, spec, traffic, 1) for side in ("cubic", "cubic, rto_min 5 ms"))
    assert max(kernel.job_ms) > 200
    assert max(short.job_ms) < 150
    assert len(kernel.flow_ms) == 3 * 8


def test_where_everything_was_sent_twice_what_is_missing_has_the_handshakes_round_trip():
    """Then none was measured; 64 that pushed at once into a port of 64 KiB had one that never ended."""
    net, connections = new_network(LeafSpine(2, rate_bits_per_s=RATE), 0), c.new_connections(1)
    x, segments = connections.connections[0], connections.segments[0]
    x[[c.C_NXT, c.C_HIGH, c.C_FLIGHT, c.C_SACKED, c.C_RACK_AT]] = 2, 2, 1, 1, 5000
    x[c.C_RECOVERY_TO] = 2
    segments[0, [c.T_STATE, c.T_AT, c.T_IS_REPEATED]] = c.FLYING, 4000, 1
    segments[1, [c.T_STATE, c.T_AT, c.T_IS_REPEATED]] = c.SACKED, 5000, 1
    net.clock[s.NOW] = 6000
    tcp.find_lost(net, connections, 0)
    handshake_ns = int(connections.rates[0, c.F_RTT])
    assert x[c.C_DEADLINE] == 4000 + handshake_ns + 1


@pytest.mark.compiles
def test_the_protocol_is_the_transports_own():
    """The ends are `Endpoint`s, their sums are sums, and every datagram they count as sent was in the network."""
    net = new_network(LeafSpine(3, rate_bits_per_s=RATE, loss_ratio=0.05), 1, d.HEADER_BYTES + 64)
    hosts = DatagramHosts(net, NO_TCP, [JobPlan([0, 1, 2], 6000, Bound(0.0))], payload=64)
    for _ in range(2):
        (job,) = hosts.run()
    assert all(type(end) is endpoint.Endpoint for end in job.ends)
    assert job.lost == 0 < job.expected
    sent = sum(int(end.tables.numbers[endpoint_state.SENT]) for end in job.ends)
    found = check_conservation(net)
    assert found["sent"] == sent
    assert found["lost"] > 0


def test_a_push_without_loss_is_as_fast_as_its_link():
    """Eight times a vector through one port: within a quarter of its bytes with headers at the link's rate."""
    spec = LeafSpine(9, rate_bits_per_s=RATE, way_us=20)
    times = measure("ours, bound 0", spec, Traffic([list(range(9))], 50_000, True, repeats=1), 1)
    least_ms = 8 * (50_000 + 35 * (d.HEADER_BYTES + engine.DATAGRAM_HEADERS)) * 80e-6
    assert all(least_ms < ms < 1.25 * least_ms for ms in times.job_ms)
    assert len(times.flow_ms) == 8
    assert max(times.flow_ms) <= max(times.job_ms)


@pytest.mark.parametrize("side", ["cubic", "ours, 5 %, sprayed"])
def test_the_seed_decides(side):
    spec = LeafSpine(4, 2, 2, RATE, RATE, loss_ratio=0.02)
    traffic = Traffic([[0, 1, 2, 3]], 15_000, False, repeats=1, jitter_us=100)
    one, again, other = (measure(side, spec, traffic, seed) for seed in (1, 1, 2))
    assert one == again
    assert one.job_ms != other.job_ms


@pytest.mark.slow
def test_all_sides_sum_and_push():
    """Every side of the table does both on a small leaf-spine that marks and drops."""
    spec = LeafSpine(4, 2, 2, 1e9, 1e9, mark_bytes=16_384, drop_bytes=16_384)
    for side in sides.SIDES:
        for is_push in (False, True):
            times = measure(side, spec, Traffic([[0, 2, 1, 3]], 4000, is_push, repeats=1), 1)
            assert min(times.flow_ms) > 0
            assert times.lost_ratio <= 0.05


def test_networks_that_cannot_be_are_refused():
    for wrong in (
        {"hosts": 1},
        {"hosts": 4, "racks": 2},
        {"hosts": 4, "loss_ratio": 1.0},
        {"hosts": 2, "spines": 1},
    ):
        with pytest.raises(ConfigurationError):
            LeafSpine(**wrong)
    net = new_network(LeafSpine(2, most_packets=4), 0, SIZE)
    send(net, 0, 1, range(5))
    with pytest.raises(ConfigurationError, match="most_packets"):
        s.check_room(net)


@pytest.mark.parametrize(("ports", "ways"), [(1, 1), (8, 4)])
def test_a_ranks_ports_take_several_ways(ports, ways):
    """Uplinks of the first leaf that carried something, of a sum with the other rack."""
    spec = LeafSpine(4, racks=2, spines=4, rate_bits_per_s=RATE, uplink_bits_per_s=RATE)
    net = new_network(spec, 3, d.HEADER_BYTES + 64)
    hosts = DatagramHosts(net, NO_TCP, [JobPlan([0, 3], 20_000, Bound(0.0), num_ports=ports)], payload=64)
    hosts.run()
    assert (net.ports[2 * 4 : 2 * 4 + 4, s.Q_MOST_BYTES] > 0).sum() == ways
    check_conservation(net)

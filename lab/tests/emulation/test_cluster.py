"""Real clusters in namespaces: hosts, links, switch and what each was asked to be.

Nothing here measures time from above: a busy machine makes things later, never earlier. What is asserted is
counted (packets are conserved), ordered, or takes at least as long as physics says.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from talk import python, send

from paceline.errors import ConfigurationError
from paceline_lab.emulation import ClusterSpec, EmulatedCluster, namespaces, owned_resources
from paceline_lab.errors import EmulationError

pytestmark = pytest.mark.processes

CS7, ECT = 7 << 5, 2
# Devices that some kernels make in every new network, where the module of their tunnels is loaded.
FALLBACKS = {"tunl0", "gre0", "gretap0", "erspan0", "sit0", "ip_vti0", "ip6_vti0", "ip6tnl0", "ip6gre0"}
WHO = "import json, os, socket; print(json.dumps([socket.gethostname(), os.getpid(), os.getcwd()]))"


def _conserved(cluster, source, target):
    """Whether every packet of `source` was received by `target`, lost or dropped; waits for those under way."""
    deadline_s = time.monotonic() + 20
    while True:
        counters = cluster.counters()
        sent, received = counters[source], counters[target]
        dropped = received.port_drops + received.not_ecn_drops
        if sent.sent_packets == received.received_packets + sent.lost_packets + dropped:
            return True
        if time.monotonic() > deadline_s:
            return False


def test_a_host_has_its_own_name_processes_and_address(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = cluster(hosts=2)
    name, pid, folder = json.loads(python(made.hosts[1], WHO))
    assert (name, folder) == ("host1", str(tmp_path))
    assert pid < 20
    assert (
        python(made.hosts[0], "import socket; print(socket.gethostbyname('host1'))") == made.hosts[1].address
    )
    devices = python(
        made.hosts[0], "import socket; print(*sorted(name for _, name in socket.if_nameindex()))"
    )
    assert set(devices.split()) - FALLBACKS == {"eth0", "lo"}


def test_exit_codes_and_signals_pass_through_the_command(cluster):
    host = cluster(hosts=1).hosts[0]
    assert (
        subprocess.run(host.command([sys.executable, "-c", "raise SystemExit(7)"]), check=False).returncode
        == 7
    )
    waits = "import signal, time; print(1, flush=True); signal.pause()"
    with subprocess.Popen(host.command([sys.executable, "-c", waits]), stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.terminate()
        assert process.wait(20) == 128 + 15
    missing = subprocess.run(host.command(["no-such-program"]), check=False, capture_output=True, text=True)
    assert missing.returncode == 127
    assert "no-such-program" in missing.stderr


def test_datagrams_arrive_in_order_and_are_counted(cluster):
    made = cluster(hosts=2)
    assert send(made.hosts[0], made.hosts[1], (0, 50, 0)) == [(number, 0) for number in range(50)]
    assert _conserved(made, 0, 1)
    assert made.counters()[0].sent_bytes > 50 * 1042


def test_loss_is_random_of_the_asked_size_and_counted(cluster):
    """2,000 trials at 20 %: five standard deviations are 90. Only the host that has loss loses."""
    made = cluster(hosts=2, loss="20%,0%")
    arrived = send(made.hosts[0], made.hosts[1], (0, 2000, 0), size=200)
    assert abs(len(arrived) - 1600) < 90
    assert _conserved(made, 0, 1)
    lost = made.counters()[0].lost_packets
    assert lost >= 2000 - len(arrived)
    assert len(send(made.hosts[1], made.hosts[0], (0, 500, 0), size=200)) == 500
    assert made.counters()[1].lost_packets == 0


def test_a_rate_cannot_be_exceeded(cluster):
    """A megabit of datagrams at 2 Mbit/s, less the burst and what is still in the queue."""
    made = cluster(hosts=2, rate="2Mbit")
    started_s = time.monotonic()
    arrived = send(made.hosts[0], made.hosts[1], (0, 125, 0))
    assert time.monotonic() - started_s > 125 * 1042 * 8 / 2e6 - 0.1
    assert len(arrived) == 125


def test_hosts_may_have_unequal_rates(cluster):
    made = cluster(hosts=2, rate="100Mbit,1Mbit")
    started_s = time.monotonic()
    send(made.hosts[1], made.hosts[0], (0, 60, 0))
    assert time.monotonic() - started_s > 60 * 1042 * 8 / 1e6 - 0.15


def test_a_switch_port_has_a_finite_queue(cluster):
    """From a fast host through a slow port with room for 20 packets: the rest is dropped, and counted."""
    made = cluster(hosts=2, rate="100Mbit", port_rate="1Mbit", queue="21KB", offload=False)
    arrived = send(made.hosts[0], made.hosts[1], (0, 400, 0))
    assert 20 <= len(arrived) < 200
    assert _conserved(made, 0, 1)
    assert made.counters()[1].port_drops >= 400 - len(arrived)


def test_strict_priority_overtakes(cluster):
    """Sixty datagrams wait at a slow port; those of the highest class are served before them."""
    made = cluster(hosts=2, rate="100Mbit", port_rate="1Mbit", priority=True)
    arrived = send(made.hosts[0], made.hosts[1], (0, 60, 0), (100, 5, CS7))
    order = [number for number, _ in arrived]
    assert [number for number in order if number < 100] == list(range(60))
    assert max(order.index(number) for number in range(100, 105)) < order.index(59)


def test_without_priority_nothing_overtakes(cluster):
    made = cluster(hosts=2, rate="100Mbit", port_rate="1Mbit")
    arrived = send(made.hosts[0], made.hosts[1], (0, 60, 0), (100, 5, CS7))
    assert [number for number, _ in arrived] == [*range(60), *range(100, 105)]


def test_above_a_threshold_ecn_is_marked_and_the_rest_is_dropped(cluster):
    made = cluster(hosts=2, rate="100Mbit", port_rate="1Mbit", mark="10KB", drop="10KB")
    try:
        marked = send(made.hosts[0], made.hosts[1], (0, 100, ECT))
    finally:
        counted = made.counters()[1]
    assert [number for number, _ in marked] == list(range(100))
    services = [service for _, service in marked]
    assert services.count(3) == counted.marked_packets > 50
    assert set(services[:5]) == {ECT}  # the first few found an empty queue
    plain = send(made.hosts[0], made.hosts[1], (0, 100, 0))
    assert len(plain) < 50
    assert made.counters()[1].not_ecn_drops >= 100 - len(plain)
    assert made.counters()[1].port_drops == 0


def test_each_class_has_a_threshold(cluster):
    """Of 100 datagrams that are not ECN-capable a port keeps as many as the threshold of their class lets through."""
    made = cluster(hosts=2, rate="100Mbit", port_rate="1Mbit", drop="5KB,5KB,5KB,40KB,40KB,40KB,40KB,40KB")
    kept = {
        level: len(send(made.hosts[0], made.hosts[1], (0, 100, level << 5), size=1000))
        for level in (0, 2, 3, 5)
    }
    assert max(kept[0], kept[2]) < 20
    assert min(kept[3], kept[5]) > 35


def test_packets_have_the_asked_size(cluster):
    """TCP over a link of 700-byte packets: none is larger, though segmentation offload would join dozens."""
    made = cluster(hosts=2, rate="100Mbit", mtu=700)
    code = (
        "import socket, sys; s = socket.create_connection(('host1', int(sys.argv[1]))); "
        "s.sendall(bytes(500_000)); s.close()"
    )
    listens = (
        "import socket; l = socket.create_server(('0.0.0.0', 0)); print(l.getsockname()[1], flush=True); "
        "c, _ = l.accept(); print(sum(iter(lambda: len(c.recv(65536)), 0)))"
    )
    command = made.hosts[1].command([sys.executable, "-c", listens])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        python(made.hosts[0], code, listener.stdout.readline().strip())
        assert int(listener.stdout.readline()) == 500_000
    sent = made.counters()[0]
    assert sent.sent_packets > 500_000 / 700
    assert sent.sent_bytes / sent.sent_packets <= 714


@pytest.mark.parametrize(
    ("algorithm", "min_rto", "least_ms", "most_ms"), [("cubic", None, 200, 1000), ("reno", "5ms", 5, 100)]
)
def test_connections_use_the_asked_congestion_control_and_timeout(
    cluster, algorithm, min_rto, least_ms, most_ms
):
    """Both ends of a connection, whatever the machine's default is; the timeout as the kernel has it for the socket.

    It grows with the time that an answer takes: the least of twenty exchanges counts.
    """
    made = cluster(hosts=2, congestion_control=algorithm, min_rto=min_rto)
    show = (
        "s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1); "
        "rto_us = min((s.send(b'x'), s.recv(1), int.from_bytes("
        "s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 12)[8:], sys.byteorder))[2] for _ in range(20)); "
        "print(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode(), "
        "rto_us // 1000, flush=True)"
    )
    listens = (
        "import socket, sys; l = socket.create_server(('0.0.0.0', 0)); print(l.getsockname()[1], flush=True); "
        f"s, _ = l.accept(); {show}"
    )
    connects = f"import socket, sys; s = socket.create_connection(('host1', int(sys.argv[1]))); {show}"
    command = made.hosts[1].command([sys.executable, "-c", listens])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        ends = [
            python(made.hosts[0], connects, listener.stdout.readline().strip()),
            listener.stdout.readline(),
        ]
    for end in ends:
        used, timeout_ms = end.split()
        assert used == algorithm
        assert least_ms <= int(timeout_ms) <= most_ms


def test_delay_is_met_once_each_way_and_jitter_keeps_the_order(cluster):
    made = cluster(hosts=2, rate="50Mbit", delay="40ms", jitter="20ms")
    started_s = time.monotonic()
    arrived = send(made.hosts[0], made.hosts[1], (0, 100, 0))
    assert time.monotonic() - started_s > 2 * 0.02
    assert [number for number, _ in arrived] == list(range(100))
    assert made.counters()[0].wire_drops == 0


def test_racks_share_an_uplink(cluster):
    """Three hosts in two racks: within a rack nothing limits, across them the uplink does."""
    made = cluster(hosts=3, racks=2, uplink="1Mbit")
    assert [made.spec.rack_of(host) for host in range(3)] == [0, 0, 1]
    assert len(send(made.hosts[0], made.hosts[1], (0, 100, 0))) == 100
    started_s = time.monotonic()
    assert len(send(made.hosts[0], made.hosts[2], (0, 60, 0))) == 60
    assert time.monotonic() - started_s > 60 * 1042 * 8 / 1e6 - 0.15


def test_several_links_carry_different_flows(cluster):
    """Forty flows by forty ports: a link that got none of them would be a miracle (2 to the minus 39)."""
    made = cluster(hosts=2, links=2)
    code = (
        "import socket\nfor _ in range(40):\n  s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"  s.sendto(bytes(500), ('{made.hosts[1].address}', 9))\n"
        "counts = {l.split(':')[0].strip(): int(l.split()[10]) for l in open('/proc/net/dev') if 'eth' in l}\n"
        "print(min(counts.values()), len(counts))"
    )
    fewest, num_links = map(int, python(made.hosts[0], code).split())
    assert num_links == 2
    assert fewest >= 1
    assert made.counters()[0].sent_packets >= 40  # of both links
    assert len(send(made.hosts[0], made.hosts[1], (0, 20, 0))) == 20


def test_a_pulled_plug_stops_everything_and_can_be_put_back(cluster):
    made = cluster(hosts=2)
    made.hosts[1].set_link(up=False)
    knock = (
        "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('host1', 9)); "
        "s.settimeout(0.3)\n"
        "try: print(s.connect(('host1', 9)) or s.send(b'x') and s.recv(9))\n"
        "except TimeoutError: print('silence')\nexcept OSError: print('refused')"
    )
    before = made.counters()[1].received_packets
    assert python(made.hosts[0], knock) == "silence"
    assert made.counters()[1].received_packets == before
    made.hosts[1].set_link(up=True)
    assert len(send(made.hosts[0], made.hosts[1], (0, 5, 0))) == 5
    with pytest.raises(ConfigurationError, match="host1 has no link 1; it has 1"):
        made.hosts[1].set_link(up=True, link=1)


def test_cores_are_limited(cluster):
    """A process that computes for 0.4 s of its own time needs at least 1 s of ours at 40 % of a core."""
    made = cluster(hosts=2, cpu="40%,100%")
    spin = "import time; a = time.monotonic()\nwhile time.process_time() < 0.4: pass\nprint(time.monotonic() - a)"
    assert float(python(made.hosts[0], spin)) > 0.8


RATES = """
import sys
sys.path.append(sys.argv[1])
import namespaces
namespaces._join(sys.argv[2])
from pyroute2 import IPRoute
with IPRoute() as ip:
    for one in ip.get_classes(index=ip.link_lookup(ifname=sys.argv[3])[0]):
        print(8 * one.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_PARMS")["ceil"])
"""


def _parent(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]


def _rates(made, host):
    """What the kernel says of a host's end of its link, and of the switch's port towards it."""
    found, first = [], made.hosts[host]._made["pid"]
    laboratory = _parent(
        _parent(first)
    )  # which forks who makes the host; `_laboratory` stands for it (`warm.py`)
    for pid, device in ((first, "eth0"), (laboratory, f"p{host}")):
        words = [str(Path(namespaces.__file__).parent), str(pid), device]
        done = subprocess.run([sys.executable, "-c", RATES, *words], capture_output=True, check=True)
        found.append({int(rate) for rate in done.stdout.split()})
    return found


@pytest.mark.slow
def test_what_a_host_has_can_change_while_it_runs(cluster):
    """Rate, loss, cores and delay, down and up again, on hosts of their own; the other host keeps what it had."""
    made = cluster(hosts=2, rate="50Mbit", cpu="200%", delay="1ms")
    host0, host1 = made.hosts
    host1.set_rate("1Mbit")
    assert _rates(made, 1) == [{1_000_000}, {1_000_000}]
    assert _rates(made, 0) == [{50_000_000}, {50_000_000}]
    started_s = time.monotonic()
    assert len(send(host1, host0, (0, 250, 0))) == 250
    assert time.monotonic() - started_s > 250 * 1042 * 8 / 1e6 - 0.15
    host1.set_rate("20Mbit")
    assert _rates(made, 1) == [{20_000_000}, {20_000_000}]

    for loss, least, most in (
        ("20%", 580, 700),
        ("0%", 800, 800),
        ("50%", 325, 475),
    ):  # five standard deviations
        host0.set_loss(loss)
        assert least <= len(send(host0, host1, (0, 800, 0), size=200)) <= most, (
            loss
        )  # the port's queue holds them
    assert made.counters()[0].lost_packets >= 100 + 325  # over all changes
    host0.set_loss("0%")

    spin = "import time; a = time.monotonic()\nwhile time.process_time() < 0.2: pass\nprint(time.monotonic() - a)"
    host0.set_cores("20%")
    assert float(python(host0, spin)) > 0.8
    quotas = {
        path.read_text() for path in Path("/sys/fs/cgroup").glob(f"**/*{made._id}/host*/cpu.cfs_quota_us")
    }
    assert quotas <= {"4000\n", "40000\n"}
    host0.set_cores("100%")

    made.set_delay("300ms")
    started_s = time.monotonic()
    assert len(send(host0, host1, (0, 3, 0))) == 3
    assert time.monotonic() - started_s > 0.6  # there and back
    assert (made.spec.rate_bits_per_s, made.spec.delay_s, made.spec.cores) == ((5e7, 2e7), 0.3, (1, 2))
    with pytest.raises(ConfigurationError, match="--loss 100% is not possible"):
        host0.set_loss("100%")
    assert made.spec.loss_ratio == (0, 0)


@pytest.mark.slow
def test_ranks_of_a_class_keep_their_priority_at_another_rate(cluster):
    made = cluster(hosts=2, rate="100Mbit", port_rate="50Mbit", priority=True)
    made.hosts[1].set_rate("1Mbit")
    assert _rates(made, 1) == [{1_000_000}, {1_000_000}]  # of all bands
    arrived = send(made.hosts[0], made.hosts[1], (0, 60, 0), (100, 5, CS7))
    order = [number for number, _ in arrived]
    assert max(order.index(number) for number in range(100, 105)) < order.index(59)


def test_two_clusters_at_once_do_not_meet(cluster):
    """The same names and addresses in both; what is sent in one arrives in that one only."""
    one, other = cluster(hosts=2, cpu="100%"), cluster(hosts=2, cpu="100%")
    assert one.hosts[1].address == other.hosts[1].address
    assert len(send(one.hosts[0], one.hosts[1], (0, 30, 0))) == 30
    assert other.counters()[1].received_packets == 0


def test_nothing_of_a_closed_cluster_is_left(possible, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    spec = ClusterSpec.parse(hosts=3, cpu="50%", delay="1ms", rate="10Mbit", mark="10KB")
    with EmulatedCluster(spec) as made:
        pids = [host.command([])[4] for host in made.hosts]
        group = Path(made.hosts[0].command([])[5])
        sleeps = "import time; print(1, flush=True); time.sleep(1000)"
        command = made.hosts[0].command([sys.executable, "-c", sleeps])
        sleeper = subprocess.Popen(command, stdout=subprocess.PIPE)
        sleeper.stdout.readline()
        assert group.exists()
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert sleeper.wait(20) == 128 + 9
    sleeper.stdout.close()
    assert not group.parent.parent.exists()
    assert list(tmp_path.iterdir()) == []
    assert made.hosts == []


def test_an_unknown_congestion_control_is_refused_before_anything_is_made(possible):
    with pytest.raises(ConfigurationError, match="--congestion-control westwood9 is not loaded here"):
        EmulatedCluster(ClusterSpec.parse(hosts=2, congestion_control="westwood9")).__enter__()


def test_a_killed_laboratory_is_noticed_and_cleaned_up_after(possible):
    made = EmulatedCluster(ClusterSpec.parse(hosts=2, cpu="100%"))
    with made:
        group = Path(made.hosts[0].command([])[5])
        made._laboratory.kill()
        assert made._socket.recv(1, socket.MSG_PEEK) == b""  # the warm Python's fork ends a moment after it
        with pytest.raises(EmulationError, match="the laboratory that holds the emulated hosts is gone"):
            made.counters()
    assert not group.parent.parent.exists()


WITHOUT_RIGHTS = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
SECUREBITS, NOROOT, AMBIENT, RAISE, SETFCAP = 28, 3, 47, 2, 31
assert libc.prctl(SECUREBITS, NOROOT, 0, 0, 0) == 0  # from here on, root is a user like any other
rights = 1 << SETFCAP  # but for this, without which nobody may be root's equal in a user namespace of root's
assert libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", rights, rights, rights, 0, 0, 0)) == 0
assert libc.prctl(AMBIENT, RAISE, SETFCAP, 0, 0) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
USES_A_CLUSTER = """
import subprocess, sys
from paceline_lab.emulation import ClusterSpec, EmulatedCluster, namespaces
print("CapEff:\\t0000000080000000" in open("/proc/self/status").read())
with EmulatedCluster(ClusterSpec.parse(hosts=2, rate="50Mbit", loss="50%", priority=True)) as made:
    host = made.hosts[0]
    ping = "import socket; s = socket.socket(2, 2)\\nfor _ in range(200): s.sendto(b'x', ('host1', 9))"
    subprocess.run(host.command([sys.executable, "-c", ping]), check=True)
    counted = made.counters()
    print(50 < counted[0].lost_packets < 150)
try:
    EmulatedCluster(ClusterSpec.parse(hosts=2, rate="50Mbit", mark="10KB")).__enter__()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="gives up root's rights, so it has to have them")
def test_without_root_a_user_namespace_serves(possible):
    """All but marks and, where cgroups are root's, cores."""
    command = [sys.executable, "-c", WITHOUT_RIGHTS, "-c", USES_A_CLUSTER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "emulating hosts needs root" in done.stderr:
        pytest.skip("this kernel does not let users make namespaces")
    assert done.returncode == 0, done.stderr
    without_rights, lost_half, refusal = done.stdout.splitlines()
    assert (without_rights, lost_half) == ("True", "True")
    assert refusal.startswith(
        "UnsupportedError --mark and --drop load a program into the kernel, which only root"
    )


WITH_A_STAND_IN_FOR_NETEM = """
import runpy, sys
from paceline_lab.emulation import delay
delay.has_netem = lambda *_: True
delay.add_netem = lambda ip, interface, spec: ip.tc("add", "pfifo", interface, 0x10000, limit=1000)
sys.argv = ["laboratory", *sys.argv[1:]]
runpy.run_module("paceline_lab.emulation.laboratory", run_name="__main__")
"""


def test_the_wiring_around_netem_carries_packets(cluster, monkeypatch):
    """Where netem is, a bridge and a second pair of devices surround it; a plain queue takes its place here."""
    start = subprocess.Popen

    def start_with_the_stand_in(command, **settings):
        if "paceline_lab.emulation.laboratory" in command:
            command = [command[0], "-c", WITH_A_STAND_IN_FOR_NETEM, *command[3:]]
        return start(command, **settings)

    monkeypatch.setattr("paceline_lab.emulation.cluster.subprocess.Popen", start_with_the_stand_in)
    made = cluster(hosts=2, rate="50Mbit", delay="1ms", loss="20%,0%")
    monkeypatch.undo()
    assert 300 < len(send(made.hosts[0], made.hosts[1], (0, 500, 0), size=200)) < 500
    assert _conserved(made, 0, 1)
    assert made.counters()[0].wire_drops == 0


def test_what_a_zombie_owned_goes_with_the_next_start(tmp_path, monkeypatch):
    """In a container nobody may ever wait for an owner that was killed."""
    monkeypatch.setattr(owned_resources.tempfile, "gettempdir", lambda: str(tmp_path))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as owner:
        folder = tmp_path / f"paceline-emulate-{owned_resources._identity(owner.pid)}.abcd"
        folder.mkdir()
        owned_resources.remove_orphans()
        assert folder.is_dir()
        owner.stdin.close()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        owned_resources.remove_orphans()
        assert not folder.exists()

"""What is found on a machine, by what its kernel says: files of machines that we do not have."""

from __future__ import annotations

import io
import json
import socket
from dataclasses import replace

import pytest

from paceline.preflight import check, software, this_host
from paceline.preflight.check import Checkup, Host, differences, judge_links
from paceline.preflight.pairs import Link
from paceline.preflight.this_host import CheckResult, looked_at


def _write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


V1 = {"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}
V2 = {"job/cpu.max": "50000 100000\n", "cpu.max": "max 100000\n"}


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [("4:memory:/\n3:cpu,cpuacct:/job\n", V1), ("0::/job/inner\n", V2)],
    ids=["version 1", "version 2, of the group around"],
)
def test_a_container_with_half_a_core(cgroup, files, tmp_path):
    root = _write(
        tmp_path, {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}
    )
    found = this_host.quota(root)
    assert found.level == "bad"
    assert found.found.startswith("0.5 of ")
    assert found.remedy.startswith("export OMP_NUM_THREADS=1")


def test_no_quota(tmp_path):
    root = _write(tmp_path, {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"})
    assert this_host.quota(root).level == "good"


@pytest.mark.parametrize(("source", "level"), [("tsc", "good"), ("hpet", "note")])
def test_clocks(source, level, tmp_path):
    file = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    found = this_host.clocks(_write(tmp_path, {file: f"{source}\n"}))
    assert found.level == level
    assert source in found.found


@pytest.mark.parametrize(
    ("driver", "governor", "level"),
    [
        ("acpi-cpufreq", "powersave", "note"),
        ("intel_pstate", "powersave", "good"),
        ("acpi-cpufreq", "performance", "good"),
    ],
)
def test_frequency(driver, governor, level, tmp_path):
    cpu = "sys/devices/system/cpu/cpu0/cpufreq"
    root = _write(tmp_path, {f"{cpu}/scaling_governor": governor, f"{cpu}/scaling_driver": driver})
    assert this_host.frequency(root).level == level


def test_swapped_out(tmp_path):
    lines = "MemTotal: 1000 kB\nMemAvailable: 500 kB\nSwapTotal: 500 kB\nSwapFree: 100 kB\n"
    assert this_host.memory(_write(tmp_path, {"proc/meminfo": lines})).level == "note"


@pytest.mark.parametrize(("given", "level"), [("1", "good"), ("4096", "bad"), ("many", "bad")])
def test_threads(given, level, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert this_host.threads().level == level


def test_an_interface_that_is_not_there(tmp_path, monkeypatch):
    net = "sys/class/net"
    root = _write(
        tmp_path,
        {
            f"{net}/eth0/operstate": "up",
            f"{net}/eth0/mtu": "9000",
            f"{net}/eth0/speed": "25000",
            f"{net}/eth1/operstate": "down",
            f"{net}/lo/operstate": "unknown",
        },
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    found = this_host.interfaces(root)
    assert found.level == "bad"
    assert "eth0 (MTU 9000, 25 Gbit/s)" in found.found
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert this_host.interfaces(root).level == "good"


def test_a_name_that_nobody_knows(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    found = this_host.name()
    assert found.level == "bad"
    assert found.remedy.endswith(" nowhere.invalid' >> /etc/hosts")


@pytest.mark.processes
def test_windows_too_small(tmp_path):
    system = "proc/sys/net/ipv4"
    root = _write(
        tmp_path,
        {
            f"{system}/tcp_congestion_control": "cubic\n",
            f"{system}/tcp_rmem": "4096 131072 6291456\n",
            f"{system}/tcp_wmem": "4096 16384 212992\n",
        },
    )
    assert this_host.tcp(root).remedy == "sysctl -w net.ipv4.tcp_wmem='4096 131072 67108864'"


@pytest.mark.parametrize(("installed", "level"), [(None, "bad"), ("2.7.1", "bad"), ("2.13.0+cpu", "good")])
def test_which_torch(installed, level, monkeypatch):
    monkeypatch.setattr(software, "_installed", lambda name: installed if name == "torch" else "1.0")
    assert software.versions().level == level


@pytest.mark.processes
def test_without_torch_the_rest_is_looked_at(monkeypatch):
    monkeypatch.setattr(software, "_torch", lambda: None)
    found = {each.topic: each for each in check.look_around()}
    assert set(found) == set(check._CHECKS)
    assert found["devices"].found == found["backends"].found == "torch is not there to ask"
    assert found["loopback"].level == "good"


def test_what_cannot_be_read_says_so():
    def fails():
        raise OSError(13, "Permission denied")

    found = looked_at("memory", fails)
    assert found.level == "note"
    assert "Permission denied" in found.found


HOSTS = tuple(Host(rank, f"host{rank}", (CheckResult("torch 2.13", topic="versions"),)) for rank in range(3))
FAST = [Link(a, b, 1e-4, 1e8) for a in range(3) for b in range(3) if a != b]


def test_links_that_are_alike():
    (found,) = judge_links(HOSTS, FAST)
    assert found.level == "good"
    assert found.found == "every pair is reachable; 800 Mbit/s to 800 Mbit/s, 100 us a message"


def test_a_slow_direction_is_named():
    links = [replace(x, bytes_per_s=1e7) if (x.source, x.target) == (2, 0) else x for x in FAST]
    (found,) = judge_links(HOSTS, links)
    assert (found.level, found.topic) == ("bad", "slow link")
    assert found.found == "rank 2 (host2) to rank 0 (host0): 80 Mbit/s, others 800 Mbit/s"


def test_a_pair_that_is_cut_is_named_once():
    links = [replace(x, error="no answer") if {x.source, x.target} == {1, 2} else x for x in FAST]
    (found,) = judge_links(HOSTS, links)
    assert found.found == "rank 1 (host1) does not reach rank 2 (host2): no answer"


def test_versions_that_differ():
    other = replace(HOSTS[1], findings=(CheckResult("torch 2.8", topic="versions"),))
    assert differences(HOSTS) == []
    assert differences((HOSTS[0], other))[0].level == "bad"


def test_what_is_printed():
    from rich.console import Console

    checkup = Checkup(HOSTS, tuple(FAST), tuple(judge_links(HOSTS, FAST)))
    console = Console(width=120, record=True, file=io.StringIO())
    for part in check.page(checkup):
        console.print(part)
    text = console.export_text()
    assert "rank 2  800 Mbit/s, 100 us  800 Mbit/s, 100 us" in text
    assert "4 things were looked at; nothing stands in the way" in text
    assert json.loads(checkup.as_json)["links"][0]["source"] == 0

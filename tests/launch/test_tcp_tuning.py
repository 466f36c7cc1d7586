"""What `paceline run` says about TCP's settings: where it reads them, and what it advises."""

from pathlib import Path

import pytest

from paceline.launch import tcp_tuning
from paceline.launch.tcp_tuning import TcpTuning, advice_towards


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host's settings, and the metrics of its route."""

    def make(control="cubic", timeout_us="200000", **metrics):
        (tmp_path / "tcp_congestion_control").write_text(f"{control}\n")
        if timeout_us:
            (tmp_path / "tcp_rto_min_us").write_text(f"{timeout_us}\n")
        monkeypatch.setattr(tcp_tuning, "_route_metrics", lambda _: metrics)
        return TcpTuning.towards("10.0.0.1", tmp_path)

    return make


def test_an_untuned_host_is_told_both_settings_and_where_they_were_read(host):
    advice = host().advice()
    assert "uses cubic, not bbr (net.ipv4.tcp_congestion_control" in advice
    assert "waits 200 ms before it repeats a packet (net.ipv4.tcp_rto_min_us" in advice
    assert "sysctl -w net.ipv4.tcp_congestion_control=bbr; sysctl -w net.ipv4.tcp_rto_min_us=5000" in advice
    assert "\n" not in advice


def test_a_tuned_host_is_told_nothing(host):
    assert host("bbr", "5000").advice() is None
    assert host("cubic", "200000", congestion="bbr", rto_min=5).advice() is None


def test_the_route_decides_where_it_has_settings_of_its_own(host):
    assert host("bbr", "5000", congestion="cubic", rto_min=200).advice().count("not bbr") == 1
    assert host("bbr", "200000", rto_min=5) == TcpTuning("bbr", 5.0, True)


def test_an_older_kernel_is_tuned_by_its_routes(host):
    assert "ip route change" in host("bbr", "").advice()


def test_an_emulation_sets_tcp_by_options_of_its_own(host, monkeypatch):
    host(type="unicast")
    monkeypatch.setattr(tcp_tuning, "_SYSTEM", Path("/proc/sys"))
    assert "sysctl" in advice_towards("10.0.0.1")
    monkeypatch.setenv("PACELINE_TCP_ADVICE", "0")
    assert advice_towards("10.0.0.1") is None


def test_this_machine_needs_no_advice(host):
    host(type="local")
    assert advice_towards("127.0.0.1") is None
    assert advice_towards("no-such-host.invalid") is None
    assert advice_towards("192.0.2.1") is None

"""What `paceline doctor` says about TCP's settings: where it reads them, and what it advises."""

import pytest

from paceline.preflight import this_host
from paceline.preflight.this_host import TcpTuning


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host's settings, and the metrics of its route."""

    def make(control="cubic", timeout_us="200000", **metrics):
        (tmp_path / "tcp_congestion_control").write_text(f"{control}\n")
        if timeout_us:
            (tmp_path / "tcp_rto_min_us").write_text(f"{timeout_us}\n")
        monkeypatch.setattr(this_host, "_route_metrics", lambda _: metrics)
        return TcpTuning.towards("10.0.0.1", tmp_path)

    return make


def test_an_untuned_host_is_told_both_settings(host):
    assert (
        host().remedy()
        == "sysctl -w net.ipv4.tcp_congestion_control=bbr; sysctl -w net.ipv4.tcp_rto_min_us=5000"
    )


def test_a_tuned_host_is_told_nothing(host):
    assert host("bbr", "5000").remedy() == ""
    assert host("cubic", "200000", congestion="bbr", rto_min=5).remedy() == ""


def test_the_route_decides_where_it_has_settings_of_its_own(host):
    assert "tcp_congestion_control" in host("bbr", "5000", congestion="cubic", rto_min=200).remedy()
    assert host("bbr", "200000", rto_min=5) == TcpTuning("bbr", 5.0, True)


def test_an_older_kernel_is_tuned_by_its_routes(host):
    assert "ip route change" in host("bbr", "").remedy()

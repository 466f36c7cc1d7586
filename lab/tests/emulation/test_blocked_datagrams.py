"""Hosts whose network drops long UDP datagrams: real sockets, and packets that the kernel drops."""

import json
import re
import shutil
from pathlib import Path

import pytest

from paceline_lossy.datagrams.datagram_loop import compile_all

pytestmark = pytest.mark.processes

VICTIM, RANKS = 1, 3
MTU = "A router between them silently drops packets that are longer than its MTU"


@pytest.mark.lab
@pytest.mark.skipif(shutil.which("tc") is None, reason="tc (iproute2) is not installed")
@pytest.mark.timeout(300)  # it may have to compile
def test_a_small_mtu_is_named(cluster):
    compile_all()
    rows = []

    def take(_host, rank, text):
        if rank is not None and text.startswith("{"):
            rows.append(json.loads(text))

    script = str(Path(__file__).parent / "blocked_datagrams.py")
    outcome = cluster(hosts=RANKS, rate="100mbit").run([script], on_line=take, timeout_s=120)
    assert outcome.exit_code == 0, outcome.failure()
    assert sorted(row["rank"] for row in rows) == list(range(RANKS))
    for row in rows:
        # Whoever gives up first saw that nothing long arrives. Another may only see that it is gone.
        lost = "rank (0|2)" if row["rank"] == VICTIM else f"rank {VICTIM}"
        assert MTU in row["error"] or re.search(f"nothing that it needs from {lost}", row["error"]), row[
            "error"
        ]
    assert any(MTU in row["error"] for row in rows), [row["error"] for row in rows]

"""Training with `BoundedLoss` over links that lose packets: real sockets, hosts and losses."""

import json
from pathlib import Path

import pytest
from lossy_training import STEPS

from paceline_lossy.datagrams.datagram_loop import compile_all

RANKS, BOUND = 3, 0.1


@pytest.mark.lab
@pytest.mark.timeout(300)  # it may have to compile
def test_replicas_agree_and_every_loss_is_within_its_bound_and_reported(cluster):
    compile_all()
    rows, notes = [], []

    def take(_host, rank, text):
        if rank is None:
            notes.append(text)
        elif text.startswith("{"):
            rows.append(json.loads(text))

    outcome = cluster(hosts=RANKS, rate="100mbit", loss="8%").run(
        [str(Path(__file__).parent / "lossy_training.py"), str(BOUND)],
        on_line=take,
        timeout_s=120,
    )
    assert outcome.exit_code == 0, outcome.failure()
    assert len(rows) == RANKS * 3 * STEPS
    assert not [text for text in notes if "TCP here" in text]  # this machine's sysctl sets nothing there
    (remark,) = [text for text in outcome.remarks() if "packets were lost on the way" in text]
    assert "--congestion-control bbr and --min-rto 5ms" in remark
    for compensation in ("survivors", "none", "feedback"):
        lost = 0
        for step in range(STEPS):
            here = [row for row in rows if (row["compensation"], row["step"]) == (compensation, step)]
            for what in ("digest", "lost", "sent", "by_rank", "by_bucket", "by_parameter"):
                assert len({json.dumps(row[what]) for row in here}) == 1, what
            _check_report(here[0])
            if compensation != "feedback":  # which still adds what was lost before
                assert {row["is_exact"] for row in here} == {here[0]["lost"] == 0}
            else:
                assert (sum(row["residual"] for row in here) > 0) == (here[0]["lost"] > 0)
            lost += here[0]["lost"]
        assert lost > 0, f"a network that loses 8 % took nothing of {compensation}"
    assert sum(counters.lost_packets for counters in outcome.counters) > 50
    assert all(row["counters"]["strangers"] == 0 for row in rows)


def _check_report(row):
    assert row["lost"] == sum(row["by_rank"]) == sum(row["by_bucket"])
    for lost_of_rank in row["by_rank"]:  # of two transfers, a third of all that is sent
        assert lost_of_rank <= BOUND * row["sent"] / RANKS
    assert set(row["by_parameter"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(0 <= part <= 1 for part in row["by_parameter"].values())
    assert (sum(row["by_parameter"].values()) > 0) == (row["lost"] > 0)

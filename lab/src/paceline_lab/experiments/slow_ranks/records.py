"""Records of the doctor's study, one line per case as soon as it has run. Grading reads them again and again.

A line has the rank that was made slow, and the ranks' compressed lines of its runs. A study that is cut off has lost
only the case under way. Rules that change later are graded on the same records.
"""

from __future__ import annotations

import base64
import json
import lzma
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.observe.run_folder import header_of
from paceline.observe.run_lines import made
from paceline.observe.run_reading import Run, run_of
from paceline.observe.run_records import RunHeader
from paceline_lab.experiments.slow_ranks.injections import Case

BEFORE, SLOW, REPAIRED = "before", "slow", "repaired"


@dataclass(frozen=True)
class Recorded:
    """One case that has run.

    Attributes:
        case: The injected case.
        culprit: Rank that was made slow; of a link, its host; -1: none.
        layer: Layer of backward in which it was slow.
        load: Load average of the machine over the last minute of the case.
        runs: Ranks' records: `SLOW`, and of a rank's cases `BEFORE` and `REPAIRED`.
    """

    case: Case
    culprit: int
    layer: str
    load: float
    runs: Mapping[str, Run]


def store(file: Path, case: Case, culprit: int, layer: str, folder: Path) -> None:
    """Append a case; its run folders lie in `folder`, by name."""
    runs = {
        run.name: {
            "header": vars(header_of(run)),
            "files": {x.name: x.read_text() for x in sorted(run.glob("rank*"))},
        }
        for run in sorted(folder.iterdir())
        if run.is_dir()
    }
    packed = base64.b85encode(lzma.compress(json.dumps(runs).encode(), preset=9)).decode()
    line = {**vars(case), "culprit": culprit, "layer": layer, "load": os.getloadavg()[0], "runs": packed}
    with file.open("a+b") as lines:
        size = lines.seek(0, os.SEEK_END)
        lines.seek(max(0, size - 1))
        ends = lines.read(1) in {b"", b"\n"}
        lines.write((b"" if ends else b"\n") + json.dumps(line).encode() + b"\n")  # one was cut off


def stored(file: Path) -> dict[Case, Recorded]:
    """Return every case of a file, without lines that were cut off."""
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            words = json.loads(line)
            runs = json.loads(lzma.decompress(base64.b85decode(words.pop("runs"))))
        except (ValueError, lzma.LZMAError):
            continue
        case = Case(words["cause"], words["strength"], words["seed"])
        found[case] = Recorded(
            case, words["culprit"], words["layer"], words["load"], {k: _run(x) for k, x in runs.items()}
        )
    return found


def _run(words: Mapping[str, Mapping[str, str]]) -> Run:
    return run_of(
        made(RunHeader, dict(words["header"])), {name: x.encode() for name, x in words["files"].items()}
    )

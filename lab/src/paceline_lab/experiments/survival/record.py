"""Records of random cases: one record per case, their summary, and the report that several searches write.

Rules
1. A report has one record per seed. A search that adds one reads the others again, under a lock. So searches side by
   side, and of several sessions, add to the same report.
2. A record has its commit, since a changed generator draws other cases from the same seed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline_lab.bench.provenance import collect


@dataclass(frozen=True)
class Case:
    """The record of one case.

    Attributes:
        seed: Seed of the case.
        commit: Commit of the checkout; with a + if its sources were changed.
        load: Load average of the machine at the end.
        took_s: Duration of the case.
        step_s: Median time of a step.
        happened: Faults with their moments: "SIGKILL: forward", or the fault of a host.
        num_losses: Ranks that were lost within training.
        num_joins: Ranks that came in.
        has_hung: Whether it did not end.
        all_lost: Whether all ranks died before a replacement was in: the launch ends, and says so.
        samples_lost: Samples that did not count.
        samples_doubled: Samples that counted twice.
        num_again: Steps that were computed again.
        standstills: Kind of each standstill, its seconds, and those since the last death in it.
        problem: What did not hold; "" if all did.
        engine: Engine that started the ranks; "" if `paceline run` did.
        num_notices: Ranks or hosts that were told to go.
        num_again_on_notice: Steps that were computed again with no loss before.
        num_moved: Hosts that were killed and came back at another address.
        num_back: Of these, those that trained again.
        num_all_told: 1 if all ranks were told to go while they trained.
        num_saved: Checkpoints that were written then.
    """

    seed: int
    commit: str
    load: float
    took_s: float
    step_s: float = 0.0
    happened: Sequence[str] = ()
    num_losses: int = 0
    num_joins: int = 0
    has_hung: bool = False
    all_lost: bool = False
    samples_lost: int = 0
    samples_doubled: int = 0
    num_again: int = 0
    standstills: Sequence[tuple[str, float, float]] = ()
    problem: str = ""
    engine: str = ""
    num_notices: int = 0
    num_again_on_notice: int = 0
    num_moved: int = 0
    num_back: int = 0
    num_all_told: int = 0
    num_saved: int = 0


@functools.cache
def commit() -> str:
    """Return the commit of the checkout when this process began, as records have it."""
    found = collect(0)
    return found.git_hash[:8] + ("+" if found.git_dirty else "")


def words(cases: Sequence[Case]) -> str:
    """Return the summary of the cases, in some lines."""
    if not cases:
        return "no cases"
    counts = (
        f"{len(cases)} cases, {sum(len(case.happened) for case in cases)} faults: "
        f"{sum(case.num_losses for case in cases)} ranks lost, {sum(case.num_joins for case in cases)} came in, "
        f"{sum(case.has_hung for case in cases)} hangs, {sum(case.samples_lost for case in cases)} samples lost, "
        f"{sum(case.samples_doubled for case in cases)} doubled, {sum(bool(case.problem) for case in cases)} failures; "
        f"all ranks lost at once: {sum(case.all_lost for case in cases)}"
    )
    return "\n".join([counts, *_table(cases)])


def _table(cases: Sequence[Case]) -> Iterator[str]:
    """Standstills by kind: from the first death on, and what they took longer than a step."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        for kind, seconds, _ in case.standstills:
            by_kind.setdefault(kind, []).append((seconds, seconds - case.step_s))
    yield f"{'':26}{'number':>8}{'p50':>8}{'p95':>8}{'max':>8}{'p95 beyond the step':>22}  ms"
    everything = [each for found in by_kind.values() for each in found]
    for kind, found in [*sorted(by_kind.items()), ("all", everything)]:
        whole, beyond = (sorted(column) for column in zip(*found, strict=True)) if found else ([0.0], [0.0])
        numbers = [quantile(whole, part) * 1e3 for part in (0.5, 0.95, 1.0)]
        yield (
            f"{kind:26}{len(found):8}"
            + "".join(f"{number:8.0f}" for number in numbers)
            + f"{quantile(beyond, 0.95) * 1e3:22.0f}"
        )
    step_ms, load, took_s = (
        statistics.median(column)
        for column in zip(*((case.step_s * 1e3, case.load, case.took_s) for case in cases), strict=True)
    )
    yield f"a step {step_ms:.0f} ms, a case {took_s:.1f} s, load {load:.1f} (medians)"


def quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


class Report:
    """A file of cases, to which several processes add."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def cases(self) -> list[Case]:
        """Return the stored cases, sorted by their seeds."""
        stored = json.loads(self._path.read_text())["cases"] if self._path.exists() else []
        return [Case(**record) for record in stored]

    def add(self, case: Case) -> None:
        """Put a case in, in place of an earlier one of its seed."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self._path.parent):
            found = {each.seed: each for each in self.cases()}
            found[case.seed] = case
            self._write([found[seed] for seed in sorted(found)])

    def _write(self, cases: Iterable[Case]) -> None:
        kept = list(cases)
        about = {"provenance": asdict(collect(8)), "summary": words(kept).splitlines()}
        lines = ",\n".join(f"    {json.dumps(_record_of(case))}" for case in kept)
        head = json.dumps(about, indent=2).removesuffix("\n}")
        beside = self._path.with_suffix(".new")
        beside.write_text(f'{head},\n  "cases": [\n{lines}\n  ]\n}}\n')
        beside.replace(self._path)


def _record_of(case: Case) -> dict[str, Any]:
    always = ("seed", "commit", "load", "took_s")
    return {name: value for name, value in asdict(case).items() if value or name in always}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

"""Every wait of Paceline for a device, left out one at a time: which suite sees it, and which wait is redundant.

A mutant is a statement of `src/paceline` that waits, records, keeps or synchronizes, replaced by one that does not. It
is put into the processes that run already, as other byte code of the function that holds it, and taken out again. A
mutant is caught if a case under some schedule differs from the CPU's bits, has a race, or raises.

    python -m device.mutants [--jobs words of sites] prints a table.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import json
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline

SOURCE = Path(paceline.__file__).parent

KINDS = {
    "order": "stream wait",
    "wait_event": "stream wait",
    "block": "host synchronization",
    "synchronize": "host synchronization",
    "keep_for_current_streams": "record_stream",
    "record_stream": "record_stream",
    "set_stream": "stream guard",
    "wait": "wait for a collective",
}
"""By the function that is called in a statement of its own."""

RECORDED = {"StreamEvent", "record_event"}
"""Calls that record an event; what is left out records none."""

COLLECTIVES = (
    "comm/collectives.py",
    "comm/peers.py",
    "ddp/buffers.py",
    "ddp/gradient_sync.py",
    "ddp/forward_overlap/piece_sync.py",
    "ddp/reducer.py",
    "ddp/verdict.py",
    "ddp/weights.py",
    "optim/behind_forward.py",
    "optim/sharded_step.py",
    "reductions/compressed.py",
    "reductions/lossy.py",
    "reductions/ordered_mean.py",
)
"""Files whose waits for collectives concern tensors of a device, or what the hosts tell each other instead."""

PLACES = {"comm/device.py", "comm/lane.py", "observe/device_times.py"}


@dataclass(frozen=True)
class Mutant:
    """One statement that is left out.

    Attributes:
        file: Below `src/paceline`.
        function: That holds it, as a qualified name within the module.
        line: Where.
        kind: What it does.
        text: It.
    """

    file: str
    function: str
    line: int
    kind: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}"


def mutants() -> list[Mutant]:
    """All of them, in the order of the source."""
    return [mutant for path in sorted(SOURCE.rglob("*.py")) for mutant in _of(path)]


def _of(path: Path) -> Iterator[Mutant]:
    file, text = str(path.relative_to(SOURCE)), path.read_text()
    for node, function in _functions(ast.parse(text)):
        for place in _sites(node, file):
            yield Mutant(
                file, function, place.lineno, _kind(place), ast.unparse(place).partition("\n")[0][:100]
            )


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[ast.FunctionDef, str]]:
    """Functions of a module and methods of its classes; what is within them counts as theirs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node, f"{prefix}{node.name}"
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _functions(node, prefix)


def _sites(function: ast.FunctionDef, file: str) -> Iterator[ast.stmt]:
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and (name := _called(node.value)) in KINDS:
            if name == "wait" and file not in COLLECTIVES:
                continue
            if name in ("synchronize", "block") and file not in PLACES:
                continue
            yield node
        elif isinstance(node, ast.Assign) and any(map(_records, ast.walk(node.value))):
            yield node


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _records(node: ast.AST) -> bool:
    return _called(node) in RECORDED


def _kind(place: ast.stmt) -> str:
    return KINDS[_called(place.value)] if isinstance(place, ast.Expr) else "event record"


class _LeaveOut(ast.NodeTransformer):
    """Replace the statement on a line."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self.num_replaced = 0

    def visit(self, node: ast.AST) -> Any:
        here = getattr(node, "lineno", None) == self._mutant.line
        if here and isinstance(node, ast.Expr) and _called(node.value) in KINDS:
            self.num_replaced += 1
            return ast.copy_location(ast.Expr(ast.Constant(None)), node)
        if here and isinstance(node, ast.Assign) and self._mutant.kind == "event record":
            self.num_replaced += 1
            changed = copy.deepcopy(node)
            changed.value = _Unrecorded().visit(changed.value)
            return ast.fix_missing_locations(changed)
        return self.generic_visit(node)


class _Unrecorded(ast.NodeTransformer):
    """An event that is never recorded: a mark of no device, or no event at all."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _called(node) == "StreamEvent":
            node.args = [ast.List([], ast.Load())]
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return ast.List([], ast.Load()) if any(map(_records, ast.walk(node))) else node


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Run what is within without the mutant's statement, in this process."""
    path = SOURCE / mutant.file
    leave_out = _LeaveOut(mutant)
    tree = ast.fix_missing_locations(leave_out.visit(ast.parse(path.read_text())))
    assert leave_out.num_replaced == 1, f"{mutant.name}: {leave_out.num_replaced} statements"
    code = _code_of(compile(tree, str(path), "exec"), mutant.function.split("."))
    live = _live(mutant)
    before, live.__code__ = live.__code__, code
    try:
        yield
    finally:
        live.__code__ = before


def _code_of(code: types.CodeType, names: Sequence[str]) -> types.CodeType:
    for name in names:
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    return code


def _live(mutant: Mutant) -> Any:
    module = importlib.import_module("paceline." + mutant.file.removesuffix(".py").replace("/", "."))
    found: Any = module
    for name in mutant.function.split("."):
        found = vars(found)[name]
    found = getattr(found, "fget", None) or found
    while hasattr(found, "__wrapped__"):  # a context manager's function
        found = found.__wrapped__
    return found


# ---- who catches them

BY_FILE: dict[str, tuple[str, ...]] = {
    "comm/lane.py": ("dropped work",),
    "comm/device.py": ("hooks on two streams",),
    "ddp/forward_overlap/piece_sync.py": ("overlapped", "dropped overlap"),
    "ddp/buffers.py": ("buffers",),
    "ddp/weights.py": ("weighed",),
    "ddp/reducer.py": (
        "late gradients",
        "forward overlap",
        "failed step",
        "failed step, overlapped",
        "hooks on two streams",
    ),
    "optim/behind_forward.py": ("sharded, overlapped",),
    "optim/sharded_step.py": ("sharded", "sharded, overlapped"),
    "reductions/compressed.py": (
        "compression int8",
        "shortened onebit",
        "compression topk",
        "sharded, compressed",
    ),
    "reductions/owned_mean.py": ("sharded, compressed",),
    "reductions/kept_state.py": ("kept residuals",),
    "reductions/powersgd.py": ("low rank",),
    "reductions/lossy.py": (
        "compressed and sparse",
        "compression bf16",
        "shortened onebit",
        "compression topk",
    ),
    "reductions/ordered_mean.py": ("compression bf16", "compression powersgd", "shortened randomk"),
}
"""The cases that are tried first; then the default ones."""

DEFAULT = (
    "mlp",
    "read on another stream",
    "buffers",
    "overlapped",
    "compression int8",
    "compression powersgd",
    "adasum",
)

ON_THREE_RANKS = {"_fold_shares": ("compression bf16", "compression powersgd")}
"""Functions that two ranks do not call: cases in which three ranks have the CPU's bits over the fake NCCL."""

DEADLINE_S = 30.0  # for a case of a second: a rank that waits for ever has caught the mutant

EQUIVALENT: dict[str, str] = {
    "C10dWork.wait": "equal: only says how a work has failed that ended just after a slice of waiting",
    "SideStreams.current": "equal: the work then runs on the thread's own stream, in the same order, and delays it",
    "Reducer._finish": "equal: the words left last, on the same stream (Gloo's threads may end otherwise)",
    "Reducer._complete_collectives": "equal: as of Reducer._finish",
    "Pipeline.launch": "equal: it bounds how many payloads are in memory at once",
}
"""By a mutant's function, if one of its statements is not caught: why leaving it out changes nothing."""


def cases_for(mutant: Mutant) -> list[str]:
    """Names of cases, those first that use the file."""
    return list(dict.fromkeys((*BY_FILE.get(mutant.file, ()), *DEFAULT)))


def tried(rank: int, _num_ranks: int, mutant: Mutant, name: str, side: str, schedule: str) -> str:
    """What a rank sees of a case without the mutant's statement; nothing, if all is as on the CPU."""
    from device import cases, our_cases
    from device.ranks import differences

    perform = {**cases.CASES, **our_cases.CASES}[name]

    def case(here: Any) -> Any:
        if here.device.type == "cpu":
            return perform(here, side)
        with applied(mutant):
            return perform(here, side)

    return differences(case, rank, cases.SIDES[side], schedule)


def _warmed(rank: int, _num_ranks: int) -> str:
    """Load the device, and train once, so that the first mutant is not late."""
    from device import cases
    from device.ranks import differences

    return differences(lambda here: cases.CASES["mlp"](here, "nccl"), rank, cases.SIDES["nccl"], "latest")


@dataclass(frozen=True)
class Finding:
    """What became of a mutant: the case, side and schedule that have caught it, or None."""

    mutant: Mutant
    by: tuple[str, str, str] | None
    how: str


def hunt(
    mutant: Mutant,
    run: Callable[..., Any],
    schedules: Sequence[str],
    names: Sequence[str] = (),
    sides: Sequence[str] = ("nccl", "paceline"),
) -> Finding:
    """Try cases, by default those for its file, until one catches it."""
    for name in names or cases_for(mutant):
        for side in sides:
            for schedule in schedules:
                try:
                    found = run(tried, mutant, name, side, schedule, deadline_s=DEADLINE_S)
                except Exception as error:
                    return Finding(mutant, (name, side, schedule), _first_line(error))
                if any(found):
                    return Finding(mutant, (name, side, schedule), next(filter(None, found)))
    return Finding(mutant, None, EQUIVALENT.get(mutant.function, ""))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "Error" in line]
    return (lines or [type(error).__name__])[0][:120]


def main(words: Sequence[str]) -> int:
    from device import late
    from device.ranks import ranks

    chosen = [
        m for m in mutants() if not words or any(word in f"{m.name} {m.kind} {m.text}" for word in words)
    ]
    survivors = 0
    for num_ranks in (2, 3):
        ranks(num_ranks).run(_warmed, deadline_s=300.0)
    for number, mutant in enumerate(chosen, start=1):
        began_s = time.monotonic()
        if names := ON_THREE_RANKS.get(mutant.function, ()):
            finding = hunt(mutant, ranks(3).run, late.SCHEDULES, names, ["nccl"])
        else:
            finding = hunt(mutant, ranks().run, late.SCHEDULES)
        survivors += finding.by is None and not finding.how
        record = {
            "where": mutant.name,
            "function": mutant.function,
            "kind": mutant.kind,
            "text": mutant.text,
            "caught by": finding.by,
            "how": finding.how[:160],
            "seconds": round(time.monotonic() - began_s, 1),
        }
        print(json.dumps(record), flush=True)
        print(f"{number} of {len(chosen)}", file=sys.stderr)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

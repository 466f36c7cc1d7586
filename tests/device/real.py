"""The device suites on a real accelerator with its own backend, and step times beside torch's: `make test-gpu`.

    python -m device.real --device cuda --minutes 4 --report paceline-cuda.json

What matters most comes first (`FIRST`), then step times, then the other cases. No case begins after `--minutes`, and
the report lists those that were left out.

Each case of the suites is trained on the accelerator and on the CPU: over the accelerator's own backend by torch's
wrapper and by ours, and by ours over the backend `paceline`. Kernels round differently, so the CPU is met within a
tolerance; all ranks have to have the same bits. On CUDA all is done once more under torch's sanitizer, which reports
missing waits. The report is one file: send it to us, whatever it says.

Exit codes: 0 everything passed, 1 something did not, 2 there is no such accelerator.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from device import cases, our_cases
from device.ranks import Here
from harness.models import Mlp, generator, squares
from harness.ranks import Ranks
from paceline.comm.device_vote import DeviceExit, DeviceVote
from paceline.observe.device_times import name_of
from paceline.version import __version__

TOLERANCE = 2e-3  # of the largest element, over a handful of steps
ROUNDS, TIMED_STEPS = 10, 20
WIDTHS = {"small: 64 layers of 64": (64, 64), "large: 12 layers of 2048": (12, 2048)}
CASE_DEADLINE_S, TIMES_DEADLINE_S = 120.0, 600.0
NO_DEVICE = 2
# By what a user wants to know; these cases come first.
FIRST = {
    "DDP": ("mlp", "transformer", "conv_bn", "accumulated", "unused parameters", "saved and loaded"),
    "hooks": ("hooks on two streams", "compression bf16", "low rank"),
    "forward overlap": ("forward overlap", "overlapped", "dropped overlap"),
    "mixed precision": ("mixed precision", "mixed_dtypes"),
    "vote and mask": ("failed step", "failed step, overlapped", "dropped work"),
}


@dataclass(frozen=True)
class Device:
    """What is tested.

    Attributes:
        kind: "cuda", "xpu", ...
        backend: Of torch's for its tensors.
        num_devices: How many there are here.
    """

    kind: str
    backend: str
    num_devices: int

    @property
    def num_ranks(self) -> int:
        """That the accelerator's own backend takes: as a rule one a device."""
        return max(1, min(2, self.num_devices))


@dataclass
class Report:
    """What is sent to us."""

    device: dict[str, Any]
    versions: dict[str, str]
    cases: list[dict[str, str]] = field(default_factory=list)
    step_ms: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[dict[str, str]]:
        return [case for case in self.cases if case["result"]]


def find(kind: str) -> Device | str:
    """The accelerator of this process, or why it cannot be tested."""
    if kind == "late":
        from device import late, nccl

        late.start()
        nccl.register()
        return Device(kind, "latenccl", 2)
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != kind:
        found = "none" if here is None else here.type
        return f"no {kind} here: torch {torch.__version__} finds {found} on this machine"
    backend = dist.Backend.default_device_backend_map.get(kind)
    if backend is None:
        return f"torch {torch.__version__} knows no backend for collectives of {kind} tensors"
    return Device(kind, backend, torch.accelerator.device_count())


# ---- on a rank


def _here(rank: int, device: Device, backend: str) -> Here:
    if device.kind == "late":
        find("late")
    index = rank % device.num_devices if device.kind != "late" else 0
    torch.accelerator.set_device_index(index)
    return Here(rank, torch.device(device.kind, index), dist.new_group(backend=backend))


def trained(rank: int, num_ranks: int, device: Device, side: str, backend: str, name: str) -> str:
    """Train a case on the accelerator; what is wrong with it on this rank, or nothing."""
    case = {**cases.CASES, **our_cases.CASES}[name]
    there = _here(rank, device, backend)
    assert dist.group.WORLD is not None
    on_host = Here(rank, torch.device("cpu"), dist.group.WORLD)
    expected = [t.detach().clone() for t in case(on_host, side)]
    found = [t.detach().cpu() for t in case(there, side)]
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        largest = max(float(a.abs().max()) if a.numel() else 0.0, 1.0)
        if a.shape != b.shape or not torch.allclose(
            a.to(torch.complex128), b.to(torch.complex128), rtol=0.0, atol=TOLERANCE * largest
        ):
            return f"tensor {number} of shape {tuple(b.shape)} is not the CPU's within {TOLERANCE:g}"
    return ""


def timed(rank: int, num_ranks: int, device: Device, layers: int, width: int) -> dict[str, list[float]]:
    """Milliseconds of a step, a number a round: sides take turns."""
    here = _here(rank, device, device.backend)
    models = {}
    for side in ("torch", "nccl"):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(here.device)
        models[side] = cases.wrapped(net, here, side, bucket_cap_mb=25)
    optimizers = {side: torch.optim.SGD(model.parameters(), 0.01) for side, model in models.items()}
    batch = torch.randn(32, width, generator=generator(0, rank)).to(here.device)
    found: dict[str, list[float]] = {side: [] for side in models}
    for turn in range(ROUNDS + 1):
        for side, model in models.items():
            torch.accelerator.synchronize()
            began_s = time.perf_counter()
            for _ in range(TIMED_STEPS):
                optimizers[side].zero_grad()
                squares(model(batch)).backward()
                optimizers[side].step()
            torch.accelerator.synchronize()
            if turn:  # the first warms up
                found[side].append(1e3 * (time.perf_counter() - began_s) / TIMED_STEPS)
    return found


def synchronizing_step(rank: int, num_ranks: int, device: Device) -> str:
    """Whether a plain step waits for a CUDA device, by torch's own debug mode; what it said, or nothing."""
    here = _here(rank, device, device.backend)
    model = cases.wrapped(cases.made(Mlp, here), here, "nccl")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = [cases.vectors(here, step) for step in range(6)]
    module = torch.get_device_module(device.kind)
    for step, batch in enumerate(batches):
        if step == 4:
            module.set_sync_debug_mode("error")
        try:
            optimizer.zero_grad()
            squares(model(batch)).backward()
            optimizer.step()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            if step >= 4:
                module.set_sync_debug_mode("default")
    return ""


def voted(rank: int, num_ranks: int, device: Device) -> str:
    """Vote on two steps, the second one withdrawn, and abort; what is wrong with it, or nothing.

    One rank alone: NCCL refuses two on one device. What an abort leaves on other ranks needs two devices.
    """
    here = _here(rank, device, device.backend)
    leave = DeviceExit(here.device)
    leave.enter()
    vote = DeviceVote(leave, here.group, "real", here.device)
    parameter = nn.Parameter(torch.zeros(1000, device=here.device))
    optimizer: Any = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    after = []
    for is_in in (True, False):
        if not is_in:
            torch.accelerator.synchronize(here.device)
            leave.withdraw()
        parameter.grad = torch.ones_like(parameter)
        vote.cast()
        optimizer.found_inf = vote.found_inf
        optimizer.step()
        after.append(parameter.detach().cpu())
    if not after[0].any() or vote.num_good() != 1 or not torch.equal(*after):
        return "a good step changed nothing, or a withdrawn one counts"
    backend: Any = here.group._get_backend(here.device)
    backend.abort()
    torch.accelerator.synchronize(here.device)
    try:
        vote.cast()
    except RuntimeError:
        return ""
    return "an aborted group takes collectives"


# ---- all together


def _run(ranks: Ranks, function: Any, *arguments: Any, deadline_s: float) -> tuple[list[Any], str]:
    outcomes = ranks.outcomes(function, *arguments, deadline_s=deadline_s)
    stories = [outcome.story() for outcome in outcomes if not outcome.clean]
    return [outcome.value for outcome in outcomes], "\n".join(stories)


def try_cases(
    report: Report, device: Device, env: dict[str, str], names: Sequence[str], until_s: float
) -> None:
    """Try every case on every side; two ranks over our backend, which may share a device.

    No case begins after `until_s`, by the monotonic clock.
    """
    label = "sanitizer" if env else "plain"
    for side, backend, num_ranks in (
        ("torch", device.backend, device.num_ranks),
        ("nccl", device.backend, device.num_ranks),
        ("paceline", "paceline", 2),
    ):
        chosen = [name for name in names if side != "torch" or name in cases.BOTH]
        if time.monotonic() > until_s:
            report.left_out += [f"{label}, {side}, {name}" for name in chosen]
            continue
        with Ranks(num_ranks, env=env, store="tcp") as ranks:
            for name in chosen:
                if time.monotonic() > until_s:
                    report.left_out.append(f"{label}, {side}, {name}")
                    continue
                values, story = _run(ranks, trained, device, side, backend, name, deadline_s=CASE_DEADLINE_S)
                wrong = story or "; ".join(dict.fromkeys(filter(None, values)))
                report.cases.append(
                    {
                        "run": label,
                        "side": side,
                        "ranks": str(num_ranks),
                        "case": name,
                        "result": wrong[-2000:],
                    }
                )
                print(f"{label:9} {side:9} {name:26} {'ok' if not wrong else wrong[:120]}", flush=True)


def try_vote(report: Report, device: Device) -> None:
    """The vote of Elastic, its mask and its abort, on one rank."""
    with Ranks(1, store="tcp") as ranks:
        values, story = _run(ranks, voted, device, deadline_s=CASE_DEADLINE_S)
    result = story or values[0]
    case = {
        "run": "plain",
        "side": "nccl",
        "ranks": "1",
        "case": "vote, mask and abort",
        "result": result[-2000:],
    }
    report.cases.append(case)
    print(
        f"plain     nccl      vote, mask and abort       {'ok' if not result else result[:120]}", flush=True
    )
    if device.num_devices < 2:
        print(
            "plain     nccl      abort of two ranks         skipped: NCCL takes one rank per device",
            flush=True,
        )


def take_times(report: Report, device: Device) -> None:
    """The step-time table, and on CUDA whether a step waits for the device."""
    with Ranks(device.num_ranks, store="tcp") as ranks:
        for what, (layers, width) in WIDTHS.items():
            values, story = _run(ranks, timed, device, layers, width, deadline_s=TIMES_DEADLINE_S)
            row: dict[str, Any] = {"model": what, "ranks": device.num_ranks, "problem": story[-2000:]}
            if not story:
                row |= {side: statistics.median(values[0][side]) for side in values[0]}
                row["of torch's"] = row["nccl"] / row["torch"]
                row["rounds"] = values[0]
            report.step_ms.append(row)
        if hasattr(torch.get_device_module(device.kind), "set_sync_debug_mode"):
            values, story = _run(ranks, synchronizing_step, device, deadline_s=CASE_DEADLINE_S)
            wrong = story or "; ".join(dict.fromkeys(filter(None, values)))
            report.cases.append(
                {
                    "run": "plain",
                    "side": "nccl",
                    "ranks": str(device.num_ranks),
                    "case": "no step waits",
                    "result": wrong,
                }
            )


def table(report: Report) -> str:
    """In words, for the terminal."""
    lines = [f"{'model':26}{'torch ms':>12}{'paceline ms':>14}{'ratio':>8}"]
    for row in report.step_ms:
        if row["problem"]:
            lines.append(f"{row['model']:26} {row['problem'].splitlines()[0][:60]}")
        else:
            ratio = row["of torch's"]
            lines.append(f"{row['model']:26}{row['torch']:12.2f}{row['nccl']:14.2f}{ratio:8.2f}")
    for group, names in FIRST.items():
        results = [not case["result"] for case in report.cases if case["case"] in names]
        lines.append(f"{group:26}{sum(results)} of {len(results)} passed")
    lines.append(f"{'all':26}{len(report.cases) - len(report.failures)} of {len(report.cases)} passed")
    if report.left_out:
        lines.append(
            f"{len(report.left_out)} were left out after {report.seconds:.0f} s: --minutes 0 tries all"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="its type, as torch calls it: cuda, xpu, npu, mps")
    parser.add_argument("--report", type=Path, help="the file to write (paceline-DEVICE.json)")
    parser.add_argument(
        "--minutes", type=float, default=4, help="begin no case after so long; 0: no limit (4)"
    )
    parser.add_argument("--cases", nargs="*", help="only these (all)")
    parser.add_argument("--no-times", action="store_true", help="leave out step times")
    given = parser.parse_args(arguments)
    device = find(given.device)
    if isinstance(device, str):
        print(f"test-gpu: {device}. Nothing was tested. Pass --device for another kind.", file=sys.stderr)
        return NO_DEVICE
    path = given.report or Path(f"paceline-{device.kind}.json")
    here = {**asdict(device), "name": name_of(torch.device(device.kind, 0)), "host": platform.platform()}
    versions = {"paceline": __version__, "torch": torch.__version__, "python": platform.python_version()}
    report = Report(here, versions)
    names = given.cases or [*cases.CASES, *our_cases.CASES]
    first = [name for group in FIRST.values() for name in group if name in names]
    began_s = time.monotonic()
    until_s = began_s + 60 * given.minutes if given.minutes else math.inf
    try:
        try_cases(report, device, {}, first, until_s - 60 if given.minutes else math.inf)
        try_vote(report, device)
        if not given.no_times:
            take_times(report, device)
        try_cases(report, device, {}, [name for name in names if name not in first], until_s)
        if device.kind == "cuda":
            try_cases(
                report, device, {"TORCH_CUDA_SANITIZER": "1"}, list(dict.fromkeys([*first, *names])), until_s
            )
    finally:  # what is known is worth sending, too
        report.seconds = time.monotonic() - began_s
        path.write_text(json.dumps(asdict(report), indent=1))
    print(f"{table(report)}\nReport: {path}. Please send it to us, whatever it says.")
    return int(bool(report.failures) or any(row["problem"] for row in report.step_ms))


if __name__ == "__main__":
    sys.exit(main())

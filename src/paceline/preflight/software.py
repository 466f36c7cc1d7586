"""Versions, devices and backends: what would be imported and used. Looks for packages before it imports torch."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.host.stacks import py_spy
from paceline.preflight.this_host import CheckResult
from paceline.version import __version__

_OLDEST_TORCH = (2, 8)
_EXTRAS = {
    "paceline-adasum": "Adasum (in a clone: pip install ./adasum)",
    "paceline-lossy": "gradients over UDP (in a clone: pip install ./lossy)",
    "paceline-plan": "`paceline plan` (in a clone: pip install ./plan)",
    "paceline-recipes": "large batches and local steps (in a clone: pip install ./recipes)",
    "paceline-servers": "parameter servers (in a clone: pip install ./servers)",
}


def versions() -> CheckResult:
    """Check the versions of Python, torch and Paceline; a torch that is too old or missing is bad."""
    found = _installed("torch")
    said = f"Paceline {__version__}, Python {platform.python_version()}, torch {found or 'not installed'}"
    if found is None:
        return CheckResult(said, "bad", "pip install torch")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if numbers < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        return CheckResult(f"{said}, which is older than {oldest}", "bad", f"pip install 'torch>={oldest}'")
    return CheckResult(f"{said}, numpy {_installed('numpy') or 'not installed'}")


def extras() -> CheckResult:
    """Check optional packages, and what is missing without them."""
    missing = {name: use for name, use in _EXTRAS.items() if _installed(name) is None}
    here = [f"{name} {_installed(name)}" for name in _EXTRAS if name not in missing]
    if not missing:
        return CheckResult(", ".join(here))
    lacks = "; ".join(f"no {name}: {use}" for name, use in missing.items())
    return CheckResult("; ".join([", ".join(here), lacks] if here else [lacks]))


def stacks() -> CheckResult:
    """Check whether the stack of a rank that hangs can be read."""
    path = py_spy()
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    allowed = scope.read_text().strip() if scope.exists() else "0"
    if path is None:
        return CheckResult(
            "py-spy is not installed: they are read by a signal, which may wake the rank",
            "note",
            "pip install py-spy",
        )
    if allowed in ("2", "3") and os.geteuid() != 0:
        return CheckResult(
            f"kernel.yama.ptrace_scope is {allowed}: only root may look",
            "note",
            "sysctl -w kernel.yama.ptrace_scope=1",
        )
    return CheckResult(f"py-spy {_installed('py-spy') or path}")


def devices() -> CheckResult:
    """Check the accelerators that torch sees."""
    torch = _torch()
    if torch is None:
        return CheckResult("torch is not there to ask", "note")
    cores = len(os.sched_getaffinity(0))
    if not torch.accelerator.is_available():
        found = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]
        if found:
            return CheckResult(
                f"{cores} cores; {len(found)} GPU device file(s) ({found[0]}), but this torch ({torch.__version__}) "
                "cannot use them",
                "bad",
                "pip install torch --index-url https://download.pytorch.org/whl/cu126",
            )
        return CheckResult(f"{cores} cores, no accelerator")
    kind = torch.accelerator.current_accelerator().type
    module = getattr(torch, kind)
    names = [module.get_device_name(number) for number in range(torch.accelerator.device_count())]
    words = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if len(set(names)) > 1:
        return CheckResult(
            f"{words}; {cores} cores. They are unequal",
            "note",
            "pass balance='auto' to DistributedDataParallel",
        )
    return CheckResult(f"{words}; {cores} cores")


def backends() -> CheckResult:
    """Return which process groups this torch can open."""
    if _torch() is None:
        return CheckResult("torch is not there to ask", "note")
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_available():
        return CheckResult("this torch has no torch.distributed", "bad", "pip install torch")
    here = [name for name in ("gloo", "nccl", "mpi", "xccl", "ucc") if dist.is_backend_available(name)]
    return CheckResult(f"{', '.join(here) or 'none'}; paceline (our own)")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch() -> Any:
    if _installed("torch") is None and "torch" not in sys.modules:
        return None
    try:
        import torch  # noqa: PLC0415  seconds
    except (ImportError, OSError):  # a library that it needs is missing
        return None
    return torch

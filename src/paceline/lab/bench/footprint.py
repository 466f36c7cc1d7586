"""Will the ranks fit into memory? An estimate, before anything starts; the kernel's answer would be SIGKILL.

In copies of all gradients, for each rank. A side that waits for its turn keeps its buckets, and what its hook or its
constructor wrote; the one whose turn it is has gradients besides, and something in flight. Real compute also has
parameters and momentum for every side.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ConfigurationError
from paceline.lab.bench.sides import SIDES
from paceline.lab.bench.step import StepConfig

_WAITING = {"none": 0.0, "ours": 1.0, "torch": 1.0, "accelerate": 2.0, "deepspeed": 1.0, "torchft": 1.0}
_HOOK = {"powersgd": 2.0}
_ACTIVE = 2.0
_REAL = 2.0  # parameters and momentum
_MARGIN_BYTES = 400e6  # a process with torch


def needed_bytes(config: StepConfig, num_ranks: int) -> float:
    """Return about how much memory all ranks of a run take together."""
    copies = _ACTIVE
    for name in ("none", *config.side_names):
        side = SIDES[name]
        copies += _WAITING[side.family] + _HOOK.get(side.hook or "", 0.0)
        copies += _REAL if config.profile is None else 0.0
    return num_ranks * (copies * config.gradient_bytes + _MARGIN_BYTES)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> float | None:
    """Return what the kernel thinks can be had without swapping; None where it does not say."""
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return 1024.0 * float(lines["MemAvailable"].split()[0]) if "MemAvailable" in lines else None


def check_memory(config: StepConfig, num_ranks: int, available: float | None) -> None:
    """Refuse a run that would not fit.

    Raises:
        ConfigurationError: With the numbers, and what would fit.
    """
    needed = needed_bytes(config, num_ranks)
    if available is None or needed <= available:
        return
    advice = "fewer sides or ranks"
    if config.profile is not None:
        least = max(2.0, config.scale * needed / available)
        advice = (
            f"--scale {least:.0f} (it divides the gradients' bytes; divide --rate as well to keep the proportions), "
            f"or {advice}"
        )
    raise ConfigurationError(
        f"{num_ranks} ranks of {config.workload} with {len(config.side_names)} sides need about {needed / 1e9:.1f} GB "
        f"of memory, and {available / 1e9:.1f} GB are available. Pass {advice}."
    )

"""Which workload the first word of `paceline plan` names: a script, a file, or one that is shipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ConfigurationError
from paceline.plan.script_recording import record_script
from paceline.planning import Workload
from paceline.planning.recorded_workload import is_profile, parsed


def is_script(source: str) -> bool:
    """Whether it is to be run and recorded."""
    return Path(source).suffix == ".py"


def workload_of(source: str, arguments: Sequence[str], num_steps: int) -> Workload:
    """Record it, or read it.

    Args:
        source: A script, a file with a workload, a trace or a profile, or the name of a shipped workload.
        arguments: Of a script.
        num_steps: To record of a script.

    Raises:
        ConfigurationError: It is none of these, or cannot be read.
        RecordingError: The script failed.
    """
    path = Path(source)
    if is_script(source):
        return record_script(path, arguments, num_steps)
    if path.exists() or path.suffix:
        name = _profiled(path)
        return Workload.load(path) if name is None else _from_profile(path, name)
    return _shipped(source)


def _profiled(path: Path) -> str | None:
    """The workload of which the file is a profile; None if it is something else, or cannot be read."""
    try:
        record = parsed(path.read_text())
    except (OSError, UnicodeDecodeError):
        return None
    return str(record["workload"]) if is_profile(record) else None


def _from_profile(path: Path, name: str) -> Workload:
    from paceline_lab.bench.layer_profile import Profile  # noqa: PLC0415  # imports torch
    from paceline_lab.bench.timed_model import planned  # noqa: PLC0415

    return planned(Profile.load(path, name))


def _shipped(name: str) -> Workload:
    from paceline_lab.bench.layer_profile import default_profile  # noqa: PLC0415  # imports torch
    from paceline_lab.bench.timed_model import planned  # noqa: PLC0415
    from paceline_lab.workloads import WORKLOADS  # noqa: PLC0415

    if name not in WORKLOADS:
        raise ConfigurationError(
            f"{name!r} is neither a file nor a shipped workload. Pass a script, a recorded workload, or one of "
            f"{', '.join(WORKLOADS)}."
        )
    return planned(default_profile(name))

"""Actions of a rank that wait until its script has imported torch, set up before the script begins.

`paceline run` has collectives counted, so that the launcher finds hung ranks. With `--replace-ddp` torch's class
becomes ours. `paceline doctor -- COMMAND` has the training recorded.

The launcher puts this folder first on the ranks' PYTHONPATH, and what is to happen into variables. Python runs the
first `sitecustomize.py` on its path as it starts; ours arranges for the patch as soon as the script has imported torch.
So the script starts as without us: its `__main__`, its tracebacks and its modules are its own. Processes that it starts
do the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.host.stacks import answer_signals
from paceline.integrations.collective_counts import count_collectives
from paceline.late_imports import when_imported
from paceline.observe import progress, run_folder

VARIABLE = "PACELINE_REPLACE_DDP"
_PYTHONPATH = "PYTHONPATH"


def environment(options: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make a process call `patch_torch(**options)` after it imports torch.

    Raises ConfigurationError for options that are not possible.
    """
    from paceline.reductions import choose_reduction  # noqa: PLC0415  ranks import this module before torch

    choose_reduction(options.get("reduction"), options.get("compression"))
    return {VARIABLE: json.dumps(dict(options)), **_search_path()}


def recording_environment(folder: Path) -> dict[str, str]:
    """Return the variables that make a Python process record what it trains into this run folder."""
    return {run_folder.VARIABLE: str(folder.resolve()), **_search_path()}


def counting_environment(folder: Path) -> dict[str, str]:
    """Return the variables that make a rank write into a folder how far it is, and answer who asks for its stack."""
    return {progress.VARIABLE: str(folder), **_search_path()}


def _search_path() -> dict[str, str]:
    """Return Python's search path with this folder first, once."""
    own = str(Path(__file__).parent)
    others = [entry for entry in os.environ.get(_PYTHONPATH, "").split(os.pathsep) if entry and entry != own]
    return {_PYTHONPATH: os.pathsep.join([own, *others])}


def apply_environment() -> None:
    """Patch torch, record or count once this process has imported it, as its environment says. Imports no torch."""
    if os.environ.get(progress.VARIABLE) and "RANK" in os.environ:
        answer_signals(Path(os.environ[progress.VARIABLE]))
        count_collectives()
    if os.environ.get(run_folder.VARIABLE) and "RANK" in os.environ:
        when_imported("torch", lambda _: _record())
    if os.environ.get(VARIABLE):
        options: dict[str, str] = json.loads(os.environ[VARIABLE])
        when_imported("torch", lambda _: _patch(options))


def _record() -> None:
    from paceline.recording.torch_ddp import record_torch_ddp  # noqa: PLC0415  needs torch, which has just arrived

    record_torch_ddp()


def _patch(options: dict[str, Any]) -> None:
    from paceline.integrations.torch_patch import patch_torch  # noqa: PLC0415  needs torch, which has just arrived

    patch_torch(**options)

"""`paceline run --replace-ddp`: how ranks learn, before the script begins, that torch's class is to be ours.

The launcher puts this folder first on the ranks' PYTHONPATH and the options into a variable. Python runs the first
`sitecustomize.py` on its path as it starts; ours arranges for the patch as soon as the script has imported torch. So
the script is started as ever: its `__main__`, its tracebacks and its modules are its own. Processes that it starts do
the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.late_imports import when_imported

VARIABLE = "PACELINE_REPLACE_DDP"
_PYTHONPATH = "PYTHONPATH"


def environment(options: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a Python process call `patch_torch(**options)` when it has imported torch.

    Raises:
        ConfigurationError: There is no reduction or compression of that name.
    """
    from paceline.reductions import choose_reduction  # noqa: PLC0415  ranks import this module before torch

    choose_reduction(options.get("reduction"), options.get("compression"))
    folders = [str(Path(__file__).parent)]
    if os.environ.get(_PYTHONPATH):
        folders.append(os.environ[_PYTHONPATH])
    return {VARIABLE: json.dumps(dict(options)), _PYTHONPATH: os.pathsep.join(folders)}


def apply_environment() -> None:
    """Patch torch as soon as this process has imported it, if its environment says so. Imports no torch."""
    if os.environ.get(VARIABLE):
        options: dict[str, str] = json.loads(os.environ[VARIABLE])
        when_imported("torch", lambda _: _patch(options))


def _patch(options: dict[str, Any]) -> None:
    from paceline.integrations.torch_patch import patch_torch  # noqa: PLC0415  needs torch, which has just arrived

    patch_torch(**options)

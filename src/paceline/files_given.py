"""Files that a user names: checked for reading or writing before any work is done for them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from paceline.errors import ConfigurationError


def check_output(path: Path, option: str) -> None:
    """Raise ConfigurationError for a file, named by `option`, that could not be written later."""
    reasons = {
        "it is a folder": path.is_dir(),
        f"there is no folder {path.parent}": not path.parent.is_dir(),
        "it may not be written to": not os.access(path if path.exists() else path.parent, os.W_OK),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigurationError(f"{option} {path} cannot be written: {reason}. Pass another file.")


def parse_json(text: str | bytes) -> Any:
    """Return what a text says in JSON; raises ValueError if it is none, or nested more deeply than Python reads."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error

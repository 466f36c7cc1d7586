"""Jobs whose ranks are programs of their own: how one is run on an emulated cluster, and its samples are stored.

Such a report grows case by case: measuring one again replaces it, and leaves the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigurationError
from paceline_lab.emulation import Change, ClusterSpec, EmulatedCluster

TCP: dict[str, dict[str, Any]] = {
    "cubic": {"congestion_control": "cubic"},
    "tuned": {"congestion_control": "bbr", "min_rto": "5ms"},
}


def run_job(
    spec: ClusterSpec,
    program: Path,
    told: Mapping[str, Any],
    timeout_s: float = 500,
    change: Change | None = None,
) -> tuple[Any, float]:
    """Run a program on every rank; return the JSON that its first rank printed, and how busy this machine was.

    Args:
        spec: The cluster.
        program: Gets `told` as JSON, as its only argument.
        told: The case.
        timeout_s: Timeout of the whole job.
        change: Change of the cluster before the ranks start.

    Raises:
        ConfigurationError: A rank failed; its own output is above.
    """
    found = []

    def take(host: int, rank: int | None, text: str) -> None:
        if text.startswith(("{", "[{")):
            found.append(json.loads(text))
        elif rank is not None:
            print(f"[host{host}] {text}", file=sys.stderr)

    with EmulatedCluster(spec) as cluster:
        if change is not None:
            cluster.change(change)
        outcome = cluster.run([str(program), json.dumps(told)], on_line=take, timeout_s=timeout_s)
    if outcome.exit_code or not found:
        raise ConfigurationError(outcome.failure() or "a rank failed.")
    return found[0], outcome.busy_ratio


def keep(path: Path, case: str, samples: Mapping[str, Any], summary: Mapping[str, Any], **about: Any) -> None:
    """Write a case next to those that were measured before; `about` is kept once for the file."""
    stored: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"samples": {}, "summaries": {}}
    )
    stored["samples"][case], stored["summaries"][case] = samples, summary
    path.write_text(json.dumps(stored | about) + "\n")

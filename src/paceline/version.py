"""The version of Paceline, which ranks compare before they communicate: another one may send other bytes."""

from __future__ import annotations

from collections.abc import Sequence

__version__ = "0.1.0"


def difference(versions: Sequence[str]) -> str | None:
    """Say which rank runs another version than rank 0, of all ranks' versions; None if all run the same."""
    for rank, version in enumerate(versions):
        if version != versions[0]:
            return (
                f"rank {rank} runs Paceline {version}, rank 0 Paceline {versions[0]}. Two versions may not send the "
                "same messages. Install one version for every rank (on each machine, in each environment)."
            )
    return None

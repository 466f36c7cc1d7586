"""A hook of mkdocs: links that leave `docs/` lead somewhere on the site too.

Pages link to files of the repository (`../lab/LOG.md`, `../../examples/train_digits.py`), which GitHub and a
checkout follow. The site holds `docs/` only, so each such file is put on it under its own path, markdown as a page, and
the link is changed to lead there. A link to what does not exist stays as it is, and the strict build fails.

Long lines of code are wrapped (`site.css`), unless they are drawn tables.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = "repository"  # where on the site they lie
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r'<div class="highlight">.*?</div>', re.DOTALL)
_TABLE = re.compile("[│┃─]")
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Put every file outside that a page links to on the site, and those that these link to."""
    pages = [(f.src_uri, Path(f.abs_src_path)) for f in files.documentation_pages()]
    seen: set[str] = set()
    while pages:
        uri, path = pages.pop()
        for _, target in _leaving(uri, path.read_text()):
            if target in seen:
                continue
            seen.add(target)
            file = File.generated(config, f"{FOLDER}/{target}", abs_src_path=str(REPOSITORY / target))
            file.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(file)
            if file.is_documentation_page():
                pages.append((file.src_uri, REPOSITORY / target))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links of a page that leave `docs/`; for a page from outside, also those that lead into it."""
    for link, target in _leaving(page.file.src_uri, markdown):
        markdown = markdown.replace(f"]({link}", f"]({_way(page.file.src_uri, f'{FOLDER}/{target}')}")
    for link, target in _entering(page.file.src_uri, markdown):
        markdown = markdown.replace(f"]({link}", f"]({_way(page.file.src_uri, target)}")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Mark blocks of code whose long lines are wrapped."""

    def marked(block: re.Match[str]) -> str:
        return block[0] if _TABLE.search(block[0]) else block[0].replace("highlight", "highlight wraps", 1)

    return _CODE.sub(marked, html)


def _way(page: str, target: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def _links(uri: str, markdown: str) -> list[tuple[str, str]]:
    """Each link to a file of the repository, and that file's path in it."""
    folder = posixpath.dirname(_in_repository(uri))
    links = dict.fromkeys(_LINK.findall(_FENCE.sub("", markdown)))
    found = [(link, posixpath.normpath(posixpath.join(folder, link))) for link in links]
    return [(link, target) for link, target in found if (REPOSITORY / target).is_file()]


def _leaving(uri: str, markdown: str) -> list[tuple[str, str]]:
    return [(link, target) for link, target in _links(uri, markdown) if not target.startswith("docs/")]


def _entering(uri: str, markdown: str) -> list[tuple[str, str]]:
    if not uri.startswith(f"{FOLDER}/"):
        return []
    return [(link, target[5:]) for link, target in _links(uri, markdown) if target.startswith("docs/")]


def _in_repository(uri: str) -> str:
    return uri[len(FOLDER) + 1 :] if uri.startswith(f"{FOLDER}/") else f"docs/{uri}"

"""Builds a release from a tag: `make release`. It publishes nothing.

    cd tests && python -m harness.release ../dist

The commit must carry the tag `vVERSION`, and nothing may be uncommitted. The folder gets the sdist and the wheel of
every distribution, `SHA256SUMS`, and `NOTES.md`, the section of the changelog for that version.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.installed_smoke import PACKAGES, REPOSITORY, build


def version_of(source: str) -> str:
    """Return the version in the text of `version.py`."""
    found = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    if found is None:
        raise SystemExit("src/paceline/version.py has no __version__.")
    return found[1]


def notes(changelog: str, version: str) -> str:
    """Return the changelog's section of a version, without its links, which lead nowhere outside of the repository.

    Raises:
        SystemExit: There is none, or its heading still says that it is unreleased.
    """
    found = re.search(
        rf"^## {re.escape(version)}(?![\w.])([^\n]*)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise SystemExit(f"CHANGELOG.md has no section `## {version}`. Write it, then tag.")
    if "unreleased" in found[1]:
        raise SystemExit(f"CHANGELOG.md calls {version} unreleased. Put the date there, commit, then tag.")
    text = re.sub(r"\s*\((?:\[[^\]]+\]\([^)]*\)(?:,\s+)?)+\)", "", found[2])  # "([guide](docs/guide/x.md))"
    return re.sub(r"\[([^\]]+)\]\((?!https:)[^)]*\)", r"\1", text).strip() + "\n"


def check_commit(version: str, tags: str, uncommitted: str) -> None:
    """Raise SystemExit unless what lies here is what the tag names.

    Args:
        version: The version in the source.
        tags: Tags of the commit, one a line.
        uncommitted: Output of `git status --porcelain`.
    """
    if uncommitted.strip():
        raise SystemExit(
            f"a release is built from what is committed. Commit or remove these first:\n{uncommitted}"
        )
    if f"v{version}" not in tags.split():
        raise SystemExit(
            f"this commit is not tagged v{version}, the version of src/paceline/version.py. `git tag -a v{version}` "
            "tags it; `git checkout` goes to an older tag."
        )


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def main(words: list[str]) -> None:
    """Check the commit, build everything into the folder, and write its digests and notes."""
    (folder,) = map(Path, words)
    version = version_of((REPOSITORY / "src/paceline/version.py").read_text())
    check_commit(version, _git("tag", "--points-at", "HEAD"), _git("status", "--porcelain"))
    text = notes((REPOSITORY / "CHANGELOG.md").read_text(), version)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as name:
            for file in build(Path(name), package):
                if f"-{version}" not in file.name:
                    raise SystemExit(
                        f"{file.name} is not of version {version}. Every distribution has one version."
                    )
                shutil.copy(file, folder)
    files = sorted(folder.iterdir())
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (folder / "SHA256SUMS").write_text(sums)
    (folder / "NOTES.md").write_text(text)
    print(*(file.name for file in files), sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

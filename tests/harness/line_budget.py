"""Print how many lines each package has, and each room of `paceline`: what `make check` shows, and nobody enforces."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = {
    "paceline": "src",
    "paceline_lab": "lab/src",
    "paceline_lossy": "lossy/src",
    "paceline_plan": "plan/src",
    "paceline_servers": "servers/src",
    "paceline_svm": "svm/src",
}


def num_lines(folder: Path) -> int:
    """Lines of all Python files under a folder."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def rooms(folder: Path) -> dict[str, int]:
    """Lines of each folder of a package, the longest first; its own files count as `.`."""
    found = {path.name: num_lines(path) for path in folder.iterdir() if (path / "__init__.py").exists()}
    found["."] = num_lines(folder) - sum(found.values())
    return dict(sorted(found.items(), key=lambda room: -room[1]))


if __name__ == "__main__":
    for package, source in PACKAGES.items():
        print(f"{num_lines(REPOSITORY / source):7,} lines in {source}/{package}")
    told = (f"{name} {count:,}" for name, count in rooms(REPOSITORY / "src" / "paceline").items())
    print(f"        {', '.join(told)}")

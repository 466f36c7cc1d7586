"""Installs Paceline as a release would be, into empty environments, and uses it there: `make release-check`.

    python tests/harness/installed_smoke.py python3.10 python3.13

For each interpreter it builds the sdist, and a wheel from that sdist. It makes an environment with nothing else, and
installs the wheel with its dependencies. Then it runs the README's twelve lines over two ranks and a few commands, from
a folder that has no source. Then it does the same with the wheels of the other two packages, and their commands. An
interpreter takes minutes, most of them for torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# The folder of each package of this repository, and what it is built from.
PACKAGES = {
    "paceline": ".",
    "paceline_adasum": "adasum",
    "paceline_lossy": "lossy",
    "paceline_plan": "plan",
    "paceline_recipes": "recipes",
    "paceline_servers": "servers",
    "paceline_lab": "lab",
    "paceline_svm": "svm",
}
BUILT_FROM = ("pyproject.toml", "hatch_build.py", "README.md", "CHANGELOG.md", "LICENSE", "src")
PAGES = ("docs/glossary.md", "docs/troubleshooting.md")  # which the package holds links to
FIT = "from paceline_svm import SVC; print(SVC().fit([[0.0], [1], [2], [3]], [0, 0, 1, 1]).predict([[0.5], [2.5]]))"
CHOOSE = """from paceline.reductions import choose_reduction as choose
print(choose("adasum"), choose("bounded_loss"), choose("parameter_servers"))"""
_BUILD = "import sys; from hatchling import build; print(build.build_{kind}(sys.argv[1]))"


def build(folder: Path, package: str = "paceline") -> tuple[Path, Path]:
    """Build a package's sdist from the working tree, and a wheel from what the sdist holds; returns both.

    Args:
        folder: Gets them, and the tree they are built from.
        package: A key of `PACKAGES`.
    """
    tree = folder / "tree"
    tree.mkdir(parents=True)
    for name in BUILT_FROM:
        source = REPOSITORY / PACKAGES[package] / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif source.exists():
            shutil.copy(source, tree / name)
    (tree / "docs").mkdir()
    for name in PAGES:
        shutil.copy(REPOSITORY / name, tree / name)
    sdist = _build("sdist", tree, folder)
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, _build("wheel", unpacked, folder)


def _build(kind: str, tree: Path, folder: Path) -> Path:
    command = [sys.executable, "-W", "ignore", "-c", _BUILD.format(kind=kind), str(folder)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the {kind} could not be built:\n{done.stderr}")
    return folder / done.stdout.splitlines()[-1]


def interpreter(name: str) -> str:
    """Return the path of an interpreter, found by the caller's PATH, which later commands do not have.

    Raises:
        SystemExit: There is none, or it does not run, such as a pyenv shim for a version that is not switched on.
    """
    try:
        asked = subprocess.run(
            [name, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise SystemExit(f"{name}: {error.strerror}. Name interpreters that are installed here.") from error
    if asked.returncode:
        raise SystemExit(
            f"{name} does not run here. Give its path, or with pyenv name the versions in PYENV_VERSION.\n"
            f"{asked.stderr}"
        )
    return asked.stdout.strip()


def twelve_lines() -> str:
    """Return the README's script."""
    (script,) = re.findall(
        r'^```python title="train.py"\n(.*?)^```$',
        (REPOSITORY / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return str(script)


def smoke(python: str, wheel: Path, others: Sequence[Path]) -> None:
    """Install Paceline's wheel into a new environment, use it, add the other packages, and use them.

    Raises:
        SystemExit: A step fails; the message holds its output.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run(folder, python, "-m", "venv", "environment")
        own = folder / "environment" / "bin"
        pip = (str(own / "python"), "-m", "pip")
        _run(folder, *pip, "install", "--quiet", "--disable-pip-version-check", str(wheel))
        _run(folder, *pip, "check")
        (folder / "train.py").write_text(twelve_lines())
        for command, said in (
            ((str(own / "paceline"), "--help"), "run"),
            ((str(own / "paceline"), "demo", "--epochs", "2"), "summation order, as promised"),
            ((str(own / "paceline"), "run", "--nproc-per-node", "2", "train.py"), "loss below 0.01: True"),
            (
                (str(own / "torchrun"), "--standalone", "--nproc-per-node", "2", "train.py"),
                "loss below 0.01: True",
            ),
            ((str(own / "python"), "-c", "import paceline; print(paceline.__file__)"), str(own.parent)),
        ):
            out = _run(folder, *command)
            if said not in " ".join(out.split()):  # a terminal's width breaks lines
                raise SystemExit(f"{' '.join(command)} did not say {said!r} but:\n{out}")
        # What comes with another package says which.
        for missing in ("bench", "emulate", "plan", "serve", "study", "svm"):
            out = _run(folder, str(own / "paceline"), missing, code=2)
            if "pip install ./" not in " ".join(out.split()):
                raise SystemExit(
                    f"`paceline {missing}` without its package does not say what to install:\n{out}"
                )
        _run(folder, *pip, "install", "--quiet", "--disable-pip-version-check", str(wheel), *map(str, others))
        _run(folder, *pip, "check")
        for command, said in (
            ((str(own / "python"), "-m", "paceline", "bench", "workloads"), "resnet50"),
            ((str(own / "paceline"), "emulate", "--help"), "--hosts"),
            ((str(own / "paceline"), "study", "--help"), "large-batch"),
            ((str(own / "paceline"), "plan", "resnet50", "--to", "8"), "devices"),
            ((str(own / "paceline"), "svm", "--help"), "cross-validate"),
            ((str(own / "paceline"), "serve", "--help"), "--listen"),
            ((str(own / "python"), "-c", CHOOSE), "Adasum(hosts=None) BoundedLoss(bound=0.01"),
            ((str(own / "python"), "-c", FIT), "[0 1]"),
        ):
            out = _run(folder, *command)
            if said not in " ".join(out.split()):  # a terminal's width breaks lines
                raise SystemExit(f"{' '.join(command)} did not say {said!r} but:\n{out}")
        versions = _run(
            folder,
            str(own / "python"),
            "-c",
            "import platform, torch; print(platform.python_version(), torch.__version__)",
        )
        print("passed: Python {}, torch {}".format(*versions.split()), flush=True)


def _run(folder: Path, *command: str, code: int = 0) -> str:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name.endswith("_proxy")
    }
    environment = kept | {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != code:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main(pythons: Sequence[str]) -> None:
    """Build once, then install under each interpreter."""
    if not pythons:
        raise SystemExit(
            "name the interpreters: python tests/harness/installed_smoke.py python3.10 python3.13"
        )
    found = [interpreter(name) for name in pythons]
    with tempfile.TemporaryDirectory() as name:
        sdist, wheel = build(Path(name, "paceline"))
        others = [build(Path(name, package), package)[1] for package in PACKAGES if package != "paceline"]
        os.environ.setdefault(
            "PIP_CACHE_DIR", str(Path(name, "cache"))
        )  # what is the same for all is fetched once
        num_files = len(zipfile.ZipFile(wheel).namelist())
        print(f"{sdist.name}, {wheel.name} ({num_files} files)", flush=True)
        for python in found:
            smoke(python, wheel, others)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Builds the device from its C++ against the installed torch, once for its version and these sources.

By the compiler itself rather than by `torch.utils.cpp_extension.load`: that needs ninja, looks for a compiler in
every process, and waits for ever for the lock of a process that was killed.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import types
from pathlib import Path

CACHE = "LATE_CACHE"  # in the environment: the folder to build into
NAME = "late_device"
_SOURCES = Path(__file__).parent / "source"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", "-g0", "-fvisibility=hidden")


class NoCompilerError(RuntimeError):
    """The device is not built, and nothing here can build it."""


def is_built() -> bool:
    """Whether it can be loaded without being built."""
    return _library().exists()


def missing() -> str | None:
    """Why the device cannot be had here, or None."""
    if is_built() or _compiler() is not None:
        return None
    return "no C++ compiler (g++, or what CXX names) to build the emulated device with"


def ensure() -> Path:
    """Build the device if it is not built; returns where it is. Of several processes one builds, the others wait.

    Raises:
        NoCompilerError: there is none, or it failed.
    """
    library = _library()
    if not library.exists():
        if (reason := missing()) is not None:
            raise NoCompilerError(reason)
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _build(library)
    return library


def extension() -> types.ModuleType:
    """Load the device's module into this process, built before if it is not. Raises as `ensure` does."""
    library = ensure()
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _library() -> Path:
    import torch

    state = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for source in sorted(_SOURCES.iterdir()):
        state.update(source.read_bytes())
    cache = os.environ.get(CACHE) or Path.home() / ".cache" / "paceline-tests"
    return Path(cache, f"late-{torch.__version__}-{state.hexdigest()[:16]}.so")


def _build(library: Path) -> None:
    """Compile the sources beside each other, the long ones first, and link them."""
    from torch.utils import cpp_extension

    begun_s = time.monotonic()
    print(f"building the emulated device into {library}: about a minute of a processor", file=sys.stderr)
    compiler = _compiler()
    assert compiler is not None
    folders = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    flags = [*_FLAGS, f"-DTORCH_EXTENSION_NAME={NAME}", *(f"-isystem{folder}" for folder in folders)]
    units = sorted(_SOURCES.glob("*.cpp"), key=lambda unit: -unit.stat().st_size)
    with tempfile.TemporaryDirectory() as folder:

        def compiled(unit: Path) -> str:
            _run([compiler, *flags, "-c", str(unit), "-o", f"{folder}/{unit.stem}.o"])
            return f"{folder}/{unit.stem}.o"

        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compiled, units))
        paths = [f"-L{path}" for path in cpp_extension.library_paths()]
        linked = library.with_suffix(f".{os.getpid()}")
        libraries = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
        _run([compiler, "-shared", "-s", *objects, *paths, *libraries, "-o", str(linked)])
    linked.rename(library)
    print(f"built the emulated device in {time.monotonic() - begun_s:.0f} s", file=sys.stderr)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise NoCompilerError(f"{' '.join(command)} failed:\n{done.stdout[-6000:]}")


if __name__ == "__main__":
    ensure()

"""Makes the byte code that a fresh clone lacks, on the core that idles while the server of `warm.py` imports.

pip leaves it to the first import (`--no-compile`), because no program imports all of torch. In a fresh clone that
first import is the server's, which takes 14 s on one core. Each worker would also rewrite the assertions of all tests,
for 3 s each. The rest of that time on the other core goes to numba, which compiles the loop of datagrams in 11 s.
Otherwise several workers would wait for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

# The modules that the server imports last, so that both meet in the middle. Then the modules that every rank imports.
BESIDE_THE_SERVER = (
    "sklearn.utils.estimator_checks",
    "matplotlib.figure",
    "numba",
    "sympy",
    "networkx",
    "torch._dynamo",
    "pytorch_lightning",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer",
)
_CODE = """\
import contextlib, importlib, sys
for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):
        module = importlib.import_module(name)
        if name == "numba":
            module.njit(lambda x: x + 1)(1)  # as the server does: this imports what compiles
with contextlib.suppress(ImportError):
    from paceline_lossy.datagrams.datagram_loop import compile_all
    compile_all()
"""


def import_beside_the_server() -> None:
    """Start a process that imports, in a clone whose tests have not run before. No process waits for it."""
    found = importlib.util.find_spec("matplotlib")
    if found is None or found.origin is None or Path(importlib.util.cache_from_source(found.origin)).exists():
        return
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _CODE, *BESIDE_THE_SERVER],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    process.returncode = 0  # or Python complains that it goes on: it has its own end


def rewrite_tests(config: pytest.Config) -> None:
    """Write the byte code of each test's file as pytest rewrites it; do nothing if pytest's internals have changed."""
    with contextlib.suppress(Exception):  # its own names, which may move
        from _pytest.assertion import rewrite

        state = config.stash[rewrite.assertstate_key]
        for path in sorted(config.rootpath.glob("**/tests/*/test_*.py")):
            folder = rewrite.get_cache_dir(path)
            written = folder / f"{path.stem}{rewrite.PYC_TAIL}"
            folder.mkdir(exist_ok=True)
            if rewrite._read_pyc(path, written) is None:
                source_stat, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(state, code, source_stat, written)

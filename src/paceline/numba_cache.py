"""Compiled code: kept on disk until a file that is compiled in changes, compiled by one process of a host at a time.

numba itself looks at the file of the compiled function only, not at those of the functions and constants that it uses.
With nothing on disk yet, every process of a host would compile the same functions.

Rules
1. A process that does not find a function for some types on disk takes a lock beside it, and looks again before it
   compiles: a process that waited loads what another compiled. What is on disk is loaded without a lock.
2. Locks are the kernel's, of a process (POSIX record locks): a process that has ended holds none.
3. Compiling a function may wait for the lock of one that it calls. Calls form no cycle, so there is no deadlock.
4. Within a process numba's own lock comes first, so only one thread waits or compiles.
5. Storing takes one more lock, of the function. numba picks the next free file by an index. Without the lock, two
   processes would store for different types in one file.
6. Garbage is not collected while numba compiles. It makes some million objects that last until the function is done,
   and each collection visits all that torch has imported. That was a fifth of the compiler's time.
7. A process that is stopped while it compiles is not waited for beyond `_AT_MOST_S`, once.

Functions that compiled code calls (`inner`) are linked into their callers as numba lowered them, and optimised there.
Otherwise numba would optimise and translate each of them by itself too, and again within each caller. Three rules hold:

8. Nothing of these functions is kept on disk: their callers' code has it.
9. They raise no exceptions with arguments, for which numba keeps an environment that no caller would set here.
10. With a numba that was not tried (0.61 to 0.68 were), functions are compiled as numba does it.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import contextlib
import fcntl
import gc
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import numba

_AT_MOST_S = 120.0  # the largest function takes some 12 s of a core; a host may have more ranks than cores
_LOOKS_EVERY_S = 0.02
WAITING = "paceline:waiting"  # the event, among numba's, that this process waits for one that compiles
_INDEX_BYTE = 1 << 32  # beyond every signature's

Stamp = tuple[tuple[str, int, int], ...]


def stamp_of(files: Iterable[Path]) -> Stamp:
    """Return a value that changes when one of these files does."""
    return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(set(files)))


def keep(function: Any, stamp: Stamp) -> None:
    """Let the code of a function made by `numba.njit(cache=True)` be stored for this stamp, once a host. Local."""
    with contextlib.suppress(AttributeError):  # another numba keeps it elsewhere: then as numba does it
        function._cache._cache_file._source_stamp = stamp
        _CompileLock(function)


class _CompileLock:
    """A lock on the stored code of a function made by numba. It is held from a cache miss to the end of compiling."""

    _waits = True  # until a wait was in vain

    def __init__(self, function: Any) -> None:
        from numba.core.compiler_lock import global_compiler_lock  # noqa: PLC0415  numba takes a while

        cache, self._threads = function._cache, global_compiler_lock
        self._make_folder, self._path = (
            cache._impl.locator.ensure_cache_path,
            Path(cache._cache_file._index_path),
        )
        self._lock: IO[bytes] | None = None
        self._load, self._store, self._compile = cache.load_overload, cache.save_overload, function.compile
        cache.load_overload, cache.save_overload, function.compile = self.load, self.store, self.compile

    def compile(self, signature: Any) -> Any:
        """Load the code or compile it. Then free the lock, also after an error."""
        with self._threads:
            collects = gc.isenabled()
            gc.disable()  # rule 6
            try:
                return self._compile(signature)
            finally:
                if collects:
                    gc.enable()
                self._release()

    def load(self, signature: Any, target: Any) -> Any:
        """Return the code on disk, perhaps after waiting for another process to compile it. None: compile it now."""
        found = self._load(signature, target)
        if found is None and self._acquire(signature):
            found = self._load(signature, target)
        return found

    def store(self, signature: Any, data: Any) -> None:
        """Store the code on disk, unless another process holds the index for too long."""
        if self._lock is None or self._wait_for(self._lock, _INDEX_BYTE):
            self._store(signature, data)

    def _acquire(self, signature: Any) -> bool:
        """Wait for a process that compiles this function for these types; False if no lock is possible."""
        if self._lock is not None:  # a function that calls itself
            return False
        try:
            self._make_folder()
            self._lock = self._path.with_suffix(".lock").open("ab")
        except OSError:  # nothing can be stored here
            return False
        byte = zlib.crc32(str(signature).encode())  # of an empty file, for each signature
        if self._wait_for(self._lock, byte, only_once=True):
            return True
        from numba.core import event  # noqa: PLC0415  as above

        with event.trigger_event(WAITING):
            return self._wait_for(self._lock, byte)

    @staticmethod
    def _wait_for(lock: IO[bytes], byte: int, *, only_once: bool = False) -> bool:
        """Try to take the lock, once or until it is free. Return whether this process holds it."""
        until_s = time.monotonic() + _AT_MOST_S
        while _CompileLock._waits:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):  # another process has it
                if only_once:
                    return False
                if time.monotonic() > until_s:
                    _CompileLock._waits = False
                time.sleep(_LOOKS_EVERY_S)
            except OSError:  # no locks on this file system, so nothing to wait for
                return True
            else:
                return True
        return False

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()  # which frees it
            self._lock = None


# Closures, contexts, literals of lists, array expressions, errors with computed arguments.
_UNUSED = {
    "WithLifting",
    "InlineClosureLikes",
    "RewriteDynamicRaises",
    "MakeFunctionToJitFunction",
    "InlineInlinables",
    "FindLiterallyCalls",
    "LiteralUnroll",
    "LiteralPropagationSubPipelinePass",
    "NopythonRewrites",
    "NoPythonSupportedFeatureValidation",
    "DumpParforDiagnostics",
}

_LEAN: dict[str, Any] = {}
_LINKED: dict[str, Any] = {}

if (0, 61) <= numba.version_info.short <= (0, 68):
    from numba import _dynfunc
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import CompilerBase, DefaultPassBuilder
    from numba.core.compiler_machinery import LoweringPass, register_pass
    from numba.core.typed_passes import NativeLowering

    class _AsLowered(JITCodeLibrary):  # type: ignore[misc]
        """A function as it was lowered: neither optimised nor translated, and what it calls is not linked in."""

        def _optimize_functions(self, ll_module: Any) -> None:
            ll_module.data_layout = self._codegen._data_layout

        def finalize(self) -> None:
            self._finalized = True

        def with_all_it_calls(self) -> list[Any]:
            return [self, *self._linking_libraries]

    @register_pass(mutates_CFG=False, analysis_only=True)
    class _KnownToCallers(LoweringPass):  # type: ignore[misc]
        """A pass of numba that registers a lowered function, so that compiled code can call it. Python cannot."""

        _name = "known_to_callers"

        def __init__(self) -> None:
            LoweringPass.__init__(self)

        def run_pass(self, state: Any) -> bool:
            """Set the state's result, as the end of numba's own lowering does."""
            lowered, code = state["cr"], state.library
            name = lowered.fndesc.qualname.split(".")[-1]
            entry = _dynfunc.make_function(lowered.fndesc.lookup_module(), name, "", 0, lowered.env, (code,))
            state.targetctx.insert_user_function(entry, lowered.fndesc, code.with_all_it_calls())
            state["cr"] = lowered._replace(cfunc=entry)
            return False

    class _Lean(CompilerBase):  # type: ignore[misc]
        """The pipeline of numba without the passes in `_UNUSED`, which loops over arrays do not need."""

        def define_pipelines(self) -> list[Any]:
            """Return the pipeline. It does a sixth less work than numba's."""
            passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
            passes.passes = [found for found in passes.passes if found[0].__name__ not in _UNUSED]
            passes.finalize()
            return [passes]

    class _Linked(_Lean):
        """A pipeline without optimisation and translation."""

        def define_pipelines(self) -> list[Any]:
            """Return the pipeline of `_Lean` that also makes the function known to its callers."""
            state = self.state
            state.library = _AsLowered(state.targetctx.codegen(), state.func_id.func_qualname)
            state.flags.no_compile = True
            (passes,) = super().define_pipelines()
            passes.add_pass_after(_KnownToCallers, NativeLowering)
            passes.finalize()
            return [passes]

    _LEAN, _LINKED = {"pipeline_class": _Lean}, {"pipeline_class": _Linked}


def inner(function: Callable[..., Any], options: dict[str, Any], is_hot: bool = False) -> Any:
    """Compile a function for compiled code. `options` are those of `numba.njit`, without `cache`.

    `is_hot`: optimise it by itself as well, as numba does: a loop over lanes is then a tenth to a fifth faster.
    """
    passes = _LEAN if is_hot else _LINKED
    only = {**options, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, **passes}
    return numba.njit(**only)(function)


def entry(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Compile a function for Python and for compiled code, and keep it on disk. Callers link it as numba does."""
    return numba.njit(**{**options, "no_cfunc_wrapper": True, "cache": True, **_LEAN})(function)

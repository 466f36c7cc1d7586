"""Functions that compiled code calls: linked into their callers as numba lowered them, and optimised there alone.

numba optimises each function and translates it for the processor by itself, though nobody calls most of them by
themselves, and does so again within each function that calls them, and within those that call these.

Rules
1. Nothing of these functions is kept on disk: their callers' code has it.
2. They raise no exceptions with arguments, for which numba keeps an environment that nobody would set here.
3. With a numba that was not tried (0.61 to 0.68 were), functions are compiled as numba does it.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

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
        """What a function was lowered to: neither optimised nor translated, and what it calls is not linked in."""

        def _optimize_functions(self, ll_module: Any) -> None:
            ll_module.data_layout = self._codegen._data_layout

        def finalize(self) -> None:
            self._finalized = True

        def with_all_it_calls(self) -> list[Any]:
            return [self, *self._linking_libraries]

    @register_pass(mutates_CFG=False, analysis_only=True)
    class _KnownToCallers(LoweringPass):  # type: ignore[misc]
        """Lets others call what was lowered: numba knows it by a function of Python, which here has no code."""

        _name = "known_to_callers"

        def __init__(self) -> None:
            LoweringPass.__init__(self)

        def run_pass(self, state: Any) -> bool:
            """As numba's own lowering does in the end; the state's result is changed."""
            lowered, code = state["cr"], state.library
            name = lowered.fndesc.qualname.split(".")[-1]
            entry = _dynfunc.make_function(lowered.fndesc.lookup_module(), name, "", 0, lowered.env, (code,))
            state.targetctx.insert_user_function(entry, lowered.fndesc, code.with_all_it_calls())
            state["cr"] = lowered._replace(cfunc=entry)
            return False

    class _Lean(CompilerBase):  # type: ignore[misc]
        """numba's passes, but for those that look for what loops over arrays do not have."""

        def define_pipelines(self) -> list[Any]:
            """One, with a sixth less work."""
            passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
            passes.passes = [found for found in passes.passes if found[0].__name__ not in _UNUSED]
            passes.finalize()
            return [passes]

    class _Linked(_Lean):
        """Without optimisation and translation."""

        def define_pipelines(self) -> list[Any]:
            """The same, then known to callers."""
            state = self.state
            state.library = _AsLowered(state.targetctx.codegen(), state.func_id.func_qualname)
            state.flags.no_compile = True
            (passes,) = super().define_pipelines()
            passes.add_pass_after(_KnownToCallers, NativeLowering)
            passes.finalize()
            return [passes]

    _LEAN, _LINKED = {"pipeline_class": _Lean}, {"pipeline_class": _Linked}


def inner(function: Callable[..., Any], options: dict[str, Any], is_hot: bool = False) -> Any:
    """A function for compiled code; `options` of `numba.njit`, without `cache`.

    `is_hot`: optimise it by itself as well, as numba does: a loop over lanes is then a tenth to a fifth faster.
    """
    passes = _LEAN if is_hot else _LINKED
    only = {**options, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, **passes}
    return numba.njit(**only)(function)


def entry(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """A function for Python, and for compiled code, which then links it as numba does; kept on disk."""
    return numba.njit(**{**options, "no_cfunc_wrapper": True, "cache": True, **_LEAN})(function)

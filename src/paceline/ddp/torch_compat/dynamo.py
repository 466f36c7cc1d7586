"""Keeping TorchDynamo out of the wrapper: it compiles the wrapped module, as it does under torch's own class."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, TypeVar

import torch

from paceline.errors import ConfigurationError

Function = TypeVar("Function", bound=Callable[..., Any])

_eval_frame = torch._C._dynamo.eval_frame
_NO_FUNCTIONS = {str, int, float, bool, tuple, dict, type(None), MemberDescriptorType, GetSetDescriptorType}
_Strategy, _Action = _eval_frame._FrameExecStrategy, _eval_frame._FrameAction
_SKIP_ALL = _Strategy(_Action.SKIP, _Action.SKIP)
_SKIP_ITSELF = _Strategy(_Action.SKIP, _Action.DEFAULT)


def skip_package(prefix: str) -> None:
    """Let dynamo run the imported modules of a package, and all that they call, without compiling them.

    Autograd calls them within a compiled step, too. Dynamo would then compile their collectives, and fail.
    """
    for name, module in list(sys.modules.items()):
        if name == prefix or name.startswith(f"{prefix}."):
            for value in vars(module).values():
                _skip(value, name)


def _skip(value: object, module_name: str) -> None:
    if getattr(value, "__module__", None) != module_name:
        return
    if inspect.isclass(value):
        for member in vars(value).values():
            kind = type(member)
            if kind is property:
                _skip_function(member.fget)
            elif kind is classmethod or kind is staticmethod:
                _skip_function(member.__func__)
            elif kind not in _NO_FUNCTIONS:
                _skip_function(member)
    else:
        _skip_function(value)


def run_uncompiled_if_compiling(function: Callable[[], None]) -> None:
    """Call the function uncompiled if this thread runs under `torch.compile`; otherwise do nothing."""
    if not callable(_eval_frame.get_eval_frame_callback()):
        return
    before = _eval_frame.set_eval_frame(None)
    try:
        function()
    finally:
        _eval_frame.set_eval_frame(before)


def refuse_compiled_autograd() -> None:
    """Raise ConfigurationError if compiled autograd runs this backward."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region:
        raise ConfigurationError(
            "compiled autograd runs this backward. It is a function of its own, in which autograd's engine does not "
            "say which gradients are finished, so they would not be averaged. Set "
            "torch._dynamo.config.compiled_autograd = False; forward may still be compiled."
        )


def may_compile(function: Function) -> Function:
    """Mark a function of a skipped package as one that dynamo may look into."""
    function._may_compile = True  # type: ignore[attr-defined]
    return function


def runs_module(function: Function) -> Function:
    """Mark a function of a skipped package that runs the wrapped module, which dynamo may compile."""
    function._runs_module = True  # type: ignore[attr-defined]
    return function


def _skip_function(function: object) -> None:
    if not callable(function) or getattr(function, "_may_compile", False):
        return
    wraps = hasattr(function, "__wrapped__")
    code = getattr(inspect.unwrap(function) if wraps else function, "__code__", None)
    if code is not None:
        _skip_code(code, _SKIP_ITSELF if getattr(function, "_runs_module", False) else _SKIP_ALL)


def _skip_code(code: CodeType, strategy: Any) -> None:
    _eval_frame.set_code_exec_strategy(code, strategy)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _skip_code(constant, strategy)

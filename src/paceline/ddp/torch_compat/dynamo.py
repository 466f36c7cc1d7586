"""Keeping TorchDynamo out of the wrapper: it compiles the wrapped module, as it does under torch's own class."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_eval_frame = torch._C._dynamo.eval_frame
_NO_FUNCTIONS = {str, int, float, bool, tuple, dict, type(None), MemberDescriptorType, GetSetDescriptorType}
_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)


def skip_package(prefix: str) -> None:
    """Have the imported modules of a package run as they are; what they call may still be compiled."""
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
    """Call it as it is, with all that it calls, if this thread runs under `torch.compile`; else do nothing."""
    if not callable(_eval_frame.get_eval_frame_callback()):
        return
    before = _eval_frame.set_eval_frame(None)
    try:
        function()
    finally:
        _eval_frame.set_eval_frame(before)


def may_compile(function: Function) -> Function:
    """Mark a function of a skipped package as one that dynamo may look into."""
    function._may_compile = True  # type: ignore[attr-defined]
    return function


def _skip_function(function: object) -> None:
    if not callable(function) or getattr(function, "_may_compile", False):
        return
    wraps = hasattr(function, "__wrapped__")
    code = getattr(inspect.unwrap(function) if wraps else function, "__code__", None)
    if code is not None:
        _skip_code(code)


def _skip_code(code: CodeType) -> None:
    _eval_frame.set_code_exec_strategy(code, _SKIP)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _skip_code(constant)

"""Counts the collectives of scripts that use torch alone, in a file that the launcher reads (`observe/progress.py`).

Two things are replaced as soon as torch's modules are imported, before other code holds references. One is
torch.distributed's collectives, each with a count around it. The other is the forward of torch's
DistributedDataParallel: after it the end of the rank's own backward is counted, where it waits for the others.

Limits: `async_op=True` is counted as it is launched, the wait for it is not seen. Messages between two ranks are not
counted. In a compiled region nothing is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from paceline.late_imports import when_imported
from paceline.observe import progress

_COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
_counts: dict[tuple[str, int, int], progress.Counter | None] = {}


def count_collectives() -> None:
    """Count collectives from now on, also of torch's modules that are imported later. Imports no torch."""
    when_imported("torch.distributed.distributed_c10d", _count_functions)
    when_imported("torch.nn.parallel.distributed", _count_backwards)


def _count_functions(c10d: Any) -> None:
    for name in _COLLECTIVES:
        if hasattr(c10d, name):
            _replace(c10d, name, _counted(c10d, getattr(c10d, name)))
    _replace(c10d, "init_process_group", _counted_start(c10d.init_process_group))


def _replace(c10d: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(c10d, name, function)
    package = sys.modules.get("torch.distributed")
    if package is not None and hasattr(package, name):  # it was imported before
        setattr(package, name, function)


def _counted(c10d: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    words = f"in torch.distributed.{function.__name__}"

    @functools.wraps(function)
    def counting(*args: Any, **named: Any) -> Any:
        if c10d.torch.compiler.is_compiling() or not c10d.is_initialized():
            return function(*args, **named)
        group = named.get("group") or next((x for x in args if isinstance(x, c10d.ProcessGroup)), None)
        last = args[-1] if args else None  # may be a tensor, which is compared by element
        is_async = bool(named.get("async_op", last is True))
        with _within(_count_of(c10d, group), words, waits=not is_async):
            return function(*args, **named)

    return counting


def _counted_start(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counting(*args: Any, **named: Any) -> Any:
        num_ranks = os.environ.get("WORLD_SIZE", "")
        all_ranks = range(int(num_ranks)) if num_ranks.isdecimal() else ()
        count = progress.counter("start", all_ranks) if all_ranks else None
        with _within(count, f"in torch.distributed.{function.__name__}"):
            return function(*args, **named)

    return counting


def _count_backwards(module: Any) -> None:
    """Count what torch's DistributedDataParallel waits for: its constructor, its buffers, its gradients."""
    wrapper = module.DistributedDataParallel
    construct, forward, sync_buffers = wrapper.__init__, wrapper.forward, wrapper._sync_buffers

    @functools.wraps(construct)
    def constructing(self: Any, *args: Any, **named: Any) -> None:
        group = named.get("process_group")
        with _within(_count_of(module.dist.distributed_c10d, group), "wrapping the model"):
            construct(self, *args, **named)

    @functools.wraps(sync_buffers)
    def synchronizing(self: Any) -> None:
        with _within(_count_of_model(module, self), "waiting for rank 0's buffers"):
            sync_buffers(self)

    @functools.wraps(forward)
    def watching(self: Any, *inputs: Any, **named: Any) -> Any:
        output = forward(self, *inputs, **named)
        if not module.torch.compiler.is_compiling() and module.torch.is_grad_enabled():
            _watch_backward(module, self, output)
        return output

    wrapper.__init__, wrapper._sync_buffers, wrapper.forward = constructing, synchronizing, watching


def _watch_backward(module: Any, model: Any, output: Any) -> None:
    """Count the wait that ends this forward's backward, if it synchronizes."""
    count = _count_of_model(module, model) if model.require_backward_grad_sync else None
    if count is None or model._use_python_reducer:  # compiled autograd cannot compile a hook of ours
        return
    engine = module.torch.autograd.Variable._execution_engine
    has_begun = False

    def begin(_: Any) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            engine.queue_callback(work_has_ended)  # in front of torch's own, which waits

    def work_has_ended() -> None:
        model._paceline_backwards = step = getattr(model, "_paceline_backwards", 0) + 1
        count.enter("waiting for the other ranks' gradients", step)
        engine.queue_callback(count.leave)  # behind torch's

    for tensor in module._find_tensors(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(begin)


@contextlib.contextmanager
def _within(count: progress.Counter | None, what: str, *, waits: bool = True) -> Iterator[None]:
    if count is None:
        yield
        return
    count.enter(what, waits=waits)
    try:
        yield
    finally:
        if waits:
            count.leave()


def _count_of_model(module: Any, model: Any) -> progress.Counter | None:
    return _count_of(module.dist.distributed_c10d, model.process_group)


def _count_of(c10d: Any, group: Any) -> progress.Counter | None:
    """Return the counter of a group, the default one if None; None if the group is unknown."""
    with contextlib.suppress(ValueError, RuntimeError, KeyError, AttributeError, TypeError):
        group = group or c10d._get_default_group()
        known = group.group_name, group.size(), progress.num_begun()
        if known not in _counts:
            _counts[known] = progress.counter(known[0], c10d.get_process_group_ranks(group))
        return _counts[known]
    return None

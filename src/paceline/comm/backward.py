"""One backward of autograd: whether it is under way, has ended, or has raised.

Rules
1. The autograd engine owns the object of a backward under way and drops it when it raises. Other code holds a weak
   reference. An object that is gone and was never ended has raised.
2. A nested backward (a reentrant checkpoint's) is part of the outer one, and ends with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


@dataclass(eq=False)
class Backward:
    """One backward under way."""

    synchronizes: bool  # whether it reduces gradients
    on_end: Callable[[Backward], None]  # called with this object when autograd has nothing left to do
    by_autograd: bool = True  # False: nothing is differentiated; gradients that are there are reduced
    ends_with_inner: bool = False  # of nested backwards, it is one of the inner ones, not the outermost
    # a nested backward has ended, and the engine cannot yet be told to call at the outer one's end
    waits_for_outer: bool = False
    started_s: float = field(default_factory=time.perf_counter)  # when it reached the module

    def end(self) -> None:
        self.on_end(self)

    def waits_for_outer_end(self) -> bool:
        """Return whether a nested backward has ended (a checkpoint's, say); `on_end` then waits for the outer."""
        outer = torch._C._current_autograd_node() if self.by_autograd else None
        return outer is not None and not self.ends_with_inner and self._wait_for_outer(outer)

    def _wait_for_outer(self, outer: Any) -> bool:
        """Ask to be called again once the engine has left this node: it takes callbacks for the backward it runs."""
        inner_task = torch._C._current_graph_task_id()
        hooks: list[RemovableHandle] = []

        def on_next_node(_: object) -> None:
            for hook in hooks:
                hook.remove()
            if torch._C._current_graph_task_id() >= inner_task:
                return  # another backward, after an exception in that one
            self.waits_for_outer = False
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

        hooks += [node.register_prehook(on_next_node) for node, _ in outer.next_functions if node is not None]
        self.waits_for_outer = bool(hooks)
        return self.waits_for_outer

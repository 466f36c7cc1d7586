"""How often a backward will touch each parameter: what tells a bucket that it is full."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.nn import Parameter

from paceline.ddp.bucket import Bucket
from paceline.ddp.layout import ManagedParameters

NEVER = sys.maxsize


class Expectations:
    """Touches that a backward is expected to make, by parameter.

    Once each, unless the graph says otherwise: a static graph is counted in its first backward; where unused parameters
    are looked for (asked for, or once one was found), the autograd engine says which ones its graph reaches.

    Args:
        managed: The parameters.
        find_unused: Ask the engine from the first backward on.
        static_graph: Count in the first synchronized backward, then rely on that.
    """

    def __init__(self, managed: ManagedParameters, find_unused: bool, static_graph: bool) -> None:
        self._static_graph = static_graph
        self._counts: list[int] | None = None
        self._predicted: list[bool] = []  # of this backward, where `predicts`
        self.predicts = find_unused
        self.defers = False  # gradients came late once: no bucket leaves before backward has ended
        # The engine can only be asked about nodes, and forgets a node that nobody keeps.
        self._nodes = [_node_of(parameter) for parameter in managed.parameters]

    def expect_static_graph(self) -> None:
        """As the argument, before the first backward."""
        self._static_graph = True

    @property
    def counted(self) -> bool:
        """Whether touches were counted, so that a parameter may be touched more than once."""
        return self._counts is not None

    def is_backward(self) -> bool:
        """Whether this run of the engine will accumulate into a managed parameter; `autograd.grad` does not."""
        will_run = torch._C._will_engine_execute_node
        try:
            return any(will_run(node) for node in self._nodes)
        except RuntimeError:  # the engine's answer for a leaf that autograd.grad was asked for
            return False

    def begin(self) -> None:
        """A synchronized backward begins: where it matters, ask the engine which parameters its graph reaches."""
        if self.predicts and not (self.counted or self.defers or self._static_graph):
            self._predicted = self._predict()

    def touches(self, members: Sequence[int]) -> int:
        """How many touches make a bucket of these parameters full; NEVER: do not launch before backward has ended."""
        if self._counts is not None:
            return sum(self._counts[index] for index in members)
        if self.defers or self._static_graph:
            return NEVER
        if self.predicts:
            return sum(map(self._predicted.__getitem__, members))
        return len(members)

    def _predict(self) -> list[bool]:
        with record_function("torch.distributed.ddp.reducer::search_unused_parameters"):
            will_run = torch._C._will_engine_execute_node
            try:
                return list(map(will_run, self._nodes))
            except (
                RuntimeError
            ):  # no backward under way: a shadow of another rank's, or an explicit synchronization
                return [False] * len(self._nodes)

    def learn(self, buckets: list[Bucket]) -> None:
        """Count the touches of the backward that has just ended, if the graph is static and this was the first."""
        if not self._static_graph or self._counts is not None:
            return
        counts = [0] * len(self._nodes)
        for bucket in buckets:
            for slot in bucket.touched_slots():
                counts[bucket.members[slot]] += 1
        self._counts = counts

    def surprise(self) -> None:
        """Gradients came after their bucket had left: from now on be patient."""
        self.defers = True
        self._counts = None
        self._static_graph = False


def _node_of(parameter: Parameter) -> Any:
    """The graph's node that accumulates into the parameter; also if it is frozen just now."""
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    parameter.requires_grad_(requires_grad)
    return node

"""Counts the gradients that autograd has finished, to find full buckets; cuts buckets in the order of gradients.

Rules
1. A parameter is expected once a backward, unless the graph says otherwise. A static graph is counted in its first
   backward. Where unused parameters are looked for (asked for, or once one was found), the autograd engine says which
   ones its graph reaches.
2. A call into Python for every small gradient costs more than reducing it. So the hook of a small gradient is
   `list.append` itself ("quick") wherever the bucket waits for all its gradients. Only the hook of the one expected
   last looks whether the bucket is full. If gradients arrive out of order, or before a backward was noticed, a function
   counts each small one ("careful") for the rest of this backward. Which way it is only decides how early a bucket
   leaves, never what is reduced.
3. The order in which rank 0's gradients became ready in the first synchronized backward becomes the order of all
   ranks' buckets.
4. A device accumulates each gradient on the stream on which its parameter was first used. That is noted with the order,
   and holds as long as the tracker keeps the graph's nodes. The stream that makes a message waits for the others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from paceline.comm.collectives import allocate_zeros, broadcast
from paceline.comm.device import ProducerStreams, is_accelerator
from paceline.comm.peers import Peers
from paceline.ddp.bucket import Bucket
from paceline.ddp.layout import GradientMemory, ManagedParameters
from paceline.ddp.membership import Groups
from paceline.ddp.setting import Setting
from paceline.ddp.verdict import Verdict

NEVER = sys.maxsize
"""Expected touches of a bucket that must not leave before backward has ended."""


class ReadyTracker:
    """The hooks on a module's parameters."""

    def __init__(
        self,
        managed: ManagedParameters,
        # Whether the engine is asked which ones its graph reaches, or touches of a static graph are counted.
        setting: Setting,
        # Called with a large gradient's bucket, slot and parameter as soon as autograd has finished it.
        take: Callable[[Bucket, int, Any], None],
        # Called with a bucket of which all expected gradients are finished; of an idle one, at the first gradient.
        on_full: Callable[[Bucket], None],
    ) -> None:
        looks = setting.find_unused_parameters or setting.skips_unused
        self.pending = PendingCounts(managed, looks, setting.static_graph)
        self._take = take
        self._on_full = on_full
        self._listeners: list[_Listener] = []
        self._hooks: list[RemovableHandle] = []
        self._parameters = managed.parameters
        self._recorders: list[RemovableHandle] = []  # of the order, until it is agreed on
        self.order: list[int] = []  # parameter indices as backwards finished them; may repeat
        on_device = any(is_accelerator(each.device) for each in managed.parameters)
        self.origins = ProducerStreams() if on_device else None  # of gradients (rule 4)

    # ---- hooks

    def listen_to(self, buckets: Sequence[Bucket]) -> None:
        """Count for these buckets from now on. Local; between backwards."""
        for hook in self._hooks:
            hook.remove()
        self._listeners = [_Listener(bucket, self._take, self._on_full) for bucket in buckets]
        self._hooks = [
            _hook_gradient(parameter, listener.hook_of(slot))
            for listener in self._listeners
            for slot, parameter in enumerate(listener.bucket.parameters)
        ]

    def record_order(self) -> None:
        """Note the order in which gradients become ready, until `agree_on_order`."""
        self._recorders = [
            _hook_gradient(p, self._recorder(index)) for index, p in enumerate(self._parameters)
        ]

    def _recorder(self, index: int) -> Callable[[Tensor], None]:
        def record(parameter: Tensor) -> None:
            self.order.append(index)
            if self.origins is not None:
                self.origins.note(parameter.device)

        return record

    def stop(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in [*self._hooks, *self._recorders]:
            hook.remove()
        self._hooks, self._recorders = [], []

    def has_foreign_hooks(self, parameter: Any) -> bool:
        """Return whether the parameter has hooks besides ours, which want to find its `.grad`."""
        return len(parameter._post_accumulate_grad_hooks) > 1 + bool(self._recorders)

    # ---- a backward

    def arm(self, synchronizes: bool, started_s: float, not_expected: frozenset[int]) -> None:
        """Tell each bucket how many touches make it full, as a backward begins."""
        for listener in self._listeners:
            bucket = listener.bucket
            first_touches = list(bucket.finished)  # of the hook that woke us, when no output was watched
            bucket.arm(self.pending.touches(bucket.members, not_expected) if synchronizes else NEVER)
            bucket.finished.extend(first_touches)
            if bucket.num_expected == 0:
                bucket.mark_ready(started_s)
            if bucket.num_expected in (NEVER, len(bucket.members)) and not self._recorders:
                listener.listen_quickly()

    def is_full(self, bucket: Bucket) -> bool:
        """Return whether all expected gradients are finished; False if one parameter came twice, another not yet."""
        is_full = len(bucket.finished) == bucket.num_expected
        return is_full and (self.pending.counted or bucket.is_complete())

    def expect_nothing(self) -> None:
        """Let no bucket become full, whatever autograd may still finish."""
        for listener in self._listeners:
            listener.bucket.expect(NEVER)

    def rest(self) -> None:
        """Let the next touch wake the reducer, because no backward is under way."""
        for listener in self._listeners:
            listener.bucket.disarm()
            listener.listen_carefully()

    # ---- the order

    def agree_on_order(
        self, otherwise: Sequence[int], size: int, device: torch.device, group: ProcessGroup, peers: Peers
    ) -> tuple[list[int], int]:
        """Return rank 0's order, the rest as `otherwise`, and its `size`; stop recording. Collective; blocks."""
        for recorder in self._recorders:
            recorder.remove()
        self._recorders = []
        order = torch.tensor([*completed(self.order, otherwise), size], device=device)
        if group.size() > 1:
            peers.wait(broadcast(order, group, source=0), "agreeing on the order of buckets")
        *agreed, first_size = order.tolist()
        return agreed, first_size


def completed(observed: Sequence[int], otherwise: Sequence[int]) -> list[int]:
    """Return the observed order, each once. An index that was not observed follows its neighbour in `otherwise`."""
    order = list(dict.fromkeys(observed))
    seen = set(order)
    before: int | None = None
    for index in otherwise:
        if index not in seen:
            order.insert(0 if before is None else order.index(before) + 1, index)
        before = index
    return order


class _Listener:
    """The hooks of one bucket's parameters."""

    def __init__(
        self, bucket: Bucket, take: Callable[[Bucket, int, Any], None], on_full: Callable[[Bucket], None]
    ) -> None:
        self.bucket = bucket
        self._take = take
        self._on_full = on_full
        self._touch = bucket.finished.append
        # One object, whose function is exchanged, stands behind the hooks of all small parameters.
        self._careful = self._carefully()  # kept, because it may be running when it is exchanged
        self.on_small: Any = functools.partial(self._careful)  # the hook of every small gradient but the last

    def hook_of(self, slot: int) -> Callable[[Tensor], None]:
        if slot < self.bucket.num_large:
            return self._large(slot)
        return self._on_last_small if slot == len(self.bucket.members) - 1 else self.on_small

    def _large(self, slot: int) -> Callable[[Tensor], None]:
        bucket, finished, touch = self.bucket, self.bucket.finished, self._touch
        take, on_full = self._take, self._on_full

        def on_large_gradient(parameter: Any) -> None:
            touch(parameter)
            take(bucket, slot, parameter)
            if len(finished) == bucket.num_expected:
                on_full(bucket)

        return on_large_gradient

    def _carefully(self) -> Callable[[Tensor], None]:
        bucket, finished, touch, on_full = self.bucket, self.bucket.finished, self._touch, self._on_full

        def on_gradient(parameter: Tensor) -> None:
            touch(parameter)
            if len(finished) == bucket.num_expected:
                on_full(bucket)

        return on_gradient

    def _on_last_small(self, parameter: Tensor) -> None:
        """Handle the small gradient that is expected last. Autograd calls this hook."""
        self._touch(parameter)
        if len(self.bucket.finished) == self.bucket.num_expected:
            self._on_full(self.bucket)
        else:
            self.listen_carefully()

    def listen_carefully(self) -> None:
        self.on_small.__setstate__((self._careful, (), {}, None))

    def listen_quickly(self) -> None:
        self.on_small.__setstate__((self._touch, (), {}, None))


class PendingCounts:
    """The touches that a backward is expected to make, by parameter (rule 1).

    With `find_unused` the engine is asked from the first backward on; for a static graph the first one is counted.
    """

    def __init__(self, managed: ManagedParameters, find_unused: bool, static_graph: bool) -> None:
        self.predicts = find_unused  # whether the engine is asked which parameters its graph reaches
        self.waits_for_end = False  # gradients came late once: no bucket leaves before backward has ended
        self._static_graph = static_graph
        self._counts: list[int] | None = None
        self._predicted: list[bool] = []  # of this backward, where `predicts`
        # The engine can only be asked about nodes, and forgets a node without references.
        self._nodes = [_node_of(parameter) for parameter in managed.parameters]

    def look(self) -> None:
        """Ask the engine from the next backward on, as with `find_unused`."""
        self.predicts = True

    def expect_static_graph(self) -> None:
        """Expect a static graph, before the first backward."""
        self._static_graph = True

    @property
    def counted(self) -> bool:
        """Return whether touches were counted, so that a parameter may be touched more than once."""
        return self._counts is not None

    def is_backward(self) -> bool:
        """Return whether this run of the engine will accumulate into a managed parameter; `autograd.grad` does not."""
        will_run = torch._C._will_engine_execute_node
        try:
            return any(will_run(node) for node in self._nodes)
        except RuntimeError:  # the engine's answer for a leaf that autograd.grad was asked for
            return False

    def begin(self) -> None:
        """Ask the engine, where it matters, which parameters the graph of a backward that begins reaches."""
        if self.predicts and not (self.counted or self.waits_for_end or self._static_graph):
            self._predicted = self._predict()

    def touches(self, members: Sequence[int], not_expected: frozenset[int]) -> int:
        """Return how many touches make a bucket of these full; NEVER: do not launch before backward has ended."""
        if self._counts is not None:
            return sum(self._counts[index] for index in members)
        if self.waits_for_end or self._static_graph:
            return NEVER
        if self.predicts:
            return sum(map(self._predicted.__getitem__, members))
        return len(members) - sum(map(not_expected.__contains__, members)) if not_expected else len(members)

    def reached(self) -> list[bool] | None:
        """Return which parameters the backward that has begun touches, where that is known before it ends."""
        if self._counts is not None:
            return [count > 0 for count in self._counts]
        return self._predicted if self.predicts and not (self.waits_for_end or self._static_graph) else None

    def _predict(self) -> list[bool]:
        with record_function("torch.distributed.ddp.reducer::search_unused_parameters"):
            will_run = torch._C._will_engine_execute_node
            try:
                return list(map(will_run, self._nodes))
            except RuntimeError:
                # No backward is under way here: a shadow of another rank's, or an explicit synchronization.
                return [False] * len(self._nodes)

    def learn(self, buckets: Sequence[Bucket]) -> None:
        """Count the touches of the backward that has just ended, if the graph is static and this was the first."""
        if self._static_graph and self._counts is None:
            self._counts = self._count(buckets)

    def _count(self, buckets: Sequence[Bucket]) -> list[int]:
        counts = [0] * len(self._nodes)
        for bucket in buckets:
            for slot in bucket.finished_slots():
                counts[bucket.members[slot]] += 1
        return counts

    def wait_for_end(self) -> None:
        """Launch nothing before backward has ended from now on, because gradients came late."""
        self.waits_for_end = True
        self._counts = None
        self._static_graph = False


def _hook_gradient(parameter: Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook` whenever autograd has finished the parameter's gradient; also if it is frozen just now."""
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    # torch.utils.swap_tensors moves the tensor, not its hooks: autograd would never call those that are added.
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    parameter.requires_grad_(requires_grad)
    return handle


def _node_of(parameter: Parameter) -> Any:
    """Return the graph's node that accumulates into the parameter; also if it is frozen just now."""
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    parameter.requires_grad_(requires_grad)
    return node


class BucketCuts:
    """The cut of one module's gradients into buckets; the same on every rank.

    Attributes:
        order: Indices of the parameters, as their gradients become ready.
        has_followed: Whether that is the order that rank 0 has observed. Until then it is the reverse of registration.
    """

    def __init__(
        self,
        managed: ManagedParameters,
        setting: Setting,
        tracker: ReadyTracker,  # listens to the buckets
        verdict: Verdict,  # its status lies behind the last bucket
        groups: Groups,  # ranks agree over the one for numbers; buffers are in memory that the others prefer
        peers: Peers,
    ) -> None:
        self._tracker, self._verdict, self._group, self._peers = tracker, verdict, groups.numbers, peers
        allocate = functools.partial(allocate_zeros, groups.for_gradients[0])
        self._memory = GradientMemory(managed, setting.caps, verdict.status, allocate)
        self.order = list(range(len(managed) - 1, -1, -1))
        self.has_followed = False
        self._batch_size = 0

    def note_batch(self, size: int) -> None:
        """Keep the number of samples in this rank's batch, to compare it with rank 0's; 0 if unknown or weighed."""
        self._batch_size = size

    def cut(self) -> list[Bucket]:
        """Return the buckets for the present order. Local; old buckets are worthless afterwards."""
        buckets = self._memory.cut(self.order)
        self._tracker.listen_to(buckets)
        return buckets

    def follow(self) -> bool:
        """Adopt the bucket order that rank 0 has observed. Return True if it changed. Collective."""
        device = self._verdict.status.words.device
        batch_size = self._batch_size
        order, first_size = self._tracker.agree_on_order(
            self.order, batch_size, device, self._group, self._peers
        )
        if batch_size and first_size and batch_size != first_size:
            self._verdict.warn_of_unequal_batches(batch_size, first_size)
        self.has_followed = True
        changed = order != self.order
        self.order = order
        return changed

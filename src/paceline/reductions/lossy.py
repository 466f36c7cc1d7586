"""The common part of reductions that compress: two threads beside backward, overflow, bytes sent, checkpoints.

Rules
1. Buckets are compressed and sent one after the other on one thread. So a reduction may launch a collective when
   another one is done, in the same order on every rank, and backward waits for neither.
2. They are decompressed on a second thread, in the same order, so that the network need not wait for that.
3. At most two buckets are sent and not yet decompressed: the payloads of all ranks take memory until then.
4. State for the next step (residuals, factors) takes effect in `end_step` only, so not if the step failed. Nor does it
   if the reduced gradients were not finite. They are the same on all ranks, so ranks agree on that without asking.
5. An accelerator says later whether they were. So a step's end and the next one's begin wait (`_settle`) until the
   state is needed: by the first thread, before the next bucket, or by a caller that reads it.
6. Threads of lost members' buckets may go on after `follow`. So a bucket writes the memories that there were at its
   launch, and `follow` makes new ones.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import C10dWork, Work
from paceline.comm.device import AsyncValue, keep_for_current_streams
from paceline.comm.lane import Lane, LaneWork
from paceline.compression import Layout
from paceline.reductions.kept_state import Keeper, Memories, Memory, check_one_model
from paceline.reductions.reduction import (
    Message,
    Reduction,
    StepEnd,
    Traffic,
    all_reduced,
    launch_sparse_sum,
    real_numel,
)

MOST_UNDER_WAY = 2  # buckets that were sent and not yet decompressed

Finish = Callable[[], None]


class Lossy(Reduction):
    """A reduction that compresses. Final classes implement `_start`.

    Attributes:
        loss_scale: Returns the factor of the loss; called before each step. Set it to your
            `torch.amp.GradScaler.get_scale`: residuals are then rescaled when it changes. Not part of the
            settings that ranks compare.
        last_step: The bytes that this rank sent in the last step.
    """

    def __init__(self) -> None:
        self.loss_scale: Callable[[], float] = _one
        self.last_step = Traffic()
        self._overflowed = False
        self._total = Traffic()
        self._num_steps = 0
        self._memories: dict[str, Memory] = {}
        self._scale_of_memories = 1.0
        self._num_averaged = 1
        self._names: dict[int, str] = {}  # by the parameter's id
        self._positions: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._place = (0, 1)  # this rank's number, and the number of ranks
        self._pipeline: Pipeline | None = None
        self._traffic = Traffic()  # of the step under way
        # Of the step under way: one scalar for each bucket, 0, or NaN if its result is not finite.
        self._finite_checks: list[Tensor] = []
        # What is left to do between two steps (rule 5)
        self._settling = threading.Lock()
        self._ended: AsyncValue | None = None  # NaN if the last step's gradients were not finite
        self._begins: float | None = None  # with this loss scale

    # ---- before training

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        sizes = {name: real_numel(parameter) for name, parameter in named_parameters.items()}
        for name, parameter in named_parameters.items():
            self._check_dtype(name, parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype)
        check_one_model(self, self._names, named_parameters)
        self._names = {id(parameter): name for name, parameter in named_parameters.items()}
        ends = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
        self._positions = dict(zip(sizes, ends, strict=False))
        self._sizes = sizes
        self._place = (process_group.rank(), process_group.size())
        if self._pipeline is None:
            self._pipeline = Pipeline(f"paceline {type(self).__name__}")

    def follow(
        self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup, are_alike: bool
    ) -> None:
        self._settle()
        self._pipeline = None  # its threads may still be in a collective with a rank that is gone
        self._memories = {kind: memory.copied() for kind, memory in self._memories.items()}  # rule 6
        self._begin(self._scale_of_memories)  # in all else that those threads do not write
        self.prepare(named_parameters, process_group)
        if not are_alike:
            self._begin_shared_anew()

    def _begin_shared_anew(self) -> None:
        """Forget what is the same on all ranks; not what is each one's own."""
        self._num_steps = 0

    def _check_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Raise ConfigurationError if a gradient of this dtype cannot be compressed."""

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {**self.__dict__, "_pipeline": None, "_names": {}, "_settling": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._settling = threading.Lock()

    # ---- a step

    def begin_step(self, num_ranks: int, active_ratio: float = 1.0, share: float | None = None) -> float:
        self._num_averaged = num_ranks
        self._traffic, self._finite_checks = Traffic(), []
        scale = float(self.loss_scale())
        if self._ended is None:
            self._begin(scale)
        else:
            self._begins = scale
        return 1.0  # divided after the sum: gradients of 16 bits lose less before the division than after it

    def _begin(self, loss_scale: float) -> None:
        """Begin to write state beside the old, in units of this loss scale."""
        for memory in self._memories.values():
            memory.begin()
            if loss_scale != self._scale_of_memories:
                memory.multiply(loss_scale / self._scale_of_memories)
        self._scale_of_memories = loss_scale

    def _settle(self) -> None:
        """Complete the last step's end and this one's begin. Waits for a device, if it has to (rule 5)."""
        with self._settling:
            ended, self._ended = self._ended, None
            if ended is not None:
                self._conclude(bool(ended.read().isnan()))
            begins, self._begins = self._begins, None
            if begins is not None:
                self._begin(begins)

    def _conclude(self, overflowed: bool) -> None:
        """Commit the state of the last step, unless its gradients overflowed."""
        self._overflowed = overflowed
        if not overflowed:
            self._commit()

    def _conclude_later(self, checks: Sequence[Tensor]) -> None:
        """Conclude the step when the device has said whether its gradients were finite."""
        if not self.keeps_state:
            self._ended = None  # `overflowed` was not read
        self._settle()  # of a step without buckets
        keep_for_current_streams(checks)
        self._ended = AsyncValue(torch.stack([check.double() for check in checks]).sum())

    @property
    def keeps_state(self) -> bool:
        """Return whether the end of a step changes state that the next step reads."""
        return bool(self._memories)

    def _commit(self) -> None:
        for memory in self._memories.values():
            memory.commit()

    @property
    def overflowed(self) -> bool:
        """Return whether the last step's reduced gradients contain an infinity or a NaN. The same on every rank.

        Such a step must be skipped, as `GradScaler.step` does; its residuals are dropped. On an accelerator this waits
        for the device.
        """
        if self._ended is not None:
            self._settle()
        return self._overflowed

    def launch(self, message: Message) -> Work:
        assert self._pipeline is not None, "prepared before the first step"
        names, layout = self._described(message)
        plain_bytes = all_reduced(layout.num_bytes, self._place[1])
        self._traffic += Traffic(self._sent_bytes(names, layout), plain_bytes)
        checks, memories = self._finite_checks, self._memories

        def start() -> Finish:
            if self._ended is not None and self.keeps_state and memories is self._memories:
                self._settle()
            finish = self._start(message, names, layout, memories)

            def finish_and_check() -> None:
                finish()
                _check_finite(message.body, checks)

            return finish_and_check

        what = f"bucket {message.index}, {type(self).__name__}"
        return self._pipeline.launch(start, message.flat, what)

    def launch_sparse(
        self, gradient: Tensor, process_group: ProcessGroup, keep: Callable[[Tensor], None]
    ) -> Work:
        """Start summing a sparse gradient, uncompressed; on the same thread as buckets, hence in the same order."""
        assert self._pipeline is not None, "prepared before the first step"

        checks = self._finite_checks

        def check_and_keep(reduced: Tensor) -> None:
            _check_finite(reduced._values(), checks)
            keep(reduced)

        def start() -> Finish:
            pending = launch_sparse_sum(gradient, process_group, check_and_keep)
            pending.wait()  # before the next bucket is sent: on Gloo it is several collectives
            return lambda: None

        return self._pipeline.launch(start, gradient, "a sparse gradient")

    def _described(self, message: Message) -> tuple[tuple[str, ...], Layout]:
        names = tuple(self._names[id(parameter)] for parameter in message.parameters)
        return names, Layout(
            sizes=tuple(self._sizes[name] for name in names),
            positions=tuple(self._positions[name] for name in names),
            dtype=message.body.dtype,
            device=message.body.device,
        )

    @abstractmethod
    def _start(self, message: Message, names: tuple[str, ...], layout: Layout, memories: Memories) -> Finish:
        """Compress `message.body` and launch its exchange. Collective: every rank, same order; it may block.

        The returned function waits for the exchange and writes the result into `message.body`; it launches no
        collective. It runs on the pipeline's second thread, this on the first. Only `memories` may be written (rule 6).
        """

    @abstractmethod
    def _sent_bytes(self, names: tuple[str, ...], layout: Layout) -> int:
        """Return the bytes that `_start` sends for a bucket of these gradients. Local; by shapes alone."""

    def _withdraw(self, names: Sequence[str]) -> None:
        """Drop what this step changed in the state of these parameters: no rank has used them."""
        for memory in self._memories.values():
            memory.restore(names)

    def end_step(self, ended: StepEnd) -> None:
        if ended.unused:
            self._withdraw([self._names[id(parameter)] for parameter in ended.unused])
        checks = self._finite_checks
        if checks and not checks[0].is_cpu:
            self._conclude_later(checks)
        else:
            self._conclude(any(bool(check.isnan()) for check in checks))
        self.last_step = self._traffic
        self._total += self._traffic
        self._num_steps += 1

    # ---- reports

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent for gradients so far, without status words of `ddp`."""
        return self._total.sent_bytes

    # ---- checkpoints

    def reset(self) -> None:
        """Drop residuals and velocities. Local; all ranks must do it before the same step."""
        self._settle()
        for memory in self._memories.values():
            memory.load({})
        self._num_steps = 0

    @property
    def _keeper(self) -> Keeper:
        kept = "what compression had left out of earlier gradients"
        return Keeper(repr(self), kept, self._sizes, *self._place)

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return {
            **self._keeper.words(),
            "num_steps": self._num_steps,
            "loss_scale": self._scale_of_memories,
            "memories": {kind: memory.by_name() for kind, memory in self._memories.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state_dict` returned on this rank: on the CPU or the parameters' device; it is copied.

        Not `strict`: the state of another rank, or of another number of ranks, is accepted. What all ranks share is
        restored from it, and residuals start at zero. Local; all ranks must do it between the same steps. Raises
        ConfigurationError for the state of another reduction, rank or model; nothing was changed.
        """
        is_own = self._keeper.has_saved(state, strict)
        self._settle()
        self._load_shared(state)
        for kind, memory in self._memories.items():
            memory.load(state["memories"][kind] if is_own else {})
        self._scale_of_memories = state["loss_scale"]
        self._num_steps = state["num_steps"]

    def _load_shared(self, state: Mapping[str, Any]) -> None:
        """Restore the part of the state that is the same on all ranks."""


def _check_finite(reduced: Tensor, checks: list[Tensor]) -> None:
    """Compute whether there is an infinity or NaN; read in `end_step`, so that nothing waits for a device here."""
    if reduced.numel():
        low, high = torch.aminmax(reduced)
        checks.append((low - low) + (high - high))


def _one() -> float:
    return 1.0


def seed_of(*parts: int | str) -> int:
    """Return a seed of 56 bits that depends on all parts, and on nothing else."""
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


class Pipeline:
    """Two threads for the buckets of one reduction: the first compresses and sends, the second decompresses."""

    def __init__(self, name: str) -> None:
        self._sending, self._decoding = Lane(f"{name} sends"), Lane(f"{name} decodes")
        for lane in (self._sending, self._decoding):
            weakref.finalize(self, lane.close, 0.0)
        self._under_way: deque[LaneWork] = deque()  # not yet decompressed

    def launch(self, start: Callable[[], Finish], tensor: Tensor, what: str) -> C10dWork:
        """Run `start`, then what it returns, on the two threads; only `start` may launch. Does not block."""
        finish: list[Finish] = []

        def decode() -> None:
            finish.pop()()

        def send() -> None:
            try:
                if len(self._under_way) >= MOST_UNDER_WAY:
                    with suppress(Exception):  # raised where that bucket is waited for
                        self._under_way.popleft().wait()
                finish.append(start())
            except BaseException as error:  # noqa: BLE001  whatever it is, it is raised for the waiter
                finish.append(functools.partial(_raise, error))
            self._under_way.append(decoded)
            self._decoding.launch(decoded, at_once=False)

        decoded = LaneWork(decode, [tensor], what)
        self._sending.launch(LaneWork(send, [tensor], what), at_once=False)
        return C10dWork(decoded)


def _raise(error: BaseException) -> None:
    raise error

"""What reductions that lose something have in common: memory by parameter, overflow, bytes, a checkpoint.

Rules
1. A bucket is handled by a `Pipeline`, aside from backward, in the same order on every rank.
2. What one step leaves for the next is valid only if the step counts: `end_step` is told of it, and all ranks see the
   same reduced gradients, so they agree on whether these were finite without asking each other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.pending import Pending
from paceline.comm.traffic import Traffic, all_reduced
from paceline.compression import Layout
from paceline.errors import ConfigurationError
from paceline.observe import StepTiming
from paceline.reductions.memory import Memory
from paceline.reductions.pipeline import Pipeline
from paceline.reductions.reduction import Message, Reduction
from paceline.reductions.sparse import launch_sparse_sum


class Lossy(Reduction):
    """A reduction that sends less than there is. Final classes implement `_start`.

    Attributes:
        loss_scale: What the loss is multiplied by, asked before each step. Give it your `GradScaler.get_scale`: what is
            kept from step to step is then rescaled when the scale changes. Not part of the settings that ranks compare.
        last_step: Bytes of the last step.
        overflowed: Whether the last step's gradients contain an infinity or a NaN. The same on every rank. Such a
            step must be skipped, as `GradScaler.step` does; nothing of it is kept.
    """

    def __init__(self) -> None:
        self.loss_scale: Callable[[], float] = _one
        self.last_step = Traffic()
        self.overflowed = False
        self._total = Traffic()
        self._num_steps = 0
        self._memories: dict[str, Memory] = {}
        self._scale_of_memories = 1.0
        self._num_averaged = 1
        self._names: dict[int, str] = {}  # by the parameter's id
        self._positions: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._place = (0, 1)  # rank and number of ranks
        self._pipeline: Pipeline | None = None
        self._traffic = Traffic()  # of the step under way
        self._signs: list[Tensor] = []  # of the step under way: 0-dim, a bucket each; NaN if it is not finite

    # ---- before training

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        sizes = {name: _real_numel(parameter) for name, parameter in named_parameters.items()}
        for name, parameter in named_parameters.items():
            self._check(name, parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype)
        ids = {id(parameter) for parameter in named_parameters.values()}
        if self._names and not self._names.keys() & ids:
            raise ConfigurationError(
                f"{self!r} reduces another model's gradients already, of which it keeps what was left out. "
                "Make one for each model."
            )
        self._names = {id(parameter): name for name, parameter in named_parameters.items()}
        ends = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
        self._positions = dict(zip(sizes, ends, strict=False))
        self._sizes = sizes
        self._place = (process_group.rank(), process_group.size())
        if self._pipeline is None:
            self._pipeline = Pipeline(f"paceline {type(self).__name__}")

    def _check(self, name: str, dtype: torch.dtype) -> None:
        """Refuse a parameter whose gradient, of this dtype, cannot be reduced so."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipeline": None, "_names": {}}

    # ---- a step

    def begin_step(self) -> None:
        self._traffic, self._signs = Traffic(), []
        scale = float(self.loss_scale())
        for memory in self._memories.values():
            memory.begin()
            if scale != self._scale_of_memories:
                memory.multiply(scale / self._scale_of_memories)
        self._scale_of_memories = scale

    def input_scale(self, num_ranks: int) -> float:
        self._num_averaged = num_ranks
        return 1.0  # 16 bits lose less before the division than after it

    def launch(self, message: Message) -> Pending:
        assert self._pipeline is not None, "prepared before the first step"
        names = tuple(self._names[id(parameter)] for parameter in message.parameters)
        layout = self._layout(message, names)

        def start() -> Callable[[], None]:
            finish = self._start(message, names, layout)

            def finish_and_look() -> None:
                finish()
                self._look_for_overflow(message.body)

            return finish_and_look

        what = f"bucket {message.index}, {type(self).__name__}"
        return self._pipeline.launch(start, message.flat, what)

    def launch_sparse(
        self, gradient: Tensor, process_group: ProcessGroup, keep: Callable[[Tensor], None]
    ) -> Pending:
        """As it is, uncompressed; in the pipeline, so that no two ranks mix its messages with a bucket's."""
        assert self._pipeline is not None, "prepared before the first step"

        def look_and_keep(reduced: Tensor) -> None:
            self._look_for_overflow(reduced._values())
            keep(reduced)

        def start() -> Callable[[], None]:
            launch_sparse_sum(
                gradient, process_group, look_and_keep
            ).wait()  # on Gloo it is several collectives
            return lambda: None

        return self._pipeline.launch(start, gradient, "a sparse gradient")

    def _look_for_overflow(self, reduced: Tensor) -> None:
        """Without waiting for a device."""
        if reduced.numel():
            low, high = torch.aminmax(reduced)
            self._signs.append((low - low) + (high - high))

    def _layout(self, message: Message, names: tuple[str, ...]) -> Layout:
        return Layout(
            sizes=tuple(self._sizes[name] for name in names),
            positions=tuple(self._positions[name] for name in names),
            dtype=message.body.dtype,
            device=message.body.device,
        )

    @abstractmethod
    def _start(self, message: Message, names: tuple[str, ...], layout: Layout) -> Callable[[], None]:
        """Start replacing `message.body` by what is reduced.

        Returns:
            What is left to do: waits for the exchange and writes `message.body`; starts no collective.

        Contract:
            Collective; may block. Both run in the pipeline.
        """

    def _count(self, layout: Layout, sent_bytes: int) -> None:
        plain_bytes = all_reduced(layout.num_bytes, self._place[1])
        self._traffic += Traffic(sent_bytes, plain_bytes)

    def withdraw(self, parameters: Sequence[Parameter]) -> None:
        for memory in self._memories.values():
            memory.withdraw(self._names[id(parameter)] for parameter in parameters)

    def end_step(self, timing: StepTiming) -> None:
        self.overflowed = any(bool(sign.isnan()) for sign in self._signs)
        if not self.overflowed:
            for memory in self._memories.values():
                memory.commit()
        self.last_step = self._traffic
        self._total += self._traffic
        self._num_steps += 1

    # ---- reports

    @property
    def bytes_sent(self) -> int:
        """By this rank for gradients, since it was made; the few words that ranks exchange besides are not counted."""
        return self._total.sent_bytes

    @property
    def bytes_saved(self) -> int:
        """Against an all-reduce of the same gradients."""
        return self._total.saved_bytes

    # ---- checkpoints

    def reset(self) -> None:
        """Forget what was kept from step to step. Local; all ranks must do it before the same step."""
        for memory in self._memories.values():
            memory.load({})
        self._num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        rank, num_ranks = self._place
        return {
            "kind": repr(self),
            "rank": rank,
            "num_ranks": num_ranks,
            "num_steps": self._num_steps,
            "loss_scale": self._scale_of_memories,
            "sizes": dict(self._sizes),
            "memories": {kind: memory.by_name() for kind, memory in self._memories.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take over what `state_dict` returned on this rank.

        Args:
            state: On the CPU or the parameters' device.
            strict: False: of another rank's state, or one of another number of ranks, take what all ranks share, and
                start with nothing left over from earlier gradients.

        Contract:
            Local; all ranks must do it between the same steps.

        Raises:
            ConfigurationError: It is the state of another kind of reduction, rank or model; nothing was changed.
        """
        is_own = self._check_state(state, strict)
        self._load_shared(state)
        for kind, memory in self._memories.items():
            memory.load(state["memories"][kind] if is_own else {})
        self._scale_of_memories = state["loss_scale"]
        self._num_steps = state["num_steps"]

    def _load_shared(self, state: Mapping[str, Any]) -> None:
        """Take what is the same on all ranks."""

    def _check_state(self, state: Mapping[str, Any], strict: bool) -> bool:
        """Whether it is this rank's own."""
        rank, num_ranks = self._place
        advice = (
            "Nothing was loaded. Training may go on without: what compression had left out of earlier gradients is "
            "then lost, once."
        )
        if state.get("kind") != repr(self):
            raise ConfigurationError(
                f"this is the state of {state.get('kind', 'another kind of reduction')}, not of {self!r}. {advice}"
            )
        is_own = (state["rank"], state["num_ranks"]) == (rank, num_ranks)
        if strict and not is_own:
            raise ConfigurationError(
                f"rank {rank} of {num_ranks} was given the state of rank {state['rank']} of {state['num_ranks']}: "
                "each rank keeps what is left of its own gradients. Save on every rank, to a file of its own; or pass "
                f"strict=False, to start with nothing left over. {advice}"
            )
        if state["sizes"] != self._sizes:
            other = {*state["sizes"].items()} ^ {*self._sizes.items()}
            names = sorted({name for name, _ in other})
            raise ConfigurationError(
                f"this is the state of another model: {', '.join(names[:5])} differ in size or are missing. {advice}"
            )
        return is_own


def _one() -> float:
    return 1.0


def _real_numel(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)

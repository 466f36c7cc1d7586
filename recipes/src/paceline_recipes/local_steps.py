"""`LocalSGD` and `DiLoCo`: several optimizer steps on each rank alone, then an exchange of how parameters changed.

Rules
1. Those of `paceline.optim.exchanging_optimizer`.
2. Between synchronizations nothing is communicated (but for the first step, see there). A synchronization starts from
   the parameters after the last one, which are bitwise the same on all ranks. It applies the mean of the ranks' changes
   since. So afterwards the parameters are bitwise the same again.
3. Before parameters are exchanged the ranks compare how many steps they took. If these differ nothing is changed.
4. Parameters are written when everything has arrived: if a rank is lost, each keeps its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from paceline.comm import Work, all_reduce, broadcast, device_for_metadata
from paceline.errors import ConfigurationError, ProtocolError
from paceline.given import number
from paceline.observe import StepTiming
from paceline.optim import ExchangingOptimizer, FlatParameters, digest_of, flatten
from paceline.reductions import Auto, Lossy, Reduction, StepEnd, Traffic, all_reduced, choose_reduction

if TYPE_CHECKING:
    from paceline.compression import Compressor


class AveragedBuffers:
    """A model's buffers (batch-norm statistics), averaged over ranks where its parameters are.

    All ranks' are laid out alike. What is no floating-point number (a counter), or one of 8 bits, becomes rank 0's.
    """

    def __init__(self, buffers: Iterable[Tensor], process_group: ProcessGroup) -> None:
        self._flats = flatten([buffer for buffer in buffers if buffer.numel()])
        self._group = process_group

    @property
    def num_bytes(self) -> int:
        return sum(flat.kept.nbytes for flat in self._flats)

    def layout(self) -> list[str]:
        """Return the dtypes and shapes, which have to be equal on all ranks."""
        return [f"{flat.kept.dtype} {tuple(b.shape)}" for flat in self._flats for b in flat.parameters]

    def launch(self) -> list[Work]:
        """Start taking the mean. Collective; does not wait; buffers are not changed before `finish`."""
        return [] if self._group.size() == 1 else [self._launch(flat) for flat in self._flats]

    def _launch(self, flat: FlatParameters) -> Work:
        flat.take()
        if not flat.kept.is_floating_point() or flat.kept.itemsize == 1:
            return broadcast(flat.kept.view(torch.uint8), self._group, 0)  # bytes, which every backend takes
        return all_reduce(flat.kept.div_(self._group.size()), self._group)

    def finish(self) -> None:
        """Take over what was launched and has been waited for."""
        if self._group.size() > 1:
            for flat in self._flats:
                flat.put_back()


class LocalSGD(ExchangingOptimizer):
    """Steps `optimizer` on this rank's gradients, and averages parameters every `every` steps.

    For links where even compressed gradients take too long: it sends 1/every of the bytes. The ranks' models drift
    apart in between, so accuracy falls at some `every`; try 2 or 4 first. With `every=1` and plain SGD (no momentum) it
    equals averaging gradients, up to rounding.

    Limits first: nothing overlaps with backward; two copies of the parameters are kept; each rank keeps its own
    momentum, which is not averaged.

    Args:
        optimizer: Any optimizer that needs no closure. Schedulers and GradScaler may be given either it or this.
        every: Steps between two synchronizations.
        process_group: Over whom; None for the default group.
        buffers: Averaged with the parameters, for example `model.buffers()`; counters become rank 0's. Left out, each
            rank keeps its own running statistics.
        compression: Send fewer bytes for the changes, as for `DistributedDataParallel`.

    Attributes:
        optimizer: The one that was given.
        every: May be changed, on all ranks alike.
        reduction: What takes the mean of the changes.

    Contract:
        The model is not wrapped. Collective: the constructor (parameters become rank 0's), the first `step`, every
        `every`-th, and `synchronize`. Afterwards parameters are bitwise equal on all ranks.

    Raises:
        ConfigurationError: A setting cannot be.
        ReplicaMismatchError: The ranks' parameters differ in number, shape or dtype; on every rank.
        ProtocolError: The ranks took different numbers of steps; on every rank.
        PeerLostError: A rank died or hangs.

    Source:
        Stich: "Local SGD Converges Fast and Communicates Little", ICLR 2019, algorithm 1.
    """

    when_lost = "The parameters are this rank's own, those of its last step."
    not_local = (
        "To reduce gradients, wrap the model and use the optimizer as it is. "
        "`paceline explain bitwise the same gradients` says more."
    )

    def __init__(
        self,
        optimizer: Optimizer,
        every: int,
        process_group: ProcessGroup | None = None,
        buffers: Iterable[Tensor] = (),
        compression: Compressor | Reduction | str | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ConfigurationError(
                f"{type(self).__name__}: every={every!r} has to be a number of steps, 1 or more, from one "
                "synchronization to the next."
            )
        chosen = choose_reduction(None, compression)
        if isinstance(chosen, Auto):
            raise ConfigurationError(
                f'{type(self).__name__}: compression="auto" measures the buckets of each backward, and a '
                'synchronization has none. Name a codec, such as "bf16", or leave it out.'
            )
        self.every = every
        self._given_buffers = list(buffers)
        self._buffers: AveragedBuffers | None = None
        self._steps_since = 0
        self._num_synchronizations = 0
        self._traffic = Traffic()
        super().__init__(optimizer, process_group, chosen)

    def settings(self) -> str:
        self._buffers = self._buffers or AveragedBuffers(self._given_buffers, self.process_group)
        return f"every={self.every}, {self.reduction!r}, buffers {self._buffers.layout()}"

    def adopt(self) -> None:
        super().adopt()
        for flat in self.flats:
            flat.take()

    def _move(self, index: int, flat: FlatParameters) -> None:
        """Turn the mean change, `flat.update`, in place into the change to be applied: here the mean itself."""

    # ---- steps

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the optimizer here; after every `every` steps, synchronize.

        Args:
            closure: Handed to the optimizer.

        Contract:
            Local, but for the first step with gradients (which compares them) and those that synchronize.

        Raises:
            ConfigurationError: The gradients are the same on all ranks. Nothing was changed.
            ProtocolError, PeerLostError: As `synchronize`.
        """
        self.check_step()
        loss = self.step_locally(closure)
        self.num_steps += 1
        self.peers.note_step(self.num_steps)
        self._steps_since += 1
        if self._steps_since >= self.every:
            self.synchronize()
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange the changes since the last time. By itself only needed at the end of training, or before saving.

        Contract:
            Collective: every rank, after equally many steps.  Blocks: yes.  Mutates: parameters, buffers.
            Afterwards: parameters and buffers are bitwise equal on all ranks.

        Raises:
            ProtocolError: The ranks took different numbers of steps; on every rank; nothing was changed.
            PeerLostError: A rank died or hangs; each rank keeps its own parameters.
        """
        self._compare_steps()
        if self._steps_since == 0:
            return
        sent_before = self._sent_bytes()
        self._exchange()
        for index, flat in enumerate(self.flats):
            self._move(index, flat)
            flat.apply_update()
            flat.take()
        self._num_synchronizations += 1
        timing = StepTiming(self._num_synchronizations, 0.0, 0.0, 0.0, 0.0, ())
        self.reduction.end_step(StepEnd(timing))
        self._count(self._sent_bytes() - sent_before)
        self._steps_since = 0

    def _compare_steps(self) -> None:
        """Compare the ranks' numbers of steps (rule 3). Collective; blocks."""
        rank, num_ranks = self.process_group.rank(), self.process_group.size()
        if num_ranks == 1:
            return
        where = device_for_metadata(self.process_group, self.parameters()[0].device)
        counts = torch.zeros(num_ranks, dtype=torch.float64, device=where)
        counts[rank] = self._steps_since
        self.peers.wait(all_reduce(counts, self.process_group), f"synchronizing after step {self.num_steps}")
        steps = [round(count) for count in counts.tolist()]
        if len(set(steps)) > 1:
            told = ", ".join(f"rank {other} {count}" for other, count in enumerate(steps))
            raise ProtocolError(
                f"rank {rank}: the ranks took different numbers of steps since they were last synchronized: {told}. "
                "No parameter was changed by this. Give every rank equally many batches, and call synchronize() on "
                "all ranks after the same step."
            )

    def _exchange(self) -> None:
        """Make every flat's update the mean of the ranks' changes, and buffers their means. Collective; blocks."""
        assert self._buffers is not None, "made by the constructor"
        scale = self.reduction.begin_step(self.process_group.size())
        for flat in self.flats:
            flat.take_update()
            flat.update.mul_(scale)
        launched = [
            self.reduction.launch(flat.message(index, len(self.flats), self.process_group))
            for index, flat in enumerate(self.flats)
        ]
        if self.reduction.carries_status:
            launched += self._buffers.launch()
        self._wait_for_all(launched)
        if not self.reduction.carries_status:
            # The reduction starts collectives on a thread of its own: ours must not come between those.
            self._wait_for_all(self._buffers.launch())
        self._buffers.finish()

    def _wait_for_all(self, launched: list[Work]) -> None:
        for pending in launched:
            self.peers.wait(
                pending, f"exchanging what {self._steps_since} steps changed, up to step {self.num_steps}"
            )

    # ---- traffic

    @property
    def traffic(self) -> Traffic:
        """Return the bytes that this rank sent, and those that reducing gradients in every step would have sent.

        Up to the last synchronization; without the few bytes by which ranks compare their steps.
        """
        return self._traffic

    def _sent_bytes(self) -> int:
        return self.reduction.bytes_sent if isinstance(self.reduction, Lossy) else 0

    def _count(self, compressed_bytes: int) -> None:
        """Add a synchronization to the traffic; its changes by their size, unless compressed."""
        assert self._buffers is not None, "made by the constructor"
        num_ranks = self.process_group.size()
        change_bytes = all_reduced(sum(flat.update.nbytes for flat in self.flats), num_ranks)
        gradient_bytes = sum(p.numel() * p.element_size() for p in self.parameters() if p.requires_grad)
        self._traffic += Traffic(
            sent_bytes=(compressed_bytes or change_bytes) + all_reduced(self._buffers.num_bytes, num_ranks),
            plain_bytes=self._steps_since * all_reduced(gradient_bytes, num_ranks),
        )

    # ---- groups and checkpoints

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's; collective: the new parameters become rank 0's. DiLoCo's momentum starts again.

        Raises:
            ConfigurationError: Steps have been taken since the last synchronization.
        """
        if self.flats and self._steps_since:
            raise ConfigurationError(
                f"{type(self).__name__}: {self._steps_since} steps since the last synchronization would be lost. Call "
                "synchronize() on all ranks before adding parameters."
            )
        super().add_param_group(param_group)

    def _memories(self) -> list[Tensor]:
        """Return the tensors that are kept besides the parameters of the last synchronization; equal on all ranks."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to be saved by every rank, with the rank's model. Local."""
        return {
            **super().state_dict(),
            "kind": type(self).__name__,
            "num_steps": self.num_steps,
            "steps_since": self._steps_since,
            "num_synchronizations": self._num_synchronizations,
            "traffic": [self._traffic.sent_bytes, self._traffic.plain_bytes],
            "last_synchronized": [flat.kept.clone() for flat in self.flats],
            "memories": [memory.clone() for memory in self._memories()],
            "reduction": self.reduction.state_dict(),
            "parameters": digest_of(self.parameters()).hex(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on the same rank of as many ranks. Local.

        The model's parameters come first, after this object was made: it gives every rank rank 0's.

        Raises:
            ConfigurationError: It is the state of another rank or kind of optimizer, or of other parameters. Nothing
                was changed.
        """
        self._check_state(state_dict)
        # The reduction may refuse its state, so it comes before anything else is loaded.
        self.reduction.load_state_dict(state_dict["reduction"])
        super().load_state_dict(state_dict)
        self.num_steps = state_dict["num_steps"]
        self._steps_since = state_dict["steps_since"]
        self._num_synchronizations = state_dict["num_synchronizations"]
        self._traffic = Traffic(*state_dict["traffic"])
        mine = [flat.kept for flat in self.flats] + self._memories()
        theirs = [*state_dict["last_synchronized"], *state_dict["memories"]]
        for tensor, saved in zip(mine, theirs, strict=True):
            tensor.copy_(saved)

    def _check_state(self, state_dict: Mapping[str, Any]) -> None:
        super()._check_state(state_dict)
        mine, kind = type(self).__name__, state_dict.get("kind", "another optimizer")
        if kind != mine:
            raise ConfigurationError(
                f"this is the state of {kind}, not of {mine}. Nothing was loaded. Load it into what it was saved from."
            )
        if state_dict["parameters"] != digest_of(self.parameters()).hex():
            raise ConfigurationError(
                f"the parameters are not those that this {mine} was saved with, so training would not go on where it "
                f"stopped. Each rank saves its own model next to this state. Make the {mine}, which gives every rank "
                "rank 0's parameters; then load the model, and then this state."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r}, {self.settings()})"


class DiLoCo(LocalSGD):
    """Steps `optimizer` on this rank's gradients; every `every` steps Nesterov SGD on the mean change.

    With d the mean over ranks of how parameters changed since the last synchronization, w where they then were, and m
    the outer momentum:

        v = m v + d
        w = w + outer_lr (d + m v)           (with nesterov=False: w + outer_lr v)

    With `outer_lr=1` and `outer_momentum=0` it is LocalSGD.

    Limits first: nothing overlaps with backward; three copies of the parameters are kept. The inner optimizer's state
    is each rank's own and survives synchronizations.

    Args:
        optimizer: The inner one; the paper has AdamW.
        every: Steps between two synchronizations; the paper has 500.
        outer_lr: The paper's best is 0.7.
        outer_momentum: The paper's best is 0.9.
        nesterov: Look ahead along the outer momentum.
        process_group: Over whom; None for the default group.
        buffers: Averaged with the parameters, as for LocalSGD.
        compression: Send fewer bytes for the changes, as for `DistributedDataParallel`.

    Contract, Raises:
        As LocalSGD.

    Source:
        Douillard et al.: "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105,
        algorithm 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        process_group: ProcessGroup | None = None,
        buffers: Iterable[Tensor] = (),
        compression: Compressor | Reduction | str | None = None,
    ) -> None:
        if not (0 < number(outer_lr) < math.inf and 0 <= number(outer_momentum) < 1):
            raise ConfigurationError(
                f"DiLoCo: outer_lr={outer_lr!r} and outer_momentum={outer_momentum!r}: a rate is positive and finite, "
                "a momentum at least 0 and less than 1. The paper has 0.7 and 0.9."
            )
        self.outer_lr, self.outer_momentum, self.nesterov = outer_lr, outer_momentum, nesterov
        self._velocities: list[Tensor] = []
        super().__init__(optimizer, every, process_group, buffers, compression)

    def settings(self) -> str:
        outer = f"outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum}, nesterov={self.nesterov}"
        return f"{super().settings()}, {outer}"

    def adopt(self) -> None:
        super().adopt()
        self._velocities = [torch.zeros_like(flat.kept) for flat in self.flats]

    def _move(self, index: int, flat: FlatParameters) -> None:
        change, velocity = flat.update, self._velocities[index]
        velocity.mul_(self.outer_momentum).add_(change)
        if self.nesterov:
            change.add_(velocity, alpha=self.outer_momentum)
        else:
            change.copy_(velocity)
        change.mul_(self.outer_lr)

    def _memories(self) -> list[Tensor]:
        return self._velocities

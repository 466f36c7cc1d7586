"""The weights of one step's micro-batches, summed over the ranks while the first forward runs.

Rules
1. One message a step. Backward waits for it as it begins, because the first gradient needs the factor when it enters
   its bucket. So gradients are scaled once, and half precision does not overflow in the sum. A window launches it
   before its first forward. A plain step launches it only when its backward begins, because a forward may have no
   backward: then autograd's thread waits for one small message. It has 8 bytes, 8 a rank, and 64 a rank more if shares
   are reported (`step_shares.py`).
2. In float64, whatever gradients are made of: counts of tokens are exact up to 2^53.
3. A rank that cannot take part says so here, so that the others raise instead of waiting for its gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.collectives import Chain, Work, all_reduce, device_for_metadata
from paceline.ddp.buffers import BufferSync
from paceline.ddp.membership import Membership
from paceline.ddp.setting import Setting
from paceline.ddp.step import BackwardPlan
from paceline.ddp.step_shares import NO_REPORT
from paceline.errors import ConfigurationError, PeerAbortedError, PeerLostError, ProtocolError
from paceline.given import number
from paceline.observe import StepTimings
from paceline.reductions.ordered_mean import LogicalMean

REFUSED = -1


def checked_weight(given: object, whose: str) -> float:
    """Return a weight that a caller's function has returned. Raises ConfigurationError if it is none."""
    weight = number(given)
    if not 0 <= weight < math.inf:
        words = repr(given) if math.isnan(weight) else weight
        raise ConfigurationError(
            f"{whose} has weight {words}. A weight is a number of samples or tokens: finite and not negative."
        )
    return weight


@dataclass(frozen=True)
class StepWeights:
    """The weights of one step, over all ranks."""

    total: float  # sum of the weights of all micro-batches
    # How many micro-batches of positive weight each rank has; REFUSED where it could not take part.
    micro_steps: tuple[int, ...]
    # Each rank's words on its share; empty if shares are not reported
    reports: tuple[tuple[float, ...], ...] = ()

    @property
    def refusing_ranks(self) -> list[int]:
        return [rank for rank, count in enumerate(self.micro_steps) if count == REFUSED]

    @property
    def first_rank(self) -> int:
        """Return the first rank that has a micro-batch; 0 if none has."""
        return next((rank for rank, count in enumerate(self.micro_steps) if count > 0), 0)

    def raise_if_refused(self, rank: int) -> None:
        """Raise PeerAbortedError if a rank could not begin its window: it will not reduce. `rank` is this one."""
        if self.refusing_ranks:
            raise PeerAbortedError(
                f"rank {rank}: rank {self.refusing_ranks[0]} could not begin its window of micro-batches. This step's "
                "gradients were dropped on every rank; parameters are untouched. Look at that rank's output for the "
                "cause."
            )

    @property
    def active_ratio(self) -> float:
        """Return the fraction of the ranks that have micro-batches of positive weight."""
        return sum(count > 0 for count in self.micro_steps) / len(self.micro_steps)

    def factor(self, weight: float, num_ranks: int) -> float:
        """Return what a rank's gradients are multiplied by before the mean over `num_ranks`, if they count `weight`.

        That is of the last micro-batch, in whose units they are.
        """
        return num_ranks * weight / self.total if self.total > 0 else 0.0


class WeightExchange:
    """The sum under way. Collective, once a step. The constructor does not block, `finish` does."""

    def __init__(
        self,
        weight: float,  # of all micro-batches of this rank
        num_micro_steps: int,  # how many it has; REFUSED if it cannot take part
        members: Membership,
        report: Sequence[float] = (),  # this rank's words on its share; equally many on every rank, or none
        # Called once, with the words of all ranks, if none of them refused
        on_reports: Callable[[Sequence[Sequence[float]]], None] | None = None,
        buffers: BufferSync | None = None,  # of the step: the first rank that has micro-batches gives its own
    ) -> None:
        # The group of gradients is idle when a step begins, and its small messages are faster.
        process_group = members.groups.numbers
        self._peers = members.peers
        self._num_ranks, self._on_reports, self._buffers = process_group.size(), on_reports, buffers
        rank, width = process_group.rank(), len(report)
        words = [0.0] * (1 + (1 + width) * self._num_ranks)
        words[0], words[1 + rank] = weight, float(num_micro_steps)
        place = 1 + self._num_ranks + rank * width
        words[place : place + width] = report
        where = device_for_metadata(process_group, members.device)
        self._words = torch.tensor(words, dtype=torch.float64, device=where)
        is_alone = process_group.size() == 1
        self._pending: Work = Chain() if is_alone else all_reduce(self._words, process_group)
        self._found: StepWeights | None = None
        self._lost: PeerLostError | ProtocolError | None = None

    @property
    def has_failed(self) -> bool:
        """Return whether its sum will never come."""
        return self._lost is not None

    def finish(self) -> StepWeights:
        """Wait for the sum. Raises as `Peers.fail`."""
        if self._lost is not None:
            raise self._lost
        if self._found is None:
            try:
                doing = "learning how much the other ranks' micro-batches count"
                self._peers.wait(self._pending, doing, on_host=self._words.is_cpu)
            except (PeerLostError, ProtocolError) as error:
                self._lost = error
                raise
            total, *words = self._words.tolist()
            counts, words = words[: self._num_ranks], words[self._num_ranks :]
            width = len(words) // self._num_ranks
            reports = tuple(tuple(words[at : at + width]) for at in range(0, len(words), width or 1))
            self._found = StepWeights(total, tuple(round(count) for count in counts), reports)
            if self._buffers is not None:
                self._buffers.set_source(self._found.first_rank)
            if self._on_reports is not None and not self._found.refusing_ranks:
                self._on_reports(reports)
        return self._found


class Weighing:
    """The weights of one module's batches, on one rank. They are exchanged, and go into a step's plan."""

    def __init__(
        self,
        setting: Setting,  # which says what counts
        membership: Membership,
        timings: StepTimings,  # of the last steps
        fail: Callable[[Exception], None],  # called with what has ended communication for good
    ) -> None:
        self._setting, self._membership = setting, membership
        self._timings, self._fail = timings, fail

    @property
    def is_on(self) -> bool:
        """Return whether steps outside of windows count their batches by weights."""
        return self._setting.weight is not None or self._setting.shares is not None

    def weigh_plain(self, inputs: Sequence[Any], kwargs: Mapping[str, Any], will_synchronize: bool) -> float:
        """Return what a forward outside of windows counts; exchanged as backward begins, which some may never run."""
        setting = self._setting
        if not will_synchronize:
            raise ConfigurationError(
                "no_sync() in a model that weighs its batches (weight=, batch_sampler=): several micro-batches of a "
                "step are weighed by `with model.accumulate(batches) as micro_batches:`, which needs no no_sync()."
            )
        if setting.shares is not None:
            sizes = setting.shares.own_weights()
            setting.shares.report(self._timings.last)  # the step begins
        if setting.weight is None:
            if len(sizes) != 1:
                raise ConfigurationError(
                    f"this rank has {len(sizes)} micro-batches in this step. Train them within "
                    "`with model.accumulate(batches) as micro_batches:`, which takes any number."
                )
            return float(sizes[0])
        return checked_weight(setting.weight(*inputs, **kwargs), "this batch, by weight=,")

    def plan_of_forward(
        self, weight: float, begins_step: bool, divisor: int | None, buffers: BufferSync
    ) -> BackwardPlan:
        """Return what the backward of a weighed forward outside of windows counts. Collective; blocks (rule 1)."""
        weights = self.finish(self.exchange(weight, 1, begins_step, buffers))
        weights.raise_if_refused(self._membership.rank)
        return self.plan(weights, weight, weight, divisor)

    def exchange(
        self,
        weight: float = 0.0,
        num_micro_steps: int = 0,
        begins_step: bool = False,
        buffers: BufferSync | None = None,
    ) -> WeightExchange:
        """Exchange the weights of the ranks' micro-batches in a step. The base class has none. Collective."""
        members, shares = self._membership, self._setting.shares
        report: Sequence[float] = ()
        if shares is not None:
            report = shares.report(self._timings.last) if begins_step else NO_REPORT
        take = None if shares is None else shares.take
        return WeightExchange(weight, num_micro_steps, members, report, take, buffers)

    def finish(self, exchange: WeightExchange) -> StepWeights:
        """Wait for what the micro-batches count. Raises PeerLostError, and ProtocolError if steps differ."""
        since_s = time.perf_counter()
        try:
            weights = exchange.finish()
        except (PeerLostError, ProtocolError) as error:
            if exchange.has_failed:  # else the ranks disagree, and all raise
                self._fail(error)
            raise
        self.note_wait(since_s)
        return weights

    def plan(self, weights: StepWeights, weight: float, total: float, divisor: int | None) -> BackwardPlan:
        """Return the plan of a backward: `weight` is that of its last micro-batch, `total` of all. Local."""
        setting = self._setting
        if setting.shares is not None:
            setting.shares.backward_begins()
        reduction, num_ranks = setting.reduction, len(weights.micro_steps)
        if isinstance(reduction, LogicalMean):
            num_ranks = divisor = reduction.num_averaged
        return BackwardPlan(
            weight=weights.factor(weight, num_ranks),
            share=total / weights.total if weights.total > 0 else None,
            divisor=divisor,
            active_ratio=weights.active_ratio,
        )

    def note_wait(self, since_s: float) -> None:
        """Count the time since then as waiting for other ranks. Local."""
        if self._setting.shares is not None:
            self._setting.shares.waited(time.perf_counter() - since_s)

"""`Balance`: moves samples from slow ranks to fast ones, by how long each worked; decides the same on all ranks.

Rules
1. Shares follow how long a rank worked for its samples of a step, not how long the step took: fast ranks wait.
2. Every rank is given every rank's numbers of the same step. So all decide alike, and nothing is exchanged afterwards.
3. The first steps, and the first one of another size, are not measured: they allocate memory and tune kernels.
4. Shares move only if that saves more of a step than the estimate may be wrong by. Steps with the present shares are
   measured before. The size of the global batch never changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.data.epoch_plan import StepCut
from paceline.data.global_batch import GlobalBatch
from paceline.errors import ConfigurationError
from paceline.observe.timings import tell
from paceline.planning import Proposal, Speed, SpeedEstimate, best_shares, makespan_s, propose

MOVES = ("samples", "micro-steps")
_LEAST_MEASURED = 3  # steps with the present shares
_KEPT_RATIO = 3, 4  # of a micro-batch that did not fit: what a rank is given from then on at most


@dataclass(frozen=True)
class StepWork:
    """The work of a rank in a step.

    Attributes:
        num_samples: Samples that it trained, or tokens where shares are of these; 0: none, or the time is unknown.
        seconds: Until its gradients were ready, without waiting for other ranks.
    """

    num_samples: int
    seconds: float


class Balance:
    """Decides how many samples each rank trains; what `balance="auto"` of `DistributedDataParallel` stands for.

    Limits: Every rank keeps at least one sample, or one micro-step. Samples are taken to need about the same time each.
    The first decision takes all of a step's time to be per sample; fixed time is known from the second on.

    Args:
        move: "samples": ranks get micro-batches of different size, as many for each. "micro-steps": ranks run
            different numbers of micro-batches of one size, for memory or normalisation. Small micro-batches make fine
            shares.
        gain_ratio: The fraction of a step that other shares must save; the noise of measurements is added to it.
        most: The largest micro-batch that a rank can hold: one number for all, or one a rank. Learnt where a rank
            runs out of memory.
        num_ignored: Steps at the beginning that are not measured.

    Contract:
        Local; on every rank with equal arguments and equal numbers. One object for each model.
    """

    def __init__(
        self,
        move: str = "samples",
        gain_ratio: float = 0.01,
        most: int | Sequence[int] | None = None,
        num_ignored: int = 2,
    ) -> None:
        if move not in MOVES:
            raise ConfigurationError(f"move={move!r}: give one of {', '.join(map(repr, MOVES))}.")
        if not 0 <= gain_ratio < 1 or num_ignored < 0:
            raise ConfigurationError(
                f"gain_ratio={gain_ratio}, num_ignored={num_ignored}: the first is a fraction of a step, from 0 to "
                "below 1; the second a number of steps."
            )
        limits = tuple(most) if isinstance(most, Sequence) else () if most is None else (most,)
        if isinstance(most, str) or not all(type(limit) is int and limit >= 1 for limit in limits):
            raise ConfigurationError(
                f"most={most!r}: the samples of a micro-batch that a rank can hold are a whole number from 1 on; one "
                "for all ranks, or one each."
            )
        self.move = move
        self.gain_ratio = gain_ratio
        self.num_ignored = num_ignored
        self._most = most
        self._limits: list[int | None] = []  # of each rank's micro-batch
        self._estimates: list[SpeedEstimate] = []
        self._last: list[int] = []  # samples of each rank's last step
        self._num_steps = 0
        self._num_measured = 0  # since the shares are what they are
        self._history: list[dict[str, Any]] = []
        self.tells = True  # in the log, when shares move; `DistributedDataParallel` lets rank 0 do it

    def __repr__(self) -> str:
        return f"Balance(move={self.move!r}, gain_ratio={self.gain_ratio}, most={self._most})"

    def begin(self, batch: GlobalBatch, tells: bool = True) -> None:
        """Make sure, before the first step, that these shares can be moved. If it `tells`, this rank logs decisions.

        Raises ConfigurationError if they cannot be moved, or if the limits are of another number of ranks.
        """
        self.tells = tells
        ranks = batch.num_ranks
        if isinstance(self._most, Sequence) and len(self._most) != ranks:
            raise ConfigurationError(
                f"most={self._most} is for {len(self._most)} ranks, {batch} has {ranks}. Give one number for all, or "
                "one for each rank."
            )
        self._limits = list(self._most) if isinstance(self._most, Sequence) else [self._most] * ranks
        if self.move == "micro-steps" and len(set(batch.local)) > 1:
            raise ConfigurationError(
                f"{batch}: micro-steps can be moved only if they have the same size on every rank. Give equal "
                'local sizes, or Balance(move="samples").'
            )
        if self.move == "samples" and isinstance(batch.accumulation, tuple):
            raise ConfigurationError(
                f"{batch}: samples can be moved only if every rank runs equally many micro-steps. Give one number "
                'as accumulation, or Balance(move="micro-steps").'
            )
        if batch.size < ranks * self._unit(batch):
            raise ConfigurationError(
                f"{batch} is not enough for every rank to have a part of it. Make it larger, or leave out balance."
            )
        self._check_limits(batch)
        self._measure_anew(ranks)

    def _measure_anew(self, num_ranks: int) -> None:
        self._estimates = [SpeedEstimate() for _ in range(num_ranks)]
        self._last = [0] * num_ranks
        self._num_steps = self._num_measured = 0

    def limit_of(self, rank: int) -> int | None:
        """Return how many samples a micro-batch of this rank can have, as far as that is known or was given."""
        return self._limits[rank] if rank < len(self._limits) else None

    def begin_again(self, batch: GlobalBatch, limits: Sequence[int | None], tells: bool) -> GlobalBatch:
        """Begin with other ranks: measure again, and return the shares that they begin with.

        The shares of `batch` may be more than some of them can hold. `limits` are the largest micro-batch of each rank.
        Raises ConfigurationError if together they cannot hold this batch.
        """
        self._limits, self.tells = list(limits), tells
        self._measure_anew(batch.num_ranks)
        if all(self._holds(batch, rank) for rank in range(batch.num_ranks)):
            return batch
        if self.move == "micro-steps":
            self._check_limits(batch)
        return self._batch(batch, self._fitting(batch))

    def _check_limits(self, batch: GlobalBatch) -> None:
        """Refuse first shares that do not fit; later ones are chosen so."""
        too_large = [rank for rank in range(batch.num_ranks) if not self._holds(batch, rank)]
        if not too_large:
            return
        rank = too_large[0]
        if self.move == "micro-steps":
            advice = 'Their size is fixed with move="micro-steps": make it smaller.'
        else:
            advice = f"Begin with {self._batch(batch, self._fitting(batch))}, for example."
        raise ConfigurationError(
            f"{batch} gives rank {rank} micro-batches of {batch.local[rank]} samples, where most={self._most} lets it "
            f"have {self._limits[rank]}. {advice}"
        )

    def _holds(self, batch: GlobalBatch, rank: int) -> bool:
        limit = self._limits[rank]
        return limit is None or batch.samples[rank] == 0 or batch.local[rank] <= limit

    # ---- a step

    def observe(self, batch: GlobalBatch, work: Sequence[StepWork]) -> GlobalBatch | None:
        """Take in each rank's work in a trained step. Return the shares of the next ones; None: as they are.

        The present shares, `batch`, may not have been in use in that step yet.
        """
        if not self._estimates:
            self.begin(batch)
        if not all(part.num_samples for part in work):
            return None
        self._num_steps += 1
        fits = all(self._holds(batch, rank) for rank in range(batch.num_ranks))
        if not fits:  # the script has changed the shares
            self._num_measured = 0
            if self.move == "micro-steps":
                self._check_limits(batch)
            new = self._batch(batch, self._fitting(batch))
            self._tell(f"{batch} is more than most={self._words(self._limits)} allows. Now {new}.")
            return new
        is_measured = self._num_steps > self.num_ignored
        for rank, part in enumerate(work):
            if is_measured and part.num_samples == self._last[rank]:
                self._estimates[rank].add(part.num_samples, part.seconds)
        is_settled = tuple(part.num_samples for part in work) == tuple(self._last) == batch.samples
        self._last = [part.num_samples for part in work]
        self._num_measured = self._num_measured + 1 if is_measured and is_settled else 0
        if self._num_measured < _LEAST_MEASURED or min(map(len, self._estimates)) < _LEAST_MEASURED:
            return None
        unit = self._unit(batch)
        most = self._most_samples(batch)
        proposal = propose(
            self._estimates, batch.samples, most, least=unit, unit=unit, gain_ratio=self.gain_ratio
        )
        if proposal.samples == batch.samples or not proposal.pays(self.gain_ratio):
            return None
        self._num_measured = 0
        self._note(proposal)
        return self._batch(batch, proposal.samples)

    def out_of_memory(self, batch: GlobalBatch, step: StepCut, ranks: Sequence[int]) -> GlobalBatch:
        """Lower the limits of ranks that could not hold their micro-batches of `step`; give the rest to the others.

        Raises ConfigurationError if the ranks together cannot hold the global batch, or micro-batches have one size.
        """
        if not self._estimates:
            self.begin(batch)
        tried = {rank: max(step.weights(rank), default=0) for rank in ranks}
        who = " and ".join(f"rank {rank} with {size} samples" for rank, size in tried.items())
        if self.move == "micro-steps":
            raise ConfigurationError(
                f"out of memory: {who} in a micro-step, whose size is fixed. Make it smaller, and run more of them."
            )
        for rank, size in tried.items():
            self._limits[rank] = size * _KEPT_RATIO[0] // _KEPT_RATIO[1]
        try:
            samples = self._fitting(batch)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"out of memory: {who} in a micro-step. No room is left for {batch}, with at most "
                f"{self._words(self._limits)} samples per rank. Run more micro-steps of fewer samples."
            ) from error
        self._num_measured = 0
        new = self._batch(batch, samples)
        self._history.append({"step": self._num_steps, "what": "out of memory", "ranks": list(tried)})
        self._tell(f"out of memory: {who} a micro-step. The same samples again, as {new}.")
        return new

    # ---- shares

    def _fitting(self, batch: GlobalBatch) -> tuple[int, ...]:
        unit = self._unit(batch)
        # Until all have been measured, in proportion to the present ones.
        speeds = [Speed(0.0, 1 / max(now, 1)) for now in batch.samples]
        if self._estimates and all(map(len, self._estimates)):
            speeds = [estimate.speed for estimate in self._estimates]
        return best_shares(speeds, batch.size, self._most_samples(batch), least=unit, unit=unit)

    def _unit(self, batch: GlobalBatch) -> int:
        return batch.local[0] if self.move == "micro-steps" else batch.num_micro_steps

    def _most_samples(self, batch: GlobalBatch) -> list[int]:
        per_micro_step = batch.size if self.move == "micro-steps" else batch.num_micro_steps
        return [batch.size if limit is None else limit * per_micro_step for limit in self._limits]

    def _batch(self, batch: GlobalBatch, samples: Sequence[int]) -> GlobalBatch:
        unit = self._unit(batch)
        parts = tuple(n // unit for n in samples)
        if self.move == "micro-steps":
            return GlobalBatch(batch.local, parts)
        return GlobalBatch(parts, batch.accumulation)

    # ---- what it did

    def _note(self, proposal: Proposal) -> None:
        speeds = [estimate.speed for estimate in self._estimates]
        total = sum(proposal.samples)
        typical = max(1, total // len(speeds))
        times = [speed.step_s(typical) for speed in speeds]
        slowest = max(range(len(times)), key=times.__getitem__)
        others = statistics.median(times[:slowest] + times[slowest + 1 :]) if len(times) > 1 else times[0]
        ratio = times[slowest] / others
        who = f"rank {slowest} is {ratio:.2g} times slower: " if ratio > 1.05 else ""
        shares = self._words([f"{100 * n / total:.0f} %" for n in proposal.samples])
        self._history.append(
            {
                "step": self._num_steps,
                "what": "moved",
                "samples": list(proposal.samples),
                "predicted_s": [proposal.now_s, proposal.then_s],
                "lower_bound_s": proposal.lower_bound_s,
            }
        )
        self._tell(
            f"{who}shares {shares}; step "
            f"{proposal.now_s * 1e3:,.4g} → {proposal.then_s * 1e3:,.4g} ms, ideal {proposal.lower_bound_s * 1e3:,.4g}"
        )

    @staticmethod
    def _words(each: Sequence[object]) -> str:
        return ", ".join(map(str, each[:8])) + (", ..." if len(each) > 8 else "")

    def _tell(self, message: str) -> None:
        if self.tells:
            tell("balance", f'balance="auto", step {self._num_steps}: {message}')

    def report(self, batch: GlobalBatch) -> dict[str, Any]:
        """Return what was learnt and done, as plain numbers, for JSON. Local; the same on every rank."""
        known = bool(self._estimates) and all(map(len, self._estimates))
        speeds = [estimate.speed for estimate in self._estimates] if known else []
        return {
            "samples": list(batch.samples),
            "fixed_s": [speed.fixed_s for speed in speeds],
            "sample_s": [speed.sample_s for speed in speeds],
            "predicted_s": makespan_s(speeds, batch.samples) if known else None,
            "limits": list(self._limits),
            "history": list(self._history),
        }

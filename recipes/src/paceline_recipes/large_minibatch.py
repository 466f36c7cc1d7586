"""`LargeMinibatch`: a learning rate scheduler that follows the global batch, by the recipe of Goyal et al.

Rules
1. Each group's reference rate is what is right for `reference_batch` samples a step. The peak rate is that times the
   scaling rule of (global batch / reference batch); the curve leads from one to the other and down again.
2. Time is counted in samples. So a change of the batch moves neither the warm-up's end nor a milestone of the decay. It
   changes the peak rate, from the next step on, and the number of steps that are left.
3. The global batch is learnt from the ranks, never assumed: local batch of each rank x micro-steps.
4. Whatever changes the batch is recorded, with the sample at which it happened, and can be forbidden. Shares that move
   within a batch of the same size change no rate, and need not be told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.comm import all_gather, device_for_metadata
from paceline.data import GlobalBatch
from paceline.errors import ConfigurationError
from paceline_recipes.learning_rate import Curve, rate_factor
from paceline_recipes.noise_scale import GradientNoiseScale
from paceline_recipes.recipe_report import facts_of, report_text


def world(process_group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group given, or the default one; None without one: this process is alone."""
    if process_group is not None:
        return process_group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


@dataclass(frozen=True)
class OwnPart:
    """One rank's batch and settings."""

    local: int  # its samples of a micro-step
    accumulation: int  # its micro-steps of a step
    settings: str  # its recipe as text; must be equal on all ranks
    problem: ConfigurationError | None = None  # why it cannot train by it

    def as_numbers(self) -> list[int]:
        """Return the numbers that ranks gather; a rank with a problem has no valid batch."""
        if self.problem is not None:
            return [0, 0, 0, 1]
        digest = hashlib.sha256(self.settings.encode()).digest()
        return [self.local, self.accumulation, int.from_bytes(digest[:8], "big", signed=True), 0]


def agree_on_batch(mine: OwnPart, process_group: ProcessGroup | None, device: torch.device) -> GlobalBatch:
    """Learn every rank's number of samples, compare recipes. Collective; blocks. ConfigurationError on all ranks."""
    group = world(process_group)
    ranks = [mine.as_numbers()]
    if group is not None and group.size() > 1:
        row = torch.tensor(mine.as_numbers(), dtype=torch.int64, device=device_for_metadata(group, device))
        rows = [torch.empty_like(row) for _ in range(group.size())]
        all_gather(rows, row, group).wait()
        ranks = [other.tolist() for other in rows]
    if mine.problem is not None:
        raise mine.problem
    for rank, (_, _, settings, has_problem) in enumerate(ranks):
        if has_problem:
            raise ConfigurationError(
                f"rank {rank} could not make its recipe, so none can: its own error says why. No rate was set."
            )
        if settings != ranks[0][2]:
            raise ConfigurationError(
                f"rank {rank} follows another recipe than rank 0 (this rank's: {mine.settings}). Build the recipe "
                "with the same rates and curve on every rank; only the local batch and its micro-steps may differ."
            )
    return GlobalBatch(tuple(row[0] for row in ranks), tuple(row[1] for row in ranks))


@dataclass(frozen=True)
class BatchChange:
    """A change of the global batch."""

    samples: int  # trained before
    batch: str  # from then on, in words
    factor: float  # of the reference rate, from then on


class LargeMinibatch(LRScheduler):
    """Sets the learning rate of every step from the global batch, by Goyal et al.'s recipe.

    One of torch's `LRScheduler`s: make it after the optimizer, whose groups' `lr` are the reference rates, and call
    `step()` after each `optimizer.step()`. It follows the world: a job that goes on with other ranks, or `update(...)`,
    re-derives the rate.

    For Adam and its kin `scaling="sqrt"` is the better guess (the linear rule is derived for SGD; `print(recipe)` says
    so, too). Do not hand it to a library that steps schedulers once a rank.

    Args:
        optimizer: Any torch optimizer with parameter groups.
        reference_batch: Samples of one step for which the optimizer's rates are right.
        batch: This rank's samples of one micro-step, which may differ between ranks; or the whole `GlobalBatch`, if it
            is known, for example of ranks that one process imitates: then nothing is communicated.
        accumulation: This rank's micro-steps of a step; a `GlobalBatch` has its own.
        curve: Warm-up, decay and total; in epochs if `epoch_samples` is given, otherwise in steps of the first batch.
        epoch_samples: Size of the training set.
        scaling: "linear", "sqrt" or "none".
        process_group: Over whom; None is the default group, or this process alone if there is none.
        fixed_world: Refuse another number of ranks or samples instead of following it. Shares may move.
        noise: The model's `GradientNoiseScale`, to be reported along.

    Contract:
        Collective, unless `batch` is a `GlobalBatch`: the constructor, `update`, and `step` after the number of ranks
        has changed. Otherwise local. Mutates: the groups' `lr`.

    Raises:
        ConfigurationError: Anything that cannot be trained so, before training starts; on every rank.

    Source:
        Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", sections 2 and 5.1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reference_batch: int,
        batch: int | GlobalBatch,
        curve: Curve,
        *,
        accumulation: int = 1,
        epoch_samples: int | None = None,
        scaling: str = "linear",
        process_group: ProcessGroup | None = None,
        fixed_world: bool = False,
        noise: GradientNoiseScale | None = None,
    ) -> None:
        self.reference_batch = reference_batch
        self.curve = curve
        self.epoch_samples = epoch_samples
        self.scaling = scaling
        self.fixed_world = fixed_world
        self.noise = noise
        self.samples = 0  # trained so far, over all ranks
        self.optimizer = optimizer  # the base sets it, too, but the ranks agree before it sets any rate
        self._process_group = process_group
        self._local: int | None = None  # this rank's, if the others are to be asked
        problem = self._find_problem(batch, accumulation)
        if isinstance(batch, GlobalBatch):
            if problem is not None:
                raise problem
            self.batch = batch
        else:
            self.batch = self._agree(batch, accumulation, problem)
            self._local = batch
        self.unit_samples = epoch_samples or self.batch.size  # samples of one unit of the curve's time
        self.changes = [BatchChange(0, str(self.batch), self.factor)]
        super().__init__(optimizer)

    def _find_problem(self, batch: object, accumulation: object) -> ConfigurationError | None:
        """Return the mistake that this rank sees by itself, if any; the others hear of it before it is raised."""
        try:
            rate_factor(self.scaling, 1, self.reference_batch)
            _check_rates(self.optimizer)
        except ConfigurationError as error:
            return error
        if isinstance(batch, GlobalBatch) and accumulation != 1:
            return ConfigurationError(
                f"accumulation={accumulation} was given with a GlobalBatch, which has its own "
                f"({batch.accumulation}). Leave it "
                "out."
            )
        if not isinstance(accumulation, int) or isinstance(accumulation, bool):
            return ConfigurationError(
                f"accumulation={accumulation!r} is not a number of micro-steps. Give 1, 2, 3, ..."
            )
        if not isinstance(batch, int | GlobalBatch) or isinstance(batch, bool):
            return ConfigurationError(
                f"batch={batch!r} is not a number of samples. Give this rank's samples of a micro-step, or a "
                "GlobalBatch."
            )
        if self.epoch_samples is not None and not 0 < self.epoch_samples < float("inf"):
            return ConfigurationError(
                f"epoch_samples={self.epoch_samples} is no size of a training set. Give len(dataset), or leave it out "
                "for a curve in steps."
            )
        return None

    def _agree(self, local: int, accumulation: int, problem: ConfigurationError | None = None) -> GlobalBatch:
        rates = [float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups]
        settings = (
            f"rates {rates}, reference batch {self.reference_batch}, {self.scaling} scaling, {self.curve}, "
            f"epoch of {self.epoch_samples}, fixed_world={self.fixed_world}"
        )
        device = self.optimizer.param_groups[0]["params"][0].device
        mine = OwnPart(local, accumulation, settings, problem)
        return agree_on_batch(mine, self._process_group, device)

    # ---- rates

    @property
    def factor(self) -> float:
        """Return the peak rate over the reference rate, for the present batch."""
        return rate_factor(self.scaling, self.batch.size, self.reference_batch)

    @property
    def time(self) -> float:
        """Return how far training is, in the curve's unit."""
        return self.samples / self.unit_samples

    @property
    def reference_rates(self) -> list[float]:
        """Return the reference rate of each parameter group."""
        return [float(base) for base in self.base_lrs]

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of the next step for each group; torch's name."""
        return [self.curve.rate(self.time, rate, rate * self.factor) for rate in self.reference_rates]

    def step(self, samples: int | None = None) -> None:
        """Count a step, and set the rate of the next one.

        Args:
            samples: Over all ranks, if they were not a whole batch, as at the end of an epoch.
        """
        if self._step_count > 0:  # not the base's call from its constructor
            self.samples += self.batch.size if samples is None else samples
            group = world(self._process_group)
            if self._local is not None and group is not None and group.size() != self.batch.num_ranks:
                self.update()
        super().step()

    # ---- another batch

    def update(self, batch: int | GlobalBatch | None = None, accumulation: int | None = None) -> None:
        """Tell that ranks, local batches or accumulation have changed: derive the rate again, from now on.

        Args:
            batch: As the constructor's; None: this rank's as before.
            accumulation: Micro-steps of a step; None: as before.

        Contract:
            Collective, unless the batch is a `GlobalBatch`.  Mutates: the groups' `lr`.

        Raises:
            ConfigurationError: `fixed_world` forbids it; nothing was changed.
        """
        if isinstance(batch, GlobalBatch):
            new = batch
        elif self._local is not None:
            local = self._local if batch is None else batch
            new = self._agree(local, self._own_micro_steps() if accumulation is None else accumulation)
        elif batch is None:
            new = GlobalBatch(
                self.batch.local, self.batch.accumulation if accumulation is None else accumulation
            )
        else:
            raise ConfigurationError(
                f"batch={batch} is one rank's, but this recipe was made with a GlobalBatch and asks no other rank. "
                "Give the whole GlobalBatch again."
            )
        self._check_may_become(self.batch, new)
        if isinstance(batch, int):
            self._local = batch
        if new != self.batch:
            self.batch = new
            self.changes.append(BatchChange(self.samples, str(new), self.factor))
        self._set_rates()

    def _own_micro_steps(self) -> int:
        group = world(self._process_group)
        rank = 0 if group is None else group.rank()
        return self.batch.micro_steps[min(rank, self.batch.num_ranks - 1)]  # a rank may be new

    def _check_may_become(self, before: GlobalBatch, after: GlobalBatch) -> None:
        only_shares_move = (before.num_ranks, before.size) == (after.num_ranks, after.size)
        if self.fixed_world and not only_shares_move:
            raise ConfigurationError(
                f"this recipe has a fixed world, but it was {before} and would become {after}. Go on with the same "
                "ranks, batches and accumulation, or make the recipe with fixed_world=False, which re-derives the rate."
            )

    def _set_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers: the same on every rank, so that one rank may save for all."""
        return {
            "samples": self.samples,
            "steps": self.last_epoch,
            "reference_rates": self.reference_rates,
            "reference_batch": self.reference_batch,
            "epoch_samples": self.epoch_samples,
            "unit_samples": self.unit_samples,
            "batch": self.batch.as_dict(),
            "changes": [asdict(change) for change in self.changes],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state, with the batch of *this* world: the rate is derived again if that is another one.

        Contract:
            Local.  Mutates: the groups' `lr`. Load the optimizer's state before.

        Raises:
            ConfigurationError: `fixed_world` and the batch was another one; or the curve counted other epochs. Nothing
                was changed.
        """
        if state_dict["epoch_samples"] != self.epoch_samples:
            raise ConfigurationError(
                f"the checkpoint's curve has epoch_samples={state_dict['epoch_samples']}, this recipe's "
                f"{self.epoch_samples}, so their times have different units. Go on with the training set that it was "
                "saved with."
            )
        if len(state_dict["reference_rates"]) != len(self.optimizer.param_groups):
            raise ConfigurationError(
                f"the checkpoint has the rates of {len(state_dict['reference_rates'])} parameter groups, this "
                f"optimizer has {len(self.optimizer.param_groups)}. Make the same groups."
            )
        before = GlobalBatch.from_dict(state_dict["batch"])
        self._check_may_become(before, self.batch)
        self.samples = int(state_dict["samples"])
        self.unit_samples = int(state_dict["unit_samples"])
        self.reference_batch = int(state_dict["reference_batch"])
        self.base_lrs = list(state_dict["reference_rates"])
        self.changes = [BatchChange(**change) for change in state_dict["changes"]]
        if before != self.batch:
            self.changes.append(BatchChange(self.samples, str(self.batch), self.factor))
        for group, rate in zip(self.optimizer.param_groups, self.reference_rates, strict=True):
            group["initial_lr"] = rate
        self.last_epoch = int(state_dict["steps"])
        self._step_count = self.last_epoch + 1
        self._set_rates()

    # ---- what it did

    def as_dict(self) -> dict[str, Any]:
        """Return what it derived from what, as plain numbers, for JSON. Local, the same on every rank."""
        return facts_of(self)

    def report(self) -> str:
        """Return the same in words, one fact a line; also `print(recipe)`."""
        return report_text(facts_of(self))

    __str__ = report


def _check_rates(optimizer: Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        rate = float(group["lr"])
        if not 0 < rate < float("inf"):
            raise ConfigurationError(
                f"parameter group {index} has lr={rate}: a reference rate must be positive. Give the optimizer the "
                "rate that is right for reference_batch samples per step."
            )

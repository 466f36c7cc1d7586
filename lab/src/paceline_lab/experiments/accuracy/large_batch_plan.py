"""Plan of the large-batch study: its training runs, their order, the rates they choose, and the tables.

Rules
1. One grid: every row tries the same multiples of its optimizer's middle rate.
2. Only validation accuracies choose a rate. Test accuracies are for the tables.
3. Rates race. Each gets one seed, and the best gets the others. If its average is then worse than another rate's, that
   one gets its seeds. So a rate that was lucky once is not chosen.
4. The reference rate is the best of the grid at the reference batch. "By the rule" is that rate, transferred by a row's
   rule and nothing else, as Goyal et al. claim. "Tuned" is the best of the grid in each cell.
5. A stage depends on the outcomes of those before it, so a study is asked for its next trials until there are none.
   Within a stage all cells get their first seed before any gets its second. So a study that was stopped is even.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.errors import ConfigurationError
from paceline_lab.experiments.accuracy.large_batch_rows import (
    BASELINE,
    BATCHES,
    CODEC_FACTOR,
    CODECS,
    LOCAL,
    ROWS,
    Row,
    choose_rows,
)
from paceline_lab.experiments.accuracy.store import Outcome, Store, Trial
from paceline_lab.experiments.accuracy.tasks import TASKS, Task
from paceline_lab.report.summary import Spread

GRID = (0.25, 0.5, 1.0, 2.0, 4.0)
CHOOSING_SEED = 0
MAX_FACTOR = 64
TUNED_FACTORS = (16, 32)  # where the rules begin to differ, and where Adasum has its rows


@dataclass(frozen=True)
class Cell:
    """A row at a global batch."""

    row: Row
    factor: int


@dataclass(frozen=True)
class Plan:
    """The trainings that the study is asked for.

    Attributes:
        task: The task that is trained.
        rows: Rows of the tables, the baseline among them.
        factors: Global batches, in reference batches.
        tuned_factors: Factors at which each row's rate is also tuned. If there are any, local steps' rates are tuned,
            too.
        num_seeds: Runs behind each mean.
        grid: Multiples of the middle rate.
    """

    task: Task
    rows: tuple[Row, ...]
    factors: tuple[int, ...]
    tuned_factors: tuple[int, ...]
    num_seeds: int
    grid: tuple[float, ...] = GRID

    def __post_init__(self) -> None:
        if self.num_seeds < 1:
            raise ConfigurationError(
                f"--seeds {self.num_seeds} measures nothing. Pass 5, or 4 at least for verdicts."
            )
        for factor in (*self.factors, *self.tuned_factors):
            if not 1 <= factor <= MAX_FACTOR or factor & (factor - 1):
                raise ConfigurationError(
                    f"--batches: {factor} is not possible. A batch is 1, 2, 4, ... or {MAX_FACTOR} times the reference "
                    f"batch of {self.task.rank_batch}, so that each sees the same samples in an epoch."
                )

        strays = set(self.tuned_factors) - set(self.factors)
        if strays:
            raise ConfigurationError(
                f"--tune: {min(strays)} must be one of the batches {', '.join(map(str, self.factors))}."
            )

    def cells(self, table: str) -> list[Cell]:
        """The cells of a table, its rows in order."""
        rows = [row for row in self.rows if row.table == table]
        if table != BATCHES:
            return [Cell(row, CODEC_FACTOR) for row in rows]
        return [
            Cell(row, factor)
            for row in rows
            for factor in ((1,) if row.name == BASELINE else self.factors)
            if (factor > 1 or row.name == BASELINE) and (not row.factors or factor in row.factors)
        ]

    def trial(self, cell: Cell, rate: float, seed: int) -> Trial:
        return Trial(
            self.task.name, cell.row.name, cell.factor, rate, seed, self.task.epochs, self.task.num_train
        )

    def rates(self, optimizer: str) -> list[float]:
        """The grid of an optimizer."""
        return [multiple * self.task.middle_rates[optimizer] for multiple in self.grid]

    def references(self) -> list[Cell]:
        """The cells in which each optimizer's reference rate is chosen."""
        names = {row.optimizer: BASELINE if row.optimizer == "sgd" else row.name for row in self.rows}
        return [Cell(ROWS[name], 1) for name in names.values()]

    def chosen(self, store: Store, cell: Cell) -> float | None:
        """The rate of the grid with the best mean validation accuracy in a cell, over the seeds that are there.

        None while a rate has none.
        """
        means = []
        for rate in self.rates(cell.row.optimizer):
            trials = [self.trial(cell, rate, seed) for seed in range(self.num_seeds)]
            accuracies = [outcome.validation for outcome in map(store.get, trials) if outcome is not None]
            if not accuracies:
                return None
            # Of equal ones the smaller rate: the further from divergence.
            means.append((statistics.fmean(accuracies), -rate))
        return -max(means)[1]

    def reference(self, store: Store, optimizer: str) -> float | None:
        """The reference rate of an optimizer; None while it is not known."""
        cell = next(cell for cell in self.references() if cell.row.optimizer == optimizer)
        return self.chosen(store, cell)

    def next_trials(self, store: Store) -> list[Trial]:
        """Return the missing trials that can be computed now: all of them, or those of the first incomplete stage."""
        for stage in self._stages():
            missing = [trial for trial in dict.fromkeys(stage(store)) if store.get(trial) is None]
            if missing:
                return missing
        return []

    def num_trials(self) -> int:
        """Return how many a complete study has, if no choice is revised and no tuned rate is the reference."""
        grids = len(self.grid) * len(self.references())
        cells = [cell for table in {row.table for row in self.rows} for cell in self.cells(table)]
        rest = len(self.grid) - 1 + self.num_seeds - 1
        return grids + len(cells) * self.num_seeds - 1 + len(self._tuned_cells()) * rest

    def num_there(self, store: Store) -> int:
        """Return how many of its trials the store has, of the stages that are known so far."""
        there: set[Trial] = set()
        for stage in self._stages():
            trials = set(stage(store))
            there |= {trial for trial in trials if store.get(trial) is not None}
            if not trials <= there:
                break
        return len(there)

    def _stages(self) -> tuple[Callable[[Store], Iterable[Trial]], ...]:
        return self._choose_references, self._by_the_rule, self._try_the_grid, self._tuned

    def _tuned_cells(self) -> list[Cell]:
        """Return the tuned cells. Local steps are among them: their best rate differs from that of single steps."""
        cells = [
            cell for cell in self.cells(BATCHES) if cell.factor in self.tuned_factors and cell.factor > 1
        ]
        return cells + (self.cells(LOCAL) if self.tuned_factors else [])

    def _choose_references(self, store: Store) -> Iterable[Trial]:
        for cell in self.references():
            yield from (self.trial(cell, rate, CHOOSING_SEED) for rate in self.rates(cell.row.optimizer))

    def _by_the_rule(self, store: Store) -> Iterable[Trial]:
        tables = dict.fromkeys(row.table for row in self.rows)
        cells = [cell for table in tables for cell in self.cells(table)]
        for seed, cell in itertools.product(range(self.num_seeds), cells):
            rate = self.reference(store, cell.row.optimizer)
            assert rate is not None
            yield self.trial(cell, rate, seed)

    def _try_the_grid(self, store: Store) -> Iterable[Trial]:
        for cell in self._tuned_cells():
            yield from (self.trial(cell, rate, CHOOSING_SEED) for rate in self.rates(cell.row.optimizer))

    def _tuned(self, store: Store) -> Iterable[Trial]:
        for seed, cell in itertools.product(range(self.num_seeds), self._tuned_cells()):
            rate = self.chosen(store, cell)
            assert rate is not None
            yield self.trial(cell, rate, seed)


def quick_plan() -> Plan:
    """Return a plan of some seconds, for tests."""
    rows = choose_rows(["unscaled", "linear", "gradual warm-up"])
    return Plan(TASKS["digits"], tuple(rows), factors=(16,), tuned_factors=(), num_seeds=4, grid=(1.0,))


RULE, TUNED = "by the rule", "tuned"


@dataclass(frozen=True)
class Results:
    """A plan and what the store has of it, complete or not: test accuracies by the rule and tuned."""

    plan: Plan
    store: Store

    def rate(self, cell: Cell, mode: str) -> float | None:
        """The reference rate of a cell, if it is known."""
        if mode == RULE:
            return self.plan.reference(self.store, cell.row.optimizer)
        return self.plan.chosen(self.store, cell)

    def outcomes(self, cell: Cell, mode: str) -> list[Outcome]:
        """Return the stored outcomes of the plan's seeds, in order."""
        rate = self.rate(cell, mode)
        if rate is None:
            return []
        trials = [self.plan.trial(cell, rate, seed) for seed in range(self.plan.num_seeds)]
        return [outcome for outcome in map(self.store.get, trials) if outcome is not None]

    def spread(self, cell: Cell, mode: str = RULE) -> Spread | None:
        """Test accuracies in percent; None where there is none."""
        outcomes = self.outcomes(cell, mode)
        return Spread(tuple(100 * outcome.test for outcome in outcomes)) if outcomes else None

    def sent_bytes(self, cell: Cell) -> float:
        """Return the mean of the bytes that each rank sends per step."""
        return self.outcomes(cell, RULE)[0].sent_bytes

    def used(self) -> list[tuple[Trial, Outcome]]:
        """All trials of the plan's task that the store has, in the order in which they were finished."""
        return [
            (trial, outcome) for trial, outcome in self.store.items() if trial.task == self.plan.task.name
        ]

    def baseline(self) -> Spread | None:
        return self.spread(Cell(ROWS[BASELINE], 1))

    def batch_table(self, mode: str) -> tuple[list[str], list[list[str]]]:
        """Columns and rows: accuracy by row and global batch."""
        factors = self.plan.factors if mode == RULE else self.plan.tuned_factors
        factors = tuple(factor for factor in factors if factor > 1)
        columns = [mode, *(f"x{factor} ({factor * self.plan.task.rank_batch})" for factor in factors)]
        rows = []
        for row in self.plan.rows:
            if row.table == BATCHES and row.name != BASELINE:
                cells = [Cell(row, factor) for factor in factors]
                texts = [self._text(cell, mode) for cell in cells]
                if any(texts):
                    rows.append([row.name, *texts])
        return columns, rows

    def _text(self, cell: Cell, mode: str) -> str:
        spread = self.spread(cell, mode)
        if spread is None:
            return ""
        return f"{spread}" if mode == RULE else f"{spread} at {self.rate(cell, mode):g}"

    def message_table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows: accuracy and bytes of each codec and each number of local steps."""
        rows, first = [], None
        for row in self.plan.rows:
            cell = Cell(row, CODEC_FACTOR)
            spread = self.spread(cell) if row.table in (CODECS, LOCAL) else None
            if spread is None:
                continue
            sent = self.sent_bytes(cell)
            first = sent if first is None else first
            tuned = self._text(cell, TUNED) if row.table == LOCAL else ""
            rows.append([row.name, f"{spread}", tuned, f"{sent / 1e3:,.1f}", f"{sent / first:.4f}"])
        columns = [f"{CODEC_FACTOR} ranks", RULE, TUNED, "kB sent by a rank a step", "relative"]
        return columns, rows

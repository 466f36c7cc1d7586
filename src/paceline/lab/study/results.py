"""What a store says about a plan: test accuracies behind each cell, by the rule and tuned."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.lab.report.summary import Spread
from paceline.lab.study.plan import Cell, Plan
from paceline.lab.study.rows import BASELINE, BATCHES, CODEC_FACTOR, CODECS, LOCAL, ROWS
from paceline.lab.study.store import Outcome, Store, Trial

RULE, TUNED = "by the rule", "tuned"


@dataclass(frozen=True)
class Results:
    """A plan and what is known of it, complete or not."""

    plan: Plan
    store: Store

    def rate(self, cell: Cell, mode: str) -> float | None:
        """The reference rate of a cell, if it is known."""
        if mode == RULE:
            return self.plan.reference(self.store, cell.row.optimizer)
        return self.plan.chosen(self.store, cell)

    def outcomes(self, cell: Cell, mode: str) -> list[Outcome]:
        """Those of the plan's seeds that are there, in order."""
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
        """What each rank sends for a step, on average."""
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

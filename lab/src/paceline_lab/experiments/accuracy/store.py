"""Finished trials, a line of JSON each: what is there is not computed again."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from paceline.errors import ConfigurationError
from paceline.given import parse_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AnyTrial = TypeVar("AnyTrial", bound="DataclassInstance")
AnyOutcome = TypeVar("AnyOutcome", bound="DataclassInstance")


@dataclass(frozen=True)
class Trial:
    """Everything that one training run depends on.

    Attributes:
        task: Name of the task.
        row: Name of the row.
        factor: Global batch over reference batch; also the number of ranks.
        rate: The reference rate; the row makes more of it.
        seed: Seed of the initial parameters, the order of the samples and a codec's random numbers.
        epochs: Number of epochs.
        num_train: Size of the training set.
    """

    task: str
    row: str
    factor: int
    rate: float
    seed: int
    epochs: int
    num_train: int


@dataclass(frozen=True)
class Outcome:
    """The result of one training run.

    Attributes:
        validation: Accuracy, 0 to 1; rates are chosen by it.
        test: Accuracy, 0 to 1; only reported.
        loss: Mean training loss over the last tenth of the steps; None where it is not finite.
        sent_bytes: Mean of the bytes that a rank sends per step.
        wall_s: Duration of the run.
    """

    validation: float
    test: float
    loss: float | None
    sent_bytes: float
    wall_s: float


_BEGIN = '{"trial": '  # of every line


class TrialStore(Generic[AnyTrial, AnyOutcome]):
    """A file of finished trials.

    Args:
        path: Made when the first trial is added. A last line that a stop cut off is dropped.
        trial: A frozen record of everything that a training run depends on.
        outcome: A record of what it came to.

    Raises:
        ConfigurationError: The file is something else.
    """

    def __init__(self, path: Path, trial: type[AnyTrial], outcome: type[AnyOutcome]) -> None:
        self.path = path
        self._trial, self._outcome = trial, outcome
        self._outcomes: dict[AnyTrial, AnyOutcome] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            lines = self.path.read_text().splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"{self.path} is no file of trials ({type(error).__name__}). Pass another file with --store."
            ) from error
        is_cut = bool(lines) and not lines[-1].endswith("\n") and _BEGIN.startswith(lines[-1][: len(_BEGIN)])
        cut = lines.pop() if is_cut else ""
        for number, line in enumerate(lines, 1):
            try:
                record = parse_json(line)
                self._outcomes[self._trial(**record["trial"])] = self._outcome(**record["outcome"])
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigurationError(
                    f"line {number} of {self.path} is not a trial of this version of the study ({error!r}). Pass "
                    "another file with --store."
                ) from error

        if cut:  # only now: what is no file of trials stays as it is
            with self.path.open("r+") as stream:
                stream.truncate(sum(len(line.encode()) for line in lines))

    def get(self, trial: AnyTrial) -> AnyOutcome | None:
        return self._outcomes.get(trial)

    def items(self) -> list[tuple[AnyTrial, AnyOutcome]]:
        """All of them, in the order in which they were finished."""
        return list(self._outcomes.items())

    def add(self, trial: AnyTrial, outcome: AnyOutcome) -> None:
        """Keep an outcome; it is on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as stream:
            stream.write(json.dumps({"trial": asdict(trial), "outcome": asdict(outcome)}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._outcomes[trial] = outcome

    def __len__(self) -> int:
        return len(self._outcomes)


class Store(TrialStore[Trial, Outcome]):
    """A file of the large-batch study's trials; `path` as above."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Trial, Outcome)

    @classmethod
    def holding(cls, outcomes: Iterable[tuple[Trial, Outcome]]) -> Store:
        """Return a store of these trials without a file, to which none can be added."""
        store = cls(Path(os.devnull))
        store._outcomes = dict(outcomes)
        return store


def complete(
    store: TrialStore[AnyTrial, AnyOutcome],
    missing: Callable[[], Sequence[AnyTrial]],
    run: Callable[[AnyTrial], AnyOutcome],
    num_workers: int,
) -> None:
    """Run trials in processes of their own until none is missing; each is stored as soon as it is finished.

    Args:
        store: Gets the outcomes.
        missing: Returns the trials that can be run now; called again when all of them are stored.
        run: Can be pickled.
        num_workers: Trials at once.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as workers:
        while trials := missing():
            running = {workers.submit(run, trial): trial for trial in trials}
            try:
                for done in as_completed(running):
                    store.add(running[done], done.result())
            except BaseException:
                workers.shutdown(wait=False, cancel_futures=True)
                raise

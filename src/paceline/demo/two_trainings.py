"""The demo from its settings to its result: check, train over ranks and in one process, compare, write the report."""

from __future__ import annotations

import importlib.util
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from paceline.demo.comparison import Training, difference, epoch_losses, rows, write_figures
from paceline.demo.demo_training import Job
from paceline.demo.progress_pipe import Inbox, Message, Progress, RankOutcome
from paceline.demo.screen import Screen
from paceline.errors import ConfigurationError, PacelineError
from paceline.launch import Keeper, launch, num_cores, parse
from paceline_lab.report import ReportFolder
from paceline_lab.workloads.datasets import Images, load_images

BATCH_PER_RANK = 64
MAX_RANKS_PER_CORE = 4


class PromiseBrokenError(PacelineError, RuntimeError):
    """The demo's trainings differ by more than rounding: a defect of Paceline, or of the machine."""


@dataclass(frozen=True)
class DemoSettings:
    """What to train.

    Attributes:
        data: `digits`, `fashion-mnist` or a folder.
        ranks: Worker processes of the first training.
        epochs: How often to see the training set.
        seed: Of the initial parameters and the order of the samples.
        dtype: `float64` shows the promise without float32's amplified rounding.
        report: Folder for figures and rows.
    """

    data: str
    ranks: int
    epochs: int
    seed: int
    dtype: str
    report: Path

    def __post_init__(self) -> None:
        most = MAX_RANKS_PER_CORE * num_cores()
        if self.ranks < 1:
            raise ConfigurationError(
                f"--ranks {self.ranks} trains nothing. Pass 1 or more; 2 is a good start."
            )
        if self.ranks > most:
            raise ConfigurationError(
                f"--ranks {self.ranks} is too many for this machine: a rank is a whole process that wants a core, "
                f"and there are {num_cores()}. The demo takes at most {most} ({MAX_RANKS_PER_CORE} a core)."
            )
        if self.epochs < 1:
            raise ConfigurationError(f"--epochs {self.epochs} trains nothing. Pass 1 or more.")
        if not 0 <= self.seed < 2**63:
            raise ConfigurationError(
                f"--seed {self.seed} is not possible. Pass a number from 0 to 2**63 - 1."
            )
        if self.dtype not in ("float32", "float64"):
            raise ConfigurationError(
                f"--dtype {self.dtype} is neither float32 nor float64. Pass one of them."
            )

    @property
    def global_batch(self) -> int:
        return BATCH_PER_RANK * self.ranks


def run_demo(settings: DemoSettings, screen: Screen) -> dict[str, object]:
    """Train twice, show it, write the report; returns the rows that the report holds.

    Raises:
        ConfigurationError: Something asked for is not possible; nothing was trained.
        LaunchError: A rank failed.
        PromiseBrokenError: The results differ; the report was written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "the report's figures need matplotlib, which is not installed. pip install 'paceline[demo]'."
        )
    images = load_images(settings.data)
    _check_amount(images, settings)
    folder = ReportFolder.prepare(settings.report)
    with Keeper(uuid.uuid4().hex) as keeper:  # removes the folder even if we are killed
        scratch = keeper.folder
        images.save(scratch / "images.npz")
        screen.begin(images, settings.ranks, settings.epochs, settings.global_batch, settings.dtype)
        # Both trainings get the same number of threads a process, so that a process is compared with a process.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // settings.ranks)))
        parallel = _train(settings, scratch, settings.ranks, screen)
        single = _train(settings, scratch, None, screen)
        apart = difference(parallel.parameters, single.parameters, settings.dtype)
    result = rows(settings, images.name, parallel, single, apart)
    folder.write_rows("rows.json", result)
    figures = write_figures(folder, parallel, single, settings.dtype)
    screen.end(parallel, single, apart, [*figures, folder.path / "rows.json"])
    if not (parallel.ranks_agree and apart.is_rounding):
        raise PromiseBrokenError(
            f"the promise is broken: the ranks {'agree' if parallel.ranks_agree else 'do not agree bitwise'}, and the "
            f"largest difference to one process is {apart.largest:.3g} in {apart.parameter}, of parameters up to "
            f"{apart.scale:.3g}. Please report this with {folder.path / 'rows.json'}."
        )
    return result


def _check_amount(images: Images, settings: DemoSettings) -> None:
    if len(images.train_labels) < settings.global_batch or not len(images.test_labels):
        raise ConfigurationError(
            f"{images.name} has {len(images.train_labels)} training and {len(images.test_labels)} test images; a "
            f"step of {settings.ranks} ranks takes {settings.global_batch}. Pass fewer --ranks, or more images."
        )
    if images.side < 4:
        raise ConfigurationError(
            f"{images.name} has images of {images.side} pixels a side; the demo needs 4 or more."
        )


def _train(settings: DemoSettings, scratch: Path, ranks: int | None, screen: Screen) -> Training:
    """Train over `ranks` processes; None is one process without DistributedDataParallel."""
    num_ranks = ranks or 1
    label = "parallel" if ranks else "single"
    name = f"{num_ranks} processes" if num_ranks > 1 else ("1 process, wrapped" if ranks else "1 process")
    job = Job(
        images=str(scratch / "images.npz"),
        pipe=str(scratch / f"{label}.pipe"),
        parameters=str(scratch / f"{label}.npz"),
        epochs=settings.epochs,
        global_batch=settings.global_batch,
        seed=settings.seed,
        dtype=settings.dtype,
        wrapped=ranks is not None,
    )
    job_file = scratch / f"{label}.json"
    job.save(job_file)
    progress: list[Progress] = []
    outcomes: list[RankOutcome] = []

    def receive(message: Message) -> None:
        if isinstance(message, Progress):
            progress.append(message)
            screen.update(message)
        else:
            outcomes.append(message)

    started_s = time.perf_counter()
    with screen.training(name, num_ranks, settings.epochs), Inbox(Path(job.pipe), receive):
        arguments = ["--standalone", "--nproc-per-node", str(num_ranks), "--share-devices"]
        launch(parse([*arguments, "-m", "paceline.demo.demo_training", str(job_file)]), note=screen.note)
    return Training(
        name=name,
        losses=epoch_losses(progress),
        outcomes=tuple(sorted(outcomes, key=lambda outcome: outcome.rank)),
        parameters=Path(job.parameters),
        wall_s=time.perf_counter() - started_s,
    )

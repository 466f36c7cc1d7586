"""The forecast that a user asked for: a sentence, a table, notes, a figure, JSON, and lines to be scored later."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.errors import ConfigurationError
from paceline.quantities import ms
from paceline_plan.deployment import Cluster
from paceline_plan.lemmas import LemmasBeside
from paceline_plan.links_here import measure_link
from paceline_plan.request import PlanRequest
from paceline_plan.scaling import BUSY_RATIO, Answer, Question, doubling_counts, predict_scaling, quantiles
from paceline_plan.workload import RecordedWorkload

PREDICTIONS = "predictions.jsonl"
_NAME = "plan"
_COLOR, _QUIET_COLOR = "#0072b2", "#999999"


@dataclass(frozen=True)
class KeptPrediction:
    """A prediction that is kept, to be scored."""

    workload: str  # its name
    num_ranks: int  # of the cluster
    kind: str  # of prediction, for the score: see `kind_of`
    step_s: float  # predicted
    low_s: float  # of the band
    high_s: float  # of the band
    where: str  # the cluster and the plan, in words
    ranks_of_host: Sequence[int]  # how many ranks each host has
    num_micro_steps: int = 1  # of a step


def forecast(request: PlanRequest, folder: Path, *, as_json: bool) -> None:
    """Predict, show, draw, and keep. Raises ConfigurationError if something asked for is not possible.

    Under a launcher of several ranks: collective until their link is measured; then rank 0 goes on, the others return.
    """
    _prepare(folder)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        rank, link_here = measure_link()
        if rank:
            return  # it was needed for that alone
        request = dataclasses.replace(request, link_here=link_here)
    workload = request.workload()
    plan = request.plan(workload.num_micro_steps)
    counts = doubling_counts(request.to)
    question = Question(workload, request.cluster, plan, counts, request.epoch_samples, request.price)
    with progress_bar(f"simulating {workload.name} on up to {request.to} devices") as tell:
        answer = predict_scaling(question, tell)
    lemmas = LemmasBeside.of(question) if request.servers else None
    _keep(folder, question, answer)
    path = folder / _NAME
    is_drawn = request.to > 1 and draw_figure(path.with_suffix(".png"), workload, answer)
    record = json.dumps(_record(request, question, answer, lemmas), indent=1)
    path.with_suffix(".json").write_text(record + "\n")
    if as_json:
        print(record)
        return
    console = Console(width=max(Console().width, 130))
    console.print(sentence(question, answer), highlight=False, soft_wrap=True)
    console.print(predicted_table(question, answer))
    for note in (
        *what_would_help(answer),
        request.link_words(),
        *notes(question, request.assumptions(workload.num_micro_steps)),
        *(lemmas.words() if lemmas else []),
        f"numbers: {path}.json" + (f", figure {path}.png" if is_drawn else ""),
    ):
        console.print(note, highlight=False, soft_wrap=True)


def _prepare(folder: Path) -> None:
    """Make the report's folder, before the work whose result it is to hold."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the report folder {folder} cannot be made ({error.strerror}). Pass another one with --report."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"the report folder {folder} is not writable. Pass another one with --report."
        )


def _keep(folder: Path, question: Question, answer: Answer) -> None:
    records = []
    for point in answer.points:
        cluster = question.grow(point.num_ranks)
        where = f"{cluster.describe()}; {question.plan.describe()}"
        records.append(
            KeptPrediction(
                question.workload.name,
                point.num_ranks,
                kind_of(cluster),
                point.step_s,
                point.low_s,
                point.high_s,
                where,
                cluster.ranks_of_host,
                question.plan.sync_every,
            )
        )
    keep(folder / PREDICTIONS, records)


def kind_of(cluster: Cluster) -> str:
    """Return the kind of a cluster, by which scores are grouped."""
    if cluster.num_ranks == 1:
        return "one rank"
    return "one host" if cluster.num_hosts == 1 else "several hosts"


def keep(path: Path, records: Iterable[Any]) -> None:
    """Append records (dataclasses) to the file, behind a line that was cut off. Raises ConfigurationError."""
    lines = [
        json.dumps({"record": type(record).__name__, **dataclasses.asdict(record)}) for record in records
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            text = "".join(f"{line}\n" for line in lines)
            if file.tell() and not _ends_a_line(file):
                text = f"\n{text}"
            file.write(text.encode())
    except OSError as error:
        raise ConfigurationError(
            f"predictions cannot be kept in {path} ({error.strerror}). Pass another folder with --report."
        ) from error


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _record(
    request: PlanRequest, question: Question, answer: Answer, lemmas: LemmasBeside | None
) -> dict[str, Any]:
    return {
        "name": question.workload.name,
        "sentence": sentence(question, answer),
        "request": dataclasses.asdict(request),
        "assumed": request.assumptions(question.workload.num_micro_steps),
        "links": request.links(),
        "workload": question.workload.source,
        "gradient_bytes": question.workload.gradient_bytes,
        "plan": question.plan.describe(),
        "knee": answer.knee,
        "points": [dataclasses.asdict(point) for point in answer.points],
        "lemmas": None if lemmas is None else dataclasses.asdict(lemmas),
    }


def sentence(question: Question, answer: Answer) -> str:
    """Return the answer in one sentence."""
    last = answer.points[-1]
    words = f"{question.workload.name} on {_devices(last.num_ranks)}: {ms(last.step_s)} a step"
    if question.plan.sync_every > 1:
        words += f" of {question.plan.sync_every} micro-steps"
    if last.num_ranks == 1:
        return f"{words}; one rank: nothing to overlap, nothing to wait for."
    words += (
        f" ({ms(last.low_s)} to {ms(last.high_s)}), efficiency {last.efficiency:.0%}, {last.speed_up:.3g} times "
        f"one device; limited by {last.limit}"
    )
    if last.savings:
        words += f"; {last.savings[0].what} would save {last.savings[0].ratio:.0%}"
    if answer.knee < last.num_ranks:
        words += f"; beyond {_devices(answer.knee)} a device added brings less than half of what the first one does"
    return words + "."


def predicted_table(question: Question, answer: Answer) -> Table:
    """Return a table with a row for every number of devices."""
    has_rate = answer.points[0].samples_per_s is not None
    has_epoch, has_cost = answer.points[0].epoch_s is not None, answer.points[0].epoch_cost is not None
    columns = ["devices", "hosts", "step", "80 % band", "efficiency", "times one"]
    columns += ["samples/s"] * has_rate + ["epoch"] * has_epoch + ["cost"] * has_cost
    rows = []
    for point in answer.points:
        mark = " <- knee" if point.num_ranks == answer.knee != answer.points[-1].num_ranks else ""
        row = [
            f"{point.num_ranks}{mark}",
            str(question.grow(point.num_ranks).num_hosts),
            ms(point.step_s),
            f"{ms(point.low_s)} to {ms(point.high_s)}",
        ]
        row += [f"{point.efficiency:.0%}", f"{point.speed_up:.3g}"]
        row += [f"{point.samples_per_s:,.0f}"] if point.samples_per_s is not None else []
        row += [_duration(point.epoch_s)] if point.epoch_s is not None else []
        row += [f"{point.epoch_cost:,.2f}"] if point.epoch_cost is not None else []
        rows.append((*row, point.limit))
    return table(f"Predicted: {question.plan.describe()}", (*columns, "limited by"), rows)


def what_would_help(answer: Answer) -> list[str]:
    """Return what would help at the knee and at the end."""
    points = {point.num_ranks: point for point in answer.points if point.savings}
    wanted = dict.fromkeys((answer.knee, answer.points[-1].num_ranks))
    return [
        f"would help on {_devices(number)}: "
        + ", ".join(f"{saving.what} ({saving.ratio:.0%})" for saving in points[number].savings)
        for number in wanted
        if number in points
    ]


def notes(question: Question, assumed: str) -> list[str]:
    """Return notes: what was measured, what was assumed, what could not be said, and what the band is."""
    workload = question.workload
    what = (
        f"workload: {workload.source}; {workload.gradient_bytes / 1e6:,.1f} MB of gradients in "
        f"{len(workload.layers)} layers, forward {ms(workload.forward_s)}, backward {ms(workload.backward_s)}, "
        f"optimizer {ms(workload.optimizer_s)}, between steps {ms(workload.other_s)}"
    )
    if workload.num_micro_steps > 1:
        what += f"; a step had {workload.num_micro_steps} such micro-steps"
    band = (
        "the band: links at 0.75 to 1.1 of their rate, latencies at half to twice, other recorded steps, the "
        "model's own error on emulated clusters. A device is taken to be as fast as the one that was recorded"
    )
    varied = ""
    if workload.relative_steps:
        low, high = quantiles(workload.relative_steps)
        varied = f"recorded steps vary: 80 % of them are {low:.2f} to {high:.2f} of the median"
        if high > BUSY_RATIO:
            varied += ". If the machine did other work meanwhile, record again without it"
    missing = "no epoch is shown: the workload does not say how many samples are in a step. Pass --batch"
    needs_batch = question.epoch_samples is not None and workload.samples_per_step is None
    said = [f"assumed, as not given: {assumed}"] * bool(assumed)
    return [what, *[varied] * bool(varied), *said, *[missing] * needs_batch, band]


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose first column names the row and whose other columns are numbers."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left")
    for row in rows:
        made.add_row(*row)
    return made


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float], None]]:
    """Draw a bar on stderr; yields a function that takes the share done, 0 to 1."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda done_ratio: bar.update(task, completed=done_ratio)


def draw_figure(path: Path, workload: RecordedWorkload, answer: Answer) -> bool:
    """Draw throughput with its band, and the step; returns False, and draws nothing, without matplotlib."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  only this needs it
    except ImportError:
        return False
    points, alone_s = answer.points, answer.points[0].step_s
    devices = [point.num_ranks for point in points]
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    figure.suptitle(f"{workload.name}, predicted ({workload.source})", fontsize=10)
    throughput, step = figure.subplots(1, 2)
    throughput.plot(devices, devices, color="lightgray", label="linear")
    throughput.plot(devices, [x.speed_up for x in points], "o-", color=_COLOR, label="predicted")
    low = [x.num_ranks * alone_s / x.high_s for x in points]
    high = [x.num_ranks * alone_s / x.low_s for x in points]
    throughput.fill_between(devices, low, high, color=_COLOR, alpha=0.2, label="80 % band")
    throughput.axvline(answer.knee, color=_QUIET_COLOR, linestyle=":", label="knee")
    throughput.set(title="throughput", ylabel="times one device")
    step.plot(devices, [1e3 * x.step_s for x in points], "o-", color=_COLOR, label="step")
    hidden = [1e3 * (x.step_s - x.exposed_s) for x in points]
    step.plot(devices, hidden, "--", color=_QUIET_COLOR, label="without exposed communication")
    step.set(title="a step", ylabel="ms", ylim=(0, None))
    for axes in (throughput, step):
        axes.set_xscale("log", base=2)
        axes.set_xticks(devices, [str(each) for each in devices])
        axes.set_xlabel("devices")
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    return True


def _devices(number: int) -> str:
    return f"{number} device{'s' * (number != 1)}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"

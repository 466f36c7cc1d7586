"""From what the user asked to predictions: one sentence, one table, one figure, JSON, and a line to be scored later."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.errors import ConfigurationError
from paceline.lab.emulation import quantities
from paceline.lab.planner.scoring import PREDICTIONS
from paceline.lab.planner.script_recording import DEFAULT_STEPS, record_script
from paceline.lab.report.figures import draw_figure
from paceline.lab.report.look import COMMUNICATION, OURS, PAPER
from paceline.lab.report.panels import Line, Lines, Panel
from paceline.lab.report.publication import ReportFolder
from paceline.lab.report.terminal import progress_bar, table
from paceline.planning import Cluster, HostLink, Plan, Servers, Workload
from paceline.planning.lemmas import (
    ServerAnswers,
    compare_efficiency,
    compare_servers,
)
from paceline.planning.predictions import KeptPrediction, keep, kind_of
from paceline.planning.round_patterns import ALL_REDUCES
from paceline.planning.scaling import Answer, Question, doubling_counts, predict_scaling
from paceline.planning.training_plan import DEFAULT_CAPS_BYTES, MEBIBYTE
from paceline.schedules.topology import Link

_RANKS_PER_HOST = 8
ASSUMED = {"rate": "25Gbit", "latency": "30us", "ranks_per_host": str(_RANKS_PER_HOST), "within": "800Gbit"}
_COLLECTIVE_S = 3e-5  # of a library, for one collective; NCCL's launches are of that order
_MESSAGE_S = 5e-6  # of a further message in a round
_NAME = "plan"


@dataclass(frozen=True)
class Asked:
    """What the command line says; None: not said, so `ASSUMED`.

    Attributes:
        source: A script, a file with a workload or a trace, or the name of a shipped workload.
        arguments: Of the script.
        to: The largest number of devices.
        steps: To record.
        ranks_per_host: Devices a host.
        rate: Of each host's link, in words.
        latency: Of a round between hosts, in words.
        within: Rate within a host, all its devices together, in words.
        loss: Of packets, in words.
        bucket_cap_mb: None: torch's default, 1 and then 25 MiB.
        algorithm: Of the all-reduce.
        half: Gradients travel in 16 bits.
        sync_every: Micro-steps a synchronization.
        servers: Parameter servers; 0: an all-reduce.
        server_rate: Of each server's link, in words; None: as the hosts'.
        batch: Samples a device and step; None: as recorded.
        epoch_samples: None: epochs are not asked for.
        price: Of a device and hour.
    """

    source: str
    arguments: tuple[str, ...] = ()
    to: int = 256
    steps: int = DEFAULT_STEPS
    ranks_per_host: int | None = None
    rate: str | None = None
    latency: str | None = None
    within: str | None = None
    loss: str | None = None
    bucket_cap_mb: float | None = None
    algorithm: str = "ring"
    half: bool = False
    sync_every: int = 1
    servers: int = 0
    server_rate: str | None = None
    batch: int | None = None
    epoch_samples: int | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        if self.to < 1:
            raise ConfigurationError(f"--to {self.to} cannot be: a prediction is for 1 device or more.")
        for option in ("ranks_per_host", "batch", "epoch_samples"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigurationError(f"--{option.replace('_', '-')} {value} cannot be. Pass 1 or more.")
        if self.servers < 0:
            raise ConfigurationError(
                f"--servers {self.servers} cannot be. Pass 1 or more, or 0 for an all-reduce."
            )
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ConfigurationError(f"--price {self.price} cannot be. Pass the price of a device and hour.")
        cap = self.bucket_cap_mb
        if cap is not None and not cap >= 0:
            raise ConfigurationError(f"--bucket-cap-mb {cap} cannot be. Pass MiB, 0 or more.")
        if self.algorithm not in ("auto", *ALL_REDUCES):
            raise ConfigurationError(
                f"--algorithm {self.algorithm} is not one. Pass auto, or one of {', '.join(ALL_REDUCES)}."
            )
        self.plan()
        self.cluster(self.to)

    def cluster(self, num_ranks: int) -> Cluster:
        """The cluster of so many devices."""
        link = HostLink(
            self._rate("rate"),
            quantities.seconds(self.latency or ASSUMED["latency"], "--latency"),
            0.0 if self.loss is None else quantities.percentage(self.loss, "--loss"),
            _MESSAGE_S,
        )
        within = Link(5e-6, self._rate("within"))
        per_host = self.ranks_per_host or _RANKS_PER_HOST
        made = Cluster.of_equal_hosts(num_ranks, link, per_host, within)
        return dataclasses.replace(made, collective_s=_COLLECTIVE_S)

    def plan(self) -> Plan:
        """How gradients are reduced."""
        cap = self.bucket_cap_mb
        caps: tuple[float, ...] = DEFAULT_CAPS_BYTES if cap is None else (cap * MEBIBYTE,)
        servers = None
        if self.servers:
            rate = self._rate("rate") if self.server_rate is None else self._rate("server_rate")
            servers = Servers(self.servers, rate)
        return Plan(
            caps,
            self.algorithm,
            payload_ratio=0.5 if self.half else 1.0,
            sync_every=self.sync_every,
            servers=servers,
        )

    def _rate(self, name: str) -> float:
        text = getattr(self, name) or ASSUMED[name]
        rate = quantities.rate(text, f"--{name.replace('_', '-')}") / 8
        if rate <= 0:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} {text} carries nothing. Pass a rate above 0."
            )
        return rate

    def assumptions(self) -> str:
        """What nobody said, in words; empty if everything was."""
        missing = {name: value for name, value in ASSUMED.items() if getattr(self, name) is None}
        return ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in missing.items())

    def workload(self) -> Workload:
        """Load or record it."""
        path = Path(self.source)
        if path.suffix == ".py":
            found = record_script(path, self.arguments, self.steps)
        elif path.exists() or path.suffix:
            found = Workload.load(path)
        else:
            found = _shipped(self.source)
        return found if self.batch is None else dataclasses.replace(found, samples_per_step=self.batch)


def _shipped(name: str) -> Workload:
    from paceline.lab.bench.layer_profile import default_profile  # noqa: PLC0415  # imports torch
    from paceline.lab.bench.timed_model import planned  # noqa: PLC0415
    from paceline.lab.workloads import WORKLOADS  # noqa: PLC0415

    if name not in WORKLOADS:
        raise ConfigurationError(
            f"{name!r} is neither a file nor a shipped workload. Pass a script, a recorded workload, or one of "
            f"{', '.join(WORKLOADS)}."
        )
    return planned(default_profile(name))


def forecast(asked: Asked, folder: Path, *, as_json: bool) -> None:
    """Predict, show, draw, and keep.

    Raises:
        ConfigurationError: Something asked for is not possible.
    """
    report = ReportFolder.prepare(folder)
    workload, plan = asked.workload(), asked.plan()
    question = Question(
        workload, asked.cluster, plan, doubling_counts(asked.to), asked.epoch_samples, asked.price
    )
    with progress_bar(f"simulating {workload.name} on up to {asked.to} devices") as tell:
        answer = predict_scaling(question, tell)
    lemmas = _Lemmas.beside(question, asked)
    _keep(report.path, question, answer)
    drawn = asked.to > 1 and draw_figure(report.path / f"{_NAME}.png", _title(workload), _panels(answer))
    record = _record(asked, question, answer, lemmas)
    (report.path / f"{_NAME}.json").write_text(json.dumps(record, indent=1) + "\n")
    if as_json:
        print(json.dumps(record, indent=1))
        return
    console = Console(width=max(Console().width, 130))
    console.print(sentence(question, answer), highlight=False, soft_wrap=True)
    console.print(_table(question, answer))
    for note in (*_helps(answer), *_notes(asked, question, lemmas)):
        console.print(note, highlight=False, soft_wrap=True)
    figure = f", figure {report.path / _NAME}.png" if drawn else ""
    console.print(f"numbers: {report.path / _NAME}.json{figure}", highlight=False, soft_wrap=True)


def sentence(question: Question, answer: Answer) -> str:
    """The answer in one."""
    last = answer.points[-1]
    words = f"{question.workload.name} on {_devices(last.num_ranks)}: {_ms(last.step_s)} a step"
    if last.num_ranks == 1:
        return f"{words}; one rank: nothing to overlap, nothing to wait for."
    words += (
        f" ({_ms(last.low_s)} to {_ms(last.high_s)}), efficiency {last.efficiency:.0%}, {last.speed_up:.3g} times one "
        f"device; what limits is {last.limit}"
    )
    if last.savings:
        words += f"; {last.savings[0].what} would save {last.savings[0].ratio:.0%}"
    if answer.knee < last.num_ranks:
        words += f"; beyond {_devices(answer.knee)} a device added brings less than half of what the first one does"
    return words + "."


@dataclass(frozen=True)
class _Lemmas:
    """Zou's lemmas beside the simulator."""

    num_ranks: int
    efficiency: float
    simulated: float
    servers: ServerAnswers

    @classmethod
    def beside(cls, question: Question, asked: Asked) -> _Lemmas | None:
        last = question.counts[-1]
        plan = dataclasses.replace(question.plan, servers=None, sync_every=1)
        workload = dataclasses.replace(question.workload, relative_steps=())
        if last == 1 or workload.forward_s + workload.backward_s <= 0:
            return None
        one = compare_efficiency(workload, question.grow, plan, (last,))[0]
        server_rate = (
            question.plan.servers.bytes_per_s
            if question.plan.servers
            else asked.cluster(1).links[0].bytes_per_s
        )
        servers = compare_servers(workload, question.grow(last), plan, server_rate)
        return cls(last, one.lemma, one.simulated, servers)

    def words(self) -> list[str]:
        found = self.servers
        simulated = [
            "no number hides it" if number is None else f"{number}"
            for number in (found.half_duplex, found.duplex)
        ]
        first = (
            f"lemma 3.1 (one batch shared by {self.num_ranks} devices, overhead that does not grow): efficiency "
            f"{self.efficiency:.1%}; simulated, with communication: {self.simulated:.1%}"
        )
        second = (
            f"lemma 3.2 (half-duplex servers, traffic behind all of forward and backward): {found.lemma} parameter "
            f"servers; simulated: {simulated[0]} (half-duplex), {simulated[1]} (both directions at once)"
        )
        if 2 * found.worker_limit_s > found.window_s:
            second += (
                f" are as good as any number, but hide nothing: the workers' own links take "
                f"{_ms(found.worker_limit_s)} each way, and backward leaves {_ms(found.window_s)}"
            )
        return [first, second]


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
            )
        )
    keep(folder / PREDICTIONS, records)


def _table(question: Question, answer: Answer) -> Any:
    has_rate = answer.points[0].samples_per_s is not None
    has_epoch, has_cost = answer.points[0].epoch_s is not None, answer.points[0].epoch_cost is not None
    columns = ["devices", "step", "80 % band", "efficiency", "times one"]
    columns += ["samples/s"] * has_rate + ["epoch"] * has_epoch + ["cost"] * has_cost
    rows = []
    for point in answer.points:
        mark = " <- knee" if point.num_ranks == answer.knee != answer.points[-1].num_ranks else ""
        row = [f"{point.num_ranks}{mark}", _ms(point.step_s), f"{_ms(point.low_s)} to {_ms(point.high_s)}"]
        row += [f"{point.efficiency:.0%}", f"{point.speed_up:.3g}"]
        row += [f"{point.samples_per_s:,.0f}"] if point.samples_per_s is not None else []
        row += [_duration(point.epoch_s)] if point.epoch_s is not None else []
        row += [f"{point.epoch_cost:,.2f}"] if point.epoch_cost is not None else []
        rows.append((*row, point.limit))
    return table(f"Predicted: {question.plan.describe()}", (*columns, "limited by"), rows)


def _helps(answer: Answer) -> list[str]:
    """What would help at the knee and at the end."""
    points = {point.num_ranks: point for point in answer.points if point.savings}
    wanted = dict.fromkeys((answer.knee, answer.points[-1].num_ranks))
    return [
        f"would help on {_devices(number)}: "
        + ", ".join(f"{saving.what} ({saving.ratio:.0%})" for saving in points[number].savings)
        for number in wanted
        if number in points
    ]


def _notes(asked: Asked, question: Question, lemmas: _Lemmas | None) -> list[str]:
    workload = question.workload
    what = (
        f"workload: {workload.source}; {workload.gradient_bytes / 1e6:,.1f} MB of gradients in "
        f"{len(workload.layers)} layers, forward {_ms(workload.forward_s)}, backward {_ms(workload.backward_s)}, "
        f"optimizer {_ms(workload.optimizer_s)}, between steps {_ms(workload.other_s)}"
    )
    notes = [what]
    if assumed := asked.assumptions():
        notes.append(f"assumed, because nobody said: {assumed}")
    notes.append(
        "the band: links at 0.75 to 1.1 of their rate, latencies at half to twice, other recorded steps, and the "
        "model's own error on emulated clusters; a device is taken to be as fast as the one that was recorded"
    )
    return notes + (lemmas.words() if lemmas else [])


def _panels(answer: Answer) -> list[Panel]:
    points = answer.points
    ticks = [point.num_ranks for point in points]

    def line(label: str, values: list[float], color: str, style: str = "-", marker: str = "o") -> Line:
        return Line(label, list(zip(ticks, values, strict=True)), color, style, marker)

    alone_s = points[0].step_s
    low = [point.num_ranks * alone_s / point.high_s for point in points]
    high = [point.num_ranks * alone_s / point.low_s for point in points]
    knee = Line("knee", [(answer.knee, 0), (answer.knee, points[-1].num_ranks)], PAPER, ":", "")
    return [
        Lines(
            "throughput",
            "devices",
            "times one device",
            [
                Line("linear", list(zip(ticks, ticks, strict=True)), "lightgray", "-", ""),
                line("predicted", [point.speed_up for point in points], OURS),
                line("80 % band", low, OURS, ":", ""),
                line("", high, OURS, ":", ""),
                knee,
            ],
            ticks={tick: str(tick) for tick in ticks},
            log_x=True,
        ),
        Lines(
            "a step",
            "devices",
            "ms",
            [
                line("step", [1e3 * point.step_s for point in points], OURS),
                line(
                    "without exposed communication",
                    [1e3 * (p.step_s - p.exposed_s) for p in points],
                    COMMUNICATION,
                    "--",
                ),
            ],
            ticks={tick: str(tick) for tick in ticks},
            log_x=True,
        ),
    ]


def _record(asked: Asked, question: Question, answer: Answer, lemmas: _Lemmas | None) -> dict[str, Any]:
    return {
        "name": question.workload.name,
        "sentence": sentence(question, answer),
        "asked": dataclasses.asdict(asked),
        "assumed": asked.assumptions(),
        "workload": question.workload.source,
        "gradient_bytes": question.workload.gradient_bytes,
        "plan": question.plan.describe(),
        "knee": answer.knee,
        "points": [dataclasses.asdict(point) for point in answer.points],
        "lemmas": None if lemmas is None else dataclasses.asdict(lemmas),
    }


def _title(workload: Workload) -> str:
    return f"{workload.name}, predicted ({workload.source})"


def _devices(number: int) -> str:
    return f"{number} device{'s' * (number != 1)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"

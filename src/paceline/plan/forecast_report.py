"""How a forecast is told: one sentence, a table, notes and a figure."""

from __future__ import annotations

from typing import Any

from paceline.planning import Workload
from paceline.planning.decision import ms
from paceline.planning.scaling import Answer, Question
from paceline_lab.report.look import COMMUNICATION, OURS, PAPER
from paceline_lab.report.panels import Line, Lines, Panel
from paceline_lab.report.terminal import table


def sentence(question: Question, answer: Answer) -> str:
    """The answer in one."""
    last = answer.points[-1]
    words = f"{question.workload.name} on {_devices(last.num_ranks)}: {ms(last.step_s)} a step"
    if question.plan.sync_every > 1:
        words += f" of {question.plan.sync_every} micro-steps"
    if last.num_ranks == 1:
        return f"{words}; one rank: nothing to overlap, nothing to wait for."
    words += (
        f" ({ms(last.low_s)} to {ms(last.high_s)}), efficiency {last.efficiency:.0%}, {last.speed_up:.3g} times "
        f"one device; what limits is {last.limit}"
    )
    if last.savings:
        words += f"; {last.savings[0].what} would save {last.savings[0].ratio:.0%}"
    if answer.knee < last.num_ranks:
        words += f"; beyond {_devices(answer.knee)} a device added brings less than half of what the first one does"
    return words + "."


def predicted_table(question: Question, answer: Answer) -> Any:
    """A row for every number of devices."""
    has_rate = answer.points[0].samples_per_s is not None
    has_epoch, has_cost = answer.points[0].epoch_s is not None, answer.points[0].epoch_cost is not None
    columns = ["devices", "step", "80 % band", "efficiency", "times one"]
    columns += ["samples/s"] * has_rate + ["epoch"] * has_epoch + ["cost"] * has_cost
    rows = []
    for point in answer.points:
        mark = " <- knee" if point.num_ranks == answer.knee != answer.points[-1].num_ranks else ""
        row = [
            f"{point.num_ranks}{mark}",
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
    """What would help at the knee and at the end."""
    points = {point.num_ranks: point for point in answer.points if point.savings}
    wanted = dict.fromkeys((answer.knee, answer.points[-1].num_ranks))
    return [
        f"would help on {_devices(number)}: "
        + ", ".join(f"{saving.what} ({saving.ratio:.0%})" for saving in points[number].savings)
        for number in wanted
        if number in points
    ]


def notes(question: Question, assumed: str) -> list[str]:
    """What was measured, what was assumed, what could not be said, and what the band is."""
    workload = question.workload
    what = (
        f"workload: {workload.source}; {workload.gradient_bytes / 1e6:,.1f} MB of gradients in "
        f"{len(workload.layers)} layers, forward {ms(workload.forward_s)}, backward {ms(workload.backward_s)}, "
        f"optimizer {ms(workload.optimizer_s)}, between steps {ms(workload.other_s)}"
    )
    if workload.num_micro_steps > 1:
        what += f"; a step had {workload.num_micro_steps} such micro-steps"
    band = (
        "the band: links at 0.75 to 1.1 of their rate, latencies at half to twice, other recorded steps, and the "
        "model's own error on emulated clusters; a device is taken to be as fast as the one that was recorded"
    )
    missing = "no epoch is shown: the workload does not say how many samples a step has. Pass --batch"
    needs_batch = question.epoch_samples is not None and workload.samples_per_step is None
    said = [f"assumed, because nobody said: {assumed}"] * bool(assumed)
    return [what, *said, *[missing] * needs_batch, band]


def panels(answer: Answer) -> list[Panel]:
    """The figure: throughput with its band, and the step."""
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


def title(workload: Workload) -> str:
    """Of the figure."""
    return f"{workload.name}, predicted ({workload.source})"


def _devices(number: int) -> str:
    return f"{number} device{'s' * (number != 1)}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"

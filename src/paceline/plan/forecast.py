"""From what the user asked to predictions: one sentence, one table, one figure, JSON, and a line to be scored later."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.plan.asked import Asked
from paceline.plan.forecast_report import (
    notes,
    panels,
    predicted_table,
    sentence,
    title,
    what_would_help,
)
from paceline.plan.links_here import is_one_of_several, measure_link
from paceline.plan.scoring import PREDICTIONS
from paceline.planning.decision import ms
from paceline.planning.lemmas import ServerAnswers, compare_efficiency, compare_servers
from paceline.planning.predictions import KeptPrediction, keep, kind_of
from paceline.planning.scaling import Answer, Question, doubling_counts, predict_scaling
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.publication import ReportFolder
from paceline_lab.report.terminal import progress_bar

_NAME = "plan"


def forecast(asked: Asked, folder: Path, *, as_json: bool) -> None:
    """Predict, show, draw, and keep.

    Contract:
        Where a launcher has started several ranks: collective until the link between their hosts is measured; then
        rank 0 goes on, and the others return.

    Raises:
        ConfigurationError: Something asked for is not possible.
    """
    report = ReportFolder.prepare(folder)
    if is_one_of_several():
        rank, link_here = measure_link()
        if rank:
            return  # it was needed for that alone
        asked = dataclasses.replace(asked, link_here=link_here)
    workload = asked.workload()
    plan = asked.plan(workload.num_micro_steps)
    question = Question(
        workload, asked.cluster, plan, doubling_counts(asked.to), asked.epoch_samples, asked.price
    )
    with progress_bar(f"simulating {workload.name} on up to {asked.to} devices") as tell:
        answer = predict_scaling(question, tell)
    lemmas = _Lemmas.beside(question, asked)
    _keep(report.path, question, answer)
    drawn = asked.to > 1 and draw_figure(report.path / f"{_NAME}.png", title(workload), panels(answer))
    record = _record(asked, question, answer, lemmas)
    (report.path / f"{_NAME}.json").write_text(json.dumps(record, indent=1) + "\n")
    if as_json:
        print(json.dumps(record, indent=1))
        return
    console = Console(width=max(Console().width, 130))
    console.print(sentence(question, answer), highlight=False, soft_wrap=True)
    console.print(predicted_table(question, answer))
    for note in (
        *what_would_help(answer),
        asked.link_words(),
        *notes(question, asked.assumptions(workload.num_micro_steps)),
        *(lemmas.words() if lemmas else []),
    ):
        console.print(note, highlight=False, soft_wrap=True)
    figure = f", figure {report.path / _NAME}.png" if drawn else ""
    console.print(f"numbers: {report.path / _NAME}.json{figure}", highlight=False, soft_wrap=True)


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


def _record(asked: Asked, question: Question, answer: Answer, lemmas: _Lemmas | None) -> dict[str, Any]:
    return {
        "name": question.workload.name,
        "sentence": sentence(question, answer),
        "asked": dataclasses.asdict(asked),
        "assumed": asked.assumptions(question.workload.num_micro_steps),
        "links": asked.links(),
        "workload": question.workload.source,
        "gradient_bytes": question.workload.gradient_bytes,
        "plan": question.plan.describe(),
        "knee": answer.knee,
        "points": [dataclasses.asdict(point) for point in answer.points],
        "lemmas": None if lemmas is None else dataclasses.asdict(lemmas),
    }


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
        plan = dataclasses.replace(question.plan, servers=None)
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
                f"{ms(found.worker_limit_s)} each way, and backward leaves {ms(found.window_s)}"
            )
        return [first, second]

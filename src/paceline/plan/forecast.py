"""From what the user asked to predictions: one sentence, one table, one figure, JSON, and a line to be scored later."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.errors import ConfigurationError
from paceline.plan.lemmas import LemmasBeside
from paceline.plan.links_here import measure_link
from paceline.plan.predictions import FILE, KeptPrediction, keep, kind_of
from paceline.plan.report import draw_figure, notes, predicted_table, progress_bar, sentence, what_would_help
from paceline.plan.request import PlanRequest
from paceline.plan.scaling import Answer, Question, doubling_counts, predict_scaling

_NAME = "plan"


def forecast(request: PlanRequest, folder: Path, *, as_json: bool) -> None:
    """Predict, show, draw, and keep.

    Contract:
        Where a launcher has started several ranks: collective until the link between their hosts is measured; then
        rank 0 goes on, and the others return.

    Raises:
        ConfigurationError: Something asked for is not possible.
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
    lemmas = LemmasBeside.of(question)
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
    keep(folder / FILE, records)


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

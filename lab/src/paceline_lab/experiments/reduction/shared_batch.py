"""How many devices may share a batch: lemma 3.1 of Zou et al. 2017, measured.

Hosts of an emulated cluster share a batch of ResNet-50's shape: each sleeps a G-th of the computing and the whole
optimizer, gradients and their traffic are real. "alone" reduces nothing, so what else a step takes is communication.
The efficiency of G hosts is the step of one over G steps of theirs. The lemma's R is overhead over computing, which it
takes for independent of G. Beside the measured efficiency stand two of its answers: with the overhead of one device,
its optimizer, and with the overhead of two hosts, their communication included.

What it cannot show: all hosts share this machine's cores; see "busy".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from paceline.plan.lemmas import efficiency
from paceline_lab.bench.provenance import collect
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder
from paceline_lab.experiments.reduction.parameter_servers import ALONE, measure
from paceline_lab.experiments.reduction.parameter_servers import Config as Job
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, OURS
from paceline_lab.report.panels import Line, Lines
from paceline_lab.report.publication import Report


@dataclass(frozen=True)
class Config:
    """What shares a batch: numbers of hosts, Mbit/s of a link, MB of gradients, seconds of the whole batch."""

    counts: tuple[int, ...] = (2, 4, 8)
    mbit: float = 1000.0
    megabytes: float = 2.0
    compute_s: float = 0.8
    num_rounds: int = 10


def main(
    rounds: Annotated[
        int, typer.Option(min=2, help="Number of rounds. Each side takes a step in each.")
    ] = 10,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Compare the lemma's efficiency with the measured one."""
    config = Config((2,), compute_s=0.1, num_rounds=2) if quick else Config(num_rounds=rounds)
    samples: dict[str, Any] = {}
    busy: dict[str, float] = {}
    for G in config.counts:
        job = Job(
            "shared",
            G,
            (),
            config.mbit,
            0,
            config.megabytes,
            config.compute_s,
            config.num_rounds,
            num_sharing=G,
            divides_caps=False,
        )
        found, busy[str(G)] = measure(job)
        samples[str(G)] = {side: result["steps_s"] for side, result in found.items()}
    summaries = summarise(samples, config.compute_s)
    report = Report(
        name="shared-batch" + "-quick" * quick,
        question="How efficient are G hosts that share a batch, by lemma 3.1 and measured?",
        columns=("hosts", "overhead alone ms", "communication ms", *_EFFICIENCIES),
        rows=tuple(
            (
                G,
                f"{1e3 * found['alone_overhead_s']:.1f}",
                f"{1e3 * found['communication_s']:.1f}",
                *(f"{found[name]:.1%}" for name in _EFFICIENCIES),
            )
            for G, found in summaries.items()
        ),
        verdicts=(),
        notes=(f"busy {', '.join(f'{part:.0%}' for part in busy.values())} of this machine's cores",),
        config=config,
        summaries=summaries,
        samples=samples,
        provenance=collect(max(config.counts)),
    )
    conclude(report, report_folder, as_json, draw)


_EFFICIENCIES = ("lemma, overhead of one", "lemma, overhead of two", "measured", "measured, torch")


def summarise(samples: dict[str, dict[str, list[float]]], compute_s: float) -> dict[str, dict[str, float]]:
    """Overheads, and efficiencies by `_EFFICIENCIES`, for each number of hosts; the first one gives the lemma's R."""
    found: dict[str, dict[str, float]] = {}
    R_one = R_two = 0.0
    for count, sides in samples.items():
        G = int(count)
        steps = {side: median(taken) for side, taken in sides.items()}
        overheads = {side: step - compute_s / G for side, step in steps.items()}
        if not found:
            R_one, R_two = overheads[ALONE] / compute_s, overheads["ours"] / compute_s
        one_s = compute_s * (1 + R_one)
        values = (
            efficiency(R_one, G),
            efficiency(R_two, G),
            *(one_s / (G * steps[x]) for x in ("ours", "torch")),
        )
        found[count] = {
            "alone_overhead_s": overheads[ALONE],
            "communication_s": steps["ours"] - steps[ALONE],
            **dict(zip(_EFFICIENCIES, values, strict=True)),
        }
    return found


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw the lemma's efficiencies and the measured ones over the number of hosts, from a stored report."""
    found = {int(count): values for count, values in record["summaries"].items()}

    def points(name: str) -> list[tuple[float, float]]:
        return [(G, 100 * efficiencies[name]) for G, efficiencies in found.items()]

    by_lemma, measured, of_torch = _EFFICIENCIES[:2], *_EFFICIENCIES[2:]
    lines = [Line.published(name, points(name)) for name in by_lemma]
    lines += [Line("Paceline", points(measured), OURS), Line("torch", points(of_torch), BASELINE)]
    most = max(found)
    promised, kept = (100 * found[most][name] for name in (by_lemma[1], measured))
    return draw_figure(
        path,
        f"{most} hosts that share a batch keep {kept:.0f} % efficiency; lemma 3.1 promises {promised:.0f} %",
        [
            Lines(
                "",
                "emulated hosts",
                "efficiency, %",
                lines,
                {G: str(G) for G in found},
                log_x=True,
                top=100.0,
            )
        ],
        f"A batch of {record['config']['compute_s']} s, {record['config']['megabytes']:g} MB of gradients, 1 Gbit/s. "
        "The lemma's overhead: of one device, or what two hosts show.",
    )

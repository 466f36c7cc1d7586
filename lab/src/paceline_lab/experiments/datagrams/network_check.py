"""The study of how far a simulated network is from emulated ones: the same sums and pushes, by the same sides.

Two numbers describe the emulating machine, chosen once by sums of 1 MB and the same in all rows: how long a link takes
(`WAY_US`, on TCP's sums at 1 % loss) and how late a host's turns are, whose cores others use (`JITTER_US`, on ours).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigurationError
from paceline_lab.checkout import in_repository
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, ReportFolder
from paceline_lab.experiments.runner import Findings, Measured, Study, run_study
from paceline_lab.packet_network.leaf_spine import LeafSpine
from paceline_lab.packet_network.sides import Times, Traffic, measure
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, OURS
from paceline_lab.report.panels import Dots
from paceline_lab.report.publication import stored_report
from paceline_lab.report.terminal import progress_bar

WAY_US, TURN_US, JITTER_US, HANDING_OVER_US = 250.0, 400, 300, 400.0
_LARGE_BYTES = 10_000_000  # of these few are enough
TOLERANCE = 0.10


@dataclass(frozen=True)
class CheckOptions:
    """What is compared.

    Attributes:
        emulated: The report of `emulated_network`.
        repeats: Of a sum or push; of large ones a tenth.
        seeds: How often each row is simulated.
        only: Words that a row's name has to contain.
    """

    emulated: Path
    repeats: int = 40
    seeds: int = 3
    only: str = ""

    def __post_init__(self) -> None:
        if not self.emulated.exists():
            raise ConfigurationError(
                f"there is no {self.emulated}, which holds what emulated networks took. Pass the file that "
                "`paceline study emulated-network` left with --emulated."
            )


@dataclass(frozen=True)
class Row:
    """One side in one emulated network.

    Attributes:
        name: Of the case.
        side: A name of `sides.SIDES`.
        emulated_ms: All samples.
        case: As `emulated_network.Case`.
        loss_ratio: Of the packets.
    """

    name: str
    side: str
    emulated_ms: tuple[float, ...]
    case: Mapping[str, Any]
    loss_ratio: float


def rows_of(emulated: Mapping[str, Any]) -> list[Row]:
    """All rows of a stored report."""
    found = []
    for key, record in emulated["samples"].items():
        name, loss, tcp = key.split(", ")
        for side, ms in record["ms"].items():
            own = f"{name}, {loss.replace('loss ', '')} loss" + ("" if tcp == "cubic" else ", tuned hosts")
            loss_ratio = float(loss.removeprefix("loss ").rstrip("%")) / 100
            found.append(Row(own, tcp if side == "Gloo" else side, tuple(ms), record["case"], loss_ratio))
    return found


def _stored_rows(path: Path) -> list[Row]:
    try:
        return rows_of(stored_report(path))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"{path} is no report of `paceline study emulated-network` ({error!r}). Pass another with --emulated."
        ) from error


def simulate(row: Row, repeats: int, seed: int) -> Times:
    """Let a row's side do the same on a simulated network."""
    case = row.case
    spec = LeafSpine(
        case["hosts"],
        rate_bits_per_s=1e8,
        way_us=WAY_US,
        queue_bytes=int(case["queue"].removesuffix("KB")) * 1024,
        loss_ratio=row.loss_ratio,
    )
    traffic = Traffic(
        [list(range(case["hosts"]))],
        case["num_bytes"],
        case["is_push"],
        repeats=repeats,
        pause_us=2000 * round(statistics.median(row.emulated_ms)),  # the other sides' turns
        turn_us=TURN_US,
        jitter_us=JITTER_US,
        handing_over_us=HANDING_OVER_US,
    )
    return measure(row.side, spec, traffic, seed)


class CheckStudy(Study[CheckOptions]):
    """Median and 99th percentile, emulated and simulated."""

    def report_name(self, options: CheckOptions) -> str:
        return "network-check"

    def measure(self, options: CheckOptions) -> Measured:
        rows = [row for row in _stored_rows(options.emulated) if options.only in row.name]
        if not rows:
            raise ConfigurationError(f"{options.emulated} has no case whose name contains {options.only!r}.")
        found = []
        with progress_bar("simulating what was emulated") as progress:
            for number, row in enumerate(rows):
                repeats = (
                    options.repeats if row.case["num_bytes"] < _LARGE_BYTES else max(2, options.repeats // 10)
                )
                ms = [value for seed in range(options.seeds) for value in simulate(row, repeats, seed).job_ms]
                found.append((row, ms))
                progress((number + 1) / len(rows))
        stored = [
            {"case": row.name, "side": row.side, "emulated_ms": row.emulated_ms, "simulated_ms": ms}
            for row, ms in found
        ]
        return Measured(found, {"rows": stored})

    def find(self, outcomes: list[tuple[Row, list[float]]], options: CheckOptions) -> Findings:
        rows, summaries = [], {}
        for row, ms in outcomes:
            real, ours = statistics.median(row.emulated_ms), statistics.median(ms)
            error = ours / real - 1
            summaries[f"{row.name}: {row.side}"] = {
                "emulated_ms": real,
                "simulated_ms": ours,
                "error": error,
                "emulated_p99_ms": _p99(row.emulated_ms),
                "simulated_p99_ms": _p99(ms),
            }
            rows.append(
                (
                    row.name,
                    row.side,
                    f"{real:.1f}",
                    f"{ours:.1f}",
                    f"{100 * error:+.0f} %",
                    f"{_p99(row.emulated_ms):.0f}",
                    f"{_p99(ms):.0f}",
                )
            )
        errors = [abs(each["error"]) for each in summaries.values()]
        within = sum(error <= TOLERANCE for error in errors)
        return Findings(
            "How far is the simulated network from the emulated ones?",
            ("case", "side", "emulated, ms", "simulated, ms", "error", "p99 emulated", "p99 simulated"),
            rows,
            (
                "medians; links of 100 Mbit/s; few emulated samples, so that two runs of one row differ by up to 9 %",
                (
                    f"of the emulating machine: a link takes {WAY_US:g} us and a host's turn is late by "
                    f"{JITTER_US} us on average, the same in all rows, chosen on sums of 1 MB"
                ),
                f"{within} of {len(errors)} rows are within {TOLERANCE:.0%}",
            ),
            {"rows": summaries, "within": within, "median_error": statistics.median(errors)},
        )

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        found = record["summaries"]["rows"]
        names = list(found)
        ratios = [1 + found[name]["error"] for name in names]
        is_ours = ["ours" in name for name in names]
        sides = [
            ("Paceline", OURS, [r if own else None for r, own in zip(ratios, is_ours, strict=True)]),
            ("TCP", BASELINE, [None if own else r for r, own in zip(ratios, is_ours, strict=True)]),
        ]
        order = sorted(range(len(names)), key=lambda i: names[i].split(":")[0])
        panel = Dots(
            "",
            "simulated time over emulated time",
            [names[i].replace("ours", "Paceline") for i in order],
            [(name, color, [values[i] for i in order]) for name, color, values in sides],
            {0.3: "0.3", 0.6: "0.6", 0.8: "0.8", 1.0: "1", 1.25: "1.25"},
            ("emulated", 1.0),
        )
        within, total = record["summaries"]["within"], len(names)
        return draw_figure(
            path,
            f"{within} of {total} simulated medians are within 10 % of the emulated ones",
            [panel],
            f"Blue: Paceline, orange: TCP; {record['notes'][1]}",
        )


def _p99(values: Any) -> float:
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))])


draw = CheckStudy().draw


def main(
    emulated: Annotated[
        Path | None,
        typer.Option(
            help="File that `paceline study emulated-network` wrote.",
            show_default="that of the checkout's lab/results",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Number of repetitions of each sum or push.")] = 40,
    seeds: Annotated[int, typer.Option(min=1, help="Number of simulations of each row.")] = 3,
    only: Annotated[str, typer.Option(help="Text that a row's case must contain.")] = "",
    report_folder: ReportFolder = REPORT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Simulate what emulated networks have done, and say how far off the simulation is."""
    if emulated is None:
        emulated = in_repository("lab/results/emulated-network.json", "what emulated networks took")
    run_study(CheckStudy(), CheckOptions(emulated, repeats, seeds, only), report_folder, as_json)

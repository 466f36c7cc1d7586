"""`paceline bench study` and `paceline bench scaling`: two papers' studies again, on emulated hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

NumRanks = Annotated[
    int | None, typer.Option("--ranks", help="Hosts of one rank each.", show_default="the study's")
]
Rate = Annotated[
    str | None, typer.Option(help="Of each host's link, such as 100Mbit.", show_default="the study's")
]
ComputeS = Annotated[
    float | None, typer.Option(help="Forward and backward together.", show_default="the study's")
]
Rounds = Annotated[
    int | None, typer.Option(help="Every variant takes two turns in each.", show_default="the study's")
]
Quick = Annotated[bool, typer.Option("--quick", help="Does it run? Its numbers mean nothing.")]
ReportFolder = Annotated[Path, typer.Option("--report", help="Folder for the JSON and the figure.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, progress to stderr.")]


def study(
    name: Annotated[
        str,
        typer.Argument(
            help="overlap, bucket-size, rank-count, skipped-sync, round-robin, threads or model-size."
        ),
    ],
    ranks: NumRanks = None,
    rate: Rate = None,
    compute_s: ComputeS = None,
    rounds: Rounds = None,
    quick: Quick = False,
    report: ReportFolder = Path("paceline-report"),
    as_json: AsJson = False,
) -> None:
    """A figure of the papers on DDP or the mLSTM, measured on emulated hosts beside the published one."""
    from paceline.lab.bench.studies import find_study
    from paceline.lab.bench.studies.study import run_study

    found = find_study(name)
    given: dict[str, Any] = {"num_ranks": ranks, "rate": rate, "compute_s": compute_s, "num_rounds": rounds}
    options = replace(
        found.quick if quick else found.defaults, **{k: v for k, v in given.items() if v is not None}
    )
    run_study(found, options, report, as_json)


def scaling(
    workload: Annotated[
        str, typer.Option(help="Comma-separated; the first sets the scale.")
    ] = "mlstm-4k,mlstm-8k",
    rates: Annotated[str, typer.Option(help="Of the links, in proportion.")] = "10:1",
    ranks: Annotated[str, typer.Option(help="How many, comma-separated.")] = "1,2,4,8,16",
    rate: Annotated[
        str | None, typer.Option(help="Of the fastest link, such as 500Mbit.", show_default="500Mbit")
    ] = None,
    compute_s: Annotated[
        float | None, typer.Option(help="Forward and backward of the first workload.", show_default="0.12")
    ] = None,
    rounds: Rounds = None,
    quick: Quick = False,
    report: ReportFolder = Path("paceline-report"),
    as_json: AsJson = False,
) -> None:
    """How does training scale over ranks, by model size, link and precision? The mLSTM study's chart."""
    from paceline.lab.bench.studies.mlstm_scaling import ScalingOptions, ScalingStudy
    from paceline.lab.bench.studies.study import run_study

    found = ScalingStudy()
    given: dict[str, Any] = {"rate": rate, "compute_s": compute_s, "num_rounds": rounds}
    base = replace(
        found.quick if quick else found.defaults, **{k: v for k, v in given.items() if v is not None}
    )
    options = ScalingOptions.parse(base, workload, rates, "1,2" if quick and ranks == "1,2,4,8,16" else ranks)
    run_study(found, options, report, as_json)

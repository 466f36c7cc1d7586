"""`paceline study` and `paceline bench study` and `scaling`: claims and figures of papers, measured again."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="What large batches and short messages cost in accuracy, on real data.", no_args_is_help=True
)

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


@app.callback()
def _group() -> None:
    """Keep `large-batch` a command of its own: typer would merge a single one into the group."""


@app.command("large-batch")
def large_batch(
    data: Annotated[
        Path | None, typer.Option(help="Folder of the data set.", show_default="the usual places")
    ] = None,
    model: Annotated[
        str, typer.Option(help="mlp, cnn (Fashion-MNIST), letter, bytes (Shakespeare) or digits.")
    ] = "mlp",
    rows: Annotated[str, typer.Option(help="Comma-separated.", show_default="all")] = "",
    batches: Annotated[str, typer.Option(help="In reference batches, comma-separated.")] = "8,16,32,64",
    tune: Annotated[
        str | None, typer.Option(help="Batches at which rates are also chosen anew.", show_default="16,32")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs behind each mean.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Digits, four rows, one batch: seconds.")] = False,
    store: Annotated[
        Path | None,
        typer.Option(help="File of finished runs.", show_default="large-batch-MODEL.jsonl in --report"),
    ] = None,
    report: ReportFolder = Path("paceline-report"),
    only_show: Annotated[
        bool, typer.Option("--only-show", help="Compute nothing; show what is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train with growing global batches by every rule, and say which of the papers' claims hold."""
    from rich.console import Console

    from paceline_lab.studies.description import run_study
    from paceline_lab.studies.large_batch import LargeBatchStudy
    from paceline_lab.studies.large_batch_plan import TUNED_FACTORS, Plan, quick_plan
    from paceline_lab.studies.large_batch_rows import choose_rows
    from paceline_lab.studies.tasks import find_task

    if quick:
        plan = quick_plan()
    else:
        names = [name.strip() for name in rows.split(",") if name.strip()]
        task, factors = find_task(model), _factors("--batches", batches)
        if tune is None:
            tuned = tuple(factor for factor in TUNED_FACTORS if factor in factors)
        else:
            tuned = _factors("--tune", tune)
        plan = Plan(task, tuple(choose_rows(names)), factors, tuned, seeds)
    file = store or report / f"large-batch-{plan.task.name}.jsonl"
    console = Console(stderr=as_json, width=max(Console().width, 120))  # narrower, the tables' cells break
    try:
        found = run_study(LargeBatchStudy(file, data, console, only_show), plan, report, as_json)
    except KeyboardInterrupt:
        _say_stopped(file)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(json.loads(found.to_json())))


@app.command("loss-bound")
def loss_bound(
    data: Annotated[
        Path | None, typer.Option(help="Folder of the data set.", show_default="the usual places")
    ] = None,
    model: Annotated[
        str, typer.Option(help="mlp, cnn (Fashion-MNIST), letter, bytes (Shakespeare) or digits.")
    ] = "mlp",
    bounds: Annotated[str, typer.Option(help="Lost, in percent, comma-separated; 0 is one of them.")] = (
        "0,0.5,1,3,10,20,30"
    ),
    patterns: Annotated[
        str,
        typer.Option(
            help="random, tail, burst, front, back, smallest, largest; comma-separated.", show_default="all"
        ),
    ] = "",
    compensations: Annotated[
        str, typer.Option(help="survivors, none, feedback; comma-separated.", show_default="all")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Runs behind each mean.")] = 3,
    samples: Annotated[int, typer.Option(help="To train on.", show_default="some thousands")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="How often they are seen.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Digits, one bound: seconds.")] = False,
    store: Annotated[
        Path | None,
        typer.Option(help="File of finished runs.", show_default="loss-bound-MODEL.jsonl in --report"),
    ] = None,
    report: ReportFolder = Path("paceline-report"),
    only_show: Annotated[
        bool, typer.Option("--only-show", help="Compute nothing; show what is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train while a bounded part of the gradients is lost, by every pattern and compensation."""
    from paceline_lab.studies.description import run_study
    from paceline_lab.studies.loss_bound import LossStudy
    from paceline_lab.studies.loss_bound_runs import PATTERNS, QUICK, LossOptions

    given = LossOptions(
        model=model,
        bounds=tuple(percent / 100 for percent in _numbers("--bounds", bounds)),
        patterns=_names(patterns) or PATTERNS,
        compensations=_names(compensations) or LossOptions.compensations,
        num_seeds=seeds,
        num_train=samples,
        epochs=epochs,
    )
    options = QUICK if quick else given
    file = store or report / f"loss-bound-{options.model}.jsonl"
    try:
        run_study(LossStudy(file, data, only_show), options, report, as_json)
    except KeyboardInterrupt:
        _say_stopped(file)
        raise typer.Exit(130) from None


@app.command("network")
def network(
    hosts: Annotated[
        str, typer.Option(help="Of the networks, comma-separated; multiples of 16.")
    ] = "16,64,144",
    flow_bytes: Annotated[str, typer.Option(help="What a worker pushes, comma-separated.")] = "100000",
    repeats: Annotated[int, typer.Option(min=1, help="Pushes of every job in each placement.")] = 2,
    placements: Annotated[
        int, typer.Option(min=1, help="How often jobs, ways and losses are placed anew.")
    ] = 5,
    all_questions: Annotated[
        bool,
        typer.Option(
            "--all-questions", help="Of the smallest network spraying, layers, sums, small ports, too."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the first placement; the same one, the same times.")] = 1,
    at_most_s: Annotated[float, typer.Option(help="After that, no further case is begun.")] = 3600.0,
    quick: Annotated[bool, typer.Option("--quick", help="16 hosts, one push: seconds.")] = False,
    store: Annotated[
        Path | None,
        typer.Option(help="File of simulated cases.", show_default="network-scale.jsonl in --report"),
    ] = None,
    report: ReportFolder = Path("paceline-report"),
    only_show: Annotated[
        bool, typer.Option("--only-show", help="Simulate nothing; show what is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate leaf-spine networks packet by packet: bounded loss beside TCPs, and what DLCP's claims come to."""
    from paceline_lab.studies.description import run_study
    from paceline_lab.studies.network_scale import QUICK, ScaleOptions, ScaleStudy

    given = ScaleOptions(
        hosts=_factors("--hosts", hosts),
        flow_bytes=_factors("--flow-bytes", flow_bytes),
        repeats=repeats,
        placements=placements,
        all_questions=all_questions,
        seed=seed,
        at_most_s=at_most_s,
    )
    file = store or report / "network-scale.jsonl"
    try:
        run_study(ScaleStudy(file, only_show), QUICK if quick else given, report, as_json)
    except KeyboardInterrupt:
        _say_stopped(file)
        raise typer.Exit(130) from None


@app.command("network-check")
def network_check(
    emulated: Annotated[Path, typer.Option(help="What python -m benchmarks.emulated_network wrote.")] = Path(
        "benchmarks/results/emulated-network.json"
    ),
    repeats: Annotated[int, typer.Option(min=2, help="Of a sum or push.")] = 40,
    seeds: Annotated[int, typer.Option(min=1, help="How often each row is simulated.")] = 3,
    only: Annotated[str, typer.Option(help="Only rows whose case contains this.")] = "",
    report: ReportFolder = Path("paceline-report"),
    as_json: AsJson = False,
) -> None:
    """Simulate what emulated networks have done, and say how far off the simulation is."""
    from paceline_lab.studies.description import run_study
    from paceline_lab.studies.network_check import CheckOptions, CheckStudy

    run_study(CheckStudy(), CheckOptions(emulated, repeats, seeds, only), report, as_json)


def _say_stopped(file: Path) -> None:
    print(
        f"paceline: stopped. Finished runs are in {file}; the same command goes on from there.",
        file=sys.stderr,
    )


def _names(words: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in words.split(",") if name.strip())


def _numbers(option: str, words: str) -> tuple[float, ...]:
    from paceline.errors import ConfigurationError

    try:
        return tuple(sorted({float(word) for word in words.split(",") if word.strip()}))
    except ValueError:
        raise ConfigurationError(f"{option} {words} is not a list of numbers such as 0,0.5,1.") from None


def _factors(option: str, words: str) -> tuple[int, ...]:
    from paceline.errors import ConfigurationError

    try:
        return tuple(sorted({int(word) for word in words.split(",") if word.strip()}))
    except ValueError:
        raise ConfigurationError(f"{option} {words} is not a list of numbers such as 8,16,32.") from None


def paper_figure(
    name: Annotated[
        str,
        typer.Argument(
            help="overlap, bucket-size, rank-count, skipped-sync, round-robin, threads, model-size or prediction."
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
    from paceline_lab.studies.catalogue import find_study
    from paceline_lab.studies.description import run_study

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
    from paceline_lab.studies.description import run_study
    from paceline_lab.studies.mlstm_scaling import ScalingOptions, ScalingStudy

    found = ScalingStudy()
    given: dict[str, Any] = {"rate": rate, "compute_s": compute_s, "num_rounds": rounds}
    base = replace(
        found.quick if quick else found.defaults, **{k: v for k, v in given.items() if v is not None}
    )
    options = ScalingOptions.parse(base, workload, rates, "1,2" if quick and ranks == "1,2,4,8,16" else ranks)
    run_study(found, options, report, as_json)

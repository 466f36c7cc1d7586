"""Compare the simulator's predictions with the steps that are in lab/results already.

Nothing is measured. The time studies' results (2 to 16 emulated hosts, two models, caps, groups, 16 bits, skipped
synchronization) stand next to predictions. The cost of emulation is fitted on the runs of ResNet-50, and predicts those
of BERT and of the mLSTM. Fitted on four ranks only, the processor's time of a message cannot be told from a round's
latency. Then 16 ranks come out worse: that is a row, too. The runs of `paceline study prediction` were measured for
this, on unequal clusters as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline_lab.bench.layer_profile import Profile, default_profile
from paceline_lab.bench.provenance import collect
from paceline_lab.checkout import stored_result
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    Quick,
    ReportFolder,
)
from paceline_lab.experiments.papers.mlstm_scaling import ScalingOptions
from paceline_lab.experiments.papers.published import BREAKDOWN, SKIPPED_ALONE_S, SKIPPED_SECONDS, scale_for
from paceline_lab.experiments.papers.variants import Variant
from paceline_lab.experiments.prediction.emulated_clusters import draw_ratios
from paceline_lab.experiments.prediction.predicted_runs import Errors, Run, fit, run_of, samples, summary
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.publication import Report
from paceline_plan import HostLink

NAME = "predicted-steps"
FITTED_ON = "resnet50"
FOUR_RANKS = ("bucket-size", "overlap")  # studies of four ranks only
STUDIES = (*FOUR_RANKS, "rank-count", "skipped-sync", "round-robin")
QUICK_EVERY = 8  # of the runs, with --quick
_RATE_BYTES = 100e6 / 8  # all of STUDIES ran on links of 100 Mbit/s
_BACKWARD_RATIO = 2 / 3


@dataclass(frozen=True)
class Config:
    """The comparison's settings."""

    fitted_on: str
    studies: tuple[str, ...]


def main(quick: Quick = False, as_json: AsJson = False, report_folder: ReportFolder = REPORT_FOLDER) -> None:
    """Fit on some stored runs, predict the others."""
    runs = {study: stored_runs(study) for study in STUDIES} | {"mlstm-scaling": mlstm_runs()}
    if quick:
        runs = {study: found[::QUICK_EVERY] for study, found in runs.items()}
    everything = [run for found in runs.values() for run in found]
    known = [run for run in everything if run.workload.name == FITTED_ON]
    others = [run for run in everything if run.workload.name != FITTED_ON]
    fitted = fit(known)
    groups = {f"fitted on: {FITTED_ON}": known}
    for study, found in runs.items():
        if group := [run for run in found if run.workload.name != FITTED_ON]:
            groups[f"predicted: {study}"] = group
    for num_ranks in sorted({len(run.links) for run in others}):
        label = f"predicted: {num_ranks} rank" + "s" * (num_ranks > 1)
        groups[label] = [run for run in others if len(run.links) == num_ranks]
    groups["all predicted"] = others
    errors = [Errors.of(label, found, fitted) for label, found in groups.items()]
    few = fit([run for study in FOUR_RANKS for run in runs[study]])
    most = [run for run in others if len(run.links) == max(len(run.links) for run in others)]
    errors.append(Errors.of("16 ranks, fitted on four only", most, few))
    rows = [(x.label, str(x.num), f"{x.median_ratio:.1%}", f"{x.worst_ratio:+.1%}", x.worst) for x in errors]
    cost = fitted.emulation
    what = (
        f"fitted: {fitted.goodput:.1%} of a link's rate, {fitted.latency_s * 1e6:.0f} us a round; emulation, of "
        f"{cost.cores} cores: {cost.collective_s * 1e3:.2f} ms a collective and rank, {cost.message_s * 1e6:.0f} us a "
        f"message, {cost.s_per_byte * 1e9:.2f} ns a byte, {cost.layer_s * 1e6:.0f} us a layer"
    )
    notes = (
        what,
        "predictions contain what emulation costs; `without_emulation_s` in the samples is the network alone",
        "worst where 16 ranks reduce short messages on two cores: there the cores' scheduling is what is measured",
    )
    report = Report(
        name=NAME + "-quick" * quick,
        question="How well does the simulator predict the steps of emulated clusters that were measured before?",
        columns=("runs", "number", "median error", "worst", "which"),
        rows=tuple(rows),
        verdicts=(),
        notes=notes,
        config=Config(FITTED_ON, tuple(runs)),
        summaries=dict(summary(fitted, errors)),
        samples={"runs": samples(everything, fitted)},
        provenance=collect(1),
    )
    conclude(report, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw predicted over measured steps from a stored report."""
    runs = [run for run in record["samples"]["runs"] if run["workload"] != record["config"]["fitted_on"]]
    return draw_ratios(runs, path)


@cache
def _model(name: str, compute_s: float) -> Profile:
    return default_profile(name).taking(compute_s)


def stored_runs(study: str) -> list[Run]:
    """The runs of a study of Li et al.'s figures."""
    record = stored_result(f"study-{study}")
    options = record["config"]
    found = []
    for outcome in record["samples"]["outcomes"]:
        model, backend = _case(outcome["block"])
        profile = _model(model, options["compute_s"])
        if study == "skipped-sync":
            ratio = _BACKWARD_RATIO + (SKIPPED_SECONDS[backend][0] - SKIPPED_ALONE_S) / SKIPPED_ALONE_S
        else:
            ratio = BREAKDOWN[model, backend].communication_to_compute
        scale = scale_for(profile, options["num_ranks"], _RATE_BYTES, ratio)
        found.append(_run(study, outcome, profile, scale, _RATE_BYTES))
    return found


def mlstm_runs() -> list[Run]:
    """The runs of the mLSTM study, on two rates."""
    record = stored_result("study-mlstm-scaling")
    options = ScalingOptions(**{key: _tupled(value) for key, value in record["config"].items()})
    found = []
    for outcome in record["samples"]["outcomes"]:
        profile = options.model(outcome["block"])
        proportion = float(outcome["link"].removeprefix("rate "))
        rate = options.rate_bytes_per_s * proportion / max(options.rates)
        found.append(_run("mlstm-scaling", outcome, profile, options.scale(), rate))
    return found


def _run(study: str, outcome: Any, profile: Profile, scale: float, rate: float) -> Run:
    variant = Variant(**{key: value for key, value in outcome["variant"].items() if key != "tolerance"})
    links = [HostLink(rate)] * variant.num_ranks
    return run_of(study, variant, profile, scale, links, outcome["steps_s"])


def _case(block: str) -> tuple[str, str]:
    """Model and backend of a block's label such as "bert, Gloo-like"."""
    model = "bert" if block.startswith("bert") else "resnet50"
    return model, "Gloo" if "Gloo" in block else "NCCL"


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

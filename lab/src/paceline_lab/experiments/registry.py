"""Every experiment: its name, what it asks, what is claimed, what it needs, how long it takes and what it leaves.

`paceline study` lists this table, `paceline study NAME` runs one, `paceline study all` runs them one after another.
A line here and a module with `main` (its command line) are all that a new experiment needs. Nothing that measures is
imported until an experiment is run.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline_lab.checkout import in_repository

ROOT = "root"  # an emulated cluster
CHECKOUT = "the source repository"
IS_ROOT = os.geteuid() == 0


@dataclass(frozen=True)
class Experiment:
    """One question and the code that answers it.

    Attributes:
        name: Name of the command.
        module: Below `paceline_lab.experiments`; with the name of a `TimeStudy` behind a colon, if it is one.
        takes: About how long, on two cores.
        target: Goal, or the paper whose claim is tested.
        question: Question in one sentence.
        needs: `ROOT`, `CHECKOUT` or nothing.
        reports: The first words of its stored reports' names; empty: its name. Pictures are by the module's `draw`.
        runs: The options of each run of `paceline study all`; empty: it is not among them.
    """

    name: str
    module: str
    takes: str
    target: str
    question: str
    needs: str = ""
    reports: tuple[str, ...] = ()
    runs: tuple[str, ...] = ("",)

    def main(self) -> Callable[..., Any]:
        """Return the function whose parameters are the command's options."""
        found, study = self._code()
        return study.main if study else found.main  # type: ignore[no-any-return]

    def drawing(self) -> Callable[..., Any] | None:
        """Return what draws one of its stored reports; None if they have no pictures."""
        found, study = self._code()
        return study.draw if study else getattr(found, "draw", None)

    def _code(self) -> tuple[Any, Any]:
        name, _, study = self.module.partition(":")
        found = importlib.import_module(f"paceline_lab.experiments.{name}")
        return found, getattr(found, study)() if study else None

    @property
    def is_possible(self) -> bool:
        """Return whether this process may run it."""
        return self.needs != ROOT or IS_ROOT


_WORKLOADS = ("tiny", "wide_mlp", "resnet50", "transformer", "mlstm")  # those that two cores can compute

# fmt: off
_ALL = (
    # What does a step cost, and what hides behind it?
    Experiment("overhead", "step.overhead", "1 min", "1.0 µs (1.5 with find_unused_parameters)",
        "How much CPU time is added to backward per parameter, and to a step?"),
    Experiment("memory", "step.memory", "2 min", "1.05 x their size",
        "How much memory do gradients need at the peak?"),
    Experiment("step-time", "step.step_time", "3 min a run", "1.00 x torch's; 0.9 on wide_mlp",
        "How long is a step of one workload, on one host?",
        runs=tuple(f"--workload {name} --ranks-per-host {ranks}" for ranks in (2, 1) for name in _WORKLOADS)),
    Experiment("overlap", "step.overlap", "10 min", "0.95 behind 1 Gbit/s",
        "Which share of the ideal overlap is realised, by link and by bucket size?",
        runs=("--rate 1Gbit --rounds 5",) if IS_ROOT else ("",)),
    Experiment("forward-overlap", "step.forward_overlap", "5 min", "0.82 of torch's, 1.05 of the least",
        "How much shorter is a step whose gradients the next forward hides as well?", needs=ROOT),
    Experiment("timeline", "step.timeline", "3 min", "",
        "What does a rank compute, and what is on its link meanwhile?", needs=ROOT),
    Experiment("forward-overlap-loss", "step.forward_overlap_loss", "5 min", "0.9 of torch's time",
        "How much sooner does a training with forward overlap come down to a loss?", needs=ROOT),
    Experiment("skipped-layers", "step.skipped_layers", "5 min a run", "no longer than torch's",
        "What does a step save that leaves layers out?", needs=ROOT, runs=("--case depth", "--case backbone")),
    Experiment("optimizers", "step.optimizers", "3 min", "1.3 x torch's",
        "How long is a step of LARS and LAMB, beside torch's foreach SGD and Adam?"),
    Experiment("sharded-steps", "step.sharded_steps", "3 min a run", "0.85 x torch's step; 1/N of the state",
        "How long is a step whose optimizer is divided among the ranks, and what does each of them keep?",
        runs=("", "--workload transformer", "--optimizer Muon --ranks-per-host 4",
            *(["--workload resnet50 --hosts 4 --rate 1Gbit --rounds 3 --steps-per-turn 2"] if IS_ROOT else []))),
    Experiment("compiled", "step.compiled", "5 min a run", "",
        "How long is a step under torch.compile, by what is compiled?", runs=("", *(["--hosts 2"] if IS_ROOT else []))),
    Experiment("adasum-updates", "step.adasum_updates", "3 min", "",
        "How much of combining updates by Adasum does backward hide?", needs=ROOT),
    # How long does a reduction take?
    Experiment("adasum", "reduction.adasum", "2 min a run", "",
        "How long does a bucket take by Adasum, and by the mean, and how many bytes?",
        runs=("", "--ranks-per-host 4", *(["--hosts 2 --rate 1Gbit"] if IS_ROOT else []))),
    Experiment("collectives", "reduction.collectives", "2 min", "",
        "How long do torch's collectives of ordinary tensors take, and FSDP2's step, over our backend and Gloo?"),
    Experiment("compression", "reduction.compression", "3 min", "",
        "What does each compressor cost one rank, beside a copy of memory?"),
    Experiment("auto-compression", "reduction.auto_compression", "20 min", "1.05 x the best fixed choice, 1.02 x none",
        'Does `compression="auto"` choose well, from 50 Mbit/s to no limit?', needs=ROOT),
    Experiment("auto-choices", "reduction.auto_choices", "10 min", "within 5 % of the best in 95 of 100 runs",
        'How often does `compression="auto"` choose well, whatever it may choose from?', needs=ROOT),
    Experiment("parameter-servers", "reduction.parameter_servers", "5 min a run", "knee within 1 server",
        "When do parameter servers win against an all-reduce, and how many does lemma 3.2 ask for?",
        needs=ROOT, runs=("--case lemma", "--case symmetric", "--case asymmetric")),
    # What do lost packets cost?
    Experiment("bounded-loss", "datagrams.bounded_loss", "2 min a run", "docs/notebook/benchmarks.md, by row",
        "How long does a sum take where packets are lost, over UDP with bounded loss, and over TCP?",
        needs=ROOT, runs=()),
    Experiment("early-delivery", "datagrams.early_delivery", "10 min a run", "Wang et al. 2020 (DLCP)",
        'Does `BoundedLoss(deliver="early")` shorten steps, or their tail, where packets are lost?',
        needs=ROOT, reports=("early-delivery",), runs=()),
    Experiment("shared-port", "datagrams.shared_port", "1 min a run", "Jain 0.9",
        "How do sums by bounded loss and a TCP connection share a port that both send into?", needs=ROOT, runs=()),
    # What does it cost in accuracy?
    Experiment("large-batch", "accuracy.large_batch", "hours", "the papers'",
        "What do large batches, compression and local steps cost in accuracy?", runs=()),
    Experiment("resnet-batches", "accuracy.resnet_batches", "2 h", "Goyal et al. 2017",
        "Up to which batch does a network with batch normalisation keep its accuracy, and with which n?", runs=()),
    Experiment("loss-bound", "accuracy.loss_bound", "hours", "",
        "What do gradients that are lost cost in accuracy?", runs=()),
    # Do unequal machines work all the time?
    Experiment("unequal", "unequal.shares", "5 min", "1.05 x the ideal in 10 steps; 1.01 x fixed shares on equal ranks",
        'Do unequal machines work all the time, with `balance="auto"`?'),
    Experiment("time-to-loss", "unequal.time_to_loss", "30 min", "1.15 x the ideal, 1.05 x after 20 steps",
        "How long do unequal machines take to a given loss, by torch, HetSeq's rule, fixed and automatic shares?",
        needs=ROOT),
    # Which option helps when?
    Experiment("overviews", "overviews", "1 min", "",
        "Which option helps when? Pictures of many stored results; nothing is measured.", needs=CHECKOUT,
        reports=("five-models", "forward-overlap-cases", "option-map", "bounded-loss-tcp"), runs=()),
    # Is what the doctor says right?
    Experiment("doctor-cost", "slow_ranks.cost", "2 min", "0.5 % of a step",
        "What does it cost a step that records of the last ones are always kept?", runs=()),
    Experiment("doctor-hangs", "slow_ranks.hangs", "15 min", "named within 10 s, no alarm",
        "Is a rank that hangs named within 10 s, with its stack, and is nothing said of steps that only take long?",
        runs=()),
    Experiment("doctor", "slow_ranks.doctor", "3 h", "rank 99 %, cause 95 %, what-if 5 %, no alarm",
        "Does the doctor name the right rank, the cause and the step after the repair, and is it quiet otherwise?",
        runs=()),
    # Is it right, whatever a script does?
    Experiment("fuzz", "fuzz", "30 min", "no mismatch",
        "Does any random training program give other gradients than one process on the whole batch?", needs=CHECKOUT),
    Experiment("survival", "survival.study", "30 min", "no hang, no sample lost or doubled",
        "Does training outlive ranks that die at random, without losing or doubling a sample?", needs=CHECKOUT),
    Experiment("shadow", "survival.shadow", "40 min", "at most one step lost, equal bits; a step at most 1.02",
        "Does a shadow lose at most one step when all ranks are killed, and what does it cost?", needs=CHECKOUT,
        reports=(), runs=()),
    Experiment("soak", "unequal.soak", "2 min", "nothing lost, nothing doubled",
        "Do shares that change at random lose or double a sample, or let replicas drift?", reports=(), runs=()),
    # Do the papers' figures come out here?
    Experiment("paper-overlap", "papers.ddp_step_figures:OverlapStudy", "5 min", "Li et al. 2020",
        "What does overlapping communication with backward save? (figure 6)",
        needs=ROOT, reports=("study-overlap",), runs=()),
    Experiment("bucket-size", "papers.ddp_step_figures:BucketSizeStudy", "10 min", "Li et al. 2020",
        "How long is a step, by bucket size? (figures 7 and 8)", needs=ROOT, reports=("study-bucket-size",), runs=()),
    Experiment("rank-count", "papers.ddp_scale_figures:RankCountStudy", "10 min", "Li et al. 2020",
        "How long is a step, by number of ranks? (figure 9)", needs=ROOT, reports=("study-rank-count",), runs=()),
    Experiment("skipped-sync", "papers.ddp_scale_figures:SkippedSyncStudy", "10 min", "Li et al. 2020",
        "What does synchronizing only every n-th backward save? (figure 10)",
        needs=ROOT, reports=("study-skipped-sync",), runs=()),
    Experiment("round-robin", "papers.ddp_scale_figures:RoundRobinStudy", "10 min", "Li et al. 2020",
        "What do process groups in turn gain? (figure 12)", needs=ROOT, reports=("study-round-robin",), runs=()),
    Experiment("scaling", "papers.mlstm_scaling", "20 min", "Puri et al. 2018",
        "How does training scale over ranks, by model size, link and precision?",
        needs=ROOT, reports=("study-mlstm-scaling",), runs=()),
    # How far off are predictions?
    Experiment("prediction", "prediction.emulated_clusters:PredictionStudy", "20 min", "median 10 %",
        "How far off are the simulator's steps, on emulated clusters of many shapes?",
        needs=ROOT, reports=("study-prediction",), runs=()),
    Experiment("predicted-steps", "prediction.predicted_steps", "2 min", "median 10 %",
        "How far off are the simulator's steps of emulated clusters that were measured before?", needs=CHECKOUT),
    # How long does a kernel SVM take?
    Experiment("svm", "kernel_svm.fitting", "10 min", "6 x scikit-learn, 3.5 x sklearnex",
        "How long does a kernel SVM fit and predict?",
        reports=("svm", "svm-elimination-1ranks", "svm-elimination-2ranks")),
    Experiment("svm-elimination", "kernel_svm.elimination", "20 min", "",
        "Which shrinking heuristic is fastest, on which set?", runs=()),
    Experiment("svm-memory", "kernel_svm.memory", "5 min", "",
        "How much memory does a fit take on a rank?", runs=()),
)
# fmt: on
# Studies that are answered and no longer run, by the first words of their reports. Commits cb30c809 and f24ff1c5 have
# their code.
ANSWERED = (
    "adasum-steps",
    "bucket-order",
    "emulated-network",
    "guidelines",
    "halving-doubling",
    "hetseq-table",
    "idle-time",
    "minibatch-memory",
    "network-scale",
    "predicted-papers",
    "servers-to-loss",
    "shared-batch",
    "study-model-size",
    "study-threads",
)
EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}


def drawing_of(report: str) -> Callable[..., Any] | None:
    """Return what draws the stored report of this name; None if it has no picture.

    Raises:
        KeyError: Nothing is known to draw it.
    """
    drawn_by: dict[str, Callable[[], Callable[..., Any] | None]] = {
        "allreduce": lambda: _attribute("paceline_lab.bench.allreduce_report", "draw"),
        "step": lambda: _attribute("paceline_lab.bench.step_report", "draw"),
        "noise-scale": lambda: None,  # of a step that measures the noise scale, beside one that does not
        "mlstm-shakespeare": _drawing_of_the_example,
        "survival-beside": lambda: _attribute("paceline_lab.experiments.survival.beside", "draw"),
        **dict.fromkeys(ANSWERED, lambda: None),
    }
    for each in EXPERIMENTS.values():
        drawn_by |= dict.fromkeys(each.reports or (each.name,), each.drawing)
    words = f"{report.replace('_', '-')}-"
    fitting = [prefix for prefix in drawn_by if words.startswith(f"{prefix}-")]
    if not fitting:
        raise KeyError(f"{report}: no experiment of the registry leaves a report of this name")
    return drawn_by[max(fitting, key=len)]()


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _drawing_of_the_example() -> Callable[..., Any]:
    import runpy

    script = in_repository("examples/mlstm_shakespeare.py", "the example whose picture this is")
    return runpy.run_path(str(script))["draw"]  # type: ignore[no-any-return]

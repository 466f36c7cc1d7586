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


@dataclass(frozen=True)
class Experiment:
    """One question and the code that answers it.

    Attributes:
        name: Of the command.
        question: In one sentence.
        module: Below `paceline_lab.experiments`; with the name of a `Study` behind a colon, if it is one of time.
        target: What is aimed for, or whose claim is tested.
        takes: About how long, on two cores.
        needs: `ROOT`, `CHECKOUT` or nothing.
        reports: The first words of its stored reports' names. A module without `draw` leaves no pictures.
        runs: The options of each run of `paceline study all`; empty: it is not among them.
    """

    name: str
    question: str
    module: str
    target: str
    takes: str
    reports: tuple[str, ...]
    needs: str = ""
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
        """Whether this process may run it."""
        return self.needs != ROOT or os.geteuid() == 0


_WORKLOADS = ("tiny", "wide_mlp", "resnet50", "transformer", "mlstm")  # those that two cores can compute

_ALL = (
    # What does a step cost, and what hides behind it?
    Experiment(
        "overhead",
        "How much CPU time is added to backward per parameter, and to a step?",
        "step.overhead",
        "1.0 µs (1.5 with find_unused_parameters)",
        "1 min",
        ("overhead",),
    ),
    Experiment(
        "memory",
        "How much memory do gradients need at the peak?",
        "step.memory",
        "1.05 x their size",
        "2 min",
        ("memory",),
    ),
    Experiment(
        "step-time",
        "How long is a step of one workload, on one host?",
        "step.step_time",
        "1.00 x torch's; 0.9 on wide_mlp",
        "3 min a run",
        ("step_time",),
        runs=tuple(f"--workload {workload} --ranks {ranks}" for ranks in (2, 1) for workload in _WORKLOADS),
    ),
    Experiment(
        "overlap",
        "Which share of the ideal overlap is realised, by link and by bucket size?",
        "step.overlap",
        "0.95 behind 1 Gbit/s",
        "10 min",
        ("overlap",),
        runs=("--rate 1Gbit --rounds 5",) if os.geteuid() == 0 else ("",),
    ),
    Experiment(
        "forward-overlap",
        "How much shorter is a step whose gradients the next forward hides as well?",
        "step.forward_overlap",
        "0.82 of torch's, 1.05 of the least",
        "5 min",
        ("forward_overlap",),
        ROOT,
    ),
    Experiment(
        "forward-overlap-loss",
        "How much sooner does a training with forward overlap come down to a loss?",
        "step.forward_overlap_loss",
        "0.9 of torch's time",
        "5 min",
        ("forward_overlap_loss",),
        ROOT,
    ),
    Experiment(
        "bucket-caps",
        'Does `bucket_cap_mb="auto"` find the caps with the shortest steps?',
        "step.bucket_caps",
        "1.03 x the best of a grid, 1.01 x the default",
        "5 min",
        ("bucket_caps",),
        ROOT,
    ),
    Experiment(
        "skipped-layers",
        "What does a step save that leaves layers out?",
        "step.skipped_layers",
        "no longer than torch's",
        "5 min a run",
        ("skipped_layers",),
        ROOT,
        ("--case depth", "--case backbone"),
    ),
    Experiment(
        "optimizers",
        "How long is a step of LARS and LAMB, beside torch's foreach SGD and Adam?",
        "step.optimizers",
        "1.3 x torch's",
        "3 min",
        ("optimizers",),
    ),
    Experiment(
        "adasum-updates",
        "How much of combining updates by Adasum does backward hide?",
        "step.adasum_updates",
        "",
        "3 min",
        ("adasum-updates",),
        ROOT,
    ),
    # How long does a reduction take?
    Experiment(
        "adasum",
        "How long does a bucket take by Adasum, and by the mean, and how many bytes?",
        "reduction.adasum",
        "",
        "2 min a run",
        ("adasum",),
        runs=("", "--ranks 4", *(["--hosts 2 --rate 1Gbit"] if os.geteuid() == 0 else [])),
    ),
    Experiment(
        "collectives",
        "How long do torch's collectives of ordinary tensors take, and FSDP2's step, over our backend and Gloo?",
        "reduction.collectives",
        "",
        "2 min",
        ("collectives",),
    ),
    Experiment(
        "compression",
        "What does each compressor cost one rank, beside a copy of memory?",
        "reduction.compression",
        "",
        "3 min",
        ("compression",),
    ),
    Experiment(
        "auto-compression",
        'Does `compression="auto"` choose well, from 50 Mbit/s to no limit?',
        "reduction.auto_compression",
        "1.05 x the best fixed choice, 1.02 x none",
        "20 min",
        ("auto-compression",),
        ROOT,
    ),
    Experiment(
        "parameter-servers",
        "When do parameter servers win against an all-reduce, and how many does lemma 3.2 ask for?",
        "reduction.parameter_servers",
        "knee within 1 server",
        "5 min a run",
        ("parameter_servers",),
        ROOT,
        ("--case lemma", "--case symmetric", "--case asymmetric"),
    ),
    # What do lost packets cost?
    Experiment(
        "bounded-loss",
        "How long does a sum take where packets are lost, over UDP with bounded loss, and over TCP?",
        "datagrams.bounded_loss",
        "docs/guide/bounded-loss.md, by row",
        "2 min a run",
        ("bounded_loss",),
        ROOT,
        (),
    ),
    Experiment(
        "emulated-network",
        "How long do sums and pushes take on emulated hosts, by bounded loss and TCP?",
        "datagrams.emulated_network",
        "",
        "10 min a run",
        ("emulated-network",),
        ROOT,
        (),
    ),
    Experiment(
        "shared-port",
        "How do sums by bounded loss and a TCP connection share a port that both send into?",
        "datagrams.shared_port",
        "Jain 0.9",
        "1 min a run",
        ("shared_port",),
        ROOT,
        (),
    ),
    Experiment(
        "network",
        "How long do flows take on leaf-spines of 16 to 144 hosts, bounded loss beside TCPs? (simulated)",
        "datagrams.network_scale",
        "DLCP's",
        "1 h",
        ("network-scale",),
        runs=(),
    ),
    Experiment(
        "network-check",
        "How far is the simulated network from emulated ones?",
        "datagrams.network_check",
        "10 %",
        "20 min",
        ("network-check",),
        runs=(),
    ),
    # What does it cost in accuracy?
    Experiment(
        "large-batch",
        "What do large batches, compression and local steps cost in accuracy?",
        "accuracy.large_batch",
        "the papers'",
        "hours",
        ("large-batch",),
        runs=(),
    ),
    Experiment(
        "loss-bound",
        "What do gradients that are lost cost in accuracy?",
        "accuracy.loss_bound",
        "",
        "hours",
        ("loss-bound",),
        runs=(),
    ),
    # Do unequal machines work all the time?
    Experiment(
        "unequal",
        'Do unequal machines work all the time, with `balance="auto"`?',
        "unequal.shares",
        "1.05 x the ideal in 10 steps; 1.01 x fixed shares on equal ranks",
        "5 min",
        ("unequal",),
    ),
    Experiment(
        "time-to-loss",
        "How long do unequal machines take to a given loss, by torch, HetSeq's rule, fixed and automatic shares?",
        "unequal.time_to_loss",
        "1.15 x the ideal, 1.05 x after 20 steps",
        "30 min",
        ("time_to_loss",),
        ROOT,
    ),
    Experiment(
        "hetseq-table",
        "What does HetSeq's table of 1 to 8 nodes become with shares by speed?",
        "unequal.hetseq_table",
        "1.05 x the ideal",
        "10 min",
        ("hetseq_table",),
    ),
    # Is it right, whatever a script does?
    Experiment(
        "fuzz",
        "Does any random training program give other gradients than one process on the whole batch?",
        "fuzz",
        "no mismatch",
        "30 min",
        ("fuzz",),
        CHECKOUT,
    ),
    Experiment(
        "soak",
        "Do shares that change at random lose or double a sample, or let replicas drift?",
        "unequal.soak",
        "nothing lost, nothing doubled",
        "2 min",
        (),
        runs=(),
    ),
    # Do the papers' figures come out here?
    Experiment(
        "paper-overlap",
        "What does overlapping communication with backward save? (figure 6)",
        "papers.ddp_step_figures:OverlapStudy",
        "Li et al. 2020",
        "5 min",
        ("study-overlap",),
        ROOT,
        (),
    ),
    Experiment(
        "bucket-size",
        "How long is a step, by bucket size? (figures 7 and 8)",
        "papers.ddp_step_figures:BucketSizeStudy",
        "Li et al. 2020",
        "10 min",
        ("study-bucket-size",),
        ROOT,
        (),
    ),
    Experiment(
        "rank-count",
        "How long is a step, by number of ranks? (figure 9)",
        "papers.ddp_scale_figures:RankCountStudy",
        "Li et al. 2020",
        "10 min",
        ("study-rank-count",),
        ROOT,
        (),
    ),
    Experiment(
        "skipped-sync",
        "What does synchronizing only every n-th backward save? (figure 10)",
        "papers.ddp_scale_figures:SkippedSyncStudy",
        "Li et al. 2020",
        "10 min",
        ("study-skipped-sync",),
        ROOT,
        (),
    ),
    Experiment(
        "round-robin",
        "What do process groups in turn gain? (figure 12)",
        "papers.ddp_scale_figures:RoundRobinStudy",
        "Li et al. 2020",
        "10 min",
        ("study-round-robin",),
        ROOT,
        (),
    ),
    Experiment(
        "threads",
        "Are threads of one process slower than processes?",
        "papers.worker_threads:ThreadsStudy",
        "Puri et al. 2018",
        "5 min",
        ("study-threads",),
        runs=(),
    ),
    Experiment(
        "model-size",
        "How does a step of real computation grow with the model?",
        "papers.model_size:ModelSizeStudy",
        "Puri et al. 2018",
        "5 min",
        ("study-model-size",),
        runs=(),
    ),
    Experiment(
        "scaling",
        "How does training scale over ranks, by model size, link and precision?",
        "papers.mlstm_scaling",
        "Puri et al. 2018",
        "20 min",
        ("study-mlstm-scaling",),
        ROOT,
        (),
    ),
    # How far off are predictions?
    Experiment(
        "prediction",
        "How far off are the simulator's steps, on emulated clusters of many shapes?",
        "prediction.emulated_clusters:PredictionStudy",
        "median 10 %",
        "20 min",
        ("study-prediction",),
        ROOT,
        (),
    ),
    Experiment(
        "predicted-steps",
        "How far off are the simulator's steps of emulated clusters that were measured before?",
        "prediction.predicted_steps",
        "median 10 %",
        "2 min",
        ("predicted-steps",),
        CHECKOUT,
    ),
    Experiment(
        "predicted-papers",
        "Does the simulator reproduce published figures on scaling?",
        "prediction.predicted_papers",
        "median 10 %",
        "2 min",
        ("predicted-papers",),
    ),
    Experiment(
        "guidelines",
        "Do the guidelines of Zou et al. hold?",
        "prediction.guidelines",
        "Zou et al. 2017",
        "10 min",
        ("guidelines",),
    ),
    Experiment(
        "minibatch-memory",
        "Is the memory of a minibatch what the model of Zou et al. says?",
        "prediction.minibatch_memory",
        "Zou et al. 2017",
        "1 min",
        ("minibatch-memory",),
    ),
    # How long does a kernel SVM take?
    Experiment(
        "svm",
        "How long does a kernel SVM fit and predict?",
        "kernel_svm.fitting",
        "6 x scikit-learn, 3.5 x sklearnex",
        "10 min",
        ("svm", "svm-elimination-1ranks", "svm-elimination-2ranks"),
    ),
    Experiment(
        "svm-elimination",
        "Which shrinking heuristic is fastest, on which set?",
        "kernel_svm.elimination",
        "",
        "20 min",
        ("svm-elimination",),
        runs=(),
    ),
    Experiment(
        "svm-memory",
        "How much memory does a fit take on a rank?",
        "kernel_svm.memory",
        "",
        "5 min",
        ("svm-memory",),
        runs=(),
    ),
    Experiment(
        "svm-ranks",
        "What does each of 1 to 64 ranks do in one fit (counted), and how long would it take (predicted)?",
        "kernel_svm.over_ranks",
        "",
        "5 min",
        ("svm-ranks",),
    ),
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
        "noise-scale": lambda: None,  # from the launcher's `--noise-scale`
        "mlstm-shakespeare": _drawing_of_the_example,
    }
    drawn_by |= {prefix: each.drawing for each in EXPERIMENTS.values() for prefix in each.reports}
    fitting = [prefix for prefix in drawn_by if report == prefix or report.startswith(f"{prefix}-")]
    if not fitting:
        raise KeyError(f"{report}: no experiment of the registry leaves a report of this name")
    return drawn_by[max(fitting, key=len)]()


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _drawing_of_the_example() -> Callable[..., Any]:
    import runpy

    script = in_repository("examples/mlstm_shakespeare.py", "the example whose picture this is")
    return runpy.run_path(str(script))["draw"]  # type: ignore[no-any-return]

"""Published figures on scaling as cases for the simulator: fitted on half of the points, predicted on the others.

A case has free numbers (a link's rate, a latency, ...) because papers say little of what their clusters really
delivered. Whatever is fitted is printed; what the model has no mechanism for is said beside it and not fitted away.

Sources: Li et al., VLDB 2020, figures 7 to 10 and 12; Goyal et al. 2017, section 5.5; the sentiment-discovery page on
scaling. Numbers are read off the pictures (`published`), to within a few per cent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

from paceline.errors import ConfigurationError
from paceline.plan import Cluster, HostLink, RecordedWorkload, ReductionPlan, simulate
from paceline.planning import AlphaBetaCost
from paceline.planning.bucket_assignment import MEBIBYTE
from paceline.schedules.topology import Link
from paceline_lab.bench.layer_profile import default_profile
from paceline_lab.bench.timed_model import planned
from paceline_lab.experiments.papers.published import (
    BUCKET_CAPS,
    BUCKET_SECONDS,
    GROUP_SECONDS,
    GROUPS,
    MLSTM_GPUS,
    MLSTM_SPEED_UP,
    SCALING_GPUS,
    SCALING_SECONDS,
    SKIPPED_ALONE_S,
    SKIPPED_EVERY,
    SKIPPED_SECONDS,
)
from paceline_lab.experiments.prediction.groups_in_turn import GroupsInTurn

GPUS_A_SERVER = 8
Numbers = Mapping[str, float]
Predict = Callable[[Numbers, float], float]


@dataclass(frozen=True)
class PaperCase:
    """One published curve.

    Attributes:
        figure: Which figure it is of.
        label: Of the curve.
        x: What the points are over.
        y: What they show.
        points: Published.
        fitted: The x of those that are fitted; the others are predicted.
        start: Free numbers and where their fit starts.
        predict: From numbers and x to y.
        remark: What cannot be fitted, and why.
    """

    figure: str
    label: str
    x: str
    y: str
    points: tuple[tuple[float, float], ...]
    fitted: tuple[float, ...]
    start: Numbers
    predict: Predict
    remark: str = ""


@dataclass(frozen=True)
class CaseOutcome:
    """A case with its numbers fitted."""

    case: PaperCase
    numbers: Numbers
    predicted: tuple[float, ...]

    def errors(self, *, fitted: bool) -> list[float]:
        """Predicted over published, less 1, of one half."""
        return [
            y / wanted - 1
            for (x, wanted), y in zip(self.case.points, self.predicted, strict=True)
            if (x in self.case.fitted) == fitted
        ]

    def words(self, *, fitted: bool) -> str:
        """Median and worst error of one half."""
        errors = self.errors(fitted=fitted)
        if not errors:
            return "-"
        return f"{median(map(abs, errors)):.1%}, {max(errors, key=abs):+.1%}"


def solve(case: PaperCase) -> CaseOutcome:
    """Fit the free numbers of a case on its half, in logarithms; predict all points."""
    numbers = dict(case.start)
    if case.fitted and numbers:
        try:
            from scipy.optimize import least_squares  # only this needs it
        except ImportError as error:
            raise ConfigurationError("fitting needs scipy: pip install scipy.") from error
        names = list(numbers)
        wanted = [(x, y) for x, y in case.points if x in case.fitted]

        def errors(logs: Sequence[float]) -> list[float]:
            tried = {
                name: start * math.exp(log)
                for (name, start), log in zip(case.start.items(), logs, strict=True)
            }
            return [math.log(case.predict(tried, x) / y) for x, y in wanted]

        found = least_squares(errors, [0.0] * len(names), bounds=(-6, 6), diff_step=0.02)
        numbers = {
            name: start * math.exp(log)
            for (name, start), log in zip(case.start.items(), found.x, strict=True)
        }
    return CaseOutcome(case, numbers, tuple(case.predict(numbers, x) for x, _ in case.points))


def _model(name: str, compute_s: float) -> RecordedWorkload:
    """A shipped workload whose whole step on one device takes `compute_s`."""
    found = _shipped(name)
    return found.taking(compute_s / found.compute_s)


@cache
def _shipped(name: str) -> RecordedWorkload:
    return planned(default_profile(name))


def _gpus(
    number: float, rate: float, latency_s: float = 0.0, within: float = math.inf, collective_s: float = 0.0
) -> Cluster:
    link = HostLink(rate, latency_s)
    made = Cluster.of_equal_hosts(int(number), link, GPUS_A_SERVER, Link(0.0, within))
    return replace(made, collective_s=collective_s)


def bucket_cases() -> list[PaperCase]:
    """Figures 7 and 8: a step by bucket cap."""
    cases = []
    for (model, backend, gpus), seconds in BUCKET_SECONDS.items():
        caps = BUCKET_CAPS[model]

        def predict(numbers: Numbers, cap: float, model: str = model, gpus: int = gpus) -> float:
            workload = _model(model, numbers["compute s"])
            cluster = _gpus(gpus, numbers["rate B/s"], collective_s=numbers["collective s"])
            return simulate(workload, cluster, ReductionPlan((cap * MEBIBYTE,), "ring")).step_s

        start = {"compute s": 0.8 * min(seconds), "rate B/s": 1e9, "collective s": 4e-4}
        remark = ""
        if backend == "Gloo":
            remark = (
                "the least step, at 5 MB, is lower than any bucket size makes it here: what Gloo's copies between GPU "
                "and host cost large buffers is not in the model"
            )
        fitted = tuple(float(cap) for cap in caps[::2])
        points = tuple((float(cap), s) for cap, s in zip(caps, seconds, strict=True))
        label = f"{model}, {backend}, {gpus} GPUs"
        cases.append(
            PaperCase("DDP 7, 8", label, "bucket cap MB", "s a step", points, fitted, start, predict, remark)
        )
    return cases


def scaling_cases() -> list[PaperCase]:
    """Figure 9: a step by number of GPUs."""
    cases = []
    for (model, backend), seconds in SCALING_SECONDS.items():

        def predict(numbers: Numbers, gpus: float, model: str = model, alone_s: float = seconds[0]) -> float:
            workload = _model(model, alone_s)
            cluster = _gpus(gpus, numbers["rate B/s"], numbers["round s"], numbers["within B/s"])
            copies = AlphaBetaCost(0.0, numbers["copies s"] / workload.gradient_bytes)
            return simulate(workload, cluster, ReductionPlan((25 * MEBIBYTE,), "ring", launch=copies)).step_s

        start = {"rate B/s": 2e9, "round s": 2e-5, "within B/s": 2e10, "copies s": 0.02}
        points = tuple(zip(map(float, SCALING_GPUS), seconds, strict=True))
        remark = "a shared cluster beyond 32 GPUs: BERT on NCCL is slower on 16 GPUs than on 128" * (
            model == "bert"
        )
        cases.append(
            PaperCase(
                "DDP 9",
                f"{model}, {backend}",
                "GPUs",
                "s a step",
                points[1:],
                (2, 16, 64, 256),
                start,
                predict,
                remark,
            )
        )
    return cases


def skipping_cases() -> list[PaperCase]:
    """Figure 10: 256 GPUs that synchronize every n-th micro-step."""
    cases = []
    for backend, seconds in SKIPPED_SECONDS.items():

        def predict(numbers: Numbers, every: float) -> float:
            plan = ReductionPlan((25 * MEBIBYTE,), "ring", sync_every=int(every))
            cluster = _gpus(256, numbers["rate B/s"], 2e-5)
            return simulate(_model("resnet50", SKIPPED_ALONE_S), cluster, plan).micro_step_s

        points = tuple(zip(map(float, SKIPPED_EVERY), seconds, strict=True))
        remark = "n = 8 slower than n = 4: nothing in skipping does that" * (backend == "NCCL")
        cases.append(
            PaperCase(
                "DDP 10", f"resnet50, {backend}, 256 GPUs", "micro-steps a synchronization", "s a micro-step",
                points, (1, 4), {"rate B/s": 2e9}, predict, remark,
            )
        )  # fmt: skip
    return cases


def group_cases() -> list[PaperCase]:
    """Figure 12: 16 GPUs, process groups in turn."""
    cases = []
    for (model, backend), seconds in GROUP_SECONDS.items():
        gains = (model, backend) == ("bert", "NCCL")
        alone_s = {"resnet50": 0.099, "bert": 0.219}[model]

        def predict(numbers: Numbers, groups: float, model: str = model, alone_s: float = alone_s) -> float:
            rate = numbers["rate B/s"]
            cluster = _gpus(16, rate)
            if "connection B/s" in numbers:
                cluster = replace(cluster, flow_bytes_per_s=min(numbers["connection B/s"], rate))
            plan = GroupsInTurn((25 * MEBIBYTE,), "ring", num_groups=int(groups))
            return simulate(_model(model, alone_s), cluster, plan).step_s

        start = {"rate B/s": 2e9} | ({"connection B/s": 1e9} if gains else {})
        points = tuple(zip(map(float, GROUPS), seconds, strict=True))
        remark = "" if gains else "no gain: one connection fills the link, so all numbers of groups are alike"
        cases.append(
            PaperCase(
                "DDP 12", f"{model}, {backend}, 16 GPUs", "process groups", "s a step",
                points, (1, 5) if gains else (1,), start, predict, remark,
            )
        )  # fmt: skip
    return cases


GOYAL_STEP_S = 29 * 3600 * 256 / (90 * 1_281_167)  # 8 GPUs: 29 hours for 90 epochs, batches of 256
GOYAL_POINTS = ((256.0, GOYAL_STEP_S * 32 / 29), (352.0, GOYAL_STEP_S * 1.12))
_SPREAD = tuple(-math.log(1 - (i + 0.5) / 64) for i in range(64))  # an exponential distribution's quantiles


def goyal_cases() -> list[PaperCase]:
    """8 to 352 GPUs: one hour on 256, and 12 % longer iterations on 352."""

    def step_s(gpus: float, spread: float) -> float:
        steps = tuple(1 + spread * x for x in _SPREAD) if spread else ()
        workload = replace(_model("resnet50", GOYAL_STEP_S), relative_steps=steps)
        cluster = _gpus(gpus, 50e9 / 8, 3e-5, 1e11)
        plan = ReductionPlan(algorithm="hierarchical_halving_doubling")
        return simulate(workload, cluster, plan, num_steps=20 if spread else 1).step_s

    common = ("Goyal 5.5", "GPUs", "s a step", GOYAL_POINTS)
    return [
        PaperCase(
            common[0], "ResNet-50, links of 50 Gbit/s, nothing fitted", *common[1:], (), {},
            lambda _, gpus: step_s(gpus, 0.0), "the network hides; what remains needs ranks that vary",
        ),
        PaperCase(
            common[0], "... with ranks that vary", *common[1:], (256,), {"spread": 0.01},
            lambda numbers, gpus: step_s(gpus, numbers["spread"]), "exponential delays, their size fitted",
        ),
    ]  # fmt: skip


_MLSTM_STEP_S = {"4k": 0.94, "8k": 3.71}


def mlstm_cases() -> list[PaperCase]:
    """Speed-up to 128 GPUs: one all-reduce after backward, in 16 bits."""
    found = []
    for curve, speed_ups in MLSTM_SPEED_UP.items():
        size = curve.partition(",")[0]

        def predict(numbers: Numbers, gpus: float, size: str = size) -> float:
            workload = _model(f"mlstm-{size}", _MLSTM_STEP_S[size])
            cluster = _gpus(gpus, numbers["rate B/s"], collective_s=numbers["fixed s"])
            plan = ReductionPlan((math.inf,), "ring", payload_ratio=0.5, overlap=False)
            return gpus * _MLSTM_STEP_S[size] / simulate(workload, cluster, plan).step_s

        points = tuple(
            (float(n), float(y))
            for n, y in zip(MLSTM_GPUS, speed_ups, strict=True)
            if y is not None and n > 8
        )
        start = {"rate B/s": 2e9, "fixed s": 0.05}
        found.append(PaperCase("mLSTM", curve, "GPUs", "speed-up", points, (16, 64), start, predict))
    return found


def eight_from_four(four: CaseOutcome) -> CaseOutcome:
    """The 8k model predicted with the numbers of the 4k one on the same network: nothing fitted."""
    eight = next(case for case in mlstm_cases() if case.label.startswith("8k"))
    case = replace(eight, label=f"{eight.label}, by the numbers of 4k", fitted=())
    return CaseOutcome(case, four.numbers, tuple(case.predict(four.numbers, x) for x, _ in case.points))


def all_cases() -> list[PaperCase]:
    """Every curve."""
    return [
        *bucket_cases(), *scaling_cases(), *skipping_cases(), *group_cases(), *goyal_cases(), *mlstm_cases(),
    ]  # fmt: skip

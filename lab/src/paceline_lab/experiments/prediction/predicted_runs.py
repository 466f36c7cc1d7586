"""Sets the simulator's steps beside measured ones of emulated clusters, and fits what emulation costs.

An emulated cluster is not a cluster: its ranks share this machine's cores, and at 16 ranks that costs more than the
links do. Six numbers say how much; they are fitted on some runs, and hold for all others:

    goodput      part of a link's rate that carries gradients
    latency      of a round
    and of `EmulationCost`: processor time of a collective, a message, a byte, a layer

The same prediction without the last four is what hosts with cores of their own would take: both are in the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.errors import ConfigurationError
from paceline.planning.bucket_assignment import MEBIBYTE
from paceline_lab.bench.layer_profile import Profile
from paceline_lab.bench.timed_model import gradient_bytes, planned
from paceline_lab.experiments.papers.variants import Variant, bucket_caps_mb
from paceline_lab.experiments.prediction.groups_in_turn import GroupsInTurn
from paceline_plan import Cluster, HostLink, RecordedWorkload, ReductionPlan, simulate


@dataclass(frozen=True)
class EmulationCost:
    """Processor time that emulated hosts take from each other because they share a machine; a real cluster has none.

    Attributes:
        cores: Cores of the machine that emulates.
        collective_s: Time of one rank for one collective.
        message_s: Time of sending one message and receiving it.
        s_per_byte: Time of sending and receiving one byte.
        layer_s: Time of one rank for one layer's forward or backward: sleeping and waking up, and autograd.
    """

    cores: int = 1
    collective_s: float = 0.0
    message_s: float = 0.0
    s_per_byte: float = 0.0
    layer_s: float = 0.0

    def __post_init__(self) -> None:
        costs = (self.collective_s, self.message_s, self.s_per_byte, self.layer_s)
        if self.cores < 1 or not all(0 <= cost < math.inf for cost in costs):
            raise ConfigurationError(f"{self}: at least one core, and no cost below 0")


@dataclass(frozen=True)
class EmulatedHosts(Cluster):
    """A cluster whose hosts are emulated.

    Attributes:
        emulation: Costs of the emulation.
    """

    emulation: EmulationCost = EmulationCost()

    def overhead_s(self, messages: int, bytes_ratio: float) -> tuple[float, float]:
        """The library's, and processor time that ranks take from each other."""
        cost = self.emulation
        shared_s = self.num_ranks / cost.cores * cost.collective_s
        fixed_s = self.collective_s + shared_s + messages / cost.cores * cost.message_s
        return fixed_s, bytes_ratio / cost.cores * cost.s_per_byte

    def layer_overhead_s(self) -> float:
        """Longer where more ranks than cores wake up."""
        return self.emulation.layer_s * max(1.0, self.num_ranks / self.emulation.cores)

    def describe(self) -> str:
        """One line for a report."""
        return f"{super().describe()}, with what emulation costs"


_UNITS = (0.95, 1e-4, 1e-3, 1e-4, 1e-10, 1e-4)  # of the fitted numbers, so that all are about 1
_LEAST, _MOST = (0.8, 0, 0, 0, 0, 0), (1.06, 50, 50, 50, 50, 50)
_NUM_STEPS = 40  # simulated, where something is drawn
CORES = 2


@dataclass(frozen=True)
class Run:
    """One variant that was measured.

    Attributes:
        label: Label of the cluster or study.
        name: Name of the variant.
        workload: Computation of each rank.
        links: The hosts' links as they were asked for; ranks are on hosts of their own.
        plan: Reduction of the gradients.
        steps_s: Measured; means over micro-steps.
        flow_bytes_per_s: Cap of a connection.
        speeds: Speeds of the ranks; empty: all 1.
    """

    label: str
    name: str
    workload: RecordedWorkload
    links: tuple[HostLink, ...]
    plan: ReductionPlan
    steps_s: tuple[float, ...]
    flow_bytes_per_s: float = math.inf
    speeds: tuple[float, ...] = ()

    @property
    def measured_s(self) -> float:
        """Median."""
        return median(self.steps_s)


@dataclass(frozen=True)
class Fitted:
    """The parameters that were fitted."""

    goodput: float
    latency_s: float
    emulation: EmulationCost

    def cluster(self, run: Run, *, emulated: bool = True) -> Cluster:
        """The cluster of a run, with or without what emulation costs."""
        links = tuple(
            HostLink(link.bytes_per_s * self.goodput, self.latency_s + link.latency_s, link.loss_ratio)
            for link in run.links
        )
        hosts, limit = (1,) * len(links), run.flow_bytes_per_s
        if not emulated:
            return Cluster(hosts, links, speeds=run.speeds, flow_bytes_per_s=limit)
        costs = self.emulation
        return EmulatedHosts(hosts, links, speeds=run.speeds, flow_bytes_per_s=limit, emulation=costs)

    def step_s(self, run: Run, *, emulated: bool = True) -> float:
        """The predicted step, or micro-step."""
        cluster = self.cluster(run, emulated=emulated)
        is_lossy = any(link.loss_ratio for link in run.links)
        return simulate(run.workload, cluster, run.plan, num_steps=_NUM_STEPS if is_lossy else 1).micro_step_s


def fit(runs: Sequence[Run]) -> Fitted:
    """The six numbers with the least errors over `runs`; far outliers count little.

    Raises:
        ConfigurationError: scipy is missing.
    """
    try:
        from scipy.optimize import least_squares  # only this needs it
    except ImportError as error:
        raise ConfigurationError("fitting needs scipy: pip install scipy.") from error

    def errors(numbers: Sequence[float]) -> list[float]:
        fitted = _from(numbers)
        return [math.log(fitted.step_s(run) / run.measured_s) for run in runs]

    found = least_squares(
        errors, [1.0] * len(_UNITS), bounds=(_LEAST, _MOST), loss="soft_l1", f_scale=0.03, diff_step=0.02
    )
    return _from(found.x)


def _from(numbers: Sequence[float]) -> Fitted:
    goodput, latency_s, *costs = (float(x) * unit for x, unit in zip(numbers, _UNITS, strict=True))
    return Fitted(goodput, latency_s, EmulationCost(CORES, *costs))


def run_of(
    label: str,
    variant: Variant,
    profile: Profile,
    scale: float,
    links: Sequence[HostLink],
    steps_s: Sequence[float],
) -> Run:
    """Return the simulator's input for a variant of the time studies: torch and Paceline over Gloo, which is a ring."""
    num_ranks = 1 if variant.side == "none" else variant.num_ranks
    if variant.side in ("after", "none"):
        caps: tuple[float, ...] = (math.inf,)
    else:
        caps = tuple(cap * MEBIBYTE / scale for cap in bucket_caps_mb(variant, gradient_bytes(profile)))
    plan = GroupsInTurn(
        caps,
        "ring",
        payload_ratio=0.5 if variant.half else 1.0,
        sync_every=variant.sync_every,
        num_groups=variant.num_groups,
        overlap=variant.side != "after",
    )
    speeds = (
        ()
        if variant.first_rank_slowness == 1
        else (1 / variant.first_rank_slowness,) + (1.0,) * (num_ranks - 1)
    )
    return Run(
        label,
        str(variant.side),
        planned(profile, scale),
        tuple(links[:num_ranks]),
        plan,
        tuple(steps_s),
        variant.flow_bytes_per_s or math.inf,
        speeds,
    )


@dataclass(frozen=True)
class Errors:
    """The errors of the predictions for the runs of one label."""

    label: str
    num: int
    median_ratio: float
    worst_ratio: float
    worst: str

    @classmethod
    def of(cls, label: str, runs: Sequence[Run], fitted: Fitted) -> Errors:
        """Compare."""
        ratios = [fitted.step_s(run) / run.measured_s - 1 for run in runs]
        worst = max(range(len(runs)), key=lambda i: abs(ratios[i]))
        run = runs[worst]
        words = f"{run.label}: {run.name}, {len(run.links)} ranks, {run.plan.describe()}"
        return cls(label, len(runs), median(map(abs, ratios)), ratios[worst], words)


def samples(runs: Sequence[Run], fitted: Fitted) -> list[dict[str, Any]]:
    """Every run with its predictions, as JSON takes it."""
    return [
        {
            "label": run.label,
            "variant": run.name,
            "workload": run.workload.name,
            "ranks": len(run.links),
            "plan": run.plan.describe(),
            "measured_s": round(run.measured_s, 6),
            "steps_s": [round(step_s, 6) for step_s in run.steps_s],
            "predicted_s": round(fitted.step_s(run), 6),
            "without_emulation_s": round(fitted.step_s(run, emulated=False), 6),
        }
        for run in runs
    ]


def summary(fitted: Fitted, errors: Sequence[Errors]) -> Mapping[str, Any]:
    """Return the summary of a report's JSON."""
    return {
        "fitted": {"goodput": fitted.goodput, "latency_s": fitted.latency_s, **vars(fitted.emulation)},
        "errors": {x.label: {k: v for k, v in vars(x).items() if k != "label"} for x in errors},
    }

"""Measure when parameter servers win against an all-reduce, and how many lemma 3.2 of Zou et al. 2017 asks for.

Workers and servers are hosts of an emulated cluster; a worker's layers sleep as long as ResNet-50's compute, its
gradients and their traffic are real. In the same processes, step by step in turn: torch's DistributedDataParallel over
Gloo, ours over Gloo, and ours with 1, 2, ... servers.

    --case lemma        workers' links do not limit, servers' do: how many servers until a step gets no shorter?
    --case symmetric    all links alike: the servers' links come on top of what the all-reduce has
    --case asymmetric   servers on fat links
    --case second       lemma 3.2 again, on what nothing was fitted to: BERT's gradients, three workers, other links

"alone" computes and reduces nothing: what the simulator (`planning.simulate`) is told of computing, as it would be by a
recording. Its links have the same rates less 5 % for headers. Only the simulator's `two_way_ratio` is fitted to these
runs, to the lemma's odd numbers of servers. The knee is the fewest servers with which a step is as long as with the
most, to within 2 %.

Limit: all hosts share two cores; "busy" says how much of them was used.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigurationError
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder
from paceline_lab.experiments.reduction.server_jobs import run_workers, told_to_worker
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure, show_ratio
from paceline_lab.report.look import CURVE_COLORS, OURS, look_of
from paceline_lab.report.panels import Line, Lines
from paceline_lab.report.publication import Report, stored_report
from paceline_lab.report.summary import Summary, slowest_rank

if TYPE_CHECKING:
    from paceline_lab.bench.provenance import Provenance

PAYLOAD_RATIO = 0.95  # of a link's rate; the rest is headers
KNEE = 0.02  # of a step: so much longer counts as no longer
WARM_UP_STEPS = 3
TOLERANCE = 1e-6
MEBIBYTE = 2**20
ALONE = "alone"
_ONE_LINE = 0.02  # all-reduces that differ by less lie on each other in a picture
_PATIENCE_S = 400.0


@dataclass(frozen=True)
class Config:
    """One case.

    Attributes:
        case: Name of the case.
        num_workers: Hosts with a rank.
        servers: Numbers of servers, one side each.
        worker_mbit: Rate of a worker's link, in each direction.
        server_mbit: Rate of a server's link.
        megabytes: Approximate size of the gradients.
        compute_s: Forward and backward together.
        num_rounds: Number of rounds. Every side takes a step in each.
        workload: Workload whose gradients it has.
        num_sharing: Workers that share a batch: each computes so much less of `compute_s`; the optimizer stays whole.
        divides_caps: Whether buckets are as many as the whole model's. False: as a wrapper cuts these megabytes.
            What a message costs cannot be divided: neither its packets, one of which is lost, nor its processor time.
    """

    case: str
    num_workers: int
    servers: tuple[int, ...]
    worker_mbit: float
    server_mbit: float
    megabytes: float
    compute_s: float
    num_rounds: int = 12
    workload: str = "resnet50"
    num_sharing: int = 1
    divides_caps: bool = True

    @property
    def sides(self) -> list[str]:
        return [ALONE, "torch", "ours", *(f"{number} servers" for number in self.servers)]


CASES = {
    "lemma": Config("lemma", 4, (1, 2, 3, 4, 5, 6, 7, 8), 200, 32, 1.5, 0.6),
    "second": Config("second", 3, (1, 2, 3, 4, 5, 6, 7, 8), 150, 40, 1.8, 0.5, workload="bert"),
    "symmetric": Config("symmetric", 4, (1, 2, 4), 50, 50, 4.0, 0.6),
    "asymmetric": Config("asymmetric", 4, (1, 2), 50, 400, 4.0, 0.6),
}


# ---- on a worker's host


def work(config: Config, addresses: Sequence[str]) -> None:
    """Train all sides in turn; rank 0 prints the slowest rank's steps."""
    import torch
    import torch.distributed as dist

    from paceline_lab.bench.sides import digest

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainees = {side: _Trainee(side, config, addresses) for side in config.sides}
    steps_s: dict[str, list[float]] = {side: [] for side in trainees}
    counted = {side: Counter[str]() for side in trainees}
    for number in range(-WARM_UP_STEPS, config.num_rounds):
        order = list(trainees) if number % 2 else list(reversed(trainees))
        for side in order:
            before = Counter(_tcp_counters())
            taken_s = trainees[side].step()
            if number >= 0:
                steps_s[side].append(taken_s)
                counted[side].update(_tcp_counters())
                counted[side].subtract(before)
    found = {}
    for side, trainee in trainees.items():
        gradients = [p.grad for p in trainee.module.parameters() if p.grad is not None]
        mine = (
            steps_s[side],
            0.0 if side == ALONE else trainee.module.expected_error(gradients, config.num_workers),
            "" if side == ALONE else digest(gradients),
            counted[side],
        )
        every: list[Any] = [None] * config.num_workers
        dist.all_gather_object(every, mine)
        found[side] = {
            "steps_s": slowest_rank([each[0] for each in every]),
            "error": max(each[1] for each in every),
            "ranks_equal": len({each[2] for each in every}) == 1,
            "tcp_per_step": {
                name: sum(each[3][name] for each in every) / config.num_workers / config.num_rounds
                for name in counted[side]
            },
        }
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def _tcp_counters() -> dict[str, int]:
    table: dict[str, int] = {}
    for file in ("snmp", "netstat"):
        lines = [line.split() for line in Path(f"/proc/self/net/{file}").read_text().splitlines()]
        for names, numbers in zip(lines[::2], lines[1::2], strict=True):
            table |= {
                names[0] + name: int(number) for name, number in zip(names[1:], numbers[1:], strict=True)
            }
    return {
        "received bytes": table["IpExt:InOctets"],
        "sent again": table["Tcp:RetransSegs"],
        "out of order": table["TcpExt:TCPOFOQueue"],
    }


class _Trainee:
    """One side on this rank."""

    def __init__(self, side: str, config: Config, addresses: Sequence[str]) -> None:
        import torch.distributed as dist

        from paceline_lab.bench.sides import wrap
        from paceline_lab.bench.timed_model import SleepingOptimizer, TimedModel
        from paceline_servers import ParameterServers

        profile, scale = _profile(config)
        self.module = TimedModel(profile, dist.get_rank(), scale)
        self.optimizer = SleepingOptimizer(self.module.parameters(), profile.optimizer_s)
        self.model: Any = self.module
        if side == ALONE:
            return
        wrapper = "torch" if side == "torch" else "ours"
        how: dict[str, Any] = {}
        if config.divides_caps:
            how["bucket_cap_mb_list"] = [cap / MEBIBYTE for cap in caps_of(wrapper, config)]
        if side not in ("torch", "ours"):
            how["reduction"] = ParameterServers(addresses[: int(side.removesuffix(" servers"))])
        self.model = wrap(wrapper, self.module, init_sync=False, **how)  # parameters are never read

    def step(self) -> float:
        """Train a step behind a barrier. Collective."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        begun_s = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        self.model(torch.zeros(1, requires_grad=True)).sum().backward()
        self.optimizer.step()
        return time.perf_counter() - begun_s


def _profile(config: Config) -> tuple[Any, float]:
    from paceline_lab.bench.layer_profile import default_profile
    from paceline_lab.bench.timed_model import gradient_bytes

    whole = default_profile(config.workload).taking(config.compute_s)
    profile = replace(whole.taking(config.compute_s / config.num_sharing), optimizer_s=whole.optimizer_s)
    return profile, gradient_bytes(profile) / (config.megabytes * 1e6)


def caps_of(wrapper: str, config: Config) -> tuple[float, ...]:
    """Bytes that fill buckets: the wrapper's defaults for several hosts, of this model or, divided, of the whole."""
    from paceline.planning.bucket_assignment import BucketCaps
    from paceline_lab.bench.timed_model import gradient_bytes

    profile, scale = _profile(config)
    divisor = scale if config.divides_caps else 1.0
    if wrapper == "torch":
        return tuple(cap * MEBIBYTE / divisor for cap in (1.0, 25.0))
    size_bytes = int(gradient_bytes(profile) / scale * divisor)
    caps = BucketCaps.default(size_bytes, any_on_cpu=True, on_one_host=False, num_ranks=config.num_workers)
    return tuple(cap / divisor for cap in caps.caps_bytes)


# ---- the cluster


def measure(config: Config) -> tuple[dict[str, Any], float]:
    """Build the cluster, run the workers; what they found, and how busy this machine was."""
    from paceline_lab.emulation import ClusterSpec

    most = max(config.servers, default=0)
    rates = [config.worker_mbit * 1e6] * config.num_workers + [config.server_mbit * 1e6] * most
    spec = ClusterSpec(hosts=len(rates), rate_bits_per_s=tuple(rates), offload=True)
    return run_workers(spec, config.num_workers, __name__, {"config": asdict(config)}, _PATIENCE_S)


def worker() -> None:
    """A worker's process."""
    told = told_to_worker()
    fields = told["config"] | {"servers": tuple(told["config"]["servers"])}
    work(Config(**fields), told["addresses"])


# ---- what was predicted


def predict(config: Config, alone_s: float | None = None) -> tuple[dict[str, float], Any]:
    """The simulator's steps by side, and lemma 3.2 beside the simulator's number of servers.

    Args:
        config: The case.
        alone_s: A step that reduces nothing, as measured; None: as it was meant to be.
    """
    from paceline_lab.bench.timed_model import planned
    from paceline_plan import Cluster, HostLink, ReductionPlan, Servers, simulate
    from paceline_plan.lemmas import compare_servers

    profile, scale = _profile(config)
    if alone_s is not None:
        compute_s = profile.forward_s + profile.backward_s
        profile = profile.taking(compute_s * alone_s / (compute_s + profile.optimizer_s))
    workload = planned(profile, scale)
    worker_rate = config.worker_mbit * 125_000 * PAYLOAD_RATIO
    server_rate = config.server_mbit * 125_000 * PAYLOAD_RATIO
    cluster = Cluster.of_equal_hosts(config.num_workers, HostLink(worker_rate, 2e-4))
    ours = ReductionPlan(caps_of("ours", config), "ring")
    steps_s = {
        ALONE: simulate(workload, Cluster.of_equal_hosts(1, HostLink(worker_rate)), ours).step_s,
        "torch": simulate(workload, cluster, ReductionPlan(caps_of("torch", config), "ring")).step_s,
        "ours": simulate(workload, cluster, ours).step_s,
    }
    for number in config.servers:
        plan = replace(ours, servers=Servers(number, server_rate))
        steps_s[f"{number} servers"] = simulate(workload, cluster, plan).step_s
    return steps_s, compare_servers(workload, cluster, ours, server_rate)


def knee_of(steps_s: Mapping[int, float]) -> int:
    """The fewest servers with which a step is as long as with the most, to within `KNEE`."""
    enough_s = steps_s[max(steps_s)] * (1 + KNEE)
    return min(number for number, step_s in steps_s.items() if step_s <= enough_s)


def main(
    case: Annotated[str, typer.Option(help=f"One of {', '.join(CASES)}.")] = "lemma",
    rounds: Annotated[
        int, typer.Option(min=2, help="Number of measuring rounds. Each side takes one step per round.")
    ] = 12,
    rescore: Annotated[
        bool, typer.Option("--rescore", help="Simulate the stored cases again. Measures nothing.")
    ] = False,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Compare steps with parameter servers and with all-reduces."""
    from paceline_lab.bench.protocol import WrongAnswerError
    from paceline_lab.bench.provenance import Provenance, collect

    if case not in CASES:
        raise ConfigurationError(f"--case {case}: there are {', '.join(CASES)}.")
    name = f"parameter_servers-{case}" + "-quick" * quick
    if rescore:
        stored = stored_report(report_folder / f"{name}.json")
        config = Config(**stored["config"] | {"servers": tuple(stored["config"]["servers"])})
        provenance = Provenance(**stored["provenance"])
        report = _scored(name, config, stored["samples"], stored["summaries"]["busy"], provenance)
        conclude(report, report_folder, as_json, draw)
        return
    config = replace(CASES[case], num_rounds=rounds)
    if quick:
        config = replace(config, num_workers=2, servers=(1, 2), megabytes=0.2, compute_s=0.05, num_rounds=2)
    found, busy = measure(config)
    for side, result in found.items():
        if not (result["ranks_equal"] and result["error"] <= TOLERANCE):
            raise WrongAnswerError(
                f"the gradients of {side} are {result['error']:.2g} off: its times mean nothing."
            )
    report = _scored(name, config, found, busy, collect(config.num_workers))
    conclude(report, report_folder, as_json, draw)


def _scored(
    name: str, config: Config, found: Mapping[str, Any], busy: float, provenance: Provenance
) -> Report:
    steps = {side: Summary.of(result["steps_s"]) for side, result in found.items()}
    predicted, lemma = predict(config, steps[ALONE].median if ALONE in steps else None)
    errors = {side: predicted[side] / steps[side].median - 1 for side in steps if side in predicted}
    knees = {
        "lemma": lemma.lemma,
        "simulated": knee_of({n: predicted[f"{n} servers"] for n in config.servers}),
        "measured": knee_of({n: steps[f"{n} servers"].median for n in config.servers}),
    }
    rows = tuple(
        (
            side,
            steps[side].text(1e3, 0),
            f"{steps[side].median / steps['ours'].median:.2f}",
            f"{steps[side].median / steps['torch'].median:.2f}",
            f"{predicted[side] * 1e3:.0f}" if side in predicted else "",
            f"{errors[side]:+.1%}" if side in errors else "",
        )
        for side in steps
    )
    notes = (
        (
            f"{config.num_workers} workers on {config.worker_mbit:g} Mbit/s, servers on {config.server_mbit:g} Mbit/s; "
            f"{config.megabytes:g} MB of gradients, {config.compute_s * 1e3:.0f} ms of computing"
        ),
        (
            f"knee (within {KNEE:.0%} of the most servers): lemma 3.2 {knees['lemma']}, simulated "
            f"{knees['simulated']}, measured {knees['measured']} of {max(config.servers)}"
        ),
        f"busy {busy:.0%} of this machine's cores",
    )
    return Report(
        name=name,
        question="When do parameter servers win against an all-reduce, and how many are needed?",
        columns=(
            "side",
            "step ms",
            "/ Paceline's all-reduce",
            "/ torch",
            "simulated ms",
            "simulator's error",
        ),
        rows=rows,
        verdicts=(),
        notes=notes,
        config=config,
        summaries={
            "steps": {side: asdict(step) for side, step in steps.items()},
            "predicted_s": predicted,
            "errors": errors,
            "median_error": median(abs(error) for side, error in errors.items() if side != ALONE),
            "knees": knees,
            "to_ours": {side: step.median / steps["ours"].median for side, step in steps.items()},
            "to_torch": {side: step.median / steps["torch"].median for side, step in steps.items()},
            "busy": busy,
        },
        samples=dict(found),
        provenance=provenance,
    )


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw steps against the number of servers, with all-reduces as levels, from a stored report."""
    summaries, config = record["summaries"], record["config"]
    steps = {side: Summary(**found).times(1e3) for side, found in summaries["steps"].items()}
    numbers = list(config["servers"])
    measured = Line.of("measured", [(n, steps[f"{n} servers"]) for n in numbers], OURS)
    predicted = [(n, 1e3 * summaries["predicted_s"][f"{n} servers"]) for n in numbers]
    sides = {"torch": "torch's all-reduce", "ours": "Paceline's all-reduce"}
    if abs(steps["torch"].median / steps["ours"].median - 1) < _ONE_LINE:
        sides = {"ours": "all-reduce (both)"}
    levels = [
        Line(name, [(n, steps[side].median) for n in numbers], look_of(side).color, ":", "")
        for side, name in sides.items()
    ]
    lines = [measured, Line.published("simulated", predicted, CURVE_COLORS[2]), *levels]
    ticks = {n: str(n) for n in numbers}
    best = min(numbers, key=lambda n: steps[f"{n} servers"].median)
    words = show_ratio(steps[f"{best} servers"].median / steps["ours"].median, "with Paceline's all-reduce")
    title = f"With {best} parameter server{'s' * (best > 1)} a step is {words}"
    if config["case"] in ("lemma", "second"):
        knees = summaries["knees"]
        title = f"Lemma 3.2 asks for {knees['lemma']} servers; measured, {knees['measured']} are enough"
        ticks |= {
            knees["lemma"]: f"{knees['lemma']}\nlemma 3.2",
            knees["measured"]: f"{knees['measured']}\nenough",
        }
    panel = Lines("", "parameter servers", "step time, ms", lines, ticks)
    return draw_figure(path, title, [panel], record["notes"][0])

"""The study of bounded loss on leaf-spine networks of 16 to 144 hosts, simulated packet by packet, beside TCPs.

Jobs of 16 hosts stand anywhere in the network; in each, 15 workers push to a parameter server, which is the incast that
the paper's flow-completion times are of. All ranks run the transport's own protocol code.

Source:
    Wang et al. 2020 (DLCP): 144 hosts of 100 Gbit/s, simulated; flow completion 43 % below DCTCP's on average, 92 % in
    the tail. Here hosts have 1 Gbit/s, since the protocol's constants are for the hosts that we have.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from paceline.errors import ConfigurationError
from paceline_lab.experiments.accuracy.store import TrialStore
from paceline_lab.experiments.datagrams.network_check import HANDING_OVER_US, JITTER_US, WAY_US
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    OnlyShow,
    ReportFolder,
    StoreFile,
    counts_in,
)
from paceline_lab.experiments.runner import Findings, Measured, Study, keeping, run_study
from paceline_lab.packet_network.leaf_spine import LeafSpine
from paceline_lab.packet_network.sides import Times, Traffic, measure
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, OURS
from paceline_lab.report.panels import Bar, Bars
from paceline_lab.report.terminal import progress_bar

JOB_HOSTS, SPINES = 16, 4
_HOSTS_A_RACK = 16
_MARK_BYTES = 32 * 1024
_QUEUE_BYTES = 128 * 1024
_RATE = 1e9

INCAST = ("cubic", "tuned", "DCTCP", "DCTCP, rto_min 5 ms", "ours, bound 0", "ours, bound 5 %")
ABLATION = ("ours, 5 %, sprayed", "ours, 5 %, classes", "ours, 5 %, sprayed, classes")
SPRAYING = ("cubic", "cubic, sprayed", "tuned", "tuned, sprayed", "ours, bound 0", "ours, bound 0, sprayed")
RING = ("cubic", "tuned", "ours, bound 0")
SMALL_INCAST = ("cubic", "cubic, rto_min 5 ms", "tuned", "ours, bound 0", "ours, bound 5 %")
_SMALL_HOSTS, _SMALL_BYTES, _SMALL_REPEATS = 9, 100_000, 20
_KIB = 1024
SMALL_QUEUES = {f"8 to 1, 100 Mbit/s, a port holds {kib} KiB": kib * _KIB for kib in (16, 64)}


@dataclass(frozen=True)
class ScaleOptions:
    """What is simulated.

    Attributes:
        hosts: Of the networks.
        flow_bytes: What a worker pushes.
        large_bytes: The same, and what is summed, for questions that are asked of the smallest network only.
        repeats: Pushes of every job in each placement.
        placements: How often all is placed anew: jobs' hosts, flows' ways, what is lost.
        all_questions: Whether spraying, layers, sums and small ports are asked of the smallest network, too.
        seed: Of the first placement.
        at_most_s: After that no further case is begun; the notes say how many were left out.
    """

    hosts: tuple[int, ...] = (16, 64, 144)
    flow_bytes: tuple[int, ...] = (100_000,)
    large_bytes: int = 400_000
    repeats: int = 2
    placements: int = 5
    all_questions: bool = False
    seed: int = 1
    at_most_s: float = 3600.0

    def __post_init__(self) -> None:
        for hosts in self.hosts:
            if hosts % JOB_HOSTS or not JOB_HOSTS <= hosts <= 144:
                raise ConfigurationError(
                    f"--hosts {hosts} is not possible: pass a multiple of {JOB_HOSTS}, at most 144."
                )


QUICK = ScaleOptions(
    hosts=(16,), flow_bytes=(20_000,), large_bytes=20_000, repeats=1, placements=1, all_questions=True
)


@dataclass(frozen=True)
class Case:
    """A question, a network and a side."""

    question: str
    hosts: int
    num_bytes: int
    side: str


@dataclass(frozen=True)
class ScaleTrial:
    """All that a case's times depend on; the fields are those of `Case` and `ScaleOptions`."""

    question: str
    hosts: int
    num_bytes: int
    side: str
    repeats: int
    placements: int
    seed: int

    @classmethod
    def of(cls, case: Case, options: ScaleOptions) -> ScaleTrial:
        """Return what a case becomes with these options."""
        return cls(**asdict(case), repeats=options.repeats, placements=options.placements, seed=options.seed)


def network(hosts: int, side: str) -> LeafSpine:
    """A leaf-spine of this many hosts, whose uplinks carry half of what its hosts can send."""
    racks = max(2, hosts // _HOSTS_A_RACK)
    sees_marks = side.startswith(("ours", "DCTCP"))
    return LeafSpine(
        hosts,
        racks,
        SPINES,
        _RATE,
        hosts / racks / 2 / SPINES * _RATE,
        _QUEUE_BYTES,
        mark_bytes=_MARK_BYTES if sees_marks else None,
        drop_bytes=_MARK_BYTES,
    )


def cases(options: ScaleOptions) -> list[Case]:
    """All of them. Our variants of the largest pushes in the largest network are left out: each takes minutes."""
    largest_push = (max(options.hosts), max(options.flow_bytes)) if len(options.hosts) > 1 else None
    found = [
        Case("incast", hosts, size, side)
        for hosts in options.hosts
        for size in options.flow_bytes
        for side in (*INCAST, *(() if (hosts, size) == largest_push else ABLATION))
    ]
    if not options.all_questions:
        return found
    few, largest = min(options.hosts), options.large_bytes
    found += [Case("incast", few, largest, side) for side in (*INCAST, *ABLATION)]
    found += [
        Case(question, _SMALL_HOSTS, _SMALL_BYTES, side) for question in SMALL_QUEUES for side in SMALL_INCAST
    ]
    found += [Case("layers", few, largest, side) for side in ("ours, bound 5 %", "ours, 5 %, classes")]
    found += [Case("ring", few, largest, side) for side in RING]
    found += [Case("one link loses 1 %", few, largest, side) for side in SPRAYING]
    found += [Case("one of four ways at a tenth of the rate", few, largest, side) for side in SPRAYING]
    return found


def run_case(case: Case, options: ScaleOptions) -> Times:
    """Simulate one case in all its placements."""
    seeds = range(options.seed, options.seed + options.placements)
    found = [_simulate(case, options, seed) for seed in seeds]
    chain = itertools.chain.from_iterable
    return Times(
        job_ms=tuple(chain(times.job_ms for times in found)),
        flow_ms=tuple(chain(times.flow_ms for times in found)),
        first_layer_ms=tuple(chain(times.first_layer_ms for times in found)),
        packets={name: sum(times.packets[name] for times in found) for name in found[0].packets},
        lost_ratio=statistics.fmean(times.lost_ratio for times in found),
    )


def _simulate(case: Case, options: ScaleOptions, seed: int) -> Times:
    if case.question in SMALL_QUEUES:
        return _small_incast(case, options, seed)
    spec = network(case.hosts, case.side)
    if case.question == "one of four ways at a tenth of the rate":
        spec = replace(spec, slow_uplink_ratio=0.1)
    elif case.question == "one link loses 1 %":
        spec = replace(spec, gray_loss_ratio=0.01)
    placed = np.random.default_rng(seed).permutation(case.hosts).tolist()
    jobs = [placed[first : first + JOB_HOSTS] for first in range(0, case.hosts, JOB_HOSTS)]
    is_push = case.question in ("incast", "layers")
    traffic = Traffic(
        jobs,
        case.num_bytes,
        is_push,
        num_vectors=7 if case.question == "layers" else 1,
        repeats=options.repeats,
    )
    return measure(case.side, spec, traffic, seed)


def _small_incast(case: Case, options: ScaleOptions, seed: int) -> Times:
    """Eight workers and a server as on emulated hosts, with late turns and slow links (`network_check`)."""
    spec = LeafSpine(case.hosts, rate_bits_per_s=1e8, way_us=WAY_US, queue_bytes=SMALL_QUEUES[case.question])
    traffic = Traffic(
        [list(range(case.hosts))],
        case.num_bytes,
        True,
        repeats=_SMALL_REPEATS if options.repeats > 1 else 2,
        pause_us=150_000,
        jitter_us=JITTER_US,
        handing_over_us=HANDING_OVER_US,
    )
    return measure(case.side, spec, traffic, seed)


class ScaleStudy(Study[ScaleOptions]):
    """Flow completion times by side.

    Args:
        file: Of simulated cases; whatever stops the study, they are kept there.
        only_show: Whether to simulate nothing.
    """

    def __init__(self, file: Path, only_show: bool = False) -> None:
        self._file, self._only_show = file, only_show

    def report_name(self, options: ScaleOptions) -> str:
        return "network-scale"

    def measure(self, options: ScaleOptions) -> Measured:
        """Simulate the cases that the file does not have.

        Raises:
            ConfigurationError: The file is something else.
        """
        store = TrialStore(self._file, ScaleTrial, Times)
        todo = {case: ScaleTrial.of(case, options) for case in cases(options)}
        until_s = time.monotonic() + options.at_most_s
        with progress_bar("simulating leaf-spine networks") as progress:
            for number, (case, trial) in enumerate(todo.items()):
                progress(number / len(todo))
                is_missing = store.get(trial) is None and not self._only_show
                if is_missing and time.monotonic() < until_s:
                    store.add(trial, run_case(case, options))
        there = {case: store.get(trial) for case, trial in todo.items()}
        found = {case: times for case, times in there.items() if times is not None}
        samples = [asdict(case) | _rounded(times) for case, times in found.items()]
        left_out = len(todo) - len(found)
        note = f"not complete: {left_out} of {len(todo)} cases are missing; the same command goes on"
        return Measured(found, {"cases": samples}, [note] if left_out else [])

    def find(self, outcomes: Mapping[Case, Times], options: ScaleOptions) -> Findings:
        rows, summaries = [], {}
        for case, times in outcomes.items():
            figures = {
                "mean_ms": statistics.fmean(times.flow_ms),
                "p99_ms": float(np.percentile(times.flow_ms, 99)),
                "job_ms": statistics.fmean(times.job_ms),
                "job_p99_ms": float(np.percentile(times.job_ms, 99)),
                "flows": len(times.flow_ms),
                "first_layer_ms": statistics.fmean(times.first_layer_ms),
                "lost_ratio": times.lost_ratio,
                "overflowed": times.packets["overflowed"],
                "selected": times.packets["selected"],
            }
            summaries[f"{case.question}, {case.hosts} hosts, {case.num_bytes // 1000} kB: {case.side}"] = (
                figures
            )
            rows.append(
                (
                    f"{case.question}, {case.hosts} hosts, {case.num_bytes // 1000} kB",
                    case.side,
                    f"{figures['mean_ms']:.1f}",
                    f"{figures['p99_ms']:.1f}",
                    f"{figures['job_ms']:.1f}",
                    f"{figures['job_p99_ms']:.1f}",
                    f"{figures['first_layer_ms']:.1f}",
                    f"{100 * times.lost_ratio:.1f} %",
                )
            )
        return Findings(
            "How long do flows take on leaf-spine networks of 16 to 144 hosts?",
            ("case", "side", "flow mean, ms", "flow p99", "job mean", "job p99", "front layer", "let go"),
            rows,
            (
                (
                    f"jobs of {JOB_HOSTS} hosts anywhere; hosts 1 Gbit/s, uplinks half of what hosts can send, over "
                    f"{SPINES} spines; a port holds {_QUEUE_BYTES // 1024} KiB a band, marks above "
                    f"{_MARK_BYTES // 1024} KiB for DCTCP and bounded loss; a link takes 5 us"
                ),
                "tuned is BBR with a smallest timeout of 5 ms; simulated, nothing of it was measured",
                (
                    f"{options.placements} placements of all jobs and ways, {options.repeats} times each, after one "
                    "time that is not counted"
                ),
                "classes: half of the packets may be dropped above the mark threshold, bands by layer",
            ),
            {"cases": summaries},
        )

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        return draw(record, path)


def _rounded(times: Times) -> dict[str, Any]:
    """The samples to 10 us: there are tens of thousands."""
    samples = ("job_ms", "flow_ms", "first_layer_ms")
    return asdict(times) | {name: [round(ms, 2) for ms in getattr(times, name)] for name in samples}


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each side's tail, a panel for each incast."""
    found = record["summaries"]["cases"]
    panels = []
    for name in dict.fromkeys(key.split(":")[0] for key in found if key.startswith("incast")):
        bars = [
            Bar(_in_words(key.split(": ")[1]), figures["p99_ms"], OURS if "ours" in key else BASELINE)
            for key, figures in found.items()
            if key.startswith(f"{name}:")
        ]
        panels.append(Bars(name.replace("incast, ", ""), "99th percentile, ms", bars))
    return draw_figure(path, _title(found), panels, record["notes"][0], columns=2)


def _in_words(side: str) -> str:
    """Of bounded loss, its bound and what else: its bars have a colour of their own."""
    return side.removeprefix("ours, ").replace("5 %, ", "bound 5 %, ")


def _title(found: Mapping[str, Mapping[str, float]]) -> str:
    """What the largest network says of the tails, beside the published figure."""
    tails: dict[str, dict[str, float]] = {}
    for key, figures in found.items():
        name, side = key.split(": ")
        if name.startswith("incast"):
            tails.setdefault(name.replace("incast, ", ""), {})[side] = figures["p99_ms"]
    compared = {
        name: min(ms for side, ms in by_side.items() if side.startswith("ours")) / by_side["DCTCP"]
        for name, by_side in tails.items()
        if "DCTCP" in by_side and any(side.startswith("ours") for side in by_side)
    }
    if not compared:
        return "Tails of flows on leaf-spine networks"
    last = max(compared, key=lambda name: int(name.split(" ")[0]))
    return f"{last}: the best tail of bounded loss is {compared[last]:.2g} times DCTCP's, where DLCP published 0.08"


def main(
    hosts: Annotated[
        str, typer.Option(help="Numbers of hosts, comma-separated, multiples of 16.")
    ] = "16,64,144",
    flow_bytes: Annotated[str, typer.Option(help="Bytes that a worker pushes, comma-separated.")] = "100000",
    repeats: Annotated[int, typer.Option(min=1, help="Number of pushes of each job per placement.")] = 2,
    placements: Annotated[
        int, typer.Option(min=1, help="Number of random placements of jobs, paths and losses.")
    ] = 5,
    all_questions: Annotated[
        bool,
        typer.Option(
            "--all-questions",
            help="Also simulate spraying, layers, sums and small ports on the smallest network.",
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Random seed of the first placement. The same seed gives the same times.")
    ] = 1,
    at_most_s: Annotated[float, typer.Option(help="Seconds after which no further case begins.")] = 3600.0,
    quick: Annotated[bool, typer.Option("--quick", help="Quick smoke test: 16 hosts, one push.")] = False,
    store: StoreFile = None,
    report_folder: ReportFolder = REPORT_FOLDER,
    only_show: OnlyShow = False,
    as_json: AsJson = False,
) -> None:
    """Simulate leaf-spine networks packet by packet: bounded loss beside TCPs, and what DLCP's claims come to."""
    given = ScaleOptions(
        hosts=counts_in("--hosts", hosts),
        flow_bytes=counts_in("--flow-bytes", flow_bytes),
        repeats=repeats,
        placements=placements,
        all_questions=all_questions,
        seed=seed,
        at_most_s=at_most_s,
    )
    file = store or report_folder / "network-scale.jsonl"
    with keeping(file):
        run_study(ScaleStudy(file, only_show), QUICK if quick else given, report_folder, as_json)

"""Measure how long a sum over emulated hosts takes where packets are lost: bounded loss over UDP, and Gloo over TCP.

Sides alternate call by call within one job. Gloo runs with the cluster's TCP: cubic as the kernel has it, or BBR with a
smallest retransmission timeout of 5 ms. Each is a cluster of its own (`--tcp` for one). Paceline is measured in both.

    paceline study bounded-loss --hosts 4 --rate 100mbit --loss 1% --megabytes 1

Other cases:

1. `--layers 6`: how long the first layer's gradient takes while a TCP connection loads the network. It is launched
   last, behind so many others of `--megabytes` each; with priorities, and without. Where ports do not know them
   (`--without-switch`), that connection takes most of a port. All layers then take some 4 s: use few `--repeats`.
2. `--compute-s 0.4`: a training step of a VGG-16 whose layers sleep so long, with `--megabytes` of gradients.
3. `--overlap-forward`: consecutive steps, each side with forward overlap and without, and what the front layer waits.
4. `--second-rate 40mbit`: hosts have two links, the second one of that rate. The kernel chooses a link by ports: by
   one port of each rank, and by eight.

The results of every case are stored side by side, under a name that describes it. The wire's time is that of the bytes
that every rank of an all-reduce has to send, without any header.

Limit: all hosts share this machine's cores; see "busy" in the output, and repeat what is above 90 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigurationError
from paceline_lab.bench.provenance import collect, load_average
from paceline_lab.emulation import Change, ClusterSpec
from paceline_lab.experiments.datagrams.rank_jobs import TCP, keep, run_job
from paceline_lab.experiments.options import REPORT_FOLDER, ReportFolder
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, OURS
from paceline_lab.report.panels import Dots

NAME = "bounded_loss"
_RANK_PROGRAM = Path(__file__).with_name("bounded_loss_rank.py")
_BASELINES = ("Gloo", "torch over Gloo", "without priorities", "bound 0")


@dataclass(frozen=True)
class Case:
    """One measurement, and its cluster.

    Attributes:
        hosts: Number of hosts, with one rank each.
        rate: Rate of each link.
        loss: Random loss of each link.
        delay: Delay one way; "" for none.
        mtu: Largest packet, in bytes.
        megabytes: Size of the vector; of a layer, with layers; of all gradients, with a step.
        repeats: Repeats of every side.
        layers: Number of layers that the first one waits for; 0: no layers.
        compute_s: Computing time of a step; 0: no step.
        overlaps: Whether consecutive steps are measured, with forward overlap and without.
        has_switch: Whether ports know priorities.
        second_rate: Rate of every host's second link; "" if there is none.
    """

    hosts: int
    rate: str
    loss: str
    delay: str
    mtu: int
    megabytes: float
    repeats: int
    layers: int
    compute_s: float
    overlaps: bool
    has_switch: bool
    second_rate: str

    @property
    def kind(self) -> str:
        if self.layers or self.compute_s:
            return "layers" if self.layers else "overlap" if self.overlaps else "step"
        return "paths" if self.second_rate else "sum"

    @property
    def name(self) -> str:
        """Return the case's name among the results."""
        what = {
            "sum": f"{self.megabytes:g} MB",
            "paths": f"{self.megabytes:g} MB over two links",
            "layers": f"first of {self.layers + 1} layers",
            "step": f"VGG-16 step of {self.compute_s:g} s and {self.megabytes:g} MB",
            "overlap": f"VGG-16 steps in a row of {self.compute_s:g} s and {self.megabytes:g} MB",
        }[self.kind]
        rates = " and ".join(filter(None, (self.rate, self.second_rate)))
        parts = [what, f"{self.hosts} hosts", rates, f"loss {self.loss}"]
        parts += [f"delay {self.delay}"] if self.delay else []
        parts += [f"MTU {self.mtu}"] if self.mtu != 1500 else []
        parts += ["without switch"] if self.can_know and not self.has_switch else []
        return ", ".join(parts)

    @property
    def can_know(self) -> bool:
        """Return whether there are priorities that ports may know."""
        return self.kind in ("layers", "overlap")

    def spec(self, tcp: str) -> ClusterSpec:
        """The cluster, with one of the TCPs."""
        threshold = "60KB" if self.can_know and self.has_switch else None
        return ClusterSpec.parse(
            hosts=self.hosts,
            rate=self.rate,
            loss=self.loss,
            delay=self.delay or None,
            mtu=self.mtu,
            priority=threshold is not None,
            mark=threshold,
            drop=threshold,
            links=2 if self.second_rate else 1,
            **TCP[tcp],
        )

    @property
    def slower_link(self) -> Change | None:
        """Return the change that makes the second link differ from the first."""
        return Change.parse("rate", None, self.second_rate, link=1) if self.second_rate else None

    @property
    def wire_ms(self) -> float:
        """Return the time of one sum's bytes on the wire."""
        first = self.spec("cubic").rate_bits_per_s[0]
        assert first is not None
        rate = first + (self.slower_link.value if self.slower_link else 0)
        return 2e3 * (self.hosts - 1) / self.hosts * self.megabytes * 8e6 / rate


def summarise(samples: Sequence[dict[str, float]], wire_ms: float) -> dict[str, float]:
    """Medians, the worst time, the 99th percentile (of fewer than 100 the worst), the share of the wire's rate."""
    found = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    ordered = sorted(sample["ms"] for sample in samples)
    return {
        **found,
        "worst_ms": ordered[-1],
        "p99_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "num_samples": len(ordered),
        "of_wire": wire_ms / found["ms"],
    }


def main(
    hosts: Annotated[int, typer.Option(help="Number of hosts, with one rank each.")] = 4,
    rate: Annotated[str, typer.Option(help="Rate of each link, for example 100Mbit.")] = "100mbit",
    loss: Annotated[
        str, typer.Option(help="Share of packets that each link loses at random, for example 1%.")
    ] = "1%",
    delay: Annotated[str, typer.Option(help="Delay of a packet between two hosts, one way.")] = "",
    mtu: Annotated[int, typer.Option(help="Size of the largest IP packet, in bytes.")] = 1500,
    megabytes: Annotated[float, typer.Option(help="Megabytes of the vector.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Number of repetitions of each side.")] = 11,
    tcp: Annotated[str, typer.Option(help="TCP to compare with: cubic or tuned.", show_default="both")] = "",
    layers: Annotated[
        int, typer.Option(help="Number of layers in front of the measured one. Measures priorities.")
    ] = 0,
    compute_s: Annotated[
        float, typer.Option(help="Seconds of computing per step. Measures steps instead of sums.")
    ] = 0.0,
    overlap_forward: Annotated[
        bool, typer.Option("--overlap-forward", help="With --compute-s: measure forward overlap.")
    ] = False,
    without_switch: Annotated[
        bool, typer.Option("--without-switch", help="Send priorities, which the ports ignore.")
    ] = False,
    second_rate: Annotated[str, typer.Option(help="Rate of a second link of each host.")] = "",
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Run one job for each TCP; print medians, and keep all samples."""
    if tcp not in ("", *TCP):
        raise ConfigurationError(f"--tcp {tcp!r} must be one of {', '.join(TCP)}.")
    case = Case(
        hosts,
        rate,
        loss,
        delay,
        mtu,
        megabytes,
        repeats,
        layers,
        compute_s,
        overlap_forward,
        has_switch=not without_switch,
        second_rate=second_rate,
    )
    for kind in [tcp] if tcp else list(TCP):
        load = load_average()
        told = asdict(case) | {"kind": case.kind}
        samples, busy = run_job(
            case.spec(kind), _RANK_PROGRAM, told, 240 + 30 * repeats, change=case.slower_link
        )
        summary = {side: summarise(taken, case.wire_ms) for side, taken in samples.items()}
        baseline = next(summary[side]["ms"] for side in _BASELINES if side in summary)
        for row in summary.values():
            row["times_as_fast"] = baseline / row["ms"]
        name = f"{case.name}, {kind}"
        record = {"case": asdict(case), "busy": round(busy, 2), "sides": samples}
        record["provenance"] = asdict(collect(hosts, load))
        keep(report_folder / f"{NAME}.json", name, record, summary)
        print(f"{name}; busy {busy:.0%}, load {load}")
        for side, row in summary.items():
            print(f"  {side:22s} " + "  ".join(f"{column} {value:.4g}" for column, value in row.items()))


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw what the bound gains and what TCP costs, over exact datagrams, in every stored case that has all three."""
    rows: dict[str, tuple[float, float]] = {}
    for name, sides in record["summaries"].items():
        for prefix, suffix in (("ours, ", ""), ("", ""), ("", ", overlap")):
            exact, bounded = (sides.get(f"{prefix}bound {bound}{suffix}") for bound in ("0", "5 %"))
            over_tcp = sides.get(f"Gloo{suffix}") or sides.get("torch over Gloo")
            if exact and bounded and over_tcp:
                rows[_shown(name) + suffix] = (over_tcp["ms"] / exact["ms"], bounded["ms"] / exact["ms"])
    ordered = dict(sorted(rows.items(), key=lambda row: row[1], reverse=True))
    tcp, bounds = zip(*ordered.values(), strict=True)
    return draw_figure(
        path,
        f"With a bound of 5 %, transfers take {min(bounds):.2f} to {max(bounds):.2f} of exact ones' time",
        [
            Dots(
                "",
                "time / exact datagrams' time",
                list(ordered),
                [("bound of 5 %", OURS, bounds), ("TCP", BASELINE, tcp)],
                {1.0: "1", 1.5: "1.5", 2.0: "2", 4.0: "4", 8.0: "8"},
                ("exact datagrams", 1.0),
            )
        ],
        "Medians; lower is better. Sums of 1 and 25 MB, and steps of VGG-16's shape with 8 MB, whose layers sleep, by "
        "emulated hosts, lost packets and TCP: cubic, or tuned (BBR, a smallest timeout of 5 ms).",
    )


def _shown(name: str) -> str:
    """Return a case's name without the parts that all cases share."""
    for long, short in (
        (" of 0.4 s and 8 MB", ""),
        (" in a row of 0.3 s and 8 MB", " in a row"),
        (", without switch", ""),
        (", MTU 9000", ""),
        (" hosts, 100mbit", " x 100 Mbit/s"),
        (" hosts, 200mbit", " x 200 Mbit/s"),
        (" hosts, 1gbit", " x 1 Gbit/s"),
        ("loss ", ""),
        ("delay 5ms", "5 ms"),
        ("VGG-16 step", "step"),
    ):
        name = name.replace(long, short)
    return name.replace("%", " %")

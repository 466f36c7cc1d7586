"""An emulated cluster, a job on it and a check of it, for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.lab.emulation import quantities as q
from paceline.lab.report import table

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.lab.emulation.check import Finding
    from paceline.lab.emulation.cluster import Counters
    from paceline.lab.emulation.job import Outcome
    from paceline.lab.emulation.spec import ClusterSpec

_CROWDED = 0.95


def settings(spec: ClusterSpec) -> Table:
    """Every setting that shapes a measurement."""
    return table("Emulated cluster", ("", "asked"), spec.describe())


def traffic(outcome: Outcome) -> Table:
    """What became of each host, and what its links carried."""
    columns = ["host", "exit code", "sent", "received", "packets lost", "queue drops", "TCP retransmits"]
    marks = outcome.spec.mark_bytes is not None or outcome.spec.drop_bytes is not None
    if marks:
        columns += ["ECN marks", "not-ECN drops"]
    rows = [
        [f"host{host}", "stopped" if code is None else str(code), *_words(counted, marks=marks)]
        for host, (code, counted) in enumerate(zip(outcome.exit_codes, outcome.counters, strict=True))
    ]
    return table(f"Job, {outcome.wall_s:.1f} s", columns, rows)


def findings(found: Sequence[Finding]) -> Table:
    """Asked against measured."""
    verdicts = {True: "yes", False: "NO", None: ""}
    rows = [(f.what, f.asked, f.measured, verdicts[f.ok], f.note) for f in found]
    return table("Check", ("", "asked", "measured", "agrees", ""), rows)


def remarks(outcome: Outcome) -> Iterator[str]:
    """What may have shaped the figures besides the spec."""
    if outcome.busy_ratio > _CROWDED:
        yield (
            f"This machine's cores were {outcome.busy_ratio:.0%} busy: they, not the links, may have set the pace. "
            "Fewer hosts, a lower --rate, a larger --mtu or --offload need less."
        )
    lost = sum(counted.wire_drops for counted in outcome.counters)
    if lost:
        yield (
            f"The emulation itself lost {lost} packets: this machine is too slow for that --delay at that --rate "
            "without netem. Lower the rate, or pass --offload."
        )


def outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    """All of an outcome; sizes in bytes, times in seconds."""
    return asdict(outcome) | {"remarks": list(remarks(outcome)), "failure": outcome.failure()}


def _words(counted: Counters, *, marks: bool) -> list[str]:
    words = [
        q.show_size(counted.sent_bytes),
        q.show_size(counted.received_bytes),
        str(counted.lost_packets),
        str(counted.port_drops + counted.host_drops),
        str(counted.retransmits),
    ]
    return [*words, str(counted.marked_packets), str(counted.not_ecn_drops)] if marks else words

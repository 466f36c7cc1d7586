"""`paceline doctor` before a run: looks at this machine, or at all machines of a launch and the links between them."""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.preflight import software, this_host
from paceline.preflight.pairs import Link, measure
from paceline.preflight.this_host import CheckResult, looked_at
from paceline.quantities import show_rate, show_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

_CHECKS: dict[str, Callable[[], CheckResult]] = {
    "versions": software.versions,
    "devices": software.devices,
    "backends": software.backends,
    "optional packages": software.extras,
    "threads": this_host.threads,
    "quota of the container": this_host.quota,
    "memory": this_host.memory,
    "shared memory": this_host.shared_memory,
    "limits": this_host.open_files,
    "locked memory": this_host.locked_memory,
    "frequency of the cores": this_host.frequency,
    "clocks": this_host.clocks,
    "temporary files": this_host.temporary_files,
    "name of this host": this_host.name,
    "interfaces": this_host.interfaces,
    "loopback": this_host.loopback,
    "TCP": this_host.tcp,
    "stacks of hung ranks": software.stacks,
}
_SLOW_RATIO = 0.5  # of the median rate: a link below is worth a finding
_MOST_SLOW, _MOST_IN_TABLE = 3, 8
_JOB_S = 300.0
_SIGNS = {"good": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}


class PairsError(PacelineError, RuntimeError):
    """The error that machines could not be compared."""


@dataclass(frozen=True)
class Host:
    """The machine of one rank."""

    rank: int
    name: str
    findings: tuple[CheckResult, ...]


@dataclass(frozen=True)
class Checkup:
    """The findings on one machine, or on all machines of a launch."""

    hosts: tuple[Host, ...]  # one a rank
    links: tuple[Link, ...] = ()  # between every two ranks, in both directions; empty for a single rank
    between: tuple[CheckResult, ...] = ()  # what the links and the machines' differences amount to

    @property
    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def look_around() -> tuple[CheckResult, ...]:
    """Check this machine. Local; imports torch if it is installed."""
    return tuple(looked_at(topic, check) for topic, check in _CHECKS.items())


def checkup(machines: str | None, endpoint: str | None, *, as_json: bool) -> Checkup | None:
    """Look at this machine; as a rank of a launch, or with options of one, at all machines and their links.

    The options are those of `paceline run`. None where another process prints what was found, `as_json` or not. Raises
    ConfigurationError (they cannot meet so), LaunchError (they did not), PairsError (a rank did not come).
    """
    if machines is None and endpoint is None:
        is_rank = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
        if is_rank:
            return check_with_others()
        return Checkup((Host(0, socket.gethostname(), look_around()),))
    from paceline.launch import launch, parse  # noqa: PLC0415  imports torch

    words = ["--nproc-per-node", "1", "--nnodes", machines or "1"]
    words += ["--rdzv-endpoint", endpoint] if endpoint else []
    launch(parse([*words, "-m", "paceline", "doctor", *(["--json"] if as_json else [])]), _to_stderr)
    return None


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"paceline doctor: {line}\n")


def check_with_others() -> Checkup | None:
    """Check all machines and links as a rank of a launch. Return None on ranks other than 0. Collective."""
    import torch.distributed as dist  # noqa: PLC0415  takes seconds

    from paceline.process_group.connections import address_towards  # noqa: PLC0415

    try:
        joined, rank, num_ranks = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=_JOB_S))))
        store = dist.PrefixStore("paceline doctor", joined)
        is_one_host = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "1")
        address = address_towards(1 if is_one_host else 2) or socket.gethostbyname(socket.gethostname())
        links, cards = measure(store, rank, num_ranks, address)
        own = {
            "findings": [asdict(each) for each in look_around()],
            "links": [asdict(each) for each in links],
        }
        store.set(f"found/{rank}", json.dumps(own))
        keys = [f"found/{other}" for other in range(num_ranks)]
        store.wait(keys, timedelta(seconds=_JOB_S))
        if store.add("left", 1) == num_ranks:
            store.set("all ranks have left", "")
        elif rank == 0:  # whose process may hold the store, which the others still ask
            store.wait(["all ranks have left"], timedelta(seconds=_JOB_S))
    except (RuntimeError, OSError) as error:
        raise PairsError(
            f"the machines could not be compared: {error}. A rank did not come, or was lost; look at the others' "
            "output."
        ) from error
    if rank:
        _to_stderr(f"this machine was checked; that of rank 0 ({cards[0].host}) prints what was found")
        return None
    found = [json.loads(store.get(key)) for key in keys]
    hosts = tuple(
        Host(number, cards[number].host, tuple(CheckResult(**each) for each in one["findings"]))
        for number, one in enumerate(found)
    )
    all_links = tuple(Link(**each) for one in found for each in one["links"])
    return Checkup(hosts, all_links, (*differences(hosts), *judge_links(hosts, all_links)))


def differences(hosts: Sequence[Host]) -> list[CheckResult]:
    """Compare versions, which have to be the same on every machine."""
    said = {host.rank: host.findings[0].found for host in hosts}
    if len(set(said.values())) == 1:
        return []
    words = "; ".join(f"rank {rank} ({hosts[rank].name}): {text}" for rank, text in said.items())
    remedy = "install the same versions on every machine"
    return [CheckResult(words, "bad", remedy, topic="versions differ")]


def judge_links(hosts: Sequence[Host], links: Sequence[Link]) -> list[CheckResult]:
    """Find pairs that do not reach each other, and links that are slower than the others."""
    if not links:
        return []
    name = {host.rank: f"rank {host.rank} ({host.name})" for host in hosts}
    found = [
        CheckResult(
            f"{name[link.source]} does not reach {name[link.target]}: {link.error}",
            "bad",
            "open the firewall between them for all ports, or name a common network: export GLOO_SOCKET_IFNAME=eth0",
            topic="unreachable",
        )
        for link in links
        if link.error and link.source < link.target
    ]
    good = [link for link in links if not link.error]
    if not good:
        return found
    usual = statistics.median(link.bytes_per_s for link in good)
    slow = [link for link in good if link.bytes_per_s < _SLOW_RATIO * usual]
    found += [
        CheckResult(
            f"{name[link.source]} to {name[link.target]}: {show_rate(8 * link.bytes_per_s, 3)}, others "
            f"{show_rate(8 * usual, 3)}",
            "bad",
            "ethtool eth0  # on either host: its speed and errors; ss -ti shows what else sends there",
            topic="slow link",
        )
        for link in sorted(slow, key=lambda link: link.bytes_per_s)[:_MOST_SLOW]
    ]
    if not found:
        lowest, highest = (choose(good, key=lambda link: link.bytes_per_s) for choose in (min, max))
        latency_s = statistics.median(link.latency_s for link in good)
        found.append(
            CheckResult(
                f"every pair is reachable; {show_rate(8 * lowest.bytes_per_s, 3)} to "
                f"{show_rate(8 * highest.bytes_per_s, 3)}, {show_seconds(latency_s)} a message",
                topic="links",
            )
        )
    return found


def page(checkup: Checkup) -> list[RenderableType]:
    """Lay out the findings as tables of rich: all of one machine, the bad ones of several; then the links."""
    from rich.table import Table  # noqa: PLC0415

    several = len(checkup.hosts) > 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ["", *(["rank"] if several else []), "topic", "found"]:
        table.add_column(column, overflow="fold")
    ranks_with: dict[CheckResult, list[str]] = {}
    for host in checkup.hosts:
        for each in host.findings:
            if not several or each.level != "good":
                ranks_with.setdefault(each, []).append(str(host.rank))
    for each, ranks in ranks_with.items():
        where = "all" if len(ranks) == len(checkup.hosts) else ", ".join(ranks)
        table.add_row(*_row(each, [where] if several else []))
    for each in checkup.between:
        table.add_row(*_row(each, ["all"] if several else []))
    return [table, *([_matrix(checkup)] if checkup.links else []), _summary(checkup)]


def _row(finding: CheckResult, host: list[str]) -> list[str]:
    from rich.markup import escape  # noqa: PLC0415

    remedy = f"\n  {escape(finding.remedy)}" if finding.remedy else ""
    return [_SIGNS[finding.level], *host, finding.topic, f"{escape(finding.found)}[bold]{remedy}[/]"]


def _matrix(checkup: Checkup) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415

    ranks = [host.rank for host in checkup.hosts][:_MOST_IN_TABLE]
    known = {(link.source, link.target): link for link in checkup.links}
    table = Table(title="\nfrom (row) to (column): rate, time of a message", box=None, title_justify="left")
    table.add_column("")
    for rank in ranks:
        table.add_column(f"rank {rank}", justify="right")
    for source in ranks:
        cells = [_cell(known.get((source, target))) for target in ranks]
        table.add_row(f"rank {source}", *cells)
    if len(checkup.hosts) > len(ranks):
        table.caption = f"{len(checkup.hosts) - len(ranks)} more ranks: --json has all of them"
    return table


def _cell(link: Link | None) -> str:
    if link is None:
        return "-"
    if link.error:
        return "[red]none[/]"
    return f"{show_rate(8 * link.bytes_per_s, 3)}, {show_seconds(link.latency_s)}"


def _summary(checkup: Checkup) -> str:
    levels = [each.level for host in checkup.hosts for each in host.findings] + [
        x.level for x in checkup.between
    ]
    bad, notes = levels.count("bad"), levels.count("note")
    if not bad and not notes:
        return f"{len(levels)} things were looked at; nothing stands in the way of a training."
    return (
        f"{len(levels)} things were looked at: {bad} would stop or slow a training, {notes} may, depending on what it "
        "does. The command under each mends it."
    )

"""`paceline emulate`: a script on several emulated hosts of this machine."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline_lab.emulation import EmulatedCluster, Outcome

SETTINGS: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": False, "allow_interspersed_args": False},
}


def emulate(
    script: Annotated[
        list[str] | None,
        typer.Argument(help="The script and its arguments, or -m, a module and its own; after --."),
    ] = None,
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 2,
    ranks_per_host: Annotated[str, typer.Option(help="Ranks on each; or one number a host: 4,2,1.")] = "1",
    rate: Annotated[
        str | None,
        typer.Option(help="Of a host's link, for example 1Gbit; one, or one a host: 1Gbit,100Mbit."),
    ] = None,
    port_rate: Annotated[
        str | None, typer.Option(help="Of the switch's port towards a host, where it differs from --rate.")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="Packets of a host that the switch loses, for example 0.1%; or one a host."),
    ] = None,
    queue: Annotated[
        str | None, typer.Option(help="What a switch port holds.", show_default="256KiB")
    ] = None,
    cpu: Annotated[
        str | None, typer.Option(help="Cores of a host; 50% is half of one. One, or one a host: 100%,50%.")
    ] = None,
    delay: Annotated[str | None, typer.Option(help="One way between two hosts, for example 1ms.")] = None,
    jitter: Annotated[str | None, typer.Option(help="Largest deviation from --delay.")] = None,
    mtu: Annotated[int, typer.Option(help="Largest IP packet in bytes.")] = 1500,
    offload: Annotated[
        bool | None,
        typer.Option(
            "--offload/--no-offload",
            help="Let segments of up to 64 KiB cross the links: far cheaper, but no longer single packets.",
            show_default="off where packets matter or are cheap",
        ),
    ] = None,
    congestion_control: Annotated[str, typer.Option(help="TCP's.")] = "cubic",
    min_rto: Annotated[
        str | None,
        typer.Option(help="TCP's smallest retransmission timeout.", show_default="the kernel's 200ms"),
    ] = None,
    priority: Annotated[
        bool, typer.Option("--priority", help="Switch ports serve by DSCP class selector, strictly.")
    ] = False,
    mark: Annotated[
        str | None, typer.Option(help="Switch ports ECN-mark packets above this backlog, for example 60KiB.")
    ] = None,
    drop: Annotated[
        str | None,
        typer.Option(
            help="Switch ports drop packets without ECN above this backlog; one value, or eight by class selector."
        ),
    ] = None,
    racks: Annotated[int, typer.Option(help="Divide the hosts into racks, joined by a spine.")] = 1,
    uplink: Annotated[str | None, typer.Option(help="Rate between a rack and the spine.")] = None,
    links: Annotated[int, typer.Option(help="Links per host; flows are spread over them.")] = 1,
    timeout: Annotated[
        str | None, typer.Option(help="End the job after this long, for example 90s; exit code 124.")
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(help="A file of timed changes, a line each, such as: 20s host1 cores 25%."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure what was set up, and print asked against measured.")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what emulations that were killed have left.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON to stdout, everything else to stderr.")
    ] = False,
) -> int:
    """Run a script on several emulated hosts of this machine, over links of a given rate, loss and delay."""
    from rich.console import Console

    from paceline import quantities
    from paceline.errors import ConfigurationError
    from paceline_lab.emulation import ClusterSpec, EmulatedCluster, Scenario, owned_resources
    from paceline_lab.emulation.cluster import print_line
    from paceline_lab.emulation.cluster_job import check_script
    from paceline_lab.report import table

    if clean:
        removed = owned_resources.remove_orphans()
        print("\n".join(["removed:", *removed]) if removed else "nothing was left behind")
        return 0
    changes = None if scenario is None else Scenario.read(scenario)
    if changes is not None and changes.needs_packets and offload is None:
        offload = False
    timeout_s = None if timeout is None else quantities.seconds(timeout, "--timeout")
    spec = ClusterSpec.parse(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        rate=rate,
        port_rate=port_rate,
        loss=loss,
        queue=queue,
        cpu=cpu,
        delay=delay,
        jitter=jitter,
        mtu=mtu,
        offload=offload,
        congestion_control=congestion_control,
        min_rto=min_rto,
        priority=priority,
        mark=mark,
        drop=drop,
        racks=racks,
        uplink=uplink,
        links=links,
    )
    if check and hosts < 2:
        raise ConfigurationError("--check measures between hosts. Pass --hosts 2 or more.")
    if check and changes is not None:
        raise ConfigurationError("--check measures what stays as it is. Leave out --scenario, or --check.")
    if not check:
        check_script(script or [])
    if changes is not None:
        changes.check(spec)
    console = Console(stderr=as_json)
    _end_on_signals()
    with EmulatedCluster(spec) as cluster:
        console.print(table("Emulated cluster", ("", "asked"), spec.describe()))
        if check:
            return _check(cluster, console, as_json=as_json)
        console.print(f"{hosts} host(s) are up; starting {spec.num_ranks} rank(s)...")
        outcome = cluster.run(
            script or [],
            on_line=partial(print_line, stream=console.file),
            timeout_s=timeout_s,
            scenario=changes,
        )
    console.print(_traffic(outcome))
    for remark in outcome.remarks():
        console.print(remark, markup=False)
    if as_json:
        print(json.dumps(outcome.as_dict()))
    if failure := outcome.failure():
        print(f"paceline: {failure}", file=sys.stderr)
    return outcome.exit_code


def _check(cluster: EmulatedCluster, console: Console, *, as_json: bool) -> int:
    """Measure and show; 0 if everything agrees."""
    from paceline_lab.emulation.cluster_check import check
    from paceline_lab.report import table

    found = []
    with console.status("measuring...") as status:
        for finding in check(cluster):
            found.append(finding)
            status.update(f"measured {finding.what}: {finding.measured}")
    verdicts = {True: "yes", False: "NO", None: ""}
    rows = [(f.what, f.asked, f.measured, verdicts[f.ok], f.note) for f in found]
    console.print(table("Check", ("", "asked", "measured", "agrees", ""), rows))
    if as_json:
        print(json.dumps([asdict(finding) for finding in found]))
    wrong = [finding.what for finding in found if finding.ok is False]
    if wrong:
        print(
            f"paceline: {len(wrong)} of {len(found)} measurements disagree with what was asked: {', '.join(wrong)}. "
            "A busy machine is the usual reason. See docs/troubleshooting.md#disagree-with-what-was-asked.",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def _traffic(outcome: Outcome) -> Table:
    """What became of each host, and what its links carried."""
    from paceline.quantities import show_size
    from paceline_lab.report import table

    columns = ["host", "exit code", "sent", "received", "packets lost", "queue drops", "TCP retransmits"]
    marks = outcome.spec.mark_bytes is not None or outcome.spec.drop_bytes is not None
    if marks:
        columns += ["ECN marks", "not-ECN drops"]
    rows = []
    for host, (code, counted) in enumerate(zip(outcome.exit_codes, outcome.counters, strict=True)):
        row = [
            f"host{host}",
            "stopped" if code is None else str(code),
            show_size(counted.sent_bytes),
            show_size(counted.received_bytes),
            str(counted.lost_packets),
            str(counted.port_drops + counted.host_drops),
            str(counted.retransmits),
        ]
        rows.append([*row, str(counted.marked_packets), str(counted.not_ecn_drops)] if marks else row)
    return table(f"Job, {outcome.wall_s:.1f} s", columns, rows)


def _end_on_signals() -> None:
    """Have signals raise, so that everything is taken down; SIGKILL needs no help."""
    from paceline_lab.errors import InterruptedEmulationError

    def interrupt(number: int, _: object) -> None:
        raise InterruptedEmulationError(signal.Signals(number))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)

"""`paceline emulate`: a script on several emulated hosts of this machine."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline_lab.cli.cluster_options import ALL, cluster_options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline_lab.emulation import ClusterSpec, EmulatedCluster, Outcome, Scenario

_LONGEST_S = 1e7
SETTINGS: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": False, "allow_interspersed_args": False},
}


@cluster_options(*ALL)
def emulate(
    cluster: dict[str, Any],
    script: Annotated[
        list[str] | None,
        typer.Argument(help="The training script and its own arguments, as after torchrun."),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="Run the script as a Python module, by its dotted name.")
    ] = False,
    timeout: Annotated[
        str | None,
        typer.Option(
            help="Longest time of the job: 90, 90s or 5000ms. After it, the job is ended with exit code 124."
        ),
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(help="File of timed changes, one per line, for example: 20s host1 cores 25%."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure what was set up, and print asked against measured.")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what killed emulations left behind.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON to stdout, everything else to stderr.")
    ] = False,
) -> int:
    """Run a script on several emulated hosts of this machine, over links of a given rate, loss and delay.

    `paceline emulate --hosts 4 --rate 1Gbit train.py`
    """
    from rich.console import Console

    from paceline import quantities
    from paceline.errors import ConfigurationError
    from paceline_lab.emulation import ClusterSpec, EmulatedCluster, owned_resources
    from paceline_lab.report import table

    if clean:
        removed = owned_resources.remove_orphans()
        print("\n".join(["removed:", *removed]) if removed else "nothing was left behind")
        return 0
    changes = _changes(scenario, check=check)
    if changes is not None and changes.needs_packets:
        cluster.setdefault("offload", False)
    timeout_s = None if timeout is None else quantities.seconds(timeout, "--timeout", is_bare_possible=True)
    if timeout_s is not None and not 0 < timeout_s <= _LONGEST_S:
        raise ConfigurationError(f"--timeout {timeout} is not a time for a job. Pass, for example, 90s.")
    spec = ClusterSpec.parse(**cluster)
    script = [*(["-m"] if module else []), *(script or [])]
    _check_work(spec, script, changes, check=check)
    console = Console(stderr=as_json)
    _end_on_signals()
    with EmulatedCluster(spec) as emulated:
        console.print(table("Emulated cluster", ("", "asked"), spec.describe()))
        if check:
            return _check(emulated, console, as_json=as_json)
        console.print(f"{spec.hosts} host(s) are up; starting {spec.num_ranks} rank(s)...")
        outcome = _run(emulated, script, console, timeout_s, changes)
    return _show(outcome, console, as_json=as_json)


def _changes(scenario: str | None, *, check: bool) -> Scenario | None:
    from paceline.errors import ConfigurationError
    from paceline_lab.emulation import Scenario

    if check and scenario is not None:
        raise ConfigurationError("--check measures what stays as it is. Leave out --scenario, or --check.")
    return None if scenario is None else Scenario.read(scenario)


def _check_work(spec: ClusterSpec, script: list[str], changes: Scenario | None, *, check: bool) -> None:
    from paceline.errors import ConfigurationError
    from paceline_lab.emulation.cluster_job import check_script

    if check and spec.hosts < 2:
        raise ConfigurationError("--check measures between hosts. Pass --hosts 2 or more.")
    if not check:
        check_script(script)
    if changes is not None:
        changes.check(spec)


def _run(
    cluster: EmulatedCluster,
    script: list[str],
    console: Console,
    timeout_s: float | None,
    changes: Scenario | None,
) -> Outcome:
    from paceline_lab.emulation.cluster import print_line

    show = partial(print_line, stream=console.file)
    return cluster.run(script, on_line=show, timeout_s=timeout_s, scenario=changes)


def _show(outcome: Outcome, console: Console, *, as_json: bool) -> int:
    """Print the end of a job, and return its exit code."""
    console.print(_traffic(outcome))
    for remark in outcome.remarks():
        console.print(remark, markup=False)
    if as_json:
        print(json.dumps(outcome.as_dict()))
    if failure := outcome.failure():
        print(f"paceline: {failure}", file=sys.stderr)
    return outcome.exit_code


def _check(cluster: EmulatedCluster, console: Console, *, as_json: bool) -> int:
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
            "A busy machine is the usual reason. `paceline explain disagree with what was asked` says more.",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def _traffic(outcome: Outcome) -> Table:
    from paceline_lab.emulation.quantities import show_size
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

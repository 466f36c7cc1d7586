"""The options that describe an emulated cluster: written once, and added to the commands that take one."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer


def _text(help_text: str, show_default: str | bool = True) -> Any:
    return Annotated[str | None, typer.Option(help=help_text, show_default=show_default)]


_TABLE: dict[str, tuple[Any, Any]] = {
    "hosts": (Annotated[int, typer.Option("--hosts", "--nnodes", help="Number of hosts.")], 2),
    "ranks_per_host": (
        Annotated[
            str | None,
            typer.Option(
                "--ranks-per-host",
                "--nproc-per-node",
                help="Number of ranks on each host. One value, or one per host: 4,2,1.",
                show_default="1; bench on this machine: 2",
            ),
        ],
        None,
    ),
    "rate": (
        _text("Rate of each host's link, for example 1Gbit. One value, or one per host: 1Gbit,100Mbit."),
        None,
    ),
    "port_rate": (
        _text(
            "Rate of the switch's port towards a host, if it differs from --rate. One value, or one per host."
        ),
        None,
    ),
    "loss": (
        _text(
            "Share of a host's packets that the switch loses, for example 0.1%. One value, or one per host."
        ),
        None,
    ),
    "queue": (_text("Size of a switch port's queue.", "256KiB, of a small switch"), None),
    "cpu": (
        _text("Number of cores of a host: 0.5 or 50% is half a core. One value, or one per host: 100%,50%."),
        None,
    ),
    "delay": (
        _text("Delay of a packet between two hosts, one way, for example 1ms. The same for all hosts."),
        None,
    ),
    "jitter": (_text("Largest deviation from --delay, for example 100us."), None),
    "mtu": (
        Annotated[int, typer.Option(help="Size of the largest IP packet, in bytes. The same for all hosts.")],
        1500,
    ),
    "offload": (
        Annotated[
            bool | None,
            typer.Option(
                "--offload/--no-offload",
                help="Let segments of up to 64 KiB cross the links: far cheaper, but no longer single packets.",
                show_default="off where packets matter or are cheap",
            ),
        ],
        None,
    ),
    "congestion_control": (_text("Congestion control of TCP.", "cubic, Linux's own"), None),
    "min_rto": (_text("Smallest retransmission timeout of TCP.", "the kernel's 200ms"), None),
    "priority": (
        Annotated[
            bool,
            typer.Option(
                "--priority", help="Make switch ports serve packets in strict order of DSCP class selector."
            ),
        ],
        False,
    ),
    "mark": (_text("Switch ports ECN-mark packets above this backlog, for example 60KiB."), None),
    "drop": (
        _text(
            "Switch ports drop packets without ECN above this backlog; one value, or eight by class selector."
        ),
        None,
    ),
    "racks": (Annotated[int, typer.Option(help="Divide the hosts into racks, joined by a spine.")], 1),
    "uplink": (_text("Rate between a rack and the spine."), None),
    "links": (Annotated[int, typer.Option(help="Number of links per host. Flows are spread over them.")], 1),
}
ALL = tuple(_TABLE)
LINKS = ("ranks_per_host", "rate", "loss", "queue", "delay", "jitter", "cpu", "congestion_control")
"""Of the benchmarks, which may also run on loopback: without a cluster none of them is given."""


def cluster_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command these options in the place of its parameter `cluster`, which takes their values by name.

    Left out of the values is what is None, so that `ClusterSpec.parse` has its own default.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = typing.get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name == "cluster":
                kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
                parameters += [
                    inspect.Parameter(name, kind, annotation=_TABLE[name][0], default=_TABLE[name][1])
                    for name in names
                ]
            else:
                parameters.append(parameter.replace(annotation=hints[parameter.name]))

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            values = {name: given.pop(name) for name in names}
            return command(cluster={k: v for k, v in values.items() if v is not None}, **given)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate

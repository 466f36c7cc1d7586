"""Parses torchrun's command line for `paceline run`, and refuses what cannot work before anything starts.

The parser is torch's own, so every flag, both spellings and the PET_* environment variables work. Paceline adds
clearer errors, and its own flags such as `--share-devices`, `--min-ranks` and `--replace-ddp`.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib.machinery
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import run as torchrun

from paceline.elastic.guest import PEERS, GuestSetting
from paceline.errors import ConfigurationError
from paceline.extras import (
    LAUNCH_OPTIONS,
    Companion,
    ExtraOption,
    attribute_of,
    extra_options,
    raise_if_missing,
)
from paceline.host.addresses import is_loopback
from paceline.integrations import at_start
from paceline.launch import rendezvous_endpoint
from paceline.launch.hang_watch import QUIET_S
from paceline.launch.option_values import (
    GRACE_S,
    JOIN_S,
    LOST_AFTER_S,
    MOST_MACHINES,
    MOST_RANKS,
    PEER_OPTIONS,
    check_elastic,
    check_peers,
    check_values,
    guest_setting,
)

_FILLED_IN = ("rdzv_backend", "node_rank", "master_addr", "nproc_per_node")


@dataclass(frozen=True)
class LaunchArguments:
    """A command line that was found possible."""

    torchrun: argparse.Namespace  # what torch's own parser made of it; handed to torch's launcher as it is
    script: str  # the script, module or program to start
    num_local_ranks: int  # how many ranks this machine runs
    local_port: int | None  # the port that this machine is asked to listen on, if one was named
    num_machines: int = 1  # how many may take part, at most
    # variables that the ranks get besides the launcher's own
    environment: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()  # the command line itself
    is_first: bool = False  # whether this machine has to say where the others come to
    companions: tuple[Companion, ...] = ()  # processes next to the ranks, by options of other packages
    shows_live: bool = False  # whether to show a line a rank while they train
    hang_after_s: float = 0.0  # how long nothing may move before a rank is called hung; 0: no watch
    # with how many ranks training goes on when some are lost; None: a lost rank ends the launch
    min_ranks: int | None = None
    shadow: str | None = None  # with `min_ranks`: the folder into which a shadow writes checkpoints
    lost_after_s: float = LOST_AFTER_S  # how long a rank may stand still before it counts as lost
    grace_s: float = GRACE_S  # with `min_ranks`: how long ranks may take to leave after a signal
    join_timeout_s: float = JOIN_S  # how long hosts wait for further ones before they begin
    guest: GuestSetting | None = None  # with --peers: how hosts find each other


def num_cores() -> int:
    """Return the number of cores that this process may use. In a container it has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse(arguments: list[str]) -> LaunchArguments:
    """Parse torchrun's command line; raises ConfigurationError that says what to type instead."""
    extra = extra_options()
    args = _parser(extra).parse_args(arguments)
    _check_script(args)
    check_peers(args)
    num_nodes = _num_nodes(args.nnodes)
    is_first = rendezvous_endpoint.choose_backend(args, num_nodes)
    num_local_ranks = _num_local_ranks(args.nproc_per_node)
    num_devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    _check_devices(num_local_ranks, num_devices, share=args.share_devices)
    if args.max_restarts < 0:
        raise ConfigurationError(f"--max-restarts {args.max_restarts} is negative. Pass 0 for no restarts.")
    if args.watch and not sys.stderr.isatty():
        raise ConfigurationError(
            "--watch draws a table in a terminal, and stderr is none here. Leave it out; `paceline doctor -- paceline "
            "run ...` writes a line whenever something delays the steps."
        )
    guest = guest_setting(args, num_local_ranks)
    if guest is not None:
        num_nodes, args.min_ranks = guest.most_nodes, guest.min_ranks
    given = {name: getattr(args, attribute_of(name)) for name in extra}
    companions = tuple(extra[name].parse(text) for name, text in given.items() if text is not None)
    check_values(args, num_local_ranks, num_nodes)
    exclusive = {name: extra[name].why_not_elastic for name, text in given.items() if text is not None}
    check_elastic(args, num_local_ranks, num_nodes, exclusive)
    return LaunchArguments(
        torchrun=args,
        script=args.training_script,
        num_local_ranks=num_local_ranks,
        local_port=_local_port(args, num_nodes),
        num_machines=num_nodes,
        environment={**_rank_environment(args), **({} if guest is None else {PEERS: guest.peers})},
        words=tuple(arguments),
        is_first=is_first,
        companions=companions,
        shows_live=args.watch,
        hang_after_s=args.hang_after,
        min_ranks=args.min_ranks,
        shadow=args.shadow,
        lost_after_s=guest.lost_after_s if guest else args.lost_after or LOST_AFTER_S,
        grace_s=guest.grace_s if guest else getattr(args, "shutdown_timeout", None) or GRACE_S,
        guest=guest,
    )


def _parser(extra: Mapping[str, ExtraOption]) -> argparse.ArgumentParser:
    parser = torchrun.get_args_parser()
    parser.prog = "paceline run"
    parser.usage = "paceline run [options] training_script [the script's own options]"
    parser.description = (
        "Example: paceline run --nproc-per-node 4 train.py. Start one process of a script per rank, like torchrun and "
        "with its flags."
    )
    own = parser.add_argument_group("options of paceline", "the others, below, are torchrun's")
    parser._action_groups.insert(0, parser._action_groups.pop())  # ours first
    for action in parser._actions:  # to tell what was given from torch's defaults; see `rendezvous_endpoint`
        if action.dest in _FILLED_IN and f"PET_{action.dest.upper()}" not in os.environ:
            action.default = None

    def add(option: str, words: str, **more: Any) -> None:
        own.add_argument(*dict.fromkeys((option, f"--{option[2:].replace('-', '_')}")), help=words, **more)

    add("--share-devices", "Allow more ranks than this machine has accelerators.", action="store_true")
    words = "Show one line per rank in this terminal: its last steps, where their time goes, and what delays them."
    add("--watch", words, action="store_true")
    words = f"Name the missing ranks after so many seconds without progress. 0: never. Default: {QUIET_S:g}."
    add("--hang-after", words, metavar="SECONDS", type=float, default=QUIET_S)
    for name, option in extra.items():
        add(name, option.words, metavar=option.metavar)
    words = (
        "Go on when ranks are lost, as long as N are left, and start replacements; the script uses "
        "paceline.Elastic."
    )
    add("--min-ranks", words, type=int, metavar="N")
    words = (
        f"With --min-ranks: a rank that stands still for so long counts as lost (default {LOST_AFTER_S:g})."
    )
    add("--lost-after", words, type=float, metavar="SECONDS")
    for of_peers, (metavar, words) in PEER_OPTIONS.items():
        add(of_peers, words, metavar=metavar)
    words = "Make torch's DistributedDataParallel be Paceline's in every rank; the script stays as it is."
    add("--replace-ddp", words, action="store_true")
    words = (
        "With --min-ranks: start a process that follows each step and writes checkpoints into FOLDER; training resumes "
        "from the newest there."
    )
    add("--shadow", words, metavar="FOLDER")
    add("--reduction", "With --replace-ddp: how gradients are combined, for example adasum.")
    add("--compression", "With --replace-ddp: send fewer bytes, for example bf16, powersgd or auto.")
    for action in parser._actions:  # Paceline's name for it, which its other commands have, too
        if action.dest == "nproc_per_node":
            action.option_strings = [*action.option_strings, "--ranks-per-host"]
            parser._option_string_actions["--ranks-per-host"] = action
    known = sorted(option for option in parser._option_string_actions if option.startswith("--"))

    def refuse(message: str) -> NoReturn:
        raise ConfigurationError(_usage(message, known))

    parser.error = refuse  # type: ignore[method-assign]
    return parser


def _rank_environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables that make ranks replace torch's class; empty without --replace-ddp."""
    given = {"reduction": args.reduction, "compression": args.compression}
    options = {name: value for name, value in given.items() if value is not None}
    if not args.replace_ddp:
        if options:
            name, value = next(iter(options.items()))
            raise ConfigurationError(
                f"--{name} {value} has no effect without --replace-ddp. Add --replace-ddp, or pass "
                f"{name}={value!r} to paceline.DistributedDataParallel in the script."
            )
        return {}
    return at_start.environment(options)


def _usage(message: str, known: list[str]) -> str:
    """Return the message for an error of argparse."""
    if "required: training_script" in message:
        return (
            "no script to run. Name the training script after the options, for example: "
            "paceline run --nproc-per-node 2 train.py --epochs 3"
        )
    if message.startswith("unrecognized arguments: "):
        unknown = message.removeprefix("unrecognized arguments: ").partition(" ")[0]
        option = unknown.split("=")[0]
        raise_if_missing(LAUNCH_OPTIONS, option, f"`paceline run {option}`")
        close = _closest(option, known)
        hint = f"Did you mean {close}? " if close else ""
        return (
            f"unknown option {unknown}. {hint}Options of the launcher come before the script, the script's own "
            "after it; `paceline run --help` lists the launcher's."
        )
    return f"{message}. `paceline run --help` lists the options."


def _closest(unknown: str, known: list[str]) -> str | None:
    """Return the option that was probably meant: one that starts alike, or looks alike, with the user's dashes."""
    known = [option for option in known if "_" in unknown or "_" not in option]
    for length in range(len(unknown), len("--xy"), -1):
        if found := next((option for option in known if option.startswith(unknown[:length])), None):
            return found
    return next(iter(difflib.get_close_matches(unknown, known, n=1)), None)


def _check_script(args: argparse.Namespace) -> None:
    script: str = args.training_script
    if args.no_python and args.module:
        raise ConfigurationError(
            f"--no-python and -m were both given for {script}: the first says it is a program, the second that it "
            "is a Python module. Drop one of them."
        )
    if args.module:
        if "" in script.split("."):
            raise ConfigurationError(
                f"-m {script} is not the dotted name of a module, such as package.train."
            )
        if "PYTHON_EXEC" not in os.environ and not _module_exists(script):
            raise ConfigurationError(
                f"there is no module {script} here: neither {Path.cwd()} nor this Python's packages have a "
                f"{script.partition('.')[0]}. Run from the folder that holds it, install it, or drop -m if {script} "
                "is a file."
            )
    elif args.no_python and not args.run_path:
        if shutil.which(script) is None:
            raise ConfigurationError(
                f"there is no program {script} that could be run: it is neither on the PATH nor an executable "
                "file. Check the spelling, or chmod +x it."
            )
    else:
        _check_file(script)


def _module_exists(name: str) -> bool:
    """Return whether `python -m name` could find its top-level package; imports nothing."""
    top = name.partition(".")[0]
    path = [str(Path.cwd()), *sys.path]
    return top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(top, path) is not None


def _check_file(script: str) -> None:
    path = Path(script)
    if path.is_file() or (path / "__main__.py").is_file():
        return
    siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f" Did you mean {path.parent / close[0]}?" if close else ""
    found = "it is a folder without __main__.py" if path.is_dir() else f"looked in {path.parent.resolve()}"
    raise ConfigurationError(
        f"there is no script {script} ({found}).{hint} Check the path, or pass -m to run a module by its dotted "
        "name."
    )


def _num_nodes(nnodes: str) -> int:
    try:
        smallest, largest = torchrun.parse_min_max_nnodes(nnodes)
    except (ValueError, RuntimeError):
        smallest = largest = 0
    if not 0 < smallest <= largest <= MOST_MACHINES:
        raise ConfigurationError(
            f"--nnodes {nnodes} is not a number of machines. Pass a number such as 2, or a range such as 2:4."
        )
    return int(largest)


def _num_local_ranks(nproc_per_node: str) -> int:
    try:
        num_ranks = int(torchrun.determine_local_world_size(nproc_per_node))
    except ValueError as error:
        raise ConfigurationError(
            f"--nproc-per-node {nproc_per_node} is not possible here ({str(error).rstrip('.')}). Pass a number of "
            "ranks, or auto, cpu or gpu for one rank a device of that kind that this machine has."
        ) from error
    if num_ranks < 1:
        raise ConfigurationError(
            f"--nproc-per-node {nproc_per_node} starts no rank. Pass 1 or more, or auto for one a device."
        )
    if num_ranks > MOST_RANKS:
        raise ConfigurationError(
            f"--nproc-per-node {nproc_per_node} is more than a machine can run. Pass at most {MOST_RANKS}; this one "
            f"has {num_cores()} cores."
        )
    return num_ranks


def _check_devices(num_ranks: int, num_devices: int, *, share: bool) -> None:
    """Refuse more ranks than accelerators: by convention rank i takes device i, and the last would find none."""
    if num_devices and num_ranks > num_devices and not share:
        raise ConfigurationError(
            f"too many ranks for the devices: {num_ranks} ranks were asked for and this machine shows "
            f"{num_devices} accelerator(s). A rank takes the device of its LOCAL_RANK. Pass --nproc-per-node "
            f"{num_devices}; or --share-devices if your script places several ranks on one; or set "
            "CUDA_VISIBLE_DEVICES= (empty) to train on the CPU."
        )


def _local_port(args: argparse.Namespace, num_nodes: int) -> int | None:
    """Return the port that the rendezvous opens on this machine; None if the kernel picks it or a peer opens it.

    Elastic's agents listen on one address: another host of this machine may have the same port at its own.
    """
    if args.standalone or args.min_ranks is not None:
        return None
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        if args.master_port is None and num_nodes == 1:
            return None  # torch's launcher then takes a free one
        return (args.master_port or 29500) if args.node_rank == 0 else None
    host, _, port = args.rdzv_endpoint.rpartition(":")
    if num_nodes > 1 or (host and not is_loopback(host)) or not port.isdigit():
        return None  # with several machines the port may rightly be another agent's
    return int(port) or None


def port_is_taken(port: int) -> bool:
    """Return whether some process listens on `port` of this machine."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        # As torch's store does: a connection in TIME_WAIT does not use the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False

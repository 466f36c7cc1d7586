"""Refuses values of torchrun's options that cannot work, before anything starts."""

from __future__ import annotations

import argparse
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.multiprocessing.api import Std
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from paceline.elastic.guest import PEERS, GuestSetting, facts_of, shown
from paceline.errors import ConfigurationError
from paceline.host.addresses import addresses_of
from paceline.launch import rendezvous_endpoint
from paceline.launch.stores import addresses_here

MOST_RANKS = 4096  # on a machine
MOST_MACHINES = 100_000
LOST_AFTER_S = GRACE_S = JOIN_S = 30.0
_MOST_PORT = 65535
_NEVER_ARRIVE = ("SIGKILL", "SIGSTOP")
PEER_OPTIONS = {
    "--peers": (
        "SOURCE",
        "As --min-ranks, and find hosts by local, addresses, dns:NAME, file:FOLDER or slurm.",
    ),
    "--nodes": ("MIN:MAX", "With --peers: begin with MIN hosts after --join-timeout, with MAX at once."),
    "--join-timeout": ("SECONDS", "With --peers: how long the first hosts wait for others (default 30)."),
    "--job": ("NAME", "With --peers: the name of the job, the same on all hosts."),
    "--job-folder": (
        "FOLDER",
        "With --peers: a shared folder, for the record that the job has begun and ended.",
    ),
    "--port": ("PORT", "With --peers: where this host's agent listens (default 29400)."),
}
"""Options that are named like the variables of ranks that an engine starts: value, help."""
_PER_HOST = "PACELINE_RANKS_PER_HOST"


def check_values(args: argparse.Namespace, num_local_ranks: int, num_machines: int) -> None:
    """Raise ConfigurationError for values that torch's launcher would stumble over, or ignore."""
    _check_known(args)
    _let_torch_read(args)
    _check_meeting(args, num_machines)
    _check_ranks_here(args, num_local_ranks)
    _check_signals(args.signals_to_handle)
    _check_log_folder(args.log_dir)
    shutdown_s = getattr(args, "shutdown_timeout", None) or 0
    for option, value, is_possible, example in (
        ("--monitor-interval", args.monitor_interval, 0 < args.monitor_interval < math.inf, "0.1"),
        ("--hang-after", args.hang_after, 0 <= args.hang_after < math.inf, "5, or 0 to look for no hangs"),
        ("--shutdown-timeout", shutdown_s, shutdown_s >= 0, "30"),
    ):
        if not is_possible:
            raise ConfigurationError(
                f"{option} {value:g} is not a possible number of seconds. Pass one, such as {example}."
            )


def _check_known(args: argparse.Namespace) -> None:
    for option, name, known in (
        ("--rdzv-backend", args.rdzv_backend, rendezvous_handler_registry._registry),
        ("--event-log-handler", args.event_log_handler, handlers._log_handlers),
    ):
        if name not in known:
            raise ConfigurationError(f"{option} {name} is not one of {', '.join(sorted(known))}.")


def _let_torch_read(args: argparse.Namespace) -> None:
    """Let torch parse the values that it would parse later, and raise ConfigurationError with its words."""
    meets_by_file = rendezvous_endpoint.meets_by_file(args)
    for option, text, read in (
        ("--tee", args.tee, Std.from_str),
        ("--redirects", args.redirects, Std.from_str),
        ("--local-ranks-filter", args.local_ranks_filter, _ranks_of_filter),
        ("--rdzv-conf", args.rdzv_conf, torchrun._parse_rendezvous_config),
        ("--logs-specs", args.logs_specs, torchrun._get_logs_specs_class),
        (
            "--rdzv-endpoint",
            "" if meets_by_file else args.rdzv_endpoint,
            lambda text: parse_rendezvous_endpoint(text, 0),
        ),
    ):
        try:
            if text:
                read(text)
        except ValueError as error:
            raise ConfigurationError(
                f"{option} {text} cannot be read: {str(error).rstrip('.')}. `paceline run --help` says what it takes."
            ) from error


def _ranks_of_filter(text: str) -> list[int]:
    return [int(word) for word in text.split(",")] if text else []


def _check_meeting(args: argparse.Namespace, num_machines: int) -> None:
    """Check the options that say where, when and under which number the machines meet."""
    if args.master_port is not None and not 0 <= args.master_port <= _MOST_PORT:
        raise ConfigurationError(
            f"--master-port {args.master_port} is not a port. Pass 1 to {_MOST_PORT}, or leave it out."
        )
    for name, value in torchrun._parse_rendezvous_config(args.rdzv_conf or "").items():
        is_number = name.endswith(("timeout", "interval", "attempt"))
        if is_number and not (value.isdecimal() and int(value) > 0):
            raise ConfigurationError(
                f"--rdzv-conf {name}={value} is not a number of seconds, or of attempts."
            )
    if not 0 <= args.node_rank < num_machines:
        raise ConfigurationError(
            f"--node-rank {args.node_rank} does not fit --nnodes {args.nnodes}: machines are numbered from 0 to "
            f"{num_machines - 1}."
        )
    if args.local_addr and not _may_be_own(args, num_machines):
        raise ConfigurationError(
            f"--local-addr {args.local_addr} is not an address of this machine. `ip address` lists them."
        )


def _may_be_own(args: argparse.Namespace, num_machines: int) -> bool:
    """Return whether --local-addr may be this machine's. With several, without Elastic, a router may forward it."""
    if num_machines == 1 or args.min_ranks is not None:
        return bool(addresses_here(args.local_addr))
    try:
        return bool(addresses_of(args.local_addr))
    except OSError:
        return False


def _check_ranks_here(args: argparse.Namespace, num_local_ranks: int) -> None:
    """Check that the ranks of options with a value per rank are on this machine."""
    for option, text, ranks in (
        ("--tee", args.tee, _ranks_of_streams(args.tee)),
        ("--redirects", args.redirects, _ranks_of_streams(args.redirects)),
        ("--local-ranks-filter", args.local_ranks_filter, _ranks_of_filter(args.local_ranks_filter)),
    ):
        if not all(0 <= rank < num_local_ranks for rank in ranks):
            raise ConfigurationError(
                f"{option} {text}: there is no rank {max(ranks)} here. This machine's are numbered from 0 to "
                f"{num_local_ranks - 1}."
            )


def _ranks_of_streams(text: str) -> list[int]:
    found = Std.from_str(text)
    return list(found) if isinstance(found, dict) else []


def _check_signals(text: str) -> None:
    for name in (word.strip() for word in text.split(",")):
        if name not in signal.Signals.__members__ or name in _NEVER_ARRIVE:
            raise ConfigurationError(
                f"--signals-to-handle {text}: {name!r} is not a signal that a launcher can handle. Pass names such as "
                "SIGTERM,SIGINT,SIGHUP,SIGQUIT."
            )


def _check_log_folder(text: str | None) -> None:
    if text is None:
        return
    there = next(path for path in (Path(text).absolute(), *Path(text).absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        why = "may not be written to" if there.is_dir() else "is not a folder"
        raise ConfigurationError(f"--log-dir {text} cannot be made: {there} {why}. Pass another one.")


def check_peers(args: argparse.Namespace) -> None:
    """Fill in the ranks of a host. Raises ConfigurationError for options that mean nothing with --peers, or without."""
    if args.nproc_per_node is None:
        args.nproc_per_node = os.environ.get(_PER_HOST, "1") if has_peers(args) else "1"
    given = [option for option in PEER_OPTIONS if getattr(args, _attribute(option)) is not None]
    if not has_peers(args):
        if given:
            raise ConfigurationError(
                f"{given[0]} has no effect without --peers. Add --peers, such as --peers dns:trainers, or leave it out."
            )
        return
    for option, is_given in (
        ("--nnodes", str(args.nnodes) not in ("1:1", "1")),
        ("--node-rank", args.node_rank is not None),
        ("--master-addr", args.master_addr is not None),
        ("--rdzv-endpoint", bool(args.rdzv_endpoint)),
        ("--standalone", args.standalone),
        ("--shadow", args.shadow is not None),
    ):
        if is_given:
            raise ConfigurationError(
                f"--peers and {option} exclude each other: with --peers ({PEERS}) no host is the first. Leave one out; "
                "--nodes MIN:MAX says how many hosts there are."
            )


def has_peers(args: argparse.Namespace) -> bool:
    """Return whether hosts find each other by --peers or its variable."""
    return args.peers is not None or PEERS in os.environ


def guest_setting(args: argparse.Namespace, num_local_ranks: int) -> GuestSetting | None:
    """Return the settings of --peers and what belongs to it; None without. An option counts more than its variable.

    Raises ConfigurationError that names the option or the variable, whichever was given.
    """
    if not has_peers(args):
        return None
    options = [*PEER_OPTIONS, "--min-ranks", "--lost-after", "--local-addr", "--shutdown-timeout"]
    values = {option: getattr(args, _attribute(option), None) for option in options}
    values["--ranks-per-host"] = num_local_ranks
    given = {f"PACELINE_{_attribute(o).upper()}": (o, str(v)) for o, v in values.items() if v is not None}
    environment = {**os.environ, **{variable: value for variable, (_, value) in given.items()}}
    script, arguments = args.training_script, shown(args.training_script_args)
    try:
        return GuestSetting.of(environment, Path(script).name, facts_of(script), arguments)
    except ConfigurationError as error:
        said = str(error)
        for variable, (option, _) in given.items():
            said = said.replace(f"{variable}=", f"{option} ").replace(variable, option)
        raise ConfigurationError(said) from error


def _attribute(option: str) -> str:
    return option[2:].replace("-", "_")


def check_elastic(
    args: argparse.Namespace, num_local_ranks: int, num_machines: int, exclusive: Mapping[str, str]
) -> None:
    """Raise ConfigurationError for values of --min-ranks and --lost-after that cannot be.

    `exclusive` are options of other packages that were given, and why they exclude --min-ranks.
    """
    least = args.min_ranks
    if least is None:
        if args.shadow is not None:
            raise ConfigurationError(
                f"--shadow {args.shadow} has no effect without --min-ranks: a shadow follows paceline.Elastic. Add "
                "--min-ranks, or leave it out."
            )
        if args.lost_after is not None:
            raise ConfigurationError(
                f"--lost-after {args.lost_after:g} has no effect without --min-ranks. Add --min-ranks, or leave it out."
            )
        return
    num_ranks = num_local_ranks * num_machines
    if least < 1:
        raise ConfigurationError(f"--min-ranks {least} keeps no rank. Pass 1 to {num_ranks}.")
    if least > num_ranks:
        raise ConfigurationError(
            f"--min-ranks {least} is more than the {num_ranks} rank(s) of this launch. Pass 1 to {num_ranks}, or a "
            "larger --nproc-per-node."
        )
    if args.lost_after is not None and not 0 < args.lost_after < math.inf:
        raise ConfigurationError(
            f"--lost-after {args.lost_after:g} is not a time. Pass the seconds that a rank may stand still, such as 30."
        )
    is_range = len(set(str(args.nnodes).split(":"))) > 1
    for option, is_given, why in (
        ("--rdzv-endpoint file://", rendezvous_endpoint.meets_by_file(args), "hosts meet at an address"),
        ("port 0", str(args.rdzv_endpoint).endswith(":0"), "it is another port on each host"),
        (
            f"--rdzv-backend {args.rdzv_backend}",
            args.rdzv_backend not in ("c10d", "static"),
            "hosts meet each other at an address",
        ),
        ("--nnodes MIN:MAX", is_range, "the job begins with a fixed number of hosts, and goes on with fewer"),
        ("--max-restarts", args.max_restarts > 0, "lost ranks are replaced one by one, never all together"),
        *((option, True, why) for option, why in exclusive.items()),
        ("--watch", args.watch, "it shows the ranks that were there at the start"),
        ("--run-path", args.run_path, "a replacement is a process of its own"),
        (
            "--duplicate-stdout-filters or --duplicate-stderr-filters",
            args.duplicate_stdout_filters or args.duplicate_stderr_filters,
            "a replacement's lines would replace those of the rank that was lost; --tee keeps them all",
        ),
        ("--numa-binding", args.numa_binding is not None, "ranks are started one by one, without it"),
        ("--virtual-local-rank", args.virtual_local_rank, "ranks are started one by one, without it"),
    ):
        if is_given:
            raise ConfigurationError(f"--min-ranks and {option} exclude each other: {why}. Leave one out.")

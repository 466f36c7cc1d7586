"""Runs torch's elastic agent, which starts and watches the ranks, and turns its failures into one paragraph.

Rules
1. Nothing of a launch outlives it: ranks, their children, torch's log folder. Watchdog and agent see to it.
2. The ranks' own output is the user's: it passes through untouched. The agent's log is silenced unless LOGLEVEL
   is set, because it repeats at length what the paragraph says.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import shlex
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from paceline.comm import TOKEN
from paceline.extras import Running
from paceline.host.addresses import LOOPBACK, is_loopback
from paceline.integrations import at_start
from paceline.launch import rendezvous_endpoint
from paceline.launch.command_line import LaunchArguments, num_cores, port_is_taken
from paceline.launch.elastic import supervisor
from paceline.launch.elastic.rank_process import how_it_ended
from paceline.launch.elastic.several_hosts import find_own_address
from paceline.launch.hang_watch import HangWatch
from paceline.launch.launch_errors import InterruptedLaunchError, LaunchError
from paceline.launch.live_view import LiveView
from paceline.launch.machines import MachineRendezvous, MachinesDifferError, NodeInfo
from paceline.launch.stores import Listening
from paceline.launch.watchdog import MARK, Watchdog

_NUM_SHOWN = 4
# How likely an end by this signal is only a consequence of another rank's: a rank that loses its peer raises or is
# aborted by its communication library, and SIGTERM is what the agent sends to those that are left.
_CONSEQUENCES: dict[int, int] = {signal.SIGABRT: 2, signal.SIGTERM: 3}


def launch(arguments: LaunchArguments, note: Callable[[str], None]) -> None:
    """Run the script on every rank; blocks until all have ended well. On the main thread, where signals arrive.

    `note` is called with a line for everything that the launcher decided by itself. Afterwards no process of this
    launch is left. Raises LaunchError if ranks could not be started or failed, InterruptedLaunchError if a signal
    arrived.
    """
    port = arguments.local_port
    if port is not None and port_is_taken(port):
        raise LaunchError(_port_in_use(port))
    _choose_threads(arguments, note)
    _show_lines_at_once()
    _quieten_torch()
    os.environ.update(arguments.environment)
    launch_id = os.environ[MARK] = uuid.uuid4().hex
    _stay_on_this_machine(arguments)
    rendezvous = None
    if arguments.num_machines > 1 and arguments.min_ranks is None:
        rendezvous = _find_the_others(arguments, note)
    elif arguments.num_machines > 1:
        if arguments.is_first:
            rendezvous_endpoint.be_first(arguments.torchrun, arguments.words, note)
        if arguments.guest is None:
            find_own_address(arguments)
    own_address = arguments.torchrun.local_addr
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        watchdog = enter(Watchdog(launch_id))
        num_ranks = arguments.num_local_ranks if arguments.num_machines == 1 else 0
        hangs = HangWatch(watchdog.folder, launch_id, num_ranks, arguments.hang_after_s, note)
        if arguments.hang_after_s:
            enter(_environment(at_start.counting_environment(watchdog.folder)))
            enter(hangs)
        companions = [enter(each.running(own_address, note)) for each in arguments.companions]
        when_met = hangs.meet if arguments.hang_after_s else None
        enter(Listening(arguments.num_machines, note, rendezvous, when_met))
        if arguments.shows_live:
            _show_live(arguments, watchdog.folder, enter)
        if arguments.torchrun.log_dir is None:
            # torch would leave a folder in /tmp behind for every run that does not name one.
            arguments.torchrun.log_dir = _kept_logs(arguments, note) or str(watchdog.folder)
        enter(_in_words(arguments, companions, hangs))
        if arguments.min_ranks is not None:
            supervisor.run(arguments, hangs, note)
        else:
            torchrun.run(arguments.torchrun)


@contextlib.contextmanager
def _in_words(arguments: LaunchArguments, companions: Sequence[Running], hangs: HangWatch) -> Iterator[None]:
    """Turn what torch's launcher raises within into one paragraph."""
    started_s, port = time.monotonic(), arguments.local_port
    try:
        yield
    except MachinesDifferError as error:
        raise LaunchError(str(error)) from error
    except ChildFailedError as error:
        died = "; ".join(words for each in companions if (words := each.who_died()))
        first = f"{died}; then " if died else ""
        failed = _ranks_failed(arguments, error, time.monotonic() - started_s)
        raise LaunchError(first + failed + hangs.last_words) from error
    except SignalException as error:
        raise _interrupted(arguments, error.sigval, hangs.last_words) from error
    except KeyboardInterrupt as error:  # before the agent took over the signals
        raise _interrupted(arguments, signal.SIGINT) from error
    except (DistNetworkError, RendezvousError, TimeoutError) as error:
        if port is not None and "EADDRINUSE" in str(error):
            raise LaunchError(_port_in_use(port)) from error
        raise LaunchError(_no_rendezvous(arguments, error)) from error


def _show_live(arguments: LaunchArguments, folder: Path, enter: Callable[[Any], object]) -> None:
    """Show the ranks' steps while they train, until the entered contexts end."""
    args = arguments.torchrun
    if args.tee == "0" and args.redirects == "0":
        args.tee, args.log_dir = "3", args.log_dir or str(folder)
    enter(_environment(at_start.recording_environment(folder / "run")))
    enter(LiveView(folder / "run", [arguments.script, *args.training_script_args]))


@contextlib.contextmanager
def _environment(asked: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for every process that is started within this context."""
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _choose_threads(arguments: LaunchArguments, note: Callable[[str], None]) -> None:
    """Share the cores among the ranks, unless the user did. torchrun would give every rank one thread."""
    ranks = arguments.num_local_ranks
    if "OMP_NUM_THREADS" in os.environ or ranks == 1:
        return
    threads = max(1, num_cores() // ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    note(f"OMP_NUM_THREADS is not set; each rank gets {threads} ({num_cores()} cores, {ranks} ranks)")


def _stay_on_this_machine(arguments: LaunchArguments) -> None:
    """Let the ranks of a single machine meet at the loopback address with a token, unless the user named another."""
    args = arguments.torchrun
    host = (args.rdzv_endpoint or "").rpartition(":")[0]
    is_here = args.standalone or not host or is_loopback(host)
    if arguments.num_machines == 1 and args.local_addr is None and is_here:
        args.local_addr = LOOPBACK
    if arguments.num_machines == 1:  # with several, all must have the same, which only the user can give them
        os.environ.setdefault(TOKEN, secrets.token_hex(16))


def _find_the_others(arguments: LaunchArguments, note: Callable[[str], None]) -> MachineRendezvous:
    """Choose where the machines of this launch meet, and what they compare there."""
    args = arguments.torchrun
    if arguments.is_first:
        rendezvous_endpoint.be_first(args, arguments.words, note)
    rendezvous_endpoint.find_own_address(args)
    rendezvous_endpoint.wait_for_store(args, note)
    least, most = torchrun.parse_min_max_nnodes(args.nnodes)
    where = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
    return MachineRendezvous(
        node=NodeInfo.of_this_machine(args, arguments.num_local_ranks),
        num_machines=most,
        waits=least == most,
        takes_latecomers=args.max_restarts > 0 or least != most,
        where=where,
        job=args.rdzv_id,
        timeout_s=rendezvous_endpoint.patience_s(args),
    )


def _show_lines_at_once() -> None:
    """Flush each line: with `--tee`, torch writes the ranks' lines to this process's output and does not flush."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _quieten_torch() -> None:
    if "LOGLEVEL" in os.environ or "TORCH_LOGS" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            # To set a level would empty the cache of every logger, 50 ms in all.
            logging.getLogger(name).disabled = True


def _kept_logs(arguments: LaunchArguments, note: Callable[[str], None]) -> str | None:
    """Return a folder that outlives the launch, if the ranks' output was to be written to files."""
    args = arguments.torchrun
    if args.redirects == "0" and args.tee == "0":
        return None
    folder = tempfile.mkdtemp(prefix="paceline-logs-")
    note(f"the ranks' logs are kept in {folder}; --log-dir chooses another folder")
    return folder


def _ranks_failed(arguments: LaunchArguments, error: ChildFailedError, elapsed_s: float) -> str:
    failures = sorted(error.failures.items(), key=lambda item: _likely_cause_first(*item))
    # The agent ends the others by SIGTERM, and torch counts them among the failures.
    number, first = failures[0]
    rest = [item for item in failures[1:] if item[1].exitcode != -signal.SIGTERM]
    stopped = arguments.num_local_ranks - 1 - len(rest)
    also = "".join(f"; rank {rank} {how_it_ended(failure.exitcode)}" for rank, failure in rest[:_NUM_SHOWN])
    more = f"; {len(rest) - _NUM_SHOWN} more failed" if len(rest) > _NUM_SHOWN else ""
    others = f"; {stopped} other rank(s) on this machine were stopped" if stopped else ""
    early = "" if arguments.min_ranks is None else ", before the ranks had met in paceline.Elastic"
    rule = early and "A script without paceline.Elastic cannot outlive a rank. "
    return (
        f"rank {number} of {arguments.script} (pid {first.pid}) {how_it_ended(first.exitcode)}, {elapsed_s:.1f} s "
        f"after the start{early}{also}{more}{others}. {rule}{_what_next(first, arguments)}"
    )


def _likely_cause_first(rank: int, failure: ProcessFailure) -> tuple[int, int, int]:
    """Sort killed ranks first, then by time. torch's stamps are whole seconds, too coarse to tell which was first."""
    order = 1 if failure.exitcode > 0 else _CONSEQUENCES.get(-failure.exitcode, 0)
    return order, failure.timestamp, rank


def _what_next(failure: ProcessFailure, arguments: LaunchArguments) -> str:
    if failure.exitcode == -signal.SIGKILL:
        return (
            "If no person sent that signal, the machine ran out of memory. Look for 'Out of memory' in dmesg, and try "
            "fewer ranks or a smaller batch. `paceline explain was killed by` says more."
        )
    if failure.exitcode < 0 and -failure.exitcode not in _CONSEQUENCES:
        return (
            "That is a crash in native code: set PYTHONFAULTHANDLER=1 to see where. "
            "`paceline explain was killed by` says more."
        )
    args = arguments.torchrun
    words = ["-m"] * args.module + [arguments.script, *args.training_script_args]
    alone = f"paceline run --nproc-per-node 1 {shlex.join(words)}"
    return (
        f"Its own message, if it wrote one, is above. Next: try it alone ({alone}), or tell the ranks' output apart "
        "with --tee 3 --log-dir logs. `paceline explain exited with code` says more."
    )


def _interrupted(
    arguments: LaunchArguments, received: signal.Signals, last_words: str = ""
) -> InterruptedLaunchError:
    return InterruptedLaunchError(
        f"{received.name} received; all {arguments.num_local_ranks} rank(s) of {arguments.script} were stopped."
        + last_words,
        received,
    )


def _port_in_use(port: int) -> str:
    return (
        f"port {port} is in use: another process of this machine listens on it, and the ranks of this launch were to "
        "meet there. Leave out --master-port and --rdzv-endpoint to take a free port, name another one, or end that "
        f"process (ss -ltnp 'sport = :{port}' shows it). Nothing was started. `paceline explain is in use` says more."
    )


def _no_rendezvous(arguments: LaunchArguments, error: BaseException) -> str:
    args = arguments.torchrun
    where = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    return (
        f"the ranks could not meet at {where} (backend {args.rdzv_backend}): {reason}. Check that the address is "
        f"reachable from here and that the first machine's launcher runs there. All machines need the same --rdzv-id "
        f"and --nnodes. `paceline explain could not meet` says more."
    )

"""A rank that an engine has started (torchrun, Slurm, Kubernetes, a shell): its settings, and its host's agent.

Rules
1. The engine owns processes: it starts them, and starts them again. Paceline owns membership.
2. A rank begins alone, as rank 0 of 1, whatever its engine says.
3. The first rank of a host opens the socket of the agent and hands it to an agent that it starts. So there is one agent
   a host and job, and no rank can come too early. The name of the socket ends with the agent.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import importlib
import json
import math
import os
import select
import shlex
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from paceline.errors import ConfigurationError, PeerLostError
from paceline.host.addresses import LOOPBACK, interface_towards
from paceline.host.processes import GONE, Vitals, VitalSigns
from paceline.version import __version__

PEERS = "PACELINE_PEERS"
"""Environment variable: where agents of other hosts may be. With it, an engine starts the ranks."""
_DOOR = "PACELINE_AGENT_DOOR"
"""Environment variable of an agent: the descriptor of the socket that it listens on."""
SCRIPT = "PACELINE_SCRIPT"
"""Environment variable of an agent: the script and its arguments, as `paceline shadow` is given them."""
PREPARED = "PACELINE_GUEST"
"""Environment variable of a rank that `prepare` has prepared, and of its children."""
WELCOME = b"welcome"  # an agent says it to a rank that it takes
LOCAL = "local"  # the source of a job of one host
GRACE_S, JOIN_S, LOST_AFTER_S = 25.0, 30.0, 30.0
_CONNECT_S, _ACCEPT_S = 10.0, 0.1
_ANSWER_S = 60.0  # a Python has to start; the agent imports torch afterwards
_BACKLOG = 512
_MOST_WORDS = 300  # characters of a script's arguments that are shown
_SO_PEERPIDFD = 77
_PIDFD_GET_INFO, _INFO_EXIT, _INFO_BYTES = 0xC000FF0B | 64 << 16, 8, 64
_EXIT_CODE_AT = 60  # in the kernel's struct pidfd_info
_NUM_LOOKS, _LOOK_S = 10, 0.002
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_connected: list[int] = []  # processes that have an agent: this one, and those that it is a fork of
_AGENT, _LEADER = "paceline.elastic.guest", "paceline.launch.elastic.guest"
_NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
JOB_PREFIX = "paceline-job"
"""First word of the names at which agents listen for shadows."""


@dataclass(frozen=True)
class GuestSetting:
    """The settings of a job whose ranks an engine starts. `paceline run` has options of the same names."""

    peers: str = LOCAL  # where agents of other hosts may be; `local`: there are none
    least_nodes: int = 1  # hosts with which training begins
    most_nodes: int = 1  # hosts that train at most; a further one waits
    num_local_ranks: int = 1  # of each host
    min_ranks: int = 1  # training goes on with at least so many
    join_timeout_s: float = JOIN_S  # how long the first ranks wait for further ones, before training begins
    lost_after_s: float = LOST_AFTER_S  # a rank that stands still for so long counts as lost
    grace_s: float = GRACE_S  # from a notice to the end of the process
    job: str = ""  # its name; empty: it has none
    script: str = "the script"  # what the ranks run
    facts: str = ""  # the script with a digest of its file, and versions: those of all hosts have to be equal
    arguments: str = ""  # the script's
    local_addr: str = ""  # this host's address that the others reach; empty: found by the agent
    port: int = 0  # at which the agent listens; 0: the default
    record: str = ""  # folder that all hosts share, for the record of the job; empty: none
    name: str = ""  # what `job_name` returned on the rank that has started the agent
    words: Sequence[str] = ()  # the script and its arguments, as `paceline shadow` is given them

    @classmethod
    def of(
        cls, given: Mapping[str, str], script: str, facts: str = "", arguments: str = "", name: str = ""
    ) -> GuestSetting:
        """Read the variables. Raises ConfigurationError for values that cannot be."""
        least, most = _nodes(given.get("PACELINE_NODES", "1"))
        peers = given[PEERS].strip()
        if not peers:
            raise ConfigurationError(
                f"{PEERS} is empty. Set it to local for one host, to the other hosts' addresses, or to dns:NAME, "
                "file:FOLDER or slurm."
            )
        if peers == LOCAL and most > 1:
            raise ConfigurationError(
                f"PACELINE_NODES={given['PACELINE_NODES']} asks for several hosts, but {PEERS}=local names none. Give "
                f"{PEERS} the other hosts' addresses, dns:NAME, file:FOLDER or slurm."
            )
        num_local = _whole(given, "PACELINE_RANKS_PER_HOST", "1")
        min_ranks = _whole(given, "PACELINE_MIN_RANKS", "1" if most == 1 else str(least * num_local))
        if min_ranks > most * num_local:
            raise ConfigurationError(
                f"PACELINE_MIN_RANKS={min_ranks} is more than the {most * num_local} rank(s) of this job: {most} "
                f"host(s) with {num_local} each. Set a smaller one, or set PACELINE_RANKS_PER_HOST and PACELINE_NODES."
            )
        return cls(
            peers=peers,
            least_nodes=least,
            most_nodes=most,
            num_local_ranks=num_local,
            min_ranks=min_ranks,
            join_timeout_s=_seconds(given, "PACELINE_JOIN_TIMEOUT", JOIN_S),
            lost_after_s=_seconds(given, "PACELINE_LOST_AFTER", LOST_AFTER_S),
            grace_s=_seconds(given, "PACELINE_SHUTDOWN_TIMEOUT", GRACE_S),
            job=given.get("PACELINE_JOB")
            or given.get("SLURM_ARRAY_JOB_ID")
            or given.get("SLURM_JOB_ID")
            or "",
            script=script,
            facts=facts,
            arguments=arguments,
            local_addr=given.get("PACELINE_LOCAL_ADDR", ""),
            port=_whole(given, "PACELINE_PORT", "port") if given.get("PACELINE_PORT") else 0,
            record=_folder(given),
            name=name,
            words=json.loads(given.get(SCRIPT, "[]")),
        )

    @property
    def socket_name(self) -> str:
        """Return the name at which the agent of this host listens to ranks. It is abstract, so no file is left."""
        words = f"{self.job or f'{Path.cwd()} {self.script}'} {self.local_addr}"
        return f"\0paceline-{os.getuid()}-{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def prepare() -> None:
    """Let `init_process_group` make a group of this rank alone, as `paceline` is imported. Local.

    An engine may say otherwise, as torchrun does. But ranks that it starts again could not meet the others. A child
    process of the rank finds the variables set, and is no rank.
    """
    if PREPARED in os.environ:
        return
    atexit.register(_say_if_nothing_is_elastic, os.getpid())
    per_host = os.environ.get("PACELINE_RANKS_PER_HOST") or os.environ.get("LOCAL_WORLD_SIZE") or "1"
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": "0",
    }
    os.environ.update(alone, PACELINE_RANKS_PER_HOST=per_host, **{PREPARED: str(os.getpid())})
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


def use_interface_towards(host: str) -> None:
    """Let Gloo use the network interface that leads to this host. Else it takes what the own host's name means."""
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_towards(host)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def credentials_of_peer(end: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end of a Unix socket; 0 for a process that is not visible."""
    process, user, _ = _CREDENTIALS.unpack(
        end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return process, user


def connect() -> socket.socket:
    """Return a connection to the agent of this host, which is started if there is none. Blocks.

    Raises ConfigurationError for a bad variable, or another user's process there; PeerLostError if none answers.
    """
    script = sys.argv[0] or "python"
    module = getattr(sys.modules["__main__"], "__spec__", None)
    # The script as `paceline shadow` is given it.
    main = script if module is None else module.name.removesuffix(".__main__")
    words = [*["-m"] * (module is not None), main, *sys.argv[1:]]
    about = Path(script).name, facts_of(script), shown(sys.argv[1:]), job_name(main, sys.argv[1:])
    name = GuestSetting.of(os.environ, *about).socket_name
    until_s = time.monotonic() + _CONNECT_S
    while time.monotonic() < until_s:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            end.connect(name)
        except OSError:
            end.close()
            _open_door(name, about, words)
            continue
        _, user = credentials_of_peer(end)
        if user not in (os.getuid(), 0):
            raise ConfigurationError(
                "a process of another user listens where the agent of this host should. Give the job another name by "
                "PACELINE_JOB."
            )
        end.settimeout(_ANSWER_S)
        is_welcome = False
        try:
            with contextlib.suppress(ConnectionError):
                is_welcome = end.recv(len(WELCOME)) == WELCOME
        except TimeoutError:
            end.close()
            raise PeerLostError(
                f"the agent of this host has not answered for {_ANSWER_S:g} s. Is its process stopped, `python -m "
                f"{_AGENT}`?"
            ) from None
        if not is_welcome:  # that agent was about to end: another one is started
            end.close()
            until_s = time.monotonic() + _CONNECT_S
            continue
        end.settimeout(None)
        os.register_at_fork(after_in_child=end.close)  # else a loader's worker would keep it open
        _connected.append(os.getpid())
        return end
    raise PeerLostError(f"the agent of this host did not start within {_CONNECT_S:g} s. Is its memory full?")


def accept_rank(door: socket.socket) -> socket.socket | None:
    """Return the connection of a rank that arrives, once it is welcomed; None for another user's. May block."""
    end, _ = door.accept()
    end.setblocking(True)
    if credentials_of_peer(end)[1] != os.getuid():
        end.close()
        return None
    with contextlib.suppress(OSError):  # it has died meanwhile
        end.send(WELCOME)
    return end


def _run_agent() -> int:
    """Run the agent of this host, and return its exit code.

    The agent welcomes ranks while it imports torch, which may take minutes on a busy machine. Otherwise they give up.
    """
    told: list[int] = []
    for number in _NOTICES:
        signal.signal(number, lambda number, _: told.append(number))
    ranks: list[socket.socket] = []
    has_imported = threading.Event()
    with socket.socket(fileno=int(os.environ.pop(_DOOR))) as door:
        os.set_inheritable(door.fileno(), False)
        door.settimeout(_ACCEPT_S)

        def welcome() -> None:
            while not has_imported.is_set():
                with contextlib.suppress(TimeoutError):
                    if (end := accept_rank(door)) is not None:
                        ranks.append(end)

        welcomes = threading.Thread(target=welcome)
        welcomes.start()
        try:
            leader = importlib.import_module(_LEADER)
        finally:
            has_imported.set()
            welcomes.join()
        return int(leader.main(door, ranks, told))


def facts_of(script: str) -> str:
    """Return what hosts compare: the name of the script, a digest of its file, and versions. Local."""
    path = Path(script)
    digest = f" ({hashlib.sha256(path.read_bytes()).hexdigest()[:8]})" if path.is_file() else ""
    return f"{path.name}{digest} by paceline {__version__}, torch {version('torch')}"


def shown(arguments: Sequence[str]) -> str:
    """Return a script's arguments as hosts show them to each other."""
    words = "".join(each if each.isprintable() else "?" for each in shlex.join(arguments))
    digest = hashlib.sha256(words.encode()).hexdigest()[:8]
    return words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}... ({digest})"


def job_name(script: str, arguments: Sequence[str]) -> str:
    """Return the beginning of the name at which the agent of this script's job listens for shadows. Local."""
    path = Path(script)
    words = [str(path.resolve() if path.exists() else script), *arguments]
    digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
    return f"{JOB_PREFIX}/{os.getuid()}/{digest}"


def _open_door(name: str, about: Sequence[str], words: Sequence[str]) -> None:
    """Open the socket of the agent and start an agent that has it, unless another rank is about to do so.

    `words` are the script and its arguments, as `paceline shadow` is given them.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        try:
            door.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            time.sleep(0.01)  # that rank listens in a moment, or an agent is about to end
            return
        door.listen(_BACKLOG)
        os.set_inheritable(door.fileno(), True)
        environment = {**os.environ, _DOOR: str(door.fileno()), SCRIPT: json.dumps(words)}
        nowhere = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
        # The shell ends at once, so the agent is no child of this rank: Ray kills those as a rank ends.
        command = ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-m", _AGENT, *about]
        shell = os.posix_spawn(command[0], command, environment, file_actions=nowhere, setsid=True)
        with contextlib.suppress(ChildProcessError):  # a script that ignores SIGCHLD has none to wait for
            os.waitpid(shell, 0)


def _say_if_nothing_is_elastic(pid: int) -> None:
    dist = sys.modules.get("torch.distributed")
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    is_rank = has_group or "paceline.ddp.wrapper" in sys.modules  # a script may have destroyed its group
    if is_rank and pid == os.getpid() and pid not in _connected:
        sys.stderr.write(
            f"paceline: {PEERS} is set, but this script made no paceline.Elastic. So nothing was elastic, and each "
            f"process trained alone, as rank 0 of 1. Make one, or unset {PEERS}.\n"
        )


def _nodes(words: str) -> tuple[int, int]:
    least, _, most = words.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal()) or not 0 < int(least) <= int(most or least):
        raise ConfigurationError(
            f"PACELINE_NODES={words} is no number of hosts. Give MIN:MAX, such as 2:8, with MIN at least 1 and at most "
            "MAX; or one number."
        )
    return int(least), int(most or least)


def _whole(given: Mapping[str, str], name: str, default: str) -> int:
    words = given.get(name) or default
    if not words.isdecimal() or int(words) < 1:
        raise ConfigurationError(f"{name}={words} is no number. Give 1 or more.")
    return int(words)


def _folder(given: Mapping[str, str]) -> str:
    words = given.get("PACELINE_JOB_FOLDER", "")
    if words and not (Path(words).is_dir() and os.access(words, os.W_OK)):
        raise ConfigurationError(
            f"PACELINE_JOB_FOLDER={words} is no folder that this host can write to. Name one that all hosts "
            "share, such as that of the checkpoints."
        )
    return str(Path(words).absolute()) if words else ""


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    words = given.get(name) or str(default)
    try:
        found = float(words)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigurationError(
            f"{name}={words} is no number of seconds. Give one above 0, such as {default:g}."
        )
    return found


# ---- what an agent sees of a rank that it has not started


def peer_pidfd(end: socket.socket) -> int | None:
    """Return a pidfd of the process at the other end; None before Linux 6.5."""
    with contextlib.suppress(OSError):
        return int(struct.unpack("i", end.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0])
    return None


def pidfd_of(pid: int) -> int | None:
    """Return a pidfd of the process with this number; None before Linux 5.3, and for 0."""
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid) if pid > 0 else None
    return None


def exit_status_by_pidfd(pidfd: int) -> int | None:
    """Return the wait status of a process that was reaped; None before Linux 6.15, and before it was reaped."""
    words = bytearray(struct.pack("Q", _INFO_EXIT) + bytes(_INFO_BYTES - 8))
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, words)
        if struct.unpack_from("Q", words)[0] & _INFO_EXIT:
            return int(struct.unpack_from("i", words, _EXIT_CODE_AT)[0])
    return None


class PeerProcess:
    """The process that has opened the other end of `end`, a connected Unix socket. `pid` is 0 if it is unknown.

    Three sources say whether it lives, best first, because kernels and containers differ:
    1. The socket option SO_PEERPIDFD (Linux 6.5) names the process itself, whatever process has its number later.
    2. `pidfd_open` (Linux 5.3) of the number in SO_PEERCRED. The number is 0 if the process is in another container.
    3. The connection: it is closed when the process ends. Forked children of the process have to close their copy.

    The exit code comes from the pidfd (Linux 6.15), else from what /proc showed while the process ended.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.pid = credentials_of_peer(end)[0]
        pidfd = peer_pidfd(end)
        self.pidfd = pidfd_of(self.pid) if pidfd is None else pidfd
        self._signs: VitalSigns | None = None
        with contextlib.suppress(OSError):  # it has ended already, or is in another container
            self._signs = VitalSigns(self.pid)
        if pidfd is None and self._is_closed():  # the number may be another process's by now
            self._drop_pidfd()

    def vitals(self) -> Vitals:
        """Return the process's state. If the kernel does not show the process, it counts as alive while connected."""
        if self._signs is not None:
            return self._signs.look()
        is_gone = self.has_ended()
        return Vitals(GONE if is_gone else "", is_gone, cpu_ticks=0)

    def has_ended(self) -> bool:
        if self._signs is not None:
            self._signs.look()  # its exit code shows until its parent has reaped it
        if self.pidfd is None:
            return self._is_closed()
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone: its process group may contain the engine."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, limit_s: float) -> int | None:
        """Wait until it has ended, and return its exit code, negative for a signal; None if the kernel says none."""
        if self.pidfd is not None:
            select.select([self.pidfd], [], [], limit_s)
            for _ in range(_NUM_LOOKS):  # until its parent has reaped it
                if (status := exit_status_by_pidfd(self.pidfd)) is not None:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(_LOOK_S)
        status = None if self._signs is None else self._signs.exit_status()
        return None if status is None else os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        self._drop_pidfd()
        if self._signs is not None:
            self._signs.close()

    def _drop_pidfd(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def _is_closed(self) -> bool:
        try:
            return self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


if __name__ == "__main__":
    sys.exit(_run_agent())

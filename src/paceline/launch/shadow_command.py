"""`paceline shadow`: finds the job that trains this script on this host, and runs the script as its shadow."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from paceline.comm import TOKEN
from paceline.elastic.agent_connection import (
    SHADOW,
    AgentConnection,
    Ready,
    Receive,
    Refused,
    ShadowOrders,
    difference,
)
from paceline.elastic.discovery import Discovery
from paceline.elastic.guest import JOB_PREFIX, PEERS, GuestSetting, facts_of, job_name
from paceline.errors import ConfigurationError
from paceline.launch.agent import launch
from paceline.launch.command_line import parse
from paceline.launch.elastic.givers import ask_host, call_all
from paceline.launch.elastic.plan import Address

_NAMES = Path("/proc/net/unix")
_LOOK_S = 0.05  # between two calls of other hosts
_SAY_S = 10.0  # that one of them does not answer, before people are told


def follow(orders: ShadowOrders, words: list[str], note: Callable[[str], None], peers: str | None) -> None:
    """Run a script as the shadow of the job that trains it; blocks until the job has ended.

    Args:
        orders: The task. Without a `job` it is found.
        words: The script and its arguments, as `paceline run` was given them; before it `-m` for a module.
        note: Called with a line for the user.
        peers: Where agents of the job's hosts may be; None: the job trains on this host.

    Raises:
        ConfigurationError: No such job trains here, several do, or it does not use `Elastic`.
        LaunchError: The shadow failed; its own message is above.
    """
    if not words:
        raise ConfigurationError(
            "pass the job's script behind --, as in `paceline shadow checkpoints -- train.py`, with the arguments that "
            "`paceline run` was given."
        )
    given = {**os.environ, PEERS: peers or ""}
    os.environ.pop(PEERS, None)  # the shadow is no rank of an engine
    arguments = parse(["--nproc-per-node", "1", "--hang-after", "0", *words])
    script, script_arguments = arguments.script, arguments.torchrun.training_script_args
    if peers is None:
        name = orders.job or _job_of(job_name(script, script_arguments), script)
        line = AgentConnection.to_job(name)
        note("waits for the job's ranks to reach paceline.Elastic")
        if line.hear() is None:
            raise ConfigurationError(
                f"the job of {script} ended, and its ranks had not reached paceline.Elastic. A shadow follows what "
                "Elastic hands out: iterate over `elastic.steps(loader)`."
            )
        line.close()
    else:
        facts = "" if arguments.torchrun.module else facts_of(script)
        name = _Relay(GuestSetting.of(given, script, facts), note).name
    os.environ[SHADOW] = json.dumps(asdict(replace(orders, job=name)))
    launch(arguments, note)


class _Relay:
    """The agent that a shadow connects to at `name`, if its job trains on other hosts. It calls their agents.

    A membership's end closes the connections. Then they are called again, until none has answered for a while.
    """

    def __init__(self, setting: GuestSetting, note: Callable[[str], None]) -> None:
        self._note = note
        self._setting, self._discovery = setting, Discovery(setting.peers, setting.local_addr, setting.port)
        self._token = f"{os.environ.get(TOKEN, '')} {setting.job}"
        self.name = f"paceline-relay/{os.getuid()}/{os.getpid()}.{secrets.token_hex(4)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(1)
        threading.Thread(target=self._serve, name="paceline relay", daemon=True).start()

    def _serve(self) -> None:
        with self._listener, contextlib.closing(AgentConnection(self._listener.accept()[0])) as shadow:
            said, epoch = shadow.hear(), 0
            while isinstance(said, Ready) and (found := self._call_all()) is not None:
                ends, card = found
                theirs, _, card = card.partition("\n")
                if why := difference(theirs, self._setting.facts or theirs) or difference(card, said.card):
                    words = (
                        f"the shadow runs another script or model: {why}. Start it as the ranks were started."
                    )
                    shadow.tell(Refused(words))
                epoch += 1  # the job's may begin at 0 again
                poll = select.poll()
                for share, end in enumerate(ends):
                    shadow.tell(Receive(share, len(ends), epoch), handing=end)
                    poll.register(end, select.POLLRDHUP)
                poll.poll()
                for end in ends:
                    end.close()
            self._note(
                f"no host of the job answers at {self._setting.peers}: it has ended, or has another {TOKEN} or "
                "PACELINE_JOB."
            )

    def _call_all(self) -> tuple[list[socket.socket], str] | None:
        """Return a connection to each rank of the job, and their card. None if no agent has answered. Blocks."""
        began_s = heard_s = time.monotonic()
        has_said = False
        while time.monotonic() - heard_s < self._setting.lost_after_s:
            found: Sequence[tuple[str, int]] = ()
            why = ""
            with contextlib.suppress(OSError):
                found = self._discovery.find()
            for address in found:
                with contextlib.ExitStack() as closes, contextlib.suppress(OSError, ValueError):
                    givers = ask_host(Address(*address), self._token)
                    heard_s = time.monotonic()
                    if not givers.ranks:
                        continue
                    try:
                        ends = call_all(Address(*address), givers, self._token, closes)
                    except OSError as error:
                        why = str(error)
                        raise
                    closes.pop_all()
                    return ends, givers.card
            if why and not has_said and time.monotonic() - began_s > _SAY_S:
                has_said = True
                self._note(f"the shadow cannot follow yet, it needs the ranks of all hosts: {why}")
            time.sleep(_LOOK_S)
        return None


def _job_of(beginning: str, script: str) -> str:
    """Return the name of the one job whose name begins so."""
    names = [line.split()[-1] for line in _NAMES.read_text().splitlines() if f"@{JOB_PREFIX}/" in line]
    jobs = sorted({name[1:] for name in names if name[1:].startswith(f"{JOB_PREFIX}/{os.getuid()}/")})
    found = [job for job in jobs if job.startswith(f"{beginning}/")]
    if len(found) == 1:
        return found[0]
    if found:
        launchers = ", ".join(map(_pid_of, found))
        raise ConfigurationError(
            f"{len(found)} jobs train {script} with these arguments on this host (launchers {launchers}). A shadow "
            "follows one: give each job an argument of its own."
        )
    others = [_command_of(_pid_of(job)) for job in jobs]
    hint = f" These do: {'; '.join(others)}." if others else ""
    raise ConfigurationError(
        f"no job trains {script} with these arguments on this host. A shadow follows "
        f"jobs of `paceline run --min-ranks` or with {PEERS}.{hint} Repeat behind -- what follows the options of "
        "`paceline run`, or follows `python`."
    )


def _pid_of(job: str) -> str:
    return job.rpartition("/")[2].partition(".")[0]


def _command_of(pid: str) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return words.decode(errors="replace").strip()[:200]
    return f"process {pid}"

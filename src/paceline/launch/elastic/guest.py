"""The agent of a host whose ranks an engine has started: it watches them, and starts none.

The first rank of the host starts it (`paceline/elastic/guest.py`) with the socket that it listens on. Its words go to
a rank, which prints them. It ends with the last rank of its host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.comm import TOKEN
from paceline.elastic.agent_connection import Leave, Refused, Said
from paceline.elastic.discovery import Discovery
from paceline.elastic.guest import LOCAL, GuestSetting, accept_rank
from paceline.errors import ConfigurationError, PacelineError
from paceline.host.addresses import LOOPBACK
from paceline.launch.elastic.agent import Agent
from paceline.launch.elastic.agents import Agents, AgentSetting, GuestHosts, opened
from paceline.launch.elastic.local_ranks import Source
from paceline.launch.elastic.plan import Address, Decider, OneHost
from paceline.launch.elastic.rank_process import AgentsRank, WatchedProcess
from paceline.launch.elastic.record import JobRecord
from paceline.launch.elastic.shadows import Shadows, ShadowStart
from paceline.launch.elastic.vote import NEVER, Quorum
from paceline.launch.launch_errors import LaunchError

_LINGER_S = 2.0  # without a rank: its engine may be about to start another one
_JOIN_S = 10.0  # that a host takes at most to join, before the only one with a vote ends
# Of the time after which a rank is lost: how long to wait for addresses, hosts or ranks
_PATIENCE_RATIO = 10.0
_GONE_S = 30.0  # that ranks take at most to end after the job's end
_SAY_S = 3.0  # without an address, before people are told


class Door(Source):
    """The socket at which the ranks of this host arrive. `host` is the address of this host that ranks reach.

    `welcomed` are the connections of ranks that have arrived before.
    """

    def __init__(
        self,
        door: socket.socket,
        host: str,
        linger_s: float = _LINGER_S,
        welcomed: Sequence[socket.socket] = (),
    ) -> None:
        self._door, self.host, self._linger_s = door, host, linger_s
        door.setblocking(False)
        self.ranks: list[AgentsRank] = []
        # Those that were not returned yet
        self._new: list[AgentsRank] = [WatchedProcess(end) for end in welcomed]
        self._busy_s = time.monotonic()
        self.sent_away: list[AgentsRank] = []  # that came after the job's end

    def arrived(self) -> list[AgentsRank]:
        self.accept_ranks()
        found, self._new = self._new, []
        return found

    def accept_ranks(self) -> None:
        """Accept connections of ranks. Those of other users are refused."""
        with contextlib.suppress(BlockingIOError):
            while True:
                if (end := accept_rank(self._door)) is not None:
                    self._new.append(WatchedProcess(end))
        known = {*self.ranks}
        self.ranks = [each for each in self.ranks if each.connection.fileno() >= 0]
        self.ranks += [each for each in self._new if each not in known]
        if self.ranks:
            self._busy_s = time.monotonic()

    @property
    def is_left(self) -> bool:
        """Return whether no rank has been here for a while: its engine does not start another one at once."""
        return not self.ranks and time.monotonic() - self._busy_s > self._linger_s


class Voice:
    """The agent's words to people. A rank prints them, because the agent has no terminal."""

    def __init__(self) -> None:
        self._words: deque[str] = deque(maxlen=50)

    def note(self, words: str) -> None:
        self._words.append(words)

    def speak(self, ranks: Sequence[AgentsRank]) -> None:
        """Tell the first rank that hears. One that has begun to end comes last: it takes words and prints none."""
        if self._words:
            here = [each for each in ranks if each.connection.fileno() >= 0]
            here.sort(key=lambda each: each.vitals().is_ending)
            while self._words and any(
                each.connection.tell(Said(self._words[0]), waits=False) for each in here
            ):
                self._words.popleft()


@dataclass(frozen=True)
class Job:
    """The settings of a job, its decider, and the record of its beginning and end."""

    setting: GuestSetting
    decider: Decider
    record: JobRecord | None = None
    others: Agents | None = None  # this agent among those of other hosts, if there may be any

    def is_over(self) -> str | None:
        """Return why there is nothing left to train, in words; None: there is."""
        if self.record is not None and self.record.has_ended():
            return (
                f"the job has ended well before: {self.record.ended} says so. To train again, remove that file or give "
                "another PACELINE_JOB"
            )
        if self.others is not None and self.others.is_all_over():
            return "the job has ended well on the other hosts"
        return None


def lead(job: Job, door: Door, voice: Voice, told: Sequence[int], shadows: Shadows | None = None) -> None:
    """Lead the ranks of this host until the last one has ended. `told` are the signals that the agent has received."""
    agent = Agent(job.setting, job.decider, door, None, voice.note)
    agent.shadows = shadows

    def has_lost_job() -> bool:
        """Return whether the state is lost: ranks that its engine starts now begin anew, with another agent."""
        return agent.has_begun and not agent.trains and job.others is not None and job.others.is_only_one()

    retires_s = 0.0
    try:
        while not agent.is_over:
            agent.look()
            voice.speak(door.ranks)
            if door.ranks and not agent.trains and (why := job.is_over()) is not None:
                send_away(door, voice, why)
                until_s = time.monotonic() + _GONE_S
                while time.monotonic() < until_s and not all(each.has_ended() for each in door.sent_away):
                    # A rank whose words were not read would see an error if the agent ended now.
                    time.sleep(0.01)
                return
            if told:
                agent.leave(f"{signal.Signals(told[0]).name} received by the agent of this host")
            is_deserted = door.is_left or (not door.ranks and (told or has_lost_job()))
            if is_deserted and agent.may_retire():
                retires_s = retires_s or time.monotonic()
                if (
                    time.monotonic() - retires_s > _JOIN_S
                    or job.others is None
                    or not job.others.is_awaited()
                ):
                    return
            if job.others is not None and door.ranks:  # else there is no rank that would hear why
                job.others.check_job()
    except LaunchError as error:
        voice.note(str(error))
        voice.speak(door.ranks)
        agent.save(str(error), lambda: None)
        for each in door.ranks:  # of these none saves: their state may be older than the others'
            each.tell(Leave(str(error), 1))
        return
    if job.record is not None:
        job.record.end()
    if job.others is not None:
        job.others.finish(lambda: send_away(door, voice, "the job has ended well"))


def send_away(door: Door, voice: Voice, why: str) -> None:
    """Let all ranks that are here after the job's end exit with 0."""
    door.accept_ranks()
    late = [each for each in door.ranks if each not in door.sent_away and not each.has_ended()]
    door.sent_away += late
    if late:
        voice.note(why)
        voice.speak(late)
    for each in late:
        each.tell(Leave(why, 0))


def lead_as(setting: GuestSetting, door: Door, voice: Voice, told: Sequence[int]) -> None:
    """Lead the ranks of this host as one of the job's agents."""

    def attend() -> None:
        door.accept_ranks()
        voice.speak(door.ranks)

    how = ShadowStart(setting.words, setting.lost_after_s, peers=setting.peers)
    with (
        deciding(setting, voice.note, attend, begins_anew=True) as job,
        Shadows(setting.name, how, voice.note) as shadows,
    ):
        if job.others is not None:
            door.host = job.others.address.host
        lead(job, door, voice, told, shadows)


@contextlib.contextmanager
def deciding(
    setting: GuestSetting,
    note: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    *,
    begins_anew: bool = False,
) -> Iterator[Job]:
    """Run what decides who trains: this agent alone, or with those of other hosts. `check` is called while it waits.

    `begins_anew`: new ranks begin anew if those of all hosts were lost. With one host they always do.
    """
    record = JobRecord(Path(setting.record), setting.job) if setting.record else None
    if setting.peers == LOCAL:
        yield Job(setting, OneHost(), record)
        return
    discovery = Discovery(setting.peers, setting.local_addr, setting.port)
    listen = _where_to_listen(setting, discovery, note, check)
    known = AgentSetting(
        name=f"{socket.gethostname()}-{listen.host}",
        num_ranks=setting.num_local_ranks,
        start=Address("", 0),
        listen=listen,
        first=None,
        token=f"{os.environ.get(TOKEN, '')} {setting.job}",  # agents of another job do not understand each other
        needs=Quorum(NEVER, setting.min_ranks, setting.most_nodes, begins_anew),
        patience_s=_PATIENCE_RATIO * setting.lost_after_s,
        guest=GuestHosts(discovery, setting.least_nodes, setting.join_timeout_s, record),
        script=setting.facts,
        arguments=setting.arguments,
    )
    remedy = (
        "Give this host's address as PACELINE_LOCAL_ADDR, or another PACELINE_PORT, the same on all hosts."
    )
    try:
        with opened(known, note, remedy) as agents:
            yield Job(setting, agents, record, agents)
    finally:
        discovery.forget()


def _where_to_listen(
    setting: GuestSetting, discovery: Discovery, note: Callable[[str], None], check: Callable[[], None]
) -> Address:
    """Return the address of this host, once the source names one: a name may be known late."""
    began_s, limit_s, said = time.monotonic(), _PATIENCE_RATIO * setting.lost_after_s, False
    while True:
        try:
            return Address(*discovery.listen())
        except OSError as error:
            waited_s = time.monotonic() - began_s
            words = f"PACELINE_PEERS (or --peers) {setting.peers}: {error.strerror or error}"
        if waited_s > limit_s:
            raise ConfigurationError(f"{words}. Waited {waited_s:.0f} s.")
        if waited_s > _SAY_S and not said:
            said = True
            note(f"{words}; waiting up to {limit_s:g} s")
        check()
        time.sleep(0.2)


def main(listening: socket.socket, welcomed: Sequence[socket.socket], told: Sequence[int]) -> int:
    """Lead the ranks of this host, and return the exit code. `welcomed` and `told` as for `Door` and `lead`."""
    voice = Voice()
    setting = GuestSetting.of(os.environ, *sys.argv[1:])
    door = Door(listening, LOOPBACK, welcomed=welcomed)
    try:
        lead_as(setting, door, voice, told)
    except Exception as error:
        is_known = isinstance(error, PacelineError)
        why = str(error) if is_known else f"the agent of this host failed: {error!r}"
        door.accept_ranks()
        for each in door.ranks:
            each.tell(Refused(why))
        raise
    return 0

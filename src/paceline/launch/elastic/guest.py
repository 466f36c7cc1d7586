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
from collections.abc import Sequence

from paceline.elastic.agent_connection import Ended, Refused, Said
from paceline.elastic.guest import DOOR, GuestSetting, credentials_of_peer
from paceline.errors import PacelineError
from paceline.host.addresses import LOOPBACK
from paceline.launch.elastic.agent import Agent
from paceline.launch.elastic.plan import Decider, OneHost, Start
from paceline.launch.elastic.rank_process import AgentsRank, WatchedProcess
from paceline.launch.launch_errors import InterruptedLaunchError, LaunchError

_LINGER_S = 2.0  # without a rank: its engine may be about to start another one
_MOST_WORDS = 50
_NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Door:
    """The socket at which the ranks of this host arrive. `host` is the address of this host that ranks reach."""

    starts = False

    def __init__(self, door: socket.socket, host: str) -> None:
        self._door, self.host = door, host
        door.setblocking(False)
        self.ranks: list[AgentsRank] = []
        self.busy_s = time.monotonic()

    def start_all(self, start: Start | None) -> Sequence[AgentsRank]:
        return ()

    def start_one(self, local_rank: int) -> AgentsRank:
        raise NotImplementedError

    def arrived(self) -> list[AgentsRank]:
        """Return the ranks that have connected since the last call. Those of other users are refused."""
        found: list[AgentsRank] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                end, _ = self._door.accept()
                end.setblocking(True)
                if credentials_of_peer(end)[1] == os.getuid():
                    found.append(WatchedProcess(end))
                else:
                    end.close()
        self.ranks = [each for each in self.ranks if each.line.fileno() >= 0] + found
        if self.ranks:
            self.busy_s = time.monotonic()
        return found

    def close(self) -> None:
        self._door.close()


class Voice:
    """The agent's words to people. A rank prints them, because the agent has no terminal."""

    def __init__(self) -> None:
        self.ranks: list[AgentsRank] = []
        self._words: deque[str] = deque(maxlen=_MOST_WORDS)

    def note(self, words: str) -> None:
        self._words.append(words)

    def speak(self, ranks: Sequence[AgentsRank]) -> None:
        """Tell the first rank that hears."""
        while self._words and any(each.line.tell(Said(self._words[0]), waits=False) for each in ranks):
            self._words.popleft()


def lead(setting: GuestSetting, door: Door, decider: Decider, voice: Voice, told: Sequence[int]) -> None:
    """Lead the ranks of this host until the last one has ended. `told` are the signals that the agent has received."""
    agent = Agent(setting, decider, door, None, voice.note)
    try:
        while not agent.is_over:
            agent.look()
            voice.speak(door.ranks)
            has_ranks = bool(door.ranks)
            if told:
                agent.leave(f"{signal.Signals(told[0]).name} received by the agent of this host")
            if not has_ranks and (told or time.monotonic() - door.busy_s > _LINGER_S):
                return
    except InterruptedLaunchError:
        return
    except LaunchError as error:
        voice.note(str(error))
        voice.speak(door.ranks)
        agent.save(str(error), lambda: None)
        for each in door.ranks:
            each.tell(Ended(str(error)))


def main() -> int:
    """Run the agent of this host."""
    told: list[int] = []
    for number in _NOTICES:
        signal.signal(number, lambda number, _: told.append(number))
    voice = Voice()
    with socket.socket(fileno=int(os.environ.pop(DOOR))) as listening:
        os.set_inheritable(listening.fileno(), False)
        setting = GuestSetting.of(os.environ, os.environ.get("PACELINE_SCRIPT", "the script"))
        door = Door(listening, LOOPBACK)
        try:
            lead(setting, door, OneHost(), voice, told)
        except Exception as error:
            why = (
                str(error)
                if isinstance(error, PacelineError)
                else f"the agent of this host failed: {error!r}"
            )
            for each in [*door.ranks, *door.arrived()]:
                each.tell(Refused(why))
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())

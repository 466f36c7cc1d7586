"""The ranks of one host: which process has which local rank, what it is doing, which have ended, and replacements.

Rules
1. A rank is lost when it dies or stands still for too long, or when it ends before it has left its loop over steps.
   A lost rank is killed, so that it cannot come back with an old epoch.
2. A local rank is vacant once its lost process has ended, so a replacement finds ports, files and memory free. It is
   filled when the agent says so, because a process that starts would share cores with those that recover.
3. Before the first membership a failed rank ends the launch, as without `--min-ranks`. A script that does not use
   `Elastic` may have trained by then, so starting all ranks again would repeat that.
"""

from __future__ import annotations

import enum
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from paceline.elastic.agent_connection import InLoop, Leave, Message, Ready
from paceline.elastic.guest import GuestSetting
from paceline.host.processes import is_stopped
from paceline.launch.command_line import LaunchArguments
from paceline.launch.elastic.plan import NOT_STARTED, Member, Start
from paceline.launch.elastic.rank_process import AgentsRank, how_it_ended
from paceline.launch.watchdog import GRACE_S

LOOK_S = 0.005  # between two looks at the ranks: the kernel shows a death so early nowhere else
_STOPPED_RATIO = 0.1  # of --lost-after, that a stopped process may stand still
_MOST_STARTS = 3  # of one local rank's replacements, if none of them comes in
_EARLY_S = 1.0  # that a rank's death may be seen later than those that it causes


class Phase(enum.Enum):
    """The state of a process, as far as its agent knows."""

    STARTING = "is starting"
    WAITING = "waits to come in"
    TRAINING = "trains"
    LOST = "was lost"  # or is ending
    LEAVING = "leaves"  # it was told to end


@dataclass
class Rank:
    """One process."""

    process: AgentsRank  # it
    member: Member  # its name in plans
    local_rank: int  # its number on this host, which a replacement takes
    phase: Phase = Phase.STARTING  # what it is doing
    rank: int = NOT_STARTED  # its number in the membership that it is, or was, in; or at the job's beginning
    step: int | None = None  # steps it has completed, if it has said so since the membership ended
    is_inside: bool = False  # whether it is in its loop over steps
    is_through: bool = False  # whether it has left its last loop as all samples were trained
    has_trained: bool = False  # whether it has been in a loop
    follows: bool = False  # whether it has said that it goes on in the membership that it was assigned to
    is_replaying: bool = False  # whether it receives another's state, and has not caught up
    leaves: bool = False  # whether it was told to end, or its host was
    saves: bool = False  # whether it makes a checkpoint, if training cannot go on
    saved: str | None = None  # how that went: why it failed, or empty; None: it has not said so
    is_silent: bool = False  # whether it has closed its end of the connection
    cpu_ticks: int = 0  # that it had used when it was seen to use more
    # when that was, or when it said that it waits for others
    moved_s: float = field(default_factory=time.monotonic)
    arrived_s: float = field(default_factory=time.monotonic)  # when it was started, or came
    left_s: float | None = None  # when it was told to go
    # Since when it is stopped. It may have waited for others before, and a debugger stops it for a moment.
    stopped_s: float | None = None

    @property
    def name(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else f"a process for local rank {self.local_rank}"
        return f"{who} (pid {self.process.pid})"


JobSetting = LaunchArguments | GuestSetting  # an agent needs what both have


class Source:
    """The source of a host's processes: here an engine, which starts them by itself. A `Starter` is another."""

    host: str  # the address of this host that ranks reach
    # Starts a rank in place of a lost one, by its local rank; None: an engine starts ranks.
    start_one: Callable[[int], AgentsRank] | None = None

    def start_all(self, start: Start | None) -> Sequence[AgentsRank]:
        """Start all ranks of this host, if the agent starts ranks. `start` None: the job has begun without them."""
        return ()

    def arrived(self) -> Sequence[AgentsRank]:
        """Return the ranks that have come by themselves, once each."""
        return ()


class LocalRanks:
    """The processes of a host, in the order of their starts.

    `start` says how they begin, None: the job has begun without this host; `name` is the agent's in plans. What a rank
    says goes to `take`, and to `lose` why the membership is over.
    """

    def __init__(
        self,
        arguments: JobSetting,
        starter: Source,
        start: Start | None,
        name: str,
        note: Callable[[str], None],
        take: Callable[[Rank, Message], None],
        lose: Callable[[str], None],
    ) -> None:
        self._arguments, self._starter = arguments, starter
        self._name, self._note, self._take, self._lose_because = name, note, take, lose
        self._ranks: dict[int, Rank] = {}
        self._num_started = 0
        self._failed_starts: dict[int, int] = {}  # of replacements in a row, by local rank
        self._early_ends: dict[int, ProcessFailure] = {}  # before the first membership, by rank
        self._early_s = 0.0  # when the first of them was seen
        self.dying: list[Rank] = []
        """Lost, and not yet buried."""
        self._vacant: list[int] = []  # local ranks
        self._closed: dict[int, str] = {}  # local ranks that get no replacement any more, and why
        self.finished: set[Member] = set()
        """Processes that have ended well."""
        self.is_training_over = False
        """Whether a process has ended well behind a whole epoch."""
        self.has_begun = False
        """Whether there was a membership."""
        for local_rank, process in enumerate(starter.start_all(start)):
            self._add(process, local_rank, NOT_STARTED if start is None else start.first_rank + local_rank)

    # ---- who there is

    def __iter__(self) -> Iterator[Rank]:
        return iter(list(self._ranks.values()))

    def in_phase(self, *phases: Phase) -> list[Rank]:
        return [rank for rank in self._ranks.values() if rank.phase in phases]

    @property
    def training(self) -> list[Rank]:
        """Return the ranks that train, by their numbers in the membership."""
        return sorted(self.in_phase(Phase.TRAINING), key=lambda rank: rank.rank)

    # ---- they begin and end

    def _add(self, process: AgentsRank, local_rank: int, rank: int = NOT_STARTED) -> None:
        member = Member(self._name, self._num_started)
        self._ranks[self._num_started] = Rank(process, member, local_rank, rank=rank)
        self._num_started += 1

    def _remove(self, rank: Rank) -> None:
        del self._ranks[rank.member.number]

    def kill(self, rank: Rank) -> None:
        """Kill a rank whose state is old, or may be. A replacement takes other ranks' state."""
        rank.phase = Phase.LOST
        self._remove(rank)
        self.dying.append(rank)
        rank.process.ask_to_end(signal.SIGKILL)

    def note_loop(self, rank: Rank, message: InLoop) -> None:
        rank.is_inside, rank.is_through = message.inside, message.is_through
        if message.inside:
            rank.has_trained = True
            self._failed_starts.pop(rank.local_rank, None)

    def cannot_come_in(self, rank: Rank) -> None:
        """Start no process for this local rank any more, because none can join the others."""
        self._closed[rank.local_rank] = "what starts there cannot come in"

    def end(self, number: signal.Signals) -> None:
        ranks = [*self, *self.dying]
        for rank in ranks:
            # A signal alone would be a notice to the rank.
            rank.process.tell(Leave("the launch ends", 128 + number, at_once=True))
            rank.process.ask_to_end(number)
            rank.process.ask_to_end(signal.SIGCONT)
        until_s = time.monotonic() + GRACE_S
        while time.monotonic() < until_s and not all(rank.process.has_ended() for rank in ranks):
            time.sleep(LOOK_S)
        for rank in ranks:
            rank.process.bury()

    # ---- what is seen of them

    def hear(self) -> None:
        """Take in what they say; waits a few milliseconds."""
        poll = select.poll()
        by_descriptor = {}
        for rank in self:
            if not rank.is_silent:
                by_descriptor[rank.process.connection.fileno()] = rank
                poll.register(rank.process.connection, select.POLLIN)
        for descriptor, _ in poll.poll(LOOK_S * 1000):
            self._listen_to(by_descriptor[descriptor])

    def _listen_to(self, rank: Rank) -> None:
        message = rank.process.hear()
        if message is None:
            rank.is_silent = True
        else:
            rank.moved_s = time.monotonic()
            self._take(rank, message)

    def hear_all_of(self, rank: Rank) -> None:
        """Take in what a rank has said until now."""
        while not rank.is_silent and select.select([rank.process.connection], [], [], 0)[0]:
            self._listen_to(rank)

    def look(self, awaited_since_s: float | None) -> None:
        """See who ends, and who stands still; since when all are asked to stop, if they are."""
        for rank in self:
            vitals = rank.process.vitals()
            if vitals.is_ending:
                self._see_end(rank)
                continue
            now_s, limit_s = time.monotonic(), self._arguments.lost_after_s
            if vitals.cpu_ticks != rank.cpu_ticks:
                rank.cpu_ticks, rank.moved_s = vitals.cpu_ticks, now_s
            still_s = now_s - rank.moved_s
            rank.stopped_s = (rank.stopped_s or now_s) if is_stopped(vitals.state) else None
            held_s = now_s - (rank.stopped_s or now_s)
            is_held = held_s > limit_s * _STOPPED_RATIO
            hangs = rank.is_replaying and still_s > limit_s  # else it would have said that it waits
            if rank.phase is Phase.TRAINING:
                is_awaited = awaited_since_s is not None and rank.is_inside and rank.step is None
                if is_held:
                    self._lose(rank, f"{rank.name} was stopped for {held_s:.1f} s")
                elif hangs or (is_awaited and now_s - max(awaited_since_s or 0.0, rank.moved_s) > limit_s):
                    self._lose(rank, f"{rank.name} did not answer for {limit_s:g} s, and did nothing")
            elif hangs or (rank.is_replaying and is_held):  # the others would wait for it
                self._fail_start(rank, f"{rank.name} stood still for {still_s:.1f} s")
                self.kill(rank)

    def _see_end(self, rank: Rank) -> None:
        """Handle a process that is ending. Within its loop it is lost at once; otherwise its exit code decides."""
        self.hear_all_of(rank)  # its last words
        if rank.phase is Phase.TRAINING and rank.is_inside:
            self._lose(rank, f"{rank.name} ended")
        elif rank.process.has_ended():
            self._remove(rank)
            code = rank.process.bury()
            if rank.phase is Phase.LEAVING:
                self._vacant.append(rank.local_rank)
            elif code == 0 or (code is None and rank.is_through):
                self.finished.add(rank.member)
                self.is_training_over |= rank.is_through
            else:
                self._see_failure(rank, code)

    def _lose(self, rank: Rank, why: str) -> None:
        self.kill(rank)
        if why != f"{rank.name} ended":
            self._note(why)
        self._lose_because(why)

    def _see_failure(self, rank: Rank, code: int | None) -> None:
        """Handle a process that has failed outside of its loop."""
        why = f"{rank.name} {how_it_ended(code)}"
        if not self.has_begun and self._starter.start_one is not None and code is not None:
            self._early_s = self._early_s or time.monotonic()
            failure = ProcessFailure(rank.local_rank, rank.process.pid, code, error_file="")
            self._early_ends[rank.rank if rank.rank >= 0 else rank.local_rank] = failure
            return
        if rank.has_trained:
            self._note(why)
        else:
            self._fail_start(rank, why)
        if rank.phase is Phase.TRAINING:
            self._lose_because(why)
        self._vacant.append(rank.local_rank)

    def _fail_start(self, rank: Rank, why: str) -> None:
        tries = self._failed_starts[rank.local_rank] = self._failed_starts.get(rank.local_rank, 0) + 1
        self._note(f"{why} before {'its first step' if rank.phase is Phase.TRAINING else 'it came in'}")
        if tries >= _MOST_STARTS:
            self._closed[rank.local_rank] = f"{tries} replacements in a row did not come to a step"

    # ---- replacements

    def bury(self) -> dict[str, str]:
        """Free the local ranks of processes that have ended; returns, for what was said of each, how it ended."""
        found = {}
        for rank in list(self.dying):
            if rank.process.has_ended():
                self.dying.remove(rank)
                how = found[f"{rank.name} ended"] = f"{rank.name} {how_it_ended(rank.process.bury())}"
                self._note(how)
                self._vacant.append(rank.local_rank)
        return found

    def fill(self, is_ending: bool) -> None:
        """Start replacements for all that were buried, unless the launch ends. Take in what an engine has started."""
        taken = {each.local_rank for each in [*self, *self.dying]}
        for process in self._starter.arrived():
            local_rank = next(number for number in range(len(taken) + 1) if number not in taken)
            taken.add(local_rank)
            self._add(process, local_rank)
        vacant, self._vacant = self._vacant, []
        start_one = self._starter.start_one
        if is_ending or start_one is None:
            return
        for local_rank in vacant:
            if self.finished or any(each.local_rank == local_rank for each in self):
                continue
            if local_rank not in self._closed:
                self._add(start_one(local_rank), local_rank)
            else:
                self._note(f"local rank {local_rank} is not started again: {self._closed[local_rank]}")

    def adopt(self, take_spare: Callable[[], tuple[AgentsRank, Ready] | None]) -> None:
        """Let spares take vacant local ranks, as long as there are any."""
        taken = {each.local_rank for each in self} | self._closed.keys()
        for local_rank in range(self._arguments.num_local_ranks):
            if local_rank not in taken and (spare := take_spare()) is not None:
                process, said = spare
                self._add(process, local_rank)
                rank = self._ranks[self._num_started - 1]
                rank.phase, rank.saves = Phase.WAITING, said.saves
                self._note(f"the shadow (pid {process.pid}) takes the place of local rank {local_rank}")

    def raise_early_ends(self) -> None:
        """Raise ChildFailedError if a rank failed before the first membership.

        Waits a moment: other ranks may have ended first, by errors that the failed rank caused.
        """
        if self._early_ends and time.monotonic() - self._early_s > _EARLY_S:
            raise ChildFailedError(self._arguments.script, self._early_ends)

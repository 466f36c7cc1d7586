"""The agent of one host: leads its ranks from one membership into the next.

Rules
1. The end of a membership: every rank is told to stop, and says how many steps it has completed. When all that live
   have said so, the next one is decided. A rank that is lost meanwhile is left out.
2. A rank or host that comes in asks all ranks to pause between two steps. No step is computed twice for it.
3. This process waits for all of its ranks at once, and a few milliseconds at most. `local_ranks.py` starts,
   watches and replaces them.
4. A rank that is told to end leaves as another comes in: all pause between two steps, and the next membership is
   without it. It ends once all that stay know of that. If too few stay, one that leaves makes a checkpoint first.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping

from paceline.elastic.agent_connection import (
    CaughtUp,
    Ended,
    Following,
    Give,
    InLoop,
    Leave,
    Message,
    Notice,
    Pause,
    RankAssignment,
    Ready,
    Receive,
    Refused,
    Saved,
    Stop,
    Stopped,
    Trouble,
    difference,
)
from paceline.launch.elastic.givers import Givers
from paceline.launch.elastic.links import tell_about
from paceline.launch.elastic.local_ranks import (
    LOOK_S,
    JobSetting,
    LocalRanks,
    Phase,
    Rank,
    Source,
)
from paceline.launch.elastic.plan import NOT_STARTED, Decider, Member, Plan, Proposal, Start
from paceline.launch.elastic.shadows import Followed, Shadows
from paceline.launch.elastic.starting import EpochStores
from paceline.launch.launch_errors import InterruptedLaunchError, LaunchError

_MISSING_RATIO = 10.0  # of it, that the others wait while fewer than --min-ranks are there
_MOST_TRIES = 10  # memberships in a row in which no step is completed
_LEAVES_RATIO = 0.4  # of the grace: then a rank that was told to end does not wait for other hosts any more
LEFT = 143  # exit code of a rank that was told to end: what SIGTERM means to every engine


class Agent:
    """One host's; `start` says how its ranks begin, None: the job has begun without this host.

    `followed` is called with each plan, `waits` as `HangWatch.note_waits`.
    """

    def __init__(
        self,
        arguments: JobSetting,
        decider: Decider,
        starter: Source,
        start: Start | None,
        note: Callable[[str], None],
        followed: Callable[[Plan], None] = lambda _: None,
        waits: Callable[[Mapping[int, int], Mapping[int, int], str], None] = lambda *_: None,
    ) -> None:
        self._arguments, self._decider, self._note = arguments, decider, note
        self._followed, self._waits = followed, waits
        self.shadows: Shadows | None = None
        """Those of this host's ranks."""
        self._shadow_folder = ""  # where the script wants a shadow to write
        self._stores = EpochStores(starter.host)
        self._card: str | None = None
        # The membership
        self._epoch = NOT_STARTED
        self._members: tuple[Member, ...] = ()
        self._is_stopping = False  # its ranks were told to stop, or to pause
        self._is_pausing = False
        self._because: list[str] = []  # why it ends
        self._since_s = time.monotonic()  # when its end began; for the first one, the launch
        self._furthest, self._num_tries = NOT_STARTED, 0
        self._has_said_missing = False
        self._num_given = 0  # to ranks of other hosts
        self.is_over = False
        self._starts = starter.start_one is not None
        # Ranks that leave
        self._told: str | None = None  # why all of this host do
        self._told_s, self._has_left = 0.0, False  # since when; whether one of the last membership has left
        self._going: list[Rank] = []  # out of the membership, until the others know it
        self._going_from = NOT_STARTED  # the membership that they have left
        self._saver: Rank | None = None  # of these, which makes a checkpoint
        self._retires_from: int | None = None  # the membership that this host leaves, because it has no rank
        self._saved_at = NOT_STARTED  # the step of the last checkpoint that one has made
        self._ranks = LocalRanks(arguments, starter, start, decider.name, note, self._take, self._stop)

    def end(self, number: signal.Signals) -> None:
        """End all processes: by a signal, and by force if they take too long."""
        self._ranks.end(number)

    def save(self, why: str, check: Callable[[], None]) -> None:
        """Let a rank that is furthest make a checkpoint, if the script has asked for one. Training does not go on.

        If it fails, the next one is asked. None is asked if the other hosts may train on without this one. Its state
        may be old then, and its checkpoint would take the place of a newer one.
        """
        able = [rank for rank in self._ranks.training if rank.saves and rank.step is not None]
        if able and not self._decider.holds_vote():
            self._note("no checkpoint is made here: other hosts may train on without this one")
            return
        until_s = time.monotonic() + _MISSING_RATIO * self._arguments.lost_after_s
        for rank in sorted(able, key=lambda each: each.step or 0, reverse=True):
            self._note(f"{rank.name} is asked for a checkpoint after step {rank.step}")
            rank.process.tell(Ended(why))
            while not (has_ended := rank.process.has_ended()) and time.monotonic() < until_s:
                check()
                time.sleep(LOOK_S)
            self._ranks.hear_all_of(rank)
            if rank.saved == "":
                self._note(f"{rank.name} has made it")
                return
            late = "it ended before" if has_ended else "it took too long"
            self._note(f"{rank.name} has made no checkpoint: {rank.saved or late}")

    # ---- the loop

    def look(self) -> None:
        """Handle what has happened since the last call. Returns after a few milliseconds."""
        ranks = self._ranks
        ranks.hear()
        is_awaited = self._is_stopping and not self._is_pausing
        ranks.look(self._since_s if is_awaited else None)
        ended = ranks.bury()
        self._because = [ended.get(why, why) for why in self._because]
        ranks.raise_early_ends()
        if not self._is_recovering:
            ranks.fill(is_ending=self._told is not None or self._has_lost_all)
        self._ask_decider()
        self._see_off()
        self._give_to_others()
        self._let_in()
        self._decide()
        if self.shadows is not None and not self._is_stopping:
            size, ask_others = len(self._members), self._decider.ask_for_shares
            followed = Followed(self._epoch, ranks.training, size, self._card, ask_others)
            self.shadows.look(followed, self._shadow_folder, self._decider.is_spare())
        self._tell_who_waits()
        is_done = not ranks.in_phase(Phase.TRAINING, Phase.LOST, Phase.LEAVING) and not ranks.dying
        if is_done and ranks.finished and (self._epoch != NOT_STARTED or not list(ranks)):
            self._raise_if_some_failed()
            self.is_over = True  # what still starts, or waits to come in, is ended

    def _tell_who_waits(self) -> None:
        """Tell which ranks of this host the others wait for: a rank may compute for ever, which is no loss."""
        if self._epoch == NOT_STARTED:
            waiting, missing = self._ranks.in_phase(Phase.WAITING), self._ranks.in_phase(Phase.STARTING)
            what = "waiting in paceline.Elastic for all ranks"
        else:
            training = self._ranks.training if self._is_stopping else []
            waiting = [rank for rank in training if rank.step is not None]
            missing = [rank for rank in training if rank.step is None]
            what = "waiting for all ranks to stop"
        if not waiting and (self._epoch == NOT_STARTED or self._is_pausing):
            missing = []  # no rank waits yet
        pids = [{r.rank: r.process.pid for r in ranks if r.rank >= 0} for ranks in (waiting, missing)]
        self._waits(pids[0], pids[1], what)

    @property
    def _has_lost_all(self) -> bool:
        """Return whether no rank trains any more, and no other host has ranks that do."""
        return self._epoch != NOT_STARTED and self._decider.is_alone and not self._ranks.training

    @property
    def _is_recovering(self) -> bool:
        """Return whether a broken membership has no successor yet. It is False if too few ranks are left for one."""
        training = self._ranks.training
        is_between = self._is_stopping and not self._is_pausing
        is_between = is_between or not all(rank.follows for rank in training)
        return is_between and len(training) >= (self._arguments.min_ranks or 1)

    # ---- ranks that were told to end

    def leave(self, why: str) -> bool:
        """Have all ranks of this host leave, between two steps. Return whether some have not yet, and still may.

        They may as long as the grace lasts. There is nothing to wait for if training has not begun.
        """
        if self._told is None:
            self._told, self._told_s = why, time.monotonic()
        for rank in self._ranks:
            rank.leaves = True
        is_late = time.monotonic() - self._told_s > self._arguments.grace_s
        return self._epoch != NOT_STARTED and not is_late and bool(list(self._ranks) or self._ranks.dying)

    @property
    def has_begun(self) -> bool:
        """Return whether there was a membership."""
        return self._epoch != NOT_STARTED

    @property
    def trains(self) -> bool:
        """Return whether ranks of this host are in a membership."""
        return bool(self._ranks.training)

    def may_retire(self) -> bool:
        """Return whether this host, which has no rank any more, may end: the others do not count on its vote."""
        if self._decider.is_alone or self._epoch == NOT_STARTED:
            return True
        if self._retires_from is None:
            self._retires_from = self._epoch
            self.leave("no rank is left on this host")
            if not self._is_stopping:
                self._pause("no rank is left on a host")
        is_overdue = time.monotonic() - self._told_s > _LEAVES_RATIO * self._arguments.grace_s
        return is_overdue or self._decider.may_leave(self._retires_from) is not None

    def _see_off(self) -> None:
        """Let ranks go that were told to end."""
        for rank in self._ranks.in_phase(Phase.STARTING, Phase.WAITING):
            if rank.leaves:
                self._let_go(rank)
        training = self._ranks.training
        leaving = [rank for rank in training if rank.leaves and rank.is_inside]
        if leaving and not self._is_stopping and all(rank.follows for rank in training):
            self._pause(f"{leaving[0].name} leaves")
        for rank in self._ranks.in_phase(Phase.LEAVING):
            if rank.left_s is not None and time.monotonic() - rank.left_s > self._arguments.grace_s:
                self._ranks.kill(rank)
        if not self._going:
            return
        saves = self._decider.may_leave(self._going_from)
        is_overdue = time.monotonic() - self._told_s > _LEAVES_RATIO * self._arguments.grace_s
        if saves is None and not is_overdue:
            return
        num_left = len(self._ranks.training) + len(self._ranks.in_phase(Phase.WAITING))
        if self._decider.is_alone:
            saves = num_left < (self._arguments.min_ranks or 1)
        if saves is None:  # the others do not answer: they may train on, and make newer checkpoints
            saves = self._decider.holds_vote()
        if saves and self._has_to_save():
            return
        for rank in self._going:
            self._let_go(rank)
        self._going, self._saver, self._has_left = [], None, True

    def _has_to_save(self) -> bool:
        """Let one of the ranks that leave make a checkpoint; if it fails, another one. Return whether to wait."""
        saver = self._saver
        if saver is not None and saver.saved is None and saver in list(self._ranks):
            return True
        if saver is not None and saver.saved == "":
            self._note(f"{saver.name} has made a checkpoint after step {saver.step}")
            self._saved_at = saver.step or 0
        elif saver is not None:
            self._note(f"{saver.name} has made no checkpoint: {saver.saved or 'it ended before'}")
        self._going = [each for each in self._going if each is not saver]
        able = [each for each in self._going if each.saves and (each.step or 0) > self._saved_at]
        if (saver is not None and saver.saved == "") or not able:
            return False
        self._saver = max(able, key=lambda each: each.step or 0)
        self._note(f"{self._saver.name} is asked for a checkpoint after step {self._saver.step}")
        self._let_go(self._saver, saves=True)
        return True

    def _let_go(self, rank: Rank, saves: bool = False) -> None:
        rank.phase, rank.left_s = Phase.LEAVING, time.monotonic()
        rank.process.tell(Leave(self._told or "it was told to end", LEFT, saves))

    # ---- what ranks say

    def _take(self, rank: Rank, message: Message) -> None:
        if isinstance(message, Ready):
            rank.saves, self._shadow_folder = message.saves, message.shadow or self._shadow_folder
            self._let_wait(rank, message.card)
        elif isinstance(message, InLoop):
            self._ranks.note_loop(rank, message)
        elif isinstance(message, Trouble) and message.epoch == self._epoch and rank.phase is Phase.TRAINING:
            self._stop(f"communication of {rank.name} failed: {message.words}")
        elif isinstance(message, Stopped) and message.epoch == self._epoch and rank.phase is Phase.TRAINING:
            rank.step = message.step
        elif isinstance(message, Following):
            rank.follows = True
        elif isinstance(message, CaughtUp):
            rank.is_replaying = False
        elif isinstance(message, Saved):
            rank.saved = message.error
        elif isinstance(message, Notice) and not rank.leaves:
            rank.leaves = True
            self._told_s = time.monotonic()
            self._note(f"{rank.name} was told to end, and leaves between two steps")

    def _let_wait(self, rank: Rank, card: str) -> None:
        """Let a rank that has made its model wait for a membership. Refuse it if its card differs."""
        self._card = card if self._card is None else self._card
        why = difference(self._card, card)
        if why is not None:
            self._note(f"{rank.name} cannot come in: {why}")
            rank.process.tell(
                Refused(f"this rank cannot join the others: {why}. Start it as they were started.")
            )
            self._ranks.cannot_come_in(rank)
            return
        rank.phase = Phase.WAITING
        if not self._is_stopping:
            rank.is_replaying = self._connect(rank)

    def _connect(self, rank: Rank) -> bool:
        """Let a rank that waits have another's state while that trains; it says when it has caught up.

        One of this host's, if any trains. Returns whether there is one anywhere.
        """
        if not self._ranks.training:
            return self._decider.ask_for_state(lambda end: rank.process.tell(Receive(), handing=end))
        ends = socket.socketpair()
        with ends[0], ends[1]:
            rank.process.tell(Receive(), handing=ends[0])
            self._give(ends[1], rank.local_rank)
        return True

    def _give(self, end: socket.socket, number: int) -> None:
        """Let one of the ranks that train give its state; they take turns."""
        givers = self._ranks.training
        if givers and not self._is_stopping:
            givers[number % len(givers)].process.tell(Give(self._epoch), handing=end)

    def _give_to_others(self) -> None:
        """Let ranks that wait on other hosts have the state of one that trains here, and shadows that of all."""
        while (asked := self._decider.to_give()) is not None:
            end, place = asked
            with end:
                if place is None:
                    self._give(end, self._num_given)
                    self._num_given += 1
                    continue
                ranks = [] if self._is_stopping else self._ranks.training
                size, others = len(self._members), tuple(self._decider.trainers())
                numbers = tuple(each.rank for each in ranks)
                tell_about(end, Givers(self._epoch, numbers, size, others, self._card or "").as_dict())
                if place < len(ranks):
                    ranks[place].process.tell(Give(self._epoch, ranks[place].rank, size), handing=end)

    def _let_in(self) -> None:
        """Have the membership pause for ranks that wait, once all of these have caught up."""
        waiting = self._ranks.in_phase(Phase.WAITING)
        is_early = not waiting or any(rank.is_replaying for rank in waiting)
        is_early = is_early or not self._decider.may_come_in()
        if is_early or self._epoch == NOT_STARTED or self._is_stopping or self._ranks.finished:
            return
        self._pause(f"a replacement (pid {waiting[0].process.pid}) comes in")

    # ---- from one membership to the next

    def _ask_decider(self) -> None:
        """Stop or pause the ranks if the other hosts want this membership to end."""
        why, training = self._decider.why_over(self._epoch), self._ranks.training
        is_under_way = not self._is_stopping or (
            self._is_pausing and any(each.step is None for each in training)
        )
        if why is not None and is_under_way:
            self._stop(why)
        elif not self._is_stopping and not self._ranks.finished and self._decider.wants_pause(self._epoch):
            self._pause("ranks of another host come in")

    def _pause(self, why: str) -> None:
        """Have all ranks leave the membership behind the same step: those of other hosts hear it from these."""
        self._is_stopping = self._is_pausing = True
        self._since_s = time.monotonic()
        for rank in self._ranks.training:
            rank.process.tell(Pause(self._epoch, why))

    def _stop(self, why: str) -> None:
        """End the membership, because something is wrong with it."""
        self._because.append(why)
        if self._epoch == NOT_STARTED or (self._is_stopping and not self._is_pausing):
            return
        self._is_stopping, self._is_pausing = True, False
        self._since_s = time.monotonic()
        for rank in self._ranks.training:
            rank.process.tell(Stop(self._epoch, why))

    def _decide(self) -> None:
        """Begin the next membership, if all ranks that live have left this one."""
        training, waiting = self._ranks.training, self._ranks.in_phase(Phase.WAITING)
        is_first = self._epoch == NOT_STARTED
        # If an engine starts ranks, others come in place of those that were lost, and begin anew from a checkpoint.
        begins_anew = not self._starts and self._has_lost_all
        if is_first or begins_anew:
            if waiting and self._ranks.finished and self._starts:
                raise LaunchError(
                    f"{len(self._ranks.finished)} rank(s) of {self._arguments.script} ended without paceline.Elastic, "
                    f"in which {len(waiting)} wait for them. All ranks have to make one, or none."
                )
            are_replaying = any(rank.is_replaying for rank in waiting)
            if are_replaying or not self._has_gathered(waiting):
                return
            self._furthest, self._num_tries, self._saved_at = NOT_STARTED, 0, NOT_STARTED
        elif not self._is_stopping or any(rank.step is None for rank in training):
            return
        elif not training and (self._decider.is_alone or self._ranks.finished):
            self._raise_if_all_are_lost()
            return
        for rank in training:
            if rank.leaves:
                rank.phase, self._going_from = Phase.LEAVING, self._epoch
                self._going.append(rank)
                self._because.append(f"{rank.name} was told to end")
        has_leavers, training = bool(self._going), self._ranks.training
        if has_leavers and self._decider.is_alone and not training:
            return
        if self.shadows is not None and not (is_first or self._is_pausing or self._ranks.finished):
            self._ranks.adopt(self.shadows.take_spare)
            waiting = self._ranks.in_phase(Phase.WAITING)
        if self._ranks.finished:
            waiting = []
        # If the training is over, those that are left are told so, however few: they train no step.
        may_be_few = not self._decider.is_alone or self._ranks.is_training_over
        if not may_be_few and self._is_too_few(len(training) + len(waiting)):
            return
        steps = {
            rank.member: NOT_STARTED if rank.step is None else rank.step for rank in (*training, *waiting)
        }
        store = self._stores.of(self._epoch + 1)
        can_save = any(rank.saves for rank in self._going)
        leaves = not steps and self._told is not None
        left = tuple(rank.member for rank in self._going if rank.member in self._members)
        plan = self._decider.decide(
            Proposal(self._epoch + 1, steps, store, self._is_pausing, leaves, can_save, left)
        )
        if plan is not None and not self._awaits_shadow(plan):
            self._count_tries(plan)
            self._follow(plan)

    def _awaits_shadow(self, plan: Plan) -> bool:
        """Return whether ranks of this host begin anew from what a shadow still writes. It is told to end."""
        is_here = any(member.host == self._decider.name for member in plan.members)
        begins_anew = is_here and plan.num_new == len(plan.members)
        return begins_anew and self.shadows is not None and not self.shadows.finish()

    def _has_gathered(self, waiting: list[Rank]) -> bool:
        """Return whether enough ranks of this host wait for training to begin."""
        least = self._arguments.num_local_ranks
        if not self._starts and waiting:
            waited_s = time.monotonic() - min(rank.arrived_s for rank in waiting)
            if waited_s > self._arguments.join_timeout_s:
                least = min(least, self._arguments.min_ranks or 1)
        return len(waiting) >= least

    def _raise_if_all_are_lost(self) -> None:
        is_lost = not self._ranks.finished and not self._ranks.dying and self._starts
        if not is_lost or self._told is not None or self._ranks.in_phase(Phase.LEAVING):
            return
        if self._has_left:
            raise InterruptedLaunchError(
                f"all ranks of {self._arguments.script} were told to end, and left.", signal.SIGTERM
            )
        raise LaunchError(
            f"all ranks of {self._arguments.script} were lost, and with them what they had trained: "
            f"{'; '.join(self._because[-self._arguments.num_local_ranks :])}. Their own messages, if they wrote "
            "any, are above. Start again from the last checkpoint."
        )

    def _raise_if_some_failed(self) -> None:
        """Raise LaunchError if a rank of the last membership did not end well: no other rank has made up for it."""
        failed = [
            str(rank)
            for rank, member in enumerate(self._members)
            if member.host == self._decider.name and member not in self._ranks.finished
        ]
        if failed:
            raise LaunchError(
                f"rank(s) {', '.join(failed)} of {self._arguments.script} failed behind the last step: "
                f"{'; '.join(self._because)}. The steps are complete, but what the script does after them, such as "
                "saving, may not be. Its own message, if it wrote one, is above."
            )

    def _is_too_few(self, number: int) -> bool:
        """Return whether the others have to wait; says so, and for how long."""
        least, waited_s = self._arguments.min_ranks or 1, time.monotonic() - self._since_s
        if number >= least:
            self._has_said_missing = False
            return False
        limit_s = _MISSING_RATIO * self._arguments.lost_after_s
        coming = len(self._ranks.in_phase(Phase.STARTING)) + len(self._ranks.dying) + (not self._starts)
        said = f"{number} rank(s) are left of at least {least} (--min-ranks): {'; '.join(self._because)}"
        if waited_s > limit_s or (not coming and waited_s > 1.0):
            why = f"none came in {limit_s:g} s" if coming else "no replacement is starting"
            raise LaunchError(f"{said}. {why.capitalize()}. Start again from the last checkpoint.")
        if not self._has_said_missing:
            self._has_said_missing = True
            self._note(f"{said}; waiting up to {limit_s:g} s for {coming} replacement(s) that start")
        return True

    def _count_tries(self, plan: Plan) -> None:
        if plan.num_new == len(plan.members):
            self._furthest = self._saved_at = NOT_STARTED
        self._num_tries = 0 if plan.step > self._furthest else self._num_tries + 1
        self._furthest = max(plan.step, self._furthest)
        if self._num_tries >= _MOST_TRIES:
            raise LaunchError(
                f"{_MOST_TRIES} memberships in a row did not complete step {plan.step + 1} of "
                f"{self._arguments.script}; the last one ended because {'; '.join(self._because)}. "
                "Look at the ranks' own messages above: a step that fails on every rank is not a lost rank."
            )

    def _follow(self, plan: Plan) -> None:
        """Tell this host's ranks their assignments."""
        numbers = {member: number for number, member in enumerate(plan.members)}
        gone = [old for old, member in enumerate(self._members) if member not in numbers]
        lost = tuple(old for old in gone if self._members[old] not in plan.left)
        left = tuple(f"{member.host}:{member.number}" for member in plan.left)
        here = [
            rank
            for rank in (*self._ranks.training, *self._ranks.in_phase(Phase.WAITING))
            if rank.member in numbers
        ]
        why = "; ".join(self._because) or "a replacement has come in"
        names = tuple(f"{member.host}:{member.number}" for member in plan.members)
        size, store, num_new = len(names), plan.store, plan.num_new
        ends = self._ranks.is_training_over or self._decider.others_ended()
        for rank in here:
            rank.rank, rank.step, rank.phase = numbers[rank.member], None, Phase.TRAINING
            rank.follows = False
            rank.process.tell(
                RankAssignment(
                    plan.epoch, rank.rank, size, len(here), store, lost, num_new, why, names, ends, left
                )
            )
        if here and num_new == size and self._epoch != NOT_STARTED:
            self._note(f"{size} ranks begin again: those before them were all lost")
        elif here and self._epoch != NOT_STARTED:
            without = f"without rank(s) {', '.join(map(str, gone))}" if gone else ""
            come = f"with {plan.num_new} that came in" if plan.num_new else ""
            who = " and ".join(filter(None, (without, come))) or "on other hosts"
            self._note(f"{size} ranks {'end' if ends else 'go on'} after step {plan.step}, {who}")
        self._followed(plan)
        self._epoch, self._members, self._ranks.has_begun = plan.epoch, plan.members, True
        self._is_stopping = self._is_pausing = False
        self._because = []
        for rank in self._ranks.training:
            if rank.member not in numbers:
                self._ranks.kill(rank)  # others went on without it: what it holds is old
        if any(rank.member in numbers for rank in self._going):  # the plan is of words from before they left
            self._going_from = plan.epoch
        if sum(member.host == self._decider.name for member in numbers) > len(here):
            self._stop("ranks that it counts on have left, or were lost")

"""`ElasticClient`: one rank as a member of the job, between its agent and the groups of each membership.

`Elastic` calls it from its loop over steps, which this does not know.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm import opened_groups
from paceline.comm.collectives import all_reduce
from paceline.comm.device import is_accelerator
from paceline.comm.device_vote import DeviceExit, DeviceVote
from paceline.comm.given_up import aside
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.ddp import DistributedDataParallel
from paceline.ddp.membership import Change
from paceline.elastic import guest
from paceline.elastic.agent_connection import (
    LOST_AFTER,
    AgentConnection,
    CaughtUp,
    Following,
    Give,
    RankAssignment,
    StillReplaying,
    Stopped,
    Trouble,
)
from paceline.elastic.handover import Carried, RankStates, hand_over, hand_over_to_all
from paceline.elastic.replay import Giver, Replayed, Share, receive, state_of_shadow
from paceline.elastic.rollback import TrainingPosition
from paceline.elastic.shadow import Promotion
from paceline.elastic.watcher import NO_EPOCH, OverError, Watcher
from paceline.elastic.world import WorldKind, forget_world, reach_store
from paceline.errors import ConfigurationError, PeerLostError, ProtocolError
from paceline.observe import progress

NOT_YET = -1  # steps of a rank that has yet to receive its state
_SHADOW_S, _LOOK_S = 3.0, 0.002  # until a shadow follows the next membership
_SHARES_S = 1.0  # that ranks with parts of the state wait for a shadow, before they train on
_WORD_S = 1.0  # that the agent takes at most to hear of a death, for errors that may have another cause


class ElasticClient:
    """A member of the job: its connection to the agent, its group, and the state that ranks hand to each other."""

    def __init__(
        self,
        connection: AgentConnection,
        model: DistributedDataParallel,
        carried: Carried,
        sampler: GlobalShuffle,
        promotion: Promotion | None,
    ) -> None:
        self.connection, self.carried = connection, carried
        self._model, self._sampler = model, sampler
        self._kind = WorldKind.of(model.membership.process_group)
        self._leave = DeviceExit(carried.device) if is_accelerator(carried.device) else None
        self.watcher = Watcher(connection, self._leave)
        self._limit_s = float(os.environ.get(LOST_AFTER, "30"))
        self.first_batch: GlobalBatch = sampler.given  # of the job; a rank that comes is told
        self._recorder = ChangeRecorder(sampler.batch.samples)
        shares = model.membership.model.shares
        assert shares is not None
        self._shares = shares
        self._troubled_in = NO_EPOCH  # the last epoch whose failure was reported
        self._givers: list[Giver] = []
        self._orders: list[tuple[Give, socket.socket, int | None]] = []  # for givers of the next step
        self._replayed: Replayed | None = None  # what this rank, which is new, has received until now
        if promotion is not None:
            self.watcher.begin_with(promotion.assignment)
            self._replayed = promotion.held
        self.came_late = False  # while the others trained
        self._others_ended = self._awaits_shadow = False
        self._shares.pause_when(lambda: self.watcher.wants_pause)

    # ---- the end of a membership

    @property
    def is_new(self) -> bool:
        """Return whether this rank has not been in a membership."""
        return self.watcher.epoch == NO_EPOCH

    @property
    def is_leaving(self) -> bool:
        """Return whether this membership is over, or all have agreed to leave it behind the last step."""
        is_over = self.watcher.is_over
        if not self.is_new and (is_over or self._shares.pauses):
            self._recorder.begin(self.watcher.since_s if is_over else time.monotonic())
        return is_over or self._shares.pauses

    def is_over_because_of(self, error: Exception) -> bool:
        """Return whether an error comes from a lost rank. Waits for the agent's word, if it looks like that."""
        if self.watcher.is_over:
            return True
        if isinstance(error, (PeerLostError, ProtocolError)):
            self._tell_trouble(str(error))
            return self.watcher.wait_until_over(self._limit_s)
        return isinstance(error, RuntimeError) and self.watcher.wait_until_over(_WORD_S)

    def witness(self) -> str | None:
        """Return which rank is gone, by the agent's word, for `peers.ask_first`."""
        if not self.is_new and not self.watcher.is_over:
            self._tell_trouble("communication failed")
            self.watcher.wait_until_over(_WORD_S)
        return self.watcher.why if self.watcher.is_over else None

    def _tell_trouble(self, words: str) -> None:
        epoch = self.watcher.epoch
        if epoch != self._troubled_in:
            self._troubled_in = epoch
            self.connection.tell(Trouble(epoch, words[:500]))

    def next_assignment(self, position: TrainingPosition) -> RankAssignment:
        """Leave this membership behind the last completed step; returns the position in the next one. Blocks."""
        self.watcher.acknowledge()
        progress.begin_again()
        if not self.is_new:
            self.connection.tell(Stopped(self.watcher.epoch, position.step))
        for each in self._givers:
            each.end(position, self.first_batch)
        self._givers.clear()
        for _, end, _ in self._orders:
            end.close()
        self._orders.clear()
        told, say = self.watcher.next_assignment(), self.connection.tell
        while not isinstance(told, RankAssignment):
            self._replayed = receive(
                told, self.carried, lambda: say(StillReplaying()), lambda: say(CaughtUp())
            )
            told = self.watcher.next_assignment()
        return told

    def give(self, position: TrainingPosition) -> None:
        """Begin a step at this position: send some of this rank's state to ranks and shadows that follow. Local.

        Ranks with parts of the state wait for their shadow at the first step of a membership, for `_SHARES_S` at most.
        It would lack the share of one that begins to give later.
        """
        until_s = time.monotonic() + _SHARES_S * self._awaits_shadow
        while not (self._orders or self.watcher.has_to_give or self.watcher.is_over):
            if time.monotonic() >= until_s:
                break
            time.sleep(_LOOK_S)
        self._awaits_shadow = False
        for each in self._givers:
            if each.is_over:  # its receiver is gone
                each.leave()
        self._givers = [each for each in self._givers if not each.is_over]
        while (given := self.watcher.to_give()) is not None:
            self._orders.append((*given, None))
        for order, end, asked_for in self._orders:
            share = Share(order.share, order.num_shares) if order.num_shares else None
            self._givers.append(Giver(end, self.carried, share, asked_for))
        self._orders.clear()
        for each in self._givers:
            each.go_on(position, self.first_batch)

    def state_of_shadow(self) -> dict[str, Any] | None:
        """Return the whole state that a shadow holds, if one follows this membership. Local; blocks.

        Raises OverError if the membership ends meanwhile. If ranks wait to come in, this ends it: a host that votes or
        pauses for them lets no shadow follow.
        """
        until_s = time.monotonic() + _SHADOW_S
        while time.monotonic() < until_s and not self.watcher.is_over:
            self._end_for_newcomers()
            if (given := self.watcher.to_give()) is None:
                time.sleep(_LOOK_S)
                continue
            order, end = given
            if order.num_shares and not self._has_answer(end):
                end.close()
                continue
            held, tree = state_of_shadow(end, self._limit_s) if order.num_shares else (None, None)
            self._orders.append((order, end, held))
            if tree is not None:
                return tree
        if self.watcher.is_over:
            raise OverError("this membership ended before a shadow gave its state")
        return None

    def _has_answer(self, end: socket.socket) -> bool:
        """Wait until the shadow says which step it holds. Return whether it has, and this membership goes on."""
        until_s = time.monotonic() + self._limit_s
        while not self.watcher.is_over and time.monotonic() < until_s:
            self._end_for_newcomers()
            if select.select([end], [], [], _LOOK_S)[0]:
                return True
        return False

    def _end_for_newcomers(self) -> None:
        """Have this membership end if ranks wait to come in: `state_of_shadow`."""
        if self.watcher.wants_pause:
            self._tell_trouble("no shadow follows while ranks are to come in")

    def drain(self) -> None:
        """Let shadows read the last step, before this process may end. Local; blocks for a limited time."""
        for each in self._givers:
            each.drain()

    # ---- the next one

    def open(self, assignment: RankAssignment, step: int, void: TrainingPosition | None = None) -> RankStates:
        """Open the group of an assignment, and tell each other how far all are. Collective; blocks.

        `void`: parts of this rank's state are lost, and its loop over steps has begun there.
        """
        if not self.is_new and assignment.epoch <= self.watcher.epoch:
            raise OverError(
                f"an assignment of epoch {assignment.epoch} came after epoch {self.watcher.epoch}"
            )
        self.watcher.begin(assignment.epoch)
        self._recorder.pass_through(assignment)
        if (world := dist.group.WORLD) is not None:
            opened_groups.end_aside(world)
        forget_world()
        host, port = assignment.store
        if self.connection.is_guest:
            guest.use_interface_towards(host)
        store = reach_store(host, port, self._kind.timeout, lambda: self.watcher.is_over)
        rank, size = assignment.rank, assignment.size
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(assignment.num_here))
        group = self._kind.open(dist.PrefixStore(f"epoch {assignment.epoch}", store), rank, size)
        got, self._replayed = self._replayed, None
        if got is not None and step == NOT_YET:
            return RankStates.of(got.step, False, got.digest, self.carried.own_seeds, group)
        digest = 0
        if rank == 0 and assignment.num_new and step != NOT_YET:  # what new ranks have received is compared
            with contextlib.suppress(ConfigurationError):  # a state that cannot be sent was not
                digest = self.carried.digest()
        return RankStates.of(step, True, digest, self.carried.own_seeds, group, void)

    def rebuild(
        self,
        assignment: RankAssignment,
        states: RankStates,
        position: TrainingPosition,
        tree: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Let the model go on over the group; returns what this rank lacks. Collective.

        That is rank 0's `tree` if states are void, else of the furthest rank's state.
        """
        group = dist.group.WORLD
        assert group is not None
        first = self.first_batch
        if states.void:
            given = aside(lambda: hand_over_to_all(tree or {}, group))
            if "why" in given:
                raise ConfigurationError(given["why"])
        else:
            given = aside(lambda: hand_over(self.carried, states, position, first, group))
        if given:
            self.first_batch = GlobalBatch.from_dict(given["batch"])
        if (mean := self._model.membership.model.logical) is not None:
            mean.num_averaged = self.first_batch.num_ranks
        batch = self.first_batch.among(assignment.size)
        self._model.membership.rebuild(group, batch=batch, same_step=False)
        return given

    def go_on(self, assignment: RankAssignment, states: RankStates, position: TrainingPosition) -> None:
        """Train from this position as the assigned rank. Local."""
        self.carried.seeds = self.carried.seeds or states.seeds
        first, mean, rank = self.first_batch, self._model.membership.model.logical, assignment.rank
        if mean is None:
            batch = self._sampler.batch  # as `rebuild` was told, or in other shares by `balance`
            self._sampler.move(batch, rank, position.epoch, position.num_samples)
            samples = batch.samples
        else:
            logical = [mean.of_rank(each, assignment.size) for each in range(assignment.size)]
            self._sampler.move(first, rank, position.epoch, position.num_samples, logical[rank])
            samples = tuple(sum(first.samples[each] for each in own) for own in logical)
        self.watcher.settle(assignment.store[1])
        change = self._recorder.end(assignment, samples, position.step)
        if change is not None:
            self._model.membership.note(change)
        self._others_ended = assignment.others_ended
        self._awaits_shadow = self.carried.is_divided
        self.connection.tell(Following(assignment.epoch))

    def new_vote(self) -> DeviceVote:
        """Return the vote of this membership on its steps, on an accelerator. Local."""
        members = self._model.membership
        assert self._leave is not None
        return DeviceVote(self._leave, members.gradient_groups[0], members.name, members.device)

    def check_others_train(self, step: int, epoch: int) -> None:
        """Raise ProtocolError if ranks have ended their training, and this one has a further step."""
        if self._others_ended:
            raise ProtocolError(
                f"this rank asks for step {step + 1}, of epoch {epoch}, after the other ranks have ended their "
                "training. All ranks need the same epochs. A script that reads sampler.epoch behind "
                "paceline.Elastic(...) begins there: for epoch in range(sampler.epoch, epochs)."
            )

    def meet_at_end(self) -> None:
        """Wait for all ranks. Collective; blocks."""
        members = self._model.membership
        word = torch.zeros(1)
        members.peers.wait(
            all_reduce(word, members.process_group), "waiting for the others at the end of the epoch"
        )


class ChangeRecorder:
    """The recorder of changes between memberships in which this rank trained; `samples` are each rank's at first.

    Memberships may have ended before this rank trained in them. So the agent's word for the last one is not enough.
    """

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._members: Sequence[str] = ()  # of the last membership in which this rank trained
        self._whys: list[str] = []
        self._left: set[str] = set()  # that were told to end, since this rank trained last
        self._since_s: float | None = None

    def begin(self, since_s: float) -> None:
        """Note that this rank has stopped training. A second call for the same standstill changes nothing."""
        self._since_s = self._since_s or since_s

    def pass_through(self, assignment: RankAssignment) -> None:
        """Note that this rank was assigned to a membership, which may be over before the rank trains in it."""
        self._whys.append(assignment.why)
        self._left.update(assignment.left)

    def end(self, assignment: RankAssignment, samples: Sequence[int], step: int) -> Change | None:
        """Return what has changed, as this rank trains with this assignment. None: all ranks are new.

        `samples` are those of each rank, from now on.
        """
        before, had = self._members, self._samples
        gone, num_new = assignment.lost, assignment.num_new
        if before:
            gone = tuple(rank for rank, member in enumerate(before) if member not in assignment.members)
            num_new = sum(member not in before for member in assignment.members)
        why = "; ".join(dict.fromkeys(self._whys))
        stalled_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        left = tuple(rank for rank in gone if before and before[rank] in self._left)
        lost = tuple(rank for rank in gone if rank not in left)
        self._members, self._samples, self._whys, self._since_s = assignment.members, samples, [], None
        self._left = set()
        if assignment.num_new == assignment.size:
            return None
        # Who comes in may take just what others have left: that has moved once.
        size = assignment.size
        moved = max(sum(had[rank] for rank in gone if rank < len(had)), sum(samples[size - num_new :]))
        return Change(step, lost, num_new, size, why, stalled_s, moved, left)

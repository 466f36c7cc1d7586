"""`Elastic`: a loop over steps that outlives lost ranks, and takes in new ones.

Rules
1. Between two steps a rank has parameters, optimizer, schedules, random numbers and a place in the data that belong
   together. A step that is not completed is undone to there. A rank that is behind takes the state of one that is not.
2. A step is completed when the loop asks for the next one, and its window was left without an error. Ranks differ by at
   most one, because no rank's next step ends without all.
3. A rank that hears that the membership is over reports its position and waits for its rank assignment in the next
   one. If another rank is lost meanwhile, this begins again.
4. A loop over steps is left together: no rank ends the epoch, or the program, while another has its last step to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from paceline.comm import opened_groups, peers
from paceline.comm.collectives import all_reduce
from paceline.comm.device import is_accelerator
from paceline.comm.device_steps import DeviceSteps, check_lead
from paceline.comm.device_vote import DeviceExit, DeviceVote
from paceline.comm.given_up import aside, given_up_when
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.ddp import DistributedDataParallel
from paceline.elastic import conflicts, guest
from paceline.elastic.agent_connection import (
    LOST_AFTER,
    AgentConnection,
    CaughtUp,
    Following,
    InLoop,
    RankAssignment,
    Ready,
    Saved,
    StillReplaying,
    Stopped,
    Trouble,
)
from paceline.elastic.checkpoints import RankCheckpoints
from paceline.elastic.handover import Carried, Standings, hand_over
from paceline.elastic.history import ChangeRecorder
from paceline.elastic.late_start import LateStart
from paceline.elastic.replay import Giver, Replayed, Share, receive
from paceline.elastic.rollback import Place, Rollback
from paceline.elastic.shadow import ShadowOrders
from paceline.elastic.shadow import run as run_shadow
from paceline.elastic.watcher import NO_EPOCH, EndedError, LeavingError, OverError, Watcher
from paceline.elastic.world import WorldKind, forget_world
from paceline.errors import (
    ConfigurationError,
    PeerLostError,
    ProtocolError,
    ReplicaMismatchError,
    forget_frames,
)
from paceline.observe import progress
from paceline.reductions.lossy import Lossy
from paceline.reductions.ordered_mean import LogicalMean

Batch = TypeVar("Batch")

_NOT_YET = -1  # steps of a rank that has yet to receive its state
_WORD_S = 1.0  # that the agent takes at most to hear of a death, for errors that may have another cause

_in_use: list[Elastic] = []


class Elastic:
    """Lets a training loop go on when ranks are lost, and when others come.

    Under `paceline run --min-ranks N` a lost rank costs the others one step. They compute it again with the lost rank's
    samples as well, so the global batch stays as it is. The launcher starts a replacement, which receives the
    state of a rank. Without that option the loop is a plain one over `sampler.steps(loader)`.

    Args:
        model: A `paceline.DistributedDataParallel` with `batch_sampler=sampler`, over the default group.
        optimizer: Of its parameters; or a list of them.
        scheduler: What else a new rank must receive: learning-rate schedules, averages. One object with `state_dict`
            and `load_state_dict`, a list of them, or None. What is stepped behind a window belongs here, and a
            `GradScaler`.
        sampler: The model's `GlobalShuffle` or `TokenShuffle`.
        deterministic: Whether parameters shall have the bits of a run without losses. Each rank of the beginning
            is a logical one: its samples stay together, and gradients are summed in logical order. With fewer ranks,
            some compute several of them. What is drawn from torch's generator within a window depends on the
            step and the logical rank.
        checkpoint: A folder. Training resumes from the newest checkpoint there, and `save` writes into it. Or a
            function without arguments that saves what you save otherwise, without communication. Either is used on one
            rank of a host before the launch ends: too few ranks are left, or all were told to end. Parameters,
            schedules and sampler are as the last completed step left them.
        notice: What tells this rank that its machine goes soon, besides SIGTERM and SIGUSR1. The path of a file that
            appears then; or a function that returns something true then, such as one that asks a cloud's metadata. It
            is called on another thread, once a second.

    Attributes:
        step: Steps that have been completed since training began, on whichever ranks. On an accelerator up to `lead` of
            them are not known to be, and come again if a rank is lost.

    Contract:
        Collective: the constructor, and every step.  Blocks: the constructor until all ranks are there; a replacement's
        until the others let it in. Afterwards `dist.group.WORLD` is another group, and groups of the script are gone.

    Raises:
        ConfigurationError: Something that was asked for cannot go on with other ranks; with the reason.
        ReplicaMismatchError: This rank came later, and has another model, version or data set than the others.
        PeerLostError: The launcher, or the agent of this host, has ended.
        SystemExit: This rank was told to end, and has left the others between two steps: with code 143. With 0, if the
            job had ended before this rank came.
        DeviceLostError: In the loop: this rank's device fails for good since a peer died. The process has to end.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Any = None,
        sampler: GlobalShuffle | None = None,
        deterministic: bool = False,
        checkpoint: Callable[[], object] | str | os.PathLike[str] | None = None,
        notice: Callable[[], object] | str | os.PathLike[str] | None = None,
    ) -> None:
        optimizers: list[Any] = _listed(optimizer)
        others = _listed(scheduler)
        conflicts.check(model, optimizers, others, sampler, deterministic)
        assert sampler is not None
        orders = ShadowOrders.of_this_process()
        line = AgentConnection.of_this_process() if orders is None else None
        if deterministic:
            _check_logical(
                sampler, is_guest=line is not None and line.is_guest, is_plain=line is None and orders is None
            )
            model.membership.model.reduce_by(LogicalMean(sampler.given.num_ranks))
        conflicts.check_given(checkpoint, notice)
        self._model, self._sampler = model, sampler
        self._place = Place(0, *sampler.next_loop)
        self._crew: ElasticClient | None = None
        self._late: LateStart | None = None  # until the first step, if training has begun already
        carried = Carried(model.module, optimizers, others, sampler)
        card = conflicts.card(model, optimizers, others, sampler)
        if orders is not None:
            run_shadow(orders, carried, card)
        self._checkpoints = RankCheckpoints.of(checkpoint, carried, card)
        self._wants_save = False
        self._checkpoint = checkpoint if callable(checkpoint) else self._save_now
        self._rollback = Rollback(model.module, optimizers, others, carried.device)
        own_epoch = sampler.epoch
        if line is None:
            if self._resume(dist.get_rank(), dist.get_world_size()):
                self._late = LateStart(carried, sampler, own_epoch, self._place, self._rollback)
            return
        if _in_use:
            raise ConfigurationError(
                "Elastic: this process has one already. Make one, with the model that takes the loader's batches."
            )
        _in_use.append(self)
        carried.rest(self._place, sampler.given)  # refuses what cannot be sent
        carried.whole()
        self._device_steps: DeviceSteps | None = None
        if is_accelerator(carried.device):
            has_scaler = any(isinstance(each, torch.amp.GradScaler) for each in others)
            self._device_steps = DeviceSteps(optimizers, has_scaler)
            model.membership.decide_steps(self._device_steps.how)
        self._is_given_up = False  # the step under way, or the last one
        self._is_in_step = False
        self._agreed_at = _NOT_YET  # the step at which all ranks were seen to be
        self._crew = ElasticClient(line, model, carried, sampler)
        if notice is not None:
            self._crew.watcher.ask(notice)
        self._has_resumed = False
        model.membership.model.handle_faults(self)
        peers.ask_first(self._crew.witness)
        line.tell(Ready(card, saves=checkpoint is not None))
        self._meet()
        if self._crew.came_late or self._has_resumed:
            is_apart = self._crew.came_late
            self._late = LateStart(carried, sampler, own_epoch, self._place, self._rollback, is_apart)

    @property
    def step(self) -> int:
        """Steps that have been completed since training began, on any ranks."""
        return self._place.step

    def save(self) -> None:
        """Write a checkpoint into the folder `checkpoint`, of the step that is under way when that is completed.

        Rank 0 copies its state when the loop asks for the next step, and a thread writes the copy in the format of
        `torch.distributed.checkpoint`. The newest three are kept. A checkpoint that cannot be written is reported, and
        training goes on. If the last one is still being written, nothing is done.

        Contract:
            Local; on any ranks.  Blocks: no.

        Raises:
            ConfigurationError: There is no folder.
        """
        if self._checkpoints is None:
            raise ConfigurationError(
                'Elastic.save: there is no folder. Pass Elastic(..., checkpoint="checkpoints").'
            )
        self._wants_save = True

    # ---- the loop

    def steps(self, loader: Iterable[Batch], lead: int = 2) -> Generator[list[Batch], None, None]:
        """The steps of the sampler's next epoch, or of what is left of one: a list of this rank's micro-batches each.

        On a rank that comes in later there are none in epochs that are over.

        Train each list within one `with model.accumulate(batches) as micro_batches:`, and step the optimizer behind it.
        When a rank is lost, the window is left without an error and without gradients, and its `repeats` is True. The
        next turn of the loop has the same samples, with the lost rank's among them. What you step behind the window in
        such a turn is undone, if `Elastic` was given it; an optimizer has nothing to do.

        Args:
            loader: The loader of the sampler's batches.
            lead: On an accelerator, steps that the host may be ahead of the last one that is known to count; at least
                1. With a larger number the host waits less often, and more steps come again after a loss. It makes no
                difference on the CPU, nor where the host waits for each vote.

        Contract:
            Collective. What else communicates in the loop belongs into the window.

        Raises:
            As `sampler.steps`, and as the constructor. ProtocolError: The other ranks have ended their training.
        """
        if self._late is not None:
            if self._late.passes_over():
                return
            self._late = None
        check_lead(lead)
        handed_out = self._sampler.steps(loader)
        if self._crew is None:
            for batches in handed_out:
                under_way = self._place_behind_step()
                yield batches
                self._place = under_way
                self._save_if_asked()
            return
        line = self._crew.line
        if self._device_steps is not None:
            self._device_steps.lead = lead
        self._place = Place(self.step, *self._sampler.next_loop)
        line.tell(InLoop(inside=True))
        is_through = False
        try:
            while True:
                self._meet()
                if not self._has_kept_up():
                    continue
                self._rollback.note(self._place, self._device_steps.num_known if self._device_steps else None)
                self._crew.give(self._place)
                self._save_if_asked()
                with self._crew.watcher.shielding():
                    found = next(handed_out, None)
                if found is None:
                    if not self._end_together():
                        handed_out = self._sampler.steps(loader)  # its last steps come again
                        continue
                    is_through = True
                    return
                self._crew.check_others_train(self.step, self._sampler.epoch)
                yield from self._one_step(found)
        finally:
            self._is_in_step = False
            if not is_through:
                self.synchronize()
            handed_out.close()
            line.tell(InLoop(inside=False, is_through=is_through))

    def _one_step(self, batches: list[Batch]) -> Generator[list[Batch], None, None]:
        """Hand out one step; afterwards it has been completed, or given up."""
        behind = self._place_behind_step()
        step = self._sampler.step
        assert step is not None
        # no longer the end of the epoch before
        self._place = Place(self.step, self._sampler.epoch, step.position)
        self._is_in_step, self._is_given_up = True, False
        try:
            yield batches
        except GeneratorExit:
            if not self._is_given_up:
                self._place = behind
            raise
        self._is_in_step = False
        if self._is_given_up:
            return
        if self._sampler.is_repeated:  # a rank ran out of memory
            self._rollback.undo()
        else:
            self._place = behind

    def _end_together(self) -> bool:
        """Wait until no rank has a step of this loop to do (rule 4). Return False if steps come again.

        Collective; blocks, also for the device.
        """
        assert self._crew is not None
        step = self.step
        if not self._has_kept_up(0):
            self._meet()
        self._crew.drain()
        if self._agreed_at != self.step and self.step == step:
            try:
                self._crew.meet_at_end()
            except RuntimeError as error:
                if not self._crew.is_over_because_of(error):
                    raise
                forget_frames(error)
                self._meet()
            self._agreed_at = self.step
        return self.step == step

    def _place_behind_step(self) -> Place:
        step = self._sampler.step
        assert step is not None
        return Place(self.step + 1, self._sampler.epoch, step.end)

    # ---- an accelerator that is behind its host

    def synchronize(self) -> bool:
        """Wait until the device has completed all steps that it was told. Return whether all of them count.

        If not, parameters are those of an earlier step, to which the loop goes back in its next turn. So save a
        checkpoint within the loop by `if elastic.synchronize(): torch.save(...)`. True at once on the CPU. Local.
        """
        return self._crew is None or self._device_steps is None or self._device_steps.has_kept_up(0)

    def complete_window(self) -> None:
        """Follow the end of a window: `FaultHandler`."""
        is_good = self._device_steps.complete_window() if self._is_in_step and self._device_steps else None
        if is_good is not None:
            self._rollback.keep_indices(is_good)

    def _has_kept_up(self, lead: int | None = None) -> bool:
        """Return whether all steps count, as far as this host may have to know. Otherwise wait for the agent's word."""
        steps, crew = self._device_steps, self._crew
        if steps is None or steps.has_kept_up(lead):
            return True
        assert crew is not None
        lost = PeerLostError("the devices' vote on a step failed, so a rank has aborted or is lost")
        if not crew.is_over_because_of(lost):
            raise lost
        return False

    def _settle(self) -> None:
        """Go back to the last step that counts, by the device. Waits for the device. Local."""
        step = None if self._device_steps is None else self._device_steps.end()
        if step is None:
            return
        if step < self.step or self._is_given_up:
            self._place, self._is_given_up = self._rollback.undo(step), False
            if isinstance(reduction := self._model.membership.model.reduction, Lossy):
                reduction.reset()  # what it has not sent is of steps that come again
        for parameter in self._model.module.parameters():
            parameter.grad = None

    # ---- other members

    def is_recoverable(self, error: Exception) -> bool:
        """Return whether the step under way is left, and comes again: `FaultHandler`."""
        if not self._is_in_step or self._crew is None or not self._crew.is_over_because_of(error):
            return False
        self._is_given_up = True
        return True

    def _meet(self) -> None:
        """Go on in the next membership, if this one is over or all leave it. Collective then; blocks."""
        crew = self._crew
        assert crew is not None
        while crew.is_leaving:
            self._settle()
            try:
                seat = crew.next_seat(self._place)
            except EndedError:
                self._save()
                raise
            except LeavingError as leaving:
                if leaving.told.saves:
                    self._save()
                raise SystemExit(leaving.told.code) from None
            try:
                with given_up_when(lambda: crew.watcher.is_over):
                    self._follow(seat)
            except ReplicaMismatchError:
                raise
            except RuntimeError as error:
                if not crew.is_over_because_of(error):
                    raise
                forget_frames(error)

    def _save(self) -> None:
        """Make the checkpoint of the last completed step, and tell the agent how that went. Local."""
        assert self._crew is not None
        sampler, place, why = self._sampler, self._place, ""
        try:
            if self._is_given_up:
                self._rollback.undo()
            sampler.move(sampler.batch, sampler.rank, place.epoch, place.position)
            if self._checkpoint is not None:
                self._checkpoint()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._crew.line.tell(Saved(why[:500]))

    def _save_if_asked(self) -> None:
        """Save on rank 0 what `save` was called for. Local."""
        asked, self._wants_save = self._wants_save, False
        if asked and self._checkpoints is not None and dist.get_rank() == 0:
            self._checkpoints.save(self._place, self._first_batch, waits=False)

    def _save_now(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.save(self._place, self._first_batch, waits=True)

    @property
    def _first_batch(self) -> GlobalBatch:
        return self._sampler.given if self._crew is None else self._crew.first_batch

    def _resume(self, rank: int, size: int) -> bool:
        """Take the newest checkpoint of the folder. Return whether there is one. Local."""
        tree = None if self._checkpoints is None else self._checkpoints.resume(rank, size)
        if tree is None:
            return False
        place = self._place = Place(*tree["place"])
        self._sampler.move(self._sampler.batch, self._sampler.rank, place.epoch, place.position)
        if self._crew is not None and self._model.membership.model.logical is not None:
            self._crew.first_batch = GlobalBatch.from_dict(tree["batch"])  # its ranks are the logical ones
        return True

    def _follow(self, seat: RankAssignment) -> None:
        """Take this seat (rules 1 and 3)."""
        crew = self._crew
        assert crew is not None
        if crew.is_new and seat.num_new == seat.size:
            self._has_resumed = self._resume(seat.rank, seat.size)
        if crew.is_new and seat.num_new < seat.size:
            crew.came_late = True
            self._place = Place(_NOT_YET, 0, 0)
        elif crew.is_new and crew.line.is_guest and seat.rank != 0:
            self._place = Place(
                _NOT_YET, 0, 0
            )  # guests have begun alone: what rank 0 has made or loaded counts
        standings = crew.open(seat, self.step)
        if self._is_given_up and not standings.lacks_something(seat.rank):
            self._rollback.undo()
            self._is_given_up = False
        given = crew.rebuild(seat, standings, self._place)
        if given:
            crew.carried.take(given, is_new=self.step == _NOT_YET)
            if isinstance(reduction := self._model.membership.model.reduction, Lossy):
                reduction.reset()  # what it had not sent before that step, it may have sent in it
            self._place, self._is_given_up = Place(*given["place"]), False
        crew.go_on(seat, self._place)
        self._agreed_at = self.step
        if self._device_steps is not None:
            self._device_steps.begin(crew.new_vote(), self.step)


def _check_logical(sampler: GlobalShuffle, *, is_guest: bool, is_plain: bool) -> None:
    """Raise ConfigurationError if the logical ranks of `deterministic=True` are not known, or cannot be."""
    given, found = sampler.given, sampler.batch.num_ranks
    if is_guest and not given.for_any_ranks:
        raise ConfigurationError(
            "Elastic(deterministic=True): this rank begins alone, so the batch does not say how many logical ranks "
            f"there are. Write GlobalBatch.of({given.size}, ranks=4), with your number of ranks."
        )
    if is_plain and given.num_ranks != found:
        raise ConfigurationError(
            f"Elastic(deterministic=True): the batch is for {given.num_ranks} logical ranks, and {found} train without "
            "an agent. Start as many, or use `paceline run --min-ranks` or PACELINE_PEERS."
        )


def _listed(given: Any) -> list[Any]:
    """One object or several, as a list; None is nothing."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


class ElasticClient:
    """This rank's place among the others: its line to the agent, the group, and what is carried between ranks."""

    def __init__(
        self, line: AgentConnection, model: DistributedDataParallel, carried: Carried, sampler: GlobalShuffle
    ) -> None:
        self.line, self.carried = line, carried
        self._model, self._sampler = model, sampler
        self._kind = WorldKind.of(model.membership.process_group)
        self._leave = DeviceExit(carried.device) if is_accelerator(carried.device) else None
        self.watcher = Watcher(line, self._leave)
        self._limit_s = float(os.environ.get(LOST_AFTER, "30"))
        self.first_batch: GlobalBatch = sampler.given  # of the job; a rank that comes is told
        self._recorder = ChangeRecorder(sampler.batch.samples)
        self._shares = model.membership.model.shares
        self._troubled_in = NO_EPOCH  # the last epoch whose failure was reported
        self._givers: list[Giver] = []
        self._replayed: Replayed | None = None  # what this rank, which is new, has received until now
        self._digest = 0  # of what others have received from this one
        self.came_late = False  # while the others trained
        self._others_ended = False
        assert self._shares is not None
        self._shares.pause_when(lambda: self.watcher.wants_pause)

    # ---- the end of a membership

    @property
    def is_new(self) -> bool:
        """Return whether this rank has not been in a membership."""
        return self.watcher.epoch == NO_EPOCH

    @property
    def is_leaving(self) -> bool:
        """Return whether this membership is over, or all have agreed to leave it behind the last step."""
        assert self._shares is not None
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
            self.line.tell(Trouble(epoch, words[:500]))

    def next_seat(self, place: Place) -> RankAssignment:
        """Leave this membership behind the last completed step; returns the place in the next one. Blocks."""
        self.watcher.acknowledge()
        progress.begin_again()
        if not self.is_new:
            self.line.tell(Stopped(self.watcher.epoch, place.step))
        self._digest = max((each.end(place, self.first_batch) for each in self._givers), default=0)
        self._givers.clear()
        told, say = self.watcher.next_seat(), self.line.tell
        while not isinstance(told, RankAssignment):
            self._replayed = receive(
                told, self.carried, lambda: say(StillReplaying()), lambda: say(CaughtUp())
            )
            told = self.watcher.next_seat()
        return told

    def give(self, place: Place) -> None:
        """A step begins at this place: let those that follow have some of this rank's state. Local."""
        while (given := self.watcher.to_give()) is not None:
            order, end = given
            share = Share(order.share, order.num_shares) if order.num_shares else None
            self._givers.append(Giver(end, self.carried, share))
        for each in self._givers:
            each.go_on(place, self.first_batch)

    def drain(self) -> None:
        """Let shadows read the last step, before this process may end. Local; blocks for a second at most."""
        for each in self._givers:
            each.drain()

    # ---- the next one

    def open(self, seat: RankAssignment, step: int) -> Standings:
        """Open the group of a seat, and tell each other how far all are. Collective; blocks."""
        if not self.is_new and seat.epoch <= self.watcher.epoch:
            raise OverError(f"a seat of epoch {seat.epoch} came after epoch {self.watcher.epoch}")
        self.watcher.begin(seat.epoch)
        self._recorder.pass_through(seat)
        if (world := dist.group.WORLD) is not None:
            opened_groups.end_aside(world)
        forget_world()
        host, port = seat.store
        if self.line.is_guest:
            guest.use_interface_towards(host)
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self._kind.timeout)
        os.environ.update(RANK=str(seat.rank), WORLD_SIZE=str(seat.size), LOCAL_WORLD_SIZE=str(seat.num_here))
        group = self._kind.open(dist.PrefixStore(f"epoch {seat.epoch}", store), seat.rank, seat.size)
        got, self._replayed = self._replayed, None
        if got is not None and step == _NOT_YET:
            return Standings.of(got.step, False, got.digest, group)
        return Standings.of(step, True, self._digest, group)

    def rebuild(self, seat: RankAssignment, standings: Standings, place: Place) -> dict[str, Any]:
        """Let the model go on over the group; returns what this rank lacks of the furthest one's state. Collective."""
        group = dist.group.WORLD
        assert group is not None
        first = self.first_batch
        given = aside(lambda: hand_over(self.carried, standings, place, first, group))
        if given:
            self.first_batch = GlobalBatch.from_dict(given["batch"])
        if (mean := self._model.membership.model.logical) is not None:
            mean.num_averaged = self.first_batch.num_ranks
        batch = self.first_batch.among(seat.size)
        self._model.membership.rebuild(group, batch=batch, same_step=False)
        return given

    def go_on(self, seat: RankAssignment, place: Place) -> None:
        """The seat is taken: train from there. Local."""
        first, mean = self.first_batch, self._model.membership.model.logical
        if mean is None:
            batch = self._sampler.batch  # as `rebuild` was told, or in other shares by `balance`
            self._sampler.move(batch, seat.rank, place.epoch, place.position)
            samples = batch.samples
        else:
            logical = [mean.of_rank(rank, seat.size) for rank in range(seat.size)]
            self._sampler.move(first, seat.rank, place.epoch, place.position, logical[seat.rank])
            samples = tuple(sum(first.samples[each] for each in own) for own in logical)
        self.watcher.settle(seat.store[1])
        change = self._recorder.end(seat, samples, place.step)
        if change is not None:
            self._model.membership.note(change)
        self._others_ended = seat.others_ended
        self.line.tell(Following(seat.epoch))

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

"""`Elastic`: a loop over steps that outlives lost ranks, and takes in new ones.

Rules
1. Between two steps a rank has parameters, optimizer, schedules and a position in the data that belong together. A step
   that is not completed is undone to there. A rank that is behind takes the state of one that is not. Random numbers
   depend on the position and the rank's number alone.
2. A step is completed when the loop asks for the next one, and its window was left without an error. Ranks differ by at
   most one, because no rank's next step ends without all.
3. A rank that hears that the membership is over reports its position and waits for its rank assignment in the next
   one. If another rank is lost meanwhile, this begins again.
4. A loop over steps is left together: no rank ends the epoch, or the program, while another has its last step to do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from paceline.comm import peers
from paceline.comm.collectives import device_for_metadata
from paceline.comm.device import is_accelerator
from paceline.comm.device_steps import DeviceSteps, check_lead
from paceline.comm.given_up import given_up_when
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.ddp import DistributedDataParallel
from paceline.elastic import conflicts, guest
from paceline.elastic.agent_connection import (
    AgentConnection,
    InLoop,
    RankAssignment,
    Ready,
    Saved,
    ShadowOrders,
)
from paceline.elastic.checkpoints import RankCheckpoints
from paceline.elastic.client import NOT_YET, ElasticClient
from paceline.elastic.handover import Carried, RankStates, gather_numbers
from paceline.elastic.late_start import LateStart
from paceline.elastic.rollback import Rollback, TrainingPosition
from paceline.elastic.shadow import Promotion
from paceline.elastic.shadow import run as run_shadow
from paceline.elastic.watcher import EndedError, LeavingError
from paceline.errors import (
    ConfigurationError,
    PeerLostError,
    ReplicaMismatchError,
    forget_frames,
)
from paceline.optim.shard import Sharded, divide_among_members
from paceline.reductions.lossy import Lossy
from paceline.reductions.ordered_mean import LogicalMean

Batch = TypeVar("Batch")

_in_use: list[Elastic] = []
_PARTS_LOST = "Elastic: with a rank its part of a sharded optimizer's state was lost, and no shadow holds it."


class Elastic:
    """Lets a training loop go on when ranks are lost, and when others come.

    Under `paceline run --min-ranks N` a lost rank costs the others one step, which they compute again with its samples.
    The launcher starts a replacement. Without that option the loop is a plain one over `sampler.steps(loader)`. The
    guide is docs/guide/survive.md.

    Args:
        model: A `paceline.DistributedDataParallel` with `batch_sampler=sampler`, over the default group.
        optimizer: Of its parameters; or a list of them. One that went through `paceline.optim.shard` needs `shadow=1`.
        scheduler: What else a new rank must receive: learning-rate schedules, averages. One object with `state_dict`
            and `load_state_dict`, a list of them, or None. What is stepped behind a window belongs here, and a
            `GradScaler`.
        sampler: The model's `GlobalShuffle` or `TokenShuffle`.
        deterministic: Whether parameters shall have the bits of a run without losses. Each rank of the beginning is a
            logical one: its samples and random numbers stay together, and gradients are summed in logical order.
        checkpoint: A folder. Training resumes from the newest checkpoint there, and `save` writes into it. Or a
            function without arguments that saves without communication. Either is used on one rank of a host before the
            launch ends, with the state behind the last completed step: docs/guide/checkpoints.md.
        shadow: 1: `paceline run --min-ranks` starts a shadow, which writes into the folder `checkpoint`. If an engine
            starts the ranks of several hosts, the first host beyond MAX of PACELINE_NODES does; of one host, its agent.
        notice: What tells this rank that its machine goes soon, besides SIGTERM and SIGUSR1. The path of a file that
            appears then; or a function that returns something true then, called once a second on another thread.

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
        shadow: int = 0,
    ) -> None:
        optimizers: list[Any] = _listed(optimizer)
        others = _listed(scheduler)
        for each in optimizers:
            if isinstance(each, Sharded):
                each.keep_gradients_whole()
        conflicts.check(model, optimizers, others, sampler, deterministic)
        assert sampler is not None
        orders = ShadowOrders.of_this_process()
        connection = AgentConnection.of_this_process() if orders is None else None
        if deterministic:
            is_guest = connection is not None and connection.is_guest
            _check_logical(sampler, is_guest=is_guest, is_plain=connection is None and orders is None)
            model.membership.model.reduce_by(LogicalMean(sampler.given.num_ranks))
        conflicts.check_given(checkpoint, notice, shadow, optimizers)
        self._model, self._sampler = model, sampler
        self._position = TrainingPosition(0, *sampler.next_loop)
        self._client: ElasticClient | None = None
        self._late: LateStart | None = None  # until the first step, if training has begun already
        carried = self._carried = Carried(model.module, optimizers, others, sampler)
        card = conflicts.card(model, optimizers, others, sampler)
        promotion: Promotion | None = None
        if orders is not None:
            promotion = run_shadow(orders, carried, card, checkpoint is not None)
            connection = promotion.connection
        self._checkpoints = RankCheckpoints.of(checkpoint, carried, card)
        self._wants_save = False
        self._checkpoint = checkpoint if callable(checkpoint) else self._save_now
        self._rollback = Rollback(model.module, optimizers, others)
        own_epoch = sampler.epoch
        if shadow and dist.get_rank() == 0 and connection is None:
            sys.stderr.write(
                "paceline: Elastic(shadow=1) starts no shadow here. Start the job by `paceline run --min-ranks`, or a "
                "shadow by `paceline shadow`.\n"
            )
        if connection is None:
            if self._resume():
                for each in optimizers:
                    divide_among_members(each)
                self._late = LateStart(carried, sampler, own_epoch, self._position, self._rollback)
            else:
                group = model.membership.process_group
                device = device_for_metadata(group, carried.device)
                carried.seeds = gather_numbers(carried.own_seeds, group, device)
            return
        if _in_use:
            raise ConfigurationError(
                "Elastic: this process has one already. Make one, with the model that takes the loader's batches."
            )
        _in_use.append(self)
        carried.rest(self._position, sampler.given)  # refuses what cannot be sent
        carried.whole()
        self._device_steps: DeviceSteps | None = None
        if is_accelerator(carried.device):
            has_scaler = any(isinstance(each, torch.amp.GradScaler) for each in others)
            self._device_steps = DeviceSteps(optimizers, has_scaler)
            model.membership.decide_steps(self._device_steps.how)
        self._is_given_up = False  # the step under way, or the last one
        self._is_void = False  # parts of the state are lost (`handover.py`, rule 7)
        self._loop_begin = self._position
        self._is_in_step = False
        self._agreed_at = NOT_YET  # the step at which all ranks were seen to be
        self._client = ElasticClient(connection, model, carried, sampler, promotion)
        if notice is not None:
            self._client.watcher.ask(notice)
        self._has_resumed = False
        model.membership.model.handle_faults(self)
        peers.ask_first(self._client.witness)
        if promotion is None:
            folder = self._checkpoints.path if self._checkpoints is not None and shadow else ""
            card = f"{guest.facts_of(sys.argv[0] or 'python')}\n{card}" if connection.is_guest else card
            saves = checkpoint is not None and not carried.is_divided  # else the shadow does
            connection.tell(Ready(card, saves, shadow=str(folder)))
        self._meet()
        if self._client.came_late or self._has_resumed:
            is_apart = self._client.came_late
            self._late = LateStart(carried, sampler, own_epoch, self._position, self._rollback, is_apart)

    @property
    def step(self) -> int:
        return self._position.step

    def save(self) -> None:
        """Write a checkpoint into the folder `checkpoint`, of the step that is under way when that is completed.

        Rank 0 copies its state when the loop asks for the next step, and a thread writes the copy. The newest three are
        kept. One that cannot be written is reported. Nothing is done while the last one is still being written.

        Contract:
            Local; on any ranks.  Blocks: no.

        Raises:
            ConfigurationError: There is no folder, or an optimizer is sharded: then the shadow alone writes.
        """
        if self._carried.is_divided:
            raise ConfigurationError(
                "Elastic.save: an optimizer is sharded, so this rank has a part of its state. The shadow has all, and "
                "writes a checkpoint every 30 s. Leave out save()."
            )
        if self._checkpoints is None:
            raise ConfigurationError(
                'Elastic.save: there is no folder. Pass Elastic(..., checkpoint="checkpoints").'
            )
        self._wants_save = True

    # ---- the loop

    def steps(self, loader: Iterable[Batch], lead: int = 2) -> Generator[list[Batch], None, None]:
        """Yield the steps of the next epoch, or of the rest of one. Each is a list of this rank's micro-batches.

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
        if self._client is None:
            self._position = TrainingPosition(self.step, *self._sampler.next_loop)
            while (batches := self._fetch(handed_out)) is not None:
                under_way = self._position_behind_step()
                yield batches
                self._position = under_way
                self._save_if_asked()
            return
        connection = self._client.connection
        if self._device_steps is not None:
            self._device_steps.lead = lead
        self._position = self._loop_begin = TrainingPosition(self.step, *self._sampler.next_loop)
        connection.tell(InLoop(inside=True))
        is_through = False
        try:
            while True:
                self._meet()
                if not self._has_kept_up():
                    continue
                num_known = self._device_steps.num_known if self._device_steps else None
                self._rollback.note(self._position, num_known)
                self._client.give(self._position)
                self._save_if_asked()
                with self._client.watcher.shielding():
                    found = self._fetch(handed_out)
                if found is None:
                    if not self._end_together():
                        handed_out = self._sampler.steps(loader)  # its last steps come again
                        continue
                    is_through = True
                    return
                self._client.check_others_train(self.step, self._sampler.epoch)
                yield from self._one_step(found)
        finally:
            self._is_in_step = False
            if not is_through:
                self.synchronize()
            handed_out.close()
            connection.tell(InLoop(inside=False, is_through=is_through))

    def _fetch(self, handed_out: Iterator[list[Batch]]) -> list[Batch] | None:
        """Return this rank's batches of the next step; None: the epoch is over. Random numbers begin anew. Local."""
        rank = dist.get_rank()
        self._carried.seed(rank, self._position)
        found = next(handed_out, None)
        self._carried.seed(rank, self._position, is_fetched=True)
        return found

    def _one_step(self, batches: list[Batch]) -> Generator[list[Batch], None, None]:
        """Hand out one step; afterwards it has been completed, or given up."""
        behind = self._position_behind_step()
        step = self._sampler.step
        assert step is not None
        # no longer the end of the epoch before
        self._position = TrainingPosition(self.step, self._sampler.epoch, step.position)
        self._is_in_step, self._is_given_up = True, False
        try:
            yield batches
        except GeneratorExit:
            if not self._is_given_up:
                self._position = behind
            raise
        self._is_in_step = False
        if self._is_given_up:
            return
        if self._sampler.is_repeated:  # a rank ran out of memory
            self._rollback.undo()
        else:
            self._position = behind

    def _end_together(self) -> bool:
        """Wait until no rank has a step of this loop to do (rule 4). Return False if steps come again.

        Collective; blocks, also for the device.
        """
        assert self._client is not None
        step = self.step
        if not self._has_kept_up(0):
            self._meet()
        self._client.drain()
        if self._agreed_at != self.step and self.step == step:
            try:
                self._client.meet_at_end()
            except RuntimeError as error:
                if not self._client.is_over_because_of(error):
                    raise
                forget_frames(error)
                self._meet()
            self._agreed_at = self.step
        return self.step == step

    def _position_behind_step(self) -> TrainingPosition:
        step = self._sampler.step
        assert step is not None
        return TrainingPosition(self.step + 1, self._sampler.epoch, step.end)

    # ---- an accelerator that is behind its host

    def synchronize(self) -> bool:
        """Wait until the device has completed all steps that it was told. Return whether all of them count.

        If not, parameters are those of an earlier step, to which the loop goes back in its next turn. So save a
        checkpoint within the loop by `if elastic.synchronize(): torch.save(...)`. True at once on the CPU. Local.
        """
        return self._client is None or self._device_steps is None or self._device_steps.has_kept_up(0)

    @property
    def repeats_step(self) -> bool:
        """Return whether the step under way comes again: `FaultHandler`."""
        return self._is_in_step and self._is_given_up

    def complete_window(self) -> None:
        """Follow the end of a window: `FaultHandler`."""
        is_good = self._device_steps.complete_window() if self._is_in_step and self._device_steps else None
        if is_good is not None:
            self._rollback.keep_indices(is_good)

    def _has_kept_up(self, lead: int | None = None) -> bool:
        """Return whether all steps count, as far as this host may have to know. Otherwise wait for the agent's word."""
        steps, client = self._device_steps, self._client
        if steps is None or steps.has_kept_up(lead):
            return True
        assert client is not None
        lost = PeerLostError("the devices' vote on a step failed, so a rank has aborted or is lost")
        if not client.is_over_because_of(lost):
            raise lost
        return False

    def _settle(self) -> None:
        """Go back to the last step that counts, by the device. Waits for the device. Local."""
        step = None if self._device_steps is None else self._device_steps.end()
        if step is None:
            return
        if step < self.step or self._is_given_up:
            self._position, self._is_given_up = self._rollback.undo(step), False
            if isinstance(reduction := self._model.membership.model.reduction, Lossy):
                reduction.reset()  # what it has not sent is of steps that come again
        for parameter in self._model.module.parameters():
            parameter.grad = None

    # ---- other members

    def is_recoverable(self, error: Exception) -> bool:
        """Return whether the step under way is left, and comes again: `FaultHandler`."""
        if not self._is_in_step or self._client is None or not self._client.is_over_because_of(error):
            return False
        self._is_given_up = True
        return True

    def _meet(self) -> None:
        """Go on in the next membership, if this one is over or all leave it. Collective then; blocks."""
        client = self._client
        assert client is not None
        while client.is_leaving:
            self._settle()
            self._gather()
            try:
                assignment = client.next_assignment(self._position)
            except EndedError:
                if not client.is_new:  # otherwise it holds nothing that was trained
                    self._save()
                raise
            except LeavingError as leaving:
                if leaving.told.saves:
                    self._save()
                raise SystemExit(leaving.told.code) from None
            if self._carried.is_divided and self._agreed_at != NOT_YET:  # it has had parts
                self._is_void |= client.watcher.is_over
            try:
                with given_up_when(lambda: client.watcher.is_over):
                    self._follow(assignment)
            except ReplicaMismatchError:
                raise
            except RuntimeError as error:
                if not client.is_over_because_of(error):
                    raise
                forget_frames(error)

    def _gather(self) -> None:
        """Gather sharded optimizers' states before ranks leave or come in, unless one was lost. Collective; blocks."""
        client = self._client
        assert client is not None
        if client.watcher.is_over or self._agreed_at == NOT_YET:
            return
        try:
            for each in self._carried.optimizers:
                if isinstance(each, Sharded):
                    each.gather_whole()
        except RuntimeError as error:
            if not client.is_over_because_of(error):
                raise
            forget_frames(error)

    def _save(self) -> None:
        """Make the checkpoint of the last completed step, and tell the agent how that went. Local."""
        assert self._client is not None
        sampler, position, why = self._sampler, self._position, ""
        if self._carried.is_divided:
            self._client.connection.tell(Saved("an optimizer is sharded, so the shadow makes it"))
            return
        try:
            if self._is_given_up:
                self._rollback.undo()
            sampler.move(sampler.batch, sampler.rank, position.epoch, position.num_samples)
            if self._checkpoint is not None:
                self._checkpoint()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._client.connection.tell(Saved(why[:500]))

    def _save_if_asked(self) -> None:
        asked, self._wants_save = self._wants_save, False
        if asked and self._checkpoints is not None and dist.get_rank() == 0:
            self._checkpoints.save(self._position, self._first_batch, waits=False)

    def _save_now(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.save(self._position, self._first_batch, waits=True)

    @property
    def _first_batch(self) -> GlobalBatch:
        return self._sampler.given if self._client is None else self._client.first_batch

    def _resume(self) -> bool:
        """Take the newest checkpoint of the folder. Return whether there is one. Local."""
        tree = None if self._checkpoints is None else self._checkpoints.resume()
        if tree is None:
            return False
        position = self._position = TrainingPosition(*tree["position"])
        self._sampler.move(self._sampler.batch, self._sampler.rank, position.epoch, position.num_samples)
        if self._client is not None and self._model.membership.model.logical is not None:
            self._client.first_batch = GlobalBatch.from_dict(tree["batch"])  # its ranks are the logical ones
        return True

    def _tree_for_all(self, states: RankStates) -> dict[str, Any]:
        """Return the newest whole state, by the shadow or the folder, for ranks whose states are void. Blocks."""
        assert self._client is not None
        tree = self._client.state_of_shadow()
        if tree is None and self._checkpoints is not None and (newest := self._checkpoints.newest()):
            tree = newest
        if tree is None:
            return {
                "why": f"{_PARTS_LOST} Nobody holds the rest: there is no checkpoint yet. Start the job again."
            }
        position = TrainingPosition(*tree["position"])
        begin = max(states.void, key=lambda each: each.step)
        if position.step == begin.step:  # the end of the epoch before, for a shadow
            tree["position"] = [*astuple(begin)]
        elif position.epoch < begin.epoch:
            return {
                "why": f"{_PARTS_LOST} The newest checkpoint is of step {position.step}, in an epoch that has ended "
                "here. Start the job again, and it goes on from there."
            }
        return tree

    def _follow(self, assignment: RankAssignment) -> None:
        """Take this assignment (rules 1 and 3)."""
        client = self._client
        assert client is not None
        if client.is_new and assignment.num_new == assignment.size:
            self._has_resumed = self._resume()
        if client.is_new and assignment.num_new < assignment.size:
            client.came_late = True
            self._position = TrainingPosition(NOT_YET, 0, 0)
        elif client.is_new and client.connection.is_guest and assignment.rank != 0:
            # Guests have begun alone: what rank 0 has made or loaded counts.
            self._position = TrainingPosition(NOT_YET, 0, 0)
        states = client.open(assignment, self.step, self._loop_begin if self._is_void else None)
        if self._is_given_up and not states.lacks_something(assignment.rank):
            self._rollback.undo()
            self._is_given_up = False
        tree = self._tree_for_all(states) if states.void and assignment.rank == 0 else None
        given = client.rebuild(assignment, states, self._position, tree)
        if given:
            client.carried.take(given, is_new=self.step == NOT_YET)
            if isinstance(reduction := self._model.membership.model.reduction, Lossy):
                reduction.reset()  # what it had not sent before that step, it may have sent in it
            self._position, self._is_given_up = TrainingPosition(*given["position"]), False
        for each in self._carried.optimizers:
            divide_among_members(each)
        client.go_on(assignment, states, self._position)
        self._agreed_at, self._is_void = self.step, False
        if self._device_steps is not None:
            self._device_steps.begin(client.new_vote(), self.step)


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
    """Return one object or several as a list. None gives an empty list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]

"""The ranks that reduce one module's gradients together, their groups, and how other ranks take their places.

Rules
1. `rebuild` communicates over the new group alone. Old members may be dead, and nothing waits for them.
2. All that can fail or be refused comes before anything is changed. First this rank checks by itself. Then the new
   members tell each other their states, and open groups. So after an error the model is still in its old membership,
   and may go on in yet another one.
3. The new members open their groups in one order: for gradients, numbers, batch normalisation, pieces of buckets.
4. Names are never used twice: they are made of rank 0's random token, and the store keeps no word of an earlier one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from paceline.comm import gradient_group, opened_groups
from paceline.comm.collectives import device_for_metadata
from paceline.comm.peers import Peers
from paceline.data import GlobalBatch
from paceline.ddp.replicas import Verified
from paceline.ddp.step_shares import DataPosition, StepShares
from paceline.errors import ConfigurationError, PacelineError, ProtocolError
from paceline.reductions import Reduction
from paceline.reductions.ordered_mean import LogicalMean

_TOKEN_BITS = 62


class FaultHandler(Protocol):
    """The handler of lost ranks, by which a window that has lost one may be left without an error."""

    def is_recoverable(self, error: Exception) -> bool:
        """Return whether the step that raised this is computed again, with other ranks. May wait for the launcher."""

    @property
    def repeats_step(self) -> bool:
        """Return whether the step under way is computed again."""

    def complete_window(self) -> None:
        """Follow the end of a window whose collectives the current stream has waited for. Collective.

        Raises PeerLostError if the device says that a rank was lost before.
        """


class Model(Protocol):
    """A module's steps, for its membership and for what makes up for lost ranks (`paceline.Elastic`)."""

    @property
    def reduction(self) -> Reduction:
        """Return the reduction of the ranks' gradients."""

    @property
    def shares(self) -> StepShares | None:
        """Return the shares that a `batch_sampler` deals out, if the model has one."""

    @property
    def has_droppable(self) -> bool:
        """Return whether steps may leave out parts of the module."""

    def reduce_by(self, reduction: Reduction) -> None:
        """Combine gradients by another reduction from now on. Local; before the first step."""

    @property
    def logical(self) -> LogicalMean | None:
        """Return the reduction that keeps the gradients of logical ranks apart, if there are logical ranks."""

    def facts(self) -> Sequence[tuple[str, str]]:
        """Return all that has to be equal on all ranks, a title and a fact each. Local."""

    def handle_faults(self, handler: FaultHandler) -> None:
        """Set the handler that decides whether an error inside a window is recoverable. Local."""

    def decide(self, option: str, words: str) -> None:
        """Note what an option has decided, in the model's timings. Local."""

    @property
    def num_steps(self) -> int:
        """Return the number of steps that this rank has made."""

    @property
    def has_sync_batch_norm(self) -> bool:
        """Return whether layers talk to those of other ranks, over the groups of the membership or one of their own."""

    @property
    def sends_pieces(self) -> bool:
        """Return whether pieces of buckets travel beside what the main thread launches."""

    def check_rebuild(self, process_group: ProcessGroup) -> None:
        """Raise if this model cannot go on over another group now. Local; nothing is changed."""

    def complete_step(self) -> None:
        """Complete what is deferred of the last step. Local: waits for what was launched."""

    def data_position(self) -> DataPosition:
        """Return where this rank's data stand. Local."""

    def verify_over(self, process_group: ProcessGroup, peers: Peers, number: int) -> Verified:
        """Make sure that the ranks of a group have the same module. Collective over it; blocks."""

    def follow_data(self, rank: int, shares: GlobalBatch | None, new: Members) -> None:
        """Train these shares as that rank. Local. Raises ConfigurationError if they cannot be; nothing is changed."""

    def follow(self, before: Groups, new: Members, verified: Verified) -> None:
        """Reduce over the new membership. Local."""

    def broadcast_model(self, source: int, with_buffers: bool) -> None:
        """Give all ranks the parameters and buffers of rank `source`. Collective."""


@dataclass(frozen=True)
class Groups:
    """The groups of one membership."""

    asked_for: list[ProcessGroup]  # the script's; several take turns, bucket by bucket
    for_gradients: list[ProcessGroup]  # those that carry gradients: of the script's, or beside them
    for_batch_norm: ProcessGroup | None = None  # opened for synchronized batch normalisation
    for_pieces: ProcessGroup | None = None  # opened for pieces of buckets
    for_numbers: ProcessGroup | None = None  # opened for numbers of the host, which the script's do not carry

    @property
    def numbers(self) -> ProcessGroup:
        """Return the group over which the ranks exchange numbers in a step."""
        return self.for_numbers or self.for_gradients[0]

    def beside(self, verified: Verified, peers: Peers, in_parts: bool = True) -> Groups:
        """Return these with groups for gradients (`gradient_group.gradient_groups`). Collective; blocks."""
        given = gradient_group.gradient_groups(
            self.asked_for, all(verified.are_on_cpu), verified.all_know_beside, in_parts, peers
        )
        return replace(self, for_gradients=given)

    def reaching_hosts(self, device: torch.device, peers: Peers) -> Groups:
        """Return these with a group for numbers (`gradient_group.group_for_numbers`). Collective; blocks."""
        return replace(self, for_numbers=gradient_group.group_for_numbers(self.asked_for[0], device, peers))

    def leave_gradients(self) -> None:
        """Stop using what stands beside the script's. Local."""
        for asked, given in zip(self.asked_for, self.for_gradients, strict=True):
            if given is not asked:
                gradient_group.leave(asked)

    def close_others(self) -> None:
        """Close the groups that this membership opened beside the script's. Local."""
        for opened in (self.for_batch_norm, self.for_pieces, self.for_numbers):
            if opened is not None:
                opened_groups.close(opened)


@dataclass(frozen=True)
class Change:
    """A change of the members, as this rank saw it.

    Attributes:
        step: Steps that were completed before.
        lost: Ranks that were lost since this rank trained last, by their numbers then.
        left: Ranks that were told to end and have left since, by the same numbers.
        num_new: Ranks of this membership that have come since.
        size: Its ranks.
        why: In words.
        stalled_s: From the moment in which this rank was told first, until it went on with the next step.
        samples_moved: Samples of a step that other ranks train now than before.
    """

    step: int
    lost: tuple[int, ...]
    num_new: int
    size: int
    why: str
    stalled_s: float
    samples_moved: int
    left: tuple[int, ...] = ()


@dataclass(frozen=True)
class _MemberState:
    """The state of a member, which ranks exchange when they meet."""

    token: int  # of the membership that it comes from
    fresh: int  # a random number
    epoch: int  # of its membership
    number: int  # of the module, among those over one group
    num_steps: int  # steps that this rank has made with the module
    data_position: DataPosition  # where its data stand

    def words(self) -> list[int]:
        return [self.token, self.fresh, self.epoch, self.number, self.num_steps, *astuple(self.data_position)]

    @classmethod
    def of(cls, words: Sequence[int]) -> _MemberState:
        token, fresh, epoch, number, num_steps, *data_position = words
        return cls(token, fresh, epoch, number, num_steps, DataPosition(*data_position))


class Members:
    """The new members, by their states. All take `source`'s model, if it is not None."""

    def __init__(self, states: Sequence[_MemberState], source: int | None) -> None:
        self._states = states
        furthest = max(range(len(states)), key=lambda rank: states[rank].num_steps)
        self._source = furthest if source is None else source
        self.told = states[self._source]  # by the rank from whose place all go on
        self.are_alike = all(  # whether all have made the same steps
            (state.token, state.num_steps) == (self.told.token, self.told.num_steps) for state in states
        )

    @property
    def token(self) -> int:
        return self._states[0].fresh

    @property
    def epoch(self) -> int:
        return 1 + max(state.epoch for state in self._states)

    @property
    def number(self) -> int:
        return max(state.number for state in self._states)

    @property
    def data_positions(self) -> list[DataPosition]:
        return [state.data_position for state in self._states]

    def check_same_step(self) -> None:
        """Raise ProtocolError, on every rank, if some are ahead of others."""
        places = [
            (state.num_steps, state.data_position.epoch, state.data_position.position)
            for state in self._states
        ]
        if len(set(places)) > 1:
            words = ", ".join(
                f"rank {rank} after {steps} steps at sample {position} of epoch {epoch}"
                for rank, (steps, epoch, position) in enumerate(places)
            )
            raise ProtocolError(
                f"rebuild(): the members of the new group are not at the same step: {words}. Say whose parameters and "
                f"buffers all shall take: rebuild(group, source={self._source}). The optimizer's state is yours "
                "to copy. Nothing was changed."
            )

    def shares(self) -> GlobalBatch | None:
        """Return the old members' global batch, cut among all: a new rank gets their mean. None: no data."""
        told = self.told
        if not told.data_position.micro_size:
            return None
        had = [state.data_position if state.token == told.token else None for state in self._states]
        return told.data_position.batch_among(had)


class Membership:
    """The ranks that train one wrapped module together: `model.membership`.

    Attributes:
        groups: All that its ranks communicate over.
        peers: The other ranks, for waiting.
        device: The module's.
        number: The module's, among those over this group.
        epoch: How often others have taken the members' places: 0 as wrapped. The same on all members.
        name: This membership's; the same on all members, and never used before.
        history: How the membership has changed since this rank is in it, under `paceline.Elastic`.
        why_together: Why no rank may leave, or miss a step; empty if one may.
        steps_decided: On an accelerator under `paceline.Elastic`: where it is decided whether a step counts, and why.
    """

    def __init__(
        self, process_groups: list[ProcessGroup], name: str, device: torch.device, model: Model
    ) -> None:
        self.groups = Groups(process_groups, process_groups)
        self.device = device
        self.epoch, self.name = 0, name
        self.number = int(name.rpartition("/")[-1])
        self.peers = self._peers_of(self.process_group, name, "wrapping its model")
        self.history: tuple[Change, ...] = ()
        self.why_together = ""
        self.steps_decided = ""
        self.model = model
        self._token = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 64 - _TOKEN_BITS

    def _peers_of(
        self, process_group: ProcessGroup, name: str, first_act: str = "going on with this group"
    ) -> Peers:
        return Peers(process_group, name, in_slices=self.device.type == "cpu", first_act=first_act)

    @property
    def process_group(self) -> ProcessGroup:
        """Return the first of the script's groups."""
        return self.groups.asked_for[0]

    @property
    def gradient_groups(self) -> list[ProcessGroup]:
        """Return the groups that carry gradients."""
        return self.groups.for_gradients

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.process_group.size()

    def set_number(self, number: int) -> None:
        """Set the module's number, which rank 0 has chosen. Local."""
        self.number = number

    def open_gradient_groups(self, verified: Verified) -> None:
        """Let gradients of the members as wrapped go where they are fastest. Collective; blocks.

        If only some ranks have their gradients in host memory, no rank may open a group for them.
        """
        beside = self.groups.beside(verified, self.peers, in_parts=False)
        self.groups = beside.reaching_hosts(self.device, self.peers)

    def set_group(
        self, *, for_batch_norm: ProcessGroup | None = None, for_pieces: ProcessGroup | None = None
    ) -> None:
        """Keep a group that was opened for the members as wrapped. Local."""
        before = self.groups
        self.groups = replace(
            before,
            for_batch_norm=for_batch_norm or before.for_batch_norm,
            for_pieces=for_pieces or before.for_pieces,
        )

    # ---- others take the members' places

    def note(self, change: Change) -> None:
        """Append a change to the history. Local."""
        self.history = (*self.history, change)

    def keep_together(self, why: str) -> None:
        """Make every rank take part in every step from now on; `why` is for messages. Local; on every rank."""
        self.why_together = why

    def decide_steps(self, how: str) -> None:
        """Record whether hosts or devices decide that a step counts, also in `model.timings.decisions`. Local."""
        self.steps_decided = how
        self.model.decide("elastic", how)

    def rebuild(
        self,
        process_group: ProcessGroup,
        *,
        source: int | None = None,
        batch: GlobalBatch | None = None,
        same_step: bool = True,
    ) -> None:
        """Go on over another process group: with fewer, more or other ranks.

        Means are over its ranks from the next step on. A step that was not completed is given up: its gradients are
        dropped, and a `batch_sampler` hands out its samples again. The global batch stays as large as it was, cut among
        the ranks that there are now. Residuals of compression stay with their ranks; those of a lost rank are lost.
        `balance` measures again. A step that `overlap_forward` has deferred is completed first. Layers of synchronized
        batch normalisation follow, unless the script gave them a group of their own.

        Args:
            process_group: Contains this rank. A new one, if a rank of the old one has died or hangs.
            source: The rank of the new group whose parameters, buffers and place in the data all take: where some are
                new, or have completed a step less. None: all are at the same step, which is compared. The state of
                optimizers and schedules is the script's to copy.
            batch: The shares of a `batch_sampler`. None: in proportion to what ranks had; a new one gets their mean.
            same_step: With `source=None`: False if the script has seen to it that all ranks have the same parameters.

        Contract:
            Collective: every rank of the new group, and over that group alone.  Blocks: until all have come.
            Afterwards: groups that the old membership had opened are closed; those of the script are not. Parameters
            are bitwise equal on all ranks if they were, or with `source`.

        Raises:
            ConfigurationError: Something that was asked for cannot go on with other ranks, or not now.
            ProtocolError: The ranks are not at the same step; on every rank.
            ReplicaMismatchError: A rank has another module; on every rank.
            PeerLostError: A new member died or hangs. After any of these the model is in its old membership, and may
                be rebuilt over yet another group. Only while it takes `source`'s model it is in the new one already.
        """
        _check(process_group, source, batch)
        model = self.model
        model.check_rebuild(process_group)
        model.complete_step()
        joining = self._peers_of(process_group, f"joining/{_name_of(process_group)}")
        new = Members(self._meet(process_group, joining), source)
        if source is None and same_step:
            new.check_same_step()
        verified = model.verify_over(process_group, joining, new.number)
        shares = batch or new.shares()
        before = self.groups
        if process_group in before.asked_for:
            before.leave_gradients()  # first: what stands beside it may be broken, and is not to be used again
        after = self.open_groups(process_group, verified, joining)
        try:
            model.follow_data(process_group.rank(), shares, new)
        except Exception:
            after.leave_gradients()
            after.close_others()
            raise
        self.groups, self.epoch, self.number = after, new.epoch, new.number
        self.name, self._token = f"members/{new.token:x}", new.token
        self.peers = self._peers_of(process_group, self.name)
        model.follow(before, new, verified)
        if process_group not in before.asked_for:
            before.leave_gradients()
        before.close_others()
        if source is not None:
            model.broadcast_model(source, with_buffers=True)

    def _meet(self, process_group: ProcessGroup, joining: Peers) -> list[_MemberState]:
        """Return every new member's state. Collective; blocks."""
        model, fresh = self.model, secrets.randbits(_TOKEN_BITS)
        place = self._token, fresh, self.epoch, self.number
        mine = _MemberState(*place, model.num_steps, model.data_position())
        row = torch.tensor(mine.words(), device=device_for_metadata(process_group, self.device))
        rows = joining.rows_of_all(row, process_group, "meeting the members of another group")
        return [_MemberState.of(words.tolist()) for words in rows]

    def open_groups(self, process_group: ProcessGroup, verified: Verified, joining: Peers) -> Groups:
        """Open the groups of rule 3. Collective over the new group; blocks."""
        groups = Groups([process_group], [process_group])
        try:
            groups = groups.beside(verified, joining)
            groups = groups.reaching_hosts(self.device, joining)
            if self.model.has_sync_batch_norm and process_group.size() > 1:
                opened = opened_groups.group_like(process_group, device=self.device, peers=joining)
                groups = replace(groups, for_batch_norm=opened)
            if self.model.sends_pieces:
                opened = gradient_group.group_for_pieces(process_group, self.device, joining)
                groups = replace(groups, for_pieces=opened)
        except Exception as error:
            groups.leave_gradients()
            groups.close_others()
            if isinstance(error, PacelineError) or not isinstance(error, RuntimeError):
                raise
            joining.fail(error, "opening groups with the members of another one")
        return groups


def _check(process_group: object, source: int | None, batch: GlobalBatch | None) -> None:
    if not isinstance(process_group, ProcessGroup):
        raise ConfigurationError(
            f"rebuild({process_group!r:.60}) is given a process group that contains this rank: of dist.new_group(), or "
            "dist.group.WORLD after another init_process_group()."
        )
    size = process_group.size()
    if source is not None and not 0 <= source < size:
        raise ConfigurationError(f"rebuild(source={source}): the new group has the ranks 0 to {size - 1}.")
    if batch is not None and batch.num_ranks != size:
        raise ConfigurationError(
            f"rebuild(batch=...) is for {batch.num_ranks} ranks ({batch}), and the new group has {size}."
        )


def _name_of(process_group: ProcessGroup) -> str:
    """Return c10d's name of a group; nothing if c10d does not know it."""
    try:
        return str(process_group.group_name)
    except (AttributeError, RuntimeError):
        return "unnamed"

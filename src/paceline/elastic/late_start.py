"""A rank whose state is of a later epoch runs its script from the top: which of its epochs are over already.

It has come in while others train, or all ranks have resumed from a checkpoint.

Rules
1. A script that counts its epochs, by `for epoch in range(3)`, begins at the first one here as well. So its loops have
   no steps until it comes to the others' epoch.
2. A script that has read `sampler.epoch`, for `range(sampler.epoch, 3)`, begins at the others' epoch. One that calls
   `set_epoch` says which it means.
3. What a script does behind an epoch that is over, such as a schedule's step, the others have done: it is undone. No
   other rank would meet a collective there, so it raises. So does a change of parameters, which are not kept twice.
"""

from __future__ import annotations

from paceline.data import GlobalShuffle
from paceline.elastic.handover import Carried
from paceline.elastic.rollback import Rollback, TrainingPosition
from paceline.elastic.world import ApartWorld
from paceline.errors import ConfigurationError


class LateStart:
    """The time from `Elastic(...)` to the first step of a rank whose state is of `position`.

    `own_epoch` is where the script was before. `is_apart`: the other ranks train, so this one may not communicate.
    """

    def __init__(
        self,
        carried: Carried,
        sampler: GlobalShuffle,
        own_epoch: int,
        position: TrainingPosition,
        rollback: Rollback,
        is_apart: bool = True,
    ) -> None:
        self._carried, self._sampler, self._position, self._rollback = carried, sampler, position, rollback
        self._digest = carried.digest()
        # Also at its end: the others do next what the script does behind it.
        sampler.set_epoch(position.epoch)
        self._next = own_epoch  # that a script which counts would begin
        self._counts: bool | None = None
        sampler.known_epoch = None
        rollback.note(position)
        self._world = ApartWorld() if is_apart else None

    def passes_over(self) -> bool:
        """Return whether the script begins an epoch that is over. Otherwise be where the others are. Local.

        Raises ConfigurationError if the script has changed what this rank received.
        """
        known, self._sampler.known_epoch = self._sampler.known_epoch, None
        if self._counts is None:
            self._counts = known is None
        epoch = self._next if self._counts or known is None else known
        self._next = epoch + 1
        if epoch < self._position.epoch:
            return True
        if self._world is not None:
            self._world.end()
        if self._carried.digest() != self._digest:
            raise ConfigurationError(
                "between paceline.Elastic(...) and its first step, this rank's script has changed parameters or an "
                "optimizer's state. These came from the other ranks, or from a checkpoint. Load checkpoints before "
                "paceline.Elastic(...), and let epochs begin where the others are: for epoch in range(sampler.epoch, "
                "epochs)."
            )
        self._rollback.undo()
        sampler, position = self._sampler, self._position
        sampler.move(sampler.batch, sampler.rank, position.epoch, position.num_samples, sampler.logical)
        sampler.set_epoch(position.epoch)
        return False

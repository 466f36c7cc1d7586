"""`GlobalStream`: global batches of data that can only be read in order, divided among ranks.

Rules
1. Every rank reads the same samples in the same order, and prepares only its own. So the rank of a sample is decided
   when its step is handed out, and shares may change from one step to the next.
2. A place in the stream is a number of samples, whatever the ranks: a job goes on with another number of them.
3. A source that keeps state is asked for it before samples of a step are read, and not more than a step ahead. So
   resuming reads less than two global batches again. A source without state is read from the beginning.
4. It is asked after it has given a sample of this epoch, never before. The body of a generator has not run by then, and
   its state is still that of the epoch before.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import default_collate

from paceline.data.epoch_plan import EpochPlan
from paceline.data.global_batch import GlobalBatch
from paceline.data.global_batches import GlobalBatches, check_state
from paceline.errors import ConfigurationError

Sample = TypeVar("Sample")

_NO_END = float("inf")


class GlobalStream(GlobalBatches, Generic[Sample]):
    """This rank's batches of every step, from an `IterableDataset` or any other iterable; its samples read in order.

    Limits: Every rank reads every sample, so reading should be cheap: let the source give paths or bytes, and `prepare`
    decode them. Nothing is shuffled here. In memory are the samples of a global batch, and one more.

    Args:
        source: Gives the same samples in the same order on every rank, and from the beginning each time it is iterated
            over: an `IterableDataset`, or a `DataLoader(dataset, batch_size=None, num_workers=...)`, which reads ahead.
            If it has `set_epoch`, that is called before each epoch. With `state_dict` and `load_state_dict`, as
            torchdata's `StatefulDataLoader`, a restart goes on there instead of reading from the beginning. What
            `load_state_dict` is given counts for the next iteration alone, and `state_dict()` counts the sample
            that was given last: a generator counts before it yields.
        batch: Samples that each rank trains in a micro-step.
        rank: Whose part; None is this process's rank, 0 without a process group.
        prepare: Makes of a sample what `collate` takes; called for this rank's own samples only.
        collate: Makes a batch of a list of samples; torch's `default_collate`.
        last: As of `GlobalShuffle`.

    Contract:
        Local: no communication.
    """

    def __init__(
        self,
        source: Iterable[Sample],
        batch: GlobalBatch,
        rank: int | None = None,
        prepare: Callable[[Sample], Any] | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        last: str = "uneven",
    ) -> None:
        if not hasattr(source, "__iter__"):
            raise ConfigurationError(
                f"GlobalStream({source!r:.60}) cannot be iterated over. A data set with indices belongs to "
                "GlobalShuffle."
            )
        super().__init__(batch, rank, last)
        self._source, self._prepare, self._collate = source, prepare, collate
        self._reader: _Reader[Sample] | None = None  # while in `steps`
        self._place: Mapping[str, Any] | None = None  # in the source, not after `_start`
        self._plan = EpochPlan(_NO_END, last == "drop", 0, batch)

    @property
    def fetched(self) -> int:
        """Return the end of the step that was handed out last. Samples that were read beyond it can still be cut."""
        return self._start if self.step is None else self.step.end

    # ---- where training stands

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands: after the step that was handed out last.

        What the source says of itself is a part of it, so it is plain if that is.
        """
        position, place, is_over = self._start, self._place, self._is_over
        if self._reader is not None:
            position, place, is_over = self._stands(self._reader)
        stands = {"epoch": self._epoch, "position": position, "is_over": is_over}
        return {**stands, "source": place, "batch": self.batch.size}

    def _stands(self, reader: _Reader[Sample]) -> tuple[int, dict[str, Any] | None, bool]:
        """Return how far a loop is, a place in the source not after that, and whether the epoch is over."""
        position = reader.position if self.step is None or self._goes_to is not None else self.step.end
        is_over = self._plan.step_at(position) is None
        return position, None if is_over else reader.place_before(position), is_over

    def load_state_dict(self, state: Mapping[str, Any], batch_may_change: bool = False) -> None:
        """Restore a state, and go on with the rest of the source, whatever the number of ranks was and is.

        If `batch_may_change`, steps may have another size than when the state was saved. Raises ConfigurationError for
        another kind of state or size of steps, and if its source kept state and this one does not; nothing was changed.
        """
        check_state(state, "epoch", "position", "is_over", "source", "batch")
        self._check_size(state, batch_may_change)
        if state["source"] is not None and not _keeps_state(self._source):
            raise ConfigurationError(
                f"the state holds a place in a source with state_dict, this one, {type(self._source).__name__}, has "
                'none. Give the source of then; or load {**state, "source": None} to read from the beginning.'
            )
        self._end_loop()
        self._stand_at(state["epoch"], state["position"])
        self._place = state["source"]
        self._is_over = self._has_begun = state["is_over"]
        self._was_loaded = True

    def _stand_at(self, epoch: int, position: int) -> None:
        self._epoch, self._start, self._place = epoch, position, None
        self._is_over = self._was_loaded = False

    def _end_loop(self) -> None:
        super()._end_loop()
        self._reader = None

    def _move(self, batch: GlobalBatch, epoch: int, position: int) -> None:
        step = self.step
        if step is None:
            place = self._place
            is_before = epoch == self._epoch and place is not None and place["position"] <= position
            self._end_loop()
            self._stand_at(epoch, position)
            self.batch, self._place = batch, place if is_before else None
            self._has_begun, self._was_loaded = False, True
            return
        if self._plan.step_at(step.end) is None and (epoch, position) == (self._epoch + 1, 0):
            epoch, position = self._epoch, step.end  # the loop ends by itself
        if epoch != self._epoch or position not in (step.position, step.end):
            raise ConfigurationError(
                f"the others go on at sample {position} of epoch {epoch}. This rank's loop over steps() is at "
                f"{step.position} of epoch {self._epoch}, and a stream is read in order. Leave the loop before "
                "rebuild()."
            )
        self.batch, self._goes_to = batch, step.position if position == step.position else None
        self._plan.change(position, batch)

    # ---- batches

    def steps(self) -> Generator[list[Any], None, None]:
        """Yield the steps of the next epoch, or of the rest of a loaded one. Each is a list of this rank's batches.

        A list is empty where this rank has no share. A loop that is left ends the epoch; `state_dict` is taken within.

        Raises:
            ConfigurationError: The source gives nothing, as a generator does that is iterated over again; or it ends
                before the position that was loaded.
            ProtocolError: The loop goes on after something else has ended it.
        """
        if self._is_over and not self._has_begun:
            self._has_begun = True  # the end of an epoch was loaded, and `set_epoch` has named that epoch
            return
        may_be_next = self._was_loaded
        reader, has_some = self._begin(), False
        loop = self._loop
        try:
            while True:
                batch = self._plan.batch_at(reader.position)
                reader.read(batch.size + 1)
                self._plan.num_samples = reader.end
                step = self._plan.step_at(reader.position)
                if step is None and not has_some and reader.position and may_be_next:
                    # It was resumed with larger batches, of which what is left makes none.
                    reader = self._begin()
                    loop = self._loop
                    continue
                if step is None:
                    break
                mine = [self._make(reader.samples(*part)) for part in step.parts(self.rank)]
                self.step, has_some = step, True
                yield mine
                self._check_goes_on(loop)
                if self._goes_to is None:
                    reader.drop(step.size)
                self._goes_to = None
            if reader.end == 0:
                raise ConfigurationError(
                    f"the source of GlobalStream gave no sample in epoch {self._epoch}. A generator can be iterated "
                    "over once: give what makes one, such as an IterableDataset."
                )
        finally:
            if self._loop is loop:
                self._start, self._place, self._is_over = self._stands(reader)
                self._end_loop()

    def _begin(self) -> _Reader[Sample]:
        """Begin to read the next epoch, or the one that was loaded."""
        self._end_loop()
        epoch, position, place = self._epoch, self._start, self._place
        if self._has_begun:
            epoch, position, place = epoch + 1, 0, None
        self._stand_at(epoch, position)
        self._place, self._has_begun = place, True
        for each in (self._source, getattr(self._source, "dataset", None)):
            set_epoch: Callable[[int], None] | None = getattr(each, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        reader = _Reader(self._source, position, place)
        if position and reader.end <= position:
            raise ConfigurationError(
                f"rank {self.rank}: the source of GlobalStream ended after {reader.end} samples of epoch {epoch}, but "
                f"its state was saved after {position}, with more to come. It has fewer samples than then, or does not "
                "go on where its own state says. A source counts a sample before it yields it. After load_state_dict "
                f"it begins there once. Give the data of then, or leave the rest out by set_epoch({epoch + 1})."
            )
        self._reader = reader
        self._plan = EpochPlan(_NO_END, self.last == "drop", position, self.batch)
        return reader

    def _make(self, samples: Sequence[Sample]) -> Any:
        prepare = self._prepare
        return self._collate(list(samples) if prepare is None else [prepare(each) for each in samples])


class _Reader(Generic[Sample]):
    """Reads a source from sample `position` on, by a `loaded` place; remembers places that can be gone back to."""

    def __init__(self, source: Iterable[Sample], position: int, loaded: Mapping[str, Any] | None) -> None:
        self.position, self.end = position, _NO_END
        self._source = cast("Any", source)  # may have state_dict and load_state_dict
        self._keeps_state = _keeps_state(source)
        self._samples: deque[Sample] = deque()
        self._places: deque[tuple[int, Any]] = deque()  # samples read, state; the second is after `position`
        self._num_read = 0
        if loaded is not None:
            self._num_read = loaded["position"]
            self._source.load_state_dict(copy.deepcopy(loaded["state"]))
            self._places.append((loaded["position"], loaded["state"]))
        self._iterator = iter(source)
        while self._num_read < position and self._next():
            self._samples.clear()
        if position:
            self._next()  # whether it goes on there

    def _next(self) -> bool:
        try:
            self._samples.append(next(self._iterator))
        except StopIteration:
            self.end = self._num_read
            return False
        self._num_read += 1
        if self._num_read == 1:
            self._note_place()
        return True

    def _note_place(self) -> None:
        if self._keeps_state:
            # A source may return what it goes on changing.
            self._places.append((self._num_read, copy.deepcopy(self._source.state_dict())))

    def read(self, count: int) -> None:
        """Read until so many samples are in memory, or all that are left."""
        if self._num_read and len(self._samples) < count and self.end == _NO_END:
            self._note_place()
        while len(self._samples) < count and self.end == _NO_END and self._next():
            pass

    def samples(self, begin: int, count: int) -> list[Sample]:
        """Return the samples from position `begin` on, which are in memory."""
        return [self._samples[begin - self.position + place] for place in range(count)]

    def drop(self, count: int) -> None:
        """Drop the first samples in memory, which have been trained."""
        for _ in range(count):
            self._samples.popleft()
        self.position += count
        while len(self._places) > 1 and self._places[1][0] <= self.position:
            self._places.popleft()

    def place_before(self, position: int) -> dict[str, Any] | None:
        """Return the last place that is not after `position`; None if none is known."""
        for read, state in reversed(self._places):
            if read <= position:
                return {"position": read, "state": copy.deepcopy(state)}
        return None


def _keeps_state(source: object) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")

"""Records steps of Paceline's wrapper: a step says when, and what it was given. Always on.

Without a run folder, the last steps are kept for `model.doctor()`; that costs some twenty microseconds a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from paceline.observe import spans
from paceline.observe.run_records import Labels
from paceline.observe.timings import StepTimes
from paceline.recording.model_facts import BatchCounts, fingerprint
from paceline.recording.recorder import Recorder, Work, folder_of_this_rank, header_of_rank, watch_phases


class OurSteps:
    """One wrapped model's records on this rank."""

    def __init__(self, device: str, rank: int, num_ranks: int) -> None:
        if dist.is_initialized():  # the whole job's, whatever group the model is on
            rank, num_ranks = dist.get_rank(), dist.get_world_size()
        folder = folder_of_this_rank()
        self.recorder = Recorder(header_of_rank(folder, "paceline", device, rank, num_ranks), folder)
        self._named: object = None
        if folder is not None:
            watch_phases()

    def record_by(self, recorder: Recorder) -> None:
        """Use another recorder from the next step on, such as one with a run folder."""
        self.recorder, self._named = recorder, None
        watch_phases()

    def name_buckets(self, buckets: object, labels: Callable[[], list[str]]) -> None:
        """Take the names of the buckets' content. Ask for them only if `buckets` is another object than before."""
        if buckets is not self._named:
            self._named = buckets
            self.recorder.name(Labels(tuple(labels())))

    def begin_forward(
        self, batch: BatchCounts, module: Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Count a forward of these arguments that may be differentiated, before it, in the step with these counts."""
        begins_step = not batch.has_begun
        batch.add(inputs, kwargs)
        if begins_step and self.recorder.wants_fingerprint:
            began_s = time.perf_counter()
            self.recorder.note_health(*fingerprint(module))
            spans.note("recording", began_s, time.perf_counter())

    def end_step(self, times: StepTimes, batch: BatchCounts) -> None:
        """Record a step whose synchronized backward has ended well; without buckets if it was deferred."""
        left_s = time.perf_counter()
        spans.note("backward", times.started_s, left_s)
        buckets = () if times.timing is None else times.timing.buckets
        self.recorder.end_step(Work(times.last_gradient_s, left_s, buckets, (), batch.samples, batch.tokens))

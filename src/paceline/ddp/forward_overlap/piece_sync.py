"""The communication of one backward in pieces: sent in the agreed order, some at a time, as buckets become ready.

Rules
1. The order is the same on every rank, and nothing overtakes. If the next piece is not ready on this rank, those behind
   it wait. (Another rank may be in it already.)
2. Launching never waits for the network. The thread that makes room for a piece launches it. That thread has made a
   bucket ready, or is the network's and has just finished another piece.
3. Pieces have a process group of their own, or connections of the reduction's. So the main thread may launch on other
   groups meanwhile.
4. On an accelerator the order of launches is that of the device's stream for communication. So all pieces that are
   ready leave at once, and code that needs a bucket lets the current stream wait. A bucket's pieces may leave from the
   hook of a later bucket: before that one was collected, its stream waited for all streams that have gradients.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import ProcessGroup

from paceline.comm.collectives import Completion, Work
from paceline.comm.device import StreamEvent
from paceline.comm.peers import Peers
from paceline.ddp.bucket import Bucket
from paceline.ddp.dense_bucket import DenseBucket
from paceline.ddp.gradient_sync import describe_bucket
from paceline.ddp.step import BackwardPass, GradientSync
from paceline.observe import BucketTiming
from paceline.observe.device_times import DeviceTimes
from paceline.observe.timings import profiler_range
from paceline.planning.forward_overlap import Piece
from paceline.reductions import Reduction

HALF_STEPPED = (
    "With overlap_forward some parameters may have taken this step and others not, so they cannot be used any more, "
    "nor saved. Look at the output of the rank named here first; restart from the last checkpoint "
    "(torchrun --max-restarts does that by itself)."
)


class _Progress(Completion):
    """The pieces of one bucket on their way, as a `Work`."""

    def __init__(self, num_pieces: int) -> None:
        super().__init__()
        self.num_left = num_pieces
        self.works: list[Work] = []  # of its pieces, which have ended, or are an accelerator's (rule 4)
        self.launched_s = self.done_s = self.waited_s = 0.0

    def wait(self, timeout_s: float | None = None) -> bool:
        if not super().wait(timeout_s):
            return False
        for work in self.works:
            work.wait()
        return True


class PieceSync(GradientSync):
    """Sends buckets in pieces: a `GradientSync` whose end backward need not wait for; status words travel apart.

    Buckets are dense; pieces are handed to the reduction in the same order on every rank, with a group for them alone.
    `defer` is asked when every rank's backward has ended well. `arrived` is, on an accelerator, behind the bucket
    that was waited for last. Collective: every rank launches every bucket, in any order.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        pieces: Sequence[Piece],
        reduction: Reduction,
        process_group: ProcessGroup,
        peers: Peers,
        times: DeviceTimes | None,
        # Completes its buckets when they are needed, as `GradientSync.defer`
        defer: Callable[[PieceSync, BackwardPass], bool],
    ) -> None:
        super().__init__(peers, times)
        self._reduction = reduction
        self._defer = defer
        self.buckets = list(buckets)
        self._ready: list[DenseBucket | None] = [None] * len(self.buckets)
        self.arrived: StreamEvent | None = None
        self._pieces = pieces
        self._group = process_group
        counts = [0] * len(self.buckets)
        for piece in pieces:
            counts[piece.bucket] += 1
        self.progress = [_Progress(count) for count in counts]
        self._num_sent = 0  # pieces, in order
        self._num_under_way = 0
        self._lock = threading.RLock()
        self._landed = threading.Condition(self._lock)
        self._is_sending = False
        self._error: Exception | None = None

    # ---- sending

    def launch(self, bucket: Bucket) -> None:
        """Let a collected bucket's pieces go when it is their turn. Does not wait."""
        assert isinstance(bucket, DenseBucket), "sparse gradients are refused by the constructor"
        with self._lock:
            self._ready[bucket.index] = bucket
            self.num_launched += 1
            if self._times is not None:
                self._times.launch(bucket.index)
        self._send()

    def _send(self) -> None:
        """Launch the pieces that may be launched now (rules 1 and 2)."""
        with self._lock:
            if self._is_sending or self._error is not None:
                return  # a piece was done before its callback was there: the loop below goes on
            self._is_sending = True
            try:
                most = self._reduction.pieces_at_once
                while self._num_under_way < most and self._num_sent < len(self._pieces):
                    piece = self._pieces[self._num_sent]
                    bucket = self._ready[piece.bucket]
                    if bucket is None:
                        return
                    self._num_sent += 1
                    self._launch(piece, bucket)
            except RuntimeError as error:
                self._fail(error)
            finally:
                self._is_sending = False

    def _launch(self, piece: Piece, bucket: DenseBucket) -> None:
        progress = self.progress[piece.bucket]
        progress.launched_s = progress.launched_s or time.perf_counter()
        pending = bucket.launch_piece(self._reduction, self._group, piece.start, piece.stop)
        progress.works.append(pending)
        if self._times is None:
            self._num_under_way += 1
            pending.on_done(lambda: self._note_done(piece, pending))
            return
        pending.on_done(functools.partial(self._times.done, piece.bucket))  # rule 4; the last piece's stays
        progress.num_left -= 1
        progress.done_s = time.perf_counter()
        if progress.num_left == 0:
            progress.complete()

    def _note_done(self, piece: Piece, pending: Work) -> None:
        """Count a piece that is done. Runs on a network thread, or on ours if the piece was done at once."""
        error = pending.failure()
        with self._lock:
            self._num_under_way -= 1
            self._landed.notify_all()
            progress = self.progress[piece.bucket]
            progress.num_left -= 1
            progress.done_s = time.perf_counter()
            if error is not None:
                self._fail(error)
            elif progress.num_left == 0:
                progress.complete()
        self._send()

    def _fail(self, error: Exception) -> None:
        """Stop sending, and raise this error in all waits for pieces that have not arrived."""
        self._error = self._error or error
        for progress in self.progress:
            if not progress.has_ended:
                progress.complete(self._error)

    def launch_late(self, bucket: Bucket, scale: float) -> Work:
        return bucket.launch_late(scale, self._group)

    # ---- waiting

    def defer(self, backward: BackwardPass) -> bool:
        return self._defer(self, backward)

    def wait_for(self, bucket: Bucket, consequence: str | None = None) -> None:
        """Wait until a bucket has arrived. Raises PeerLostError if a rank died or hangs."""
        progress, times = self.progress[bucket.index], self._times
        if progress.has_ended and progress.error is None and times is None:
            progress.wait()
            return
        before_s = time.perf_counter()
        since = None if times is None else times.clock.mark()
        with profiler_range("waited"):
            self._peers.wait(progress, f"waiting for {describe_bucket(bucket)}", consequence)
        progress.waited_s += time.perf_counter() - before_s
        if times is not None:
            times.arrive(bucket.index, since)
            self.arrived = StreamEvent([bucket.parameters[0].device])

    def wait(self) -> None:
        """Wait for all buckets, as `wait_for`; gradients are undefined if one fails."""
        for bucket in self.buckets:
            self.wait_for(bucket)

    def give_up(self, timeout_s: float) -> None:
        """Send nothing any more, and give what is under way this long to end.

        A thread of Gloo's that comes back from a sum into an interpreter that is ending aborts the process.
        """
        with self._lock:
            self._fail(RuntimeError("this rank's program has ended"))
            self._landed.wait_for(lambda: self._num_under_way == 0, timeout_s)

    def timings(self) -> tuple[BucketTiming, ...]:
        return tuple(
            BucketTiming(b.index, b.size_bytes, b.ready_s, each.launched_s, each.done_s, each.waited_s)
            for b, each in zip(self.buckets, self.progress, strict=True)
        )

"""Two lanes: one sends, one decodes.

Rules
1. What is sent goes one bucket after the other on the first lane. So a reduction may start a collective when another
   one is done, in the same order on every rank, and backward waits for neither.
2. What comes back is decoded on the second lane, in the same order, so that the wire need not wait for that.
3. Only so many buckets are under way at once: what all ranks sent for one takes memory until it is decoded.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from paceline.comm.lane import Lane, LaneWork
from paceline.comm.pending import PendingWork

UNDER_WAY = 2

Finish = Callable[[], None]


class Pipeline:
    """Sends and decodes the buckets of one reduction.

    Args:
        name: Of its threads, for those who look at stacks.
    """

    def __init__(self, name: str) -> None:
        self._sending, self._decoding = Lane(f"{name} sends"), Lane(f"{name} decodes")
        for lane in (self._sending, self._decoding):
            weakref.finalize(self, lane.close, 0.0)
        self._under_way: deque[LaneWork] = deque()  # on the second lane

    def launch(self, start: Callable[[], Finish], tensor: Tensor, what: str) -> PendingWork:
        """Run `start` on the first lane, and what it returns on the second.

        Args:
            start: May block and start collectives; what it returns may block, and starts none.
            tensor: What is reduced; says on which device.
            what: In words, for the profiler.
        """
        finish: list[Finish] = []

        def decode() -> None:
            finish.pop()()

        def send() -> None:
            try:
                if len(self._under_way) >= UNDER_WAY:
                    with suppress(Exception):  # whoever waits for that bucket is told
                        self._under_way.popleft().wait()
                finish.append(start())
            except BaseException as error:  # noqa: BLE001  whatever it is, the waiter must hear of it
                finish.append(functools.partial(_raise, error))
            self._under_way.append(decoded)
            self._decoding.launch(decoded, at_once=False)

        decoded = LaneWork(decode, [tensor], what)
        self._sending.launch(LaneWork(send, [tensor], what), at_once=False)
        return PendingWork(decoded)


def _raise(error: BaseException) -> None:
    raise error

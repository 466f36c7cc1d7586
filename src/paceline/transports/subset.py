"""Some ranks of a transport as a transport of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.transports.transport import Message, Transport


class Subset(Transport):
    """The ranks `members` of `whole`, renumbered from 0; this rank is among them.

    Errors name ranks by their numbers in `whole`.
    """

    def __init__(self, whole: Transport, members: Sequence[int]) -> None:
        super().__init__(members.index(whole.rank), len(members))
        self._whole = whole
        self.names = tuple(members)

    def _exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        timeout_s: float,
        on_received: Callable[[int], None],
    ) -> None:
        self._whole.exchange(
            [(self.names[peer], tensor) for peer, tensor in sends],
            [(self.names[peer], tensor) for peer, tensor in receives],
            timeout_s,
            on_received,
        )

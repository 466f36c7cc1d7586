"""Forward overlap: the next forward runs while gradients are still being reduced.

`agreement` finds the order of pieces, and `piece_sync` sends them. `deferred_step` defers steps. `open_step` completes
each bucket of a deferred step. `outstanding` makes readers of parameters wait for that.
"""

from paceline.ddp.forward_overlap.deferred_step import ForwardOverlap

__all__ = ["ForwardOverlap"]

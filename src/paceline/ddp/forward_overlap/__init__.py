"""Forward overlap: the next forward runs while gradients are still being reduced.

`agreement` decides whether steps are deferred and finds the order of pieces, `piece_sync` sends pieces in that order,
and `deferred_step` is the life of a deferred step. `open_step` holds the calls that are repeated for each bucket.
`outstanding` is the class of a parameter whose step has not been made yet, and makes modules wait for theirs.
"""

from paceline.ddp.forward_overlap.deferred_step import ForwardOverlap

__all__ = ["ForwardOverlap"]

"""Forward overlap: the next forward runs while gradients are still being reduced.

`piece_sync` sends pieces of buckets in the agreed order, `outstanding` is what a parameter is until its step has been
made, `hooks` makes modules wait for their own, `agreement` finds the order, `deferred_step` is the life of a step that
is deferred, `open_step` what is done with each of its buckets, `moment` what torch was set to when that was called.
"""

from paceline.ddp.forward_overlap.deferred_step import ForwardOverlap

__all__ = ["ForwardOverlap"]

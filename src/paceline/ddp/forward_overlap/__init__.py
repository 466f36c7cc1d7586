"""Forward overlap: the next forward runs while gradients are still being reduced.

`flight` sends pieces of buckets in the agreed order, `outstanding` is what a parameter is until its gradient is there,
`hooks` makes modules wait for their own, `agreement` finds the order, `overlap` is the life of a step that is put off.
"""

from paceline.ddp.forward_overlap.postponed_step import ForwardOverlap

__all__ = ["ForwardOverlap"]

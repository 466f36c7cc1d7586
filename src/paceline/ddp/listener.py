"""What autograd calls when it has finished a gradient of a bucket.

A call into Python for every small gradient costs more than reducing it. Two ways to listen to the small ones:

carefully   a Python function, which sees at once that the bucket is full, or that a backward has begun
quickly     `list.append` itself; the gradient expected last sees whether the bucket is full

Quick is right only if the bucket waits for all its gradients, and early only if the last one is last: if it is not,
the bucket is listened to carefully for the rest of the backward. Which way only decides how early a bucket leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.ddp.bucket import Bucket


class Listener:
    """Notes which parameters of one bucket have been finished, and says when it is full.

    Attributes:
        on_small: The hook of every small gradient but the last.
    """

    def __init__(self, bucket: Bucket, on_full: Callable[[Bucket], None]) -> None:
        self._bucket = bucket
        self._on_full = on_full
        self._touch = bucket.touched.append
        # One object, whose function is exchanged, stands behind the hooks of all small parameters.
        self._careful = self._carefully()  # kept, because it may be running when it is exchanged
        self.on_small: Any = functools.partial(self._careful)

    def _carefully(self) -> Callable[[Tensor], None]:
        bucket, touched, touch, on_full = self._bucket, self._bucket.touched, self._touch, self._on_full

        def on_gradient(parameter: Tensor) -> None:
            touch(parameter)
            if len(touched) == bucket.expected:
                on_full(bucket)

        return on_gradient

    def on_last_small(self, parameter: Tensor) -> None:
        """The hook of the small gradient that is expected last."""
        self._touch(parameter)
        if len(self._bucket.touched) == self._bucket.expected:
            self._on_full(self._bucket)
        else:
            self.listen_carefully()

    def listen_carefully(self) -> None:
        self.on_small.__setstate__((self._careful, (), {}, None))

    def listen_quickly(self) -> None:
        self.on_small.__setstate__((self._touch, (), {}, None))

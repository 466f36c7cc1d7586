"""Gradients that arrive after their bucket has left, or though it was left out: reduced once more, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import Chain, Done, Work, all_reduce
from paceline.ddp.bucket import Bucket
from paceline.ddp.views import gradient_views


def launch_late(body: Tensor, parameters: Sequence[Parameter], scale: float, group: ProcessGroup) -> Work:
    """Start summing a dense bucket's late gradients over the ranks; added to `body`, reduced, when they are done.

    Without `parameters` this rank contributes zeros. Collective; does not wait; takes `.grad` away.
    """
    late = torch.zeros_like(body)
    for parameter, view in zip(parameters, gradient_views(late, parameters), strict=True):
        if parameter.grad is not None:
            if scale:  # times 0 it is 0, also where it is no number
                view.copy_(parameter.grad.detach()).mul_(scale)
            parameter.grad = None
    return Chain(_added(body, late, group), num_stages=1)


def _added(body: Tensor, late: Tensor, group: ProcessGroup) -> Iterator[Work]:
    yield all_reduce(late, group) if group.size() > 1 else Done()
    body.add_(late)


def collect_left_out(bucket: Bucket) -> None:
    """Make the message of a bucket that was left out, of zeros; what has come all the same is late (`skipping` 5).

    So does what was there before: autograd has added to it, here or on another rank.
    """
    bucket.drop_unwritten()
    touched = list(bucket.touched)
    late = [(p, p.grad.detach().clone()) for p in bucket.parameters if p.grad is not None]
    for slot in bucket.slots_with_gradients():
        bucket.parameters[slot].grad = None
    bucket.touched.clear()
    bucket.collect(0.0, 0.0, set(), has_ended=False)
    bucket.touched.extend(touched or [parameter for parameter, _ in late])
    for parameter, gradient in late:
        parameter.grad = gradient

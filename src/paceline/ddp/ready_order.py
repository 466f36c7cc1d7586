"""In which order gradients become ready: observed in the first synchronized step, agreed on, used for the buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from paceline.comm.collectives import launch_broadcast
from paceline.comm.peers import Peers


def hook_gradient(parameter: Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook` whenever autograd has finished the parameter's gradient; also if it is frozen just now."""
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(requires_grad)
    return handle


class ReadyOrder:
    """Listens to every parameter until the order is agreed on.

    Attributes:
        observed: Parameter indices as backwards finished them; a parameter may occur more than once.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.observed: list[int] = []
        self._recorders = [hook_gradient(p, self._recorder(index)) for index, p in enumerate(parameters)]

    def _recorder(self, index: int) -> Callable[[Tensor], None]:
        return lambda _: self.observed.append(index)

    @property
    def is_listening(self) -> bool:
        return bool(self._recorders)

    def agree(
        self, otherwise: Sequence[int], device: torch.device, group: ProcessGroup, peers: Peers
    ) -> list[int]:
        """The order that rank 0 has observed; stops listening.

        Contract:
            Collective: every rank, at the end of its first synchronized backward.

        Args:
            otherwise: The order of what rank 0 has not observed.
            device: On which the group can broadcast.
            group: Over whom.
            peers: Watches.
        """
        self.stop()
        order = torch.tensor(list(dict.fromkeys([*self.observed, *otherwise])), device=device)
        if group.size() > 1:
            peers.wait(launch_broadcast(order, group, source=0), "agreeing on the order of buckets")
        agreed: list[int] = order.tolist()
        return agreed

    def stop(self) -> None:
        """Leave the parameters alone."""
        for recorder in self._recorders:
            recorder.remove()
        self._recorders = []

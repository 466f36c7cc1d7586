"""The methods of torch's own reducer that frameworks call, and the optimizers that torch steps within backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.ddp.open_forwards import Owner
from paceline.ddp.reducer import Reducer
from paceline.ddp.step import BackwardPass
from paceline.ddp.torch_compat.dynamo import refuse_compiled_autograd


class TorchsReducer(Reducer):
    """A reducer with the methods of torch's that frameworks call."""

    _is_static = True  # whether that was the same in each

    def begin(self, owner: Owner | None = None) -> BackwardPass:
        """Begin as every reducer does, unless compiled autograd runs the backward: raise ConfigurationError then."""
        refuse_compiled_autograd()
        return super().begin(owner)

    def set_static_graph(self) -> None:
        """Declare the graph static, before the first step."""
        if self.num_steps > 0 or self.step.used_before:
            raise RuntimeError(
                f"_set_static_graph() was called after {self.num_steps} synchronized steps. The first backward is the "
                "one that counts a static graph, so call it before, or pass static_graph=True to the constructor."
            )
        self.setting.expect(self.setting.find_unused_parameters, static_graph=True)
        self.tracker.pending.expect_static_graph()

    def _get_local_used_map(self) -> Tensor:
        """Return how many ranks used each parameter in the last synchronized backward, shape (parameters,), int32."""
        words = self.verdict.status.words[: len(self.managed)]
        return words.real.round().to(torch.int32)

    def _note_unused(self, backward: BackwardPass) -> None:
        self._is_static = self._is_static and self.unused in (None, backward.unused)
        super()._note_unused(backward)

    def _ddp_graph_static(self) -> bool:
        """Return whether every backward used the same parameters here, as far as they were looked for."""
        return self._is_static or not self.setting.find_unused_parameters

    # What Lightning calls itself where a training step runs its own backwards within forward.

    def _rebuild_buckets(self) -> bool:
        """Return False: buckets are laid out anew when the first synchronized backward ends."""
        return False

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Watch these outputs of a forward that has not returned yet; without any, the first gradient tells."""
        self.open_forwards.announce_backward()
        if outputs:
            self.watch([tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None])

    def _delay_all_reduce(self) -> None:
        """Return at once: a static graph's first step is reduced when its backward ends."""


# Optimizers that step within backward (`torch.distributed.optim._apply_optimizer_in_backward`). Torch runs them as soon
# as a gradient is there, which is before it was reduced; ours run when the parameter's bucket has come back.
IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"


def take_over_optimizers(parameters: Iterable[Parameter]) -> Callable[[Parameter], None] | None:
    """Remove hooks that would run optimizers early; returns what to call on a reduced gradient, or None."""
    handles = sys.modules[IN_BACKWARD].param_to_optim_hook_handle_map if IN_BACKWARD in sys.modules else None
    if not handles:
        return None
    found = [handle for parameter in parameters for handle in handles.get(parameter, ())]
    for handle in found:
        handle.remove()
    return _step_in_backward if found else None


def _step_in_backward(parameter: Any) -> None:
    """Run the parameter's own optimizers, if it has any; `.grad` is None afterwards."""
    optimizers = getattr(parameter, "_in_backward_optimizers", None)
    if optimizers:
        for optimizer in optimizers:
            optimizer.step()
        parameter.grad = None

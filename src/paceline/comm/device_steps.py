"""The steps of a rank whose device runs behind its host: which of them count, and how far the host may be ahead.

Rules
1. The devices vote on each step (`comm/device_vote.py`). Until a host has heard the result, it may be several steps
   ahead of the last step that counts. It goes back to that step if a rank is lost.
2. Optimizers that read `found_inf` on the device change nothing in a bad step. No host waits for the vote.
3. For all other optimizers the host waits for the vote before it steps them: once per step.
4. In rule 2 the host waits only if it is more than `lead` steps ahead of the last step that is known to be good.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.device import AsyncValue, is_capturing
from paceline.comm.device_vote import DeviceVote
from paceline.errors import ConfigurationError, DeviceLostError, PeerLostError

MASKED = "on the device: the optimizers change nothing in a step that a lost rank spoiled, and no host waits"
AWAITED = (
    "on the host: it waits for the vote of the devices before each optimizer's step, because {why}. With fused=True, "
    "torch's Adam, AdamW, SGD and Adagrad let the device decide, and no host waits."
)


def why_awaited(optimizer: Optimizer) -> str | None:
    """Return why the host has to wait for the vote before this optimizer steps, in words; None: it does not."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    if supports and all(group.get("fused") for group in optimizer.param_groups):
        return None
    return f"{type(optimizer).__name__} is not fused"


def why_not_voted(optimizer: Optimizer) -> str | None:
    """Return why no vote can stop this optimizer's step, in words; None: one can."""
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"{kind.__name__} computes gradients within its step, where no vote can stop it. Use another optimizer."
    if any(group.get("capturable") for group in optimizer.param_groups):
        return f"{kind.__name__}(capturable=True) is stepped within a CUDA graph, and no vote stops that. Leave it out."
    if "ZeroRedundancyOptimizer" in {each.__name__ for each in kind.__mro__}:
        return "ZeroRedundancyOptimizer communicates in its step, behind the devices' vote. Use its own optimizer."
    return None


def check_lead(lead: object) -> None:
    """Raise ConfigurationError if this is no number of steps that a host may be ahead of its device."""
    if type(lead) is not int or lead < 1:
        raise ConfigurationError(
            f"steps(lead={lead!r}): give how many steps the host may be ahead of the last one that counts: 1 or more."
        )


class DeviceSteps:
    """The votes of this rank's memberships on their steps, and the optimizers that follow them.

    `has_scaler`: the script gave its `GradScaler`, whose scale has to be undone as well.

    Attributes:
        lead: Steps that the host may be ahead of the last step that is known to be good.
        how: Where a step is decided, on the device or on the host, and why; in words.
    """

    def __init__(self, optimizers: Sequence[Optimizer], has_scaler: bool) -> None:
        self.lead, self._has_scaler = 2, has_scaler
        self._vote: DeviceVote | None = None
        self._began_at = self._num_heard = 0  # steps before this membership; votes of it that were read
        # Of each vote: how many steps of the membership are good
        self._under_way: deque[AsyncValue] = deque()
        self._others: dict[int, Tensor] = {}  # of each optimizer within its step, the `found_inf` of a scaler
        reasons = list(dict.fromkeys(filter(None, map(why_awaited, optimizers))))
        self.how = AWAITED.format(why=" and ".join(reasons)) if reasons else MASKED
        self._waits = bool(reasons)
        for each in optimizers if not reasons else ():
            each.register_step_pre_hook(self._mask)
            each.register_step_post_hook(self._unmask)

    def begin(self, vote: DeviceVote, step: int) -> None:
        """Begin a membership, after so many completed steps. Local."""
        self._vote, self._began_at, self._num_heard = vote, step, 0
        self._under_way.clear()

    def end(self) -> int | None:
        """End the membership; return how many steps are completed, by the device. None: there was none.

        Waits for the device, whose collectives have been aborted. Raises DeviceLostError if it has failed for good.
        """
        vote, self._vote = self._vote, None
        if vote is None:
            return None
        try:
            return self._began_at + vote.num_good()
        except RuntimeError as error:
            raise DeviceLostError(
                f"this rank's device fails since another rank was lost: {str(error).splitlines()[0]}. Such an error "
                "stays until the process ends, so this rank counts as lost as well, and a replacement is started."
            ) from error

    def complete_window(self) -> Tensor | None:
        """Vote on the step whose window ends. Return whether all steps so far were good, on the device; shape (), bool.

        Collective. Outside of a membership it returns None. It raises PeerLostError if the host waits and the step is
        bad.
        """
        if self._vote is None:
            return None
        self._under_way.append(self._vote.cast())
        if self._waits and not self.has_kept_up(0):
            raise PeerLostError("a rank was lost before its device had sent all gradients of this step")
        return self._vote.is_good

    def has_kept_up(self, lead: int | None = None) -> bool:
        """Return whether all steps were good, as far as known. Waits for the device, but for the last `lead` steps."""
        allowed = self.lead if lead is None else lead
        while self._under_way and (len(self._under_way) > allowed or self._under_way[0].has_arrived()):
            num_good = int(self._under_way[0].read())
            if num_good <= self._num_heard:
                return False
            self._under_way.popleft()
            self._num_heard += 1
        return True

    @property
    def num_known(self) -> int:
        """Return the number of completed steps, as far as this host knows."""
        return self._began_at + self._num_heard

    # ---- around an optimizer's step

    def _mask(self, optimizer: Any, *_: object) -> None:
        if self._vote is None:
            return
        if getattr(optimizer, "grad_scale", None) is not None and not self._has_scaler:
            raise ConfigurationError(
                "Elastic: this optimizer is stepped by a GradScaler that Elastic was not given. Its scale would stay "
                "as a step left it that is computed again. Write Elastic(..., scheduler=[scheduler, scaler])."
            )
        if is_capturing(self._vote.found_inf.device):
            raise ConfigurationError(
                "Elastic: this optimizer's step is captured into a CUDA graph. Step it outside."
            )
        own, others = self._vote.found_inf, getattr(optimizer, "found_inf", None)
        if others is not None:
            self._others[id(optimizer)] = others
        optimizer.found_inf = own if others is None else torch.maximum(own, others)

    def _unmask(self, optimizer: Any, *_: object) -> None:
        """Restore the scaler's `found_inf`, or remove ours. Otherwise this vote would mask later memberships' steps."""
        if self._vote is None:
            return  # it is told by the rank whose steps this one replays
        others = self._others.pop(id(optimizer), None)
        if others is not None:
            optimizer.found_inf = others
        elif hasattr(optimizer, "found_inf"):
            del optimizer.found_inf

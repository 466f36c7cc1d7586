"""The vote of the ranks' devices on each step, so that a step counts on all ranks or on none. No host waits for it.

Rules
1. An aborted collective ends with old bytes, here and on ranks that have not aborted. No event, wait or error says so.
   So a step is good only if every rank says, behind its last collective of the step, that it had not aborted before.
   A collective of 8 bytes sums these votes. Otherwise ranks train on with wrong gradients, and nothing shows it.
2. A vote is a number of this membership and this step. Votes of an earlier step, which an abort may leave, do not add
   up.
3. A host clears its word before it aborts. The device multiplies its vote by that word.
4. A rank that has seen a bad step votes 0 from then on. So ranks differ by at most one step.
5. torch's fused optimizers read `found_inf` on the device, and change nothing while it is 1. `found_inf` is 1 from the
   first bad step on.

Source: NCCL 2.30.7, `src/device/prims_simple.h` and `src/init.cc`; the guide on accelerators has the contract in words.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.comm.collectives import all_reduce, device_for_metadata
from paceline.comm.device import AsyncValue, host_memory, is_accelerator
from paceline.comm.opened_groups import abort_on

_OF_HOSTS = ("gloo", "paceline")  # backends that wait on the host
_NOT_TRIED = ("nccl2",)
# Without the first torch's watchdog aborts by itself, and no vote is withdrawn. The second ends a process whose
# watchdog waits, as it does during an abort.
_OF_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_BITS = 60  # of the sum of all votes, which has to fit into 64


class DeviceExit:
    """The way out of a membership on one rank: the host's word, and the abort of what its device waits for.

    Attributes:
        word: 1 while this rank is in the membership, else 0; shape (), int64, in pinned memory. Devices read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.word = host_memory(torch.empty((), dtype=torch.int64, device=device)).zero_()
        atexit.register(self.withdraw)  # a rank that raises may abort its groups while it is torn down

    def enter(self) -> None:
        """Begin a membership. Local. No vote of the last one is under way."""
        self.word.fill_(1)

    def withdraw(self) -> None:
        """Let every later vote of this rank's device be 0 (rule 3). Local; from any thread; does not wait."""
        self.word.zero_()

    def abort(self) -> None:
        """End all collectives that the device waits in. Local; from any thread. May wait for what is queued."""
        abort_on(self._device)


class DeviceVote:
    """The votes of one membership on its steps.

    Args:
        leave: This rank's way out of the membership.
        group: The group that carries the gradients.
        name: The membership's; the same on its ranks, and never used before.
        device: Of the gradients.

    Attributes:
        is_good: Whether all steps so far were good, as of the current stream; shape (), bool.
        found_inf: 1 unless all steps so far were good, as of the current stream; shape (), float32.
    """

    def __init__(self, leave: DeviceExit, group: ProcessGroup, name: str, device: torch.device) -> None:
        self._word, self._group, self._name = leave.word, group, name
        self._num_cast = 0
        self._vote = torch.zeros((), dtype=torch.int64, device=device)
        self._ok = torch.ones((), dtype=torch.int64, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self.is_good = torch.ones((), dtype=torch.bool, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def cast(self) -> AsyncValue:
        """Vote on a step, and return the number of good steps of this membership, on its way to the host.

        Contract:
            Collective: every rank, behind all collectives of the step.  Blocks: no; the current stream has waited for
            these collectives. What the stream is told afterwards may use `is_good` and `found_inf`.
        """
        number = _number(f"{self._name}/{self._num_cast}", self._group.size())
        self._num_cast += 1
        self._vote.copy_(self._word, non_blocking=True)
        self._vote.mul_(self._ok).mul_(number)
        all_reduce(self._vote, self._group).wait()
        self._ok.mul_(self._vote == number * self._group.size())
        self._count.add_(self._ok)
        self.is_good.copy_(self._ok)
        self.found_inf.copy_(1 - self._ok)
        return AsyncValue(self._count)

    def num_good(self) -> int:
        """Return how many steps of this membership were good. Waits for the device to come through all of them."""
        return int(AsyncValue(self._count).read())


def _number(words: str, num_ranks: int) -> int:
    """Return a number other than 0 that differs between words, of which `num_ranks` can be added."""
    found = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 64 - _BITS
    return found // num_ranks | 1


def why_not_left(group: ProcessGroup, device: torch.device) -> Iterator[str]:
    """Yield the reasons, as text, why collectives over this group cannot be aborted when a peer is lost. Local."""
    kind, backends = device.type, str(dist.get_backend_config(group))
    own = dict(each.split(":") for each in backends.split(",") if ":" in each).get(kind, backends)
    if is_accelerator(device_for_metadata(group, device)) or own in _OF_HOSTS:
        yield (
            f"the process group is {backends!r}. Ranks hand state over between hosts, and wait for gradients on the "
            f'device. Open the group for both, as by dist.init_process_group("cpu:gloo,{kind}:nccl").'
        )
    if own in _NOT_TRIED:
        yield (
            f"the backend {own!r} aborts in another way than 'nccl', by a revoke, which was not tried. Open the group "
            f'by dist.init_process_group("cpu:gloo,{kind}:nccl").'
        )
    if own == "nccl":
        for name, wanted in _OF_NCCL.items():
            if os.environ.get(name) != wanted:
                line = " ".join(f"{each}={value}" for each, value in _OF_NCCL.items())
                yield (
                    f"{name} is {os.environ.get(name, 'not set')}, so torch's watchdog ends this process when a peer "
                    f"is lost. Start with {line} paceline run ..."
                )

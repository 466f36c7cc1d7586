"""A process group behind a slow link. It hands a message to Gloo at the time at which the link would have sent it."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.comm.lane import Lane, LaneWork


class SlowGroup(dist.ProcessGroup):
    """All ranks of the default group, each behind a link of its own.

    Attributes:
        bytes_per_s: Of the link; may be changed between steps. Waiting takes no processor.
    """

    def __init__(self, bytes_per_s: float) -> None:
        inner: Any = dist.distributed_c10d._get_default_group()
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # a third overload
        self.inner, self.bytes_per_s = inner, bytes_per_s
        self._lane = Lane("slow link")

    def getBackendName(self) -> str:  # noqa: N802
        return "slow"

    def _later(self, name: str, sent_bytes: float, tensors: list[Tensor], *args: Any) -> dist.Work:
        def perform() -> None:
            time.sleep(sent_bytes / self.bytes_per_s)
            getattr(self.inner, name)(*args).wait()

        return self._lane.launch(LaneWork(perform, tensors, name), at_once=False)

    def _to_others(self, num_bytes: int) -> int:
        return (self.size() - 1) * num_bytes

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
        sent = 2 * self._to_others(tensors[0].nbytes) // self.size()
        return self._later("allreduce", sent, tensors, tensors, options)

    def allgather(self, rows: list[list[Tensor]], tensors: list[Tensor], options: Any) -> dist.Work:
        return self._later("allgather", self._to_others(tensors[0].nbytes), rows[0], rows, tensors, options)

    def alltoall_base(self, output: Tensor, sent: Tensor, *rest: Any) -> dist.Work:
        num_bytes = self._to_others(sent.nbytes) // self.size()
        return self._later("alltoall_base", num_bytes, [output], output, sent, *rest)

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:
        return self._later("broadcast", 0, tensors, tensors, options)


def behind_a_slow_link(bytes_per_s: float) -> tuple[dist.ProcessGroup, SlowGroup]:
    """Return a group that torch knows, and its link. Collective."""
    made: list[SlowGroup] = []

    def create(*_: object) -> SlowGroup:
        made.append(SlowGroup(bytes_per_s))
        return made[-1]

    if "slow" in dist.Backend.backend_list:
        plugins: dict[str, Any] = dist.Backend._plugins
        plugins["SLOW"] = plugins["SLOW"]._replace(creator_fn=create)
    else:
        dist.Backend.register_backend("slow", create, devices=["cpu"])
    group: dist.ProcessGroup = dist.new_group(backend="slow")
    return group, made[-1]

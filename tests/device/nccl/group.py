"""The process group that torch.distributed sees: which call is which operation, on which communicator."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from device.late import DEVICE
from device.nccl import collectives
from device.nccl.communicator import Communicator, LateWork, Operation
from device.nccl.exchange import Exchange
from paceline.process_group.reconfiguring import innermost

BACKEND = "latenccl"
MIXED = "latemixed"


@dataclass(frozen=True)
class Members:
    """What `reconfigure` is told, as torch 2.14's `ReconfigureOptions`."""

    uuid: int
    handles: list[str] | set[str]
    timeout: timedelta | None = None


class LateProcessGroup(ProcessGroup):
    """A group whose collectives run on the device of their tensors, one of this rank's.

    Messages of two ranks have a communicator of their own. Communicators are opened when they are first used.
    With `waits` there is none before `reconfigure`.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, *, waits: bool = False
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # of a group written in Python
        self._rank, self._size = rank, size
        self._timeout = timeout
        self._store = store
        self._has_members = not waits
        self._who = secrets.token_hex(8)
        self._changes: list[int] = []  # uuids
        self._communicators: dict[tuple[str, torch.device], Communicator] = {}
        self._coalesced: list[tuple[Communicator, Operation]] | None = None
        self._names = {"name": "", "description": ""}

    def _launch(self, operation: Operation, peer: int | None = None) -> LateWork:
        """Launch an operation of all ranks or of two, or none yet if it is one of several."""
        if not self._has_members:
            raise RuntimeError(f"the backend {BACKEND} has no members before reconfigure()")
        device = operation.tensors[0].device
        for tensor in operation.tensors:
            if tensor.device != device or device.type != DEVICE or tensor.layout != torch.strided:
                raise ValueError(
                    f"{operation.name} got a {tensor.layout} tensor on {tensor.device}; the backend {BACKEND} takes "
                    f"dense tensors of one device of the type {DEVICE}"
                )
        communicator = self._communicator(device, peer)
        if self._coalesced is not None:
            self._coalesced.append((communicator, operation))
            return cast("LateWork", None)  # c10d asks for no work while it coalesces
        return communicator.launch(operation)

    def _communicator(self, device: torch.device, peer: int | None) -> Communicator:
        ranks = range(self._size) if peer is None else sorted((self._rank, peer))
        name = "all" if peer is None else "-".join(map(str, ranks))
        if (name, device) not in self._communicators:
            # A number, as torch has. A second device's communicator would otherwise take the parts of the first.
            number = sum(each == name for each, _ in self._communicators)
            self._communicators[name, device] = Communicator(
                dist.PrefixStore(f"{name}/{number}", self._store),
                ranks.index(self._rank),
                len(ranks),
                device,
            )
        return self._communicators[name, device]

    # ---- what c10d asks

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._names["name"] = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._names["name"]

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._names["description"] = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._names["description"]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(DEVICE)]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        if torch.device(device).type != DEVICE:
            raise RuntimeError(f"the backend {BACKEND} supports {DEVICE} tensors, not {device}")
        return self

    def abort(self) -> None:
        """End what is under way on this rank, and refuse the rest. Local."""
        for communicator in list(self._communicators.values()):
            communicator.abort()

    def shutdown(self) -> None:
        """Refuse what comes from now on; what was launched is done."""
        for communicator in self._communicators.values():
            communicator.close()

    # ---- other members, as c10d asks for from torch 2.14 on

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        """What names this rank until the next change; ordered as ranks are."""
        return f"{BACKEND}/{self._rank:06}/{self._who}/{len(self._changes)}"

    def reconfigure(self, opts: Members) -> dist.Work:
        """Go on with other members, in the order of a list of handles, or of old ranks in a set. Collective over them.

        What is under way is given up. The work is done when all have come.
        """
        handles = opts.handles if isinstance(opts.handles, list) else sorted(opts.handles)
        own = self.get_reconfigure_handle()
        if opts.uuid in self._changes or own not in handles:
            raise ValueError(f"the uuid {opts.uuid} was used before, or {own} is not among {handles}")
        self.abort()
        self._changes.append(opts.uuid)
        members = hashlib.sha256(" ".join(handles).encode()).hexdigest()[:16]
        self._store = dist.PrefixStore(f"{BACKEND}/{opts.uuid}/{members}", innermost(self._store))
        self._rank, self._size, self._has_members = handles.index(own), len(handles), True
        self._communicators = {}
        self._store.set(f"met/{self._rank}", "")
        return _Met(self._store, self._size, opts.timeout or self._timeout)

    # ---- coalescing

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Launch all that was called since the start; the returned work stands for all of it."""
        launched, self._coalesced = self._coalesced or [], None
        works = [
            c.launch(_joined([op for of, op in launched if of is c]))
            for c in dict.fromkeys(c for c, _ in launched)
        ]
        if not works:
            raise ValueError("nothing was launched between _start_coalescing and _end_coalescing")
        return works[0] if len(works) == 1 else _Works(works)

    # ---- collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> LateWork:
        return self._launch(collectives.all_reduce(tensors, _op(opts)))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> LateWork:
        return self._launch(collectives.all_reduce(tensors, _op(opts)))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> LateWork:
        return self._launch(collectives.broadcast(tensors, opts.rootRank))

    def reduce(self, tensors: list[Tensor], opts: Any) -> LateWork:
        return self._launch(collectives.reduce(tensors[0], opts.rootRank, _op(opts)))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> LateWork:
        return self._launch(collectives.all_gather(outputs, inputs))

    def all_gather_single(self, output: Tensor, value: Tensor, opts: Any = None) -> LateWork:
        return self.all_gather_single_coalesced([output], [value])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> LateWork:
        rows = [self._parts(output) for output in outputs]
        return self._launch(collectives.all_gather(rows, inputs))

    _allgather_base = all_gather_single  # type: ignore[assignment]  # its former name
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]  # its former name

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> LateWork:
        return self._launch(collectives.reduce_scatter(outputs, inputs, _op(opts)))

    def reduce_scatter_single(self, output: Tensor, value: Tensor, opts: Any = None) -> LateWork:
        return self.reduce_scatter_single_coalesced([output], [value], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> LateWork:
        rows = [self._parts(value) for value in inputs]
        return self._launch(collectives.reduce_scatter(outputs, rows, _op(opts)))

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # its former name
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]  # its former name

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> LateWork:
        return self._launch(collectives.all_to_all(outputs, inputs))

    def all_to_all_single(
        self, output: Tensor, value: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> LateWork:
        return self.alltoall(self._parts(output, output_sizes), self._parts(value, input_sizes))

    alltoall_base = all_to_all_single  # type: ignore[assignment]  # its former name

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> LateWork:
        return self._launch(collectives.send(tensors[0]), peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> LateWork:
        return self._launch(collectives.receive(tensors[0]), peer)

    def barrier(self, opts: Any = None) -> LateWork:
        """Wait, on the host, until every rank's device has come here."""
        work = self.allreduce([torch.zeros(1, device=DEVICE)])
        work.wait()
        torch.accelerator.current_stream().synchronize()
        return work

    def _parts(self, tensor: Tensor, num_rows: Sequence[int] = ()) -> list[Tensor]:
        """What is each rank's: so many rows, or an equal part of all elements."""
        if num_rows:
            return list(tensor.split(list(num_rows)))
        return list(tensor.view(-1).split(tensor.numel() // self._size))


class _Works(dist.Work):
    """Works of several communicators, launched together."""

    def __init__(self, works: list[LateWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class _Met(dist.Work):
    """Done when all members have come."""

    def __init__(self, store: dist.Store, size: int, timeout: timedelta) -> None:
        super().__init__()
        self._store, self._keys, self._timeout = store, [f"met/{rank}" for rank in range(size)], timeout

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._store.wait(self._keys, timeout or self._timeout)
        return True

    def is_completed(self) -> bool:
        return self._store.check(self._keys)


class MixedProcessGroup(LateProcessGroup):
    """A group that sends the host's tensors over Gloo, as "cpu:gloo,cuda:nccl" does.

    c10d makes no mixed group with a backend that is written in Python.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(dist.PrefixStore("device", store), rank, size, timeout)
        c10d: Any = dist.distributed_c10d
        self._gloo = c10d.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout=timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return MIXED

    name = getBackendName

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device(DEVICE)]

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo if torch.device(device).type == "cpu" else self

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(opts or dist.BarrierOptions())


def _by_device(name: str) -> Any:
    def call(group: Any, *arguments: Any) -> Any:
        first = arguments[0]
        while not isinstance(first, Tensor):
            first = first[0]
        of = group._gloo if first.is_cpu else super(MixedProcessGroup, group)
        return getattr(of, name)(*arguments)

    return call


for _name in ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall", "send", "recv"):
    setattr(MixedProcessGroup, _name, _by_device(_name))


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _joined(operations: list[Operation]) -> Operation:
    """One operation that does all of them, each under a step of its own."""

    def perform(exchange: Exchange, step: str) -> None:
        for part, operation in enumerate(sorted(operations, key=lambda of: of.name == "recv")):
            operation.perform(exchange, f"{step}.{part}")

    return Operation(
        "+".join(operation.name for operation in operations),
        perform,
        [t for operation in operations for t in operation.reads],
        [t for operation in operations for t in operation.writes],
    )

"""The c10d backend `paceline`: a ProcessGroup over memory that the ranks of a host share, and Gloo between hosts.

Rules
1. Collectives are performed in the order of their launch, the same on every rank, by the group's lane.
2. Reductions, gathers and broadcasts between ranks of one host go through shared memory. What leaves the host, and
   messages between two ranks, go through an inner Gloo group.
3. A tensor of an accelerator is staged through pinned memory on a stream of the lane's. That stream runs behind the
   work that the current stream had at the launch. The lane's thread waits for the copy to the host. A caller that waits
   for the collective waits, on the host, until the copy back is enqueued; its current stream waits for that copy.
4. After an error the group is broken: every further call says so. Destroy it and make a new one, or give it other
   members by `reconfigure`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import BACKEND_NAME
from paceline.comm.device import accelerator_type
from paceline.comm.lane import Lane, LaneWork
from paceline.errors import ConfigurationError, PacelineError, PeerLostError, ProtocolError, forget_frames
from paceline.host.exit import end_before_exit
from paceline.process_group.blocking_collectives import BlockingCollectives, Rows, only, reducible
from paceline.process_group.connections import (
    INTERFACE,
    AcrossHosts,
    OpenedWhenUsed,
    address_towards,
    make_gloo,
)
from paceline.process_group.folds import fold_by
from paceline.process_group.host_collectives import HostCollectives, SharedVectors
from paceline.process_group.reconfiguring import Handle, in_order, store_of
from paceline.transports.shared_memory import Host, HostBarrier, join_host


class ProcessGroup(dist.ProcessGroup):
    """A c10d process group over shared memory and Gloo.

    No other group uses `store`. A rank waits `timeout` for the others in one collective. `waits`: make no connection
    before `reconfigure`. `talks`: messages between two ranks are expected, so all connect for them at once.

    Contract:
        Collective: making one, and every method but `send`, `recv`, `allocate_tensor` and the queries.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        waits: bool = False,
        talks: bool = True,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # as a group in Python is made
        self._rank, self._size, self._rows = rank, size, Rows(rank, size)
        self._store, self._timeout = store, timeout
        self._talks = talks
        self._handle = Handle.of(store, rank)
        self._used: set[int] = set()  # the uuids of earlier changes
        self._lane = Lane(f"paceline lane of rank {rank}")
        self._names = {"name": "", "description": ""}  # which c10d gives it
        self._error: BaseException | None = RuntimeError("it was not connected.")  # why it is not usable
        if waits:
            return
        known = None
        if dist.is_initialized() and size == dist.get_world_size():  # then ranks have the numbers of the job
            known = dist.PrefixStore("paceline", dist.distributed_c10d._get_default_store())
        self._connect(store, rank, size, timeout, known)
        self._error = None

    def _connect(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, known: dist.Store | None = None
    ) -> None:
        """Meet the other members in a store of this group alone. Collective; blocks."""
        self.host: Host = join_host(dist.PrefixStore("memory", store), rank, size, timeout, known)
        self._barrier = HostBarrier(self.host, timeout.total_seconds(), self._lane.is_here)
        num_shares = min(len(ranks) for ranks in self.host.hosts)
        self._here = HostCollectives(self.host, self._barrier, num_shares, size)
        self.address = address_towards(len(self.host.hosts))
        inner, messages = (
            functools.partial(make_gloo, dist.PrefixStore(name, store), rank, size, timeout, self.address)
            for name in ("collectives", "messages")
        )
        # On one host few collectives need it, and all ranks come to the first of them in one order (rule 1).
        self._inner = OpenedWhenUsed(inner) if self.host.is_only_one else inner()
        # Connected at once: else a send or a receive may block until the peer wants to talk to this rank, too.
        self._messages = messages(connects_now=True) if self._talks else OpenedWhenUsed(messages)
        self._across = AcrossHosts(self._inner, self.host.hosts, self.host.index, timeout)
        self._collectives = BlockingCollectives(self.host, self._here, self._across, self._inner)
        self._rank, self._size, self._rows = rank, size, Rows(rank, size)
        end_before_exit(self, ProcessGroup._leave)

    # Queries of c10d

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND_NAME

    def name(self) -> str:
        return BACKEND_NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._names["name"] = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._names["name"]

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._names["description"] = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._names["description"]

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def _device_types(self) -> list[torch.device]:
        # None before c10d has entered this group among its own: torch from 2.15 on would attach its flight recorder,
        # which takes a group's name from a backend of C++, and this group has none.
        if self not in dist.distributed_c10d._world.pg_map:
            return []
        accelerator = accelerator_type()
        return [torch.device(kind) for kind in ("cpu", accelerator) if kind is not None]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        """Return itself: torch asks a group for its backend by device, which C++ would look for in vain."""
        if torch.device(device).type == "meta":
            raise RuntimeError(
                f"the backend {BACKEND_NAME!r} takes tensors of the CPU and of accelerators, not of {device}"
            )
        return self

    @property
    def copied_bytes(self) -> int:
        """Return the bytes copied into and out of staging so far. Tensors of `allocate_tensor` add none."""
        return self._here.copied_bytes

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return torch.device(device).type == "cpu" and self.host.num_ranks > 1

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a zeroed 1-D tensor that collectives of this group work on where it is. Local.

        Where the shared memory is used up it is an ordinary one, which collectives copy in and out.
        """
        if not self.supports_tensor_alloc(device):
            return torch.zeros(size, dtype=dtype, device=device)
        try:
            return self.host.me.arena.allocate(size, dtype)
        except MemoryError:
            return torch.zeros(size, dtype=dtype, device=device)

    def explain(self, size_bytes: int) -> str:
        """Say how an all-reduce of this size is performed, and why, from links measured at first use. Collective."""
        if self.shares_memory:
            ways = {
                True: "every rank folds all inputs",
                False: "every rank folds its share and hands it to all",
            }
            small = self._here.is_small(size_bytes)
            words = f"all_reduce of {size_bytes:,} bytes over {self._size} ranks on one host: shared memory, "
            words += ways[small]
        else:
            self._launch(self._across.prepare, [], None, "probe").wait()
            words = self._across.choose(size_bytes, 4).why
            if self.host.num_ranks > 1:
                words += "; within a host through shared memory, each rank taking a share across"
            words += f"; over the interface {os.environ.get(INTERFACE) or f'with address {self.address}'}"
        return words + (f" ({self.host.remark})" if self.host.remark else "")

    def use_schedule(self, name: str | None) -> None:
        """Perform all-reduces across hosts by this schedule; None for the cheapest. Local, the same on every rank."""
        self._across.use(name)

    # Reductions

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        op = opts.reduceOp
        folds = [reducible(op, tensor) for tensor in tensors]
        for tensor, fold in zip(tensors, folds, strict=True):
            if fold is not None:
                self._rows.check("all-reduce", (), (tensor,))

        def perform() -> None:
            for tensor, fold in zip(tensors, folds, strict=True):
                self._collectives.all_reduce(tensor, op, fold)

        return self._launch(perform, tensors, opts, "all-reduce")

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        tensor = only(tensors)
        fold_by(opts.reduceOp, tensor.dtype)
        self._rows.check("reduce", (), (tensor,), opts)
        return self._launch(lambda: self._collectives.reduce(tensor, opts), tensors, opts, "reduce")

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        for output, rows in zip(outputs, inputs, strict=True):
            fold_by(opts.reduceOp, output.dtype)
            self._rows.check("reduce-scatter", rows, (output,))
            self._rows.check_lengths("reduce-scatter", rows, output.numel())

        def perform() -> None:
            for output, rows in zip(outputs, inputs, strict=True):
                self._collectives.reduce_scatter(output, rows, opts)

        return self._launch(perform, outputs, opts, "reduce-scatter")

    def reduce_scatter_single(self, output: Tensor, rows: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [rows], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        pairs = zip(inputs, outputs, strict=True)
        return self.reduce_scatter(
            outputs, [self._rows.cut("reduce-scatter", rows, output.numel()) for rows, output in pairs], opts
        )

    # Gathers and broadcasts

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        tensor = only(tensors)
        self._rows.check("broadcast", (), (tensor,), opts)
        return self._launch(lambda: self._collectives.broadcast(tensor, opts), tensors, opts, "broadcast")

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for rows, tensor in zip(outputs, inputs, strict=True):
            self._rows.check("all-gather", (tensor,), rows)
            self._rows.check_lengths("all-gather", rows, tensor.numel())

        def perform() -> None:
            for rows, tensor in zip(outputs, inputs, strict=True):
                self._collectives.all_gather(rows, tensor)

        return self._launch(perform, [row for rows in outputs for row in rows], opts, "all-gather")

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        rows = [self._rows.cut("all-gather", output, tensor.numel()) for output, tensor in pairs]
        return self.allgather(rows, inputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        by_input = [[rows[index] for rows in outputs] for index in range(len(inputs))]
        return self.allgather(by_input, inputs, opts)

    # Not in other backends

    @property
    def shares_memory(self) -> bool:
        """Return whether all ranks do: then there are the two methods below. The same on every rank."""
        return self.host.is_only_one

    @property
    def joins_hosts(self) -> bool:
        """Return whether all-gathers and reduce-scatters send each byte once to each other host."""
        return bool(self._across.columns) and not self.host.is_only_one

    def on_all_vectors(self, kind: str, flat: Tensor, perform: Callable[[SharedVectors], None]) -> dist.Work:
        """Let every rank work on its share of all ranks' tensors. Collective; does not block.

        Args:
            kind: What it is, one of `descriptor.KINDS`; the same on every rank.
            flat: This rank's tensor, 1-D, contiguous; undefined until the work is done.
            perform: Called on the group's lane, on every rank, unless there are no elements.
        """
        return self._launch(lambda: self._collectives.on_all_vectors(kind, flat, perform), [flat], None, kind)

    def all_gather_pieces(self, rows: list[list[Tensor]]) -> dist.Work:
        """Fill the other ranks' rows with what they have. Collective; does not block.

        Args:
            rows: By rank, tensors of the CPU, 1-D, of one dtype. A rank's are as long in all on every rank.
        """
        outputs = [piece for row in rows for piece in row]
        return self._launch(lambda: self._here.all_gather_pieces(rows), outputs, None, "all-gather")

    # Over Gloo, also where memory is shared

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        tensor = only(inputs)
        rows = self._rows.at_root("gather", outputs, tensor.numel(), opts)
        self._rows.check("gather", inputs, rows, opts)
        return self._launch(
            lambda: self._collectives.gather(rows, tensor, opts), rows or inputs, opts, "gather"
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        output = only(outputs)
        rows = self._rows.at_root("scatter", inputs, output.numel(), opts)
        self._rows.check("scatter", rows, outputs, opts)
        return self._launch(lambda: self._collectives.scatter(output, rows, opts), outputs, opts, "scatter")

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        self._rows.check("all-to-all", (tensor,), (output,))
        sizes = zip((output, tensor), (output_sizes, input_sizes), strict=True)
        outputs, inputs = (self._rows.split("all-to-all", whole, parts) for whole, parts in sizes)
        return self.alltoall(outputs, inputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Exchange lists of tensors, which Gloo itself cannot do."""
        for rows in (inputs, outputs):
            self._rows.check_lengths("all-to-all", rows, None)
        self._rows.check("all-to-all", inputs, outputs)
        self._rows.check_own("all-to-all", inputs, outputs)
        return self._launch(
            lambda: self._collectives.all_to_all(outputs, inputs), outputs, opts, "all-to-all"
        )

    if not TYPE_CHECKING:  # what torch 2.8 calls them
        _allgather_base = all_gather_single
        allgather_into_tensor_coalesced = all_gather_single_coalesced
        _reduce_scatter_base = reduce_scatter_single
        reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
        alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        return self._group_for(tensors).send(tensors, destination, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        return self._group_for(tensors).recv(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        return self._group_for(tensors).recv_anysource(tensors, tag)

    def _group_for(self, tensors: list[Tensor]) -> dist.ProcessGroup:
        """Return the group for messages. Refuse tensors outside the host's memory, or not stored as they are read."""
        self._check_usable()
        for tensor in tensors:
            if not tensor.is_cpu or tensor.is_neg() or tensor.is_conj():
                what = f"of {tensor.device}" if not tensor.is_cpu else "whose memory is to be negated"
                raise ConfigurationError(
                    f"the backend {BACKEND_NAME!r} sends and receives tensors of the CPU, not {what}. Pass a copy, or "
                    "use a collective."
                )
        return cast("dist.ProcessGroup", self._messages)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._launch(self._collectives.barrier, [], opts, "barrier")

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names those that did not come. Collective; blocks.

        `torch.distributed.monitored_barrier` refuses every backend but Gloo, so it is called here. `timeout` must not
        exceed the group's; every barrier of this backend names the first rank that is missing.
        """
        work = self._launch(self._collectives.barrier, [], dist.BarrierOptions(), "monitored barrier")
        work.wait(*([] if timeout is None else [timeout]))

    # Other members, as c10d asks for from torch 2.14 on

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        """Return the handle by which other ranks name this one, until the group gets other members. Local."""
        return str(self._handle)

    def reconfigure(self, opts: Any) -> dist.Work:
        """Give this group other members: what is under way is given up, and the same object goes on with them.

        Of c10d's `ReconfigureOptions` `uuid` is a number that no earlier change had. `handles` of the members are a
        list in the order of their new ranks, or a set, in which old ranks decide. `timeout` None is the group's.

        Contract:
            Collective over the new members: same uuid, same handles.  Blocks: no; the work is done when all have come.
            Tensors of `allocate_tensor` stay valid, and are copied in and out from then on.
        """
        if opts.uuid in self._used:
            raise ConfigurationError(
                f"reconfigure: the uuid {opts.uuid} was used before. Every change needs another."
            )
        handles = in_order(opts.handles, self._handle)
        self._used.add(opts.uuid)
        rank, size, timeout = handles.index(self._handle), len(handles), opts.timeout or self._timeout
        self._give_up("it is given other members.")

        def perform() -> None:
            self._let_go()
            store = store_of(handles, self._handle, self._store, opts.uuid, timeout)
            self._connect(store, rank, size, timeout)
            self._handle = self._handle.after(rank)
            self._error = None

        work = LaneWork(perform, [], "reconfigure")
        self._lane.launch(work, at_once=False)
        return work

    # Launching, failing, ending

    def _launch(self, perform: Callable[[], None], outputs: list[Tensor], opts: Any, kind: str) -> dist.Work:
        self._check_usable()

        def guarded() -> None:
            self._check_usable()
            try:
                # Outputs, and memory that is kept for the next collective, may have been made in inference mode: only
                # in that mode may they be written as well as others, whichever thread performs this.
                with torch._C._InferenceMode(True):  # which is what `inference_mode` enters
                    perform()
            except BaseException as error:
                self._error = error
                if not self._barrier.is_broken:
                    self._barrier.give_up(self._rank)
                is_clear = isinstance(error, (PacelineError, NotImplementedError))
                if is_clear or not isinstance(error, RuntimeError):
                    raise
                raise PeerLostError(
                    f"rank {self._rank} was in {kind} when communication failed. The backend said: {error}"
                ) from error

        work = LaneWork(guarded, outputs, kind)
        self._lane.launch(work, at_once=not getattr(opts, "asyncOp", True))
        return work

    def _check_usable(self) -> None:
        if self._error is None:
            return
        if not self._has_members:
            raise ProtocolError(
                "this process group has no members before reconfigure() was called, because it was made with "
                "enable_reconfigure=True."
            )
        raise ProtocolError(
            "this process group can no longer be used, because an earlier collective failed: "
            f"{self._error} Destroy it (destroy_process_group) and make a new one."
        ) from self._error

    def abort(self) -> None:
        """Break the group: give up the collectives under way in this host's memory, here and so on neighbours.

        An exchange with other hosts that is under way ends at the group's timeout.
        """
        self._give_up("it was aborted.")

    def _give_up(self, why: str) -> None:
        self._error = self._error or RuntimeError(why)
        if self._has_members:
            self._barrier.give_up(self._rank)

    @property
    def _has_members(self) -> bool:
        return hasattr(self, "host")

    def _let_go(self) -> None:
        """Tell the other ranks that this one leaves. No collective may be under way."""
        if self._has_members:
            self.host.me.status.leave()

    def _leave(self, patience_s: float) -> None:
        if self._lane.close(patience_s):  # else what is under way may still want the others
            self._let_go()

    def shutdown(self) -> None:
        """End threads and unmap memory, after the collectives under way; tensors of `allocate_tensor` stay valid."""
        self._leave(self._timeout.total_seconds())
        forget_frames(self._error)  # they refer to this group, which would never end

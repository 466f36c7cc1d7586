"""The mean of the ranks' gradients over UDP, of which a bounded part may be lost: `reduction=BoundedLoss(bound=0.01)`.

Rules
1. It has its own connections, made from c10d's store at the first launch. Statuses, buffers and everything else go
   over the caller's group, where nothing is lost.
2. Each rank sums one shard of a bucket directly from the others, so a lost datagram concerns one pair of ranks. Then
   it sends the sum to all ranks without any loss, so all hold the same bits.
3. Every rank learns which contributions were lost. `compensation` says what takes their place.
4. Residuals take effect in `end_step` only, so a failed step changes none. A step whose gradients are not finite
   changes none either. Ranks need no message to agree on that, because the reduced gradients are the same.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm import (
    Chain,
    ContinuedWork,
    Lane,
    Work,
    launch_session_name,
    store_of_job,
    timeout_of,
    to_device,
    to_host,
)
from paceline.compression import Layout
from paceline.errors import ConfigurationError
from paceline.reductions import Keeper, Memory, Message, Reduction, Slot, StepEnd, check_one_model, real_numel
from paceline_lossy.loss_report import LossReport
from paceline_lossy.lossy_transport import Bound, Losses, LossyTransport, Sum, joined

_RESIDUAL = "residual"  # the key in a checkpoint
_CLASSES = 5
_MOST_PATHS = 16
_PIECES = {False: 2, True: 8}  # how many are under way at once, without and with priorities
_NATIVE = (torch.float32, torch.float64)

SURVIVORS, NONE, FEEDBACK = "survivors", "none", "feedback"
COMPENSATIONS = (SURVIVORS, NONE, FEEDBACK)

ALL_SENT, EARLY = "all_sent", "early"


class SummingServers(Protocol):
    """Parameter servers that sum what ranks push: `paceline_servers.ParameterServers`."""

    def open_sums(
        self, process_group: ProcessGroup, device: torch.device, num_ports: int
    ) -> Callable[[ProcessGroup], LossyTransport]:
        """Return the function that makes this rank's transport for a process group. The servers sum. Collective."""


class BoundedLoss(Reduction):
    """The mean of the ranks' gradients, where the network may lose a bounded part of what ranks send each other.

    Limits first: it helps only if the network loses packets. On a clean network it gains nothing over Gloo, and costs
    more of the processor. It needs Linux and IPv4. Gradients that are not float32 or float64 are sent as float32. Those
    of an accelerator are staged through host memory, which was tested on CPUs only. Sparse gradients go over the
    process group.

    Args:
        bound: The largest part of a bucket that may be lost between two ranks. With 0 every lost datagram is repeated.
        protected_ratio: The part of a shard's datagrams that may not be lost, those of the largest mean magnitude.
        compensation: "survivors" replaces a lost contribution by the mean of those that arrived, so that the
            expectation over losses is the mean. "none" counts it as zero, so gradients shrink by the lost part.
            "feedback" counts it as zero, too, and its sender adds it to the same gradient of the next step.
        priorities: Whether datagrams tell switches how urgent they are. Those of the model's front layers are sent
            first, because the next forward needs them first. They have a higher class: DSCP CS5, down to CS1 for the
            last layers. Datagrams that may be lost are not ECN-capable, so a port drops them when it marks the others.
        connect: Makes this rank's transport for a process group; by default one over UDP. Collective.
        servers: The servers that sum: `ParameterServers()`, those of the launcher, or `ParameterServers([...])`. Ranks
            then push to them, which may lose gradients, and pull the sums without loss. None: each rank sums a part.
        paths: Number of UDP ports that each rank sends from. If a network chooses among several paths by ports (ECMP),
            datagrams to one rank then take all of them. Use 8 for two paths. With one path it gains nothing.
        deliver: When a rank stops waiting for another's contributions. "all_sent": when the other has sent everything,
            and the missing part is within the bound. "early": as soon as the missing part is within the bound.
            Datagrams still under way then count as lost, so every step loses up to the bound on any network.

    Attributes:
        losses: The report of the last step's losses; the same on every rank. With `overlap_forward` that step may still
            be under way; reading `model.reduction` completes it.
        loss_scale: With "feedback": returns the factor of the loss, such as your `torch.amp.GradScaler.get_scale`.
            Residuals are rescaled when it changes.

    Cost:
        Each rank sends 2(P-1)/P of the gradients' bytes and 6 % more for headers, in 2 rounds. It holds the others'
        contributions to its shard, as many bytes as are under way: up to 16 parts of a bucket. A part is an eighth of
        the bucket, at least 1 MiB. "feedback" takes two residuals for each gradient.

    Source:
        The bound: Wang et al. 2020, "Domain-specific communication optimization for distributed DNN training" (DLCP),
        section 3. The division by what arrived: Weintraub et al. 2025, but unbiased also in this rank's share:
        own + n/k * (sum of the k of n others that arrived). Servers contribute nothing of their own. Feedback: Seide et
        al. 2014, applied to losses of the network instead of rounding.
    """

    needs_all_buckets = True

    def __init__(
        self,
        bound: float = 0.01,
        protected_ratio: float = 0.0,
        compensation: str = SURVIVORS,
        connect: Callable[[ProcessGroup], LossyTransport] | None = None,
        *,
        servers: SummingServers | None = None,
        priorities: bool = False,
        paths: int = 1,
        deliver: str = ALL_SENT,
    ) -> None:
        if compensation not in COMPENSATIONS:
            raise ConfigurationError(
                f"compensation={compensation!r} must be one of {', '.join(map(repr, COMPENSATIONS))}. Leave it out for "
                "gradients whose expectation is the mean."
            )
        if not _is_whole(paths) or not 1 <= paths <= _MOST_PATHS or (paths > 1 and connect is not None):
            raise ConfigurationError(
                f"paths={paths!r} must be from 1 to {_MOST_PATHS} ports, and a transport from `connect=` "
                "has its own. For two paths 8 are enough."
            )
        if servers is not None and (connect is not None or not hasattr(servers, "open_sums")):
            raise ConfigurationError(
                f"servers={servers!r} is not possible. Give ParameterServers(), or ParameterServers(addresses), of "
                "paceline_servers, and no `connect=` with it."
            )
        if connect is not None and not callable(connect):
            raise ConfigurationError(
                f"connect={connect!r} must be a function that makes this rank's transport for a process "
                "group. Leave it out for one over UDP."
            )
        if not isinstance(priorities, bool):
            raise ConfigurationError(f"priorities={priorities!r} is neither True nor False.")
        if deliver not in (ALL_SENT, EARLY):
            raise ConfigurationError(
                f"deliver={deliver!r} is neither {ALL_SENT!r} nor {EARLY!r}. Leave it out to lose only what the "
                "network does."
            )
        is_scaled, is_early = compensation == SURVIVORS, deliver == EARLY
        self._bound = Bound(bound, protected_ratio, is_scaled, is_early=is_early)
        # Smaller pieces let urgent buckets overtake others. Servers were not tested with pieces.
        self.pieces_at_once = 0 if servers is not None else _PIECES[priorities]
        self._paths = paths
        self._compensation = compensation
        self._connect = connect
        self._servers = servers
        self._priorities = priorities
        self._class_of: dict[int, int] = {}  # by a parameter's id
        self.losses = LossReport()
        self.loss_scale: Callable[[], float] = _one
        self._connection: _Connection | None = None
        self._prepared_for: ProcessGroup | None = None
        self._sums: list[_Reduced] = []
        self._residuals = Memory()
        self._scale_of_residuals = 1.0
        self._place = (0, 1)  # this rank's number, and the number of ranks
        self._sizes: dict[str, int] = {}
        self._names: dict[int, str] = {}

    @property
    def bound(self) -> float:
        """Return the largest part that may be lost."""
        return self._bound.ratio

    def __repr__(self) -> str:
        return (
            f"BoundedLoss(bound={self._bound.ratio}, protected_ratio={self._bound.protected_ratio}, "
            f"compensation={self._compensation!r}"
            f"{f', servers={self._servers!r}' if self._servers else ''}"
            f"{', priorities=True' if self._priorities else ''}"
            f"{f', paths={self._paths}' if self._paths > 1 else ''}"
            f"{', deliver=' + repr(EARLY) if self._bound.is_early else ''})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only. A copy makes its own connections and begins without residuals."""
        return {
            "bound": self._bound.ratio,
            "protected_ratio": self._bound.protected_ratio,
            "compensation": self._compensation,
            "connect": self._connect,
            "servers": self._servers,
            "priorities": self._priorities,
            "paths": self._paths,
            "deliver": EARLY if self._bound.is_early else ALL_SENT,
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        BoundedLoss.__init__(self, **state)

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        check_one_model(self, self._names, named_parameters)
        if self._connect is None and process_group.size() > 1:
            from paceline_lossy.datagrams.datagram_loop import compile_all  # noqa: PLC0415  numba: 0.5 s

            compile_all()  # before any rank waits for this one
        if process_group is not self._prepared_for:
            self._connection = None  # the other group may have been destroyed
        self._prepared_for = process_group
        self._place = (process_group.rank(), process_group.size())
        self._sizes = {name: real_numel(parameter) for name, parameter in named_parameters.items()}
        self._names = {id(parameter): name for name, parameter in named_parameters.items()}
        if self._priorities:
            self._class_of = _classes(named_parameters)

    def why_not_over(self, process_group: ProcessGroup | None) -> str:
        if process_group is not None:
            return ""
        return (
            "BoundedLoss counts lost packets between ranks that know each other from the beginning. Leave out "
            "reduction=."
        )

    def follow(
        self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup, are_alike: bool
    ) -> None:
        self.prepare(named_parameters, process_group)
        self._sums = []
        self._residuals.load(self._residuals.by_name())  # in memory that the old link does not write

    def begin_step(self, num_ranks: int, active_ratio: float = 1.0, share: float | None = None) -> float:
        self._sums = []
        self._residuals.begin()
        scale = float(self.loss_scale())
        if scale != self._scale_of_residuals:
            self._residuals.multiply(scale / self._scale_of_residuals)
            self._scale_of_residuals = scale
        return 1.0 / num_ranks

    def launch(self, message: Message) -> Work:
        if message.process_group.size() == 1:
            return Chain()
        if self._connection is None:
            group, device = message.process_group, message.flat.device
            if self._connect is not None:
                connect = self._connect
            elif self._servers is not None:
                connect = self._servers.open_sums(group, device, self._paths)
            else:
                connect = _over_udp(group, device, self._paths)
            self._connection = _Connection(group, connect)
        names = tuple(self._names[id(parameter)] for parameter in message.parameters)
        sizes = {name: self._sizes[name] for name in names}
        residual = None
        if self._compensation == FEEDBACK:
            flat = message.body
            layout = Layout(tuple(sizes.values()), (0,) * len(sizes), flat.dtype, flat.device)
            whole, stop = self._residuals.slot(names, layout), message.start + len(flat)
            residual = Slot(whole.kept[message.start : stop], whole.proposed[message.start : stop])
        # The parameter that is needed first decides the class of the bucket.
        level = max((self._class_of.get(id(parameter), 0) for parameter in message.parameters), default=0)
        bound = replace(self._bound, priority=level)
        reduced = _Reduced(message, sizes, residual)
        self._sums.append(reduced)
        begin = functools.partial(reduced.begin, self._connection, bound)
        return ContinuedWork(self._connection.lane, begin, [message.body], "bounded_loss", reduced.finish)

    def end_step(self, ended: StepEnd) -> None:
        self._residuals.restore(self._names[id(parameter)] for parameter in ended.unused)
        sums, self._sums = self._sums, []
        buckets: dict[int, list[tuple[int, Losses]]] = {}
        for each in sums:
            if each.sum is not None and each.sum.losses is not None:
                buckets.setdefault(each.index, []).append((each.start, each.sum.losses))
        sizes = {each.index: each.sizes for each in sums}
        found = [(joined(sorted(pieces, key=_start)), sizes[at]) for at, pieces in sorted(buckets.items())]
        ranks = self._place[1]
        self.losses = LossReport.of(found, ranks, ranks if self._servers else ranks - 1)
        if all(each.is_finite for each in sums):
            self._residuals.commit()

    @property
    def _keeper(self) -> Keeper:
        """Return the keeper of saved residuals, which fit any bound, transport and servers."""
        kind = f"BoundedLoss(compensation={self._compensation!r})"
        return Keeper(kind, "what was lost of the last gradients", self._sizes, *self._place)

    def state_dict(self) -> dict[str, Any]:
        if self._compensation != FEEDBACK:
            return {}
        return {
            **self._keeper.words(),
            "loss_scale": self._scale_of_residuals,
            _RESIDUAL: self._residuals.by_name(),
        }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load the residuals. With `strict=False` another rank's state is accepted, and residuals start at zero."""
        if self._compensation != FEEDBACK and not state:
            return
        is_own = self._keeper.has_saved(state, strict)
        self._residuals.load(state[_RESIDUAL] if is_own else {})
        self._scale_of_residuals = state["loss_scale"]

    @property
    def counters(self) -> dict[str, int]:
        """Return this rank's counts of datagrams: sent, repeated, dropped as a stranger's, and others. Local."""
        return self._connection.counters() if self._connection is not None else {}


class _Reduced:
    """A bucket, or a piece of one, that a lane hands to the link."""

    def __init__(self, message: Message, sizes: Mapping[str, int], residual: Slot | None) -> None:
        self.index, self.start = message.index, message.start
        self.sizes = sizes  # numbers of elements of the bucket's parameters, by name
        self.sum: Sum | None = None  # the sum on the link, once launched
        self.is_finite = True  # False if residuals depend on a result that is not finite
        self._body = self._staged = message.body
        self._residual = residual
        self._rank = message.process_group.rank()

    def begin(self, connection: _Connection, bound: Bound) -> Sum:
        """Hand the piece to the link. Runs on the lane."""
        if self._body.device.type != "cpu" or self._body.dtype not in _NATIVE:
            dtype = self._body.dtype if self._body.dtype in _NATIVE else torch.float32
            native = self._body.detach().to(dtype)
            self._staged = native if native.is_cpu else to_host(native)
        if self._residual is not None:
            self._staged.add_(self._residual.kept.to(self._staged.device, self._staged.dtype))
            self._residual.proposed.copy_(self._staged)
        self.sum = connection.link().launch(self._staged.detach().numpy(), bound)
        return self.sum

    def finish(self) -> None:
        """Keep the lost part as the residual, and copy a staged result back. Called after the sum."""
        if self._residual is not None and self.sum is not None and self.sum.losses is not None:
            low, high = torch.aminmax(self._staged)
            self.is_finite = bool(torch.isfinite(low) & torch.isfinite(high))
            _keep_lost(self._residual.proposed, self.sum.losses.ranges, self._rank)
        if self._staged is not self._body:
            to_device(self._body, self._staged)


def _keep_lost(given: Tensor, ranges: Any, rank: int) -> None:
    """Keep only the lost part of what `rank` has given. The rest becomes zero."""
    own = [(int(first), int(end)) for source, first, end in ranges if source == rank]
    lost = [given[first:end].clone() for first, end in own]
    given.zero_()
    for (first, end), values in zip(own, lost, strict=True):
        given[first:end] = values


def _classes(named_parameters: Mapping[str, Parameter]) -> dict[int, int]:
    """Return the class of each parameter, by its id: 5 for the first fifth of the model's elements, 1 for the last."""
    total = max(1, sum(real_numel(parameter) for parameter in named_parameters.values()))
    found, before = {}, 0
    for parameter in named_parameters.values():
        found[id(parameter)] = _CLASSES - before * _CLASSES // total
        before += real_numel(parameter)
    return {which: max(1, level) for which, level in found.items()}


def _is_whole(paths: Any) -> bool:
    return isinstance(paths, int) and not isinstance(paths, bool)


def _start(piece: tuple[int, Losses]) -> int:
    return piece[0]


def _one() -> float:
    return 1.0


class _Connection:
    """The link over one process group, and the lane that opens it and hands it buckets."""

    def __init__(self, group: ProcessGroup, connect: Callable[[ProcessGroup], LossyTransport]) -> None:
        self._open, self._group = connect, group
        self._link: LossyTransport | None = None
        self.lane = Lane(f"paceline bounded-loss lane of rank {group.rank()}")
        self._finalizer = weakref.finalize(self, self.lane.close, 0.0)

    def counters(self) -> dict[str, int]:
        return {} if self._link is None else self._link.counters

    def link(self) -> LossyTransport:
        """Return the link, opened at its first use. Collective the first time; blocks. Runs on the lane."""
        if self._link is None:
            self._link = self._open(self._group)
        return self._link


def _over_udp(
    group: ProcessGroup, device: torch.device, paths: int
) -> Callable[[ProcessGroup], LossyTransport]:
    """Begin to agree on a name for the connections. The returned function connects the ranks."""
    from paceline_lossy.connecting import open_lossy_transport  # noqa: PLC0415  numba: 0.5 s

    timeout, store = timeout_of(group), store_of_job("BoundedLoss")
    name = launch_session_name(group, device)

    def connect(group: ProcessGroup) -> LossyTransport:
        prefixed = dist.PrefixStore(f"paceline/bounded_loss/{name()}", store)
        return open_lossy_transport(prefixed, group.rank(), group.size(), timeout, paths)

    return connect

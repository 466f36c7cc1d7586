"""What is trained on the device of Paceline's own, beside `cases.py`: each uses waits that no other case does."""

from __future__ import annotations

import contextlib
import functools
import gc
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from device import late, nccl
from device.cases import NUM_STEPS, gradients, made, sparse, state, steps, vectors, wrapped
from device.ranks import Here
from harness.models import Mlp, sgd, squares
from harness.running_servers import in_threads
from paceline.comm import store_of_job
from paceline.compression import TopK
from paceline.reductions import Compressed
from paceline_lossy import Bound, LossyTransport, Sum
from paceline_lossy.lossy_transport import Losses


def overlapped(here: Here, side: str) -> list[Tensor]:
    """Steps that are deferred into the next forward, of an optimizer that takes part; buckets of several pieces."""
    from paceline import optim

    model = wrapped(made(Mlp, here), here, side, overlap_forward="always")
    optimizer, found = optim.overlap(sgd(model), model), []
    for step in range(2 * NUM_STEPS):
        optimizer.zero_grad()
        loss = squares(model(vectors(here, step)))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    model.flush()
    return [*found, *state(model)]


def sharded(here: Here, side: str, **how: Any) -> list[Tensor]:
    """Steps of an optimizer that is divided among the ranks, with the norm of all gradients."""
    from paceline import optim

    model = wrapped(made(Mlp, here), here, side, **how)
    optimizer, found = optim.shard(torch.optim.AdamW(model.parameters(), lr=0.01), model), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = squares(model(vectors(here, step)))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    model.flush()
    return [*found, *state(model)]


def sharded_overlapped(here: Here, side: str) -> list[Tensor]:
    """The same behind the next forward."""
    return sharded(here, side, overlap_forward="always")


def sharded_compressed(here: Here, side: str) -> list[Tensor]:
    """The same with gradients that go to their owners in 16 bits, through two threads."""
    return sharded(here, side, compression="bf16")


def dropped_overlap(here: Here, side: str) -> list[Tensor]:
    """A model that is dropped with its last step on the way: its group is closed once the device has sent all."""
    from paceline import optim

    module = made(Mlp, here)
    model = wrapped(module, here, side, overlap_forward="always")
    optimizer = optim.overlap(sgd(model), model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        squares(model(vectors(here, step))).backward()
        optimizer.step()
    with nccl.broken("flush"):
        del model, optimizer
        gc.collect()
    return state(module)


def weighed(here: Here, side: str) -> list[Tensor]:
    """Batches of unequal sizes, each counted by its samples."""
    model = wrapped(made(Mlp, here), here, side, weight=len)
    optimizer, found = sgd(model), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        squares(model(vectors(here, step)[: 3 + here.rank])).backward()
        found += gradients(model)
        optimizer.step()
    return [*found, *state(model)]


class _Twice(nn.Module):
    """A layer that reentrant checkpointing uses twice: its gradient arrives after its bucket has left.

    There is a layer before it, as the last bucket leaves when backward has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.front, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.first, self.front(x), use_reentrant=True)
        found: Tensor = self.second(checkpoint(self.first, inner, use_reentrant=True))
        return found


def late_gradients(here: Here, side: str) -> list[Tensor]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # says so, once
        return steps(here, wrapped(made(_Twice, here), here, side, bucket_cap_mb=0.0001))


def accumulated_window(here: Here, side: str) -> list[Tensor]:
    """Windows of micro-batches of unequal weights."""
    model = wrapped(made(Mlp, here), here, side)
    optimizer, found = sgd(model), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batches = [vectors(here, 10 * step + i)[: 2 + i + here.rank] for i in range(2)]
        with model.accumulate(batches, weight=len) as micro_batches:
            for batch in micro_batches:
                squares(model(batch)).backward()
        found += gradients(model)
        optimizer.step()
    return [*found, *state(model)]


def read_on_another_stream(here: Here, side: str) -> list[Tensor]:
    """Forward and backward on a stream of their own, the optimizer on the default one, which waits for it."""
    model = wrapped(made(Mlp, here), here, side)
    optimizer, found = sgd(model), []
    own = None if here.device.type == "cpu" else torch.Stream(here.device)
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=False)
        with _on(own):
            loss = squares(model(vectors(here, step)))
            loss.backward()
        if own is not None:
            loss.record_stream(torch.accelerator.current_stream(here.device))  # it is read there, and dropped
        found.append(loss.detach().clone())
        optimizer.step()
    return [*found, *state(model)]


@contextlib.contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Run what is within on a stream, behind the current one, which waits for it afterwards."""
    if stream is None:
        yield
        return
    current = torch.accelerator.current_stream(stream.device)
    stream.wait_stream(current)
    with stream:
        yield
    current.wait_stream(stream)


def shortened(compression: str) -> Callable[[Here, str], list[Tensor]]:
    def case(here: Here, side: str) -> list[Tensor]:
        return steps(here, wrapped(made(Mlp, here), here, side, compression=compression), num_steps=6)

    return case


def kept_residuals(here: Here, side: str) -> list[Tensor]:
    """Residuals are saved and loaded, and follow into another group. The streams that use them are other ones then."""
    reduction = Compressed(TopK(0.1))
    model = wrapped(made(Mlp, here), here, side, compression=reduction)
    optimizer = sgd(model)
    found = steps(here, model, optimizer, num_steps=2)
    reduction.load_state_dict(reduction.state_dict())
    found += steps(here, model, optimizer, num_steps=2)
    model.membership.rebuild(here.another_group())
    return [*found, *steps(here, model, optimizer, num_steps=2)]


def failed_step(here: Here, side: str) -> list[Tensor]:
    return _failed_step(here, side)


def failed_overlap(here: Here, side: str) -> list[Tensor]:
    return _failed_step(here, side, overlap_forward="always")


def _failed_step(here: Here, side: str, **options: Any) -> list[Tensor]:
    """One rank's backward raises in the second step, when buckets have left; the others are told, and all go on."""
    from paceline.errors import PeerAbortedError

    model = wrapped(made(Mlp, here), here, side, bucket_cap_mb=0.0003, **options)
    optimizer, found = sgd(model), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = squares(model(vectors(here, step)))
        breaks = step == 1 and here.rank == 1
        hook = next(iter(model.parameters())).register_hook(_raise) if breaks else None
        try:
            loss.backward()
        except (ZeroDivisionError, PeerAbortedError):
            if hook is not None:
                hook.remove()
            continue
        found += gradients(model)
        optimizer.step()
    return [*found, *state(model)]


def _raise(_: Tensor) -> None:
    raise ZeroDivisionError


class _OnTwoStreams(nn.Module):
    """Layers in turn on the current stream and on another one, so that autograd uses both as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.other: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            with _on(self.other if place % 2 else None):
                y = torch.tanh(layer(x))
            if self.other is not None:
                for tensor in (x, y):  # used on both
                    tensor.record_stream(self.other)
                    tensor.record_stream(torch.accelerator.current_stream(tensor.device))
            x = y
        return x


def _two_streams(overlaps: bool, hooks_as_well: bool = False) -> Callable[[Here, str], list[Tensor]]:
    def case(here: Here, side: str) -> list[Tensor]:
        from paceline import optim

        module: Any = made(_OnTwoStreams, here)
        module.other = None if here.device.type == "cpu" else torch.Stream(here.device)
        # A graph from before wrapping keeps autograd's accumulation of each parameter on its layer's stream.
        graph = module(vectors(here, 0)) if hooks_as_well else None
        options = {
            "bucket_cap_mb": 0.0003,
            "overlap_forward": "always" if overlaps else False,
        }  # a layer each
        model = wrapped(module, here, side, **options)
        optimizer, found = optim.overlap(sgd(model), model) if overlaps else sgd(model), []
        for step in range(2 * NUM_STEPS):
            optimizer.zero_grad()
            loss = squares(model(vectors(here, step)))
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        if overlaps:
            model.flush()
        del graph
        return [*found, *state(model)]

    return case


def dropped_work(here: Here, side: str) -> list[Tensor]:
    """Sums over our backend whose tensors and works are dropped at once: their memory is not used too early."""
    found = []
    for step in range(NUM_STEPS):
        sent = vectors(here, step)
        work = dist.all_reduce(sent, group=here.group, async_op=True)
        if side != "paceline":
            work.wait()
        del sent, work
        found.append(vectors(here, NUM_STEPS + step) * 2)
    dist.barrier(group=here.group)
    return found


def low_rank(here: Here, side: str) -> list[Tensor]:
    """PowerSGD of matrices that are large enough to be compressed."""
    from paceline.reductions import PowerSGD

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    return steps(here, wrapped(made(build, here), here, side, reduction=PowerSGD(rank=1), bucket_cap_mb=0.02))


class _EveryThird(LossyTransport):
    """A transport that always loses the same third of what a rank sends to the others."""

    def __init__(self, name: str, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self._store = dist.PrefixStore(name, store_of_job("a test"))
        self._count = 0

    def launch(self, vector: Any, bound: Bound) -> Sum:
        launched, self._count = Sum(vector, bound), self._count + 1
        self._store.set(f"{self._count}/{self.rank}", vector.tobytes())
        third, lost = len(vector) // 3, []
        rows = []
        for rank in range(self.num_ranks):
            row = np.frombuffer(self._store.get(f"{self._count}/{rank}"), vector.dtype).copy()
            row[:third] = 0
            rows.append(row)
            lost.append((rank, 0, third))
        vector[:] = sum(rows)
        counts = (1,) * self.num_ranks
        launched.end(Losses(self._count, counts, counts, np.array(lost)))
        return launched

    @property
    def counters(self) -> dict[str, int]:
        return {}

    def close(self, timeout_s: float) -> bool:
        return True


def lost_and_sent_later(here: Here, side: str) -> list[Tensor]:
    """What the network has lost is added to the next step's gradients, by residuals of the device."""
    from paceline_lossy import BoundedLoss

    name = [secrets.token_hex(8)]
    dist.broadcast_object_list(name, 0)
    reduction = BoundedLoss(0.5, compensation="feedback", connect=functools.partial(_EveryThird, name[0]))
    return steps(here, wrapped(made(Mlp, here), here, side, reduction=reduction))


@contextlib.contextmanager
def _servers(here: Here) -> Iterator[Any]:
    """`ParameterServers` of two servers, which are threads of rank 0."""
    from paceline_servers import ParameterServers

    running: Any = in_threads(2) if here.rank == 0 else contextlib.nullcontext([])
    with running as addresses:
        told = [addresses]
        dist.broadcast_object_list(told, 0)
        yield ParameterServers(told[0])
        late.drain()
        dist.barrier()


def parameter_servers(here: Here, side: str) -> list[Tensor]:
    """Gradients are summed by servers."""
    with _servers(here) as servers:
        return steps(here, wrapped(made(Mlp, here), here, side, reduction=servers))


def servers_that_step(here: Here, side: str) -> list[Tensor]:
    """They step AdamW as well, and ranks get parameters; then its state is read."""
    from paceline_servers import ServerOptimizer

    with _servers(here) as servers:
        model = wrapped(made(Mlp, here), here, side, reduction=servers)
        optimizer = ServerOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), model)
        found = steps(here, model, optimizer)
        return [*found, *(each["exp_avg"] for each in optimizer.state_dict()["state"].values())]


def lossy_servers(here: Here, side: str) -> list[Tensor]:
    """Datagrams carry gradients to servers, and none may be lost."""
    from paceline_lossy import BoundedLoss

    with _servers(here) as servers:
        reduction = BoundedLoss(0.0, servers=servers)
        return steps(here, wrapped(made(Mlp, here), here, side, reduction=reduction))


def local_steps(name: str, **options: Any) -> Callable[[Here, str], list[Tensor]]:
    """An optimizer that averages parameters every other step, and not gradients."""

    def case(here: Here, side: str) -> list[Tensor]:
        import paceline_recipes

        model = made(Mlp, here)
        inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=False)
        optimizer = getattr(paceline_recipes, name)(inner, every=2, process_group=here.group, **options)
        return steps(here, model, optimizer)

    return case


def adasum_optimizer(here: Here, side: str) -> list[Tensor]:
    """What optimizers did is combined, during backward."""
    from paceline_adasum import AdasumOptimizer

    model = made(Mlp, here)
    inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=False)
    return steps(here, model, AdasumOptimizer(inner, here.group, overlap=True))


CASES: dict[str, Callable[[Here, str], list[Tensor]]] = {
    "overlapped": overlapped,
    "dropped overlap": dropped_overlap,
    "sharded": sharded,
    "sharded, overlapped": sharded_overlapped,
    "sharded, compressed": sharded_compressed,
    "weighed": weighed,
    "late gradients": late_gradients,
    "accumulated window": accumulated_window,
    "read on another stream": read_on_another_stream,
    "failed step": failed_step,
    "failed step, overlapped": failed_overlap,
    "two streams": _two_streams(overlaps=False),
    "two streams, overlapped": _two_streams(overlaps=True),
    "hooks on two streams": _two_streams(overlaps=False, hooks_as_well=True),
    "hooks on two streams, overlapped": _two_streams(overlaps=True, hooks_as_well=True),
    "dropped work": dropped_work,
    "low rank": low_rank,
    "lost and sent later": lost_and_sent_later,
    "parameter servers": parameter_servers,
    "servers that step": servers_that_step,
    "lossy servers": lossy_servers,
    "adasum optimizer": adasum_optimizer,
    "local SGD": local_steps("LocalSGD"),
    "DiLoCo": local_steps("DiLoCo", compression="bf16"),
    "compressed and sparse": sparse(compression="bf16"),
    "kept residuals": kept_residuals,
    **{f"shortened {name}": shortened(name) for name in ("onebit", "randomk")},
}

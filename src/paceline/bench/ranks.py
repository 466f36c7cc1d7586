"""How are N real ranks started, watched and stopped?

Each rank is a spawned process with one thread and a Gloo group over loopback. The parent keeps the
rendezvous store (port 0: the kernel picks a free one), draws the progress bar, and gets every rank's
result. If one rank fails, the others are stopped.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import multiprocessing

from paceline.bench.errors import RankFailedError
from paceline.bench.protocol.progress import progress_bar

Config = TypeVar("Config")
Result = TypeVar("Result")
TellProgress = Callable[[float], None]  # the share of the work that is done, 0 to 1
Task = Callable[[Config, TellProgress], Result]

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
COLLECTIVE_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class _Progress:
    done_ratio: float


@dataclass(frozen=True)
class _Finished:
    rank: int
    result: Any


def run_on_ranks(
    task: Task[Config, Result],
    config: Config,
    num_ranks: int,
    title: str,
    environment: Mapping[str, str] | None = None,
) -> list[Result]:
    """Run `task(config, tell_progress)` on `num_ranks` fresh processes and return the results by rank.

    Args:
        task: A function at the top level of a module (it is pickled), called inside a Gloo group.
        config: The same for every rank.
        num_ranks: How many processes.
        title: What the progress bar says.
        environment: Variables of the processes, besides one thread per rank and loopback.

    Raises:
        RankFailedError: a rank raised or died; carries its traceback.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    messages = multiprocessing.get_context("spawn").SimpleQueue()
    results: dict[int, Result] = {}
    with _environment({**ONE_THREAD, **(environment or {})}), progress_bar(title) as show:
        processes = multiprocessing.spawn(
            _rank_main, (num_ranks, store.port, messages, task, config), nprocs=num_ranks, join=False
        )
        try:
            while not processes.join(timeout=0.1):
                _drain(messages, results, show)
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            raise RankFailedError(
                f"rank {error.error_index} of {num_ranks} failed in {title!r}. {error}"
            ) from error
        _drain(messages, results, show)
    return [results[rank] for rank in range(num_ranks)]


def gather(value: Result) -> list[Result]:
    """Return every rank's value, on every rank. Collective; call it outside timed regions."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _drain(
    messages: "SimpleQueue[_Progress | _Finished]", results: dict[int, Any], show: TellProgress
) -> None:
    while not messages.empty():
        message = messages.get()
        if isinstance(message, _Finished):
            results[message.rank] = message.result
        else:
            show(message.done_ratio)


def _rank_main(
    rank: int,
    num_ranks: int,
    store_port: int,
    messages: "SimpleQueue[_Progress | _Finished]",
    task: Task[Any, Any],
    config: Any,
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=COLLECTIVE_TIMEOUT)

    def tell(done_ratio: float) -> None:
        if rank == 0:
            messages.put(_Progress(done_ratio))

    try:
        messages.put(_Finished(rank, task(config, tell)))
    finally:
        dist.destroy_process_group()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

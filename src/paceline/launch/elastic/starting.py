"""Starts ranks: the script's command, the environment that torchrun would give, and the stores in which they meet."""

from __future__ import annotations

import os
import socket
from collections import deque
from dataclasses import replace

import torch.distributed as dist
from torch.distributed import run as torchrun

from paceline.elastic.agent_connection import LOST_AFTER
from paceline.host.addresses import LOOPBACK
from paceline.launch.command_line import LaunchArguments
from paceline.launch.elastic.local_ranks import Source
from paceline.launch.elastic.output import Output, Outputs
from paceline.launch.elastic.plan import Address, Start
from paceline.launch.elastic.rank_process import RankProcess

_BACKLOG = 2048
_KEPT = 4  # a rank may still write into the store of the membership that it leaves


class EpochStores:
    """Stores for the ranks of one membership each, on an address of this host."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._open: deque[tuple[int, Address, dist.Store]] = deque(maxlen=_KEPT)

    def of(self, epoch: int) -> Address:
        """Return the address of this epoch's store, and open it at the first call. Earlier ones are closed in time."""
        if not self._open or self._open[-1][0] != epoch:
            store = listening_store(self._host)
            self._open.append((epoch, Address(self._host, store.port), store))
        return self._open[-1][1]


def listening_store(host: str) -> dist.TCPStore:
    """Return a store that listens on this address alone, at a port that the kernel chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class Starter(Source):
    """Starts processes of the script; `host` is the address of this host that ranks reach."""

    def __init__(self, arguments: LaunchArguments) -> None:
        args = arguments.torchrun
        self.host: str = args.local_addr or LOOPBACK
        self._arguments = arguments
        config, command, words = torchrun.config_from_args(args)
        self._run_id, self._command = config.run_id, [str(command), *words]
        self._outputs = Outputs(config, arguments.num_local_ranks)
        self._stores: deque[dist.TCPStore] = deque(maxlen=_KEPT * arguments.num_local_ranks)
        self._num_starts = 0

    def new_store(self) -> Address:
        """Open a store where the ranks of one start meet. Each has its own: a store keeps dead ranks' addresses."""
        self._stores.append(listening_store(self.host))
        return Address(self.host, self._stores[-1].port)

    def start_all(self, start: Start | None) -> list[RankProcess]:
        """Start all ranks of this host. They meet as under torchrun; `start` None: the job has begun without them."""
        size = self._arguments.num_local_ranks
        if start is None:
            return [self.start_one(local_rank) for local_rank in range(size)]
        number, start = self._next(), replace(start, store=start.store or self.new_store())
        outputs = self._outputs.of_start(number, range(size))
        return [
            self._start(number, local_rank, size, start, outputs[local_rank]) for local_rank in range(size)
        ]

    def start_one(self, local_rank: int) -> RankProcess:
        """Start a rank that is alone until a membership takes it in."""
        number = self._next()
        output = self._outputs.of_start(number, [local_rank])[local_rank]
        return self._start(number, local_rank, 1, Start(0, 1, 0, 1, self.new_store()), output)

    def close(self) -> None:
        """Show the rest of the processes' output. All processes have ended."""
        self._outputs.close()

    def _next(self) -> int:
        self._num_starts += 1
        return self._num_starts - 1

    def _start(self, number: int, local_rank: int, size: int, start: Start, output: Output) -> RankProcess:
        assert start.store is not None
        rank = start.first_rank + (local_rank if size > 1 else 0)
        numbers = {
            "LOCAL_RANK": local_rank,
            "RANK": rank,
            "GROUP_RANK": start.host,
            "ROLE_RANK": rank,
            "LOCAL_WORLD_SIZE": size,
            "WORLD_SIZE": start.num_ranks,
            "GROUP_WORLD_SIZE": start.num_hosts,
            "ROLE_WORLD_SIZE": start.num_ranks,
            "MASTER_PORT": start.store.port,
            "TORCHELASTIC_RESTART_COUNT": number,
            "TORCHELASTIC_MAX_RESTARTS": 0,
        }
        texts = {
            "MASTER_ADDR": start.store.host,
            "ROLE_NAME": self._arguments.torchrun.role,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": str(self._run_id),
            LOST_AFTER: f"{self._arguments.lost_after_s:g}",
            **output.environment,
        }
        environment = {**os.environ, **{name: str(value) for name, value in numbers.items()}, **texts}
        command = [word.replace("${local_rank}", str(local_rank)) for word in self._command]
        return RankProcess(command, environment, output)

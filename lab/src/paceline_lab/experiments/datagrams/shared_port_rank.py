"""A rank of `shared_port`: sums without a pause, and from the last host a TCP connection to the first."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from paceline_lossy import Bound, open_lossy_transport
from paceline_lossy.lossy_transport import LossyTransport

_UNDER_WAY = 4
_ALONE_S = 1.0  # before TCP begins
_PAYLOAD, _SEGMENT, _FRAME = 1432, 1448, 1514


def main() -> None:
    """Read the case from the command line; rank 0 prints what arrived at its port."""
    case = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), case["ranks"]
    store = dist.PrefixStore("benchmark", dist.distributed_c10d._get_default_store())
    if rank < ranks:
        link = open_lossy_transport(store, rank, ranks, timedelta(seconds=120))
        if rank == 0:
            print(json.dumps(_Receiver(store, case).sums(link)), flush=True)
        else:
            _sums(link, case)
        link.close(5.0)
    else:
        _send(store)
    dist.barrier()
    dist.destroy_process_group()


def _sums(link: LossyTransport, case: dict[str, Any], receiver: _Receiver | None = None) -> None:
    """Sum vectors, a few at once, until the first rank puts something into one."""
    under_way: deque[Any] = deque()
    while True:
        vector = np.zeros(int(case["megabytes"] * 250_000), np.float32)
        vector[0] = receiver is not None and receiver.is_over
        under_way.append((vector, link.launch(vector, Bound(0))))
        if len(under_way) > _UNDER_WAY:
            done, launched = under_way.popleft()
            launched.wait()
            if receiver:
                receiver.num_sums += 1
            if done[0]:
                break
    for _, launched in under_way:
        launched.wait()


def _send(store: dist.Store) -> None:
    with socket.create_connection((os.environ["MASTER_ADDR"], int(store.get("port")))) as connection:
        block = bytes(1 << 18)
        try:
            while True:
                connection.sendall(block)
        except OSError:
            return


class _Receiver:
    """The first rank: what arrives at its port, second by second."""

    def __init__(self, store: dist.Store, case: dict[str, Any]) -> None:
        self._case, self._store = case, store
        self.num_sums, self.is_over = 0, False
        self._tcp_bytes = 0

    def sums(self, link: LossyTransport) -> list[dict[str, float]]:
        """Mbit/s on the wire, as they arrive."""
        found: list[dict[str, float]] = []
        watch = threading.Thread(target=self._watch, args=(found,))
        watch.start()
        _sums(link, self._case, self)
        watch.join()
        return found

    def _watch(self, found: list[dict[str, float]]) -> None:
        ranks = self._case["ranks"]
        a_sum = 2 * (ranks - 1) / ranks * self._case["megabytes"] * 8 * _FRAME / _PAYLOAD
        time.sleep(_ALONE_S)
        with socket.create_server((os.environ["MASTER_ADDR"], 0)) as server:
            self._store.set("port", str(server.getsockname()[1]))
            connection, _ = server.accept()
        taker = threading.Thread(target=self._take, args=(connection,))
        taker.start()
        before = time.perf_counter(), self.num_sums, self._tcp_bytes
        for _ in range(self._case["seconds"]):
            time.sleep(1.0)
            now = time.perf_counter(), self.num_sums, self._tcp_bytes
            took_s, sums, received = (new - old for new, old in zip(now, before, strict=True))
            tcp_mbit = received * 8e-6 * _FRAME / _SEGMENT
            found.append({"ours_mbit": sums * a_sum / took_s, "tcp_mbit": tcp_mbit / took_s})
            before = now
        connection.shutdown(socket.SHUT_RDWR)
        taker.join()
        connection.close()
        self.is_over = True

    def _take(self, connection: socket.socket) -> None:
        memory = bytearray(1 << 18)
        while got := connection.recv_into(memory):
            self._tcp_bytes += got


if __name__ == "__main__":
    main()

"""A rank of `emulated_network`: sums, or pushes to rank 0, by each side in turn; rank 0 prints ms."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.rendezvous import Rendezvous
from paceline_lossy import Bound
from paceline_lossy.connecting import datagram_address
from paceline_lossy.datagrams.lossy_link import LossyLink
from paceline_lossy.datagrams.udp_socket import find_members


def main() -> None:
    """Read the case from the command line, take turns between the sides."""
    case = json.loads(sys.argv[1])
    is_push = case["is_push"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("benchmark", dist.distributed_c10d._get_default_store())
    timeout = timedelta(seconds=120)
    meeting = Rendezvous(store, rank, ranks, timeout, "connecting to sum over UDP")
    link = LossyLink(rank, find_members(meeting, datagram_address(ranks)), timeout, num_servers=int(is_push))
    vector = torch.ones(case["num_bytes"] // 4)
    incoming = [torch.empty_like(vector) for _ in range(1, ranks)] if is_push and rank == 0 else []
    samples: dict[str, list[float]] = {"Gloo": [], **{side: [] for side in case["bounds"]}}
    for repeat in range(case["repeats"] + 1):  # the first is a warm-up
        for side, taken in samples.items():
            vector.fill_(1.0)
            receives: list[Any] = []
            if side == "Gloo":
                receives = [dist.irecv(buffer, peer) for peer, buffer in enumerate(incoming, 1)]
            link.launch(torch.zeros(1).numpy(), Bound(0)).wait()  # begin together
            begun_s = time.perf_counter()
            if side != "Gloo":
                link.launch(vector.numpy(), Bound(case["bounds"][side])).wait()
            elif not is_push:
                dist.all_reduce(vector)
            elif rank:
                dist.send(vector, 0)
            for receive in receives:
                receive.wait()
            if repeat:
                taken.append((time.perf_counter() - begun_s) * 1e3)
            assert (side == "Gloo" and is_push) or bool((vector == ranks - is_push).all())
    if rank == 0:
        print(json.dumps(samples), flush=True)
    link.close(5.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

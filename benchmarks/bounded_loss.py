"""How long does a sum over emulated hosts take where packets are lost: bounded loss over UDP, and Gloo over TCP?

Sides alternate call by call within one job. Gloo runs with the cluster's TCP: cubic as the kernel has it, or `--tuned`,
BBR with a smallest retransmission timeout of 5 ms; each is a cluster of its own, ours is measured in both.

    python -m benchmarks.bounded_loss --hosts 4 --rate 100mbit --loss 1% --megabytes 1

What it cannot show: all hosts share this machine's cores; see "busy" in the output, and repeat what is above 90 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta

BOUNDS = {"ours, bound 0": 0.0, "ours, bound 5 %": 0.05}


def main() -> None:
    """Read arguments, run one job for each TCP, print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--loss", default="1%")
    parser.add_argument("--delay", default=None, help="one way")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _rank(options.megabytes, options.repeats)
        return
    from paceline.lab.emulation import ClusterSpec, EmulatedCluster

    for tuned in (False, True):
        spec = ClusterSpec.parse(
            hosts=options.hosts,
            rate=options.rate,
            loss=options.loss,
            delay=options.delay,
            mtu=options.mtu,
            congestion_control="bbr" if tuned else "cubic",
            min_rto="5ms" if tuned else None,
        )
        found: list[dict[str, list[float]]] = []

        def take(host: int, rank: int | None, text: str, found: list[dict[str, list[float]]] = found) -> None:
            if text.startswith("{"):
                found.append(json.loads(text))
            elif rank is not None:
                print(f"[host{host}] {text}", file=sys.stderr)

        again = ["--rank", "--megabytes", str(options.megabytes), "--repeats", str(options.repeats)]
        with EmulatedCluster(spec) as cluster:
            outcome = cluster.run([__file__, *again], on_line=take, timeout_s=500)
        load = os.getloadavg()[0]
        print(
            f"TCP {'bbr, rto_min 5 ms' if tuned else 'cubic'}; busy {outcome.busy_ratio:.0%}, load {load:.1f}"
        )
        if outcome.exit_code:
            print(outcome.failure())
            return
        for side, samples in found[0].items():
            worst = max(samples)
            print(f"  {side:16s} median {statistics.median(samples):8.1f} ms   worst {worst:8.1f} ms")


def _rank(megabytes: float, repeats: int) -> None:
    """Sum a vector by each side in turn; rank 0 prints milliseconds."""
    import torch
    import torch.distributed as dist

    from paceline.process_group.connections import open_lossy_transport
    from paceline.transports import Bound

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("benchmark", dist.distributed_c10d._get_default_store())
    link = open_lossy_transport(store, rank, ranks, timedelta(seconds=120))
    vector = torch.ones(int(megabytes * 250_000))
    samples: dict[str, list[float]] = {"Gloo": [], **{side: [] for side in BOUNDS}}
    for repeat in range(repeats + 1):  # the first is a warm-up
        for side, taken in samples.items():
            vector.fill_(1.0)
            link.launch(torch.zeros(1).numpy(), Bound(0)).wait()  # begin together
            begun_s = time.perf_counter()
            if side == "Gloo":
                dist.all_reduce(vector)
            else:
                link.launch(vector.numpy(), Bound(BOUNDS[side])).wait()
            if repeat:
                taken.append((time.perf_counter() - begun_s) * 1e3)
            assert bool((vector == ranks).all())
    if rank == 0:
        print(json.dumps(samples), flush=True)
    link.close(5.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

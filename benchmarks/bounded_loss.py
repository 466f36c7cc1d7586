"""How long does a sum over emulated hosts take where packets are lost: bounded loss over UDP, and Gloo over TCP?

Sides alternate call by call within one job. Gloo runs with the cluster's TCP: cubic as the kernel has it, or BBR with a
smallest retransmission timeout of 5 ms; each is a cluster of its own (`--tcp` for one), ours is measured in both.

    python -m benchmarks.bounded_loss --hosts 4 --rate 100mbit --loss 1% --megabytes 1

With `--layers 6` it is instead how long the first layer's gradient takes, which is launched last, behind so many
others of `--megabytes` each, while a TCP connection loads the network: with priorities, and without.

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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.transports.lossy_transport import LossyTransport

BOUNDS = {"ours, bound 0": 0.0, "ours, bound 5 %": 0.05}
GLOO, DATAGRAMS = "Gloo", "backend by datagrams"
FRONT_BYTES = 250_000


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
    parser.add_argument("--tcp", choices=("cubic", "tuned", "both"), default="both")
    parser.add_argument("--layers", type=int, default=0, help="measure priorities, behind so many layers")
    parser.add_argument("--without-switch", action="store_true", help="priorities that the ports do not know")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _rank(options)
        return
    for tuned in {"both": (False, True), "cubic": (False,), "tuned": (True,)}[options.tcp]:
        _measure(options, tuned)


def _measure(options: argparse.Namespace, tuned: bool) -> None:
    """Run a job on a cluster, and print what its first rank says."""
    from paceline.lab.emulation import ClusterSpec, EmulatedCluster

    has_classes = options.layers > 0 and not options.without_switch
    spec = ClusterSpec.parse(
        hosts=options.hosts,
        rate=options.rate,
        loss=options.loss,
        delay=options.delay,
        mtu=options.mtu,
        congestion_control="bbr" if tuned else "cubic",
        min_rto="5ms" if tuned else None,
        priority=has_classes,
        mark="60KB" if has_classes else None,
        drop="60KB" if has_classes else None,
    )
    found: list[dict[str, list[float]]] = []

    def take(host: int, rank: int | None, text: str) -> None:
        if text.startswith("{"):
            found.append(json.loads(text))
        elif rank is not None:
            print(f"[host{host}] {text}", file=sys.stderr)

    again = ["--rank", "--megabytes", str(options.megabytes), "--repeats", str(options.repeats)]
    again += ["--layers", str(options.layers)]
    with EmulatedCluster(spec) as cluster:
        outcome = cluster.run([__file__, *again], on_line=take, timeout_s=500)
    load = os.getloadavg()[0]
    print(f"TCP {'bbr, rto_min 5 ms' if tuned else 'cubic'}; busy {outcome.busy_ratio:.0%}, load {load:.1f}")
    if outcome.exit_code:
        print(outcome.failure())
        return
    for side, samples in found[0].items():
        worst = max(samples)
        print(f"  {side:26s} median {statistics.median(samples):8.1f}   worst {worst:8.1f}")


def _rank(options: argparse.Namespace) -> None:
    """Do a rank's part; rank 0 prints milliseconds, and milliseconds of the processor."""
    import torch
    import torch.distributed as dist

    from paceline.process_group.connections import open_lossy_transport

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("benchmark", dist.distributed_c10d._get_default_store())
    link = open_lossy_transport(store, rank, ranks, timedelta(seconds=120))
    samples = _layers(link, options, rank) if options.layers else _sums(link, options, ranks)
    if rank == 0:
        print(json.dumps(samples), flush=True)
    link.close(5.0)
    dist.destroy_process_group()


def _sums(link: LossyTransport, options: argparse.Namespace, ranks: int) -> dict[str, list[float]]:
    """Sum a vector by each side in turn."""
    import torch
    import torch.distributed as dist

    from paceline.transports import Bound

    os.environ["PACELINE_BETWEEN_HOSTS"] = "udp"
    backend = dist.new_group(backend="paceline", timeout=timedelta(seconds=120))
    vector = torch.ones(int(options.megabytes * 250_000))
    sides = [GLOO, DATAGRAMS, *BOUNDS]
    samples: dict[str, list[float]] = {f"{side}{what}": [] for what in (" ms", " CPU ms") for side in sides}
    for repeat in range(options.repeats + 1):  # the first is a warm-up
        for side in sides:
            vector.fill_(1.0)
            link.launch(torch.zeros(1).numpy(), Bound(0)).wait()  # begin together
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            if side == GLOO:
                dist.all_reduce(vector)
            elif side == DATAGRAMS:
                dist.all_reduce(vector, group=backend)
            else:
                link.launch(vector.numpy(), Bound(BOUNDS[side])).wait()
            if repeat:
                samples[f"{side} ms"].append((time.perf_counter() - begun_s) * 1e3)
                samples[f"{side} CPU ms"].append((time.process_time() - begun_cpu_s) * 1e3)
            assert bool((vector == ranks).all())
    return samples


def _layers(link: LossyTransport, options: argparse.Namespace, rank: int) -> dict[str, list[float]]:
    """Launch a step's gradients, the first layer's last, and time that one; the same without priorities in turn."""
    import threading

    import torch
    import torch.distributed as dist

    from paceline.transports import Bound

    load = dist.new_group(backend="gloo")
    is_over = threading.Event()

    def load_the_port() -> None:  # rank 1 sends to rank 0, and so into a port that all send to
        block = torch.zeros(64 * 1024)
        while rank == 0 and not block[0]:
            dist.recv(block, 1, group=load)
        while rank == 1 and not block[0]:
            block.fill_(float(is_over.is_set()))  # the last one says so
            dist.send(block, 0, group=load)

    threads = [threading.Thread(target=load_the_port)] if rank < 2 else []
    for thread in threads:
        thread.start()
    backs = [torch.ones(int(options.megabytes * 250_000)).numpy() for _ in range(options.layers)]
    front = torch.ones(FRONT_BYTES // 4).numpy()
    names = ("without priorities", "with priorities")
    samples: dict[str, list[float]] = {
        f"{what}, {name}, ms": [] for what in ("first layer", "all") for name in names
    }
    for repeat in range(options.repeats + 1):
        for name in names:
            has_classes = name == names[1]
            link.launch(torch.zeros(1).numpy(), Bound(0)).wait()
            begun_s = time.perf_counter()
            classes = [1 + i * 3 // options.layers for i in range(options.layers)]
            launched = [
                link.launch(back, Bound(0.05, priority=level * has_classes))
                for back, level in zip(backs, classes, strict=True)
            ]
            link.launch(front, Bound(0.05, priority=5 * has_classes)).wait()
            front_s = time.perf_counter() - begun_s
            for one in launched:
                one.wait()
            if repeat:
                samples[f"first layer, {name}, ms"].append(front_s * 1e3)
                samples[f"all, {name}, ms"].append((time.perf_counter() - begun_s) * 1e3)
    link.launch(torch.zeros(1).numpy(), Bound(0)).wait()
    is_over.set()
    for thread in threads:
        thread.join(20)
    return samples


if __name__ == "__main__":
    main()

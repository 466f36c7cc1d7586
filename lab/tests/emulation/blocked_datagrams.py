"""A rank of `test_blocked_datagrams`: its host drops what a router with a small MTU drops."""

import json
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline import DistributedDataParallel
from paceline_lossy import BoundedLoss

VICTIM = 1
# A socket filter that drops IP packets of UDP (protocol 17) longer than 1,000 bytes.
LONG_UDP = "6,48 0 0 23,21 0 3 17,128 0 0 0,37 0 1 1000,6 0 0 2,6 0 0 4294967295"


def tc(*words):
    subprocess.run(["tc", *words], check=True)


def device():
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    names = [
        line.split(":")[1].strip().split("@")[0] for line in links.splitlines() if "LOOPBACK" not in line
    ]
    return names[0]


def drop(what):
    tc("qdisc", "add", "dev", device(), "clsact")
    for way in ("egress", "ingress"):
        tc("filter", "add", "dev", device(), way, "bpf", "da", "bytecode", what)


def behind_a_small_mtu(rank):
    """What the error says where a step has been through, and then long datagrams are lost."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=6))
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Linear(64, 256), reduction=BoundedLoss(0.05), process_group=group
    )
    model(torch.randn(8, 64)).square().mean().backward()
    dist.barrier()
    if rank == VICTIM:
        drop(LONG_UDP)
    dist.barrier()
    try:
        model(torch.randn(8, 64)).square().mean().backward()
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": "none"}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(json.dumps({"rank": rank, **behind_a_small_mtu(rank)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()

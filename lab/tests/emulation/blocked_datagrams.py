"""A rank of `test_blocked_datagrams`: its host drops what a firewall, and then what a router with a small MTU drops."""

import json
import os
import subprocess
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline import DistributedDataParallel
from paceline.process_group import path_between_hosts
from paceline.reductions import BoundedLoss

VICTIM = 1
# Socket filters that drop: IP packets of protocol 17; those of UDP longer than 1,000 bytes.
UDP = "4,48 0 0 23,21 0 1 17,6 0 0 2,6 0 0 4294967295"
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


def behind_a_firewall():
    """The sum over the backend, and what it says; by rank 0's words, in the environment, by datagrams."""
    path_between_hosts.HANDSHAKE_S = 3.0
    group = dist.new_group(backend="paceline", timeout=timedelta(seconds=60))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = torch.ones(1000)
        dist.all_reduce(values, group=group)
        explained = group.explain(1000)
    said = [str(warning.message) for warning in caught if path_between_hosts.PATH in str(warning.message)]
    dist.destroy_process_group(group)
    return {"sum": values.unique().tolist(), "explained": explained, "said": said}


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
    os.environ["PACELINE_LINKS"] = "within=2e-5/4e9 between=1e-4/1e9"
    os.environ["PACELINE_BETWEEN_HOSTS"] = "udp"
    if rank == VICTIM:
        drop(UDP)
    dist.barrier()
    told = behind_a_firewall()
    dist.barrier()
    if rank == VICTIM:
        tc("qdisc", "del", "dev", device(), "clsact")
    dist.barrier()
    told |= behind_a_small_mtu(rank)
    print(json.dumps({"rank": rank, **told}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()

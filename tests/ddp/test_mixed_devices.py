"""Ranks on CPUs and ranks on accelerators in one job: what is chosen by the device is chosen for all of them."""

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.models import generator
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.ddp import replicas

pytestmark = pytest.mark.processes

MANY_HOSTS = "1"


def trained(rank, num_ranks, local_ranks, accelerated):
    """Buckets and gradients of ranks of which those in `accelerated` say that they are on an accelerator."""
    cpu, accelerator = torch.device("cpu"), torch.device("cuda")

    def says(described, group, peers, _device, number, _knows_beside):
        claimed = accelerator if rank in accelerated else cpu
        return replicas.verify(described, group, peers, claimed, number)

    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": local_ranks, "WORLD_SIZE": str(num_ranks)}),
        mock.patch("paceline.ddp.coordinator.verify", says),
        mock.patch("paceline.ddp.replicas.device_for_metadata", return_value=cpu),
    ):
        group = dist.new_group(timeout=timedelta(seconds=20))
        torch.manual_seed(0)
        layers = [torch.nn.Linear(550, 550, bias=False) for _ in range(4)]  # 1.15 MiB each
        model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
    for step in range(3):  # buckets are cut anew after the first
        model.zero_grad()
        model(torch.randn(2, 550, generator=generator(rank, step))).square().mean().backward()
    is_script_s = model.reducer.process_groups[0] is group
    buckets = [bucket.size_bytes for bucket in model.reducer.buckets]
    return buckets, is_script_s, [p.grad.sum().item() for p in model.parameters()]


def test_ranks_on_different_devices_cut_the_same_buckets():
    """The cap of several hosts' CPUs is a 48th of the gradients, an accelerator's 25 MiB: any CPU decides for all."""
    layer_bytes = 550 * 550 * 4
    for accelerated, sizes in (
        ((), [layer_bytes] * 4),
        ((1,), [layer_bytes] * 4),
        ((0,), [layer_bytes] * 4),
        ((0, 1), [layer_bytes, 3 * layer_bytes]),
    ):
        (ours, _, gradient), (theirs, _, other) = pool(2).run(trained, MANY_HOSTS, accelerated)
        assert ours == theirs == sizes, accelerated
        assert gradient == other, accelerated


def test_shared_memory_carries_gradients_only_if_all_have_theirs_there():
    """On one host a rank with an accelerator cannot come to the group that the others would open without it."""
    for accelerated, stays in (((), False), ((1,), True), ((0,), True)):
        outcomes = pool(2).run(trained, "2", accelerated)
        assert [is_script_s for _, is_script_s, _ in outcomes] == [stays, stays], accelerated

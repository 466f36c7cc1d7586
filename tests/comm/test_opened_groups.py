"""Groups that Paceline opens have names of their own, whatever else was opened and closed before, and by whom."""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.models import digest
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.comm.connections import connected
from paceline.comm.opened_groups import abort_on, close, end_aside, group_like

pytestmark = pytest.mark.processes
PATIENT = timedelta(seconds=60)


def total_over(group):
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    return ones.item()


def overlapped(group=None, middle=nn.Tanh):
    net = nn.Sequential(nn.Linear(4, 8), middle(), nn.Linear(8, 2))
    return DistributedDataParallel(net, process_group=group, overlap_forward="always")


def bits_after_a_step(model):
    model.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
    return digest([p.grad for p in model.parameters()])


def drop(models):
    del models[:]
    gc.collect()


def dropped_and_wrapped_anew(part, other):
    kept = [overlapped(part), overlapped(part)]
    dist.destroy_process_group(other)
    kept.append(overlapped(part))
    drop(kept[:1])
    kept.append(overlapped(part))
    return [bits_after_a_step(model) for model in kept]


def closed_by_hand(part, other):
    kept = [group_like(part, "gloo"), group_like(part, "gloo")]
    close(kept.pop(0))
    dist.destroy_process_group(other)
    kept += [group_like(part, "gloo"), group_like(part, "paceline")]
    return [total_over(group) for group in kept]


def destroyed_by_torch(part, other):
    kept = [group_like(part, "gloo"), group_like(part, "gloo")]
    dist.destroy_process_group(kept.pop(0))
    dist.destroy_process_group(other)
    kept += [group_like(part, "gloo"), group_like(part, "gloo")]
    return [total_over(group) for group in kept]


def rebuilt(part, other):
    model, kept = overlapped(part), [overlapped(part)]
    bits = []
    for group in (other, part, other):
        model.membership.rebuild(group)
        bits.append(bits_after_a_step(model))
    model.membership.rebuild(part)
    dist.destroy_process_group(other)
    model.membership.rebuild(part)
    kept.append(overlapped(part))
    return [*bits, bits_after_a_step(model), *map(bits_after_a_step, kept)]


def normalized_over_ranks(part, other):
    kept = [DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8)), process_group=part)]
    dist.destroy_process_group(other)
    kept += [overlapped(part, lambda: nn.SyncBatchNorm(8)), overlapped(part)]
    return [bits_after_a_step(model) for model in kept]


def in_a_part(rank, _num_ranks, how):
    """Rank 0 is in a group more than rank 1: torch names groups over a part by how many a rank has."""
    part, other = dist.new_group([0, 1], PATIENT), dist.new_group([0, 1], PATIENT)
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    return how(part, other) if rank < 2 else None


@pytest.mark.parametrize(
    "how", [dropped_and_wrapped_anew, closed_by_hand, destroyed_by_torch, rebuilt, normalized_over_ranks]
)
def test_no_name_is_given_twice(how):
    """Over two of three ranks, with groups of Paceline's and of the script's that were closed in between."""
    first, second, _ = pool(3).run(in_a_part, how, deadline_s=100.0)
    assert first == second


def closed_on_one_rank(rank, _num_ranks):
    kept = [overlapped(), overlapped()]
    if rank == 0:
        drop(kept)
    groups = [dist.new_group([0, 1], PATIENT, use_local_synchronization=True) for _ in range(2)]
    found = [total_over(group) for group in groups]
    drop(kept)
    return found


def test_the_scripts_groups_keep_their_names_while_models_are_dropped():
    """Ranks drop models at different times; torch names the script's groups by how many there are."""
    assert pool(2).run(closed_on_one_rank, deadline_s=100.0) == [[2.0, 2.0]] * 2


def opened_for_gradients(rank, num_ranks):
    dist.all_reduce(torch.ones(1))  # torch's group is connected
    before = connected()
    group = group_like(dist.group.WORLD, "paceline")
    total, is_alone = total_over(group), connected() == before
    rows = [torch.empty(1) for _ in range(num_ranks)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), rows, group=group)
    return is_alone, total, len(connected()) > len(before), rows and torch.cat(rows).tolist()


def test_a_group_beside_another_connects_only_for_what_needs_it():
    """Sums go through shared memory; a gather, which Gloo does, connects the ranks when it comes."""
    first, second = pool(2).run(opened_for_gradients)
    assert first == (True, 2.0, True, [0.0, 1.0])
    assert second[:3] == (True, 2.0, True)


def ended_aside(_rank, _num_ranks):
    groups = [dist.new_group(backend="paceline") for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
        dist.barrier(group)
    dist.barrier()  # no rank is in one of them any more
    lanes = [group._lane._thread for group in groups]
    for group in groups:
        end_aside(group)
    for lane in filter(None, lanes):
        lane.join(20.0)
    ended = [not lane.is_alive() for lane in filter(None, lanes)]
    for group in groups:
        dist.destroy_process_group(group)
    return ended


def test_what_ends_aside_ends_its_threads():
    """Also where c10d has forgotten the group, and shuts nothing down."""
    for ended in pool(2).run(ended_aside):
        assert ended == [True] * 3


class Backend:
    """A backend that notes what it is told; those of NCCL begin and end one call for several."""

    def __init__(self, name, calls, is_nccl=True):
        self.abort = lambda: calls.append(f"abort {name}")
        if is_nccl:
            self._group_start, self._group_end = lambda: calls.append("start"), lambda: calls.append("end")


class Group:
    def __init__(self, **backends):
        self._backends = backends

    def _get_backend(self, device):
        if device.type not in self._backends:
            raise RuntimeError("no backend for this device")
        return self._backends[device.type]


def test_all_groups_of_a_device_are_aborted_in_one_call(monkeypatch):
    """One by one, two communicators may wait for each other. A group of the host alone is left as it is."""
    calls = []
    host, one, other = Backend("host", calls, is_nccl=False), Backend("one", calls), Backend("other", calls)
    groups = [Group(cpu=host, cuda=one), Group(cpu=host), Group(cuda=other)]
    monkeypatch.setattr(dist.distributed_c10d, "_pg_map", dict.fromkeys(groups))
    abort_on(torch.device("cuda", 0))
    assert calls == ["start", "abort one", "abort other", "end"]

"""The fake NCCL: what each collective gives, NCCL's contract about waiting, and what is noticed when it is broken."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from device import late, nccl
from device.marks import device
from device.nccl import moments
from device.nccl.group import Members
from device.ranks import Here, differences, on_device, ranks

pytestmark = device


def row(here: Here, *shape, scale=1.0, dtype=torch.float32):
    """Differs by rank and by element."""
    numel = torch.Size(shape).numel()
    return here.to_device((torch.arange(numel).reshape(shape) * scale + 10 * here.rank).to(dtype))


def empty(here: Here, *shape):
    return torch.empty(shape, device=here.device)


def reductions(here: Here):
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float64):
            tensor = row(here, 7, dtype=dtype)
            dist.all_reduce(tensor, op, group=here.group)
            found.append(tensor)
    to_rank_1 = row(here, 3)
    dist.reduce(to_rank_1, 1, group=here.group)
    return [*found, to_rank_1 if here.rank else row(here, 3)]


def broadcasts_and_gathers(here: Here):
    sent = row(here, 2, 3)
    dist.broadcast(sent, 1, group=here.group)
    rows = [empty(here, 4) for _ in range(2)]
    dist.all_gather(rows, row(here, 4), group=here.group)
    flat = empty(here, 8)
    dist.all_gather_into_tensor(flat, row(here, 4), group=here.group)
    return [sent, *rows, flat]


def scattered(here: Here):
    part, flat = empty(here, 4), empty(here, 4)
    dist.reduce_scatter(part, [row(here, 4), row(here, 4, scale=2)], group=here.group)
    dist.reduce_scatter_tensor(flat, row(here, 8), group=here.group)
    return [part, flat]


def all_to_all(here: Here):
    """Rank r sends r + 1 rows to rank 0, and two to rank 1."""
    even, uneven = empty(here, 4), empty(here, 3 if here.rank == 0 else 4, 2)
    dist.all_to_all_single(even, row(here, 4), group=here.group)
    received = [1, 2] if here.rank == 0 else [2, 2]
    dist.all_to_all_single(
        uneven, row(here, 3 + here.rank, 2), received, [1 + here.rank, 2], group=here.group
    )
    return [even, uneven]


def messages(here: Here):
    """Both ways, and both at once."""
    sent, got = row(here, 3), empty(here, 3)
    if here.rank == 0:
        dist.send(sent, 1, group=here.group)
        dist.recv(got, 1, group=here.group)
    else:
        dist.recv(got, 0, group=here.group)
        dist.send(sent * 2, 0, group=here.group)
    again = empty(here, 3)
    peer = 1 - here.rank
    calls = [
        dist.P2POp(dist.isend, sent, group=here.group, group_peer=peer),
        dist.P2POp(dist.irecv, again, group=here.group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return [got, again]


def coalesced(here: Here):
    tensors = [row(here, 3), row(here, 5, scale=2)]
    with dist._coalescing_manager(group=here.group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=here.group)
    manager.wait()
    return tensors


COLLECTIVES = {
    each.__name__: each
    for each in (reductions, broadcasts_and_gathers, scattered, all_to_all, messages, coalesced)
}


def performed(rank, _num_ranks, name, schedule):
    return differences(COLLECTIVES[name], rank, "latenccl", schedule)


@pytest.mark.parametrize("schedule", late.SCHEDULES)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_give_what_gloo_gives(name, schedule):
    """Each collective, dtype and reduction, without a race."""
    assert ranks().run(performed, name, schedule) == ["", ""]


# ---- the contract


def launched(rank, _num_ranks):
    """What is so between the launch of an all-reduce and the host's first wait."""
    here = on_device(rank, "latenccl")
    tensor = torch.full((1000,), float(rank + 1), device=here.device)
    with late.scheduled("latest"):
        with late.counted() as causes:
            work = dist.all_reduce(tensor, group=here.group, async_op=True)
            future = work.get_future()
            work.wait()
            doubled = tensor * 2
            done_early = work._end.query()
        found = {"causes": dict(causes), "early": done_early, "future": future.done()}
        (value,) = future.wait()
        found["value"] = (value + 0)[0].item()
        return {
            **found,
            "doubled": doubled[0].item(),
            "completed": work.is_completed(),
            "error": work.exception(),
        }


def test_waiting_orders_the_stream_and_not_the_host():
    """The host goes on, the collective has not run; the future carries the device; then both results are right."""
    assert (
        ranks().run(launched)
        == [
            {
                "causes": {},
                "early": False,
                "future": True,
                "value": 3.0,
                "doubled": 6.0,
                "completed": True,
                "error": None,
            }
        ]
        * 2
    )


def one_rank_s_host_is_away(rank, _num_ranks):
    """Rank 1 launches, and then waits for rank 0 over Gloo only; rank 0 needs the collective's result before."""
    here = on_device(rank, "latenccl")
    tensor = torch.full((10,), float(rank + 1), device=here.device)
    with late.scheduled("latest"):
        dist.all_reduce(tensor, group=here.group, async_op=True).wait()
        value = tensor[0].item() if rank == 0 else None
        dist.barrier()
        return value if rank == 0 else tensor[0].item()


def test_a_device_goes_on_without_its_host():
    """A collective that one rank's device has come to runs on the others, whose hosts do something else."""
    assert ranks().run(one_rank_s_host_is_away) == [3.0, 3.0]


def several_groups(rank, _num_ranks):
    """Two groups have streams of their own: launched in different orders on the ranks, which needs no order between."""
    here = on_device(rank, "latenccl")
    other = dist.new_group(backend="latenccl")
    tensors = [torch.full((10,), float(rank + 1 + i), device=here.device) for i in range(2)]
    pairs = list(zip((here.group, other), tensors, strict=True))
    with late.scheduled("latest"), late.checked():
        works = [dist.all_reduce(t, group=g, async_op=True) for g, t in (pairs if rank else pairs[::-1])]
        for work in works:
            work.wait()
        return [t[0].item() for t in tensors]


def test_groups_do_not_wait_for_each_other():
    assert ranks().run(several_groups) == [[3.0, 5.0]] * 2


def on_two_devices(rank, _num_ranks):
    """One group on the first device, then on the second, where rank 1 is late to take what rank 0 has put."""
    group = on_device(rank, "latenccl") and dist.new_group(backend="latenccl")
    tensors = [torch.full((4,), float(rank + 10 * i), device=torch.device(late.DEVICE, i)) for i in range(2)]
    dist.all_reduce(tensors[0], group=group)
    late.drain()
    unlisten = moments.listen(lambda *_: time.sleep(0.3 * rank))
    dist.all_reduce(tensors[1], group=group)
    late.drain()
    unlisten()
    return [t[0].item() for t in tensors]


def test_a_group_has_a_communicator_for_each_device():
    """Neither finds what the other has left. Ranks that did waited for ever, now and then."""
    assert ranks().run(on_two_devices) == [[1.0, 21.0]] * 2


def launched_by_one(rank, _num_ranks):
    """Rank 1 asks whether its collective is over, before rank 0 launches that."""
    here = on_device(rank, "latenccl")
    tensor = torch.full((4,), float(rank + 1), device=here.device)
    with late.scheduled("latest"):
        works = [dist.all_reduce(tensor, group=here.group, async_op=True)] if rank else []
        answers = [work.is_completed() for work in works for _ in range(6)]
        dist.barrier()  # over Gloo
        for work in works or [dist.all_reduce(tensor, group=here.group, async_op=True)]:
            work.wait()
        return answers, tensor[0].item()


def test_asking_does_not_wait_for_a_peer():
    """Otherwise the host stands in a collective whose peer waits for this host."""
    assert ranks().run(launched_by_one) == [([], 3.0), ([False] * 6, 3.0)]


def behind_another(rank, _num_ranks):
    """Rank 0 launches a second group's collective when it has the first one's result; rank 1 launches both at once."""
    here = on_device(rank, "latenccl")
    first, second = (dist.new_group(backend="latenccl") for _ in range(2))
    one, other = (torch.full((4,), float(rank + number), device=here.device) for number in (1, 10))
    with late.scheduled("others"):
        works = [dist.all_reduce(one, group=first, async_op=True)]
        if rank:
            works.append(dist.all_reduce(other, group=second, async_op=True))
        dist.barrier()  # over Gloo, as the next one
        if not rank:
            works[0].wait()
            one[0].item()
        dist.barrier()
        if not rank:
            works.append(dist.all_reduce(other, group=second, async_op=True))
        for work in works:
            work.wait()
        return one[0].item(), other[0].item()


def test_a_collective_that_nothing_has_demanded_holds_up_no_other():
    """A device runs what it may in any order, and goes on beside a collective that waits for a peer."""
    assert ranks().run(behind_another) == [(3.0, 21.0)] * 2


def with_a_time_limit(rank, _num_ranks):
    """Rank 1 does not come until rank 0 has given up waiting."""
    here = on_device(rank, "latenccl")
    tensor = torch.ones(4, device=here.device)
    message = ""
    if rank == 0:
        work = dist.all_reduce(tensor, group=here.group, async_op=True)
        with pytest.raises(RuntimeError) as raised:
            work.wait(timedelta(seconds=0.2))
        message = str(raised.value)
    dist.barrier()
    if rank == 1:
        work = dist.all_reduce(tensor, group=here.group, async_op=True)
    work.wait(timedelta(seconds=30))
    return message, tensor[0].item()


def test_a_wait_with_a_time_limit_is_the_host_s():
    """It raises after the limit; the collective itself goes on."""
    assert ranks().run(with_a_time_limit) == [("all_reduce was not done after 0.2 s", 2.0), ("", 2.0)]


def failing(rank, _num_ranks):
    """A group of its own fails on rank 0; what each later call says. Rank 1 waits for it until it aborts."""
    on_device(rank, "latenccl")
    group = dist.new_group(backend="latenccl", timeout=timedelta(seconds=0.2))
    tensor = torch.ones(4, device=late.DEVICE)
    told = []
    with late.scheduled("latest"):
        with nccl.broken("failure") if rank == 0 else contextlib.nullcontext():
            work = dist.all_reduce(tensor, group=group, async_op=True)
            work.wait()  # nothing has failed yet
            dist.all_reduce(torch.ones(1))  # the other rank's device, once told to go on, has this one's fail
            if rank == 1:
                return waited_until_aborted(group, work)
            for call in (late.drain, work.wait, lambda: dist.all_reduce(tensor, group=group)):
                with pytest.raises(RuntimeError) as raised:
                    call()
                told.append(str(raised.value).splitlines()[0])
        told.append(type(work.exception()).__name__)
        told.append(work.is_success())
    return told


def waited_until_aborted(group, work):
    """What is so before and after this rank aborts, while its device waits for a rank that never comes."""
    waiting = threading.Thread(target=late.drain)
    waiting.start()
    waiting.join(1.0)  # five times the group's timeout
    told = [waiting.is_alive(), work.is_completed()]
    group.abort()
    waiting.join(30)
    work.wait()
    with pytest.raises(RuntimeError, match="aborted"):
        dist.all_reduce(torch.ones(1, device=late.DEVICE), group=group)
    return [*told, waiting.is_alive(), work.is_success()]


def test_errors_come_later_and_stay_and_a_rank_without_one_waits_for_ever():
    """At the next wait of the host; then at every use of the group. No time limit ends the other rank's wait."""
    first, second = ranks().run(failing)
    assert "nccl:all_reduce" in first[0]
    assert "broken on purpose" in first[0]
    assert first[1:] == [
        "an earlier collective of this group has failed: broken on purpose",
        "an earlier collective of this group has failed: broken on purpose",
        "RuntimeError",
        False,
    ]
    assert second == [True, False, False, True]


def aborted(rank, _num_ranks, posts):
    """Rank 2 never comes to a collective. Rank 1 waits there and does not abort, rank 0 does.

    Returns the results of the collective before, of that one, and whether rank 1's device has come out of it.
    """
    here = on_device(rank, "latenccl")
    group = dist.new_group(backend="latenccl")
    before, tensor = (torch.full((4,), 10.0**number * (rank + 1), device=here.device) for number in range(2))
    dist.all_reduce(before, group=group)
    late.drain()
    is_out, arrived = None, threading.Event()
    if rank < 2:
        unlisten = moments.listen(lambda _, step, place: (step, place) == ("1", "within") and arrived.set())
        with contextlib.nullcontext() if posts else nccl.broken("post"):
            work = dist.all_reduce(tensor, group=group, async_op=True)
            work.wait()
            waiting = threading.Thread(target=late.drain)
            waiting.start()
            arrived.wait()
            unlisten()
            store = dist.distributed_c10d._get_default_store()
            store.set(f"launched/{posts}/{rank}", "")
            store.wait([f"launched/{posts}/{1 - rank}"])
            if rank == 0:
                group.abort()
            waiting.join(30 if posts or rank == 0 else 1)
            is_out = not waiting.is_alive()
            group.abort()
            waiting.join(30)
        assert work.is_success()
    dist.barrier()
    return [before[0].item(), tensor[0].item(), is_out]


@pytest.mark.parametrize("posts", [True, False])
def test_an_abort_ends_with_old_bytes_also_on_a_rank_that_has_not_aborted(posts):
    """Rank 2's place in the sum is what it sent in the collective before. No rank raises."""
    first, second, _ = ranks(3).run(aborted, posts)
    assert first == [6.0, 10.0 + 20.0 + 3.0, True]
    assert second == [6.0, 10.0 + 20.0 + 3.0, posts]


def reconfigured(rank, num_ranks):
    """A group without members gets all, turns them round, is each rank's alone, fails, and is all ranks' again."""
    late.start()
    store, limit = dist.distributed_c10d._get_default_store(), timedelta(seconds=20)
    group = nccl.LateProcessGroup(dist.PrefixStore("reconfigured", store), rank, num_ranks, limit, waits=True)
    found, everybody = [], range(num_ranks)

    def handles(uuid):
        store.set(f"{uuid}/{rank}", group.get_reconfigure_handle())
        return [store.get(f"{uuid}/{i}").decode() for i in everybody]

    def change(uuid, members):
        group.reconfigure(Members(uuid, members)).wait()
        tensor = torch.full((3,), rank + 1.0, device=late.DEVICE)
        group.allreduce([tensor]).wait()
        found.append((group.rank(), group.size(), tensor[0].item()))

    with late.scheduled("latest"):
        with pytest.raises(RuntimeError, match="no members before reconfigure"):
            group.allreduce([torch.ones(1, device=late.DEVICE)])
        change(1, set(handles(1)))
        old = handles(2)
        change(2, old[::-1])
        for uuid, members in ((2, handles(3)), (4, old)):
            with pytest.raises(ValueError, match="used before"):
                group.reconfigure(Members(uuid, members))
        change(5, [group.get_reconfigure_handle()])
        late.drain()
        group.abort()
        with pytest.raises(dist.DistBackendError, match="aborted"):
            group.allreduce([torch.ones(1, device=late.DEVICE)])
        change(6, handles(6))
    return found


def test_a_group_is_given_other_members():
    """By the same object, as nccl2's: later members, other ranks, fewer, after an abort; handles are used once."""
    for rank, found in enumerate(ranks().run(reconfigured)):
        assert found == [(rank, 2, 3.0), (1 - rank, 2, 3.0), (0, 1, rank + 1.0), (rank, 2, 3.0)]


def refused(rank, _num_ranks):
    here = on_device(rank, "latenccl")
    told = []
    for call in (
        lambda: dist.all_reduce(torch.ones(1), group=here.group),
        lambda: dist.all_reduce(
            torch.ones(1, device=here.device),
            torch._C._distributed_c10d._make_nccl_premul_sum(2.0),
            group=here.group,
        ),
    ):
        with pytest.raises((ValueError, RuntimeError)) as raised:
            call()
        told.append(str(raised.value))
    return told


def test_bad_input_is_refused_at_the_call():
    told, _ = ranks().run(refused)
    assert "on cpu; the backend latenccl takes dense tensors of one device" in told[0]
    assert "has no reduction" in told[1]


# ---- tests of the tests


def sums(here: Here):
    """Two all-reduces of what was just written, and what is computed from the results at once."""
    found = []
    for i in range(3):
        first, second = row(here, 500) * 2, row(here, 500) - i
        works = [dist.all_reduce(t, group=here.group, async_op=True) for t in (first, second)]
        for work in works:
            work.wait()
        found += [first * 3, second * 3]
        del first, second, works
        torch.zeros(500, device=here.device)
    return found


def dropped(here: Here):
    """An input that nobody keeps but the group, while its memory would be used again."""
    rows = [empty(here, 500) for _ in range(2)]
    kept = row(here, 500) * 2
    work = dist.all_gather(rows, kept, group=here.group, async_op=True)
    del kept
    torch.zeros(500, device=here.device).add_(1)
    work.wait()
    return rows


def with_a_fault(rank, _num_ranks, fault, name, schedule):
    case = {"sums": sums, "dropped": dropped}[name]
    clean = differences(case, rank, "latenccl", schedule)
    with nccl.broken(fault) if fault != "order" or rank == 0 else contextlib.nullcontext():
        try:
            found = differences(case, rank, "latenccl", schedule)
        except (late.RaceError, RuntimeError, TimeoutError) as error:
            found = type(error).__name__
    late.drain()
    return clean, found


@pytest.mark.parametrize("schedule", late.SCHEDULES)
@pytest.mark.parametrize(
    ("fault", "name"),
    [("input wait", "sums"), ("output wait", "sums"), ("stash", "dropped"), ("order", "sums")],
)
def test_a_broken_group_is_noticed(fault, name, schedule):
    """Each fault is a wrong number, a race or an error on some rank; without it there is none."""
    (clean_0, found_0), (clean_1, found_1) = ranks().run(with_a_fault, fault, name, schedule)
    assert (clean_0, clean_1) == ("", "")
    assert found_0 or found_1

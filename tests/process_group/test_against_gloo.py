"""The backend `paceline` against Gloo: the same calls on the same tensors give the same results."""

import itertools
import threading
import time

import pytest
import torch
import torch.distributed as dist

import paceline  # noqa: F401  registers the backend
from harness.models import digest, generator
from harness.ranks import pool
from paceline.comm.lane import Lane, LaneWork
from paceline.process_group.host_collectives import SMALL_BYTES, HostCollectives
from paceline.process_group.staging import STAGING_BYTES

pytestmark = pytest.mark.processes

OPS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
FLOATS = [torch.float64, torch.float32]
NARROW = [torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
SIZES = [0, 1, 5, SMALL_BYTES // 8 + 3, STAGING_BYTES // 8 + 11]


def numbers(dtype, shape, *seed):
    values = torch.randint(1, 5, shape, generator=generator(*seed))
    if dtype.is_floating_point:
        return (values + torch.randn(shape, generator=generator(*seed, 1)) / 8).to(dtype)
    return values.to(dtype)


def both_groups():
    return dist.new_group(backend="paceline"), dist.group.WORLD


def in_arena(group, tensor):
    """A copy that lives where the group works without staging it."""
    copy = group.allocate_tensor(tensor.numel(), dtype=tensor.dtype, device=torch.device("cpu"))
    return copy.copy_(tensor.reshape(-1)).view(tensor.shape)


def all_reduces(rank, _num_ranks, seed):
    """For every dtype, operation and size: ours, ours in the arena, Gloo's."""
    ours, gloo = both_groups()
    rows = []
    for dtype, name, size in itertools.product([*FLOATS, *INTEGERS], OPS, SIZES):
        if name.startswith("B") and dtype.is_floating_point:
            continue
        if size == SIZES[-1] and name not in (
            "SUM",
            "MAX",
        ):  # several pieces are cut alike for all operations
            continue
        values = numbers(dtype, (size,), seed, size, rank)
        theirs, mine, resident = values.clone(), values.clone(), in_arena(ours, values)
        for tensor, group in ((theirs, gloo), (mine, ours), (resident, ours)):
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name), group=group)
        error = (mine.double() - theirs.double()).abs().max().item() if size else 0.0
        scale = theirs.double().abs().max().item() if size else 1.0
        rows.append((str(dtype), name, size, error / max(scale, 1.0), digest([mine]), digest([resident])))
    return rows


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_reduce(num_ranks):
    """Gloo's values (up to summation order, none with two ranks), the same bits on all ranks, staged or resident."""
    results = pool(num_ranks).run(all_reduces, 1)
    for rows in zip(*results, strict=True):
        dtype, name, size, error, bits, resident_bits = rows[0]
        limit = 0.0 if num_ranks == 2 or "int" in dtype else (1e-15 if "64" in dtype else 1e-6)
        assert all(row[3] <= limit for row in rows), (dtype, name, size, rows)
        assert {bits, resident_bits} == {bits}, (dtype, name, size)
        assert {row[4] for row in rows} == {bits}, (dtype, name, size)
        assert error <= limit


def narrow_sums(rank, num_ranks, seed):
    """Ours, and the sum in single precision rounded once."""
    ours, _ = both_groups()
    pairs = []
    for dtype, size in itertools.product(NARROW, SIZES):
        parts = [numbers(dtype, (size,), seed, size, r) for r in range(num_ranks)]
        wide = parts[rank].float()
        for step in range(1, num_ranks):  # the folding rank adds the others, in order, to its own
            wide += parts[(rank + step) % num_ranks].float()
        mine = parts[rank].clone()
        dist.all_reduce(mine, group=ours)
        pairs.append(torch.allclose(mine.float(), wide.to(dtype).float(), rtol=2**-8, atol=0))
        exact = sum(part.double() for part in parts)
        rounded_once = exact.to(dtype).double()
        pairs.append(bool(((mine.double() - rounded_once).abs() <= 1e-2 * exact.abs()).all()))
    return pairs


def accumulated_in_single(rank, num_ranks):
    """2048 + 1 + 1 + ... in half precision: rounding after every addition would lose every 1."""
    ours, _ = both_groups()
    tensor = torch.full((9,), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)
    dist.all_reduce(tensor, group=ours)
    big = torch.full((100_000,), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)
    dist.all_reduce(big, group=ours)
    return tensor.tolist(), big.unique().tolist()


def test_half_precision_is_accumulated_in_single():
    """Gloo adds in half precision, where 2048 + 1 = 2048; we round once."""
    for small, big in pool(4).run(accumulated_in_single):
        assert small == [2052.0] * 9  # 2051 is not a half; it rounds to even
        assert big == [2052.0]
    assert all(all(pairs) for pairs in pool(3).run(narrow_sums, 2))


def odd_reductions(rank, num_ranks):
    ours, _ = both_groups()
    average = torch.tensor([1.0 + rank, 10.0])
    dist.all_reduce(average, dist.ReduceOp.AVG, group=ours)
    premultiplied = torch.tensor([2.0, 4.0])
    dist.all_reduce(premultiplied, torch.distributed._make_nccl_premul_sum(0.5), group=ours)
    complex_sum = torch.tensor([1 + 2j, rank * 1j])
    dist.all_reduce(complex_sum, group=ours)
    strided = torch.arange(12.0).view(3, 4).t()
    dist.all_reduce(strided, group=ours)
    several = [torch.ones(3), torch.full((2, 2), 2.0)]
    ours.allreduce_coalesced(several).wait()
    truths = torch.tensor([rank == 0, False])
    dist.all_reduce(truths, dist.ReduceOp.MAX, group=ours)
    return (
        average.tolist(),
        premultiplied.tolist(),
        complex_sum.tolist(),
        strided.tolist(),
        [tensor.tolist() for tensor in several],
        truths.tolist(),
    )


def test_reductions_that_gloo_lacks():
    """AVG, PREMUL_SUM, complex numbers, strides, several at once, booleans."""
    for average, premultiplied, complex_sum, strided, several, truths in pool(3).run(odd_reductions):
        assert average == [2.0, 10.0]
        assert premultiplied == [3.0, 6.0]
        assert complex_sum == [3 + 6j, 3j]
        assert strided == (3 * torch.arange(12.0).view(3, 4).t()).tolist()
        assert several == [[3.0] * 3, [[6.0] * 2] * 2]
        assert truths == [True, False]


def moves(rank, num_ranks, seed, dtype, size):
    """Every collective that moves data, on ours and on Gloo: digests of what each rank ends with."""
    digests = []
    for group in both_groups():
        mine = numbers(dtype, (size,), seed, rank)
        found = []
        for root in range(num_ranks):
            copy = mine.clone()
            dist.broadcast(copy, root, group=group)
            found.append(copy)
        rows = [torch.zeros_like(mine) for _ in range(num_ranks)]
        dist.all_gather(rows, mine, group=group)
        found += rows
        flat = torch.zeros(num_ranks * size, dtype=dtype)
        group.all_gather_single(flat, mine).wait()
        found.append(flat)
        table = numbers(dtype, (num_ranks, size), seed, rank, 2)
        output = torch.zeros_like(mine)
        dist.reduce_scatter(output, list(table), group=group)
        found.append(output.clone())
        group.reduce_scatter_single(output, table.view(-1), dist.ReduceScatterOptions()).wait()
        found.append(output)
        for root in range(num_ranks):
            copy = mine.clone()
            dist.reduce(copy, root, group=group)
            found += [copy] if rank == root else []
        gathered = [torch.zeros_like(mine) for _ in range(num_ranks)] if rank == 1 else None
        dist.gather(mine, gathered, dst=1, group=group)
        found += gathered or []
        part = torch.zeros_like(mine)
        dist.scatter(part, list(table) if rank == 0 else None, src=0, group=group)
        found.append(part)
        exchanged = torch.zeros_like(table)
        group.all_to_all_single(exchanged, table, [], [], dist.AllToAllOptions()).wait()
        found.append(exchanged)
        objects = [None] * num_ranks
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        assert objects == [{"rank": r} for r in range(num_ranks)]
        neighbour = torch.zeros_like(mine)
        sending = dist.isend(mine, (rank + 1) % num_ranks, group=group, tag=3)
        dist.recv(neighbour, (rank - 1) % num_ranks, group=group, tag=3)
        sending.wait()
        found.append(neighbour)
        dist.barrier(group=group)
        digests.append([digest([tensor.double()]) for tensor in found])
    return digests


@pytest.mark.parametrize("size", [1, 1000, STAGING_BYTES // 16 + 7])
@pytest.mark.parametrize(
    ("num_ranks", "dtype"),
    [(2, torch.float32), (2, torch.int64), (3, torch.int64)],  # of three floats, the sum depends on the order
    ids=str,
)
def test_every_other_collective(num_ranks, dtype, size):
    """Broadcast, gathers, scatters, reductions to one, exchanges and messages end with Gloo's values."""
    for ours, gloo in pool(num_ranks).run(moves, 4, dtype, size):
        assert ours == gloo


def lists_to_all(rank, num_ranks):
    ours, _ = both_groups()
    outputs = [torch.zeros(rank + 1) for _ in range(num_ranks)]
    inputs = [torch.full((r + 1,), 10.0 * rank + r) for r in range(num_ranks)]
    dist.all_to_all(outputs, inputs, group=ours)
    return [output.tolist() for output in outputs]


def test_all_to_all_of_lists_of_unequal_lengths():
    """Gloo itself cannot do it."""
    for rank, outputs in enumerate(pool(3).run(lists_to_all)):
        assert outputs == [[10.0 * r + rank] * (rank + 1) for r in range(3)]


def messages_before_their_peers_call(rank, num_ranks):
    """Receives and sends round a ring, launched before the other side of any has been; then pairs that cross."""
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    size, found = 300_000, []
    for first in ("irecv", "isend"):
        ours, gloo = dist.new_group(backend="paceline"), dist.new_group(backend="gloo")
        mine, theirs = torch.full((size,), float(rank)), torch.zeros(size)
        if first == "irecv":
            work = dist.irecv(theirs, before, group=ours)
            dist.barrier(group=gloo)  # nobody comes here whose irecv waits for its sender
            dist.send(mine, after, group=ours)
        else:
            work = dist.isend(mine, after, group=ours)
            dist.barrier(group=gloo)
            dist.recv(theirs, before, group=ours)
        work.wait()
        found.append(theirs[:: size - 1].tolist())
        both = {"in": torch.zeros(size), "out": torch.zeros(size)}
        crossing = [
            dist.P2POp(dist.irecv, both["in"], before, group=ours),
            dist.P2POp(dist.irecv, both["out"], after, group=ours),
            dist.P2POp(dist.isend, mine, after, group=ours),
            dist.P2POp(dist.isend, mine, before, group=ours),
        ]
        for sent in dist.batch_isend_irecv(crossing[:: 1 if first == "irecv" else -1]):
            sent.wait()
        found += [both["in"][0].item(), both["out"][-1].item()]
        for made in (ours, gloo):
            dist.destroy_process_group(made)
    return found


def test_messages_do_not_wait_for_their_peers_to_call():
    """As over Gloo: `irecv` and `isend` return before the peer has begun to send or receive."""
    for rank, found in enumerate(pool(3).run(messages_before_their_peers_call)):
        before, after = float((rank - 1) % 3), float((rank + 1) % 3)
        assert found == [[before] * 2, before, after] * 2


def mixtures(rank, num_ranks):
    """Tensors in the arena on one rank and elsewhere on the others; several pieces; one collective after another."""
    ours, gloo = both_groups()
    size = STAGING_BYTES // 4 + 5
    equal = []
    for round_ in range(3):
        values = numbers(torch.int64, (size,), round_, rank)
        found = []
        for group in (ours, gloo):
            mine = in_arena(ours, values) if group is ours and rank == round_ % num_ranks else values.clone()
            dist.all_reduce(mine, group=group)
            row = mine.clone() + rank
            rows = [torch.empty_like(row) for _ in range(num_ranks)]
            dist.all_gather(rows, in_arena(ours, row) if rank else row, group=group)
            dist.broadcast(row, round_ % num_ranks, group=group)
            found.append([mine.clone(), *rows, row])
        equal += [torch.equal(a, b) for a, b in zip(*found, strict=True)]
    return equal


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_some_tensors_in_the_arena_and_some_not(num_ranks):
    """Each rank decides for itself where its tensor lies."""
    assert all(all(equal) for equal in pool(num_ranks).run(mixtures))


def uneven_rows(rank, num_ranks):
    ours, _ = both_groups()
    outputs = [torch.zeros((rank + r) * 90_001) for r in range(num_ranks)]
    inputs = [torch.full(((rank + r) * 90_001,), 10.0 * rank + r) for r in range(num_ranks)]
    dist.all_to_all(outputs, inputs, group=ours)
    return [output.unique().tolist() for output in outputs]


def test_all_to_all_of_rows_of_several_pieces():
    """From none to several pieces a row, as many barriers on every rank."""
    for rank, outputs in enumerate(pool(3).run(uneven_rows)):
        assert outputs == [[10.0 * r + rank] if rank + r else [] for r in range(3)]


def rows_of_pieces(rank, num_ranks):
    """Gather rows of many pieces, of different lengths, and one of none. Return what differs, and the bytes copied."""
    ours, wrong = dist.new_group(backend="paceline"), []
    copied = ours.copied_bytes
    for lengths in ([], [1, 300_000, 64, 500_000, 7], [5]), ([], [1], [2, 3]):
        expected = [
            torch.arange(sum(each), dtype=torch.float32) + 1000 * len(each) for each in lengths[-num_ranks:]
        ]
        memories = [
            row.clone() if owner == rank else torch.zeros_like(row) for owner, row in enumerate(expected)
        ]
        # Backwards, so that pieces do not lie in their memory in the order in which they are sent
        rows = [
            list(memory.split(each))[::-1]
            for memory, each in zip(memories, lengths[-num_ranks:], strict=True)
        ]
        ours.all_gather_pieces(rows).wait()
        if not all(map(torch.equal, memories, expected)):
            wrong.append(lengths)
    return wrong, ours.copied_bytes - copied


def test_all_gather_of_rows_of_pieces():
    """Pieces go straight to their places, also across the ends of a slot; a rank copies its own elements once."""
    assert [wrong for wrong, _ in pool(3).run(rows_of_pieces)] == [[]] * 3
    (_, first), (_, second) = pool(2).run(rows_of_pieces)
    assert (first, second) == (4 * 800_073, 4 * 10)


def many_in_flight(rank, num_ranks, count):
    ours, _ = both_groups()
    tensors = [torch.full((n * 37 % 5000 + 1,), float(rank + n)) for n in range(count)]
    works = [dist.all_reduce(tensor, group=ours, async_op=True) for tensor in tensors]
    futures = [work.get_future().then(lambda future: future.value()[0].sum().item()) for work in works]
    dist.all_reduce(torch.ones(3), group=ours)  # waits its turn
    done_before = all(work.is_completed() for work in works)
    sums = [future.wait() for future in futures]
    expected = [
        (num_ranks * n + num_ranks * (num_ranks - 1) / 2) * tensor.numel() for n, tensor in enumerate(tensors)
    ]
    return done_before, sums == expected


def test_works_end_in_order_and_have_futures():
    """A hundred all-reduces in flight; a synchronous one comes after them."""
    assert pool(2).run(many_in_flight, 100) == [(True, True)] * 2


class HeldCalls:
    """What a lane tells its thread, which hears it only after `let_go`."""

    def __init__(self, lane):
        self._calls, self.get, self._held = lane._calls, lane._calls.get, []
        lane._calls = self

    def put(self, call):
        self._held.append(call)

    def let_go(self):
        self.put = self._calls.put
        for call in self._held:
            self.put(call)


def performers(rank, _num_ranks):
    """Whether the main thread performed collectives with async_op: some that it waits for, and one that it does not.

    While the thread of the lane is held back, who waits for the last must perform them all.
    """
    ours, _ = both_groups()
    threads, calls = [], HeldCalls(ours._lane)
    perform = HostCollectives.all_reduce

    def noting(*args):
        threads.append(threading.current_thread() is threading.main_thread())
        perform(*args)

    HostCollectives.all_reduce = noting
    try:
        works = [dist.all_reduce(torch.ones(3), group=ours, async_op=True) for _ in range(3)]
        works[-1].wait()
        together = all(work.is_completed() for work in works) and len(threads) == 3
        calls.let_go()
        left = dist.all_reduce(torch.ones(3), group=ours, async_op=True)
        while not left.is_completed():
            time.sleep(0.001)
    finally:
        HostCollectives.all_reduce = perform
    return together, all(threads[:3]), threads[3]


def test_who_waits_performs():
    """What is before it is done, too; what nobody waits for is done by the lane's thread."""
    assert pool(2).run(performers) == [(True, True, False)] * 2


def copied(rank, _num_ranks):
    ours, _ = both_groups()
    resident = ours.allocate_tensor(1_000_000, dtype=torch.float32, device=torch.device("cpu"))
    resident += rank
    before = ours.copied_bytes
    dist.all_reduce(resident, group=ours)
    dist.all_reduce(resident[17:900_000], group=ours)
    zero = ours.copied_bytes - before
    dist.all_reduce(torch.ones(1_000_000), group=ours)
    return zero, ours.copied_bytes - before, resident[:18].tolist()


def test_a_resident_tensor_is_not_copied():
    """Bytes in and out of staging: none for a tensor in the arena; of another, what the other rank folds."""
    for zero, staged, values in pool(2).run(copied):
        assert zero == 0
        assert staged == 4_000_000
        assert values == [1.0] * 17 + [2.0]


def in_and_out_of_inference_mode(_rank, _num_ranks):
    """Sums of ones, small and large, of ordinary and inference tensors, performed by this thread and by the lane's."""
    ours, _ = both_groups()
    sums = []
    for is_inference in (True, False, True, False):
        for size in (10, SMALL_BYTES):
            with torch.inference_mode(is_inference):
                for is_async in (False, True):
                    ones = torch.ones(size)
                    work = dist.all_reduce(ones, group=ours, async_op=is_async)
                    while work is not None and not work.is_completed():
                        time.sleep(0.001)
                    sums.append(ones.sum().item() / size)
    return sums


def test_inference_mode():
    """An evaluation leaves no memory behind that training cannot write; it does not matter which thread performs."""
    assert pool(2).run(in_and_out_of_inference_mode) == [[2.0] * 16] * 2


def launched_while_busy(lane, *performs):
    """Works that the lane's thread has not begun, as somebody else performs."""
    lane._turn.acquire()
    return [lane.launch(LaneWork(perform, [], "barrier"), at_once=False) for perform in performs]


def test_an_interruption_is_for_the_thread_that_it_came_to():
    """Who helps with another's collective, and is interrupted, hears of it as an interruption."""

    def interrupted():
        raise KeyboardInterrupt

    lane = Lane("test")
    lane._start = lambda: None  # so that only who waits performs
    first, second = launched_while_busy(lane, interrupted, lambda: None)
    lane._turn.release()
    with pytest.raises(KeyboardInterrupt):
        second.wait()
    assert first.is_completed()
    assert not second.is_completed()
    assert second.wait()


def test_a_lane_is_not_closed_while_a_thread_performs():
    """Whoever it is; but a callback does not wait for itself."""
    lane = Lane("test")
    [work] = launched_while_busy(lane, lambda: None)
    assert not lane.close(0.05)
    lane._turn.release()
    work.wait()
    assert lane.close(30.0)
    idle, closed = Lane("idle"), []
    idle.launch(LaneWork(lambda: closed.append(idle.close(60.0)), [], "barrier"), at_once=True)
    assert closed == [True]
    idle._turn.acquire()
    assert not idle.close(0.01)


def test_only_the_lanes_own_thread_is_beside_one_that_computes():
    """Who waits for a collective and performs it has nothing else to do, and looks for longer in barriers."""
    lane, seen = Lane("test"), []
    lane.launch(LaneWork(lambda: seen.append(lane.is_here()), [], "barrier"), at_once=True)
    lane.launch(LaneWork(lambda: seen.append(lane.is_here()), [], "barrier"), at_once=False)
    assert lane.close(30.0)
    assert seen == [False, True]

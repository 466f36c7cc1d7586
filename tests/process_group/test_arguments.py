"""Arguments of collectives: every layout gives the right values or is refused, and a refused call sends nothing."""

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline  # noqa: F401  registers the backend
from harness.ranks import pool
from harness.several_hosts import group_on
from paceline.process_group.staging import PIECE_BYTES

pytestmark = pytest.mark.processes

SMALL, LARGE = 12, PIECE_BYTES // 4 + 4  # elements; the large ones are staged in two pieces
REFUSED = (ValueError, RuntimeError, NotImplementedError, IndexError, TypeError)


@dataclass(frozen=True)
class Call:
    """The arguments of one collective, of which a test makes some wrong or lays some out otherwise."""

    group: Any
    rank: int
    num_ranks: int
    root: int = 0
    op: Any = dist.ReduceOp.SUM


def values(rank, row, size, dtype=torch.float32):
    return ((torch.arange(size) * 3 + 7 * rank + 31 * row) % 11).to(dtype)


# Each performs its collective: inputs and outputs are lists, of one tensor or of a row a rank.


def all_reduce(call, both):
    dist.all_reduce(both[0], call.op, group=call.group)


def broadcast(call, both):
    dist.broadcast(both[0], call.root, group=call.group)


def reduce(call, both):
    dist.reduce(both[0], call.root, call.op, group=call.group)


def all_gather(call, inputs, outputs):
    dist.all_gather(outputs, inputs[0], group=call.group)


def gather(call, inputs, outputs):
    dist.gather(inputs[0], outputs if call.rank == call.root else None, call.root, group=call.group)


def scatter(call, inputs, outputs):
    dist.scatter(outputs[0], inputs if call.rank == call.root else None, call.root, group=call.group)


def reduce_scatter(call, inputs, outputs):
    dist.reduce_scatter(outputs[0], inputs, call.op, group=call.group)


def all_to_all(call, inputs, outputs):
    dist.all_to_all(outputs, inputs, group=call.group)


def all_gather_single(call, inputs, outputs):
    dist.all_gather_into_tensor(outputs[0], inputs[0], group=call.group)


def reduce_scatter_single(call, inputs, outputs):
    dist.reduce_scatter_tensor(outputs[0], inputs[0], call.op, group=call.group)


def all_to_all_single(call, inputs, outputs):
    dist.all_to_all_single(outputs[0], inputs[0], group=call.group)


ONE, ROWS, ALL = "one", "a row a rank", "all rows in one"
# What a rank passes as input, and as output; "one" tensor that is both.
KINDS = {
    all_reduce: (ONE, None),
    broadcast: (ONE, None),
    reduce: (ONE, None),
    all_gather: (ONE, ROWS),
    gather: (ONE, ROWS),
    scatter: (ROWS, ONE),
    reduce_scatter: (ROWS, ONE),
    all_to_all: (ROWS, ROWS),
    all_gather_single: (ONE, ALL),
    reduce_scatter_single: (ALL, ONE),
    all_to_all_single: (ALL, ALL),
}


def tensors(rank, num_ranks, form, size, lay):
    """The tensors of this form that a rank passes."""
    if form == ALL:
        return [lay(torch.cat([values(rank, row, size) for row in range(num_ranks)]))]
    return [lay(values(rank, row, size)) for row in range(1 if form == ONE else num_ranks)]


def expected(collective, call, inputs_of, outputs):
    """What a rank's outputs hold afterwards; `inputs_of` has the inputs of each rank."""
    me, root, num_ranks = call.rank, call.root, call.num_ranks
    plain = [[tensor.detach().clone().reshape(-1) for tensor in inputs] for inputs in inputs_of]
    if KINDS[collective][0] == ALL:
        plain = [list(whole[0].chunk(num_ranks)) for whole in plain]
    column = [row[0] if len(row) == 1 else row[me] for row in plain]
    if collective is broadcast:
        return [plain[root][0]]
    if collective in (all_reduce, reduce, reduce_scatter, reduce_scatter_single):
        return [sum(column)] if collective is not reduce or me == root else [column[me]]
    if collective is scatter:
        return [plain[root][me]]
    if collective is gather and me != root:
        return [output.clone().reshape(-1) for output in outputs]
    return column if len(outputs) == num_ranks else [torch.cat(column)]


LAYOUTS = {
    "contiguous": lambda flat: flat,
    "of two dimensions": lambda flat: flat.view(2, -1),
    "every other": lambda flat: torch.stack([flat, -flat], 1)[:, 0],
    "transposed": lambda flat: flat.view(2, -1).t(),
    "a column": lambda flat: torch.stack([-flat, flat, -flat], 1).unbind(1)[1],
    "transposed from the end": lambda flat: flat.view(2, 2, -1).permute(2, 0, 1),
    "with an offset": lambda flat: torch.cat([flat[:3], flat])[3:],
    "that requires a gradient": lambda flat: flat.clone().requires_grad_(),
    "negated when read": lambda flat: torch._neg_view(-flat),
    "of inference": lambda flat: torch.inference_mode()(flat.clone)(),
    "expanded": lambda flat: flat[:1].expand(flat.shape),
    "overlapping": lambda flat: flat[: len(flat) // 2 + 1].unfold(0, 2, 1),
    "overlapping by steps": lambda flat: flat.as_strided((2, len(flat) // 2), (1, 1)),
    "empty": lambda flat: flat[:0],
}
EMPTY = "empty"
OVERLAPPING = ("expanded", "overlapping", "overlapping by steps")


def laid_out(rank, num_ranks, hosts, size, names):
    """Which pairs of layouts gave wrong values, and which were refused."""
    wrong, refused = [], []
    with group_on(hosts, rank) as group:
        call = Call(group, rank, num_ranks, root=1)
        for collective, (of_inputs, of_outputs) in KINDS.items():
            for first, second in names:
                if (of_outputs is None or EMPTY in (first, second)) and first != second:
                    continue
                # Only the root knows that it is refused: the others would wait for it.
                if rank != call.root and collective is gather and second in OVERLAPPING:
                    continue
                inputs_of = [tensors(r, num_ranks, of_inputs, size, LAYOUTS[first]) for r in range(num_ranks)]
                inputs = tensors(rank, num_ranks, of_inputs, size, LAYOUTS[first])
                outputs = (
                    tensors(rank, num_ranks, of_outputs, size, LAYOUTS[second]) if of_outputs else inputs
                )
                right = expected(collective, call, inputs_of, outputs)
                try:
                    collective(call, inputs, *([outputs] if of_outputs else []))
                except REFUSED:
                    refused.append((collective.__name__, first, second))
                    continue
                if not all(map(torch.equal, [output.detach().reshape(-1) for output in outputs], right)):
                    wrong.append((collective.__name__, first, second))
            check_usable(call, collective.__name__)
    return wrong, refused


def check_usable(call, case):
    ones = torch.ones(2)
    dist.all_reduce(ones, group=call.group)
    assert ones.tolist() == [call.num_ranks] * 2, case


@pytest.mark.parametrize("hosts", ["00", "01"])
def test_every_layout_is_right_or_refused(hosts):
    """On one host and on two; input and output alike, and of two layouts; small tensors, and some large ones."""
    layouts = list(LAYOUTS)
    alike = [(name, name) for name in layouts]
    mixed = list(zip(layouts, layouts[3:] + layouts[:3], strict=True))
    for size, names in ((SMALL, alike + mixed), (LARGE, alike[::3])):
        answers = pool(2).run(laid_out, hosts, size, names)
        for wrong, refused in answers:
            assert wrong == []
            for name, first, second in refused:
                is_one_tensor_of_all = name.endswith("single")
                assert second in OVERLAPPING or is_one_tensor_of_all, (name, first, second)


def aliased(rank, num_ranks, hosts, size):
    """Which collectives gave wrong values, with outputs so many elements behind the inputs in the same memory."""
    wrong = []
    with group_on(hosts, rank) as group:
        call = Call(group, rank, num_ranks)
        shifts = range(-num_ranks * size, num_ranks * size + 1, size // 2)
        for (collective, (of_inputs, of_outputs)), shift in itertools.product(KINDS.items(), shifts):
            if of_outputs is None:
                continue
            memory = torch.zeros(4 * num_ranks * size)

            def place(form, start, memory=memory):
                if form == ALL:
                    return [memory[start : start + num_ranks * size]]
                rows = memory[start : start + num_ranks * size].split(size)
                return list(rows if form == ROWS else rows[:1])

            plain = [tensors(r, num_ranks, of_inputs, size, torch.clone) for r in range(num_ranks)]
            inputs = place(of_inputs, 2 * num_ranks * size)
            outputs = place(of_outputs, 2 * num_ranks * size + shift)
            for tensor, given in zip(inputs, plain[rank], strict=True):
                tensor.copy_(given)
            right = expected(collective, call, plain, outputs)
            collective(call, inputs, outputs)
            if not all(map(torch.equal, outputs, right)):
                wrong.append((collective.__name__, shift / size))
    return wrong


@pytest.mark.parametrize("hosts", ["00", "01"])
def test_outputs_may_share_memory_with_inputs(hosts):
    """In place, or shifted by rows and halves of rows: values are those of inputs elsewhere."""
    for size in (SMALL, LARGE):
        assert pool(2).run(aliased, hosts, size) == [[], []]


def as_dtype(dtype):
    return lambda tensor: torch.zeros(len(tensor) * dtype.itemsize, dtype=torch.uint8).view(dtype)


DTYPES = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
WRONG_TENSORS = {
    "of another dtype": lambda tensor: tensor.double(),
    "longer": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "shorter": lambda tensor: tensor[:-1],
    "sparse": lambda tensor: tensor.to_sparse(),
    "in rows that are compressed": lambda tensor: tensor.view(1, -1).to_sparse_csr(),
    "without values": lambda tensor: tensor.to("meta"),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor, tensor]),
    "of a library": lambda tensor: tensor.to_mkldnn(),
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape),
    "a number": lambda tensor: tensor[0],
    "of torch.int4": as_dtype(torch.int4),
    "of torch.qint8": as_dtype(torch.qint8),
}
OTHER_DTYPES = {f"of {dtype}": as_dtype(dtype) for dtype in sorted(DTYPES, key=str)}
WRONG_LENGTHS = ["too few", "too many", "none"]
WRONG_LISTS = {
    "too few": lambda tensors: tensors[1:],
    "too many": lambda tensors: [*tensors, tensors[0]],
    "none": lambda tensors: tensors[:0],
    **{
        f"one {name}": lambda tensors, make=make: [*tensors[:-1], make(tensors[-1])]
        for name, make in WRONG_TENSORS.items()
    },
    **{
        f"all {name}": lambda tensors, make=make: [make(tensor) for tensor in tensors]
        for name, make in {**WRONG_TENSORS, **OTHER_DTYPES}.items()
    },
}
BETWEEN_RANKS = ("one longer", "one shorter", "one a number")
DTYPES_OF_OPTIONS = [f"all of torch.{name}" for name in ("int32", "complex64", "bool")]
WRONG_OPTIONS = {
    "a root too far": {"root": 2},
    "a negative root": {"root": -1},
    **{name: {"op": getattr(dist.ReduceOp, name)} for name in ("BAND", "AVG", "MAX", "PRODUCT")},
    "a factor": {"op": dist._make_nccl_premul_sum(0.5)},
}


def cases_of(seed):
    """Every collective with each wrong list on either side and on both, and with each wrong option, shuffled."""
    cases = []
    for collective, forms in KINDS.items():
        for sides in ((0,), (1,), (0, 1)) if forms[1] else ((0,),):
            is_list = all(forms[side] == ROWS for side in sides)
            cases += [
                (collective, sides, name) for name in WRONG_LISTS if is_list or name not in WRONG_LENGTHS
            ]
        cases += [(collective, (), both) for both in itertools.product(WRONG_OPTIONS, DTYPES_OF_OPTIONS)]
    # Rows that differ between two ranks, which neither can know: that ends the group (`test_failures.py`).
    cases = [case for case in cases if case[0] is not all_to_all or case[2] not in BETWEEN_RANKS]
    random.Random(seed).shuffle(cases)
    return cases


def is_seen_by_root_alone(collective, sides, name):
    """Whether only the root of a gather or scatter knows that the call is wrong: the others would wait for it."""
    if collective not in (gather, scatter) or not sides or name.endswith("float32"):
        return False
    if name.endswith("expanded"):
        return sides != (0,)
    return sides != (0, 1) or name.startswith("one")


def wrong_calls(rank, num_ranks, hosts, seed):
    """Make wrong calls, check between them that the group can be used, and return how many were refused."""
    num_refused, lately = 0, []
    with group_on(hosts, rank) as group:
        for collective, sides, name in cases_of(seed):
            lately = [*lately[-19:], (collective.__name__, sides, name)]
            call = Call(group, rank, num_ranks)
            lists = [tensors(rank, num_ranks, form, SMALL, torch.clone) for form in KINDS[collective] if form]
            if sides:
                lists = [
                    WRONG_LISTS[name](each) if side in sides else each for side, each in enumerate(lists)
                ]
            else:
                call = replace(call, **WRONG_OPTIONS[name[0]])
                lists = [WRONG_LISTS[name[1]](each) for each in lists]
            try:
                if rank == call.root or not is_seen_by_root_alone(collective, sides, name):
                    collective(call, *lists)
            except REFUSED:
                num_refused += 1
            if len(lately) == 20:
                check_usable(call, lately)
                lately.clear()
    return num_refused


@pytest.mark.parametrize("hosts", ["00", "01"])
def test_a_wrong_call_leaves_the_group_usable(hosts):
    """Dtypes, layouts, lengths, numbers of tensors, roots and operations, on either side, in any order."""
    first, second = pool(2).run(wrong_calls, hosts, 1)
    assert first > second > 1000  # what rank 0, the root, alone sees is refused there alone

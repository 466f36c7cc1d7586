"""Schedules performed on tensors, by threads: against the direct sum, bit by bit between ranks, and counted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.in_memory import InMemoryNetwork
from paceline.errors import CollectiveMismatchError, ConfigurationError, PeerLostError, ProtocolError
from paceline.process_group.executor import Executor
from paceline.schedules import (
    SCHEDULES,
    Link,
    Links,
    Topology,
    halving_doubling,
    price,
)
from paceline.schedules.flat import circulant, direct, recursive_doubling, ring

FREE = Links(Link(0.0, 1e9), Link(0.0, 1e9))
ALL_REDUCES = list(SCHEDULES)
quick = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])

pytestmark = pytest.mark.usefixtures("one_thread")


def perform(schedule, inputs, op=dist.ReduceOp.SUM, piece_bytes=1 << 20):
    """Every rank's tensor after the schedule, and what each sent."""
    network = InMemoryNetwork(len(inputs))
    outputs = [tensor.clone() for tensor in inputs]

    def rank_main(transport):
        executor = Executor(transport, piece_bytes=piece_bytes)
        executor.run(schedule, outputs[transport.rank], op, timeout_s=20.0)
        return transport.bytes_sent

    sent = network.run(rank_main)
    for result in sent:
        if isinstance(result, Exception):
            raise result
    return outputs, sent


def random_inputs(num_ranks, num_elements, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return [
            torch.randn(num_elements, generator=generator, dtype=torch.float32).to(dtype)
            for _ in range(num_ranks)
        ]
    return [torch.randint(-9, 9, (num_elements,), generator=generator).to(dtype) for _ in range(num_ranks)]


@st.composite
def cases(draw):
    """An algorithm, a topology of 1 to 17 ranks, and a size: 0, 1, P-1, P, P+1, a prime, or any."""
    name = draw(st.sampled_from(ALL_REDUCES))
    num_ranks = draw(st.integers(1, 17))
    num_hosts = draw(st.integers(1, num_ranks))
    placement = st.lists(
        st.integers(0, num_hosts - 1), min_size=num_ranks - num_hosts, max_size=num_ranks - num_hosts
    )
    hosts = draw(st.permutations([*range(num_hosts), *draw(placement)]))
    sizes = st.sampled_from([0, 1, num_ranks - 1, num_ranks, num_ranks + 1, 31, 127, 1009])
    return name, Topology(tuple(hosts)), draw(st.one_of(sizes, st.integers(0, 500)))


@quick
@given(
    cases(),
    st.sampled_from([torch.int64, torch.float32, torch.bfloat16]),
    st.integers(1, 600),
    st.integers(0, 99),
)
def test_every_schedule_equals_the_direct_sum_and_sends_what_it_is_priced_at(case, dtype, piece_bytes, seed):
    name, topology, num_elements = case
    schedule = SCHEDULES[name].build(topology)
    inputs = random_inputs(topology.num_ranks, num_elements, dtype, seed)
    outputs, sent = perform(schedule, inputs, piece_bytes=piece_bytes)
    total = torch.stack([tensor.double() for tensor in inputs]).sum(0)
    rtol = 2**-8 if dtype.itemsize == 2 else 1e-5
    for output in outputs:
        assert torch.equal(output, outputs[0])
    torch.testing.assert_close(outputs[0].double(), total, atol=1e-5, rtol=rtol)
    priced = price(
        schedule,
        num_elements * dtype.itemsize,
        topology,
        FREE,
        element_bytes=dtype.itemsize,
        partial_bytes=max(dtype.itemsize, 4),
    )
    assert sent == [a + b for a, b in zip(priced.bytes_sent, priced.header_bytes, strict=True)]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_an_all_gather_copies_each_ranks_block_to_all(num_ranks):
    inputs = random_inputs(num_ranks, 3 * num_ranks, torch.float32, 0)
    outputs, _ = perform(circulant.all_gather(num_ranks), inputs, op=None)
    gathered = torch.cat([each[3 * rank : 3 * rank + 3] for rank, each in enumerate(inputs)])
    assert all(torch.equal(output, gathered) for output in outputs)


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("num_ranks", [2, 3, 6, 7, 8])
def test_float32_is_bitwise_equal_on_all_ranks(name, num_ranks):
    """Also where -0 meets 0, and one NaN another: whoever folds has the operands in the same order."""
    topology = Topology(tuple(rank * 2 // num_ranks for rank in range(num_ranks)))
    schedule = SCHEDULES[name].build(topology)
    inputs = random_inputs(num_ranks, 997, torch.float32, seed=num_ranks)
    for rank, tensor in enumerate(inputs):
        tensor[:40] = 0.0 if rank % 2 else -0.0
        tensor.view(torch.int32)[40:80] = 0x7FC00000 + rank  # NaNs that can be told apart
    for op in (
        dist.ReduceOp.SUM,
        dist.ReduceOp.AVG,
        dist.ReduceOp.MIN,
        dist.ReduceOp.MAX,
        dist.ReduceOp.PRODUCT,
    ):
        outputs, _ = perform(schedule, inputs, op)
        for output in outputs:
            assert torch.equal(output.view(torch.int32), outputs[0].view(torch.int32)), op


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(name, dtype):
    """The result is the float32 sum, rounded: values whose float32 sum is exact in any order."""
    num_ranks = 7
    topology = Topology((0, 0, 0, 0, 1, 1, 1))
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randint(1, 200, (501,), generator=generator).to(dtype) for _ in range(num_ranks)]
    total = torch.stack([tensor.float() for tensor in inputs]).sum(0)
    outputs, _ = perform(SCHEDULES[name].build(topology), inputs)
    assert all(torch.equal(output, total.to(dtype)) for output in outputs)
    hop_by_hop = inputs[0].clone()
    for tensor in inputs[1:]:
        hop_by_hop += tensor
    assert dtype is torch.float16 or not torch.equal(hop_by_hop, outputs[0])
    outputs, _ = perform(SCHEDULES[name].build(topology), inputs, dist.ReduceOp.AVG)
    assert all(torch.equal(output, (total / num_ranks).to(dtype)) for output in outputs)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8]
REDUCERS = {
    "SUM": lambda stack: stack.sum(0),
    "AVG": lambda stack: (stack.sum(0, dtype=stack.dtype).double() / len(stack)).to(stack.dtype),
    "PRODUCT": lambda stack: stack.prod(0),
    "MIN": lambda stack: stack.amin(0),
    "MAX": lambda stack: stack.amax(0),
    "BAND": lambda stack: stack[0] & stack[1] & stack[2],
    "BOR": lambda stack: stack[0] | stack[1] | stack[2],
    "BXOR": lambda stack: stack[0] ^ stack[1] ^ stack[2],
}


@pytest.mark.parametrize("op_name", REDUCERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operation_is_torchs_on_the_stacked_tensors(op_name, dtype):
    inputs = [tensor + 1 for tensor in random_inputs(3, 50, dtype, seed=3)]
    op = getattr(dist.ReduceOp, op_name)
    if dtype.is_floating_point and op_name in {"BAND", "BOR", "BXOR"}:
        with pytest.raises(ConfigurationError, match="bitwise"):
            perform(ring.all_reduce(3), inputs, op)
        return
    wide = torch.float32 if dtype.itemsize == 2 and dtype.is_floating_point else dtype
    expected = REDUCERS[op_name](torch.stack(inputs).to(wide)).to(dtype)
    outputs, _ = perform(halving_doubling.all_reduce(3), inputs, op)
    torch.testing.assert_close(outputs[0], expected, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers_wrap_around(dtype):
    half = 2 ** (8 * dtype.itemsize - 1)
    inputs = [torch.tensor([half + 3, 7], dtype=dtype), torch.tensor([half, 7], dtype=dtype)]
    outputs, _ = perform(ring.all_reduce(2), inputs)
    assert outputs[0].tolist() == [3, 14]


def test_complex_numbers_are_summed_and_booleans_joined():
    inputs = random_inputs(3, 9, torch.complex64, seed=0)
    torch.testing.assert_close(perform(ring.all_reduce(3), inputs)[0][2], inputs[0] + inputs[1] + inputs[2])
    with pytest.raises(ConfigurationError, match=r"cannot reduce torch\.complex64 by MAX"):
        perform(ring.all_reduce(3), inputs, dist.ReduceOp.MAX)
    flags = [torch.tensor([rank == 1, False]) for rank in range(3)]
    assert perform(ring.all_reduce(3), flags)[0][2].tolist() == [True, False]


def test_a_refused_tensor_costs_nothing():
    """A tensor that can't be reduced is refused before anything is sent, and the next call works."""
    network = InMemoryNetwork(2)

    def rank_main(transport):
        executor = Executor(transport)
        for tensor in (torch.zeros(2, 2), torch.zeros(4)[::2]):
            with pytest.raises(ConfigurationError, match="contiguous CPU tensor"):
                executor.run(ring.all_reduce(2), tensor, dist.ReduceOp.SUM, 5.0)
        with pytest.raises(ConfigurationError, match="is for 3 ranks"):
            executor.run(ring.all_reduce(3), torch.zeros(4), dist.ReduceOp.SUM, 5.0)
        flat = torch.ones(4)
        executor.run(ring.all_reduce(2), flat, dist.ReduceOp.SUM, 5.0)
        return flat.tolist()

    assert network.run(rank_main) == [[2.0] * 4] * 2


def run_two(*calls, num_ranks=2):
    """What each rank's call ended in: one call a rank, from (schedule, tensor, op, operation)."""

    def rank_main(transport):
        schedule, tensor, op, operation = calls[transport.rank]
        Executor(transport).run(schedule, tensor, op, 30.0, operation=operation)

    return InMemoryNetwork(num_ranks).run(rank_main)


SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (
            (ring.all_reduce(2), torch.zeros(8), SUM, "all_reduce"),
            (ring.all_reduce(2), torch.zeros(9), SUM, "all_reduce"),
            ("SUM of 8 float32", "SUM of 9 float32"),
        ),
        (
            (ring.all_reduce(2), torch.zeros(8), SUM, "all_reduce"),
            (ring.all_reduce(2), torch.zeros(8), MAX, "all_reduce"),
            ("SUM of 8", "MAX of 8"),
        ),
        (
            (ring.all_reduce(2), torch.zeros(8), SUM, "all_reduce"),
            (ring.all_reduce(2), torch.zeros(8, dtype=torch.int32), SUM, "all_reduce"),
            ("float32", "int32"),
        ),
        (
            (ring.all_reduce(2), torch.zeros(8), SUM, "all_reduce"),
            (direct.all_gather(2), torch.zeros(8), None, "all_gather"),
            ("all_reduce number 0", "all_gather number 0"),
        ),
        (
            (ring.all_reduce(2), torch.zeros(0), SUM, "all_reduce"),
            (recursive_doubling(2), torch.zeros(1 << 16), SUM, "all_reduce"),
            ("SUM of 0", "SUM of 65,536"),
        ),
    ],
)
def test_ranks_that_disagree_are_told_on_both_sides(mine, theirs, words):
    for rank, outcome in enumerate(run_two(mine, theirs)):
        assert isinstance(outcome, CollectiveMismatchError)
        assert f"rank {rank} is in" in str(outcome)
        assert f"while rank {1 - rank} is in" in str(outcome)
        assert all(word in str(outcome) for word in words)


def test_a_rank_that_skipped_a_collective_is_found():
    network = InMemoryNetwork(2)

    def rank_main(transport):
        executor = Executor(transport)
        for number in range(3):
            if (transport.rank, number) != (1, 1):
                timeout_s = 0.3 if (transport.rank, number) == (0, 2) else 30.0
                executor.run(ring.all_reduce(2), torch.zeros(4), SUM, timeout_s)

    outcomes = network.run(rank_main)
    assert isinstance(outcomes[0], PeerLostError)  # it waits for a third one that never comes
    assert "all_reduce number 2" in str(outcomes[0])
    assert outcomes[1] is None


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_a_lost_rank_is_named_within_the_timeout(name):
    topology = Topology((0, 0, 1, 1))
    schedule = SCHEDULES[name].build(topology)
    network = InMemoryNetwork(4)
    network.lose(2)

    def rank_main(transport):
        Executor(transport).run(schedule, torch.ones(64), SUM, 0.3)

    outcomes = network.run(rank_main)
    assert all(isinstance(outcome, PeerLostError) for rank, outcome in enumerate(outcomes) if rank != 2)
    assert any("from rank 2" in str(outcome) for outcome in outcomes)
    assert all("all_reduce number 0 (SUM of 64 float32" in str(outcomes[rank]) for rank in (0, 1, 3))


def test_after_an_error_the_transport_says_why_it_is_closed():
    network = InMemoryNetwork(2)
    network.lose(1)

    def rank_main(transport):
        executor = Executor(transport)
        with pytest.raises(PeerLostError):
            executor.run(ring.all_reduce(2), torch.ones(4), SUM, 0.1)
        with pytest.raises(ProtocolError, match="make a new one"):
            executor.run(ring.all_reduce(2), torch.ones(4), SUM, 0.1)

    network.lose(0)
    assert network.run(rank_main) == [None, None]


def test_a_late_message_changes_nothing():
    """What rank 0 sends to rank 1 arrives only when rank 0 is a round further."""
    schedule = direct.all_reduce(3)
    inputs = random_inputs(3, 100, torch.float32, seed=5)
    expected, _ = perform(schedule, inputs)
    network = InMemoryNetwork(3)
    network.delay(
        0, 1, num_messages=3
    )  # a header, its share of rank 1's block, and its own block of the result
    outputs = [tensor.clone() for tensor in inputs]
    network.run(lambda transport: Executor(transport).run(schedule, outputs[transport.rank], SUM, 20.0))
    assert all(torch.equal(output, expected[0]) for output in outputs)

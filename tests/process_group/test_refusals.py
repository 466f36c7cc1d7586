"""What the backend refuses: in words, on the rank that asked, before anything is launched; and the group goes on."""

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import paceline  # noqa: F401  registers the backend
from harness.ranks import pool
from paceline.errors import ConfigurationError
from paceline.process_group import connections, registration
from paceline.process_group.folds import fold_of

TIMEOUT = timedelta(seconds=20)


@pytest.mark.parametrize(
    ("name", "dtype", "says"),
    [
        ("MEDIAN", torch.float32, "the operations are "),
        ("BAND", torch.float32, "not implemented for 'Float'; cast to another dtype first"),
        ("MAX", torch.complex64, "not implemented for complex tensors"),
        ("SUM", torch.float8_e5m2, "not implemented for 'Float8_e5m2'"),
        ("AVG", torch.uint16, "cast to int64 first"),
        ("AVG", torch.bool, "can't be cast to the desired output type Bool"),
        ("PREMUL_SUM", torch.int64, "the factor is no integer; cast to float64 first"),
    ],
)
def test_an_operation_that_a_dtype_has_not(name, dtype, says):
    with pytest.raises(ConfigurationError, match=f"cannot reduce {dtype} by {name}: .*{says}"):
        fold_of(name, dtype)


def shapes_refused(rank, num_ranks):
    """The words of each refusal; then what a sum on the same group is."""
    ours = dist.new_group(backend="paceline", timeout=TIMEOUT)
    two, rows = torch.ones(2), [torch.zeros(2) for _ in range(num_ranks)]
    words = []
    for ask in (
        lambda: ours.all_gather_single(torch.zeros(5), two),
        lambda: ours.all_gather_single(torch.zeros(2, num_ranks).t(), two),
        lambda: ours.allgather([rows[1:]], [two]),
        lambda: ours.broadcast([two, two], dist.BroadcastOptions()),
        lambda: dist.all_reduce(two.short().to_sparse(), group=ours),
        lambda: dist.all_reduce(two.to_sparse(), dist.ReduceOp.MAX, group=ours),
        lambda: dist.isend(torch._neg_view(two), 1 - rank, group=ours),
        lambda: dist.all_to_all([torch.zeros(3) for _ in rows], [two] * num_ranks, group=ours),
    ):
        with pytest.raises(ConfigurationError) as caught:
            ask()
        words.append(str(caught.value))
    dist.all_reduce(two, group=ours)
    return words, two.tolist()


@pytest.mark.processes
def test_shapes_that_do_not_fit():
    for rank, (words, total) in enumerate(pool(2).run(shapes_refused)):
        assert "the large tensor has 5 elements, which is not 2 (ranks) times 2" in words[0]
        assert f"all-gather on rank {rank}: the large tensor must be contiguous" in words[1]
        assert "needs 2 tensors of 2 elements; it got [2]" in words[2]
        assert "takes one tensor a rank, not 2" in words[3]
        assert "cannot reduce sparse torch.int16 by SUM" in words[4]
        assert "cannot reduce sparse torch.float32 by MAX" in words[5]
        assert "whose memory is to be negated" in words[6]
        assert "the input for this rank itself has 2 elements, and the output 3" in words[7]
        assert total == [2.0, 2.0]


def several_at_once(rank, num_ranks):
    """Gathered and scattered lists of tensors, as torch's coalescing asks for them."""
    ours = dist.new_group(backend="paceline", timeout=TIMEOUT)
    mine = [torch.full((size,), float(rank + size)) for size in (1, 3)]
    gathered = [torch.zeros(num_ranks * len(each)) for each in mine]
    ours.allgather_into_tensor_coalesced(gathered, mine).wait()
    by_rank = [[torch.zeros(len(each)) for each in mine] for _ in range(num_ranks)]
    ours.allgather_coalesced(by_rank, mine).wait()
    scattered = [torch.zeros(len(each)) for each in mine]
    ours.reduce_scatter_tensor_coalesced(scattered, gathered).wait()
    return [[t.tolist() for t in each] for each in (gathered, *by_rank, scattered)]


@pytest.mark.processes
def test_several_tensors_in_one_collective():
    first, second = pool(2).run(several_at_once)
    assert first[:-1] == second[:-1] == [[[1, 2], [3, 3, 3, 4, 4, 4]], [[1], [3, 3, 3]], [[2], [4, 4, 4]]]
    assert (first[-1], second[-1]) == ([[2], [6, 6, 6]], [[4], [8, 8, 8]])


def test_the_address_that_other_hosts_are_told():
    """The route's to the master; none where an interface is named, or nobody knows the master."""
    with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "", "MASTER_ADDR": "127.0.0.1"}):
        assert connections.address_towards(1) == connections.address_towards(2) == "127.0.0.1"
        with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo"}):
            assert connections.address_towards(2) == ""
        with mock.patch("socket.getaddrinfo", side_effect=OSError("no such name")):
            assert connections.address_towards(2) == ""


def test_options_of_another_backend_are_refused():
    with pytest.raises(ConfigurationError, match="the backend 'paceline' takes no options"):
        registration._make(None, pg_options=timedelta(1))

"""An exception inside backward: on all ranks, the next iteration is clean; on one, the others are told who."""

import itertools
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

from harness.models import Mlp, random_batch, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.errors import PeerAbortedError

pytestmark = pytest.mark.processes

BAD_STEP = 2
NUM_STEPS = 5
WIDTHS = [16, 72]  # 72: weights of more than 32 KiB, which are copied while backward runs


class StumbleError(Exception):
    """What a user's code raises inside backward."""


batch = partial(random_batch, dtype=torch.float64)


def stumble_once(rank, num_ranks, seed, who, layer, options, width):
    """Per step: the error's class and words, or the largest error of a gradient against one process."""
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    model = DistributedDataParallel(Mlp(width, dtype=torch.float64), **options)
    torch.manual_seed(seed)
    alone = Mlp(width, dtype=torch.float64)
    armed = [False]

    def stumble(gradient):
        if armed[0]:
            raise StumbleError(f"on purpose, rank {rank}")
        return gradient

    model.module.layers[layer].weight.register_hook(stumble)
    results = []
    for step in range(NUM_STEPS):
        armed[0] = step == BAD_STEP and rank in who
        model.zero_grad()
        alone.zero_grad()
        try:
            squares(model(batch(seed, step, rank))).backward()
        except Exception as error:
            results.append((type(error).__name__, str(error)))
            continue
        for r in range(num_ranks):
            (squares(alone(batch(seed, step, r))) / num_ranks).backward()
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        results.append(max((p.grad - q.grad).abs().max().item() for p, q in pairs))
    return results


OPTIONS = [{}, {"bucket_cap_mb": 0.0001}, {"find_unused_parameters": True}, {"static_graph": True}]
LAYERS = [0, 1, 3]


def stumble_everywhere(rank, num_ranks, seed, who):
    """Every layer at which it may happen, with all options; and every pair of either and a width."""
    cases = [
        (layer, options, WIDTHS[(row + column) % 2])
        for (row, layer), (column, options) in itertools.product(enumerate(LAYERS), enumerate(OPTIONS))
    ]
    return [(case, stumble_once(rank, num_ranks, seed, who, *case)) for case in cases]


def check_good_steps(rank, case, results):
    for step, result in enumerate(results):
        if step != BAD_STEP:
            assert isinstance(result, float), (rank, case, step, result)
            assert result < 1e-12, (rank, case, step, result)


def test_all_ranks_abort():
    """Every rank raises its own exception, and every other step is right."""
    for rank, of_rank in enumerate(pool(2).run(stumble_everywhere, 1, (0, 1))):
        assert len(of_rank) == len(LAYERS) * len(OPTIONS)
        for case, results in of_rank:
            check_good_steps(rank, case, results)
            assert results[BAD_STEP] == ("StumbleError", f"on purpose, rank {rank}"), case


@pytest.mark.parametrize(("num_ranks", "who"), [(2, 0), (2, 1), (3, 1)])
def test_one_rank_aborts(num_ranks, who):
    """The others' backward raises PeerAbortedError that names the rank; the steps after it are right on all ranks."""
    for rank, of_rank in enumerate(pool(num_ranks).run(stumble_everywhere, 2, (who,))):
        for case, results in of_rank:
            check_good_steps(rank, case, results)
            kind, words = results[BAD_STEP]
            if rank == who:
                assert (kind, words) == ("StumbleError", f"on purpose, rank {rank}"), case
            else:
                assert kind == "PeerAbortedError", case
                assert f"rank {who}" in words, case


def abort_under_no_sync(rank, num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(Mlp(dtype=torch.float64))
    torch.manual_seed(seed)
    alone = Mlp(dtype=torch.float64)
    handle = model.module.layers[0].weight.register_hook(_raise)
    try:
        with model.no_sync():
            squares(model(batch(seed, 0, rank))).backward()
    except StumbleError:
        caught = True
    handle.remove()
    model.zero_grad()
    squares(model(batch(seed, 1, rank))).backward()
    for r in range(num_ranks):
        (squares(alone(batch(seed, 1, r))) / num_ranks).backward()
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    return caught, max((p.grad - q.grad).abs().max().item() for p, q in pairs)


def _raise(_gradient):
    raise StumbleError


def test_abort_under_no_sync():
    """An exception in an unsynchronized backward concerns nobody else."""
    for caught, error in pool(2).run(abort_under_no_sync, 3):
        assert caught
        assert error < 1e-12


def evaluate_after_abort(rank, num_ranks, seed, context):
    """Rank 0's backward raises, and rank 0 evaluates until the others have been told. Then all train another step."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(Mlp(dtype=torch.float64))
    torch.manual_seed(seed)
    alone = Mlp(dtype=torch.float64)
    said = "nothing"
    handle = model.module.layers[0].weight.register_hook(_raise) if rank == 0 else None
    try:
        squares(model(batch(seed, 0, rank))).backward()
    except (StumbleError, PeerAbortedError) as error:
        said = type(error).__name__
    if handle is not None:
        handle.remove()
        model.eval()
        with CONTEXTS[context]():
            model(batch(seed, 0, rank))
        model.train()
    dist.barrier()  # the others come here only if they have been told
    model.zero_grad()
    squares(model(batch(seed, 1, rank))).backward()
    for r in range(num_ranks):
        (squares(alone(batch(seed, 1, r))) / num_ranks).backward()
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    return said, max((p.grad - q.grad).abs().max().item() for p, q in pairs)


CONTEXTS = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_rank_that_only_evaluates_tells_the_others(context):
    """The others learn that a backward raised from an evaluation, too, and are not left to the timeout."""
    stumbled, *others = pool(2).run(evaluate_after_abort, 5, context)
    assert [said for said, _ in (stumbled, *others)] == ["StumbleError", "PeerAbortedError"]
    assert all(error < 1e-12 for _, error in (stumbled, *others))


def abort_in_forward(rank, num_ranks, seed):
    """An exception in forward on all ranks, then a step."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(Mlp(dtype=torch.float64))
    torch.manual_seed(seed)
    alone = Mlp(dtype=torch.float64)
    try:
        model(torch.zeros(1, 3))
    except RuntimeError:
        caught = True
    squares(model(batch(seed, 1, rank))).backward()
    for r in range(num_ranks):
        (squares(alone(batch(seed, 1, r))) / num_ranks).backward()
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    return caught, max((p.grad - q.grad).abs().max().item() for p, q in pairs)


def test_exception_in_forward():
    """An exception in forward leaves the next step clean."""
    for caught, error in pool(2).run(abort_in_forward, 4):
        assert caught
        assert error < 1e-12

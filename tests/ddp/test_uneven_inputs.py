"""`join()`: ranks with different numbers of batches."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from harness.models import digest, random_batch, squares
from harness.ranks import pool
from paceline import DistributedDataParallel, convert_sync_batchnorm
from paceline.errors import ConfigurationError

pytestmark = pytest.mark.processes

NUM_BATCHES = [2, 5, 3]  # of ranks 0, 1, 2


class UnevenNet(nn.Module):
    """Two layers; optionally batch normalisation, and a parameter that is never used."""

    def __init__(self, kind):
        super().__init__()
        self.a = nn.Linear(4, 6 if kind != "wide" else 1400)
        self.norm = nn.BatchNorm1d(6) if kind == "buffers" else nn.Identity()
        self.b = nn.Linear(self.a.out_features, 2)
        if kind == "unused":
            self.never = nn.Linear(2, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x))))


batch = partial(random_batch, shape=(5, 4), dtype=torch.float64)


def reference(kind, seed, by_initial):
    """Parameters after training in one process with the gradients that `join` promises."""
    torch.manual_seed(seed)
    model = UnevenNet(kind).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(max(NUM_BATCHES)):
        active = [r for r, n in enumerate(NUM_BATCHES) if step < n]
        divisor = len(NUM_BATCHES) if by_initial else len(active)
        optimizer.zero_grad()
        for r in active:
            (squares(model(batch(seed, step, r))) / divisor).backward()
        optimizer.step()
    return model


def train_under_join(rank, _num_ranks, kind, seed, by_initial, options, accumulate):
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    model = DistributedDataParallel(UnevenNet(kind).double(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=by_initial):
        for step in range(NUM_BATCHES[rank]):
            if accumulate and step % 2 == 0 and step + 1 < NUM_BATCHES[rank]:
                with model.no_sync():
                    squares(model(batch(seed, step, rank))).backward()
                continue
            squares(model(batch(seed, step, rank))).backward()
            optimizer.step()
            optimizer.zero_grad()
    ended = digest([*model.parameters(), *model.buffers()])
    never = getattr(model.module, "never", None)
    model.zero_grad()
    squares(model(batch(seed, 99, rank))).backward()  # outside join everything is as before
    error = None
    if kind != "buffers" and not accumulate:
        alone = reference(kind, seed, by_initial)
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        error = max((p - q).abs().max().item() for p, q in pairs)
    return {
        "error": error,
        "state": ended,
        "gradients after": digest([p.grad for p in model.parameters() if p.grad is not None]),
        "buffers after": digest(list(model.buffers())),
        "never used": never is None or never.weight.grad is None,
    }


@pytest.mark.parametrize("by_initial", [True, False], ids=["by initial world size", "by active ranks"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.0001}, {"find_unused_parameters": True}],
    ids=lambda options: "+".join(options) or "default",
)
@pytest.mark.parametrize("kind", ["plain", "unused", "wide"])
def test_uneven_inputs_give_the_promised_gradients(kind, options, by_initial):
    """Three ranks with 2, 5 and 3 batches: the parameters of one process that divides as asked, on all ranks."""
    results = pool(3).run(train_under_join, kind, 1, by_initial, options, False)
    assert max(result["error"] for result in results) < 1e-12
    assert len({result["state"] for result in results}) == 1
    assert len({result["gradients after"] for result in results}) == 1
    assert all(result["never used"] for result in results), "a joined rank made an unused parameter used"


def test_uneven_inputs_with_buffers():
    """Batch normalisation under join: all ranks end with the same parameters and buffers."""
    results = pool(3).run(train_under_join, "buffers", 2, True, {}, False)
    assert len({result["state"] for result in results}) == 1


def test_after_join_everything_is_as_before():
    """Outside the context again, a synchronized backward leaves all ranks with the same gradients and buffers."""
    results = pool(3).run(train_under_join, "buffers", 3, True, {}, False)
    assert len({result["gradients after"] for result in results}) == 1
    assert len({result["buffers after"] for result in results}) == 1


def test_uneven_inputs_with_accumulation():
    """`no_sync` under join, where ranks reach their synchronized step at different times or not at all."""
    results = pool(3).run(train_accumulating, 3)
    assert len(set(results)) == 1


def train_accumulating(rank, _num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(UnevenNet("plain").double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range([4, 8, 2][rank]):
            if step % 2 == 0:
                with model.no_sync():
                    squares(model(batch(seed, step, rank))).backward()
            else:
                squares(model(batch(seed, step, rank))).backward()
                optimizer.step()
                optimizer.zero_grad()
    return digest(list(model.parameters()))


def early_termination(rank, _num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(UnevenNet("plain").double())
    steps = 0
    try:
        with model.join(throw_on_early_termination=True):
            for step in range(NUM_BATCHES[rank]):
                squares(model(batch(seed, step, rank))).backward()
                steps += 1
    except RuntimeError as error:
        return steps, str(error)
    return steps, None


def test_throw_on_early_termination():
    """All ranks raise as soon as the first has no more batches, in torch's words."""
    results = pool(3).run(early_termination, 4)
    assert [steps for steps, _ in results] == [min(NUM_BATCHES)] * 3
    assert results[0][1] == "Rank 0 exhausted all inputs."
    for _, words in results[1:]:
        assert words == "Detected at least one rank that exhausted inputs. Throwing across all ranks."


def nobody_has_inputs(_rank, _num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(UnevenNet("plain").double())
    with model.join():
        pass
    with model.join(enable=False):
        squares(model(batch(seed, 0, 0))).backward()
    return True


def test_join_without_any_batch_and_disabled():
    """An empty join returns; enable=False changes nothing."""
    assert pool(2).run(nobody_has_inputs, 5) == [True, True]


def joined_with_another(rank, _num_ranks, seed):
    """Two wrapped modules and a ZeroRedundancyOptimizer in one Join."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(seed)
    first = DistributedDataParallel(UnevenNet("plain"))
    second = DistributedDataParallel(nn.Linear(2, 1))
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    with Join([first, second, optimizer]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            squares(first(batch(seed, step, rank).float())).backward()
            squares(second(batch(seed, step, rank).float()[:, :2])).backward()
            optimizer.step()
    return digest(parameters)


@pytest.mark.filterwarnings("ignore")
def test_join_of_several_joinables():
    """Our modules work in a `Join` beside each other and beside torch's Joinables."""
    first, second = pool(2).run(joined_with_another, 6)
    assert first == second


def with_hook(rank, _num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(UnevenNet("plain"))
    world = dist.get_world_size()

    def hook(_state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(world), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(1 + 2 * rank):
            optimizer.zero_grad()
            squares(model(batch(seed, step, rank).float())).backward()
            optimizer.step()
    return digest(list(model.parameters()))


def test_join_with_a_communication_hook():
    """A joined rank shadows through the hook too."""
    first, second = pool(2).run(with_hook, 7)
    assert first == second


def joined_with_synchronized_norms(rank, _num_ranks, seed):
    """What three contexts end with: training, training that ends with the first rank's batches, evaluation."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(convert_sync_batchnorm(UnevenNet("buffers").double()))
    words = []
    for make in (model.join, lambda: Join([model]), partial(model.join, throw_on_early_termination=True)):
        try:
            with make():
                for step in range(1 + rank):
                    squares(model(batch(seed, step, rank))).backward()
        except (ConfigurationError, RuntimeError) as error:
            words.append(str(error).partition(":")[0])
    model.eval()
    with model.join(), torch.no_grad():
        for step in range(1 + rank):
            model(batch(seed, step, rank))
    return words


def test_join_with_synchronized_batch_norm_is_refused():
    """A rank without batches runs no forward, in which the layers of the others would wait for it."""
    refused = ["join() and synchronized batch normalisation"] * 2
    first, second = pool(2).run(joined_with_synchronized_norms, 8)
    assert first == [*refused, "Rank 0 exhausted all inputs."]
    assert second == [
        *refused,
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
    ]

"""`model.accumulate`: the gradients of one process on all samples; no mistake goes unnoticed."""

import contextlib
import copy
import math
import os
import signal
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from harness.models import WORKLOADS, Mlp, conv_net, digest, generator, squares
from harness.ranks import Ranks, pool
from paceline import DistributedDataParallel, convert_sync_batchnorm, errors, windows
from paceline.errors import ConfigurationError, PeerAbortedError, PeerLostError, ProtocolError
from paceline_adasum import combine

pytestmark = pytest.mark.processes

FINE = 0.0001  # MiB: a bucket for almost every gradient
CASES = {
    "mlp": ("mlp", {}),
    "fine buckets": ("mlp", {"bucket_cap_mb": FINE}),
    "large gradients": ("wide_mlp", {"bucket_cap_mb": FINE}),
    "shared parameter": ("tied", {}),
    "unused": ("mlp", {"find_unused_parameters": True}),
    "sparse": ("sparse", {}),
    "batch norm": ("conv_bn", {"bucket_cap_mb": FINE}),
    "hook": ("mlp", {}),
}


def largest_difference(model, alone):
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    return max((p.grad.to_dense() - q.grad.to_dense()).abs().max().item() for p, q in pairs)


def weights_of(case, step, rank):
    """What a rank's micro-batches of a step count: zero to four of them, some of them nothing, at least one in all."""
    source = generator(len(case), step, rank)
    count = int(torch.randint(0, 5, (), generator=source))
    weights = torch.randint(0, 6, (count,), generator=source).tolist()
    return weights if rank or step else [*weights, 3]


def micro_batch(workload, step, rank, place):
    batch = workload.batch(generator(step, rank, place))
    return tuple(x.double() if x.is_floating_point() else x for x in batch)


def random_windows(rank, num_ranks, case):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    name, options = CASES[case]
    workload = WORKLOADS[name]
    model = DistributedDataParallel(workload.build().double(), **options)
    if case == "hook":
        model.register_comm_hook(None, allreduce_hook)
    found = []
    for step in range(4):
        every_weight = [weights_of(case, step, r) for r in range(num_ranks)]
        total = sum(map(sum, every_weight))
        alone = copy.deepcopy(model.module)
        alone.zero_grad()
        for r, weights in enumerate(every_weight):
            for place, weight in enumerate(weights):
                if weight:
                    loss = workload.loss(alone(*micro_batch(workload, step, r, place)))
                    (loss * weight / total).backward()
        mine = [(weight, micro_batch(workload, step, rank, i)) for i, weight in enumerate(every_weight[rank])]
        with model.accumulate(mine, weight=lambda pair: pair[0]) as micro_batches:
            for _, batch in micro_batches:
                workload.loss(model(*batch)).backward()
        assert micro_batches.total_weight == total
        bits = digest([*[p.grad for p in model.parameters()], *model.buffers()])
        found.append((largest_difference(model, alone) if total else 0.0, bits))
        model.zero_grad(set_to_none=step % 2 == 0)
    return found


@pytest.mark.parametrize("case", CASES)
def test_random_windows_are_one_process(case):
    """Different numbers of micro-batches on the ranks, none on some, of any weight: to rounding, and bitwise on all."""
    steps = zip(*pool(3).run(random_windows, case), strict=True)
    for step in steps:
        assert max(error for error, _ in step) < 1e-14
        assert len({bits for _, bits in step}) == 1


class Masked(nn.Module):
    """Logits of tokens."""

    def __init__(self, dtype):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)).to(dtype)

    def forward(self, tokens):
        return self.body(tokens).transpose(1, 2)


def masked_tokens(rank, num_ranks, dtype):
    """As in language modelling: the loss is the mean over targets that are not masked, of which there may be none."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Masked(dtype))
    criterion = nn.CrossEntropyLoss()

    def batches(r):
        source = generator(r)
        for length in [[4, 9, 2], [12], [6, 1]][r]:
            tokens = torch.randint(0, 7, (3, length), generator=source)
            targets = torch.randint(0, 7, (3, length), generator=source)
            targets[torch.rand(targets.shape, generator=source) < 0.4] = -100
            if length == 2 or r == 1:
                targets[:] = -100
            yield tokens, targets

    with model.accumulate(
        list(batches(rank)), weight=lambda batch: (batch[1] != -100).sum()
    ) as micro_batches:
        for tokens, targets in micro_batches:
            criterion(model(tokens).float(), targets).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    alone = copy.deepcopy(model.module).double()
    alone.zero_grad()
    summed = nn.CrossEntropyLoss(reduction="sum")
    every = [batch for r in range(num_ranks) for batch in batches(r)]
    num_targets = sum(int((targets != -100).sum()) for _, targets in every)
    (sum(summed(alone(tokens), targets) for tokens, targets in every) / num_targets).backward()
    alone_norm = nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
    assert micro_batches.total_weight == num_targets
    bits = digest(p.grad for p in model.parameters())
    return largest_difference(model, alone), bits, float(norm) / float(alone_norm)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)]
)
def test_the_mean_over_tokens(dtype, bound):
    """Weighted by unmasked tokens it is the mean over all ranks' tokens; a micro-batch without any does no harm."""
    results = pool(3).run(masked_tokens, dtype)
    assert max(error for error, _, _ in results) < bound
    assert len({bits for _, bits, _ in results}) == 1
    assert math.isclose(results[0][2], 1.0, rel_tol=bound)


def other_reductions(rank, num_ranks):
    """Relative distances of weighted gradients from what bf16 compression and Adasum are to make of them."""
    torch.manual_seed(0)
    plain = Mlp(dtype=torch.float64)
    sizes = [[3, 1], [5], []]
    data = [
        [torch.randn(n, 8, generator=generator(r, n), dtype=torch.float64) for n in sizes[r]]
        for r in range(num_ranks)
    ]
    factors, grads = [], []
    for batches in data:
        alone = copy.deepcopy(plain)
        for x in batches:
            (squares(alone(x)) * len(x) * num_ranks / sum(map(sum, sizes))).backward()
        grads.append([torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()])
    # To Adasum a rank without samples is not there, so the others' weights average to 1.
    present = [[g * 2 / num_ranks for g in gradients] for gradients in grads[:2]]
    wanted = {"bf16": [sum(g) / num_ranks for g in zip(*grads, strict=True)], "adasum": combine(present)}
    for name, gradients in wanted.items():
        options = {"compression": "bf16"} if name == "bf16" else {"reduction": name}
        model = DistributedDataParallel(
            copy.deepcopy(plain).float() if name == "bf16" else copy.deepcopy(plain), **options
        )
        with model.accumulate(data[rank], weight=len) as window:
            for x in window:
                squares(model(x.to(next(model.parameters()).dtype))).backward()
        pairs = zip(model.parameters(), gradients, strict=True)
        factors.append(max(((p.grad - g).norm() / g.norm()).item() for p, g in pairs))
    return factors


def test_weights_under_other_reductions():
    """They are given each rank's gradients times its weight relative to the average (Adasum: of ranks with data)."""
    for bf16, adasum in pool(3).run(other_reductions):
        assert bf16 < 1e-2
        assert adasum < 1e-12


def dies_in_a_window(rank, _num_ranks):
    model = DistributedDataParallel(Mlp())
    told = "nothing"
    try:
        with model.accumulate([torch.ones(2, 8)] * 3) as window:
            for place, x in enumerate(window):
                if (rank, place) == (1, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                squares(model(x)).backward()
    except PeerLostError as error:
        told = str(error)
    with pytest.raises(ProtocolError, match="communication of this module failed earlier"):
        model.accumulate([]).__enter__()
    return told


def test_a_rank_that_dies_in_its_window():
    """The others say who, and do not wait for it a second time on their way out."""
    survivor, victim = pool(2).outcomes(dies_in_a_window)
    assert victim.exit_code == -signal.SIGKILL
    assert "when communication failed: rank 1" in survivor.value


def equal_weights(rank, _num_ranks):
    torch.manual_seed(0)
    data = torch.randn(4, 6, 8, generator=generator(rank))
    model = DistributedDataParallel(Mlp())
    found = []
    for cut in (data[:1], data):
        model.zero_grad()
        with model.accumulate(cut, weight=len) as micro_batches:
            for x in micro_batches:
                squares(model(x)).backward()
        weighted = digest(p.grad for p in model.parameters())
        model.zero_grad()
        with model.no_sync():
            for x in cut[:-1]:
                (squares(model(x)) / len(cut)).backward()
        (squares(model(cut[-1])) / len(cut)).backward()
        found.append((weighted, digest(p.grad for p in model.parameters())))
    return found


def test_equal_weights_are_the_plain_mean():
    """Bitwise what `no_sync` and dividing the loss by the number of micro-batches give, for 1 and 4 of them."""
    for found in pool(2).run(equal_weights):
        for weighted, plain in found:
            assert weighted == plain


def in_windows(rank, _num_ranks):
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(), bucket_cap_mb=FINE)
    sent = []
    for batches in windows((torch.ones(2, 8) * i for i in range(7)), steps=3):
        with model.accumulate(batches) as micro_batches:
            for x in micro_batches:
                squares(model(x)).backward()
                sent.append(len(model.timings))
        model.zero_grad()
    return sent


def test_only_the_last_backward_of_a_window_communicates():
    """Also of the shorter window at an epoch's end."""
    assert pool(2).run(in_windows) == [[0, 0, 1, 1, 1, 2, 3]] * 2
    with pytest.raises(ConfigurationError, match="steps=0"):
        windows([], 0)


def nothing_counts(_rank, _num_ranks):
    model = DistributedDataParallel(Mlp())
    before = digest(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    with model.accumulate([torch.ones(2, 8)], weight=lambda _: 0) as micro_batches:
        assert not list(micro_batches)
    optimizer.step()
    return before == digest(model.parameters()), micro_batches.total_weight


def test_a_step_in_which_nothing_counts_changes_nothing():
    """Not even weight decay: there are no gradients."""
    assert pool(2).run(nothing_counts) == [(True, 0.0)] * 2


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _gradient):
        raise ValueError("out of memory, say")


def ordinary(model, window):
    for x in window:
        squares(model(x)).backward()


def leave_early(model, window):
    for x in window:
        squares(model(x)).backward()
        break


def skip_one(model, window):
    for i, x in enumerate(window):
        if i:
            squares(model(x)).backward()


def skip_the_last(model, window):
    for i, x in enumerate(window):
        if not i:
            squares(model(x)).backward()


def two_backwards(model, window):
    for x in window:
        squares(model(x)).backward()
        squares(model(x)).backward()


def one_backward_for_all(model, window):
    sum(squares(model(x)) for x in window).backward()


def forward_too_early(model, window):
    outputs = [model(torch.ones(2, 8).double()) for _ in range(2)]
    for output, _ in zip(outputs, window, strict=True):
        squares(output).backward()


def in_no_sync(model, window):
    for x in window:
        with model.no_sync():
            squares(model(x)).backward()


def raise_before_the_first(model, window):
    raise ValueError("out of memory, say")


def raise_in_the_first(model, window):
    for x in window:
        _Fails.apply(model(x)).sum().backward()


def raise_in_the_last_loss(model, window):
    for i, x in enumerate(window):
        loss = squares(model(x))
        if i:
            raise ValueError("out of memory, say")
        loss.backward()


def raise_in_the_last_backward(model, window):
    for i, x in enumerate(window):
        loss = squares(model(x if i == 0 else _Fails.apply(x.requires_grad_())))
        loss.backward()


def never_iterate(model, window):
    pass


MISTAKES = {
    leave_early: (ProtocolError, "left after 1 of 2 micro-batches"),
    skip_one: (ProtocolError, "micro-batch 1 of 2 had no backward"),
    skip_the_last: (ProtocolError, "micro-batch 2 of 2 had no backward"),
    two_backwards: (
        ProtocolError,
        "micro-batch 1 of 2 had 2 forward(s) of the wrapped model and now has backward 2",
    ),
    one_backward_for_all: (ProtocolError, "micro-batch 1 of 2 had no backward"),
    forward_too_early: (ProtocolError, "micro-batch 1 of 2 had 0 forward(s)"),
    in_no_sync: (ProtocolError, "micro-batch 2 of 2 ran under no_sync()"),
    raise_before_the_first: (ValueError, "out of memory, say"),
    raise_in_the_first: (ValueError, "out of memory, say"),
    raise_in_the_last_loss: (ValueError, "out of memory, say"),
    raise_in_the_last_backward: (ValueError, "out of memory, say"),
    never_iterate: (ProtocolError, "left after 0 of 2 micro-batches"),
}


class MaybeNormalised(nn.Module):
    """Takes vectors, with or without batch normalisation."""

    def __init__(self, has_norm):
        super().__init__()
        self.body = (
            nn.Sequential(nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 3, 1), conv_net()) if has_norm else Mlp()
        )

    def forward(self, x):
        return self.body(x)


def one_mistake(rank, num_ranks, name, has_norm):
    """Rank 1 makes a mistake in the second of three windows."""
    torch.manual_seed(0)
    model = DistributedDataParallel(MaybeNormalised(has_norm).double(), bucket_cap_mb=FINE)
    mistake = {wrong.__name__: wrong for wrong in MISTAKES}[name]
    told, worst = "nothing", 0.0
    for step in range(3):
        data = [
            [torch.randn(3, 8, generator=generator(step, r, i), dtype=torch.float64) for i in range(2)]
            for r in range(num_ranks)
        ]
        model.zero_grad()
        try:
            with model.accumulate(data[rank]) as window:
                (mistake if step == 1 and rank == 1 else ordinary)(model, window)
        except (ValueError, ProtocolError) as error:
            told = f"{type(error).__name__} {error}"
            assert step == 1
            assert all(p.grad is None for p in model.parameters())
            continue
        alone = copy.deepcopy(model.module)
        alone.zero_grad()
        (sum(squares(alone(x)) for batches in data for x in batches) / (2 * num_ranks)).backward()
        worst = max(worst, largest_difference(model, alone))
    return told, worst


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "buffers"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda wrong: wrong.__name__)
def test_a_mistake_on_one_rank_is_an_error_on_all(mistake, has_norm):
    """The rank says what it did, the others say which rank; gradients are dropped, and the next window is clean."""
    other, wrong = pool(2).run(one_mistake, mistake.__name__, has_norm)
    kind, words = MISTAKES[mistake]
    assert wrong[0].startswith(f"{kind.__name__} ")
    assert words in wrong[0]
    assert other[0].startswith("PeerAbortedError rank 0: the backward of rank 1 raised")
    assert max(wrong[1], other[1]) < 1e-14


def cannot_begin(rank, _num_ranks, case):
    torch.manual_seed(0)
    model = DistributedDataParallel(MaybeNormalised(has_norm=True))
    told = "nothing"
    for step in range(3):
        wrong = step == 1 and rank == 1
        if not (wrong and case == "gradients"):
            model.zero_grad()
        weight = {"negative": lambda _: -1, "nan": lambda _: math.nan, "raises": lambda b: b.no_such}.get(
            case
        )
        try:
            with model.accumulate([torch.ones(2, 8)] * 2, weight if wrong else None) as window:
                ordinary(model, window)
        except (ConfigurationError, PeerAbortedError, AttributeError) as error:
            told = f"{type(error).__name__} {error}"
    return told, digest(p.grad for p in model.parameters())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("negative", "ConfigurationError micro-batch 0 of 2 has weight -1.0"),
        ("nan", "ConfigurationError micro-batch 0 of 2 has weight nan"),
        ("raises", "AttributeError 'Tensor' object has no attribute 'no_such'"),
        ("gradients", "ConfigurationError body.1.weight has a gradient from before this window"),
    ],
)
def test_a_rank_that_cannot_begin_its_window(case, words):
    """It says why; the others, in the same window, that it could not."""
    (told, bits), (why, others) = pool(2).run(cannot_begin, case)
    assert why.startswith(words)
    assert told.startswith("PeerAbortedError rank 0: rank 1 could not begin its window")
    assert bits == others


def misused(_rank, _num_ranks):
    model = DistributedDataParallel(Mlp())
    data = [torch.ones(2, 8)]
    with pytest.raises(ProtocolError, match="has not begun"):
        model.accumulate(data).total_weight  # noqa: B018  raises
    with pytest.raises(ConfigurationError, match="within another accumulate"), model.no_sync():
        model.accumulate(data).__enter__()
    with pytest.raises(ConfigurationError, match="within another accumulate"), model.accumulate(data):
        model.accumulate(data).__enter__()
    window = model.accumulate(data)
    with pytest.raises(ProtocolError, match="iterate over a window once"):
        ordinary(model, window)
    with window:
        ordinary(model, window)
        with pytest.raises(ProtocolError, match="iterate over a window once"):
            ordinary(model, window)
        with pytest.raises(ProtocolError, match="now has backward 2"):
            squares(model(data[0])).backward()
    with pytest.raises(ConfigurationError, match="a window entered twice"), window:
        pass
    return digest(p.grad for p in model.parameters())


def test_misuse_on_all_ranks():
    """Each is an error on every rank, before anybody waits."""
    first, second = pool(2).run(misused)
    assert first == second


def synchronized_norm(rank, _num_ranks):
    model = DistributedDataParallel(convert_sync_batchnorm(conv_net()))
    data = [torch.randn(2, 3, 8, 8, generator=generator(rank, i)) for i in range(1 + rank)]
    with pytest.raises(ConfigurationError, match="windows have 1, 2 micro-batches"), model.accumulate(data):
        pass
    with model.accumulate(data[:1]) as window:
        ordinary(model, window)
    return digest(p.grad for p in model.parameters())


def raise_where_others_wait(rank, num_ranks, backend):
    """Rank 1 raises in its second window, while rank 0 is in a layer that waits for it, and lives on."""
    group, store = dist.new_group(backend=backend), dist.distributed_c10d._get_default_store()
    model = DistributedDataParallel(convert_sync_batchnorm(conv_net()), process_group=group)
    data, told = torch.randn(2, 3, 8, 8, generator=generator(rank)), []
    for step in range(3):
        model.zero_grad()
        try:
            with model.accumulate([data]) as window:
                (raise_before_the_first if step and rank else ordinary)(model, window)
        except (RuntimeError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")
    store.set(f"{rank} is told", b"")
    store.wait([f"{each} is told" for each in range(num_ranks)])
    return told


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_a_rank_that_raises_where_others_wait_is_named(backend):
    """Its error comes at once, and theirs soon; no rank waits for the timeout, and none trains the model any more."""
    (other, *others), (wrong, *refused) = pool(2).run(raise_where_others_wait, backend)
    assert wrong == "ValueError: out of memory, say"
    assert other.startswith(
        "PeerLostError: rank 0 was summing statistics of synchronized batch normalisation"
    )
    assert "left its step with ValueError" in other.partition("The backend said")[0]
    for words in (*others, *refused):
        assert words.startswith("ProtocolError: communication of this module failed earlier")


def raise_beside_a_collective(rank, _num_ranks):
    """Rank 1 raises, and ends, while rank 0 is in a collective of the script's."""
    model = DistributedDataParallel(Mlp())
    with model.accumulate([torch.ones(2, 8)]) as window:
        for x in window:
            if rank:
                raise ZeroDivisionError("a bad sample")
            dist.all_reduce(torch.ones(1))
            squares(model(x)).backward()


class Telling:
    """A stderr that also tells the ranks of the store."""

    def __init__(self, store):
        self.store, self.text = store, ""

    def write(self, text):
        self.text += text
        self.store.set("it is shown", b"")

    def flush(self):
        """Do nothing."""


def raise_where_launching_does_not_tell(rank, _num_ranks, case):
    """Rank 1 raises, and rank 0 waits until that error is shown. Return what is shown, and the error's name."""
    store = dist.PrefixStore(case, dist.distributed_c10d._get_default_store())
    network = Mlp()
    given = {"droppable": [network.layers[0]]} if case == "droppable" else {}
    model = DistributedDataParallel(network, **given)
    if case == "hook":
        model.register_comm_hook(None, allreduce_hook)
    shown, name = Telling(store), ""
    try:
        with (
            mock.patch.object(errors, "SHOWN_AFTER_S", 0.0),
            contextlib.redirect_stderr(shown),
            model.accumulate([torch.ones(2, 8)] * 2) as window,
        ):
            for x in window:
                assert not rank, "a bad sample"
                store.wait(["it is shown"])
                squares(model(x)).backward()
    except (AssertionError, PeerAbortedError) as error:
        name = type(error).__name__
    return shown.text, name


@pytest.mark.parametrize("case", ["droppable", "hook"])
def test_an_error_is_shown_while_its_rank_waits(case):
    """Other ranks may wait for that rank in a collective of the script's: it would be shown behind the timeout only."""
    (_, aborted), (shown, raised) = pool(2).run(raise_where_launching_does_not_tell, case)
    assert (aborted, raised) == ("PeerAbortedError", "AssertionError")
    assert shown.startswith("rank 1 has raised an exception and waits for the other ranks")
    assert "AssertionError: a bad sample" in shown


def raise_and_end(rank, num_ranks):
    try:
        raise_beside_a_collective(rank, num_ranks)
    except ZeroDivisionError:
        os._exit(7)


def test_a_rank_that_raises_beside_a_collective_of_the_script_is_named():
    """It does not wait, so it ends; the error that the backend then raises on the others becomes one with its name."""
    with Ranks(2) as ranks:
        first, second = ranks.outcomes(raise_and_end)
    assert second.exit_code == 7, second.story()
    assert first.error is not None
    assert first.error.is_a("PeerLostError"), first.story()
    assert (
        "rank 0 was within a window of micro-batches when communication failed: rank 1" in first.error.message
    )


def refuse_with_a_norm(rank, _num_ranks):
    """Rank 1 cannot begin its second window, in which rank 0 would wait for it in forward."""
    model = DistributedDataParallel(convert_sync_batchnorm(conv_net()))
    data, told = torch.randn(2, 3, 8, 8, generator=generator(rank)), ""
    for step in range(3):
        model.zero_grad()
        try:
            with model.accumulate(
                [data], weight=lambda _, step=step: -1 if rank and step == 1 else 1
            ) as window:
                ordinary(model, window)
        except (ConfigurationError, PeerAbortedError) as error:
            told = f"{step} {type(error).__name__}"
    return told, digest(p.grad for p in model.parameters())


def test_a_window_that_cannot_begin_where_others_would_wait():
    """They are told before their forward, and the next window is clean."""
    (first, gradients), (second, others) = pool(2).run(refuse_with_a_norm)
    assert (first, second) == ("1 PeerAbortedError", "1 ConfigurationError")
    assert gradients == others


def test_synchronized_norms_need_equal_counts():
    """Refused before the first forward would hang; equal counts work."""
    first, second = pool(2).run(synchronized_norm)
    assert first == second


NUM_BATCHES = [3, 8, 0]  # of ranks 0, 1 and 2, in windows of up to 2


def uneven(rank, num_ranks, has_norm):
    torch.manual_seed(0)
    model = DistributedDataParallel(MaybeNormalised(has_norm).double(), bucket_cap_mb=FINE)
    alone = copy.deepcopy(model.module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]

    def data(r):
        source = (
            torch.randn(1 + (r + i) % 3, 8, generator=generator(r, i), dtype=torch.float64)
            for i in range(NUM_BATCHES[r])
        )
        return list(windows(source, 2))

    with model.join():
        for batches in data(rank):
            with model.accumulate(batches, weight=len) as window:
                ordinary(model, window)
            optimizers[0].step()
            optimizers[0].zero_grad()
    for step in range(4):
        batches = [x for r in range(num_ranks) for x in (data(r)[step : step + 1] or [[]])[0]]
        total = sum(map(len, batches))
        for x in batches:
            (squares(alone(x)) * len(x) / total).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    error = 0.0 if has_norm else max((p - q).abs().max().item() for p, q in pairs)
    return error, digest([*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "buffers"])
def test_windows_in_join(has_norm):
    """Ranks with 2, 4 and 0 windows, of different sizes: the samples that there are count equally in every step."""
    results = pool(3).run(uneven, has_norm)
    assert max(error for error, _ in results) < 1e-14
    assert len({bits for _, bits in results}) == 1

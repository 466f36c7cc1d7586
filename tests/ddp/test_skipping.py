"""Layers that a step leaves out: their buckets stay on the shelf, and every gradient is what it is without that."""

import os
import random
import time
import warnings
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from harness.models import digest, generator, random_batch, squares
from harness.ranks import Ranks, pool
from paceline import DistributedDataParallel
from paceline.ddp.droppable import units_of
from paceline.ddp.ready_tracking import completed
from paceline.errors import ConfigurationError, PeerAbortedError, PeerLostError, ProtocolError, SkipError
from paceline.planning.bucket_assignment import BucketCaps, GradientSpec, assign_buckets
from paceline.reductions import PowerSGD

NUM_BLOCKS = 4
WIDTH = 96  # weights of more than 32 KiB, biases of less
NUM_STEPS = 5
SMALL_CAPS = {"bucket_cap_mb": 0.01}


class ResidualNet(nn.Module):
    """A stem, residual blocks of which a forward drops those it is told to, and a head."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=block % 2 == 0))
            for block in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 2)
        self.reentrant = reentrant

    def forward(self, x, dropped=()):
        hidden = torch.tanh(self.stem(x))
        for number, block in enumerate(self.blocks):
            if number not in dropped:
                run = checkpoint(block, hidden, use_reentrant=True) if self.reentrant else block(hidden)
                hidden = hidden + run
        return self.head(hidden)


def make(seed, reentrant=False):
    torch.manual_seed(seed)
    return ResidualNet(reentrant)


def ours(net, **options):
    return DistributedDataParallel(net, droppable=net.blocks, **options)


batch = partial(random_batch, shape=(3, 6))


def drawn(seed, step):
    """The blocks that a step drops; the same on every rank."""
    source = random.Random(f"{seed} {step}")
    return [block for block in range(NUM_BLOCKS) if source.random() < 0.5]


def skipping(model, dropped):
    """Within it `dropped` blocks are declared; torch's class and others have nothing to declare."""
    stack = ExitStack()
    if isinstance(model, DistributedDataParallel) and model._paceline_setting.droppable:
        stack.enter_context(model.skip([model.module.blocks[block] for block in dropped]))
    return stack


def bits(model):
    return [None if p.grad is None else digest([p.grad]) for p in model.module.parameters()]


def num_shelved(model):
    return sum(bucket.size_bytes == 0 for bucket in model.timings.last.buckets)


def trained(model, rank, seed, declares=True, kept=()):
    """Bits of all gradients and parameters in each step, and how many buckets each has left out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found, shelved = [], []
    for step in range(NUM_STEPS):
        if step not in kept:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        dropped = drawn(seed, step)
        with skipping(model, dropped if declares else ()):
            squares(model(batch(seed, step, rank), dropped)).backward()
        found.append(bits(model))
        optimizer.step()
        found.append([digest(list(model.parameters()))])
        if isinstance(model, DistributedDataParallel):
            shelved.append(num_shelved(model))
    return found, shelved


# ---- the same gradients

OURS = {
    "skip": ours,
    "skip, small buckets": lambda net: ours(net, **SMALL_CAPS),
    "skip, one unit": lambda net: DistributedDataParallel(
        net, droppable=[net.blocks[0], "blocks.1", [*net.blocks[2:]]]
    ),
    "skip, paceline's backend": lambda net: ours(net, process_group=dist.new_group(backend="paceline")),
    "skip, in turns": lambda net: ours(net, process_group=[dist.group.WORLD, dist.new_group()]),
    "torch's option": lambda net: DistributedDataParallel(
        net, skip_all_reduce_unused_params=True, **SMALL_CAPS
    ),
    "torch's option, all in one": lambda net: DistributedDataParallel(
        net, skip_all_reduce_unused_params=True
    ),
    "torch's option, buckets apart": lambda net: ours(net, skip_all_reduce_unused_params=True),
    "both": lambda net: ours(net, skip_all_reduce_unused_params=True, find_unused_parameters=True),
}


def like_torch(rank, _num_ranks):
    """For each way: whether all bits are torch's; and what was left out."""
    expected, _ = trained(TorchDDP(make(1), find_unused_parameters=True), rank, 1, kept=(3,))
    outcomes = {}
    for name, wrap in OURS.items():
        model = wrap(make(1))
        declares = name.startswith("skip") or name == "both"
        if name == "skip, one unit":
            found = []
            reference = TorchDDP(make(1), find_unused_parameters=True)
            for step, dropped in enumerate(([2, 3], [0], [0, 1, 2, 3], [], [1, 2, 3])):
                for each in (reference, model):
                    each.zero_grad()
                    with skipping(each, dropped):
                        squares(each(batch(1, step, rank), dropped)).backward()
                found.append(bits(reference) == bits(model))
            outcomes[name] = all(found), [num_shelved(model)]
        else:
            got, shelved = trained(model, rank, 1, declares, kept=(3,))
            outcomes[name] = got == expected, shelved
    return outcomes


@pytest.mark.processes
def test_bits_are_torchs_and_dropped_buckets_stay():
    """Two ranks: gradients, None included, and parameters are bit by bit those of torch's find_unused_parameters."""
    first, second = pool(2).run(like_torch)
    assert first == second
    dropped = [len(drawn(1, step)) for step in range(NUM_STEPS)]
    assert max(dropped) > 1
    for name, (is_equal, shelved) in first.items():
        assert is_equal, name
        if name in (
            "skip",
            "torch's option, buckets apart",
            "both",
            "skip, paceline's backend",
            "skip, in turns",
        ):
            assert shelved == dropped, name
        else:
            assert (sum(shelved) > 0) == ("all in one" not in name), name


def branches_of_ranks(rank, num_ranks):
    """Gradients where every rank drops other blocks; against all in one process."""
    model = ours(make(2).double(), skip_all_reduce_unused_params=True)
    alone = make(2).double()
    wrong, shelved = [], 0
    for step in range(12):
        model.zero_grad(set_to_none=step % 3 != 2)
        alone.zero_grad(set_to_none=step % 3 != 2)
        for r in range(num_ranks):
            dropped = [*drawn(f"rank {r}", step), *drawn("all", step)]
            x = batch(2, step, r).double()
            (squares(alone(x, dropped)) / num_ranks).backward()
            if r == rank:
                squares(model(x, dropped)).backward()
        shelved += num_shelved(model)
        for (name, p), q in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            is_wrong = p.grad is None if q.grad is not None else p.grad is not None
            if is_wrong or (p.grad is not None and not torch.allclose(p.grad, q.grad, atol=1e-12)):
                wrong.append((step, name))
    return wrong, shelved, [digest([p.grad for p in model.parameters() if p.grad is not None])]


@pytest.mark.processes
def test_what_one_rank_uses_is_reduced():
    """Torch's option, where torch's own hangs: ranks that use different layers agree on what nobody needs."""
    first, *others = pool(3).run(branches_of_ranks)
    assert first[0] == []
    assert first[1] > 5
    assert all(other == first for other in others)


# ---- beside everything else


def without_declaring(rank, _num_ranks):
    """Each way once with the declaration and once without, on equal buckets: the same bits, or what differs."""
    ways = {
        "int8": {"compression": "int8"},
        "topk": {"compression": "topk"},
        "powersgd": {"compression": PowerSGD},
        "bf16": {"compression": "bf16"},
        "adasum": {"reduction": "adasum"},
        "weight": {"weight": lambda x, _: float(len(x))},
    }
    wrong = []
    for name, given in ways.items():
        runs, states = [], []
        for declares in (True, False):
            options = {key: value() if value is PowerSGD else value for key, value in given.items()}
            model = ours(make(3), **options)
            found = []
            for step in range(NUM_STEPS):
                dropped = drawn(3, step)
                model.zero_grad()
                before = residuals(model)
                with skipping(model, dropped if declares else ()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    squares(model(batch(3, step, rank, shape=(3 + rank, 6)), dropped)).backward()
                found.append(bits(model))
                after = residuals(model)
                names = {f"blocks.{block}." for block in dropped}
                found += [
                    before.get(k) == v for k, v in after.items() if k in before and k.startswith(tuple(names))
                ]
            runs.append(found)
            states.append(residuals(model))
            if declares and num_shelved(model) != len(drawn(3, NUM_STEPS - 1)):
                wrong.append(f"{name}: nothing left out")
        if runs[0] != runs[1] or states[0] != states[1]:
            wrong.append(name)
    return wrong


def residuals(model):
    state = model.reduction.state_dict().get("memories", {})
    return {name: digest([tensor]) for memory in state.values() for name, tensor in memory.items()}


@pytest.mark.processes
def test_other_reductions_and_weights_are_as_without():
    """Compressed, with residuals, which stay; Adasum; unequal weights: bits of steps that declare nothing."""
    assert pool(2).run(without_declaring) == [[], []]


def accumulated(rank, _num_ranks):
    """A layer that an earlier micro-batch has used is reduced; what none has used is left out. Against torch's."""
    models = [ours(make(4)), TorchDDP(make(4), find_unused_parameters=True)]
    taken = []
    for model in models:
        with model.no_sync(), skipping(model, [1, 2]):
            squares(model(batch(4, 0, rank), [1, 2])).backward()
        with skipping(model, [0, 1]):
            squares(model(batch(4, 1, rank), [0, 1])).backward()
        taken.append(bits(model))
    shelved = [num_shelved(models[0])]
    window = ours(make(4))
    with (
        window.skip(window.module.blocks[1]),
        window.accumulate([batch(4, i, rank) for i in range(1 + rank)]) as parts,
    ):
        for part in parts:
            squares(window(part, [1])).backward()
    shelved.append(num_shelved(window))
    late = ours(make(4))
    with late.no_sync():
        squares(late(batch(4, 0, rank), [3])).backward()
    late.sync_gradients()
    return (
        taken[0] == taken[1],
        shelved,
        digest([p.grad for p in window.parameters() if p.grad is not None]),
        bits(late),
    )


@pytest.mark.processes
def test_micro_batches():
    """no_sync, windows of different lengths, and sync_gradients."""
    first, second = pool(2).run(accumulated)
    assert first == second
    assert first[:2] == (True, [1, 1])
    assert [i for i, found in enumerate(first[3]) if found is None] == [13, 14, 15]  # the last block's


def uneven(rank, _num_ranks):
    """join(): a rank without batches follows; what both drop stays."""
    model = ours(make(5))
    shelved = []
    with model.join():
        for step in range(2 + 2 * rank):
            model.zero_grad()
            with model.skip("blocks.2"):
                squares(model(batch(5, step, rank), [2])).backward()
            shelved.append(num_shelved(model))
    return shelved, digest(list(model.parameters()))


@pytest.mark.processes
def test_uneven_inputs():
    """A joined rank declares nothing, and needs nothing."""
    first, second = pool(2).run(uneven)
    assert (first[0], second[0]) == ([1, 1], [1, 1, 1, 1])
    assert first[1] == second[1]


def frozen_in_mid_run(rank, _num_ranks):
    """All but the head are frozen after two steps, and thawed after four; against torch's class, frozen the same."""
    same, shelved = [], []
    model = DistributedDataParallel(
        make(6), skip_all_reduce_unused_params=True, droppable=[["stem", "blocks"]]
    )
    declares = DistributedDataParallel(make(6), droppable=[["stem", "blocks"]])
    torchs = TorchDDP(make(6), find_unused_parameters=True)
    for step in range(6):
        for each in (model, declares, torchs):
            each.zero_grad()
            for name, parameter in each.module.named_parameters():
                parameter.requires_grad_("head" in name or not 2 <= step < 4)
            with each.skip("stem", each.module.blocks) if each is declares and 2 <= step < 4 else ExitStack():
                squares(each(batch(6, step, rank))).backward()
        same.append(bits(model) == bits(torchs) == bits(declares))
        shelved.append(num_shelved(model) == num_shelved(declares) == len(model.reducer.buckets) - 1)
    return same, shelved


@pytest.mark.processes
def test_a_frozen_backbone():
    """Frozen after wrapping: None stays None, and all its buckets are left out; also with status words behind them."""
    assert pool(2).run(frozen_in_mid_run) == [([True] * 6, [False, False, True, True, False, False])] * 2


def reentrant(rank, num_ranks):
    """Reentrant checkpoints: the engine does not foresee their gradients, which come in what was left out."""
    model = ours(make(7, reentrant=True), skip_all_reduce_unused_params=True)
    alone = make(7)
    wrong = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            model.zero_grad()
            alone.zero_grad()
            for r in range(num_ranks):
                x = batch(7, step, r).requires_grad_()
                (squares(alone(x, [1] if r else [])) / num_ranks).backward()
                if r == rank:
                    squares(model(x, [1] if r else [])).backward()
            pairs = zip(model.module.named_parameters(), alone.parameters(), strict=True)
            wrong += [(step, n) for (n, p), q in pairs if not torch.allclose(p.grad, q.grad, atol=1e-6)]
    return wrong, sum("arrived after" in str(w.message) for w in caught)


@pytest.mark.processes
def test_what_the_engine_does_not_foresee_is_late():
    """Right in the first step already, with a warning, once."""
    assert pool(2).run(reentrant) == [([], 1)] * 2


def unforeseen_on_top(rank, num_ranks):
    """Reentrant checkpoints add, on rank 0 only, to gradients of the step before in a bucket that was left out."""
    model = ours(make(19, reentrant=True), skip_all_reduce_unused_params=True)
    alone = make(19)
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            model.module.reentrant = step > 0
            for r in range(num_ranks):
                x, dropped = batch(19, step, r).requires_grad_(), [1] if step and r else []
                (squares(alone(x, dropped)) / num_ranks).backward()
                if r == rank:
                    squares(model(x, dropped)).backward()
            pairs = zip(model.module.named_parameters(), alone.parameters(), strict=True)
            wrong += [(step, n) for (n, p), q in pairs if not torch.allclose(p.grad, q.grad, atol=1e-6)]
    return wrong


@pytest.mark.processes
def test_what_comes_late_is_added_to_what_was_there():
    """Gradients are not zeroed between steps: old + mean(new), also where only some ranks have new ones."""
    assert pool(2).run(unforeseen_on_top) == [[], []]


class Talk(torch.autograd.Function):
    """A layer that communicates within backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def talking(rank, _num_ranks):
    """The layer is over the group that carries gradients; rank 1 begins a backward late."""
    group = dist.new_group(timeout=timedelta(seconds=20), backend="paceline")
    model = ours(make(20), process_group=group, **SMALL_CAPS)
    model.module.blocks[1].register_forward_pre_hook(lambda _, inputs: Talk.apply(inputs[0], group))
    out = []
    for step in range(3):
        model.zero_grad()
        loss = squares(model(batch(20, step, rank)))
        if step == 1:
            time.sleep(0.05 * rank)
        loss.backward()
        out.append(bits(model))
    return out


@pytest.mark.processes
def test_a_late_rank_changes_no_order_of_collectives():
    """How long the sum takes must not decide whether a bucket leaves before or after what a layer says."""
    first, second = pool(2).run(talking)
    assert first == second


class Front(nn.Module):
    """A front layer, whose gradients come last, within a reentrant checkpoint; or not used."""

    def __init__(self):
        super().__init__()
        self.front, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, uses_front):
        return self.head(checkpoint(self.front, x, use_reentrant=True) if uses_front else x)


def unforeseen_at_the_end(rank, num_ranks):
    torch.manual_seed(17)
    net = Front()
    model = DistributedDataParallel(net, skip_all_reduce_unused_params=True, **SMALL_CAPS)
    assert model.reducer.buckets[-1].parameters[-1].shape[0] == 6
    torch.manual_seed(17)
    alone = Front()
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            model.zero_grad()
            alone.zero_grad()
            for r in range(num_ranks):
                x = batch(17, step, r).requires_grad_()
                (squares(alone(x, r == 0)) / num_ranks).backward()
                if r == rank:
                    squares(model(x, r == 0)).backward()
            pairs = zip(model.module.named_parameters(), alone.parameters(), strict=True)
            wrong += [(step, n) for (n, p), q in pairs if not torch.allclose(p.grad, q.grad, atol=1e-6)]
    return wrong


@pytest.mark.processes
def test_the_last_bucket_comes_late_on_one_rank():
    """Where status words go does not depend on what a rank has found in a bucket that was left out."""
    assert pool(2).run(unforeseen_at_the_end) == [[], []]


class Sparse(nn.Module):
    """Embeddings of which one is dropped, and nothing else that must stay."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(5, 3, sparse=True), nn.Embedding(5, 3)

    def forward(self, x, uses):
        return sum(getattr(self, name)(x).sum() for name in uses)


def sparse(rank, _num_ranks):
    torch.manual_seed(8)
    net = Sparse()
    model = DistributedDataParallel(net, droppable=["a", "b"])
    out = []
    for uses in ("ab", "b", "a", "ab"):
        model.zero_grad()
        with model.skip([name for name in "ab" if name not in uses]):
            model(torch.tensor([rank, 2]), uses).backward()
        out.append([None if p.grad is None else digest([p.grad]) for p in net.parameters()])
    model.zero_grad()
    with model.skip("a", "b"):
        model.sync_gradients()
    return out, [p.grad for p in net.parameters()]


@pytest.mark.processes
def test_sparse_gradients_and_nothing_at_all():
    """A sparse bucket is left out as any; so may be all."""
    first, second = pool(2).run(sparse)
    assert first == second
    assert [[found is None for found in step] for step in first[0]] == [[0, 0], [1, 0], [0, 1], [0, 0]]
    assert first[1] == [None, None]


def hooked(rank, _num_ranks):
    """What a communication hook sees: whether each bucket is the last one that leaves, and how many there are."""
    model = DistributedDataParallel(make(16), droppable=[["stem", "blocks.0"], "blocks.1"])
    seen = []

    def hook(_state, bucket):
        seen.append(bucket.is_last())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    for step, skipped in enumerate(([], ["blocks.1"], ["stem", "blocks.0"], [])):
        model.zero_grad()
        net = model.module
        x = torch.randn(3, WIDTH, generator=generator(16, step, rank))
        net.stem.requires_grad_(not skipped or "stem" not in skipped)
        with model.skip(*skipped):
            dropped = [number for number in (0, 1) if f"blocks.{number}" in skipped]
            squares(model(x[:, :6], dropped)).backward()
        seen.append(len(model.reducer.buckets) - num_shelved(model))
    return seen


@pytest.mark.processes
def test_hooks_see_what_leaves_and_which_is_the_last():
    """`is_last` is that of the last bucket that leaves, so what a hook does once a step is done once a step."""
    first, second = pool(2).run(hooked)
    assert first == second
    while first:
        num = next(place for place, found in enumerate(first) if found not in (True, False))
        assert first[num] == num
        assert first[:num] == [False] * (num - 1) + [True]
        del first[: num + 1]


# ---- disagreement


def disagreeing(rank, num_ranks):
    """In step 1 the last rank skips another block; in step 3 one is used that is skipped, on rank 0 or on all."""
    out = []
    for caps in ({}, SMALL_CAPS):
        for users in ((0,), range(num_ranks)):
            group = dist.new_group(timeout=timedelta(seconds=20))
            model = ours(make(9), process_group=group, **caps)
            before = digest(list(model.parameters()))
            texts = []
            for step in range(5):
                model.zero_grad()
                skipped = 3 if step == 1 and rank == num_ranks - 1 else 1
                dropped = [] if step == 3 and rank in users else [skipped]
                try:
                    with skipping(model, [skipped]):
                        squares(model(batch(9, step, rank), dropped)).backward()
                except (SkipError, PeerAbortedError) as error:
                    texts.append(f"{type(error).__name__}: {error}")
                    assert all(p.grad is None for p in model.parameters())
                else:
                    texts.append(digest([p.grad for p in model.parameters() if p.grad is not None]))
            assert digest(list(model.parameters())) == before
            out.append(texts)
    return out


@pytest.mark.processes
def test_disagreement_names_the_layer_on_every_rank():
    """All ranks raise in that backward, with the layers and the ranks; steps before and after are right."""
    outcomes = pool(3).run(disagreeing)
    for rank, cases in enumerate(outcomes):
        for number, texts in enumerate(cases):
            assert texts[1].startswith(f"SkipError: rank {rank}: the ranks skip different layers")
            assert (
                "blocks.1 on ranks 0, 1 but not on rank 2; blocks.3 on rank 2 but not on ranks 0, 1"
                in texts[1]
            )
            if rank == 0 or number % 2:
                assert texts[3].startswith(f"SkipError: rank {rank}: blocks.1 was declared")
                assert "gradients of blocks.1.0.weight" in texts[3]
            else:
                assert "the backward of rank 0 raised" in texts[3]
            assert [texts[step] for step in (0, 2, 4)] == [outcomes[0][number][step] for step in (0, 2, 4)]


def a_step_apart(rank, num_ranks):
    """The last rank loses its first backward, so that it is a step ahead in what it draws; then all go on together."""
    model = ours(make(9))
    outcomes = []
    ahead = 0
    for step in range(3):
        if step == 0 and rank == num_ranks - 1:
            model(batch(9, step, rank), [])
            ahead = 1
        if step == 2:
            ahead = 0
        skipped = (step + ahead) % 2
        model.zero_grad()
        try:
            with skipping(model, [skipped]):
                squares(model(batch(9, step, rank), [skipped])).backward()
        except SkipError as error:
            outcomes.append(str(error))
        else:
            outcomes.append(digest([p.grad for p in model.parameters() if p.grad is not None]))
    return outcomes


@pytest.mark.processes
def test_disagreement_of_ranks_a_step_apart_says_so():
    """Only in the step in which it is new: afterwards they begin anew, and draw differently without such a reason."""
    outcomes = pool(3).run(a_step_apart)
    apart = "not in the same step: rank 2 has run 1 forward(s) in training mode without a backward more than rank 0"
    for first, second, _ in outcomes:
        assert first.startswith("rank ")
        assert "the ranks skip different layers: blocks.0" in first
        assert apart in first
        assert "same seed" not in first
        assert "same seed" in second
        assert "same step" not in second
    assert len({third for _, _, third in outcomes}) == 1


class Counts(ResidualNet):
    """Has a buffer, of the sum of all inputs, and notes what it was in the last forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x, dropped=()):
        self.found = self.total.clone()
        self.total += x.sum()
        return super().forward(x, dropped)


def counting(rank, _num_ranks):
    model = ours(Counts())
    found = []
    for step in range(3):
        skipped = [rank] if step == 1 else [0]
        with ExitStack() as stack:
            if step == 1:
                stack.enter_context(pytest.raises(SkipError))
            stack.enter_context(skipping(model, skipped))
            squares(model(batch(21, step, rank), skipped)).backward()
        found.append(model.module.found.item())
    return found


@pytest.mark.processes
def test_buffers_are_equal_after_a_disagreement():
    """The step that was dropped did not bring them, so the next forward does."""
    first, second = pool(2).run(counting)
    assert first == second


def stumbling(rank, num_ranks):
    """Rank 1's backward raises in the middle of step 1; in step 3 it does while the ranks disagree."""
    model = ours(make(10), process_group=dist.new_group(timeout=timedelta(seconds=20)), **SMALL_CAPS)
    armed = [False]

    def stumble(gradient):
        if armed[0]:
            raise KeyError("on purpose")
        return gradient

    model.module.blocks[2][0].weight.register_hook(stumble)
    out = []
    for step in range(5):
        model.zero_grad()
        armed[0] = rank == 1 and step in (1, 3)
        skipped = [rank] if step == 3 else [0]
        try:
            with skipping(model, skipped):
                squares(model(batch(10, step, rank), skipped)).backward()
            out.append(digest([p.grad for p in model.parameters() if p.grad is not None]))
        except (KeyError, SkipError, PeerAbortedError) as error:
            out.append(type(error).__name__)
    return out


@pytest.mark.processes
def test_a_rank_that_raises_in_the_middle():
    """The others are told, the step is dropped, and what is skipped next is agreed on anew."""
    first, second = pool(2).run(stumbling)
    assert (first[1], second[1]) == ("PeerAbortedError", "KeyError")
    assert (first[3], second[3]) == ("SkipError", "KeyError")
    assert [first[i] for i in (0, 2, 4)] == [second[i] for i in (0, 2, 4)]


def stumbling_behind_a_frozen_front(rank, _num_ranks):
    """The last bucket, behind which status words travel, is left out, and rank 1's backward raises in step 1."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = DistributedDataParallel(make(18), droppable=["stem"], process_group=group, **SMALL_CAPS)

    def stumble(gradient):
        if rank == 1 and step == 1:
            raise KeyError("on purpose")
        return gradient

    model.module.blocks[1][0].weight.register_hook(stumble)
    out = []
    for step in range(3):
        model.zero_grad()
        model.module.stem.requires_grad_(step == 0)  # whose gradients are the last ones, as step 0 shows
        try:
            with model.skip(*["stem"][:step]):
                squares(model(batch(18, step, rank))).backward()
            out.append(digest([p.grad for p in model.parameters() if p.grad is not None]))
            assert (model.timings.last.buckets[-1].size_bytes == 0) == (step > 0)
        except (KeyError, PeerAbortedError) as error:
            out.append(type(error).__name__)
    return out


@pytest.mark.processes
def test_ranks_are_told_also_where_the_last_bucket_stays():
    """Status words then travel by themselves."""
    first, second = pool(2).run(stumbling_behind_a_frozen_front)
    assert (first[1], second[1]) == ("PeerAbortedError", "KeyError")
    assert (first[0], first[2]) == (second[0], second[2])


def left_alone(rank, _num_ranks):
    """Rank 1 is gone when rank 0 asks what step 1 skips."""
    model = ours(make(22), process_group=dist.new_group(backend="paceline"), **SMALL_CAPS)
    out = []
    for step in range(3):
        try:
            loss = squares(model(batch(22, step, rank)))
            if rank == 1 and step == 1:
                os._exit(3)
            loss.backward()
        except (PeerLostError, ProtocolError) as error:
            out.append(type(error).__name__)
    return out


@pytest.mark.processes
def test_a_rank_that_is_gone():
    """The first backward without it says so, from a hook; no step begins after that."""
    with Ranks(2) as ranks:
        assert ranks.outcomes(left_alone)[0].value == ["PeerLostError", "ProtocolError"]


def two_models(rank, _num_ranks):
    """One backward through two models on one group, each with layers that are skipped."""
    first, second = ours(make(11)), ours(make(12))
    for step in range(3):
        for model in (first, second):
            model.zero_grad()
        with first.skip("blocks.0"), second.skip("blocks.3"):
            hidden = first(batch(11, step, rank), [0])
            squares(second(torch.cat([hidden, hidden, hidden], 1), [3])).backward()
    used = zip(first.reducer.managed.names, first.reducer._get_local_used_map().tolist(), strict=True)
    unused = {name.split(".weight")[0].split(".bias")[0] for name, num_ranks in used if num_ranks == 0}
    return num_shelved(first), num_shelved(second), bits(first), bits(second), unused


@pytest.mark.processes
def test_two_models_in_one_backward():
    """The second one asks when the first has ended; what is left out counts as used by no rank."""
    first, second = pool(2).run(two_models)
    assert first == second
    assert first[:2] == (1, 1)
    assert first[-1] == {"blocks.0.0", "blocks.0.2"}


# ---- refusals, and pure functions


@pytest.fixture
def alone(tmp_path):
    """A group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compression": "auto"}, "gradients combined by Auto"),
        ({"overlap_forward": True}, "overlap_forward=True"),
        ({"static_graph": True}, "static_graph=True"),
        ({"reduction": "parameter_servers"}, "ParameterServers"),
    ],
    ids=str,
)
def test_what_needs_every_bucket_is_refused(alone, options, words):
    """By the constructor, before anything is sent."""
    with pytest.raises(ConfigurationError, match="droppable is not possible with") as caught:
        ours(make(13), **options)
    assert words in str(caught.value)


def test_one_rank_and_what_cannot_be_skipped(alone):
    """A world of one skips, too; parts that are no entries of `droppable` are named."""
    model = ours(make(14))
    with model.skip(model.module.blocks[0]):
        squares(model(batch(14), [0])).backward()
    assert num_shelved(model) == 1
    for what, words in (
        (["head"], "skip.head.: what is skipped has to consist of entries of droppable"),
        (["blocks.0.0"], "skip.blocks.0.0."),
        (["nothing"], "'nothing' is not a part of this ResidualNet"),
        ([nn.Linear(2, 2)], "a Linear is not a part of this ResidualNet"),
    ):
        with pytest.raises(ConfigurationError, match=words), model.skip(*what):
            pass
    with pytest.raises(ConfigurationError, match="not told what may be skipped"):
        DistributedDataParallel(make(14)).skip("blocks.0")


@pytest.mark.parametrize(
    ("droppable", "words"),
    [
        ("blocks", "is not a list"),
        (nn.Linear(1, 1), "is not a list"),
        (["blocks", "blocks.1"], "blocks and blocks.1 have a parameter in common"),
        (["blocks.0.1"], "has no parameters"),
        (["block"], "is not a part"),
        (3, "is not a list"),
    ],
)
def test_droppable_is_checked(droppable, words):
    """With what is wrong, by name."""
    with pytest.raises(ConfigurationError, match=words):
        units_of(make(15), droppable)


def test_units_share_no_buckets():
    """A unit's last gradient closes its bucket, others go on filling theirs; a unit has no small first bucket."""
    sizes = [4, 4, 4, 4, 4, 4, 4]
    units = [None, 0, 0, None, 1, 1, None]
    specs = [GradientSpec(size, "cpu", unit=unit) for size, unit in zip(sizes, units, strict=True)]
    assert assign_buckets(specs, range(7), BucketCaps((1, 100))) == [[0], [1, 2], [4, 5], [3, 6]]
    assert assign_buckets(specs, range(7), BucketCaps((100,))) == [[1, 2], [4, 5], [0, 3, 6]]
    assert assign_buckets(specs, range(7), BucketCaps((4,))) == [[i] for i in range(7)]


@pytest.mark.parametrize(
    ("observed", "otherwise", "order"),
    [
        ([3, 1, 0], [3, 2, 1, 0], [3, 2, 1, 0]),
        ([1, 1, 0], [3, 2, 1, 0], [3, 2, 1, 0]),
        ([], [1, 0], [1, 0]),
        ([0, 3], [3, 2, 1, 0], [0, 3, 2, 1]),
    ],
)
def test_what_the_first_backward_did_not_use_keeps_its_place(observed, otherwise, order):
    """Behind its neighbour, not at the end, where its bucket would wait for all others in every later step."""
    assert completed(observed, otherwise) == order

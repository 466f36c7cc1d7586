"""Ranks that lose step, and things one rank does by itself: the right mean, or an error on every rank."""

import contextlib
import copy
import gc
import io
import warnings
import weakref
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

from harness.models import Mlp, conv_net, digest, generator, random_batch, squares
from harness.ranks import pool
from paceline import DistributedDataParallel, convert_sync_batchnorm
from paceline.errors import ConfigurationError, HookError, PeerAbortedError, ProtocolError

pytestmark = pytest.mark.processes

FINE = 0.0001  # MiB: a bucket for almost every gradient


batch = partial(random_batch, dtype=torch.float64)


def mean_of(module, losses):
    """Gradients of the mean of the ranks' losses, computed alone."""
    alone = copy.deepcopy(module)
    (sum(loss(alone) for loss in losses) / len(losses)).backward()
    return [p.grad for p in alone.parameters()]


def distance(model, expected):
    return max(
        (p.grad.to_dense() - q.to_dense()).abs().max().item()
        for p, q in zip(model.parameters(), expected, strict=True)
    )


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ValueError("out of memory, say")
        return gradient, None


def raise_between_loss_and_module(rank, num_ranks):
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(dtype=torch.float64))
    messages, distances = [], []
    for step in range(3 + rank):  # from the exception on, rank 1 is one batch ahead
        model.zero_grad()
        try:
            _Fails.apply(squares(model(batch(rank, step))), step == 0 and rank == 1).backward()
        except (ValueError, PeerAbortedError) as error:
            messages.append(f"{type(error).__name__} {error}")
            continue
        x = [batch(r, step - rank + r) for r in range(num_ranks)]
        losses = [lambda m, r=r, x=x: squares(m(x[r])) for r in range(num_ranks)]
        distances.append(distance(model, mean_of(model.module, losses)))
    return messages, distances


def test_an_exception_before_backward_reaches_the_module():
    """Rank 1 raises in step 0 outside the module and goes on: nobody averages different steps in silence."""
    (told, distances), (raised, others) = pool(2).run(raise_between_loss_and_module)
    start = "PeerAbortedError rank {}: the ranks are not in the same step: rank 1 has run 1 forward(s)"
    assert len(told) == 1
    assert told[0].startswith(start.format(0))
    assert raised[0] == "ValueError out of memory, say"
    assert raised[1].startswith(start.format(1))
    assert len(distances) == len(others) == 2
    assert max(distances + others) < 1e-12


class _Stumbles(nn.Module):
    """Batch norm, whose statistics the ranks share, after a place at which forward may raise."""

    def __init__(self):
        super().__init__()
        self.body = Mlp(dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.raises = False

    def forward(self, x):
        x = self.norm(x)
        _raise_if(self.raises)
        return self.body(x)


STUMBLES = ["in forward", "after forward", "evaluates first", "in the second forward", "accumulates"]


def _raise_if(fails):
    if fails:
        raise ValueError("out of memory, say")


def raise_with_buffers(rank, num_ranks, how, options):
    """Errors of a step in which rank 1 raises before its backward, gradients' distances and buffers of the others."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = _Stumbles()
    model = DistributedDataParallel(module, **options)
    messages, distances, buffers = [], [], []
    for step in range(4 + rank):  # from the exception on, rank 1 is one batch ahead
        model.zero_grad()
        fails = step == 1 and rank == 1
        try:
            if how == "accumulates":
                with model.no_sync():
                    squares(model(batch(rank, step))).backward()
            first = squares(model(batch(rank, step))) if how == "in the second forward" else 0.0
            module.raises = fails and how != "after forward"
            loss = squares(model(batch(rank, step))) + first
            _raise_if(fails)
            loss.backward()
        except (ValueError, PeerAbortedError) as error:
            module.raises = False
            messages.append(f"{type(error).__name__} {error}")
            if fails and how == "evaluates first":
                model.eval()
                model(batch(rank, step))
                model.train()
            continue
        is_ahead = step > 1
        x = [batch(r, step + (r - rank if is_ahead else 0)) for r in range(num_ranks)]
        factor = 2 if how in ("in the second forward", "accumulates") else 1
        losses = [lambda m, r=r, x=x: squares(m(x[r])) * factor for r in range(num_ranks)]  # noqa: B023
        distances.append(distance(model, mean_of(module, losses)))
        buffers.append(digest(module.buffers()))
    return messages, distances, buffers


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"bucket_cap_mb": FINE}], ids=str)
@pytest.mark.parametrize("how", STUMBLES)
def test_an_exception_before_backward_where_buffers_are_shared(how, options):
    """Ranks never meet in different collectives: both are told, and the steps after that are right on both."""
    (told, *of_0), (raised, *of_1) = pool(2).run(raise_with_buffers, how, options)
    assert len(told) == 1
    assert "the ranks are not in the same step: rank 1 has run " in told[0]
    assert raised[0] == "ValueError out of memory, say"
    assert "the ranks are not in the same step: rank 1 has run " in raised[1]
    assert len(of_0[0]) == len(of_1[0]) == 3
    assert max(of_0[0] + of_1[0]) < 1e-12
    assert of_0[1] == of_1[1]


def different_numbers_of_forwards(rank, num_ranks, has_buffers):
    torch.manual_seed(0)
    model = DistributedDataParallel(_Stumbles() if has_buffers else Mlp(dtype=torch.float64))
    worst = 0.0
    for _ in range(3):
        model.zero_grad()
        sum(squares(model(batch(rank, i))) for i in range(rank + 1)).backward()
        losses = [lambda m, r=r: sum(squares(m(batch(r, i))) for i in range(r + 1)) for r in range(num_ranks)]
        worst = max(worst, distance(model, mean_of(model.module, losses)))
    return worst


@pytest.mark.parametrize("has_buffers", [False, True])
def test_ranks_may_run_different_numbers_of_forwards(has_buffers):
    """One backward through one forward on rank 0 and through two on rank 1 is no loss of step."""
    assert max(pool(2).run(different_numbers_of_forwards, has_buffers)) < 1e-12


def evaluate_between(rank, num_ranks, with_norm):
    torch.manual_seed(0)
    module = conv_net().double() if with_norm else Mlp(dtype=torch.float64)
    model = DistributedDataParallel(module, bucket_cap_mb=FINE)
    x = (
        torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=generator(rank))
        if with_norm
        else batch(rank, 0)
    )
    for _ in range(3):
        model.zero_grad()
        loss = squares(model(x))
        loss.backward(retain_graph=True)
        if rank == 0:
            model.eval()
            model(x)  # with gradients enabled
            model.train()
        loss.backward()
    return float(sum(p.grad.sum() for p in model.parameters()))


@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "buffers"])
def test_one_rank_evaluates_between_two_backwards(with_norm):
    """Neither the layout of buckets nor the synchronization of buffers depends on a forward of one rank."""
    sums = pool(2).run(evaluate_between, with_norm)
    assert sums[0] == sums[1]


class _SharedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 2, dtype=torch.float64)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.head(x)


def hook_and(rank, num_ranks, kind):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    sparse = kind == "sparse"
    module = nn.Embedding(6, 3, sparse=True, dtype=torch.float64) if sparse else _SharedTwice()
    model = DistributedDataParallel(module, bucket_cap_mb=FINE)
    model.register_comm_hook(None, allreduce_hook)

    def loss(net, r):
        return squares(net(torch.tensor([r, 5]))) if sparse else squares(net(batch(r, 0).requires_grad_()))

    worst = 0.0
    for _ in range(3):
        model.zero_grad()
        loss(model, rank).backward()
        expected = mean_of(model.module, [lambda m, r=r: loss(m, r) for r in range(num_ranks)])
        worst = max(worst, distance(model, expected))
    return worst


@pytest.mark.parametrize("kind", ["late", "sparse"])
def test_hooks_with_gradients_that_bypass_them(kind):
    """Late and sparse gradients do not pass through a communication hook; they are averaged all the same."""
    assert max(pool(2).run(hook_and, kind)) < 1e-12


def wrong_hook(rank, _num_ranks, kind):
    model = DistributedDataParallel(Mlp())

    def hook(state, bucket):
        if kind == "raises":
            raise RuntimeError("bug in my hook")
        return 5

    model.register_comm_hook(None, hook)
    try:
        squares(model(torch.ones(2, 8))).backward()
    except RuntimeError as error:
        return type(error) is (RuntimeError if kind == "raises" else HookError), str(error)
    return False, ""


@pytest.mark.parametrize(
    ("kind", "words"), [("raises", "bug in my hook"), ("returns 5", "must return a torch.futures")]
)
def test_a_hooks_mistake_is_not_a_lost_peer(kind, words):
    """What the hook raised, as it raised it; what it returned, as a HookError."""
    for is_right, message in pool(2).run(wrong_hook, kind):
        assert is_right
        assert words in message


def others_hooks(_rank, _num_ranks):
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(), bucket_cap_mb=FINE)
    saw_none = []
    for name, p in model.module.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda q, name=name: saw_none.append(name) if q.grad is None else None
        )
    for step in range(3):
        model.zero_grad()
        squares(model(batch(0, step).float())).backward()
    return saw_none


def test_a_users_hook_sees_its_gradient():
    """A post-accumulate hook that was registered after wrapping finds `.grad`, also on a bucket's last gradient."""
    assert pool(2).run(others_hooks) == [[], []]


def copies_of_sync_bn(rank, _num_ranks):
    torch.manual_seed(0)
    model = DistributedDataParallel(convert_sync_batchnorm(conv_net()))
    twin = copy.deepcopy(model.module)
    torch.save(model.module, io.BytesIO())
    copy.deepcopy(model)
    x = torch.randn(4, 3, 8, 8, generator=generator(rank))
    return float(model(x).detach().sum() - twin(x).detach().sum())


def test_a_module_with_synchronized_norms_can_be_copied():
    """Copying and saving leave the process group out; the copy computes the same."""
    assert pool(2).run(copies_of_sync_bn) == [0.0, 0.0]


def wrap_after_groups_that_one_rank_left(rank, num_ranks):
    groups = [dist.new_group(timeout=timedelta(seconds=10)) for _ in range(2)]
    if rank == 0:
        dist.destroy_process_group(groups[0])
    model = DistributedDataParallel(convert_sync_batchnorm(conv_net()))
    squares(model(torch.randn(4, 3, 8, 8, generator=generator(rank)))).backward()
    if rank != 0:
        dist.destroy_process_group(groups[0])
    return digest(p.grad for p in model.parameters())


def test_synchronized_norms_where_ranks_disagree_on_living_groups():
    """The layers' own group is found by every rank, whatever groups each has destroyed before."""
    assert len(set(pool(2).run(wrap_after_groups_that_one_rank_left))) == 1


def wrap_twice(_rank, _num_ranks):
    with pytest.raises(
        ValueError, match="cannot wrap this DistributedDataParallel: it is a DistributedDataParallel"
    ):
        DistributedDataParallel(DistributedDataParallel(Mlp()))
    with pytest.raises(ValueError, match="its part 'module' is a DistributedDataParallel already"):
        DistributedDataParallel(nn.ModuleDict({"module": DistributedDataParallel(Mlp())}))


def test_wrapping_twice_is_refused():
    """Torch averages twice; we say what to do."""
    pool(2).run(wrap_twice)


def backward_of_a_dropped_wrapper(_rank, _num_ranks):
    net = Mlp()
    loss = DistributedDataParallel(net)(torch.ones(3, 8)).sum()
    with pytest.raises(ConfigurationError, match="keep the wrapped model in a variable"):
        loss.backward()
    again = DistributedDataParallel(net)
    again(torch.ones(3, 8)).sum().backward()
    return all(p.grad is not None for p in net.parameters())


def test_a_wrapper_that_is_dropped_before_its_backward_is_missed():
    """Nobody reduces the gradients, and they were lost without a word; torch leaves local ones. The next one trains."""
    assert pool(2).run(backward_of_a_dropped_wrapper) == [True, True]


class _Versioned(nn.Linear):
    _version = 2
    loaded: list

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        type(self).loaded.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def versions(_rank, _num_ranks):
    _Versioned.loaded = []
    ours = DistributedDataParallel(nn.Sequential(_Versioned(2, 2)))
    theirs = nn.parallel.DistributedDataParallel(nn.Sequential(_Versioned(2, 2)))
    ours.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    ours.load_state_dict(ours.module.state_dict())
    return _Versioned.loaded


def test_versions_of_modules_survive():
    """`_load_from_state_dict` is told the version that was saved, in both forms."""
    assert pool(1).run(versions) == [[2, 2, 2]]


def two_modules(rank, num_ranks):
    """Rank 0 leaves a layer of the inner module out: its buckets are full at other times than rank 1's."""
    torch.manual_seed(0)
    inner = DistributedDataParallel(
        nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]).double(), bucket_cap_mb=FINE
    )
    outer = DistributedDataParallel(Mlp(dtype=torch.float64), bucket_cap_mb=FINE)
    inner.module.forward = lambda x, r: chain(inner.module, x, r)
    distances = []
    for step in range(3):
        inner.zero_grad()
        outer.zero_grad()
        squares(outer(inner(batch(rank, step), rank))).backward()
        both = nn.ModuleList([inner.module, outer.module])
        x = [batch(r, step) for r in range(num_ranks)]
        losses = [lambda m, r=r, x=x: squares(m[1](chain(m[0], x[r], r))) for r in range(num_ranks)]
        expected = mean_of(both, losses)
        grads = [
            torch.zeros_like(p) if g is None else g for p, g in zip(both.parameters(), expected, strict=True)
        ]
        distances.append(distance(both, grads))
    return distances


def chain(layers, x, rank):
    for index, layer in enumerate(layers):
        x = x if (rank, index) == (0, 2) else torch.tanh(layer(x))
    return x


@pytest.mark.filterwarnings("ignore")
def test_one_backward_through_two_modules():
    """Both modules communicate over one process group; what a rank leaves out does not change the order there."""
    assert max(map(max, pool(2).run(two_modules))) < 1e-12


def refused_on_one(rank, _num_ranks):
    model = Mlp().requires_grad_(rank == 0)
    try:
        DistributedDataParallel(model)
    except RuntimeError as error:
        return f"{type(error).__name__} {error}"
    return "wrapped"


def test_one_rank_cannot_wrap_its_model():
    """It says why, and the others are told at once."""
    other, refused = pool(2).run(refused_on_one)
    assert other.startswith(
        "ReplicaMismatchError rank 1 could not wrap its model: DistributedDataParallel is not needed"
    )
    assert refused.startswith("RuntimeError DistributedDataParallel is not needed")


def freeze_and_unfreeze(rank, _num_ranks):
    module = Mlp()
    module.layers[0].requires_grad_(requires_grad=False)
    model = DistributedDataParallel(module)
    first = weakref.ref(model.reducer)
    squares(model(batch(rank, 0).float())).backward()
    module.layers[0].requires_grad_(requires_grad=True)
    squares(model(batch(rank, 1).float())).backward()
    gc.collect()
    return first() is None


def test_unfreezing_leaves_no_old_buckets():
    """The reducer of the fewer parameters goes, with its memory."""
    assert pool(2).run(freeze_and_unfreeze) == [True, True]


class _Opaque:
    """Keeps its tensor where no search finds it."""

    def __init__(self, loss):
        self._tell = lambda: loss

    @property
    def loss(self):
        return self._tell()


class _ReturnsOpaque(nn.Module):
    """Returns an object in which no tensor is found; the checkpointed block is what backward reaches first."""

    def __init__(self, style):
        super().__init__()
        self.first = nn.Linear(8, 8, dtype=torch.float64)
        self.block = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.Tanh())
        self.style = style

    def forward(self, x, skips_block=False):
        x = self.first(x)
        if not skips_block and self.style == "nested":
            x = checkpoint(lambda y: checkpoint(self.block, y, use_reentrant=True), x, use_reentrant=True)
        elif not skips_block:
            x = checkpoint(self.block, x, use_reentrant=self.style == "reentrant")
        return _Opaque(squares(x))


def opaque_losses(rank, num_ranks, style, skips):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = DistributedDataParallel(_ReturnsOpaque(style), bucket_cap_mb=FINE)
    distances = []
    for step in range(4):
        model.zero_grad()
        model(batch(rank, step), skips and rank == 1).loss.backward()
        losses = [lambda m, r=r: m(batch(r, step), skips and r == 1).loss for r in range(num_ranks)]  # noqa: B023
        distances.append(distance(model, mean_of(model.module, losses)))
    return distances, model.reducer.num_steps


@pytest.mark.parametrize("skips", [False, True], ids=["all", "one skips"])
@pytest.mark.parametrize("style", ["reentrant", "nested", "nonreentrant"])
def test_one_synchronization_per_outer_backward(style, skips):
    """Backward first reaches the module in a checkpoint's nested backward: it ends where the outer one does."""
    for distances, num_steps in pool(2).run(opaque_losses, style, skips):
        assert max(distances) < 1e-12
        assert num_steps == 4


def raise_after_nested(rank, num_ranks):
    """Rank 1 raises between the checkpoint and the rest of step 0's outer backward, whose graph lives on."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = _ReturnsOpaque("reentrant")
    kept, fails = [], [rank == 1]

    def maybe_fail(gradient):
        if fails.pop() if fails else False:
            raise ValueError("out of memory, say")

    module.first.register_forward_hook(lambda _m, _x, y: y.register_hook(maybe_fail) and None)
    model = DistributedDataParallel(module, bucket_cap_mb=FINE)
    told, sums = [], []
    for step in range(3):
        model.zero_grad()
        kept.append(model(batch(rank, step)).loss)
        try:
            kept[-1].backward(retain_graph=True)
        except (ValueError, PeerAbortedError) as error:
            told.append(type(error).__name__)
            continue
        sums.append(digest(p.grad for p in model.parameters()))
    return told, sums


def test_an_exception_between_a_nested_backward_and_the_outer_ones_end():
    """The other ranks are told, and the next step is clean."""
    (told, sums), (raised, others) = pool(2).run(raise_after_nested)
    assert (told, raised) == (["PeerAbortedError"], ["ValueError"])
    assert len(sums) == 2
    assert sums == others


def raise_before_opaque(rank, num_ranks, in_no_sync):
    torch.manual_seed(0)
    model = DistributedDataParallel(_ReturnsOpaque("nonreentrant"))
    messages, distances = [], []
    for step in range(3 + rank):
        model.zero_grad()
        try:
            fails = step == 0 and rank == 1
            with model.no_sync() if in_no_sync and fails else contextlib.nullcontext():
                _Fails.apply(model(batch(rank, step)).loss, fails).backward()
        except (ValueError, PeerAbortedError) as error:
            messages.append(f"{type(error).__name__} {error}")
            continue
        x = [batch(r, step - rank + r) for r in range(num_ranks)]
        losses = [lambda m, r=r, x=x: m(x[r]).loss for r in range(num_ranks)]
        distances.append(distance(model, mean_of(model.module, losses)))
    return messages, distances


@pytest.mark.parametrize("in_no_sync", [False, True])
def test_an_exception_before_an_unseen_backward_reaches_the_module(in_no_sync):
    """The outputs are not seen, and still nobody averages different steps."""
    (told, distances), (raised, others) = pool(2).run(raise_before_opaque, in_no_sync)
    assert len(told) == 1
    assert "the ranks are not in the same step: rank 1 has run 1 forward(s)" in told[0]
    assert "rank 1 has run 1 forward(s)" in raised[1]
    assert len(distances) == len(others) == 2
    assert max(distances + others) < 1e-12


def different_numbers_of_opaque_forwards(rank, num_ranks):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    worst = 0.0
    for style in ("nonreentrant", "reentrant"):
        model = DistributedDataParallel(_ReturnsOpaque(style))
        for _ in range(3):
            model.zero_grad()
            sum(model(batch(rank, i)).loss for i in range(rank + 1)).backward()
            losses = [lambda m, r=r: sum(m(batch(r, i)).loss for i in range(r + 1)) for r in range(num_ranks)]
            worst = max(worst, distance(model, mean_of(model.module, losses)))
    return worst


def test_several_unseen_forwards_before_one_backward():
    """One on rank 0, two on rank 1: the backward passes all of them, so no rank is ahead."""
    assert max(pool(2).run(different_numbers_of_opaque_forwards)) < 1e-12


def zeros_in_place_of_a_loss(rank, num_ranks):
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(dtype=torch.float64))
    worst = 0.0
    for step in range(4):
        model.zero_grad()

        def loss(m, r, step=step):
            output = m(batch(r, step))
            return sum(0.0 * p.sum() for p in m.parameters()) if (r, step) == (1, 1) else squares(output)

        loss(model, rank).backward()
        expected = mean_of(model.module, [lambda m, r=r, loss=loss: loss(m, r) for r in range(num_ranks)])
        worst = max(worst, distance(model, expected))
    return worst


def test_zeros_in_place_of_a_loss_on_one_rank():
    """A rank whose batch has no targets uses its parameters without the forward's outputs: no loss of step."""
    assert max(pool(2).run(zeros_in_place_of_a_loss)) < 1e-12


def probe_alone(rank, _num_ranks):
    """Rank 0 alone differentiates the bare module between the steps, before the first one too."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(dtype=torch.float64))
    errors, warned = [], []
    for step in range(3):
        if rank == 0:
            model.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                squares(model.module(batch(rank, step))).backward()
            warned += [str(w.message) for w in caught]
            alone = mean_of(model.module, [lambda m: squares(m(batch(rank, step)))])  # noqa: B023
            errors.append(distance(model, alone))
        model.zero_grad()
        loss = squares(model(batch(rank, step)))
        loss.backward(retain_graph=True)
        losses = [lambda m, r=r: squares(m(batch(r, step))) for r in range(2)]  # noqa: B023
        errors.append(distance(model, mean_of(model.module, losses)))
        model.zero_grad()
        loss.backward()
        errors.append(distance(model, mean_of(model.module, losses)))
    return max(errors), warned


def test_a_backward_around_the_wrapper_is_local():
    """As in torch: nothing waits for the other ranks, `.grad` is the rank's own, and one warning says so."""
    (error, warned), (other, _) = pool(2).run(probe_alone)
    assert max(error, other) < 1e-12
    assert len(warned) == 1
    assert "without a forward of the wrapped model" in warned[0]


class _Backwards(nn.Module):
    """Uses its layers last to first, so that the order of buckets changes after the first step."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=torch.float64) for _ in range(3))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def graph_in_the_first_step(rank, num_ranks):
    """Distances, and whether anything of the graph is left in the second step."""
    warnings.simplefilter("ignore")
    found = []
    for width in (8, 72):  # 72: gradients that are copied while backward runs
        torch.manual_seed(0)
        model = DistributedDataParallel(_Backwards(width), bucket_cap_mb=FINE)
        xs = [batch(r, 0, shape=(4, width)) for r in range(num_ranks)]
        expected = mean_of(model.module, [lambda m, x=x: squares(m(x)) for x in xs])
        for has_graph in (True, False):
            model.zero_grad()
            squares(model(xs[rank])).backward(create_graph=has_graph)
            grads = [p.grad for p in model.parameters()]
            kept = {g.requires_grad for g in grads} | {b.message.requires_grad for b in model.reducer.buckets}
            found.append((has_graph, distance(model, expected), kept))
            if has_graph:
                torch.autograd.grad(sum((g**2).sum() for g in grads), list(model.parameters()))
        assert model.reducer.cuts.has_followed
    return found


def test_a_graph_of_the_first_steps_gradients():
    """Gradients with a graph keep it when buckets are laid out anew; the buffers take no part in it."""
    for found in pool(2).run(graph_in_the_first_step):
        for has_graph, error, kept in found:
            assert error < 1e-12
            assert kept == ({True, False} if has_graph else {False})


def set_after_an_exception(rank, num_ranks):
    """Distance of the sum of what was set and what was computed; what there was directly after the exception."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(dtype=torch.float64), bucket_cap_mb=FINE)
    try:
        handle = model.module.layers[1].weight.register_hook(lambda _: _stumble() if rank == 1 else None)
        squares(model(batch(rank, 0))).backward()
    except (ValueError, PeerAbortedError):
        left = [p.grad is not None for p in model.parameters()]
    handle.remove()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    squares(model(batch(rank, 1))).backward()
    losses = [lambda m, r=r: squares(m(batch(r, 1))) for r in range(num_ranks)]
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    return any(left), distance(model, [1 + gradient for gradient in mean_of(alone, losses)])


def _stumble():
    raise ValueError("out of memory, say")


def test_gradients_that_are_set_after_an_exception():
    """Those of the step that raised are gone at once, on all ranks; what a user sets before the next forward stays."""
    for left, error in pool(2).run(set_after_an_exception):
        assert not left
        assert error < 1e-12


def two_orders(rank, _num_ranks):
    """What each rank is told of two modules of one size whose backwards come in another order on rank 1."""
    torch.manual_seed(0)
    models = [DistributedDataParallel(Mlp()) for _ in range(2)]
    said = []
    for model in models if rank == 0 else reversed(models):
        try:
            squares(model(torch.ones(2, 8))).backward()
        except ProtocolError as error:
            said.append(str(error))
    return said


def test_modules_of_one_size_in_another_order():
    """Their messages fit, and nobody averages one module's gradients with the other's."""
    for said in pool(2).run(two_orders):
        assert len(said) == 2
        assert all("the ranks synchronize different modules: rank 0 number" in words for words in said)

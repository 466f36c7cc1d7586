"""What torch offers on GPUs only: synchronized batch norm, mixed precision, the optimizer step in backward."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from harness.models import Mlp, digest, generator, random_batch, sgd, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError

pytestmark = pytest.mark.processes

TOLERANCE = 1e-10


def normalised(kind):
    if kind == "1d":
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    if kind == "no affine":
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)).double()
    if kind == "no running stats":
        return nn.Sequential(
            nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)
        ).double()
    if kind == "cumulative":
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)).double()
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.BatchNorm2d(3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * 4, 2)).double()


def batch_for(kind, seed, step, rank, size):
    shape = (size, 2, 5, 5) if kind == "2d" else (size, 6)
    return random_batch(seed, step, rank, shape=shape, dtype=torch.float64)


def synchronized_norm(rank, num_ranks, kind, seed, sizes):
    """Largest error of outputs, gradients and buffers against one process on the whole batch."""
    torch.manual_seed(seed)
    origin = normalised(kind)
    alone = copy.deepcopy(origin)
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(origin))
    sizes = sizes[:num_ranks]
    worst = 0.0
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        xs = [batch_for(kind, seed, step, r, n) for r, n in enumerate(sizes)]
        whole = alone(torch.cat(xs))
        mine = model(xs[rank])
        start = sum(sizes[:rank])
        worst = max(worst, (mine - whole[start : start + sizes[rank]]).abs().max().item())
        (mine**2).sum().backward()
        ((whole**2).sum() / num_ranks).backward()
        state, expected = model.module.state_dict(), alone.state_dict()
        worst = max([worst, *((state[k] - expected[k]).abs().max().item() for k in expected)])
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        worst = max([worst, *((p.grad - q.grad).abs().max().item() for p, q in pairs)])
        with torch.no_grad():
            for net in (model, alone):
                for p in net.parameters():
                    p.sub_(p.grad, alpha=0.01)
    model.eval()
    alone.eval()
    if kind != "no running stats":
        worst = max(worst, (model(xs[rank]) - alone(xs[rank])).abs().max().item())
    return worst


@pytest.mark.parametrize("kind", ["1d", "2d", "no affine", "no running stats", "cumulative"])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (2, 5, 3)], ids=["even", "uneven"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_synchronized_batch_norm_equals_the_whole_batch(num_ranks, sizes, kind):
    """`convert_sync_batchnorm` on the CPU: outputs, gradients and running statistics of one process."""
    assert max(pool(num_ranks).run(synchronized_norm, kind, 1, sizes)) < TOLERANCE


def own_conversion(rank, _num_ranks, seed):
    from paceline import SyncBatchNorm, convert_sync_batchnorm

    torch.manual_seed(seed)
    module = convert_sync_batchnorm(normalised("1d"))
    model = DistributedDataParallel(module)
    squares(model(batch_for("1d", seed, 0, rank, 4))).backward()
    return (
        isinstance(module[1], SyncBatchNorm),
        isinstance(module[1], nn.SyncBatchNorm),
        digest(list(model.buffers())),
    )


def test_own_conversion():
    """`paceline.convert_sync_batchnorm` makes layers that are torch's SyncBatchNorm to whoever asks."""
    first, second = pool(2).run(own_conversion, 2)
    assert first == second
    assert first[:2] == (True, True)


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.register_buffer("shift", torch.full((16,), 0.25))
        self.b = nn.Linear(16, 4)
        self.dtypes = []

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x) + self.shift.to(x.dtype)))
        self.dtypes = [str(t.dtype) for t in (x, self.a.weight, self.shift, y)]
        return y


def mixed(rank, _num_ranks, seed, dtypes):
    """Dtypes inside and outside, and losses with and without mixed precision."""
    losses = {}
    for name in ("mixed", "full"):
        torch.manual_seed(seed)
        precision = _MixedPrecision(**dtypes) if name == "mixed" else None
        model = DistributedDataParallel(Seen(), mixed_precision=precision)
        optimizer = sgd(model)
        losses[name] = []
        for step in range(10):
            optimizer.zero_grad()
            loss = squares(model(torch.randn(8, 8, generator=generator(seed, step, rank))).float() - 1.0)
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
        if name == "mixed":
            inside = model.module.dtypes
            outside = {str(p.dtype) for p in model.parameters()} | {
                str(p.grad.dtype) for p in model.parameters()
            }
            bits = digest([*model.parameters(), *(p.grad for p in model.parameters())])
    worst = max(abs(a - b) for a, b in zip(losses["mixed"], losses["full"], strict=True))
    return inside, outside, bits, worst


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dtypes", "inside"),
    [
        (
            {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16},
            ["torch.bfloat16"] * 4,
        ),
        (
            {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "buffer_dtype": torch.float32},
            ["torch.bfloat16", "torch.bfloat16", "torch.float32", "torch.bfloat16"],
        ),
        ({"reduce_dtype": torch.bfloat16}, ["torch.float32"] * 4),
    ],
    ids=["all bf16", "bf16 parameters", "bf16 reduction"],
)
def test_mixed_precision(dtypes, inside):
    """Computes and reduces in the given types; parameters and gradients stay float32 and equal on all ranks."""
    first, second = pool(2).run(mixed, 3, dtypes)
    assert first[0] == inside
    assert first[1] == {"torch.float32"}
    assert first[2] == second[2]
    assert first[3] < 0.1


class Recomputed(nn.Module):
    """Two layers that are checkpointed, normalisations, and a parameter that a checkpointed function uses itself."""

    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.BatchNorm1d(16))
        self.scale = nn.Parameter(torch.ones(16))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(16, 4))
        self.reentrant = reentrant

    def forward(self, x):
        x = self.norm(self.first(x))
        if self.reentrant is None:
            return self.last(self._scaled(self.block(x)))
        x = checkpoint(
            self._scaled, checkpoint(self.block, x, use_reentrant=self.reentrant), use_reentrant=False
        )
        return self.last(x)

    def _scaled(self, x):
        return torch.sin(x * self.scale)


def recomputed_in_low_precision(rank, num_ranks, buffer_dtype):
    """Distances of gradients from those of a low module, by kind of checkpointing; and what is left afterwards."""
    low = torch.bfloat16
    found = {}
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        origin = Recomputed(reentrant)
        copies = [copy.deepcopy(origin) for _ in range(num_ranks)]
        precision = _MixedPrecision(param_dtype=low, reduce_dtype=torch.float32, buffer_dtype=buffer_dtype)
        model = DistributedDataParallel(origin, mixed_precision=precision)
        for one in copies:
            one.reentrant = None
            for part in one.modules():
                if not (buffer_dtype is None and isinstance(part, nn.BatchNorm1d)):
                    for p in part.parameters(recurse=False):
                        p.data = p.to(low)
                    for name, b in part.named_buffers(recurse=False):
                        part._buffers[name] = b.to(low) if b.is_floating_point() else b
        worst = 0.0
        for step in range(2):
            xs = [torch.randn(8, 8, generator=generator(step, r)) for r in range(num_ranks)]
            model.zero_grad()
            sum(squares(model(xs[rank] * k)) for k in (1, 2)).backward()
            for one, x in zip(copies, xs, strict=True):
                one.zero_grad()
                sum(squares(one(x.to(low) * k)) for k in (1, 2)).backward()
            grads = zip(model.module.parameters(), *(one.parameters() for one in copies), strict=True)
            for p, *others in grads:
                mean = sum(q.grad.float() for q in others) / num_ranks
                worst = max(worst, ((p.grad - mean).norm() / mean.norm().clamp(min=1e-6)).item())
        loss = squares(model(xs[rank]))
        handle = model.module.first.weight.register_hook(_raise)
        with pytest.raises(StumbleError):
            loss.backward()
        handle.remove()
        kinds = {(type(p), p.dtype) for p in model.module.parameters()}
        found[reentrant] = worst, kinds == {(nn.Parameter, torch.float32)}
    return found


class StumbleError(Exception):
    """Ends a backward."""


def _raise(_gradient):
    raise StumbleError


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("buffer_dtype", [None, torch.bfloat16], ids=str)
def test_mixed_precision_is_recomputed_in(buffer_dtype):
    """With either kind of checkpointing, as a module in bfloat16; parameters are themselves afterwards."""
    for found in pool(2).run(recomputed_in_low_precision, buffer_dtype):
        for worst, is_back in found.values():
            assert worst < 0.05
            assert is_back


def refused_precision(_rank, _num_ranks):
    said = []
    for norm in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        module = nn.Sequential(norm(nn.Linear(8, 8)))
        try:
            DistributedDataParallel(module, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
        except ConfigurationError as error:
            said.append(str(error))
        both = _MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = DistributedDataParallel(module, mixed_precision=both)
        squares(model(torch.ones(2, 8))).backward()
    return said


@pytest.mark.filterwarnings("ignore")
def test_spectral_norm_needs_low_buffers():
    """Its parameter is multiplied by its buffers: without `buffer_dtype` that is refused before anything runs."""
    for said in pool(2).run(refused_precision):
        assert len(said) == 2
        assert all("Pass buffer_dtype=torch.bfloat16 as well" in words for words in said)


def step_in_backward(rank, _num_ranks, seed, optimizer_class, options):
    """Digests with the optimizer in backward and after it, and whether gradients are gone."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    digests = []
    for in_backward in (True, False):
        torch.manual_seed(seed)
        module = Mlp(width=128)
        if in_backward:
            _apply_optimizer_in_backward(optimizer_class, module.parameters(), {"lr": 0.05})
        model = DistributedDataParallel(module, bucket_cap_mb=0.0005, **options)
        optimizer = None if in_backward else optimizer_class(model.parameters(), lr=0.05)
        for step in range(6):
            squares(model(torch.randn(6, 8, generator=generator(seed, step, rank)))).backward()
            if optimizer is None:
                gone = all(p.grad is None for p in module.parameters())
            else:
                optimizer.step()
                optimizer.zero_grad()
        digests.append(digest(list(model.parameters())))
    return *digests, gone


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["default", "find_unused"])
def test_optimizer_step_in_backward(optimizer_class, options):
    """`_apply_optimizer_in_backward`: the same bits as an ordinary step, on reduced gradients, which are freed."""
    results = pool(2).run(step_in_backward, 4, optimizer_class, options)
    assert len({bits for result in results for bits in result[:2]}) == 1
    assert all(gone for *_, gone in results)


def some_in_backward(rank, _num_ranks, seed):
    from torch.distributed.optim import _apply_optimizer_in_backward

    torch.manual_seed(seed)
    module = Mlp()
    early = list(module.layers[0].parameters())
    _apply_optimizer_in_backward(torch.optim.SGD, early, {"lr": 0.05})
    model = DistributedDataParallel(module)
    squares(model(torch.randn(6, 8, generator=generator(seed, rank)))).backward()
    return [p.grad is None for p in module.parameters()], digest(list(model.parameters()))


@pytest.mark.filterwarnings("ignore")
def test_optimizer_in_backward_for_some_parameters():
    """Only the parameters that have an optimizer of their own are stepped and freed."""
    first, second = pool(2).run(some_in_backward, 5)
    assert first == second
    assert first[0] == [True] * 2 + [False] * 6

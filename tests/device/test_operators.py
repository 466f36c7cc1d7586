"""Operators of the device: the CPU's results to the last bit, whatever the schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from device import late
from device.marks import device, on_rank_0
from device.ranks import as_the_device_computes

pytestmark = device


class LastOutput(nn.Module):
    """The last of a recurrent layer's outputs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0][:, -1]


def mlp():
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.LayerNorm(32), nn.Dropout(0.2), nn.Linear(32, 5))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Embedding(50, 16), layer, nn.Flatten(), nn.Linear(96, 5))


def lstm():
    return nn.Sequential(LastOutput(nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True)), nn.Linear(12, 5))


def gru():
    return nn.Sequential(LastOutput(nn.GRU(8, 6, 2, batch_first=True)), nn.Linear(6, 5))


MODELS = {
    mlp: (16, 20),
    convolutional: (8, 3, 12, 12),
    transformer: (8, 6),
    lstm: (4, 3, 8),
    gru: (4, 3, 8),
}
# The matrix products of some processors round by where memory begins. Then the bits are those of a device in order.
ROUNDED = {gru}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
}


@as_the_device_computes()
def trained(build, optimizer, where):
    """Losses, then parameters, after three steps."""
    torch.manual_seed(0)
    model = build().to(where)
    stepping = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(1)  # dropout
    losses = []
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        shape = MODELS[build]
        x = torch.randint(50, shape, generator=g) if build is transformer else torch.randn(shape, generator=g)
        y = torch.randint(5, (shape[0],), generator=g)
        loss = nn.functional.cross_entropy(model(x.to(where)), y.to(where))
        stepping.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepping.step()
        losses.append(loss.detach())
    return [t.detach().cpu() for t in (*losses, *model.state_dict().values())]


@pytest.mark.parametrize("schedule", late.SCHEDULES)
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@on_rank_0
def test_models_train_to_the_same_bits(build, schedule):
    """Each kind of layer, with each optimizer: losses and parameters of three steps are the CPU's (see `ROUNDED`)."""
    for optimizer in OPTIMIZERS if build is mlp else ("sgd", "adamw"):
        expected = trained(build, optimizer, "cpu")
        if build in ROUNDED:
            with late.scheduled("eager"):
                in_order = trained(build, optimizer, late.DEVICE)
            assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(expected, in_order, strict=True))
            expected = in_order
        with late.scheduled(schedule), late.checked():
            found = trained(build, optimizer, late.DEVICE)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True)), optimizer


@on_rank_0
def test_training_waits_for_nothing_but_copies():
    """No operator of these models falls back to making the host wait."""
    for build in MODELS:
        with late.counted() as causes:
            trained(build, "adamw", late.DEVICE)
        assert set(causes) <= {"copy from the host", "copy to the host"}, build


CALLS = {
    "conjugate": lambda x: torch.view_as_real((torch.complex(x, x).conj() * 1j).sum(0)),
    "negative view": lambda x: torch.complex(x, x).conj().imag + 1,
    "sort": lambda x: x.sort(dim=1).values.cumsum(0).topk(2).values,
    "nonzero": lambda x: x[x > 0],
    "unique": lambda x: (x * 2).long().unique(),
    "index_put": lambda x: x.index_put((torch.tensor([0, 2]),), x[1]),
    "scatter": lambda x: torch.zeros_like(x).scatter_add_(1, (x.abs() * 3).long().clamp_(max=3), x),
    "where": lambda x: torch.where(x > 0, x, 2.0) + x.clamp(min=0.1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "channels last": lambda x: x.view(1, 2, 4, 4)[:, :1].contiguous(memory_format=torch.channels_last) * 2,
    "bfloat16": lambda x: (x.bfloat16() @ x.bfloat16().t()).float(),
    "out=": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "resized": lambda x: x.clone().resize_(4, 4) * 2,
    "linalg": lambda x: torch.linalg.qr(x)[0],
    "chunks": lambda x: torch.cat([c * 2 for c in x.chunk(2)]) + torch.stack(list(x.unbind(0))),
    "foreach": lambda x: torch._foreach_norm([x, x * 2])[1],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
}


@pytest.mark.parametrize("schedule", late.SCHEDULES)
@on_rank_0
def test_operators_are_the_cpu_s(schedule):
    """Views, complex numbers, shapes that depend on data, random numbers: each the CPU's to the last bit."""
    for name, call in CALLS.items():
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
        torch.manual_seed(4)
        expected = call(x)
        with late.scheduled(schedule), late.checked():
            torch.manual_seed(4)
            found = call(x.to(late.DEVICE))
            assert found.device.type == late.DEVICE
            found = found.cpu()
        assert torch.equal(expected, found), name


@on_rank_0
def test_random_numbers_are_the_cpu_s_with_the_same_seed():
    """So dropout is, and a state can be taken and put back."""
    torch.manual_seed(7)
    on_cpu = torch.randn(5)
    torch.manual_seed(7)
    assert torch.equal(torch.randn(5, device=late.DEVICE).cpu(), on_cpu)
    state = torch.late.get_rng_state()
    first = torch.rand(3, device=late.DEVICE).cpu()
    torch.late.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=late.DEVICE).cpu(), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_rank_0
def test_autocast_casts_by_torch_s_lists(dtype):
    """Products are in low precision, losses and norms in float, sums into float, mixed arguments in the widest."""
    linear = nn.Linear(4, 4).to(late.DEVICE)
    x = torch.randn(3, 4, device=late.DEVICE)
    with torch.autocast(late.DEVICE, dtype):
        low = linear(x)
        assert low.dtype == dtype
        assert (low @ low.t()).dtype == dtype
        assert (low + 1).dtype == dtype
        assert low.softmax(1).dtype == torch.float32
        assert low.sum().dtype == torch.float32
        assert nn.functional.mse_loss(low, x).dtype == torch.float32
        assert nn.functional.layer_norm(low, (4,)).dtype == torch.float32
        assert low.norm().dtype == torch.float32
        assert torch.addcmul(low, low, x).dtype == torch.float32
    assert linear(x).dtype == torch.float32
    expected = nn.functional.linear(x.to(dtype), linear.weight.to(dtype), linear.bias.to(dtype))
    assert torch.equal(low.cpu(), expected.cpu())


@on_rank_0
def test_autocast_trains():
    """The parameters' gradients are in their own precision, with a gradient scaler as on other devices."""
    model = mlp().to(late.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(late.DEVICE)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast(late.DEVICE, torch.bfloat16):
        loss = model(torch.randn(4, 20, device=late.DEVICE)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert not any(torch.equal(a.cpu(), p.cpu()) for a, p in zip(before, model.parameters(), strict=True))


@on_rank_0
def test_what_torch_asks_of_a_device_is_there():
    """Checkpointing, copies of modules, printing, saving to a buffer, page-locked loaders, forked generators."""
    import copy
    import io

    from torch.utils.checkpoint import checkpoint
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.ones(2, device=late.DEVICE, requires_grad=True)
    checkpoint(lambda t: t * 2, x, use_reentrant=False).sum().backward()
    assert x.grad.tolist() == [2, 2]
    assert "device='late:0'" in repr(copy.deepcopy(x.detach()))
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    assert torch.load(io.BytesIO(buffer.getvalue()))["x"].device.type == late.DEVICE
    assert next(iter(DataLoader(TensorDataset(torch.ones(4)), pin_memory=True)))[0].is_pinned()
    with torch.random.fork_rng(devices=[0], device_type=late.DEVICE):
        pass


@on_rank_0
def test_what_draws_from_no_generator_is_refused():
    """Else the time at which it is run would decide which numbers it draws."""
    with pytest.raises(NotImplementedError, match="native_dropout draws random numbers from no generator"):
        torch.native_dropout(torch.ones(4, device=late.DEVICE), 0.5, True)


@on_rank_0
@pytest.mark.parametrize("schedule", late.SCHEDULES)
def test_sparse_tensors_are_the_cpu_s(schedule):
    """Made, coalesced, scaled, added to a dense tensor, made dense and sparse again."""
    indices, values = torch.tensor([[0, 2, 0]]), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

    def computed(where):
        sparse = torch.sparse_coo_tensor(indices.to(where), values.to(where), (5, 4))
        dense = torch.ones(5, 4, device=where).add_(sparse, alpha=-0.5)
        once = sparse.coalesce()
        again = dense.to_sparse(1).coalesce()
        return [
            t.cpu() for t in (dense, (once * 2).to_dense(), once.indices(), once.values(), again.values() + 1)
        ]

    with late.scheduled(schedule), late.checked():
        found = computed(late.DEVICE)
    assert all(torch.equal(*pair) for pair in zip(computed("cpu"), found, strict=True))

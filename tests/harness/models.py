"""Small models that stand for what people train, each with its data, loss and optimizer.

Everything random follows from a seed that is passed in. A workload's batch of one rank depends on (seed,
step, rank), so one process can rebuild what any rank saw.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def generator(*parts: int) -> torch.Generator:
    """Return a torch generator that depends on `parts` only."""
    text = ",".join(str(part) for part in parts).encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "big"))


def digest(tensors: Sequence[Tensor]) -> str:
    """Return a hash of the tensors' bits."""
    state = hashlib.sha256()
    for tensor in tensors:
        data = tensor.detach()
        data = data.coalesce().to_dense() if data.is_sparse else data
        data = torch.view_as_real(data.resolve_conj()) if data.is_complex() else data
        state.update(
            data.contiguous().flatten().view(torch.uint8).numpy().tobytes() if data.numel() else b"-"
        )
    return state.hexdigest()[:16]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the bitwise oracle."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Workload:
    """A model, what goes in, and the loss of one forward.

    Attributes:
        build: Makes the model; call `torch.manual_seed` before.
        batch: Inputs of one rank in one step, from a generator.
        loss: Scalar loss of the model's output.
        optimizer: Makes the optimizer.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Any, ...]]
    loss: Callable[[Any], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd


def random_batch(*parts: int, shape: Sequence[int] = (4, 8), dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a normally distributed batch that depends only on `parts`, such as seed, step and rank."""
    return torch.randn(tuple(shape), generator=generator(*parts), dtype=dtype)


def squares(output: Tensor) -> Tensor:
    """Return a loss that needs no target."""
    return (output.abs() ** 2).mean()


def train(
    model: nn.Module,
    batches: Iterable[Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], Tensor] = squares,
) -> list[str]:
    """Train one step per batch, by `sgd` unless told otherwise. Return the bits of each step's gradients."""
    optimizer = optimizer or sgd(model)
    bits = []
    for x in batches:
        optimizer.zero_grad()
        loss(model(x)).backward()
        bits.append(digest([p.grad for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    return bits


class Mlp(nn.Module):
    """Four linear layers, the smallest model with several buckets."""

    def __init__(self, width: int = 16, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        sizes = [8, width, width, width, 4]
        self.layers = nn.ModuleList(nn.Linear(i, o, dtype=dtype) for i, o in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        output: Tensor = self.layers[-1](x)
        return output


def conv_net() -> nn.Module:
    """Return convolutions with batch normalization."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


class TiedLanguageModel(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.body(self.embedding(tokens))))
        return output


class MixedDtypes(nn.Module):
    """Parameters of four floating types, interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8, dtype=torch.float64)
        self.c = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.d = nn.Linear(8, 8)
        self.e = nn.Linear(8, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(self.a(x).double()))
        x = torch.tanh(self.d(self.c(x.bfloat16()).float()))
        output: Tensor = self.e(x.double()) * self.scale.double()
        return output


class ComplexNet(nn.Module):
    """Complex and real weights together."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(8, 8)
        self.spectrum = nn.Parameter(torch.randn(8, 6, dtype=torch.complex64))
        self.fine = nn.Parameter(torch.randn(6, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = (self.real(x).to(torch.complex64) @ self.spectrum) * self.fine
        return output


class SparseNet(nn.Module):
    """A sparse embedding and a sparse bag under a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6, sparse=True)
        self.bags = nn.EmbeddingBag(20, 6, mode="sum", sparse=True)
        self.out = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.out(torch.cat([self.words(tokens).sum(1), self.bags(tokens)], dim=1))
        return output


class OddShapes(nn.Module):
    """Scalars, empty parameters and transposed strides."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.transposed = nn.Parameter(torch.randn(4, 8).t())
        self.gap = nn.Parameter(torch.randn(8, 8)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.transposed + x @ self.gap) * self.gain + self.empty.sum()


class TinyTransformer(nn.Module):
    """Embedding, two encoder layers with dropout, output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.out(self.encoder(self.embedding(tokens)))
        return output


class IgnoresSome(nn.Module):
    """A model with a root-level and a nested parameter that data parallelism must ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.local = nn.Linear(8, 4)
        self.w = nn.Parameter(torch.ones(4))
        self._ddp_params_and_buffers_to_ignore = ["w", "local.weight"]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.local(torch.tanh(self.body(x))) * self.w
        return output


class Branches(nn.Module):
    """A trunk and two heads, one of which can be left out; returns both heads' outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, width)
        self.left = nn.Linear(width, 3)
        self.right = nn.Linear(width, 3)
        self.spare = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(4, width)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(
        self, x: Tensor, *, left: bool = True, right: bool = True, spare: bool = True
    ) -> tuple[Tensor | None, ...]:
        hidden = torch.tanh(self.trunk(x) + self.frozen(x))
        outputs = (self.left(hidden) if left else None, self.right(hidden) if right else None)
        return tuple(o if o is None else o * self.spare if spare else o for o in outputs)


def _vectors(batch_size: int = 6) -> Callable[[torch.Generator], tuple[Any, ...]]:
    return lambda source: (torch.randn(batch_size, 8, generator=source),)


def _images(source: torch.Generator) -> tuple[Any, ...]:
    return (torch.randn(4, 3, 8, 8, generator=source),)


def _tokens(vocabulary: int) -> Callable[[torch.Generator], tuple[Any, ...]]:
    return lambda source: (torch.randint(0, vocabulary, (4, 5), generator=source),)


WORKLOADS: dict[str, Workload] = {
    "mlp": Workload(Mlp, _vectors(), squares),
    "wide_mlp": Workload(
        lambda: Mlp(width=128), _vectors(), squares
    ),  # gradients that are worth a copy of their own
    "conv_bn": Workload(conv_net, _images, squares),
    "channels_last": Workload(
        lambda: conv_net().to(memory_format=torch.channels_last),  # type: ignore[call-overload]  # Module.to takes it
        lambda source: (_images(source)[0].to(memory_format=torch.channels_last),),
        squares,
    ),
    "tied": Workload(TiedLanguageModel, _tokens(13), squares),
    "transformer": Workload(TinyTransformer, _tokens(17), squares),
    "mixed_dtypes": Workload(MixedDtypes, _vectors(), squares),
    "complex": Workload(ComplexNet, _vectors(), squares),
    "sparse": Workload(
        SparseNet, _tokens(20), squares, lambda model: torch.optim.SGD(model.parameters(), lr=0.05)
    ),
    "odd_shapes": Workload(OddShapes, _vectors(), squares),
    "lstm": Workload(
        lambda: nn.LSTM(8, 6, num_layers=2, batch_first=True),
        lambda source: (torch.randn(3, 4, 8, generator=source),),
        lambda output: squares(output[0]) + squares(output[1][0]),
    ),
    "empty_batch": Workload(Mlp, _vectors(0), lambda output: output.sum()),
    "batch_on_some": Workload(
        Mlp, lambda source: (torch.randn(int(source.initial_seed() % 3), 8, generator=source),), torch.sum
    ),
}

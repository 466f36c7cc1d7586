"""Measures the ways in which torch can compute a convolution on a CPU: what the minibatch program chooses among.

Each is checked against the first before it is timed. Times are the calling thread's processor time, so call
`torch.set_num_threads(1)` before: other work on the machine then counts little. Only forward is timed. Workspaces are
what the formulation needs besides input, weights and output, oneDNN's none. `benchmarks.minibatch_memory` counts what
torch allocates instead: exact for im2col, but oneDNN gets copies in its own layout, and from 16 samples on
"without oneDNN" is NNPACK, whose workspace is its own.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.planning.minibatch import Alternative

_FLOAT, _COMPLEX = 4, 8  # bytes
_TOLERANCE = 1e-3  # of the largest output


@dataclass(frozen=True)
class Convolution:
    """A convolution of stride 1 that keeps the size of its input."""

    channels_in: int
    channels_out: int
    kernel: int
    size: int

    @property
    def sample_bytes(self) -> int:
        """Of one sample's output, and of its gradient."""
        return 2 * _FLOAT * self.channels_out * self.size**2

    @property
    def weight_bytes(self) -> int:
        return _FLOAT * self.channels_in * self.channels_out * self.kernel**2


Compute = Callable[[Tensor, Tensor], Tensor]


def _one_dnn(x: Tensor, w: Tensor) -> Tensor:
    return functional.conv2d(x, w, padding="same")


def _channels_last(x: Tensor, w: Tensor) -> Tensor:
    form = torch.channels_last
    return functional.conv2d(
        x.contiguous(memory_format=form), w.contiguous(memory_format=form), padding="same"
    )


def _without_one_dnn(x: Tensor, w: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on GPUs of another vendor
        with torch.backends.mkldnn.flags(enabled=False):
            return functional.conv2d(x, w, padding="same")


def _unfold(x: Tensor, w: Tensor) -> Tensor:
    columns = functional.unfold(x, w.shape[-1], padding=w.shape[-1] // 2)
    return (w.flatten(1) @ columns).view(len(x), len(w), *x.shape[2:])


def _fft(x: Tensor, w: Tensor) -> Tensor:
    kernel, size = w.shape[-1], x.shape[-1]
    whole = (size + kernel - 1,) * 2
    products = torch.einsum(
        "bchw,ochw->bohw", torch.fft.rfft2(x, whole), torch.fft.rfft2(w.flip(2, 3), whole)
    )
    start = kernel // 2
    found: Tensor = torch.fft.irfft2(products, whole)
    return found[..., start : start + size, start : start + size]


def _columns_bytes(layer: Convolution, X: int) -> int:
    return _FLOAT * X * layer.channels_in * layer.kernel**2 * layer.size**2


def _spectra_bytes(layer: Convolution, X: int) -> int:
    width = layer.size + layer.kernel - 1
    maps = X * (layer.channels_in + layer.channels_out) + layer.channels_in * layer.channels_out
    return _COMPLEX * maps * width * (width // 2 + 1)


def _nothing(layer: Convolution, X: int) -> int:
    return 0


ALGORITHMS: dict[str, tuple[Compute, Callable[[Convolution, int], int]]] = {
    "oneDNN": (_one_dnn, _nothing),
    "oneDNN, channels last": (_channels_last, _nothing),
    "without oneDNN": (_without_one_dnn, _columns_bytes),
    "im2col and GEMM": (_unfold, _columns_bytes),
    "FFT": (_fft, _spectra_bytes),
}


def time_alternatives(layer: Convolution, X: int, names: tuple[str, ...], repeats: int) -> list[Alternative]:
    """Time every named algorithm's forward at a minibatch of X; the least of `repeats`.

    Raises:
        AssertionError: Two algorithms disagree, so one of them is wrong.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(X, layer.channels_in, layer.size, layer.size, generator=generator)
    w = torch.randn(layer.channels_out, layer.channels_in, layer.kernel, layer.kernel, generator=generator)
    expected = _one_dnn(x, w)
    found = []
    for name in names:
        compute, workspace_bytes = ALGORITHMS[name]
        error = float((compute(x, w) - expected).abs().max() / expected.abs().max())
        assert error < _TOLERANCE, f"{name} is {error:.2g} away from oneDNN"
        times_s = []
        for _ in range(repeats):
            start_s = time.thread_time()
            compute(x, w)
            times_s.append(time.thread_time() - start_s)
        found.append(Alternative(name, min(times_s), workspace_bytes(layer, X)))
    return found


def run_layers(layers: tuple[Convolution, ...], X: int, names: tuple[str, ...], repeats: int) -> float:
    """Seconds of all layers one after another, each by its algorithm; the least of `repeats`."""
    pairs = []
    for layer, name in zip(layers, names, strict=True):
        x = torch.randn(X, layer.channels_in, layer.size, layer.size)
        w = torch.randn(layer.channels_out, layer.channels_in, layer.kernel, layer.kernel)
        pairs.append((ALGORITHMS[name][0], x, w))
    times_s = []
    for _ in range(repeats):
        start_s = time.thread_time()
        for compute, x, w in pairs:
            compute(x, w)
        times_s.append(time.thread_time() - start_s)
    return min(times_s)

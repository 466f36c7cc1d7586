"""Measures the ways in which torch can compute a convolution on a CPU: what the minibatch program chooses among.

Each is checked against the first before it is timed, forward and backward. Times are the calling thread's processor
time, so call `torch.set_num_threads(1)` before: other work on the machine then counts little.

A workspace is what torch's allocator holds at most besides what the program counts anyway: the output, its gradient
and the weight's (`counted_workspace`). It contains copies in another layout, and whatever autograd keeps for backward.
What libraries allocate by themselves, as NNPACK does (it is "without oneDNN" from 16 samples on), is not in it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from paceline_lab.experiments.prediction.minibatch import Alternative

_FLOAT, _COMPLEX = 4, 8  # bytes
_TOLERANCE = 1e-3  # of the largest output, or gradient
_ALLOCATION = "[memory]"


@dataclass(frozen=True)
class Convolution:
    """A convolution of stride 1 that keeps the size of its input; nobody needs the gradient of the first one's."""

    channels_in: int
    channels_out: int
    kernel: int
    size: int
    is_first: bool = False

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
    "without oneDNN": (_one_dnn, _columns_bytes),
    "im2col and GEMM": (_unfold, _columns_bytes),
    "FFT": (_fft, _spectra_bytes),
}
"""How each computes, and the workspace that its formulation needs in forward."""


@contextmanager
def _libraries(name: str) -> Iterator[None]:
    """With what torch may compute; backward asks, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on GPUs of another vendor
        with torch.backends.mkldnn.flags(enabled=name != "without oneDNN"):
            yield


class _Trained:
    """A layer, its input and its output's gradient at one minibatch."""

    def __init__(self, layer: Convolution, X: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.x = random(X, layer.channels_in, layer.size, layer.size).requires_grad_(not layer.is_first)
        kernel = (layer.kernel, layer.kernel)
        self.w = random(layer.channels_out, layer.channels_in, *kernel).requires_grad_()
        self.output_gradient = random(X, layer.channels_out, layer.size, layer.size)
        self.wanted = [self.w] if layer.is_first else [self.w, self.x]

    def forward(self, name: str) -> Tensor:
        compute, _ = ALGORITHMS[name]
        with _libraries(name):
            return compute(self.x, self.w)

    def backward(self, name: str, output: Tensor) -> tuple[Tensor, ...]:
        with _libraries(name):
            return torch.autograd.grad(output, self.wanted, self.output_gradient)

    def train(self, name: str) -> tuple[Tensor, ...]:
        """The output and the gradients."""
        output = self.forward(name)
        return output.detach(), *self.backward(name, output)

    def check(self, name: str) -> None:
        """Compare with oneDNN."""
        for seen, known in zip(self.train(name), self.train("oneDNN"), strict=True):
            error = float((seen - known).abs().max() / known.abs().max())
            assert error < _TOLERANCE, f"{name} is {error:.2g} away from oneDNN"


def time_alternatives(
    layers: Sequence[Convolution], X: int, names: Sequence[str], repeats: int
) -> list[list[Alternative]]:
    """Time every named algorithm's forward and backward of every layer at a minibatch of X, and count its workspace.

    As in training: the forwards of all layers, then the backwards, all by one algorithm; so a layer does not find in
    the caches what it left there itself.

    Args:
        layers: What is computed.
        X: Samples.
        names: Of algorithms.
        repeats: Of which the least time of each layer is taken.

    Returns:
        For each layer, its alternatives.

    Raises:
        AssertionError: Two algorithms disagree, so one of them is wrong.
    """
    trained = [_Trained(layer, X) for layer in layers]
    found: list[list[Alternative]] = [[] for _ in layers]
    for name in names:
        for each in trained:
            each.check(name)
        steps_s = [_step_s([(each, name) for each in trained]) for _ in range(repeats)]
        for alternatives, layer, times_s in zip(found, layers, zip(*steps_s, strict=True), strict=True):
            alternatives.append(Alternative(name, min(times_s), counted_workspace(layer, X, name)))
    return found


def counted_workspace(layer: Convolution, X: int, name: str) -> int:
    """Bytes that an algorithm allocates at most besides the output and the gradients, in forward and backward."""
    trained = _Trained(layer, X)
    trained.train(name)  # what is allocated once and kept is no workspace
    kept: list[Tensor] = []
    forward = peak_bytes(lambda: kept.append(trained.forward(name))) - kept[0].nbytes
    kept.clear()
    gradients = sum(tensor.nbytes for tensor in trained.wanted)
    both = peak_bytes(lambda: kept.extend(trained.train(name))) - kept[0].nbytes - gradients
    return max(forward, both, 0)


def run_layers(
    layers: Sequence[Convolution], X: int, names: Sequence[str], repeats: int
) -> tuple[float, int]:
    """Train all layers, each by its algorithm.

    Returns:
        Seconds, the least of `repeats`; and the most that torch's allocator held above weights and inputs.
    """
    pairs = [(_Trained(layer, X), name) for layer, name in zip(layers, names, strict=True)]
    _step_s(pairs)  # warm-up
    return min(sum(_step_s(pairs)) for _ in range(repeats)), peak_bytes(lambda: _step_s(pairs))


def _step_s(pairs: Sequence[tuple[_Trained, str]]) -> list[float]:
    """The forwards of all layers, then their backwards; each layer's seconds."""
    outputs, seconds = [], []
    for trained, name in pairs:
        start_s = time.thread_time()
        outputs.append(trained.forward(name))
        seconds.append(time.thread_time() - start_s)
    kept = []  # the weights' gradients
    for index in reversed(range(len(pairs))):
        trained, name = pairs[index]
        start_s = time.thread_time()
        kept.append(trained.backward(name, outputs.pop())[0])
        seconds[index] += time.thread_time() - start_s
    return seconds


def peak_bytes(compute: Callable[[], Any]) -> int:
    """The most that torch's allocator held at once on the CPU during `compute()`, above what there was before.

    Every allocation and release is an event of torch's profiler; their running sum has a largest value.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        compute()
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == _ALLOCATION]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((int(event.nbytes()) for event in events), initial=0))

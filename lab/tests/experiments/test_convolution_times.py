"""The most memory that a computation holds, counted where it is known; and what is timed computes what it should."""

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline_lab.experiments.prediction.convolution_times import (
    ALGORITHMS,
    Convolution,
    counted_workspace,
    peak_bytes,
    run_layers,
    time_alternatives,
)

LAYER = Convolution(4, 4, 3, 8)


def test_the_peak_is_what_was_there_at_once() -> None:
    def compute() -> torch.Tensor:
        first = torch.empty(1000, dtype=torch.uint8)
        del first
        second = torch.empty(640, dtype=torch.uint8)
        third = torch.empty(640, dtype=torch.uint8)
        del third
        return second

    assert peak_bytes(compute) == 1280
    assert peak_bytes(lambda: None) == 0


def test_the_columns_of_im2col_are_its_workspace() -> None:
    compute, workspace_bytes = ALGORITHMS["im2col and GEMM"]
    for layer, X in ((Convolution(3, 8, 5, 16), 2), (Convolution(4, 4, 3, 8), 5)):
        x = torch.randn(X, layer.channels_in, layer.size, layer.size)
        w = torch.randn(layer.channels_out, layer.channels_in, layer.kernel, layer.kernel)
        output_bytes = X * layer.sample_bytes // 2  # a sample's counts the gradient of the output, too
        assert peak_bytes(lambda x=x, w=w: compute(x, w)) == output_bytes + workspace_bytes(layer, X)


class _Keeps(torch.autograd.Function):
    """Holds a MiB from forward to backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty(1 << 20, dtype=torch.uint8))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        ctx.saved_tensors  # noqa: B018
        return gradients[0]


class _Borrows(torch.autograd.Function):
    """Needs a MiB in backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        torch.empty(1 << 20, dtype=torch.uint8)
        return gradients[0]


def test_what_backward_needs_is_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    one_dnn, nothing = ALGORITHMS["oneDNN"]
    compute = lambda x, w: _Borrows.apply(one_dnn(x, w))  # type: ignore[no-untyped-call]  # noqa: E731
    monkeypatch.setitem(ALGORITHMS, "borrows", (compute, nothing))
    alone = counted_workspace(LAYER, 2, "oneDNN")
    gradients = LAYER.weight_bytes + 2 * LAYER.sample_bytes // 2
    assert (1 << 20) - gradients <= counted_workspace(LAYER, 2, "borrows") <= (1 << 20) + alone


def test_what_is_kept_for_backward_is_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    one_dnn, nothing = ALGORITHMS["oneDNN"]
    alone = counted_workspace(LAYER, 2, "oneDNN")
    monkeypatch.setitem(ALGORITHMS, "keeps", (lambda x, w: _Keeps.apply(one_dnn(x, w)), nothing))  # type: ignore[no-untyped-call]
    assert 1 << 20 <= counted_workspace(LAYER, 2, "keeps") <= (1 << 20) + alone
    _, with_it = run_layers((LAYER, LAYER), 2, ("keeps", "keeps"), 1)
    _, without = run_layers((LAYER, LAYER), 2, ("oneDNN", "oneDNN"), 1)
    assert without < 1 << 20 < 2 << 20 <= with_it  # of both layers at once


def test_an_algorithm_with_wrong_gradients_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    one_dnn, nothing = ALGORITHMS["oneDNN"]

    def doubled(x: Tensor, w: Tensor) -> Tensor:
        output = one_dnn(x, w)
        return output + (output - output.detach())

    monkeypatch.setitem(ALGORITHMS, "doubled", (doubled, nothing))
    with pytest.raises(AssertionError, match="doubled is 1 away"):
        time_alternatives((LAYER,), 2, ("doubled",), 1)
    names = tuple(name for name in ALGORITHMS if name != "doubled")
    _, found = time_alternatives((Convolution(3, 4, 5, 8, is_first=True), LAYER), 2, names, 1)
    assert all(alternative.time_s > 0 for alternative in found)
    columns = next(x for x in found if x.name == "im2col and GEMM")
    assert columns.workspace_bytes >= ALGORITHMS["im2col and GEMM"][1](LAYER, 2)

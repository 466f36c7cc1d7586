"""The most memory that a computation holds, counted where it is known."""

import torch

from paceline.lab.planner.convolution_times import ALGORITHMS, Convolution
from paceline.lab.planner.peak_memory import peak_bytes


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

"""LSTM and GRU, composed. Torch takes a fused cell for foreign devices, which only vendors' devices have.

The operations and their order are those of torch's CPU path without oneDNN, so the bits are the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

_Cell = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


def register(library: torch.library.Library) -> None:
    """Give the device's autograd `lstm.input` and `gru.input`."""
    library.impl("lstm.input", _lstm, "AutogradPrivateUse1")
    library.impl("gru.input", _gru, "AutogradPrivateUse1")


def _lstm(
    inputs: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    states = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    stack = _Stack(_lstm_cell, params, has_biases, bidirectional, dropout if train else 0.0)
    output, last = stack.run(inputs.transpose(0, 1) if batch_first else inputs, states)
    hidden, cells = (torch.stack(list(part)) for part in zip(*last, strict=True))
    return (output.transpose(0, 1) if batch_first else output), hidden, cells


def _gru(
    inputs: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    states = [(row,) for row in hx.unbind(0)]
    stack = _Stack(_gru_cell, params, has_biases, bidirectional, dropout if train else 0.0)
    output, last = stack.run(inputs.transpose(0, 1) if batch_first else inputs, states)
    hidden = torch.stack([state for (state,) in last])
    return (output.transpose(0, 1) if batch_first else output), hidden


def _lstm_cell(gates_in: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor]:
    hidden, cell = state
    gates = functional.linear(hidden, weights[1], *weights[3:4]).add_(gates_in)
    in_gate, forget_gate, cell_gate, out_gate = gates.chunk(4, 1)
    cell = (forget_gate.sigmoid() * cell).add_(in_gate.sigmoid() * cell_gate.tanh())
    return out_gate.sigmoid() * cell.tanh(), cell


def _gru_cell(gates_in: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor]:
    (hidden,) = state
    from_input = gates_in.chunk(3, 1)
    from_hidden = functional.linear(hidden, weights[1], *weights[3:4]).chunk(3, 1)
    reset = from_hidden[0].add(from_input[0]).sigmoid()
    update = from_hidden[1].add(from_input[1]).sigmoid()
    new = from_input[2].add(from_hidden[2].mul(reset)).tanh()
    return ((hidden - new).mul(update).add(new),)


class _Stack:
    """Layers of a recurrent module, in one or both directions."""

    def __init__(
        self, cell: _Cell, params: Sequence[Tensor], has_biases: bool, bidirectional: bool, dropout: float
    ) -> None:
        size = 4 if has_biases else 2
        self._cell = cell
        self._weights = [params[i : i + size] for i in range(0, len(params), size)]
        self._num_directions = 2 if bidirectional else 1
        self._dropout = dropout

    def run(
        self, inputs: Tensor, states: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, list[Sequence[Tensor]]]:
        """Outputs of the last layer, time first, and the last state of each layer and direction."""
        last: list[Sequence[Tensor]] = []
        for first in range(0, len(self._weights), self._num_directions):
            if first and self._dropout:
                inputs = functional.dropout(inputs, self._dropout)
            outputs = []
            for direction in range(self._num_directions):
                output, state = self._direction(inputs, first + direction, states, backwards=direction == 1)
                outputs.append(output)
                last.append(state)
            inputs = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        return inputs, last

    def _direction(
        self, inputs: Tensor, index: int, states: Sequence[Sequence[Tensor]], *, backwards: bool
    ) -> tuple[Tensor, Sequence[Tensor]]:
        weights, state = self._weights[index], states[index]
        steps = list(functional.linear(inputs, weights[0], *weights[2:3]).unbind(0))
        outputs = []
        for step in reversed(steps) if backwards else steps:
            state = self._cell(step, state, weights)
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if backwards else outputs), state

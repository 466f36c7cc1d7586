"""A multiplicative LSTM that predicts the next byte of a text: many small operations, few large tensors.

Source: Krause et al. 2016, equations 16 to 22, as used by Puri et al. 2018 (arXiv 1808.01371): byte
embedding of 64, weight normalisation on the recurrent matrices, every batch row a contiguous stream, the
state carried over truncated segments.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline_lab.workloads.datasets import load_text
from paceline_lab.workloads.workload import SizedWorkload

State = tuple[Tensor, Tensor]  # h and c, each (B, hidden)


class NormedWeight(nn.Module):
    """A matrix as direction times length per row (Salimans & Kingma 2016)."""

    def __init__(self, num_outputs: int, num_inputs: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(num_outputs, num_inputs) / num_inputs**0.5)
        self.length = nn.Parameter(self.direction.detach().norm(dim=1, keepdim=True))

    def forward(self) -> Tensor:
        """Return the matrix (num_outputs, num_inputs)."""
        return self.length * functional.normalize(self.direction, dim=1)


class Mlstm(nn.Module):
    """One layer over bytes.

    Legend: x_t input, m_t multiplicative state, h_t output, c_t cell; i, f, o gates, u update.
        m_t = (W_mx x_t) * (W_mh h_{t-1})
        [i, f, o, u] = W_x x_t + W_m m_t + b;   c_t = f * c_{t-1} + i * u;   h_t = o * tanh(c_t)
    """

    def __init__(self, embedding_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, embedding_size)
        self.w_mx, self.w_mh = (
            NormedWeight(hidden_size, embedding_size),
            NormedWeight(hidden_size, hidden_size),
        )
        self.w_x, self.w_m = (
            NormedWeight(4 * hidden_size, embedding_size),
            NormedWeight(4 * hidden_size, hidden_size),
        )
        self.bias = nn.Parameter(torch.zeros(4 * hidden_size))
        self.head = nn.Linear(hidden_size, 256)

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Map bytes (B, T) and a state to logits (B, T, 256) and the next state (h, c)."""
        h, c = state
        w_mh, w_m = self.w_mh(), self.w_m()
        x = self.embedding(tokens)
        from_x_to_m = functional.linear(x, self.w_mx())
        from_x_to_gates = functional.linear(x, self.w_x(), self.bias)
        outputs = []
        # unbind, not [:, t]: an index's backward fills zeros of the whole tensor, T times
        for m_from_x, gates_from_x in zip(from_x_to_m.unbind(1), from_x_to_gates.unbind(1), strict=True):
            m = m_from_x * functional.linear(h, w_mh)
            gates = gates_from_x + functional.linear(m, w_m)
            i, f, o, u = gates.chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * u.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return self.head(torch.stack(outputs, dim=1)), h, c


@cache
def _stream() -> Tensor:
    return torch.frombuffer(bytearray(load_text().content), dtype=torch.uint8).long()


@dataclass(frozen=True)
class MlstmWorkload(SizedWorkload):
    """The paper's 4096 cells and segments of 256 bytes, scaled to one core."""

    embedding_size: int = 64
    hidden_size: int = 512
    segment_length: int = 48
    batch_size: int = 16

    @classmethod
    def quick(cls) -> "MlstmWorkload":
        """Return few cells and short segments."""
        return cls(embedding_size=8, hidden_size=16, segment_length=4, batch_size=2)

    @classmethod
    def of_scale_study(cls, hidden_size: int) -> "MlstmWorkload":
        """Return the workload of the scalability study: segments of 256 bytes, 256 streams per rank."""
        return cls(embedding_size=64, hidden_size=hidden_size, segment_length=256, batch_size=256)

    def operations(self) -> dict[str, float]:
        """Return the matrices' products over a whole segment.

        The recurrent matrices' gradients are all complete only when backward has arrived at the first byte. So what
        the recurrence costs is charged to the one that is registered last, which backward meets first.
        """
        n, inputs, tokens = self.hidden_size, self.embedding_size, self.batch_size * self.segment_length
        recurrent, embedded = 2.0 * 5 * n * n * tokens, 2.0 * 5 * n * inputs * tokens
        return {"w_m": recurrent, "w_x": embedded, "head": 2.0 * 256 * n * tokens}

    def make_model(self) -> nn.Module:
        """Return the model."""
        return Mlstm(self.embedding_size, self.hidden_size)

    def make_batch(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        """Return bytes and the bytes that follow them, each (B, T); rows continue where the last step's ended."""
        stream = _stream()
        row_spacing = len(stream) // (64 * self.batch_size)  # up to 64 ranks have streams of their own
        first = rank * self.batch_size * row_spacing + step * self.segment_length
        starts = first + row_spacing * torch.arange(self.batch_size)
        positions = (starts[:, None] + torch.arange(self.segment_length + 1)) % len(stream)
        segment = stream[positions]
        return segment[:, :-1], segment[:, 1:]

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], carry: State | None
    ) -> tuple[Tensor, State]:
        """Return the cross-entropy; the state is carried over, its history is not."""
        zeros = torch.zeros(batch[0].shape[0], self.hidden_size, device=batch[0].device)
        logits, h, c = model(batch[0], carry or (zeros, zeros))
        return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()), (h.detach(), c.detach())

    def notes(self) -> tuple[str, ...]:
        """Return which text was used."""
        return (f"text: {load_text().source}",)

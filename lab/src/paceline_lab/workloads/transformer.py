"""The shape of BERT (Devlin et al. 2019): an encoder whose masked-word head shares the embedding's weight.

Differences from the paper: no dropout (both sides must compute the same), no next-sentence task. The depth and width
are scaled so that a step on one core takes well under two seconds. `depth=12, width=768, vocabulary_size=30522` is
BERT-base.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline_lab.workloads.workload import SizedWorkload, batch_generator


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward layer, each added to its input and then normalised."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm_attention, self.norm_output = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same shape."""
        query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = self.norm_attention(x + self.mix(attended))
        normed: Tensor = self.norm_output(x + self.contract(functional.gelu(self.expand(x))))
        return normed

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, T, width / heads)
        return heads


class MaskedWordModel(nn.Module):
    """Embeddings, encoder, and a head tied to the word embedding."""

    def __init__(self, vocabulary_size: int, length: int, width: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary_size, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*[EncoderLayer(width, num_heads) for _ in range(depth)])
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocabulary_size)
        self.decoder.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, T, vocabulary)."""
        x = self.norm(self.words(tokens) + self.positions.weight[: tokens.shape[1]])
        x = self.transform_norm(functional.gelu(self.transform(self.layers(x))))
        logits: Tensor = self.decoder(x)
        return logits


@dataclass(frozen=True)
class TransformerWorkload(SizedWorkload):
    """A small BERT on random tokens."""

    vocabulary_size: int = 8192
    length: int = 64
    width: int = 384
    depth: int = 6
    num_heads: int = 6
    batch_size: int = 4

    @classmethod
    def quick(cls) -> "TransformerWorkload":
        """Return one narrow layer."""
        return cls(vocabulary_size=64, length=8, width=16, depth=1, num_heads=2, batch_size=2)

    @classmethod
    def bert_base(cls) -> "TransformerWorkload":
        """Return the size of BERT-base: 109.5 million parameters in 201 tensors."""
        return cls(vocabulary_size=30522, length=512, width=768, depth=12, num_heads=12, batch_size=1)

    def make_model(self) -> nn.Module:
        """Return the model."""
        return MaskedWordModel(self.vocabulary_size, self.length, self.width, self.depth, self.num_heads)

    def make_batch(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, each (B, T)."""
        generator, shape = batch_generator(rank, step), (self.batch_size, self.length)
        tokens, targets = (torch.randint(self.vocabulary_size, shape, generator=generator) for _ in range(2))
        return tokens, targets

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], carry: None) -> tuple[Tensor, None]:
        """Return the cross-entropy over all positions."""
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()), None

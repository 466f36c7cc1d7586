"""Models of `time_to_loss`: a CNN, a byte model, HetSeq's tasks (masked bytes, a translation), and layers that sleep.

The translation is synthetic: numbers of five digits, and the English words for them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from paceline.errors import ConfigurationError
from paceline.planning import Speed
from paceline_lab.bench.layer_profile import default_profile
from paceline_lab.bench.timed_model import SleepingOptimizer, TimedLayer, TimedModel
from paceline_lab.experiments.unequal.shares import sleep_in_backward
from paceline_lab.workloads import load_images, load_text
from paceline_lab.workloads.transformer import MaskedWordModel

IGNORED = -100
MASKED_LENGTH, MASK = 16, 0
# fmt: off
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
# fmt: on
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
END = 0
WORDS = ("", *_ONES, *_TENS, "hundred", "thousand")  # the first begins, ends and fills
DIGITS, MOST_WORDS = 5, 9  # "ninety nine thousand nine hundred ninety nine", and its end
# Divides BERT's gradients, so that four hosts on two cores can exchange them. With steps of 0.4 s over 1 Gbit/s that is
# two fifths of a step of communication, as whole gradients over 10 Gbit/s with steps of 1.3 s.
BERT_SCALE = 32


class Convolutions(nn.Module):
    """A small CNN for images of 28 pixels."""

    def __init__(self, side: int, num_classes: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * ((side + 3) // 4) ** 2, 64),
            nn.ReLU(),
            nn.Linear(64, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


class ByteModel(nn.Module):
    """Predicts the next byte with a small GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.recurrent = nn.GRU(16, 48, batch_first=True)
        self.head = nn.Linear(48, 256)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(x))
        output: Tensor = self.head(states).flatten(0, 1)
        return output


class MaskedBytes(nn.Module):
    """A BERT of one narrow layer: logits of each byte of a window, masked ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MaskedWordModel(256, MASKED_LENGTH, width=32, depth=1, num_heads=2)
        for embedding in (self.layers.words, self.layers.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x).flatten(0, 1)
        return output


class Translation(nn.Module):
    """A transformer with an encoder and a decoder, a layer of each; takes digits and, behind them, the words so far."""

    def __init__(self) -> None:
        super().__init__()
        self.digits, self.words = nn.Embedding(10, 32), nn.Embedding(len(WORDS), 32)
        self.positions = nn.Embedding(DIGITS + MOST_WORDS, 32)
        self.layers = nn.Transformer(32, 2, 1, 1, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, len(WORDS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(MOST_WORDS))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, DIGITS + MOST_WORDS) to logits (B * MOST_WORDS, words)."""
        source = self.digits(x[:, :DIGITS]) + self.positions.weight[:DIGITS]
        target = self.words(x[:, DIGITS:]) + self.positions.weight[DIGITS:]
        output: Tensor = self.head(self.layers(source, target, tgt_mask=self.mask)).flatten(0, 1)
        return output


def count(batch: Sequence[Tensor]) -> int:
    """Return the number of tokens or images over which the batch's mean loss is taken."""
    return int((batch[1] != IGNORED).sum())


class Paced(nn.Module):
    """A network whose forward and backward take the time that this rank's speed gives; without a speed, its own time.

    Forward sleeps for the rest of its third. Backward sleeps twice as long as forward did, since it computes about
    twice as long.
    """

    def __init__(self, network: nn.Module, speed: Speed | None) -> None:
        super().__init__()
        self.network, self.speed = network, speed

    def forward(self, x: Tensor) -> Tensor:
        began_s = time.perf_counter()
        output: Tensor = self.network(x)
        if self.speed is None:
            return output
        left_s = max(0.0, self.speed.step_s(len(x)) / 3 - (time.perf_counter() - began_s))
        time.sleep(left_s)
        slowed: Tensor = sleep_in_backward(output, 2 * left_s)
        return slowed


class BertShaped(nn.Module):
    """A part of BERT-base's gradients; its layers sleep, in its proportions, as long as this rank's speed says."""

    def __init__(self, speed: Speed) -> None:
        super().__init__()
        profile = default_profile("bert").taking(1.0)
        self.speed: Speed | None = speed
        self.layers = TimedModel(profile, dist.get_rank(), BERT_SCALE)
        self._parts = [(layer.forward_s, layer.backward_s) for layer in profile.layers]

    def forward(self, x: Tensor) -> Tensor:
        assert self.speed is not None
        seconds = self.speed.step_s(len(x))
        for layer, (forward_s, backward_s) in zip(self.layers, self._parts, strict=True):
            assert isinstance(layer, TimedLayer)
            layer.forward_s, layer.backward_s = forward_s * seconds, backward_s * seconds
        output: Tensor = self.layers(x.sum())
        return output


@dataclass(frozen=True)
class Task:
    """The task of one rank.

    Attributes:
        data: All samples.
        network: Network with the same parameters on every rank, and this rank's `speed`.
        rate: Rate of Adam; None: an optimizer that changes nothing, because the task has nothing to learn.
        sample_size: Sample size of a batch in HetSeq's code, whatever its size: 1, or the length of BERT's sequences.
    """

    data: TensorDataset
    network: Paced | BertShaped
    rate: float | None
    sample_size: float = 1.0

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Return the mean over the tokens or images that `count` counts."""
        if self.rate is None:
            loss: Tensor = model(batch[0])
            return loss
        return functional.cross_entropy(model(batch[0]), batch[1].flatten(), ignore_index=IGNORED)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer for the parameters of `model`."""
        if self.rate is None:
            return SleepingOptimizer(model.parameters(), 0.0)
        return torch.optim.Adam(model.parameters(), lr=self.rate)


def make_task(workload: str, num_samples: int, speed: Speed | None, width: int, seed: int = 0) -> Task:
    """The same on every rank, but for its speed; None: as fast as it computes. `width` is the CNN's."""
    torch.manual_seed(seed)
    if workload == "images":
        images = load_images(max_train=num_samples)
        data = TensorDataset(torch.from_numpy(images.train_images), torch.from_numpy(images.train_labels))
        return Task(data, Paced(Convolutions(images.side, images.num_classes, width), speed), 2e-3)
    if workload == "bert":
        if speed is None:
            raise ConfigurationError("BERT's layers are timed only: leave it out with --compute quota.")
        return Task(TensorDataset(*[torch.zeros(num_samples)] * 2), BertShaped(speed), None)
    if workload == "translation":
        return Task(translations(num_samples), Paced(Translation(), speed), 5e-3)
    content = torch.frombuffer(bytearray(load_text().content), dtype=torch.uint8).long()
    if workload == "masked":
        starts = torch.randint(0, len(content) - MASKED_LENGTH, (num_samples, 1))
        rows = content[starts + torch.arange(MASKED_LENGTH)]
        masked = torch.rand(rows.shape) < 0.25
        inputs, targets = rows.masked_fill(masked, MASK), rows.masked_fill(~masked, IGNORED)
        return Task(TensorDataset(inputs, targets), Paced(MaskedBytes(), speed), 5e-3, float(MASKED_LENGTH))
    lengths = torch.randint(8, 33, (num_samples,))
    starts = torch.randint(0, len(content) - 33, (num_samples,))
    rows = content[starts[:, None] + torch.arange(33)]
    targets = rows[:, 1:].masked_fill(torch.arange(32) >= lengths[:, None], IGNORED)
    return Task(TensorDataset(rows[:, :-1].contiguous(), targets), Paced(ByteModel(), speed), 5e-3)


def translations(num_samples: int) -> TensorDataset:
    """Digits and, behind them, the words before each word; and the words, up to the end of each."""
    numbers = torch.randint(10 ** (DIGITS - 1), 10**DIGITS, (num_samples,))
    inputs = torch.full((num_samples, DIGITS + MOST_WORDS), END)
    targets = torch.full((num_samples, MOST_WORDS), IGNORED)
    for row, number in enumerate(numbers.tolist()):
        words = [WORDS.index(word) for word in words_of(number)]
        inputs[row, :DIGITS] = torch.tensor([int(digit) for digit in str(number)])
        inputs[row, DIGITS + 1 : DIGITS + 1 + len(words)] = torch.tensor(words)
        targets[row, : len(words) + 1] = torch.tensor([*words, END])
    return TensorDataset(inputs, targets)


def words_of(number: int) -> list[str]:
    """Return the words of a number from 0 to 99,999: "twelve thousand three hundred forty five"."""
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = words_of(number % size) if number % size else []
            return [*words_of(number // size), name, *rest]
    if number < len(_ONES):
        return [_ONES[number]]
    return [_TENS[number // 10 - 2], *([_ONES[number % 10]] if number % 10 else [])]

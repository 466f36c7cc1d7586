"""Real images, small enough for seconds of training: the UCI digits, which Paceline ships."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Images:
    """Square grey images, shape (N, 1, side, side): the training set is standardized. Labels from 0."""

    name: str
    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]

    @property
    def side(self) -> int:
        return int(self.train_images.shape[-1])

    @property
    def num_classes(self) -> int:
        return int(self.train_labels.max()) + 1

    @classmethod
    def standardized(cls, name: str, images: Any, labels: Any, test_images: Any, test_labels: Any) -> Images:
        """Return images of shape (N, side, side), less the training set's mean, divided by its deviation."""
        mean, deviation = float(images.mean()), float(images.std()) or 1.0
        pixels = [((each[:, None] - mean) / deviation).astype(np.float32) for each in (images, test_images)]
        return cls(name, pixels[0], labels.astype(np.int64), pixels[1], test_labels.astype(np.int64))


def load_digits() -> Images:
    """Return the digits, of which a fifth are the test set."""
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        images, labels = stored["images"].astype(np.float64), stored["labels"]
    # The file is sorted by writer; a test set of unseen writers would be another experiment.
    test, train = np.split(np.random.default_rng(0).permutation(len(labels)), [len(labels) // 5])
    return Images.standardized("digits", images[train], labels[train], images[test], labels[test])

"""Real images, small enough for seconds of training: the digits that Paceline ships, or MNIST's four files."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigurationError

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")


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


def load_images(choice: str, max_train: int = 5_000, max_test: int = 1_000) -> Images:
    """Load `digits`, `fashion-mnist`, or images of a folder with MNIST's files. Raises ConfigurationError."""
    if choice == "digits":
        with np.load(Path(__file__).with_name("digits.npz")) as stored:
            images, labels = stored["images"].astype(np.float64), stored["labels"]
        # The file is sorted by writer; a test set of unseen writers would be another experiment.
        test, train = np.split(np.random.default_rng(0).permutation(len(labels)), [len(labels) // 5])
        return _scaled("digits", images[train], labels[train], images[test], labels[test])
    is_known = choice == "fashion-mnist"
    folder = FASHION_MNIST_FOLDER if is_known else Path(choice)
    if not folder.is_dir():
        raise ConfigurationError(
            f"Fashion-MNIST is not installed: there is no {folder}. On Debian or Ubuntu: apt-get install "
            "dataset-fashion-mnist (31 MB). Or use the embedded data: --data digits."
            if is_known
            else f"--data {choice} is neither digits, fashion-mnist nor a folder with MNIST's four files."
        )
    (images, labels), (test_images, test_labels) = (_split(folder, split) for split in ("train", "t10k"))
    name = "Fashion-MNIST" if is_known else folder.name
    shown = name if len(labels) <= max_train else f"{name} (the first {max_train:,} of {len(labels):,})"
    parts = images[:max_train], labels[:max_train], test_images[:max_test], test_labels[:max_test]
    return _scaled(shown, *parts)


def _split(folder: Path, split: str) -> tuple[NDArray[Any], NDArray[Any]]:
    images, labels = _read_idx(folder, f"{split}-images", 3), _read_idx(folder, f"{split}-labels", 1)
    if len(images) != len(labels) or not len(labels) or images.shape[1] != images.shape[2]:
        raise ConfigurationError(
            f"{folder} has {len(images)} {split} images of {images.shape[1]} x {images.shape[2]} pixels and "
            f"{len(labels)} {split} labels. The demo needs square images and as many labels."
        )
    return images, labels


def _read_idx(folder: Path, name: str, num_dimensions: int) -> NDArray[Any]:
    """Read one file in MNIST's IDX format: a magic number, the sizes, then bytes."""
    stem, header = f"{name}-idx{num_dimensions}-ubyte", 4 + 4 * num_dimensions
    path = next((path for path in (folder / f"{stem}.gz", folder / stem) if path.is_file()), folder / stem)
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{folder} has no {stem}.gz and no {stem}, which is one of MNIST's four."
        ) from error
    except (OSError, EOFError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}). Fetch the file again.") from error
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4)]
    magic = bytes([0, 0, 8, num_dimensions])
    if content[:4] != magic or len(content) != header + int(np.prod(sizes)):
        raise ConfigurationError(
            f"{path} is not an IDX file of {num_dimensions} dimensions. Fetch the file again."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def _scaled(name: str, images: Any, labels: Any, test_images: Any, test_labels: Any) -> Images:
    mean, deviation = float(images.mean()), float(images.std()) or 1.0
    pixels = [((each[:, None] - mean) / deviation).astype(np.float32) for each in (images, test_images)]
    return Images(name, pixels[0], labels.astype(np.int64), pixels[1], test_labels.astype(np.int64))

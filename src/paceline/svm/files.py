"""Training data from files: LIBSVM's sparse format, and CSV. A mistake in a file is named with its line."""

from __future__ import annotations

import contextlib
import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.datasets import load_svmlight_file

from paceline.errors import ConfigurationError


@dataclass(frozen=True)
class Table:
    """Rows and targets of a file.

    Attributes:
        X: Shape (N, D), dense from CSV, CSR from LIBSVM's format.
        y: Targets, shape (N,): numbers, or words if not all are numbers.
    """

    X: Any
    y: NDArray[Any]


def read_table(path: Path, num_features: int | None = None) -> Table:
    """Read a file; `.csv` is CSV with the target in the last column, anything else is LIBSVM's format.

    Args:
        path: The file.
        num_features: Columns to make room for in LIBSVM's format, whose rows end at their last non-zero.

    Raises:
        ConfigurationError: It is not there, or is not in that format; names the line.
    """
    if not path.is_file():
        raise ConfigurationError(
            f"there is no file {path}. Check the path; LIBSVM's format and CSV can be read."
        )
    table = _read_csv(path) if path.suffix.lower() == ".csv" else _read_libsvm(path, num_features)
    if table.X.shape[0] == 0:
        raise ConfigurationError(f"{path} has no rows.")
    return table


def _read_libsvm(path: Path, num_features: int | None) -> Table:
    try:
        X, y = load_svmlight_file(str(path), n_features=num_features, zero_based=False)
    except (ValueError, OverflowError, UnicodeDecodeError) as error:
        raise _first_mistake(path, num_features, error) from error
    return Table(sp.csr_matrix(X), y)


def _first_mistake(path: Path, num_features: int | None, error: Exception) -> ConfigurationError:
    """Read slowly, to say in which line it is."""
    lines = path.read_bytes().decode(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        last = 0
        for at, word in enumerate(words):
            try:
                index, _, value = word.rpartition(":") if at else ("1", ":", word)
                float(value)
                position = int(index)
            except ValueError:
                return _wrong(path, number, f"{word!r} is not {'index:value' if at else 'a number'}")
            if at and position <= last:
                return _wrong(path, number, f"index {position} after {last}; indices start at 1 and grow")
            if at and num_features is not None and position > num_features:
                return _wrong(path, number, f"index {position}, but the model has {num_features} features")
            last = position if at else 0
    return ConfigurationError(f"{path} cannot be read as LIBSVM's format: {error}")


def _read_csv(path: Path) -> Table:
    rows: list[list[float]] = []
    targets: list[str] = []
    width = 0
    with path.open(newline="", encoding="utf-8", errors="replace") as stream:
        reader = csv.reader(stream)
        for cells in reader:
            if not cells:
                continue
            try:
                row = [float(cell) for cell in cells[:-1]]
            except ValueError as error:
                if not rows and reader.line_num == 1:
                    width = len(cells)  # the first line holds the columns' names
                    continue
                raise _wrong(path, reader.line_num, f"{str(error).split(': ')[-1]} is not a number") from None
            width = width or len(cells)
            if len(cells) != width or width < 2:
                raise _wrong(path, reader.line_num, f"{len(cells)} columns, expected {max(width, 2)}")
            rows.append(row)
            targets.append(cells[-1])
    y = np.array(targets)
    with contextlib.suppress(ValueError):
        y = y.astype(np.float64)
    return Table(np.array(rows), y)


def _wrong(path: Path, line: int, what: str) -> ConfigurationError:
    return ConfigurationError(f"{path}, line {line}: {what}. Correct the line, or remove it.")

"""Fashion-MNIST's files are read, or refused with what to do."""

import gzip

import numpy as np
import pytest
from sklearn.datasets import load_digits

from paceline.errors import ConfigurationError
from paceline_lab.workloads import images as workload_images
from paceline_lab.workloads import load_images


def _write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def _idx_folder(folder, *, ending=".gz", num_test=90):
    """The digits as MNIST's four files."""
    folder.mkdir(parents=True, exist_ok=True)
    bunch = load_digits()
    for split, part in (("t10k", slice(num_test)), ("train", slice(num_test, None))):
        _write_idx(folder / f"{split}-images-idx3-ubyte{ending}", bunch.images[part] * 15)
        _write_idx(folder / f"{split}-labels-idx1-ubyte{ending}", bunch.target[part])
    return folder


def test_absent_fashion_mnist_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(workload_images, "FASHION_MNIST_FOLDER", tmp_path / "absent")
    with pytest.raises(ConfigurationError, match="apt-get install dataset-fashion-mnist"):
        load_images(tmp_path / "absent")
    with pytest.raises(ConfigurationError, match="there is no folder"):
        load_images(tmp_path / "other")


def test_idx_files_are_read_gzipped_or_not(tmp_path):
    zipped, plain = (load_images(_idx_folder(tmp_path / ending, ending=ending)) for ending in (".gz", ""))
    np.testing.assert_array_equal(zipped.train_images, plain.train_images)
    assert zipped.train_images.shape == (1707, 1, 8, 8)
    assert zipped.num_classes == 10
    assert zipped.train_images.mean() == pytest.approx(0, abs=1e-5)
    np.testing.assert_array_equal(plain.test_labels, load_digits().target[:90])
    few = load_images(_idx_folder(tmp_path / "few"), max_train=100, max_test=None)
    assert (few.name, len(few.train_labels), len(few.test_labels)) == (
        "few (the first 100 of 1,707)",
        100,
        90,
    )


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_bytes(b"not gzip"), "cannot be read"),
        (lambda path: path.write_bytes(gzip.compress(b"")), "is not an IDX file"),
        (lambda path: path.write_bytes(path.read_bytes()[:300]), "cannot be read"),
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: _write_idx(path, np.zeros((5, 8, 8))), "5 train images"),
        (lambda path: _write_idx(path, np.zeros((1707, 8, 9))), "needs square images"),
    ],
)
def test_spoilt_files_are_refused(spoil, says, tmp_path):
    folder = _idx_folder(tmp_path / "images")
    spoil(folder / "train-images-idx3-ubyte.gz")
    with pytest.raises(ConfigurationError, match=says):
        load_images(folder)

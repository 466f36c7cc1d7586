"""What NumPy does in place of compiled loops is what the loops do, to the bit, when Python runs them."""

import importlib

import numpy as np
import pytest

from paceline_svm import plain
from paceline_svm.compiled import LANES
from paceline_svm.gaussian import scratch_for
from paceline_svm.kernel_rows import row_store, source_of
from paceline_svm.kernels import Kernel

MODULES = (
    "smo",
    "gaussian",
    "kernels",
    "kernel_rows",
    "row_cache",
    "gradients",
    "sub_problem",
    "working_set",
)


def arguments_of(name):
    """Of a function that has a twin; the same at each call."""
    generator = np.random.default_rng(0)

    def some(*shape):
        return generator.normal(size=shape)

    def closed():
        return generator.choice([0.0, 1e30], size=(2, LANES))

    singles, doubles = np.float32(some(3, 70)), some(3, 70)
    slots, beta = np.array([1, -1, 0]), some(2, 70)
    store = row_store(source_of(Kernel("precomputed", 1.0, 0.0, 3.0), None), 70, np.empty((70, 128)))
    return {
        "extremes": lambda: (some(2, LANES), closed(), -closed(), some(LANES), some(LANES)),
        "follow": lambda: (
            *(some(2, LANES), closed(), -closed(), some(2, LANES), some(2, LANES)),
            *(0.7, some(LANES), some(LANES)),
        ),
        "gains": lambda: (
            *(some(2, LANES), -closed(), some(2, LANES), 1.0 + some(2, LANES) ** 2),
            *(-0.1, 1.2, np.zeros((2, LANES)), np.zeros(LANES)),
        ),
        "least_of": lambda: (some(LANES),),
        "largest_of": lambda: (some(LANES),),
        "values_single": lambda: (
            *(singles[0], np.float32(2.0), singles[1] ** 2, 0.3),
            *(scratch_for(70, np.float32)[0], singles[2]),
        ),
        "values_double": lambda: (
            *(doubles[0], np.float64(2.0), doubles[1] ** 2, 0.3),
            *(scratch_for(70, np.float64)[1], doubles[2]),
        ),
        "gaussian_rows": lambda: (
            *(doubles, (np.full(3, 2.0), doubles[1] ** 2), 0.3, scratch_for(70, np.float64), some(70)),
            *(some(3, 72), slots, 1, some(3), some(72)),
        ),
        "copy_rows": lambda: (doubles, some(3, 72), slots, 1, some(3), some(72)),
        "_dense_products": lambda: (
            *(np.r_[some(3), 0.0, some(3)], some(7, 90), 5, 75),
            *(np.empty(7, np.int64), some(70)),
        ),
        "add_scaled": lambda: (some(75), 0.7, some(70)),
        "add_rows": lambda: (some(8, 75), np.arange(8)[::-1][:7].copy(), some(7), some(70)),
        "fill_from_gram": lambda: (some(100, 100), store._replace(bounds=(3, 40, 60, 93))),
        "_mirror": lambda: (some(70, 70), 33, 68),
        "violations": lambda: (
            *(some(70), some(2, 70), beta, beta - (some(2, 70) > 0), beta + (some(2, 70) > 0)),
            *(some(2, 70) > 1, some(2, 70), some(2, 70)),
        ),
    }[name]()


def outcome(function, arguments, num):
    """What is returned, and the bits of the last `num` arrays afterwards."""
    returned = function(*arguments)
    flat = [one for part in arguments for one in (part if isinstance(part, tuple) else (part,))]
    return returned, [array.tobytes() for array in flat if isinstance(array, np.ndarray)][-num:]


@pytest.mark.parametrize("name", plain._TWINS)
def test_numpy_has_the_bits_of_the_loops(name, monkeypatch):
    """But for scratch."""
    num = {"gaussian_rows": 4, "values_single": 1, "values_double": 1, "_dense_products": 1}.get(name, 99)
    twin, found = (
        plain._TWINS[name],
        [importlib.import_module(f"paceline_svm.{module}") for module in MODULES],
    )
    compiled = next(getattr(module, name) for module in found if hasattr(module, name))
    monkeypatch.setattr(plain, "_TWINS", {})
    loops = plain._plain(compiled.py_func, lambda: False)
    assert outcome(twin, arguments_of(name), num) == outcome(loops, arguments_of(name), num)

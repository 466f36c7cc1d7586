"""Adasum in one process: against ten lines of float64, its algebra, its bound, and numbers at the edge."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.models import generator
from paceline.errors import ConfigurationError
from paceline_adasum import combine
from paceline_adasum.operator import CHUNK_ELEMENTS, SMALL_ELEMENTS, Segments
from paceline_adasum.vector_halving import bounds

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def pair(a, b, p, q):
    d, A, B = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - p / (p + q) * d / A) * a + (1 - q / (p + q) * d / B) * b


def tree(g):
    """The reference: float64, one tensor, no care for zeros or extremes."""
    if len(g) == 1:
        return g[0]
    half = (len(g) + 1) // 2
    return pair(tree(g[:half]), tree(g[half:]), half, len(g) - half)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=generator("adasum", seed, *shape), dtype=torch.float64).to(dtype)


def off(result, expected, scale=1.0):
    return float((result.double() - expected.double()).norm() / scale)


SHAPES = [(3, 4), (5,), (2,), (0, 2), (CHUNK_ELEMENTS,), (7,), (3, CHUNK_ELEMENTS // 2 + 1), (200,), ()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_inputs", "dtype"),
    [
        *((num_inputs, torch.float64) for num_inputs in (1, 2, 3, 4, 5, 7, 8)),
        *itertools.product((3,), (torch.float32, torch.float16, torch.bfloat16)),
    ],
    ids=str,
)
def test_any_number_of_inputs_equals_the_reference(num_inputs, dtype):
    """Tensor by tensor, whatever its size and its neighbours in the flat vector."""
    inputs = [
        [randn(*shape, seed=(rank, i), dtype=dtype) for i, shape in enumerate(SHAPES)]
        for rank in range(num_inputs)
    ]
    before = [[tensor.clone() for tensor in tensors] for tensors in inputs]
    results = combine(inputs)
    for index, result in enumerate(results):
        mine = [tensors[index].double() for tensors in inputs]
        if result.numel():
            scale = max(tensor.norm() for tensor in mine)
            assert off(result, tree(mine), scale) < TOLERANCE[dtype] * num_inputs**0.5
        assert result.dtype == dtype
        assert result.shape == SHAPES[index]
    assert all(
        torch.equal(a, b) for a, b in zip(itertools.chain(*inputs), itertools.chain(*before), strict=True)
    )


@pytest.mark.parametrize("num_inputs", range(1, 18))
def test_orthogonal_inputs_are_added(num_inputs):
    basis = torch.linalg.qr(randn(20, 20)).Q
    inputs = [basis[i] * (i + 1) for i in range(num_inputs)]
    (result,) = combine([[tensor] for tensor in inputs])
    assert off(result, sum(inputs)) < 1e-12


@pytest.mark.parametrize("num_inputs", range(1, 18))
def test_parallel_inputs_are_averaged(num_inputs):
    """Multiples of one vector: their mean over the inputs, for any number of them; equal ones: the same."""
    v = randn(9)
    factors = torch.arange(1.0, num_inputs + 1)
    (result,) = combine([[c * v] for c in factors])
    assert off(result, factors.mean() * v) < 1e-13 * num_inputs
    (same,) = combine([[v]] * num_inputs)
    assert off(same, v) < 1e-13


@pytest.mark.parametrize("c", [-3.0, -0.5, 1e-20, 0.25, 3.0, 1e20])
def test_two_parallel_vectors(c):
    """(1 + c) / 2 v, also for opposite directions."""
    v = randn(9)
    assert off(combine([[v], [c * v]])[0], (1 + c) / 2 * v, max(1.0, abs(c))) < 1e-14


def test_zeros_are_not_there():
    v = randn(6)
    zero = torch.zeros_like(v)
    assert torch.equal(combine([[v], [zero]])[0], v)
    assert torch.equal(combine([[zero], [v]])[0], v)
    assert torch.equal(combine([[zero], [zero], [zero]])[0], zero)
    assert torch.equal(combine([[v], [-v]])[0], zero)
    # Of the tensors of an input, each by itself.
    assert torch.equal(combine([[v, zero], [zero, 2 * v]])[1], 2 * v)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 9), st.sampled_from([1e-300, 1e-160, 1e160, 1e300]), st.integers(0, 99))
def test_scaling_all_inputs_scales_the_result(num_inputs, scale, seed):
    inputs = [[randn(5, seed=(seed, rank)) / 8] for rank in range(num_inputs)]
    (plain,) = combine(inputs)
    (scaled,) = combine([[tensor * scale] for (tensor,) in inputs])
    assert off(scaled / scale, plain) < 1e-12


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_finite_inputs_of_any_size_never_give_nan(dtype):
    """The largest and the smallest number of the type, beside and against each other."""
    limits = torch.finfo(dtype)
    edges = [0.0, limits.smallest_normal * limits.eps, limits.smallest_normal, 1.0, limits.max / 4]
    vectors = [
        torch.tensor([x, -y, z], dtype=torch.float64).to(dtype)
        for x, y, z in itertools.product(edges, repeat=3)
    ]
    a, b = zip(*itertools.product(vectors, vectors), strict=True)
    results = combine([a, b])
    assert bool(torch.cat(results).isfinite().all())


def test_what_is_not_finite_shows():
    """An overflow on one rank must be seen on all, so that the step can be skipped."""
    v = randn(4, dtype=torch.float32)
    for bad in (torch.inf, -torch.inf, torch.nan):
        broken = v.clone()
        broken[2] = bad
        assert not bool(combine([[v], [v], [broken]])[0].isfinite().all())


def test_swapping_within_a_pair_changes_no_bit():
    """Two inputs of a pair, or two sides of equally many; across pairs it does change the result."""
    for dtype in TOLERANCE:
        a, b, c, d = (
            [randn(50, seed=s, dtype=dtype), randn(CHUNK_ELEMENTS + 3, seed=s, dtype=dtype)] for s in range(4)
        )
        first = combine([a, b, c, d])
        for same in ([b, a, c, d], [a, b, d, c], [c, d, a, b], [d, c, b, a]):
            assert all(map(torch.equal, combine(same), first))
        assert not any(map(torch.equal, combine([a, c, b, d]), first))


def test_no_tensor_depends_on_another():
    inputs = [[randn(30, seed=(rank, 0)), randn(4, seed=(rank, 1))] for rank in range(5)]
    whole = combine(inputs)
    for index in range(2):
        alone = combine([[tensors[index]] for tensors in inputs])[0]
        torch.testing.assert_close(
            alone, whole[index], rtol=1e-13, atol=1e-13
        )  # sums may be in another order


def test_complex_tensors_are_real_vectors():
    inputs = [torch.complex(randn(6, seed=(rank, 0)), randn(6, seed=(rank, 1))) for rank in range(3)]
    (result,) = combine([[tensor] for tensor in inputs])
    expected = tree([torch.view_as_real(tensor) for tensor in inputs])
    assert off(torch.view_as_real(result), expected) < 1e-13


@pytest.mark.parametrize("kind", ["gaussian", "few directions", "heavy tails"])
@pytest.mark.parametrize(("num_left", "num_right"), [(1, 1), (2, 1)])
def test_the_bound_on_the_expectation(kind, num_left, num_right):
    """E Adasum(g1, g2) = (2 - A) E g: within an angle of .108 pi of E g and 1 to 2 times as long (5a of the sheet).

    Holds for the weighted pair as well: the weights sum to 1.
    """
    mean = randn(6, seed=kind) * 0.3
    noise = randn(40_000, 6, seed=(kind, 1))
    if kind == "few directions":
        noise = noise * torch.tensor([3.0, 1.0, 0.1, 0.0, 0.0, 0.0], dtype=torch.float64)
    if kind == "heavy tails":
        noise = noise**3
    g = mean + noise
    a, b = g.chunk(2)
    dots = (a * b).sum(1, keepdim=True)
    share = num_left / (num_left + num_right)
    y = (1 - share * dots / a.square().sum(1, keepdim=True)) * a
    y = (y + (1 - (1 - share) * dots / b.square().sum(1, keepdim=True)) * b).mean(0)
    outer = torch.einsum("ni,nj->ij", g / g.norm(dim=1, keepdim=True), g / g.norm(dim=1, keepdim=True)) / len(
        g
    )
    expected = (2 * torch.eye(6, dtype=torch.float64) - outer) @ g.mean(0)
    ratio = expected.norm() / g.mean(0).norm()
    assert 1.0 <= ratio <= 2.0
    assert torch.cosine_similarity(expected, g.mean(0), dim=0) >= 0.9428
    assert off(y, expected, expected.norm()) < 0.15


def test_bounds_are_those_of_the_tree():
    assert bounds(7, 4) == (0, 2, 4, 6, 7)
    assert bounds(6, 4) == (0, 2, 3, 5, 6)
    assert bounds(5, 1) == (0, 5)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.sampled_from(
            [0, 1, 3, 100, SMALL_ELEMENTS - 1, SMALL_ELEMENTS, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS + 1]
        ),
        max_size=8,
    ),
    st.data(),
)
def test_chunks_hold_every_element_once(sizes, data):
    """Also of a part of the vector, and each with the tensor that it belongs to."""
    segments = Segments(tuple(sizes))
    first = data.draw(st.integers(0, segments.num_elements))
    last = data.draw(st.integers(first, segments.num_elements))
    owner = [tensor for tensor, size in enumerate(sizes) for _ in range(size)]
    seen = []
    for chunk in segments.chunks(first, last):
        lengths = [chunk.last - chunk.first] if chunk.lengths is None else chunk.lengths.tolist()
        assert chunk.last - chunk.first <= CHUNK_ELEMENTS
        assert len(lengths) == len(chunk.tensors)
        assert owner[chunk.first : chunk.last] == [
            t for t, n in zip(chunk.tensors, lengths, strict=True) for _ in range(n)
        ]
        seen += range(chunk.first, chunk.last)
    assert seen == list(range(first, last))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "Adasum of no input"),
        ([[torch.ones(2)], []], "input 1 has 0 tensors"),
        ([[torch.ones(2)], [torch.ones(3)]], "tensor 0 of input 1 has shape"),
        ([[torch.ones(2)], [torch.ones(2).double()]], "must be alike"),
        ([[torch.ones(2).long()]], "dense floating"),
        ([[torch.ones(2).to_sparse()]], "sparse"),
    ],
)
def test_refused(inputs, words):
    with pytest.raises(ConfigurationError, match=words):
        combine(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_below_the_limit_counts_as_zero(dtype):
    """Of one direction: the mean down to a norm ratio of 2^-100, below it the longer one as it is; in either order."""
    long = torch.tensor([3.0, 0.0, 4.0], dtype=dtype)
    for exponent, factor in ((-98, 0.5), (-99, 0.5), (-101, 1.0), (-110, 1.0)):
        short = long * 2.0**exponent
        for pair in ([[long], [short]], [[short], [long]]):
            assert torch.equal(combine(pair)[0], factor * long)

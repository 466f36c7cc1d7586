"""Every compressor's contract, on one rank: what is sent and what is left are what there was; nothing is hidden."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.models import generator
from paceline.compression import BY_NAME, Bf16, Fp16, Int8, Layout, OneBit, RandomK, Seeds, TopK
from paceline.compression.sparsification import STRIDE
from paceline.errors import ConfigurationError

COMPRESSORS = {
    **{name: kind() for name, kind in BY_NAME.items()},
    "int8 to nearest": Int8(stochastic=False),
    "topk of a half": TopK(0.5),
    "randomk of all": RandomK(1.0),
}
EXACT = sorted(set(COMPRESSORS) - {"int8", "onebit"})
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
every_compressor = pytest.mark.parametrize("name", sorted(COMPRESSORS))


@st.composite
def buckets(draw, dtypes=DTYPES):
    """Gradients of some parameters, of very different magnitudes, with zeros among them; and their layout."""
    sizes = draw(
        st.lists(st.sampled_from([0, 1, 2, 7, 16, 255, 256, 257, 512, 1000]), min_size=1, max_size=5)
    )
    dtype = draw(st.sampled_from(dtypes))
    source = generator(draw(st.integers(0, 10**6)))
    tensors = []
    for size in sizes:
        exponent = draw(st.sampled_from([0, -3, 3] if dtype == torch.float16 else [0, -12, 12]))
        values = torch.randn(size, generator=source) * 2.0**exponent
        values *= torch.rand(size, generator=source) > draw(st.sampled_from([0.0, 0.5, 1.0]))
        tensors.append(values.to(dtype))
    return torch.cat(tensors), Layout.of(*tensors), Seeds(draw(st.integers(0, 99)), draw(st.integers(0, 99)))


def said(compressor, flat, layout, seeds):
    return compressor.decompress(compressor.compress(flat, layout, seeds), layout, seeds.common)


@every_compressor
@settings(max_examples=15, deadline=None)
@given(bucket=buckets())
def test_payload_and_rest_are_the_gradient(name, bucket):
    """Exactly, where a choice or a rounding to nearest can be; else to the last bit of what stands for the number."""
    flat, layout, seeds = bucket
    compressor = COMPRESSORS[name]
    before, state = flat.clone(), torch.get_rng_state()
    payload = compressor.compress(flat, layout, seeds)
    assert payload.nbytes == compressor.payload_bytes(layout)
    assert torch.equal(flat, before)
    decoded = compressor.decompress(payload, layout, seeds.common)
    rest = flat.to(decoded.dtype, copy=True)
    compressor.add_decoded(rest, payload, layout, seeds.common, sign=-1)
    difference = decoded + rest - flat.to(decoded.dtype)
    tolerance = 0.0 if name in EXACT and layout.dtype != torch.float64 else 2.0**-23
    assert (difference.abs() <= tolerance * decoded.abs()).all()
    again = compressor.compress(flat, layout, seeds)
    assert torch.equal(again.view(torch.uint8), payload.view(torch.uint8))
    assert torch.equal(torch.get_rng_state(), state)
    if compressor.additive:
        assert payload.is_floating_point()
    else:
        assert payload.dtype == torch.uint8


@every_compressor
@settings(max_examples=10, deadline=None)
@given(bucket=buckets())
def test_neighbours_do_not_matter(name, bucket):
    """A parameter alone in a bucket is said as it is among others: buckets may be cut anew."""
    flat, layout, seeds = bucket
    whole, start = said(COMPRESSORS[name], flat, layout, seeds), 0
    for size, position in zip(layout.sizes, layout.positions, strict=True):
        alone = Layout((size,), (position,), layout.dtype, layout.device)
        piece = flat[start : start + size]
        assert torch.equal(said(COMPRESSORS[name], piece, alone, seeds), whole[start : start + size])
        start += size


@pytest.mark.slow
@every_compressor
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [3, 700, 100_000])
def test_nothing_is_hidden(name, bad, size):
    """One number that is not finite, anywhere: the decoded bucket is not finite either."""
    for place in (0, size // 2, size - 1):
        flat = torch.randn(size, generator=generator(1))
        flat[place] = bad
        layout = Layout.of(flat[: size // 3], flat[size // 3 :])
        assert not said(COMPRESSORS[name], flat, layout, Seeds(1, 2)).isfinite().all()


@every_compressor
def test_zeros_stay_zeros(name):
    """Nothing comes of nothing."""
    flat = torch.zeros(1000)
    assert not said(COMPRESSORS[name], flat, Layout.of(flat), Seeds(1, 2)).any()


def test_eight_bits_are_unbiased():
    """The mean over many draws is the number, within four standard errors of a rounding, for each of 3000 numbers."""
    flat, num_draws = torch.randn(3000, generator=generator(5)), 400
    layout, total = Layout.of(flat), torch.zeros(3000)
    for draw in range(num_draws):
        total += said(Int8(), flat, layout, Seeds(0, draw))
    level = flat.abs().max() / 127 * (1 + 2**-7)
    error = (total / num_draws - flat) / level
    assert error.abs().max() < 4.5 * 0.5 / math.sqrt(num_draws)
    assert abs(error.mean()) < 4 * 0.5 / math.sqrt(num_draws * 3000)


def test_eight_bits_are_within_a_level():
    """Of the block's own largest magnitude; half a level to nearest. An outlier costs its block only."""
    flat = torch.randn(256 * 8, generator=generator(6))
    flat[3] = 1000.0
    level = flat.view(8, 256).abs().amax(1, keepdim=True) * (1 + 2**-7) / 127
    for compressor, bound in ((Int8(), 1.0), (Int8(stochastic=False), 0.5)):
        error = (said(compressor, flat, Layout.of(flat), Seeds(1, 2)) - flat).view(8, 256)
        assert (error.abs() <= bound * level).all()
        assert level[1] < level[0] / 100


def test_each_element_is_chosen_equally_often():
    """Of 1000 elements, a tenth a step: the counts over many steps are those of fair coins; two parameters differ."""
    tensors, num_steps = [torch.ones(1000), torch.ones(1000)], 2000
    layout, total = Layout.of(*tensors), torch.zeros(2000)
    for step in range(num_steps):
        chosen = said(RandomK(0.1), torch.ones(2000), layout, Seeds(step, 0))
        assert chosen.sum() == 200
        total += chosen
    deviation = (total - num_steps * 0.1) / math.sqrt(num_steps * 0.1 * 0.9)
    assert deviation.abs().max() < 5
    assert not torch.equal(chosen[:1000], chosen[1000:])


@pytest.mark.parametrize("size", [50, 40_000, 200_000])
@pytest.mark.parametrize("kind", ["normal", "columns", "sampled", "equal"])
def test_the_largest_are_chosen(size, kind):
    """Exactly those, also where a sample misleads: large values in one column or the sample only, or all equal."""
    flat = torch.randn(size, generator=generator(7))
    if kind in ("columns", "sampled"):
        flat[:: 100 if kind == "columns" else STRIDE] *= 1000.0
    if kind == "equal":
        flat = flat.sign()
    decoded = said(TopK(0.01), flat, Layout.of(flat), Seeds(1, 2))
    count = math.ceil(0.01 * size)
    expected = flat.abs().sort(descending=True).values[:count].sum()
    assert int((decoded != 0).sum()) == count
    assert torch.allclose(decoded.abs().sum(), expected)
    assert torch.equal(decoded[decoded != 0], flat[decoded != 0])


def test_signs_and_the_mean_magnitude():
    """The closed form, by block."""
    flat = torch.randn(512 + 100, generator=generator(8))
    scales = torch.stack([block.abs().mean() for block in flat.split(512)])
    expected = torch.where(flat >= 0, 1.0, -1.0) * scales.repeat_interleave(512)[:612]
    assert torch.allclose(said(OneBit(), flat, Layout.of(flat), Seeds(1, 2)), expected, rtol=2**-8)


def test_what_half_precision_cannot_hold_is_not_finite():
    """Overflow is for all to see; bfloat16 has the range."""
    flat = torch.tensor([1e5, 1.0])
    assert said(Fp16(), flat, Layout.of(flat), Seeds(1, 2)).isinf().any()
    assert torch.allclose(said(Bf16(), flat, Layout.of(flat), Seeds(1, 2)), flat, rtol=2**-8)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.0001, math.nan])
@pytest.mark.parametrize("kind", [TopK, RandomK])
def test_a_ratio_is_a_share(kind, ratio):
    """Outside (0, 1]: refused, with the number."""
    with pytest.raises(ConfigurationError, match=f"ratio={ratio!r} must be more than 0 and at most 1"):
        kind(ratio)


@every_compressor
def test_dtypes(name):
    """Known ones pass; others are refused by the parameter's name."""
    for dtype in DTYPES:
        if not (name == "fp16" and dtype == torch.bfloat16) and not (
            name == "bf16" and dtype == torch.float16
        ):
            COMPRESSORS[name].check("weight", dtype)
    with pytest.raises(ConfigurationError, match=r"'head\.weight', which is torch\.float8_e5m2"):
        COMPRESSORS[name].check("head.weight", torch.float8_e5m2)


def test_a_cast_that_saves_nothing_is_refused():
    """As many bytes, less precision or range."""
    with pytest.raises(ConfigurationError, match="lose precision or range for nothing"):
        Fp16().check("weight", torch.bfloat16)

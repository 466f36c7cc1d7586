"""The order of pieces: what is sent first, and what it gains."""

import itertools

import pytest
import torch

from harness.models import generator
from paceline.errors import ConfigurationError
from paceline.planning.forward_overlap import (
    PIECE_BYTES,
    PIECE_LATENCY_S,
    MeasuredStep,
    Piece,
    arrivals,
    cut,
    plan,
    predict,
)

NEVER = 1e9


def step_of(ready_s, needed_s, rate):
    return MeasuredStep(tuple(ready_s), tuple(needed_s), max(ready_s), max(needed_s) + 0.1, NEVER, rate)


def test_pieces_cover_their_bucket_and_are_small():
    for num_elements, width in itertools.product(
        (1, 1000, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1, 10**7), (2, 4, 8)
    ):
        pieces = cut([num_elements, 5], [width, 4])
        first = [piece for piece in pieces if piece.bucket == 0]
        assert [piece.start for piece in first[1:]] == [piece.stop for piece in first[:-1]]
        assert (first[0].start, first[-1].stop) == (0, num_elements)
        assert all(piece.num_bytes == (piece.stop - piece.start) * width <= PIECE_BYTES for piece in first)
        sizes = {piece.stop - piece.start for piece in first}
        assert max(sizes) - min(sizes) <= 1
        assert pieces[-1] == Piece(1, 0, 5, 20)


def test_what_forward_needs_first_goes_first_when_it_is_ready():
    """Bucket 2 is at the front of the model: it overtakes the pieces of bucket 0 that have not left yet."""
    pieces = [Piece(0, i, i + 1, 10**6) for i in range(4)] + [Piece(1, 0, 1, 10**6), Piece(2, 0, 1, 10**6)]
    step = step_of([0.0, 2.1, 2.1], [0.3, 0.2, 0.1], rate=1e6)
    assert plan(pieces, step, rate_ratio=1.0) == [0, 1, 2, 5, 4, 3]
    assert plan(pieces, step, rate_ratio=10.0) == [0, 1, 2, 3, 5, 4]
    assert arrivals(pieces, [0, 1, 2, 5, 4, 3], step, 1e6)[2] == pytest.approx(4 + 4 * PIECE_LATENCY_S)


def random_steps():
    for case in range(200):
        source = generator(case)
        num_buckets = int(torch.randint(1, 12, (), generator=source))
        ready_s = torch.rand(num_buckets, generator=source).cumsum(0).tolist()
        needed_s = torch.rand(num_buckets, generator=source).sort(descending=True).values.tolist()
        sizes = torch.randint(1, 3 * 10**6, (num_buckets,), generator=source).tolist()
        yield cut(sizes, [4] * num_buckets), step_of(ready_s, needed_s, 10 ** (6.0 + case % 3))


def test_plans_are_permutations_that_never_lose():
    """On the link that it was planned for, a plan is no longer than waiting at the end of backward."""
    for pieces, step in random_steps():
        order = plan(pieces, step, rate_ratio=1.0)
        assert sorted(order) == list(range(len(pieces)))
        gain = predict(pieces, order, step)
        assert gain.with_s <= gain.without_s + 1e-9
        sending_s = sum(piece.num_bytes for piece in pieces) / step.rate_bytes_per_s
        assert gain.with_s >= max(step.backward_s + step.forward_s, sending_s) - 1e-9


def test_nothing_to_gain_where_backward_hides_it():
    pieces = cut([1000, 1000], [4, 4])
    step = MeasuredStep((0.5, 1.0), (0.2, 0.0), 1.0, 0.5, NEVER, 1e9)
    assert not predict(pieces, plan(pieces, step), step).pays


def test_a_simulation_that_is_slower_than_what_was_measured_is_not_believed():
    pieces = cut([10**6] * 4, [4] * 4)
    times = {
        "ready_s": (0.1, 0.2, 0.3, 0.4),
        "needed_s": (0.3, 0.2, 0.1, 0.0),
        "backward_s": 0.4,
        "forward_s": 0.4,
    }
    for reduced_s, pays in ((5.0, True), (0.41, False)):
        step = MeasuredStep(**times, reduced_s=reduced_s, rate_bytes_per_s=1e7)
        assert predict(pieces, plan(pieces, step), step).pays is pays


def test_measurements_that_cannot_be_are_refused():
    for arguments in (((0.1,), (), 1, 1, 1, 1.0), ((), (), 1, 1, 1, 1.0), ((-0.1,), (0.0,), 1, 1, 1, 1.0)):
        with pytest.raises(ConfigurationError, match="times of need"):
            MeasuredStep(*arguments)
    with pytest.raises(ConfigurationError, match="not a rate"):
        MeasuredStep((0.1,), (0.1,), 1, 1, 1, 0.0)

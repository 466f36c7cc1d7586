"""Predicted step times, by hand; and that the crossover is where two of them are equal."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigurationError
from paceline.planning import (
    AlphaBetaCost,
    BucketLoad,
    ReductionCost,
    Rules,
    StepProfile,
    calibration_slowdown,
    crossover_slowdown,
    decide,
    predict,
)

FREE = AlphaBetaCost(0.0, 0.0)
PROFILE = StepProfile(1.0, (BucketLoad(0.4, 100), BucketLoad(1.0, 100)))


def cost(name, wire, launch=FREE, finish=FREE, closing_s=0.0, link=None):
    return ReductionCost(
        name, launch, wire, finish, FREE, wire.s_per_byte if link is None else link, closing_s
    )


def numbers(line):
    return (line.fixed_s, line.s_per_byte)


def near(fixed_s, s_per_byte):
    return pytest.approx((fixed_s, s_per_byte))


PLAIN = cost("none", AlphaBetaCost(0.1, 0.005))  # 0.6 s a bucket
CODEC = cost(
    "codec", AlphaBetaCost(0.1, 0.0025), AlphaBetaCost(0.05, 0.0), AlphaBetaCost(0.02, 0.0)
)  # 0.35 s


def test_one_wire_behind_backward():
    """0.4 to 1.0, then 1.0 to 1.6: what is left of the second is exposed."""
    assert predict(PROFILE, PLAIN).step_s == pytest.approx(1.6)
    assert predict(PROFILE, PLAIN).exposed_s == pytest.approx(0.6)


def test_coding_delays_what_is_computed_after_it():
    """Launched by 0.45, there at 0.8; the second ready at 1.05, launched by 1.1, there at 1.45, finished at 1.47."""
    assert predict(PROFILE, CODEC).step_s == pytest.approx(1.47)
    assert predict(PROFILE, CODEC).exposed_s == pytest.approx(0.37)


def test_buckets_queue_for_the_wire():
    """Three at once: 0.6 s each, one after the other; finishing overlaps with the next one's way, but for the last."""
    profile = StepProfile(0.0, tuple(BucketLoad(0.0, 100) for _ in range(3)))
    assert predict(
        profile, cost("x", AlphaBetaCost(0.1, 0.005), finish=AlphaBetaCost(0.5, 0.0))
    ).step_s == pytest.approx(2.3)
    assert predict(
        profile, cost("x", AlphaBetaCost(0.1, 0.005), finish=AlphaBetaCost(0.7, 0.0))
    ).step_s == pytest.approx(0.6 + 2.1)
    assert predict(profile, cost("x", AlphaBetaCost(0.1, 0.005), closing_s=0.25)).step_s == pytest.approx(
        2.05
    )


def test_hidden_communication_is_nothing_to_save():
    """A wire that is idle at the end of backward: half the bytes save nothing, coding costs."""
    profile = StepProfile(10.0, (BucketLoad(1.0, 100), BucketLoad(2.0, 100), BucketLoad(10.0, 0)))
    plain = predict(profile, PLAIN).step_s
    assert plain == pytest.approx(10.1)
    assert predict(
        profile, cost("x", AlphaBetaCost(0.1, 0.0025), AlphaBetaCost(0.05, 0.0))
    ).step_s == pytest.approx(10.25)


def test_the_crossover_by_hand():
    """One bucket of 100 bytes: 0.1 + 100 s x = 0.1 + 0.3 + 50 s x at s x = 0.006, twice as slow as s = 0.003."""
    profile = StepProfile(0.0, (BucketLoad(0.0, 100),))
    plain, codec = (
        cost("none", AlphaBetaCost(0.1, 0.003)),
        cost("half", AlphaBetaCost(0.1, 0.0015), AlphaBetaCost(0.3, 0.0)),
    )
    assert crossover_slowdown(profile, plain, codec) == pytest.approx(2.0)
    rules = Rules(0.03, 0.01)
    assert decide(profile, plain, [codec], 2, rules).options[0].crossover_bytes_per_s == pytest.approx(
        1 / 0.006
    )
    assert decide(profile, plain.on_link(1.9), [codec.on_link(1.9)], 2, rules).chosen is None
    assert decide(profile, plain.on_link(4.0), [codec.on_link(4.0)], 2, rules).chosen == "half"


def test_a_slower_link_slows_the_bytes_and_not_the_coding():
    """Of 0.004 s a byte 0.001 are the link's: on one ten times slower it is 0.013."""
    slow = cost("x", AlphaBetaCost(0.1, 0.004), link=0.001).on_link(10)
    assert numbers(slow.wire) == near(0.1, 0.013)
    assert slow.link_s_per_byte == pytest.approx(0.01)


def test_coding_on_busy_processors_delays_gradients():
    """Half of the processors busy: half of the extra processor time is missing to whoever computes."""
    plain = ReductionCost("none", FREE, AlphaBetaCost(0.0, 2e-3), FREE, AlphaBetaCost(0.0, 1e-3), 2e-3)
    measured = (FREE, AlphaBetaCost(0.0, 1.5e-3), FREE, AlphaBetaCost(0.1, 3e-3))
    assert ReductionCost.of_codec("x", plain, measured, 0.5, 0.5, 0.0).launch == FREE
    codec = ReductionCost.of_codec("x", plain, measured, 0.5, 0.5, 0.5)
    assert numbers(codec.launch) == near(0.05, 1e-3)
    assert codec.link_s_per_byte == 1e-3


def test_the_models_bytes_count_and_not_the_probes():
    """A tenth of the model's bytes, though half of the probe's; coding takes no more than its processor time."""
    plain = ReductionCost("none", FREE, AlphaBetaCost(0.0, 2e-3), FREE, AlphaBetaCost(0.0, 1e-3), 2e-3)
    for slope, coding in ((1.1e-3, 0.1e-3), (9e-3, 0.3e-3)):
        measured = (FREE, AlphaBetaCost(0.0, slope), FREE, AlphaBetaCost(0.0, 1.3e-3))
        codec = ReductionCost.of_codec("x", plain, measured, 0.1, 0.5, 0.0)
        assert numbers(codec.wire) == near(0.0, 0.2e-3 + coding)
        assert codec.link_s_per_byte == pytest.approx(0.2e-3)


def test_a_codec_makes_nothing_shorter_but_the_bytes():
    """A launch or a message that seems faster with a codec is noise."""
    plain = ReductionCost(
        "none", AlphaBetaCost(0.2, 1e-4), AlphaBetaCost(0.3, 2e-3), AlphaBetaCost(0.1, 0.0), FREE, 2e-3
    )
    codec = ReductionCost.of_codec("x", plain, (FREE, AlphaBetaCost(0.1, 1e-3), FREE, FREE), 0.5, 0.5, 0.0)
    assert (codec.launch, codec.finish) == (plain.launch, plain.finish)
    assert numbers(codec.wire) == near(0.3, 1e-3)


seconds = st.floats(0, 10)
slopes = st.floats(1e-5, 1e-3)
profiles = st.builds(
    lambda gaps, tail: StepProfile(
        sum(gap for gap, _ in gaps) + tail,
        tuple(
            BucketLoad(sum(gap for gap, _ in gaps[: place + 1]), size) for place, (_, size) in enumerate(gaps)
        ),
    ),
    st.lists(st.tuples(seconds, st.integers(10**3, 10**5)), min_size=1, max_size=6),
    seconds,
)


@settings(max_examples=50, deadline=None)
@given(profiles, seconds, slopes, st.floats(0.05, 0.95), st.floats(0.01, 1.0))
def test_at_the_crossover_both_take_the_same(profile, fixed_s, slope, ratio, launch_s):
    """For any step, and any codec that halves or so what takes a while, and takes a while itself."""
    plain = cost("none", AlphaBetaCost(fixed_s, slope))
    codec = cost("x", AlphaBetaCost(fixed_s, slope * ratio), AlphaBetaCost(launch_s, 0.0))
    slowdown = crossover_slowdown(profile, plain, codec)
    assert 0 < slowdown < math.inf
    there = [predict(profile, each.on_link(slowdown)).step_s for each in (plain, codec)]
    assert there[0] == pytest.approx(there[1], rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(profiles, seconds, slopes, st.floats(1.0, 100.0))
def test_a_slower_link_never_makes_a_step_shorter(profile, fixed_s, slope, slowdown):
    """And no step is shorter than its computing."""
    plain = cost("none", AlphaBetaCost(fixed_s, slope))
    fast, slow = predict(profile, plain), predict(profile, plain.on_link(slowdown))
    assert profile.backward_end_s <= fast.step_s <= slow.step_s


@pytest.mark.parametrize(
    ("small", "large", "line"),
    [
        ((10, 1.1), (100, 2.0), AlphaBetaCost(1.0, 0.01)),
        ((10, 0.01), (100, 1.0), AlphaBetaCost(0.0, 0.01)),  # a fixed time below 0
        ((10, 3.0), (100, 2.0), AlphaBetaCost(2.5, 0.0)),  # more bytes in less time
        ((100, 1.0), (100, 1.0), AlphaBetaCost(0.0, 0.01)),  # one measurement
    ],
)
def test_a_line_through_two_measurements(small, large, line):
    assert numbers(AlphaBetaCost.through(small, large)) == near(*numbers(line))


def test_a_steps_own_time_corrects_the_link():
    """One bucket of 100 bytes, 0.1 + 0.3 s, behind 0.2 s: 0.9 s tells a link of half the rate."""
    profile = StepProfile(0.2, (BucketLoad(0.2, 100),))
    plain, codec = cost("none", AlphaBetaCost(0.1, 0.003)), cost("half", AlphaBetaCost(0.1, 0.0015))
    assert calibration_slowdown(profile, plain, 0.6) == 1.0
    assert calibration_slowdown(profile, plain, 0.65) == 1.0
    assert calibration_slowdown(profile, plain, 0.9) == pytest.approx(2.0)
    assert calibration_slowdown(profile, plain, 0.45) == pytest.approx(0.5)
    assert calibration_slowdown(profile, plain, 9.0) == 4.0
    assert calibration_slowdown(profile, plain, 0.1) == 0.25
    decision = decide(profile, plain, [codec], 2, Rules(0.03, 0.01), step_s=0.9)
    assert (decision.plain_s, decision.step_s) == pytest.approx((0.9, 0.6))
    assert decision.link_bytes_per_s == pytest.approx(1 / 0.006)
    decision = decide(profile, plain, [codec], 2, Rules(0.03, 0.01), step_s=0.6, in_use="half")
    assert (decision.plain_s, decision.step_s) == pytest.approx((0.9, 0.6))


def options(*saved, in_use=None, barred=()):
    """What is chosen of codecs that save these shares of a step of one bucket of 100 bytes, 1 s on the wire."""
    profile = StepProfile(0.0, (BucketLoad(0.0, 100),))
    codecs = [cost(str(share), AlphaBetaCost(0.0, (1 - share) / 100)) for share in saved]
    return decide(
        profile,
        cost("none", AlphaBetaCost(0.0, 0.01)),
        codecs,
        4,
        Rules(0.03, 0.01),
        in_use=in_use,
        barred=barred,
    )


def test_the_rules():
    """On above 3 %, off below 1 %, another one only for 3 % more, and never one that is barred."""
    assert options(0.029).chosen is None
    assert options(0.031).chosen == "0.031"
    assert options(0.011, in_use="0.011").chosen == "0.011"
    assert options(0.009, in_use="0.009").chosen is None
    assert options(0.2, 0.4).chosen == "0.4"
    assert options(0.2, 0.22, in_use="0.2").chosen == "0.2"
    assert options(0.2, 0.24, in_use="0.2").chosen == "0.24"
    assert options(0.2, 0.24, barred=["0.24"]).chosen == "0.2"
    assert options(0.24, in_use="0.24", barred=["0.24"]).chosen is None
    assert options().chosen is None


def test_the_words():
    """The decision, the step with and without, the link, and the crossover rate."""
    words = options(0.4).words()
    assert words.startswith("0.4: predicted step 600 ms instead of 1 s (40.0% shorter).")
    assert "(link: 1.2 kbit/s, latency" in words
    slow = decide(PROFILE, PLAIN, [CODEC], 2, Rules(0.1, 0.0)).words()
    assert slow.startswith("none: predicted step 1.6 s; codec would make it 1.47 s (8.1% shorter).")
    assert "codec helps" in slow
    assert "no codec to choose from" in options().words()
    free = decide(
        PROFILE,
        cost("none", AlphaBetaCost(0.1, 0.0)),
        [cost("x", AlphaBetaCost(0.1, 0.0))],
        2,
        Rules(0.1, 0.0),
    )
    assert free.options[0].crossover_bytes_per_s is None
    assert free.words().endswith(
        "(link: no measurable limit, latency 100 ms). Below which rate x helps is not known."
    )
    for codec, words in (
        (cost("x", AlphaBetaCost(0.1, 0.005), AlphaBetaCost(1.0, 0.0)), "x helps at no rate"),
        (cost("x", AlphaBetaCost(0.05, 0.005)), "x helps at any rate"),
    ):
        assert words in decide(PROFILE, PLAIN, [codec], 2, Rules(0.5, 0.0)).words()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: AlphaBetaCost(-1.0, 0.0),
        lambda: AlphaBetaCost(0.0, math.inf),
        lambda: Rules(0.01, 0.03),
        lambda: Rules(1.0, 0.0),
        lambda: cost("x", AlphaBetaCost(0.0, 1.0), link=2.0),
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ConfigurationError):
        wrong()

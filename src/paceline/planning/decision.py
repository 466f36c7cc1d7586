"""Decides which codec shortens a predicted step enough, and says so in a sentence."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigurationError
from paceline.numbers_given import number
from paceline.planning.step_time import (
    ReductionCost,
    StepProfile,
    calibration_slowdown,
    crossover_slowdown,
    predict,
)
from paceline.quantities import ms, show_rate

_WORTH_SAYING = 0.05  # of a step: what a codec that is not among the candidates has to save to be named


@dataclass(frozen=True)
class Rules:
    """The savings at which a codec is turned on, and off again.

    Attributes:
        on_ratio: The fraction of a step's duration that it must save, by prediction, to be turned on.
        off_ratio: The fraction that it must save, by prediction and by measurement, to stay on; smaller, so that noise
            does not turn it on and off.
    """

    on_ratio: float
    off_ratio: float

    def __post_init__(self) -> None:
        if not 0 <= number(self.off_ratio) <= number(self.on_ratio) < 1:
            raise ConfigurationError(
                f"on_ratio={self.on_ratio!r} must be at least off_ratio={self.off_ratio!r}; both must be in [0, 1)."
            )


@dataclass(frozen=True)
class Option:
    """The prediction for one codec."""

    name: str  # of the codec
    step_s: float  # the predicted duration of a step, in seconds
    # The fraction of the predicted step without it that it saves; negative where it costs time.
    saved_ratio: float
    # The link rate below which steps are shorter with it; 0: at no rate; infinity: at every rate; None: not known,
    # because the link's own rate could not be measured.
    crossover_bytes_per_s: float | None


@dataclass(frozen=True)
class Decision:
    """A decision, and the predictions that it rests on.

    Attributes:
        chosen: The name of a codec; None: no compression.
        plain_s: The predicted duration of a step without a codec, in seconds.
        plain_exposed_s: Of that, the communication that backward does not hide.
        options: The predictions for all codecs, the shortest step first.
        link_bytes_per_s: The rate at which a rank sends during an uncompressed all-reduce.
        latency_s: The fixed time of an all-reduce.
        runner_up: The codec to try besides: the best other one that is predicted to save enough; or None.
        computed_s: The time at which backward ends in a step.
        further: Predictions for codecs that are not among the candidates, as if coding took no time.
    """

    chosen: str | None
    plain_s: float
    plain_exposed_s: float
    options: tuple[Option, ...]
    link_bytes_per_s: float
    latency_s: float
    runner_up: str | None = None
    computed_s: float = 0.0
    further: tuple[Option, ...] = ()

    @property
    def step_s(self) -> float:
        """The predicted duration of a step with what was chosen, in seconds."""
        return next((option.step_s for option in self.options if option.name == self.chosen), self.plain_s)

    def words(self) -> str:
        """The decision as a sentence, another on the link, and where the codec would help."""
        exposed = (
            f"Without compression, {ms(self.plain_exposed_s)} of communication are not hidden "
            f"(link: {_link_words(self.link_bytes_per_s)}, latency {ms(self.latency_s)})."
        )
        if not self.options:
            return f"no codec to choose from. A step takes {ms(self.plain_s)}. {exposed}"
        chosen = next((option for option in self.options if option.name == self.chosen), None)
        option = chosen or self.options[0]
        change = f"{abs(option.saved_ratio):.1%} {'shorter' if option.saved_ratio >= 0 else 'longer'}"
        if chosen is not None:
            first = (
                f"{option.name}: predicted step {ms(option.step_s)} instead of {ms(self.plain_s)} ({change})"
            )
        else:
            would = f"{option.name} would make it {ms(option.step_s)} ({change})"
            first = f"none: predicted step {ms(self.plain_s)}; {would}"
        return f"{first}. {exposed} {_crossover_words(option)}."

    def words_on_the_rest(self, step_s: float) -> str:
        """Return the exposed part of a step of `step_s`, and what would save more; empty if nothing would."""
        better = [option for option in self.further if 1 - option.step_s / step_s > _WORTH_SAYING]
        if not better:
            return ""
        named = ", ".join(
            f"{option.name} would save up to {ms(step_s - option.step_s)} of them" for option in better
        )
        return (
            f"{ms(max(step_s - self.computed_s, 0.0))} of communication are still exposed; {named}. That loses more of "
            f'the gradients, so ask for it: compression="{better[0].name}", or name it in Auto(candidates=...).'
        )


def decide(
    profile: StepProfile,
    plain: ReductionCost,
    codecs: Sequence[ReductionCost],
    num_ranks: int,
    rules: Rules,
    *,
    in_use: str | None = None,
    barred: Collection[str] = (),
    step_s: float | None = None,
    further: Sequence[ReductionCost] = (),
) -> Decision:
    """Choose the codec with the shortest predicted step, if it saves enough.

    Args:
        profile: The step without its communication.
        plain: The cost of the uncompressed mean.
        codecs: The costs of the candidates.
        num_ranks: The group's.
        rules: How much is enough.
        in_use: The codec that is on now. It stays on for less than would turn it on. It is replaced only by one that
            saves `rules.on_ratio` more.
        barred: Codecs that are not chosen, whatever is predicted for them.
        step_s: The measured duration of recent steps with what is in use, in seconds: corrects the link's rate.
        further: The costs of codecs that are predicted, but not chosen from.

    Contract:
        Local. The same arguments give the same decision on every rank.
    """
    if step_s is not None:
        used = next((codec for codec in codecs if codec.name == in_use), plain)
        slowdown = calibration_slowdown(profile, used, step_s)
        plain, codecs = plain.on_link(slowdown), [codec.on_link(slowdown) for codec in codecs]
        further = [codec.on_link(slowdown) for codec in further]
    without = predict(profile, plain)
    sent_ratio = 2 * (num_ranks - 1) / num_ranks  # of a message, by each rank of a ring
    rate = sent_ratio / plain.link_s_per_byte if plain.link_s_per_byte else math.inf
    options = [_option(profile, plain, codec, rate) for codec in (*codecs, *further)]
    options.sort(key=lambda option: option.step_s)
    candidates = tuple(option for option in options if option.name in {codec.name for codec in codecs})
    allowed = [option for option in candidates if option.name not in barred]
    chosen = _choose(allowed, rules, in_use)
    others = [
        option.name
        for option in allowed
        if option.name not in (chosen, in_use) and option.saved_ratio > rules.on_ratio
    ]
    return Decision(
        chosen,
        without.step_s,
        without.exposed_s,
        candidates,
        rate,
        plain.wire.fixed_s,
        others[0] if others else None,
        profile.backward_end_s,
        tuple(option for option in options if option not in candidates),
    )


def _option(profile: StepProfile, plain: ReductionCost, codec: ReductionCost, rate: float) -> Option:
    """The prediction for a codec, on a link of this rate, at which `plain` takes what it takes."""
    step_s, slowdown = predict(profile, codec).step_s, crossover_slowdown(profile, plain, codec)
    crossover = None if rate == math.inf else math.inf if slowdown == 0 else rate / slowdown
    return Option(codec.name, step_s, 1 - step_s / predict(profile, plain).step_s, crossover)


def _choose(options: Sequence[Option], rules: Rules, in_use: str | None) -> str | None:
    """The first option, unless it saves too little, or too little more than the codec that is on."""
    if not options:
        return None
    best = options[0]
    kept = next(
        (option for option in options if option.name == in_use and option.saved_ratio > rules.off_ratio), None
    )
    if kept is not None and best.saved_ratio - kept.saved_ratio <= rules.on_ratio:
        return kept.name
    return best.name if best.saved_ratio > rules.on_ratio else None


def _link_words(bytes_per_s: float) -> str:
    return "no measurable limit" if bytes_per_s == math.inf else show_rate(8 * bytes_per_s, digits=3)


def _crossover_words(option: Option) -> str:
    if option.crossover_bytes_per_s is None:
        return f"Below which rate {option.name} helps is not known"
    if option.crossover_bytes_per_s == math.inf:
        return f"{option.name} helps at any rate"
    if option.crossover_bytes_per_s == 0:
        return f"{option.name} helps at no rate"
    return f"{option.name} helps below {show_rate(8 * option.crossover_bytes_per_s, digits=3)}"

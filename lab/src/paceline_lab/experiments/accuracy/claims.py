"""Claims of papers, as comparisons that the study's numbers decide.

Rules
1. "Better": the means differ in that direction, and the exact permutation test says p < 0.05. Better in the other
   direction: it does not hold. Otherwise undecided.
2. "Matches": the mean is at most one point lower. That is a margin, not a test.
3. A claim is decided at each global batch by itself; the verdict says at which it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline_lab.experiments.accuracy.large_batch_plan import RULE, TUNED, Cell, Results
from paceline_lab.experiments.accuracy.large_batch_rows import (
    BASELINE,
    BATCHES,
    CODEC_FACTOR,
    CODECS,
    EVERY_STEP,
    LOCAL,
    ROWS,
    UNCOMPRESSED,
)
from paceline_lab.report.summary import LEVEL, Spread, p_value

MARGIN = 1.0  # points of accuracy
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Claim:
    """One row against another.

    Attributes:
        source: Paper that claims it.
        words: Words of the claim.
        left: Row that is said to be better, or to match.
        right: The other.
        mode: By the rule, or tuned.
        matches: Whether it says "at most a point worse" instead of "better".
    """

    source: str
    words: str
    left: str
    right: str
    mode: str = RULE
    matches: bool = False


_GOYAL, _YOU, _NADO, _MALEKI = (
    "Goyal et al. 2017",
    "You et al. 2017, 2020",
    "Nado et al. 2021",
    "Maleki et al. 2021",
)
GRADUAL = "gradual warm-up"
CLAIMS = (
    Claim(_GOYAL, "an unscaled rate loses accuracy", BASELINE, "unscaled"),
    Claim(_GOYAL, "a rate scaled by the root is better than an unscaled one", "sqrt", "unscaled"),
    Claim(_GOYAL, "linear with gradual warm-up is better than the root", GRADUAL, "sqrt"),
    Claim(_GOYAL, "linear with gradual warm-up matches the small batch", GRADUAL, BASELINE, matches=True),
    Claim(_GOYAL, "gradual warm-up is better than none", GRADUAL, "linear"),
    Claim(_GOYAL, "gradual warm-up is better than constant", GRADUAL, "constant warm-up"),
    Claim(_GOYAL, "no warm-up is better than constant", "linear", "constant warm-up"),
    Claim(_YOU, "LARS is better than linear with gradual warm-up", "lars", GRADUAL),
    Claim(_YOU, "LAMB is better than linear with gradual warm-up", "lamb", GRADUAL),
    Claim(_NADO, "tuned, momentum SGD with warm-up matches LARS", GRADUAL, "lars", TUNED, matches=True),
    Claim(_NADO, "tuned, momentum SGD with warm-up matches LAMB", GRADUAL, "lamb", TUNED, matches=True),
    Claim(_NADO, "tuned, momentum SGD without warm-up matches LAMB", "linear", "lamb", TUNED, matches=True),
    Claim(_MALEKI, "at an unchanged rate Adasum is better than the mean", "adasum", "unscaled"),
    Claim(_MALEKI, "Adasum, rate unchanged, is better than linear with gradual warm-up", "adasum", GRADUAL),
    Claim(_MALEKI, "Adasum, rate unchanged, matches the small batch", "adasum", BASELINE, matches=True),
    Claim(_MALEKI, "tuned, Adasum is better than the mean with warm-up", "adasum", GRADUAL, TUNED),
    Claim(_MALEKI, "tuned, Adasum is better than the mean without warm-up", "adasum", "linear", TUNED),
)


@dataclass(frozen=True)
class Verdict:
    """The decision on a claim.

    Attributes:
        claim: The claim.
        at: Global batches, in reference batches.
        answers: At each batch: holds, does not hold, or undecided.
        evidence: At each batch, the numbers.
    """

    claim: Claim
    at: tuple[int, ...]
    answers: tuple[str, ...]
    evidence: tuple[str, ...]

    @property
    def summary(self) -> str:
        """Return the verdict in words."""
        if len(set(self.answers)) == 1:
            return self.answers[0]
        parts = []
        for answer in (HOLDS, FAILS, UNDECIDED):
            where = [f"x{at}" for at, given in zip(self.at, self.answers, strict=True) if given == answer]
            if where:
                parts.append(f"{answer} at {', '.join(where)}")
        return "; ".join(parts)

    def lines(self) -> Iterator[str]:
        """Yield the verdict and its evidence for a terminal."""
        yield f"{self.claim.source}: {self.claim.words}: {self.summary}"
        for at, evidence in zip(self.at, self.evidence, strict=True):
            yield f"    x{at}: {evidence}"


def judge(results: Results) -> list[Verdict]:
    """Decide every claim for which there are numbers."""
    verdicts = [_judge(claim, results, results.plan.factors) for claim in CLAIMS]
    verdicts += [_judge(claim, results, (CODEC_FACTOR,)) for claim in _message_claims(results)]
    return [verdict for verdict in verdicts if verdict.at]


def _message_claims(results: Results) -> Iterator[Claim]:
    for table, reference, mode in ((CODECS, UNCOMPRESSED, RULE), (LOCAL, EVERY_STEP, TUNED)):
        for row in results.plan.rows:
            if row.table == table and row.name != reference:
                words = f"{row.name}, {mode}, matches {reference}"
                yield Claim("this study", words, row.name, reference, mode, matches=True)


def _judge(claim: Claim, results: Results, factors: tuple[int, ...]) -> Verdict:
    found = []
    for factor in factors:
        left, right = (_spread(name, factor, claim.mode, results) for name in (claim.left, claim.right))
        if factor > 1 and left is not None and right is not None:
            found.append((factor, *_compare(left, right, claim.matches)))
    at, answers, evidence = zip(*found, strict=True) if found else ((), (), ())
    return Verdict(claim, tuple(at), tuple(answers), tuple(evidence))


def _spread(name: str, factor: int, mode: str, results: Results) -> Spread | None:
    row = ROWS[name]
    if row not in results.plan.rows or (
        row.factors and row.table == BATCHES and name != BASELINE and factor not in row.factors
    ):
        return None
    return results.spread(Cell(row, 1 if name == BASELINE else factor), mode)


def _compare(left: Spread, right: Spread, matches: bool) -> tuple[str, str]:
    difference = left.mean - right.mean
    p = p_value(left.values, right.values)
    evidence = f"{left} against {right} ({difference:+.1f}, p = {p:.3f})"
    if matches:
        return (HOLDS if difference >= -MARGIN else FAILS), evidence
    if p >= LEVEL:
        return UNDECIDED, evidence
    return (HOLDS if difference > 0 else FAILS), evidence

"""The doctor's answer: a sentence about a rank or a link, or why there is none, and the missing parts of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from paceline.diagnosis.causes import EXPOSED_RATIO, Cause, common_delay, late_rank
from paceline.diagnosis.culprit import FEWEST_STEPS, LEAST_RATIO, Culprit
from paceline.diagnosis.links import SlowLink, edges_of, slow_link
from paceline.diagnosis.remedies import Remedy, remedies_of, remedies_of_link, remedies_of_waiting
from paceline.diagnosis.step_table import StepTable, table_of
from paceline.diagnosis.what_if import Prediction, exposed_s
from paceline.observe.run_reading import Run, read_run
from paceline.observe.run_records import Health
from paceline.quantities import ms, show_rate


def health_of(run: Run) -> tuple[str, ...]:
    """Return what is wrong with the ranks' numbers, in words; nothing if they agree."""
    return (
        *_apart(run, "parameters", lambda x: x.fingerprint),
        *_apart(run, "buffers", lambda x: x.buffers),
        *_not_finite(run),
    )


def _apart(run: Run, what: str, of: Callable[[Health], str]) -> Sequence[str]:
    """Return words on the first step after which fingerprints differ, and on the ranks that differ from most."""
    by_step: dict[int, dict[int, str]] = {}
    for rank in run.ranks:
        for found in rank.health:
            if of(found):
                by_step.setdefault(found.step, {})[rank.header.rank] = of(found)
    last_equal = 0
    for step in sorted(by_step):
        words = by_step[step]
        common, count = Counter(words.values()).most_common(1)[0]
        if count == len(words):
            last_equal = step
            continue
        if what == "buffers":
            others = "They are kept by each rank alone, as statistics of batch normalization are"
        else:
            others = (
                "Gradients are the same on all ranks, so something else wrote into them, or began from others"
            )
        if 2 * count <= len(words):
            who = "the ranks' " + what + " differ from each other"
        else:
            odd = [str(rank) for rank, word in sorted(words.items()) if word != common]
            who = f"the {what} of rank {', '.join(odd)} differ from the other ranks'"
        since = f"still equal after step {last_equal}" if last_equal else "from the first comparison on"
        return [f"After step {step} {who} ({since}). {others}."]
    return []


def _not_finite(run: Run) -> list[str]:
    """Name the rank whose gradients were not finite first. If every rank's were, the parameters may be the cause."""
    found = [(x.step, rank, x.not_finite) for rank in run.ranks for x in rank.health if x.not_finite]
    if not found:
        return []
    first = min(step for step, _, _ in found)
    ranks = {rank.header.rank: name for step, rank, name in found if step == first}
    name = next(iter(ranks.values()))
    is_late = any(rank.header.device != "cpu" for _, rank, _ in found)
    when = f"In step {first} or shortly before" if is_late else f"In step {first}"
    if 1 < len(ranks) == len(run.ranks):
        words = (
            f"{when} every rank's own gradients were not finite, the first in backward's order being that of {name}. "
            "Which rank caused it is unknown: parameters may have been so before."
        )
        return [words]
    who = " and ".join(f"rank {rank}'s" for rank in sorted(ranks))
    words = (
        f"{when} {who} own gradient of {name} was not finite, the first in backward's order. Parameters are not finite "
        "since. Look at that rank's batch and loss in that step, and restart from a checkpoint before it."
    )
    return [words]


@dataclass(frozen=True)
class Finding:
    """A cause that delays steps.

    Attributes:
        kind: "rank", "link" or "all ranks".
        rank: Which; None: it changes, or all of them.
        host: Its name.
        phase: Where in the step; see `Culprit`.
        layer: Within backward.
        when: See `Culprit`.
        cause: A name for scripts.
        delay_s: How much longer it makes a step that it delays.
        step_s: The median step now.
        without: The step without it; None: not predicted.
        remedies: What to do.
        sureness: In how many of the steps it was seen, 0 to 1.
        sentence: All of it for people.
        direction: Which way of a slow link: "towards" the host, "from" it, or "both"; "": not known.
    """

    kind: str
    rank: int | None
    host: str
    phase: str
    layer: str
    when: str
    cause: str
    delay_s: float
    step_s: float
    without: Prediction | None
    remedies: tuple[Remedy, ...]
    sureness: float
    sentence: str
    direction: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a run.

    Attributes:
        finding: The cause that delays its steps most; None if it is too small, or too little is known.
        health: What is wrong with the ranks' numbers.
        num_steps: Number of steps compared.
        num_ranks: Number of ranks compared.
        step_s: The median step; 0: none.
        silence: Why nothing is said, if nothing is.
        not_measured: What might be the cause and was not looked at.
        notes: What of the run could not be read.
        remedies: Against waiting for gradients that backward does not hide, where no link is to blame.
    """

    finding: Finding | None
    health: tuple[str, ...]
    num_steps: int
    num_ranks: int
    step_s: float
    silence: str
    not_measured: tuple[str, ...]
    notes: tuple[str, ...]
    remedies: tuple[Remedy, ...] = ()

    @property
    def words(self) -> str:
        """Return the sentence, or why there is none, and the ranks' health."""
        return "\n".join([self.finding.sentence if self.finding else self.silence, *self.health])


def diagnose_folder(folder: Path) -> Diagnosis:
    """Say what delays the steps of a run, also while it is written. Raises ConfigurationError: it is none."""
    return diagnose(read_run(folder))


def diagnose(run: Run) -> Diagnosis:
    """Say what delays a run's steps. Local and pure: the same records give the same answer."""
    table = table_of(run)
    finding, silence = None, ""
    remedies: tuple[Remedy, ...] = ()
    if len(table.ranks) < 2:
        silence = f"{len(table.ranks)} rank left records: there is no other rank to compare it with."
        if not table.ranks:
            silence = "No rank left a record."
    elif len(table) < FEWEST_STEPS:
        silence = (
            f"{len(table)} steps can be compared, and {FEWEST_STEPS} are needed: let it train some more."
        )
    else:
        finding = _finding(run, table)
        if finding is None:
            silence = (
                f"No rank and no link delays steps by {LEAST_RATIO:.0%} or more: {len(table)} steps of "
                f"{ms(table.step_s)} on {len(table.ranks)} ranks were compared.{_crowd(table)}"
            )
            waited_s = exposed_s(table)
            if waited_s > EXPOSED_RATIO * table.step_s:
                remedies = remedies_of_waiting(run, table)
                leave = "Leave it so: nothing is predicted to gain 3%."
                silence += (
                    f" Each step waits {ms(waited_s)} for gradients that backward does not hide. "
                    f"{_advice(remedies) or leave}"
                )
    return Diagnosis(
        finding,
        health_of(run),
        len(table),
        len(table.ranks),
        table.step_s if len(table) else 0.0,
        silence,
        _not_measured(run),
        run.notes,
        remedies,
    )


def _crowd(table: StepTable) -> str:
    """Return a sentence on how long all ranks wait for cores, or "" if they hardly do."""
    waited_s = median(rank.host.queued_s - rank.host.throttled_s for row in table.rows for rank in row)
    if waited_s < LEAST_RATIO * table.step_s:
        return ""
    return f" Each waits {ms(waited_s)} a step for a core, none much longer than the others: the cores are crowded."


def _finding(run: Run, table: StepTable) -> Finding | None:
    """Return the cause that delays the steps most: a rank, a link, or something that all ranks have in common."""
    late, link = late_rank(run, table), None
    if exposed_s(table) > LEAST_RATIO * table.step_s:
        link = slow_link(edges_of(run))
    of_rank = _of_rank(run, table, *late) if late is not None else None
    of_link = _of_link(run, table, link) if link is not None else None
    if of_rank is None or of_link is None:
        found = of_rank or of_link
    else:  # on a slow link ranks leave a collective one after the other, so that one of them may seem to work longer
        found = max(of_rank, of_link, key=_saved_s)
    if found is None or found.cause == "core shared":
        crowded = _of_all(run, table)
        # Of threads that fight for cores, one rank's always lose by chance.
        found = crowded if found is None or (crowded and crowded.cause == "too many threads") else found
    return found


def _saved_s(finding: Finding) -> float:
    return 0.0 if finding.without is None else finding.step_s - finding.without.step_s


def _of_rank(run: Run, table: StepTable, culprit: Culprit, cause: Cause) -> Finding:
    remedies = remedies_of(run, table, culprit, cause)
    predicted = remedies[0].predicted
    assert predicted is not None
    is_lasting = culprit.when in {"always", "since", "moving"}
    now_s = table.step_s if is_lasting else sum(table.steps_s) / len(table)
    then_s = predicted.step_s if is_lasting else predicted.mean_s
    host = _host(run, culprit.rank)
    who = "A rank, not always the same one," if culprit.rank is None else f"Rank {_named(run, culprit.rank)}"
    where = _WHERE.get(culprit.phase, f"in its {culprit.phase}")
    where += f" of {culprit.layer}" if culprit.layer else ""
    mean = "" if is_lasting else " in the mean"
    sentence = (
        f"{who} is {ms(culprit.delay_s)} late {_when(culprit, len(table))}, {where}, because {cause.words}. Without it "
        f"a step takes {ms(then_s)} instead of {ms(now_s)}{mean}. {_advice(remedies[1:], remedies[0].words)}"
    )
    return Finding(
        "rank",
        culprit.rank,
        host,
        culprit.phase,
        culprit.layer,
        culprit.when,
        cause.kind,
        culprit.delay_s,
        table.step_s,
        predicted,
        remedies,
        culprit.sureness,
        sentence,
    )


_WHERE = {
    "other": "between the phases, in Python of its own",
    "computation": "in forward and backward alike",
    "loading": "waiting for its loader",
    "garbage": "in Python's garbage collection",
}


def _when(culprit: Culprit, num_steps: int) -> str:
    if culprit.when == "since":
        return f"since step {culprit.since_step:,}"
    if culprit.when == "periodic":
        return f"in every {culprit.every}th step"
    if culprit.when == "always" and culprit.sureness > 0.95:
        return "in every step"
    return f"in {len(culprit.indices)} of {num_steps} steps"


def _advice(others: tuple[Remedy, ...], first: str = "") -> str:
    words = [first] if first else []
    words += [f"{x.words} (predicted {ms(x.predicted.step_s)})" if x.predicted else x.words for x in others]
    sentence = ", or ".join(words)
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""


def _of_link(run: Run, table: StepTable, link: SlowLink) -> Finding:
    host = _host(run, link.rank)
    remedies = remedies_of_link(run, table, link)
    waited_s = exposed_s(table)
    to = f" towards rank {link.peer}" if link.peer is not None else ""
    way = {"towards": " towards it", "from": " from it", "both": " in both directions"}.get(
        link.direction, ""
    )
    what = {
        "rate": f"carries{way} {show_rate(8 * link.value, 3)} where others carry {show_rate(8 * link.others, 3)}",
        "loss": f"loses {link.value:.1%} of its segments{to}, others {link.others:.1%}",
        "delay": f"takes {ms(link.value)} for a round trip, others {ms(link.others)}",
    }[link.kind]
    repaired = remedies[0].predicted if remedies else None
    then = f" Repaired, a step takes {ms(repaired.step_s)}." if repaired else ""
    advice = _advice(remedies[1:], remedies[0].words) if repaired else _advice(remedies)
    sentence = (
        f"The link of rank {_named(run, link.rank)} {what}: every step of {ms(table.step_s)} waits {ms(waited_s)} for "
        f"communication that nothing hides.{then} {advice}"
    ).strip()
    return Finding(
        "link",
        link.rank,
        host,
        "communication",
        "",
        "always",
        f"slow link: {link.kind}",
        waited_s,
        table.step_s,
        repaired,
        remedies,
        1.0,
        sentence,
        link.direction,
    )


def _of_all(run: Run, table: StepTable) -> Finding | None:
    found = common_delay(run, table)
    if found is None:
        return None
    advised: tuple[Remedy, ...] = (Remedy(found.advice, found.without),)
    if found.phase == "communication":
        advised = tuple(x for x in remedies_of_waiting(run, table) if x.predicted) or advised
    priced = "" if advised[0].predicted else "; what a step takes then is not predicted"
    return Finding(
        "all ranks",
        None,
        found.host,
        found.phase,
        "",
        "always",
        found.kind,
        found.lost_s,
        table.step_s,
        found.without,
        advised,
        1.0,
        f"{found.words} {_advice(advised)[:-1]}{priced}.",
    )


def _named(run: Run, rank: int) -> str:
    several = len({x.header.host for x in run.ranks}) > 1
    return f"{rank} (host {_host(run, rank)})" if several else str(rank)


def _host(run: Run, rank: int | None) -> str:
    return next((x.header.host for x in run.ranks if x.header.rank == rank), "")


def _not_measured(run: Run) -> tuple[str, ...]:
    found = []
    if any(x.header.device != "cpu" for x in run.ranks):
        found.append(
            "clocks and throttling of accelerators; times are the host's, which runs ahead of the device"
        )
    if run.ranks and not any(sample.links for x in run.ranks for sample in x.samples):
        found.append("links: no TCP connection between ranks was seen")
    elif len({x.header.host for x in run.ranks}) > 1 and not any(
        link.arrival_bytes_per_s for x in run.ranks for sample in x.samples[-1:] for link in sample.links
    ):
        found.append("which direction of a link is slow")
    return tuple(found)

"""The search for the rank that is late, and for the reason, in what the kernel and the records say of all ranks.

Rules
0. Work is compared without waits for a core first. Only then a rank may be late because it waits for one. It must wait
   much longer than every other rank, or processes seen on its core alone must account for the difference. On a crowded
   machine all wait, and chance makes one of them the last.
1. Phases that are their own cause come first: garbage collection, checkpoints.
2. Throttling is asked before waiting for a core, which contains it; unequal work before a slower core.
3. What differs from the other ranks counts, never the number alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from paceline.diagnosis.culprit import LEAST_RATIO, Culprit, find_culprit
from paceline.diagnosis.step_table import RankStep, StepTable
from paceline.diagnosis.what_if import Prediction, as_recorded, exposed_s
from paceline.observe.run_reading import RankRun, Run
from paceline.observe.run_records import HostFacts, Sample
from paceline.quantities import ms


def taken_from_cores(run: Run) -> dict[int, dict[str, float]]:
    """Return, for each rank, the share of the time that each process outside this run was seen on its core."""
    own = {x.header.pid for x in run.ranks}
    found: dict[int, dict[str, float]] = {}
    for rank in run.ranks:
        used = found[rank.header.rank] = {}
        looks = [x for x in rank.samples if x.neighbours is not None]
        for look in looks[1:]:
            for x in look.neighbours or ():
                if x.pid not in own:
                    ratio = x.cpu_s / max(1e-9, looks[-1].at_s - looks[0].at_s)
                    used[f"{x.pid} ({x.name})"] = used.get(f"{x.pid} ({x.name})", 0.0) + ratio
    return found


def taken_on_hosts(run: Run) -> dict[str, dict[str, float]]:
    """Return the same for each host: several ranks may have seen a process, each for a part of the time."""
    found: dict[str, dict[str, float]] = {}
    taken = taken_from_cores(run)
    for rank in run.ranks:
        used = found.setdefault(rank.header.host, {})
        for name, ratio in taken[rank.header.rank].items():
            used[name] = max(ratio, used.get(name, 0.0))
    return found


def waits_for_processes(run: Run, table: StepTable) -> tuple[float, ...]:
    """Return the share of each rank's waits for a core, by column, that is for processes that are no ranks.

    A thread that waits for a core waits for the processes that compute on it, for each as long as it computes.
    """
    taken = taken_on_hosts(run)
    hosts = {x.header.rank: x.header.host for x in run.ranks}
    computes = [
        median(row[place].host.cpu_s for row in table.rows) / table.step_s for place in range(len(hosts))
    ]
    shares = []
    for place, rank in enumerate(table.ranks):
        processes = sum(taken[hosts[rank]].values())
        ranks = sum(
            of_core
            for other, of_core in enumerate(computes)
            if other != place and hosts[table.ranks[other]] == hosts[rank]
        )
        shares.append(processes / (processes + ranks) if processes else 0.0)
    return tuple(shares)


_MORE_WORK = 1.1  # samples or tokens over the others'
_ALONE = 2.0  # a rank's wait for a core over every other rank's; beside one busy process it was 2.5 to 4
COMPUTES = {"forward", "backward", "computation", "other"}


@dataclass(frozen=True)
class Cause:
    """The reason why a rank is late."""

    kind: str  # a name for scripts
    words: str  # for people, after "because"


def late_rank(run: Run, table: StepTable) -> tuple[Culprit, Cause] | None:
    """Return the rank that delays the steps, and why; None if no rank does, or only by chance (rule 0)."""
    alone = table.without_queueing()
    own, any_way = find_culprit(alone), find_culprit(table)
    if (
        own is not None
        and _median_excess_s(table, own, lambda rank: rank.work_s) < LEAST_RATIO * table.step_s
    ):
        own = None  # the others wait so long for cores that it is none the later
    if any_way is not None and _is_chance(run, table, any_way):
        any_way = None
    if own is not None and (any_way is None or own.delay_s > 0.5 * any_way.delay_s):
        return own, cause_of(run, alone, own)
    return None if any_way is None else (any_way, cause_of(run, table, any_way))


def _is_chance(run: Run, table: StepTable, culprit: Culprit) -> bool:
    """Return whether it is late because it waits for a core, and nothing sets it apart from others that do (rule 0)."""
    if _median_excess_s(table, culprit, _queued_s) <= 0.5 * culprit.delay_s:
        return False
    if culprit.rank is None:
        return True
    # All steps of the window: in those in which it is late, it has waited longer by selection.
    rows = table.rows[culprit.indices[0] if culprit.when == "since" else 0 :]
    waits_s = [fmean(_queued_s(row[place]) for row in rows) for place in range(len(table.ranks))]
    own_s = waits_s.pop(culprit.places[0])
    if own_s >= _ALONE * max(waits_s):
        return False
    taken_s = {rank: sum(x.values()) * table.step_s for rank, x in taken_from_cores(run).items()}
    own_taken_s = taken_s.pop(culprit.rank)
    return own_taken_s < own_s - max(waits_s) or 2 * max(taken_s.values()) > own_taken_s


def _median_excess_s(table: StepTable, culprit: Culprit, value: Callable[[RankStep], float]) -> float:
    return median(table.more_than_others(i, culprit.places[i], value) for i in culprit.indices)


def _queued_s(rank: RankStep) -> float:
    return max(0.0, rank.host.queued_s - rank.host.throttled_s)


def cause_of(run: Run, table: StepTable, culprit: Culprit) -> Cause:
    """Return the first cause that explains enough of the delay; else "waits" or "computes"."""
    facts = _Facts(run, table, culprit)
    own = {
        "garbage": ("garbage collection", "Python's garbage collection runs in these steps"),
        "checkpoint": ("checkpoint", "it writes a checkpoint in these steps"),
    }
    if culprit.phase in own:
        return Cause(*own[culprit.phase])
    for found in (facts.throttled, facts.stolen, facts.disk, facts.more_work, facts.shared_core):
        cause = found()
        if cause is not None:
            return cause
    if culprit.phase == "loading":
        return Cause("loader", "its loader delivers later than the others'")
    cpu_s = facts.excess_s(lambda host: host.cpu_s)
    if cpu_s > 0.4 * culprit.delay_s:
        return Cause("computes longer", f"it computes {ms(cpu_s)} more a step on a core of its own")
    return Cause("waits", "it waits there for something else than a core: sleep, I/O or a lock")


class _Facts:
    """Medians of the culprit and of the other ranks, over the steps that the culprit delays."""

    def __init__(self, run: Run, table: StepTable, culprit: Culprit) -> None:
        self._run, self._table, self._culprit = run, table, culprit
        self._delay_s = max(culprit.delay_s, 1e-9)

    def excess_s(self, fact: Callable[[HostFacts], float]) -> float:
        return _median_excess_s(self._table, self._culprit, lambda rank: fact(rank.host))

    def throttled(self) -> Cause | None:
        throttled_s = self.excess_s(lambda host: host.throttled_s)
        if throttled_s <= 0.3 * self._delay_s:
            return None
        return Cause("throttled", f"its cgroup is throttled for {ms(throttled_s)} a step")

    def stolen(self) -> Cause | None:
        stolen_s = self._sampled_s(lambda sample: sample.stolen_s)
        if stolen_s <= 0.3 * self._delay_s:
            return None
        return Cause("stolen", f"the machine under it takes {ms(stolen_s)} a step from its host")

    def disk(self) -> Cause | None:
        disk_s = self._sampled_s(lambda sample: sample.disk_s)
        faults = self.excess_s(lambda host: host.major_faults)
        if disk_s <= 0.3 * self._delay_s and faults <= 2:
            return None
        if self._swaps():
            return Cause("swap", f"its host swaps: {faults:.0f} pages a step come from a disk")
        return Cause("disk", f"it waits for a disk ({faults:.0f} pages a step come from there)")

    def _sampled_s(self, count: Callable[[Sample], float]) -> float:
        """Return the seconds per step of a sampled value, by which this rank exceeds the others' median."""
        own, others = 0.0, []
        for rank in self._run.ranks:
            looks = [x for x in rank.samples if x.neighbours is not None]
            ratio = 0.0
            if len(looks) > 1:
                apart_s = max(1e-9, looks[-1].at_s - looks[0].at_s)
                ratio = (count(looks[-1]) - count(looks[0])) / apart_s
            if rank.header.rank == self._culprit.rank:
                own = ratio
            else:
                others.append(ratio)
        return (own - median(others)) * self._table.step_s if others else 0.0

    def _swaps(self) -> bool:
        rank = next((x for x in self._run.ranks if x.header.rank == self._culprit.rank), None)
        pages = [x.swapped_in_pages for x in rank.samples if x.neighbours is not None] if rank else []
        return len(pages) > 1 and pages[-1] > pages[0]

    def more_work(self) -> Cause | None:
        if self._culprit.phase not in COMPUTES | {"loading"}:
            return None
        for name in ("tokens", "samples"):
            pairs = [self._count(i, f"num_{name}") for i in self._culprit.indices]
            known = [pair for pair in pairs if pair is not None]
            if len(known) < len(pairs) or not known:
                continue
            own, others = median(x[0] for x in known), median(x[1] for x in known)
            if own > _MORE_WORK * others:
                return Cause(f"more {name}", f"it trains {own:.0f} {name} a step, the others {others:.0f}")
        return None

    def _count(self, index: int, name: str) -> tuple[int, float] | None:
        counts = [getattr(rank, name) for rank in self._table.rows[index]]
        if None in counts:
            return None
        own = counts.pop(self._culprit.places[index])
        return own, median(counts)

    def shared_core(self) -> Cause | None:
        if self._culprit.phase not in COMPUTES | {"optimizer", "loading"}:
            return None
        queued_s = self.excess_s(lambda host: host.queued_s)
        if queued_s <= 0.5 * self._delay_s:
            return None
        used = {} if self._culprit.rank is None else taken_from_cores(self._run)[self._culprit.rank]
        neighbour = max(used, key=used.__getitem__, default="")
        who = f", which process {neighbour} uses as well" if neighbour else ""
        return Cause("core shared", f"it waits {ms(queued_s)} a step for a core{who}")


_QUEUED_RATIO = 0.2  # of a thread's time, waiting for a core
EXPOSED_RATIO = 0.2
"""Of a step: less communication that backward does not hide is not worth a word."""
_SMALL_BYTES, _MANY = 256 * 1024, 8


@dataclass(frozen=True)
class CommonDelay:
    """A cause that makes all ranks slow."""

    kind: str  # a name for scripts
    host: str  # where; "": everywhere
    phase: str  # of the step
    lost_s: float  # a step, at most
    words: str  # for people
    advice: str  # what to do, without a full stop
    without: Prediction | None = None  # the step then; None: not predicted


def common_delay(run: Run, table: StepTable) -> CommonDelay | None:
    """Return the first cause that delays all ranks; None: there is none."""
    return _too_many_threads(run, table) or _shared_cores(run, table) or _small_buckets(run, table)


def _by_host(run: Run) -> dict[str, list[RankRun]]:
    found: dict[str, list[RankRun]] = {}
    for rank in run.ranks:
        found.setdefault(rank.header.host, []).append(rank)
    return found


def _too_many_threads(run: Run, table: StepTable) -> CommonDelay | None:
    """Find a host on which threads that compute outnumber the cores, and threads of its ranks wait for one."""
    for host, ranks in _by_host(run).items():
        threads = sum(rank.header.num_threads for rank in ranks)
        cores = max(rank.header.num_cpus for rank in ranks)
        queued = median(_queued_ratio(rank) for rank in ranks)
        is_fewer_possible = max(rank.header.num_threads for rank in ranks) > 1
        if is_fewer_possible and threads > cores and queued > _QUEUED_RATIO:
            words = (
                f"The {len(ranks)} ranks of host {host} compute with {threads} threads on {cores} cores, and a rank's "
                f"threads wait for a core {queued:.0%} of the time."
            )
            each = max(1, cores // len(ranks))
            return CommonDelay(
                "too many threads",
                host,
                "computation",
                queued * table.step_s,
                words,
                f"Set OMP_NUM_THREADS={each}",
            )
    return None


def _shared_cores(run: Run, table: StepTable) -> CommonDelay | None:
    """Find a host whose ranks wait for cores, of which other processes took at least as much as a rank waits."""
    taken = taken_on_hosts(run)
    for host, ranks in _by_host(run).items():
        numbers, used = {x.header.rank for x in ranks}, taken[host]
        places = [place for place, number in enumerate(table.ranks) if number in numbers]
        waits = (row[place].host for row in table.rows for place in places)
        waited_s = median(max(0.0, x.queued_s - x.throttled_s) for x in waits)
        if waited_s < LEAST_RATIO * table.step_s or sum(used.values()) * table.step_s < waited_s:
            continue
        name = max(used, key=used.__getitem__)
        words = (
            f"The {len(ranks)} ranks of host {host} each wait {ms(waited_s)} of {ms(table.step_s)} a step for a core: "
            f"process {name} takes {used[name]:.0%} of one."
        )
        advice = "Keep other processes off their cores"
        left = as_recorded(table.with_shorter_waits(waits_for_processes(run, table)))
        return CommonDelay("core shared", host, "computation", waited_s, words, advice, left)
    return None


def _queued_ratio(rank: RankRun) -> float:
    """Return the fraction of time in which a thread waited for a core: all threads together; at most 1."""
    looks = [x for x in rank.samples if x.neighbours is not None]
    if len(looks) < 2:
        return 0.0
    return min(1.0, (looks[-1].queued_s - looks[0].queued_s) / max(1e-9, looks[-1].at_s - looks[0].at_s))


def _small_buckets(run: Run, table: StepTable) -> CommonDelay | None:
    """Find steps that are delayed by small buckets. Only Paceline's reducer records its buckets, torch's does not."""
    buckets = run.ranks[0].steps[-1].buckets
    waited_s = exposed_s(table)
    if len(buckets) < _MANY or waited_s < EXPOSED_RATIO * table.step_s:
        return None
    size_bytes = median(bucket.size_bytes for bucket in buckets)
    if size_bytes >= _SMALL_BYTES:
        return None
    words = (
        f"Gradients travel in {len(buckets)} buckets of {size_bytes / 1024:.0f} KiB, and every step of "
        f"{ms(table.step_s)} waits {ms(waited_s)} for them."
    )
    return CommonDelay(
        "buckets too small",
        "",
        "communication",
        waited_s,
        words,
        "Pass a larger bucket_cap_mb",
    )

"""Causes that delay all ranks alike, so that none is late: threads or other processes on their cores, small buckets."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from paceline.diagnosis.causes import taken_on_hosts, waits_for_processes
from paceline.diagnosis.culprit import LEAST_RATIO
from paceline.diagnosis.step_table import StepTable
from paceline.diagnosis.what_if import Prediction, as_recorded, exposed_s
from paceline.observe.run_reading import RankRun, Run
from paceline.quantities import ms

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
    """The first of them that is there; None: neither."""
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
    """Seconds that all threads together waited for a core, a second; at most 1."""
    looks = [x for x in rank.samples if x.neighbours is not None]
    if len(looks) < 2:
        return 0.0
    return min(1.0, (looks[-1].queued_s - looks[0].queued_s) / max(1e-9, looks[-1].at_s - looks[0].at_s))


def _small_buckets(run: Run, table: StepTable) -> CommonDelay | None:
    """Paceline's buckets only: torch's reducer says nothing of its own."""
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

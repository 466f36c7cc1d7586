"""Processes that are no ranks on the ranks' cores: how much of these they take, and what ranks wait for them."""

from __future__ import annotations

from statistics import median

from paceline.diagnosis.step_table import StepTable
from paceline.observe.run_reading import Run


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
    """The same of each host: several ranks may have seen a process, each for a part of the time."""
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

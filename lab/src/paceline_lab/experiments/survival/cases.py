"""Random cases of the survival study: what happens to whom, and when."""

from __future__ import annotations

import os
import random

from paceline_lab.experiments.survival.hosts import Blow, HostsJob
from paceline_lab.experiments.survival.job import Job
from paceline_lab.experiments.survival.training import (
    BUCKET_MOMENTS,
    CHECKPOINT_EVERY,
    GROUPS,
    MOMENTS,
    Fault,
)

EPOCHS, STEPS_PER_EPOCH = 6, 9
_STEPS = EPOCHS * STEPS_PER_EPOCH
AT_START = ("rendezvous", "constructing")
IN_RECOVERY = ("recovery", "following", "coming in", "replaying", "receiving", "giving")
_WITHIN = [moment for moment in MOMENTS if moment not in (*AT_START, *IN_RECOVERY, *BUCKET_MOMENTS)]
_HOW = ["SIGKILL"] * 5 + ["exit", "error", "memory"] * 2 + ["SIGSTOP", "pause"]
_LONG_S, _SHORT_S = 20.0, 5.0
_LIMIT_S = 300.0  # on a busy machine a case may take minutes


def random_job(seed: int) -> Job:
    """One host: 3 to 8 ranks, and several faults far from each other, some of them two at once or in a recovery."""
    dice = random.Random(seed)
    num_ranks = dice.choice([3, 4, 4, 5, 6, 8])
    options = ["--epochs", str(EPOCHS), "--optimizer", dice.choice(["sgd", "adamw"])]
    options += [
        "--backend",
        dice.choice(["gloo", "gloo", "paceline"]),
        "--pause-ms",
        dice.choice(["0", "20"]),
    ]
    if dice.random() < 0.2:
        options += ["--workers", "1"]
    if dice.random() < 0.2:
        options += ["--deterministic"]
    options += ["--ordinary"] * dice.choice([0, 1])
    if dice.random() < 0.2:
        every_s, count = dice.choice([0.3, 0.6]), dice.randint(2, 5)
        return Job(
            num_ranks, 2, tuple(options), seed=seed, kills_every_s=every_s, num_kills=count, limit_s=_LIMIT_S
        )
    faults = []
    if dice.random() < 0.15:
        # A rank that dies there ends the launch.
        faults.append(Fault(dice.randrange(num_ranks), 0, dice.choice(AT_START), "pause"))
    for begin in range(2, _STEPS - 8, dice.choice([8, 12, 16])):
        faults += _event(dice, begin + dice.randrange(5), num_ranks)
    return Job(num_ranks, 2, tuple(options), tuple(faults), seed=seed, limit_s=_LIMIT_S)


def _event(dice: random.Random, step: int, num_ranks: int) -> list[Fault]:
    """Return a fault at about this step, of one rank or two."""
    first = _fault(dice, step, dice.choice([*_WITHIN, *BUCKET_MOMENTS]), num_ranks)
    chance = dice.random()
    if chance < 0.15:  # two at once
        other = (first.rank + dice.randrange(1, num_ranks)) % num_ranks
        return [first, Fault(other, first.step, first.moment, _how(dice))]
    if chance < 0.45:  # while the others recover
        moment = dice.choice(IN_RECOVERY)
        how = dice.choice(["SIGKILL", "SIGKILL", "exit", "error", "memory"])
        return [first, Fault(dice.randrange(num_ranks - 1), first.step, moment, how)]
    return [first]


def _fault(dice: random.Random, step: int, moment: str, num_ranks: int) -> Fault:
    if moment == "checkpoint":
        step -= step % -CHECKPOINT_EVERY
    if moment == "end of epoch":
        step -= (step + 1) % -STEPS_PER_EPOCH
        step = min(step, _STEPS - STEPS_PER_EPOCH - 1)  # behind the last epoch it fails the launch
    return Fault(dice.randrange(num_ranks), step, moment, _how(dice))


def _how(dice: random.Random) -> str:
    how = dice.choice(_HOW)
    return "SIGKILL" if how == "memory" and not can_limit_memory() else how


def random_hosts_job(seed: int) -> HostsJob:
    """Three or four hosts with 3 to 8 ranks, of which one host is hit, or two are; of four one time in three two."""
    dice = random.Random(seed)
    num_hosts, per_host = dice.choice([(3, 1), (3, 2), (4, 1), (4, 2)])
    options: tuple[str, ...] = (
        "--epochs",
        "30",
        "--pause-ms",
        "20",
        "--optimizer",
        dice.choice(["sgd", "adamw"]),
    )
    # without half of the hosts the other half goes on if the first is in it
    two = num_hosts == 4 and dice.random() < 0.35
    victims = dice.sample(range(1, 4), 2) if two else [dice.randrange(num_hosts)]
    blows = [_blow(dice, host) for host in victims]
    if two:
        blows[1] = Blow(blows[1].host, blows[1].kind, blows[1].lasts_s, after_steps=0)
    options += ("--ordinary",) * dice.choice([0, 1])
    job = Job(
        num_hosts * per_host,
        1,
        options,
        seed=seed,
        lost_after_s=dice.choice([3.0, 10.0]),
        limit_s=2 * _LIMIT_S,
    )
    return HostsJob(num_hosts, per_host, job, tuple(blows), returns=dice.random() < 0.5)


def _blow(dice: random.Random, host: int) -> Blow:
    kind = dice.choice(
        [
            "agent killed",
            "switched off",
            "cut",
            "cut",
            "half-open",
            "half-open",
            "agent stopped",
            "host stopped",
        ]
    )
    lasts_s = None
    if kind in ("cut", "half-open"):
        lasts_s = dice.choice([_SHORT_S, None])
    elif kind in ("agent stopped", "host stopped"):
        lasts_s = dice.choice([_SHORT_S, _LONG_S])
    return Blow(host, kind, lasts_s, after_steps=dice.randint(4, 40))


def can_limit_memory() -> bool:
    """Return whether a rank can be given so little memory that the kernel kills it."""
    return os.access(GROUPS, os.W_OK)

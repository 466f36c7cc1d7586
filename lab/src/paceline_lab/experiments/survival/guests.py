"""Random histories of trainings whose ranks an engine starts: losses, notices, moves, splits, a late name, an end.

The engine (`harness.guest_engines`) is this process, which starts ranks again as a shell does, or torchrun, Slurm or
Ray. Hosts are addresses of this machine (127.A.B.C), or namespaces (`emulation`). The hosts of a shell or of torchrun
find each other by a name in a hosts file of their own. So an address can change, and a name can come late.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline_lab.checkout import in_repository
from paceline_lab.emulation import ClusterSpec, EmulatedCluster
from paceline_lab.emulation.cluster import EmulatedHost
from paceline_lab.experiments.survival import cases
from paceline_lab.experiments.survival.job import (
    Job,
    Outcome,
    outcome_of_hosts,
    problems,
    trained,
    wait_until,
)
from paceline_lab.experiments.survival.record import Case
from paceline_lab.experiments.survival.training import parser_of

sys.path.insert(0, str(in_repository("tests", "the engines of random histories (tests/harness)")))

from harness.guest_engines import Engine, Loop, Place, RayActors, SlurmArray

_EPOCHS, _LIMIT_S = 8, 240.0
_BACK_S, _CLUSTER_BACK_S, _LEFT_S = 40.0, 200.0, 30.0
_TOLD_CODES = (0, 143)
_BEGUN_AGAIN = "begin again: those before them were all lost"
_STOPPED = "Start all hosts again, from the last checkpoint"  # of two hosts that which breaks ties is lost
# At most so late the kernel kills a rank that runs out of memory, or others train first with one that died as it came
_KILLER_S = 5.0
_LOSSES = ("killed", "agent killed", "moved", "split", "agent and ranks stopped")
ENGINES = ("processes", "namespaces", "torchrun", "slurm", "ray")
_FOUR_HOSTS = (
    1_000_000  # seeds from here on have four hosts and one of these events, to time it on a quiet machine
)
_KINDS: tuple[str, ...] = ("killed", "agent killed", "split")
CLUSTERS = ENGINES[-2:]  # each in namespaces, with daemons of its own
SHARES = (35, 10, 3, 1, 1)  # of 50 cases


@dataclass(frozen=True)
class Event:
    """An event in the life of a job.

    Attributes:
        kind: `killed` (a rank), `agent killed`, `moved` (all of a host killed, back at another address), `told` (a
            rank), `host told`, `all told`, `joined`, `split`, `late name`, or `started after the end`.
        host: Number of the host.
        after_steps: Steps that are completed before it, since the last event.
        lasts_s: Time until a split heals, a name is known, or what was told to go is started again; 0: never.
    """

    kind: str
    host: int = 0
    after_steps: int = 8
    lasts_s: float = 0.0

    def __str__(self) -> str:
        return f"{'first host' if self.host == 0 else 'host'}: {self.kind}"


@dataclass(frozen=True)
class GuestJob:
    """The settings of a job. Its `num_ranks` are those of all hosts at the start."""

    engine: str
    num_hosts: int
    most_hosts: int
    job: Job
    events: tuple[Event, ...]


@dataclass
class GuestOutcome:
    """The result of a job. `struck`: events with their times. `back`: of the `moved` hosts that had room."""

    outcome: Outcome
    struck: list[tuple[float, Event]] = field(default_factory=list)
    moved: int = 0
    back: int = 0
    late_trained: bool = False  # whether ranks that were started after the end trained
    late_codes: list[int | None] = field(default_factory=list)

    def num(self, kind: str) -> int:
        return sum(event.kind == kind for _, event in self.struck)


def engine_of(seed: int) -> str:
    """Return the engine of this case: they take turns, each with its share."""
    if seed >= _FOUR_HOSTS:
        return "namespaces"
    names = [name for name, share in zip(ENGINES, SHARES, strict=True) for _ in range(share)]
    return names[seed * 7 % len(names)]  # 7 and 50 have no common factor


def missing(engine: str) -> str:
    """Return why this engine cannot be tried here; empty if it can."""
    if os.geteuid():
        return "hosts need root"
    has = {
        "slurm": shutil.which("slurmctld", path="/usr/sbin:/sbin:/usr/local/sbin"),
        "ray": importlib.util.find_spec("ray"),
    }
    return (
        "" if has.get(engine, True) else "`make test-engines` installs it; PYTHONPATH=build/engines finds Ray"
    )


def random_guest_job(seed: int) -> GuestJob:
    """Draw a history. Two in three of one machine have one host, where ranks fail at random moments by themselves."""
    dice, engine = random.Random(f"guest {seed}"), engine_of(seed)
    if seed >= _FOUR_HOSTS:
        job = Job(4, 1, (*_options(dice, 4), "--epochs", str(_EPOCHS)), seed=seed, limit_s=_LIMIT_S)
        loss = Event(dice.choice(_KINDS), dice.randrange(4), dice.randint(4, 12), 5.0)
        return GuestJob(engine, 4, 4, job, (loss, Event("started after the end")))
    if engine == "processes" and dice.random() < 0.6:
        return _on_one_host(dice, seed)
    num_hosts, per_host = dice.choice([(3, 1), (3, 2), (4, 1)])
    if engine in CLUSTERS:
        per_host = 1  # each process imports torch
    most = num_hosts + dice.choice([0, 1])
    kinds = ["killed", "agent killed", "moved", "moved", "told", "host told", "joined"]
    kinds += ["split"] * 3 * (engine == "namespaces")
    if engine in ("torchrun", "slurm"):
        kinds = [kind for kind in kinds if kind != "told"]  # all of a host are told
    events = [Event("late name", lasts_s=dice.uniform(2, 6))] if dice.random() < 0.2 else []
    events = [] if engine in CLUSTERS else events
    for _ in range(dice.randint(1, 3)):
        kind = dice.choice(kinds)
        lasts_s = dice.choice([1.5, 5.0, 12.0]) if kind == "split" else dice.uniform(1, 3)
        host = num_hosts if kind == "joined" else dice.randrange(num_hosts)
        if not (kind == "joined" and any(each.kind == "joined" for each in events)):
            events.append(Event(kind, host, dice.randint(4, 12), lasts_s))
    events.append(Event(dice.choice(["all told", "started after the end"])))
    options = _options(dice, num_hosts * per_host)
    epochs, limit_s = _EPOCHS, _LIMIT_S
    if engine in CLUSTERS:  # they start ranks again after a minute or so
        options += ["--hold-s", "1"]
        epochs, limit_s = 2 * epochs, 4 * limit_s
    options += ["--epochs", str(epochs)]
    job = Job(num_hosts * per_host, per_host, tuple(options), seed=seed, limit_s=limit_s)
    return GuestJob(engine, num_hosts, most, job, tuple(events))


def _on_one_host(dice: random.Random, seed: int) -> GuestJob:
    num_ranks = dice.choice([3, 4, 4, 5, 6])
    options = [*_options(dice, num_ranks), "--epochs", str(_EPOCHS)]
    faults = cases.random_job(seed).faults if dice.random() < 0.5 else ()
    faults = tuple(each for each in faults if each.moment not in cases.AT_START)
    events = [
        Event(dice.choice(["killed", "told", "told"]), 0, dice.randint(5, 15), dice.uniform(0.5, 2))
        for _ in range(dice.randint(1, 3))
    ]
    events.append(Event(dice.choice(["all told", "started after the end"])))
    job = Job(num_ranks, 1, tuple(options), faults, seed=seed, limit_s=_LIMIT_S)
    return GuestJob("processes", 1, 1, job, tuple(events))


def _options(dice: random.Random, num_ranks: int) -> list[str]:
    options = ["--ranks", str(num_ranks), "--optimizer", dice.choice(["sgd", "adamw"])]
    options += ["--workers", "1"] * (dice.random() < 0.1)
    return [*options, *["--deterministic"] * (dice.random() < 0.5)]


def run_guest_job(job: GuestJob, folder: Path) -> GuestOutcome:
    """Run it, and wait for its end. Blocks, at most its `limit_s` and a minute."""
    with contextlib.ExitStack() as stack:
        num, hosts = job.num_hosts + 1, list[EmulatedHost]()
        if job.engine in ("namespaces", *CLUSTERS):
            spec = ClusterSpec(num + (job.engine in CLUSTERS), offload=False)
            hosts = stack.enter_context(EmulatedCluster(spec)).hosts
        if job.engine in CLUSTERS:
            engine: Engine = (SlurmArray if job.engine == "slurm" else RayActors)(job, hosts, folder)
        elif hosts:
            engine = Loop(
                job, [Place(host.address, host.command, host.hosts_file, host) for host in hosts], folder
            )
        else:
            engine = Loop(job, [_on_this_machine(folder, host) for host in range(num)], folder)
        history = _History(job, engine, hosts)
        try:
            history.live()
        finally:
            ended_s = time.monotonic()
            codes = history.codes or engine.codes()
            left = 0
            if None not in codes:  # agents end with their last ranks
                wait_until(lambda: not engine.left(), ended_s + _LEFT_S)
                left = engine.left()
            engine.close()
    code = None if None in codes else next((c for c in codes if c not in _TOLD_CODES), 0)
    num_blows = sum(event.kind in _LOSSES for _, event in history.found.struck)
    outcome = outcome_of_hosts(folder, code, left, num_blows, ended_s)
    if engine.is_told or (job.engine == "torchrun" and outcome.code == 1 and outcome.models):
        outcome.code = outcome.code if outcome.code is None else 0  # torchrun ends with 1 if it was told
    return replace(history.found, outcome=outcome)


def _on_this_machine(folder: Path, host: int) -> Place:
    """Return a host at an address of its own; what it runs has a hosts file of its own."""
    hosts_file = folder / f"hosts-{host}"
    hosts_file.write_text(Path("/etc/hosts").read_text())
    dice = random.Random(f"{folder} {host}")
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(hosts_file)]
    address = f"127.{dice.randint(1, 250)}.{dice.randint(1, 250)}.{dice.randint(1, 250)}"
    return Place(address, lambda command: [*enter, *command], hosts_file)


class _History:
    """Lets the events of a job happen, one after the other."""

    def __init__(self, job: GuestJob, engine: Engine, hosts: Sequence[EmulatedHost]) -> None:
        self._job, self._engine, self._hosts = job, engine, hosts
        self._dice = random.Random(job.job.seed)
        self._until_s = time.monotonic() + job.job.limit_s
        self._back_s = _CLUSTER_BACK_S if job.engine in CLUSTERS else _BACK_S
        nothing = Outcome(None, "", [], [], 0)
        self.found = GuestOutcome(nothing)
        self.codes: list[int | None] = []

    def live(self) -> None:
        engine, events = self._engine, list(self._job.events)
        late = events[0].lasts_s if events[0].kind == "late name" else 0.0
        if not late:
            engine.know_names()
        engine.start()
        if late:
            self._note(events.pop(0))
            time.sleep(late)
            engine.know_names()
        for event in events[:-1]:
            self._strike(event)
        last = events[-1]
        if last.kind == "all told":
            self._strike(last)
        engine.hold.unlink(missing_ok=True)
        self._wait(lambda: engine.has_ended)
        self.codes = engine.codes()
        if last.kind == "started after the end" and set(self.codes) == {0}:
            at = self._note(last)
            self.found.late_codes = engine.start_late(last.host, self._back_s)
            self.found.late_trained = any(n["what"] == "try" and n["at"] > at for n in engine.notes())

    def _wait(self, happens: Callable[[], bool], limit_s: float | None = None) -> bool:
        until_s = self._until_s if limit_s is None else min(self._until_s, time.monotonic() + limit_s)

        def now() -> bool:
            self._engine.tend()
            return happens() or self._engine.has_ended

        return wait_until(now, until_s) and not self._engine.has_ended

    def _note(self, event: Event) -> float:
        self.found.struck.append((time.monotonic(), event))
        return self.found.struck[-1][0]

    def _strike(self, event: Event) -> None:
        engine, step = self._engine, self._engine.last_step()
        if not self._wait(lambda: engine.last_step() >= max(step, 0) + event.after_steps):
            return
        at = self._note(event)
        if event.kind == "killed":
            engine.kill_rank(event.host, self._dice)
        elif event.kind == "agent killed":
            engine.kill_agent(event.host)
        elif event.kind == "moved":
            engine.move(event.host)
            if engine.has_room:
                is_back = functools.partial(self._trains, event.host, at + 0.2)
                self.found.moved += 1
                self.found.back += self._wait(is_back, self._back_s)
        elif event.kind in ("told", "host told", "all told"):
            host = None if event.kind == "all told" else event.host
            engine.tell(host, event.lasts_s, self._dice if event.kind == "told" else None)
        elif event.kind == "joined":
            engine.join(event.host)
        elif event.kind == "split":
            self._split(event)

    def _trains(self, host: int, since_s: float) -> bool:
        notes = self._engine.notes(str(host))
        return any(note["what"] == "try" and note["at"] > since_s for note in notes)

    def _split(self, event: Event) -> None:
        """Cut a host, and half of the time another one, off the others."""
        cut = {event.host}
        if self._job.num_hosts > 3:
            cut.add(self._dice.randrange(self._job.num_hosts))
        for up in (False, True):
            for host in sorted(cut):
                self._hosts[host].set_link(up=up)
            if not up:
                self._wait(lambda: False, event.lasts_s)


# ---- what must hold


def guest_problems(job: GuestJob, found: GuestOutcome) -> list[str]:
    """Return what did not hold, in words; empty if all did."""
    outcome = found.outcome
    wrong = []
    if found.late_trained:
        wrong.append("ranks that were started after the end trained again")
    if any(code != 0 for code in found.late_codes):
        wrong.append(f"ranks that were started after the end ended with {found.late_codes}")
    if unexplained := again_without_loss(found):
        wrong.append(f"steps {unexplained} were computed again without a loss")
    if not found.num("all told") or outcome.models:
        return wrong + problems(job.job, outcome)
    # The training has not ended.
    args = parser_of().parse_args(["/", *job.job.options])
    saved = [note["step"] for note in outcome.of("saved")]
    last = max((note["step"] for note in outcome.of("done")), default=-1)
    if outcome.code is None:
        wrong.append(f"it hung after all were told: {outcome.still_s:.0f} s after its last step")
    elif outcome.code:
        wrong.append(f"all were told, and a rank ended with code {outcome.code}")
    if last >= 0 and max(saved, default=-1) != last + 1:
        wrong.append(f"all were told after {last + 1} steps, and checkpoints were written after {saved}")
    if trained(outcome, args.samples, args.epochs).num_doubled:
        wrong.append("samples were doubled")
    if outcome.num_left:
        wrong.append(f"{outcome.num_left} process(es) were left behind")
    return wrong


def guest_case(case: Case, job: GuestJob, found: GuestOutcome) -> Case:
    """Complete the record of a case by what belongs to an engine's ranks."""
    faults = [f"{note['how']}: {note['moment']}" for note in found.outcome.of("fault")]
    kinds = [event.kind for _, event in found.struck]
    is_cut_short = "all told" in kinds and not found.outcome.models
    all_lost = any(words in found.outcome.said for words in (_BEGUN_AGAIN, _STOPPED))
    return replace(
        case,
        engine=job.engine,
        happened=[*case.happened, *faults],
        standstills=stalls(found),
        all_lost=all_lost,
        samples_lost=0 if is_cut_short or all_lost else case.samples_lost,
        samples_doubled=0 if all_lost else case.samples_doubled,
        num_notices=kinds.count("told") + kinds.count("host told"),
        num_again_on_notice=0 if all_lost else len(again_without_loss(found)),
        num_moved=found.moved,
        num_back=found.back,
        num_all_told=int(is_cut_short),
        num_saved=len(found.outcome.of("saved")),
        problem=("it hung" * case.has_hung or two_trainings(found))
        if all_lost
        else "; ".join(guest_problems(job, found)),
    )


def two_trainings(found: GuestOutcome) -> str:
    """Return a problem if a training went on when the ranks that an engine had started again trained; else nothing."""
    furthest = again = -1
    for note in sorted(found.outcome.of("done"), key=lambda each: each["at"]):
        step = note["step"]
        if again >= 0 and step > again + 1:
            return f"step {step} was completed when training had begun again, and done step {again}"
        again = max(again, step) if again >= 0 or step < furthest - 1 else again
        furthest = max(furthest, step)
    return ""


def guest_words(found: Sequence[Case]) -> str:
    """Return the summary of what belongs to an engine's ranks."""
    engines = ", ".join(f"{sum(c.engine == name for c in found)} {name}" for name in ENGINES)
    told = [case for case in found if case.num_all_told]
    return (
        f"{engines}; {sum(case.num_notices for case in found)} notices with "
        f"{sum(case.num_again_on_notice for case in found)} steps computed again; "
        f"{sum(case.num_back for case in found)} of {sum(case.num_moved for case in found)} moved hosts trained again; "
        f"all told in {len(told)} cases, of which {sum(case.num_saved > 0 for case in told)} wrote a checkpoint"
    )


def again_without_loss(found: GuestOutcome) -> list[int]:
    """Return the steps that were computed again with no loss since the membership before began. A notice costs none."""
    struck, faults = found.struck, found.outcome.of("fault")
    losses = [(at, at) for at, event in struck if event.kind in _LOSSES]
    losses += [
        (at + event.lasts_s, at + event.lasts_s) for at, event in struck if event.kind == "split"
    ]  # it heals
    losses += [
        (
            note["at"],
            note["at"] + _KILLER_S * (note["how"] == "memory" or note["moment"] in cases.IN_RECOVERY),
        )
        for note in faults
        if note["how"] != "pause"
    ]
    first: dict[int, int] = {}
    began = {-1: 0.0}  # when each membership trained first
    wrong = []
    for note in sorted(found.outcome.of("try"), key=lambda each: each["at"]):
        step, under = note["step"], note["under"]
        began.setdefault(under, note["at"])
        if under > first.setdefault(step, under):
            first[step] = under
            since_s = began[max(each for each in began if each < under)]
            if not any(since_s < until_s and at < note["at"] for at, until_s in losses):
                wrong.append(step)
    return wrong


def stalls(found: GuestOutcome) -> list[tuple[str, float, float]]:
    """Return, for each event, how long no step was completed around its change of the membership."""
    done = sorted((note["at"], note["under"]) for note in found.outcome.of("done"))
    result = []
    for at, event in found.struck:
        before = [each for each in done if each[0] <= at]
        if not before or event.kind in ("all told", "started after the end", "late name"):
            continue
        under = max(epoch for _, epoch in before)
        after = next((when for when, epoch in done if when > at and epoch > under), None)
        if after is not None:
            last = max(when for when, epoch in done if when < after and epoch <= under)
            result.append((event.kind, after - last, after - last))
    return result

"""Random histories of trainings whose ranks an engine starts: losses, notices, moves, splits, a late name, an end.

The engine is this process, which starts ranks again as a shell's loop or torchrun does. Hosts are addresses of this
machine (127.A.B.C), or namespaces (`emulation`). All find each other by a name in a hosts file of their own, so an
address can change and a name can come late.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline_lab.emulation import ClusterSpec, EmulatedCluster
from paceline_lab.emulation.cluster import EmulatedHost
from paceline_lab.experiments.survival import cases
from paceline_lab.experiments.survival.job import (
    Job,
    Outcome,
    outcome_of_hosts,
    problems,
    read_notes,
    trained,
    wait_until,
)
from paceline_lab.experiments.survival.record import Case
from paceline_lab.experiments.survival.training import parser_of

MARK = "PACELINE_SURVIVAL_GUEST"
_TRAINING = "paceline_lab.experiments.survival.training"
_NAME = "trainers.test"
_EPOCHS, _LIMIT_S = 8, 240.0
_POLL_S, _RESTART_S, _BACK_S, _LEFT_S = 0.1, 0.5, 40.0, 30.0
_TOLD_CODES = (0, 143)
_BEGUN_AGAIN = "begin again: those before them were all lost"
_STOPPED = "Start all hosts again, from the last checkpoint"  # of two hosts that which breaks ties is lost
_KILLER_S = 5.0  # the kernel kills a rank that runs out of memory at most that late
_LOSSES = ("killed", "agent killed", "moved", "split", "agent and ranks stopped")
ENGINES = ("processes", "namespaces", "torchrun", "slurm", "ray")
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
    names = [name for name, share in zip(ENGINES, SHARES, strict=True) for _ in range(share)]
    return names[seed * 7 % len(names)]  # 7 and 50 have no common factor


def missing(engine: str) -> str:
    """Return why this engine cannot be tried here; empty if it can."""
    if engine in ("slurm", "ray"):
        return f"{engine} is tried by `make test-engines`, which installs it, with histories of its own"
    return "hosts need root" if os.geteuid() else ""


def random_guest_job(seed: int) -> GuestJob:
    """Draw a history. Two in three of one machine have one host, where ranks fail at random moments by themselves."""
    dice, engine = random.Random(f"guest {seed}"), engine_of(seed)
    if engine == "processes" and dice.random() < 0.6:
        return _on_one_host(dice, seed)
    num_hosts, per_host = dice.choice([(3, 1), (3, 2), (4, 1)])
    most = num_hosts + dice.choice([0, 1])
    kinds = ["killed", "agent killed", "moved", "moved", "told", "host told", "joined"]
    kinds += ["split"] * 3 * (engine == "namespaces")
    if engine == "torchrun":
        kinds = [kind for kind in kinds if kind != "told"]  # torchrun tells all of a host
    events = [Event("late name", lasts_s=dice.uniform(2, 6))] if dice.random() < 0.2 else []
    for _ in range(dice.randint(1, 3)):
        kind = dice.choice(kinds)
        lasts_s = dice.choice([1.5, 5.0, 12.0]) if kind == "split" else dice.uniform(1, 3)
        host = num_hosts if kind == "joined" else dice.randrange(num_hosts)
        if not (kind == "joined" and any(each.kind == "joined" for each in events)):
            events.append(Event(kind, host, dice.randint(4, 12), lasts_s))
    events.append(Event(dice.choice(["all told", "started after the end"])))
    options = [*_options(dice, num_hosts * per_host), "--epochs", str(_EPOCHS)]
    job = Job(num_hosts * per_host, per_host, tuple(options), seed=seed, limit_s=_LIMIT_S)
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


# ---- the engine


@dataclass
class _Place:
    """A host: its `address`, the start of its commands, and its hosts file."""

    address: str
    inside: Callable[[Sequence[str]], list[str]]
    hosts_file: Path
    host: EmulatedHost | None = None


@dataclass
class _Slot:
    """One process that the engine keeps alive: a rank, or the torchrun of a host."""

    host: int
    local: int
    process: subprocess.Popen[bytes]
    due_s: float | None = None  # when it is started again
    is_told: bool = False
    returns_s: float = 0.0  # after it was told
    has_ended: bool = False


class _Engine:
    """Starts processes, and starts them again unless they end with 0 or were told to."""

    def __init__(self, job: GuestJob, places: Sequence[_Place], folder: Path) -> None:
        self._job, self._places, self._folder = job, places, folder
        self.mark, self._token = uuid.uuid4().hex, uuid.uuid4().hex
        self.slots: list[_Slot] = []
        self.is_told = False  # all are: nothing is started again
        self.hold = folder / "hold"
        self.hold.touch()
        (folder / "record").mkdir()
        for host in range(len(places)):
            (folder / f"host{host}").mkdir()
        self.names = range(job.num_hosts)  # hosts that the name has
        self.per_host = job.job.num_ranks // job.num_hosts

    def start_host(self, host: int) -> None:
        for local in range(1 if self._job.engine == "torchrun" else self.per_host):
            self.slots.append(_Slot(host, local, self._start(host, local)))

    def _start(self, host: int, local: int) -> subprocess.Popen[bytes]:
        job, place = self._job.job, self._places[host]
        python = Path(job.python)
        command = [str(python), "-m", _TRAINING]
        if self._job.engine == "torchrun":
            command = [str(python.with_name("torchrun")), "--nnodes", "1", "--master-port", "0"]
            command += ["--nproc-per-node", str(self.per_host), "--max-restarts", "100", "-m", _TRAINING]
        command += [str(self._folder / f"host{host}"), "--hold", str(self.hold), *job.options]
        for fault in job.faults:
            command += ["--fault", str(fault)]
        environment = {
            **os.environ,
            MARK: f"{self.mark}-{host}",
            "OMP_NUM_THREADS": "1",
            "PACELINE_PEERS": "local" if self._job.num_hosts == 1 else f"dns:{_NAME}",
            "PACELINE_NODES": f"{max(1, self._job.num_hosts - 1)}:{self._job.most_hosts}",
            "PACELINE_MIN_RANKS": str(job.min_ranks),
            "PACELINE_RANKS_PER_HOST": str(self.per_host),
            "PACELINE_JOB": self.mark,
            "PACELINE_TOKEN": self._token,
            "PACELINE_JOB_FOLDER": str(self._folder / "record"),
            "PACELINE_JOIN_TIMEOUT": "8",
            "PACELINE_LOST_AFTER": f"{job.lost_after_s:g}",
        }
        if self._job.engine != "torchrun":
            environment["LOCAL_RANK"] = str(local)
        if place.host is None and self._job.num_hosts > 1:
            environment["PACELINE_LOCAL_ADDR"] = place.address
        with (self._folder / f"host{host}.txt").open("ab") as said:
            return subprocess.Popen(
                place.inside(command), stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment
            )

    def tend(self) -> None:
        """Start again what has ended."""
        for slot in self.slots:
            if slot.due_s is not None and self.is_told:
                slot.has_ended, slot.due_s = True, None
            elif slot.due_s is not None and time.monotonic() >= slot.due_s:
                slot.process, slot.due_s = self._start(slot.host, slot.local), None
            elif slot.due_s is None and not slot.has_ended and (code := slot.process.poll()) is not None:
                if code == 0 or self.is_told or (slot.is_told and not slot.returns_s):
                    slot.has_ended = True
                else:
                    slot.due_s = time.monotonic() + (slot.returns_s if slot.is_told else _RESTART_S)
                slot.is_told = False

    @property
    def has_ended(self) -> bool:
        return all(slot.has_ended for slot in self.slots)

    def pids(self, host: int, only_agent: bool = False) -> list[int]:
        """Return the processes of a host, as this namespace numbers them."""
        found, needle = [], f"{MARK}={self.mark}-{host}".encode()
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_agent = b"\0paceline.launch.elastic.guest\0" in (each / "cmdline").read_bytes()
                if needle in (each / "environ").read_bytes().split(b"\0") and (is_agent or not only_agent):
                    found.append(int(each.name))
        return found

    def kill(self, host: int, only_agent: bool = False) -> None:
        for pid in self.pids(host, only_agent):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def last_step(self) -> int:
        """Return the last step that a rank has completed."""
        return max((note["step"] for note in self.notes() if note["what"] == "done"), default=-1)

    def notes(self, host: str = "*") -> list[dict[str, Any]]:
        files = self._folder.glob(f"host{host}/rank-*.jsonl")
        return [note for file in files for note in read_notes(file)]

    def write_names(self) -> None:
        """Let the name have the addresses of its hosts."""
        for place in self._places:
            kept = [line for line in place.hosts_file.read_text().splitlines() if _NAME not in line]
            named = [f"{self._places[host].address} {_NAME}" for host in self.names]
            place.hosts_file.write_text("\n".join([*kept, *named, ""]))


def run_guest_job(job: GuestJob, folder: Path) -> GuestOutcome:
    """Run it, and wait for its end. Blocks, at most its `limit_s` and a minute."""
    with contextlib.ExitStack() as stack:
        num = job.num_hosts + 1
        if job.engine == "namespaces":
            cluster = stack.enter_context(EmulatedCluster(ClusterSpec(num, offload=False)))
            places = [_in_namespace(host) for host in cluster.hosts]
        else:
            places = [_on_this_machine(folder, host) for host in range(num)]
        engine = _Engine(job, places, folder)
        history = _History(job, engine, places)
        try:
            history.live()
        finally:
            ended_s = time.monotonic()
            codes = [slot.process.poll() for slot in engine.slots if slot not in history.late]
            left = 0
            if None not in codes:  # agents end with their last ranks
                wait_until(lambda: not any(engine.pids(host) for host in range(num)), ended_s + _LEFT_S)
                left = sum(len(engine.pids(host)) for host in range(num))
            for host in range(num):
                engine.kill(host)
            for slot in engine.slots:
                slot.process.wait()
    code = None if None in codes else next((c for c in codes if c not in _TOLD_CODES), 0)
    num_blows = sum(event.kind in _LOSSES for _, event in history.found.struck)
    outcome = outcome_of_hosts(folder, code, left, num_blows, ended_s)
    if engine.is_told or (job.engine == "torchrun" and outcome.code == 1 and outcome.models):
        outcome.code = outcome.code if outcome.code is None else 0  # torchrun ends with 1 if it was told
    return replace(history.found, outcome=outcome)


def _on_this_machine(folder: Path, host: int) -> _Place:
    """Return a host at an address of its own; what it runs has a hosts file of its own."""
    hosts_file = folder / f"hosts-{host}"
    hosts_file.write_text(Path("/etc/hosts").read_text())
    dice = random.Random(f"{folder} {host}")
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(hosts_file)]
    address = f"127.{dice.randint(1, 250)}.{dice.randint(1, 250)}.{dice.randint(1, 250)}"
    return _Place(address, lambda command: [*enter, *command], hosts_file)


def _in_namespace(host: EmulatedHost) -> _Place:
    return _Place(host.address, host.command, host.hosts_file, host)


class _History:
    """Lets the events of a job happen, one after the other."""

    def __init__(self, job: GuestJob, engine: _Engine, places: Sequence[_Place]) -> None:
        self._job, self._engine, self._places = job, engine, places
        self._dice = random.Random(job.job.seed)
        self._until_s = time.monotonic() + job.job.limit_s
        nothing = Outcome(None, "", [], [], 0)
        self.found = GuestOutcome(nothing)
        self.late: list[_Slot] = []  # started after the end

    def live(self) -> None:
        engine, events = self._engine, list(self._job.events)
        late = events[0].lasts_s if events[0].kind == "late name" else 0.0
        if not late:
            engine.write_names()
        for host in range(self._job.num_hosts):
            engine.start_host(host)
        if late:
            self._note(events.pop(0))
            time.sleep(late)
            engine.write_names()
        for event in events[:-1]:
            self._strike(event)
        last = events[-1]
        if last.kind == "all told":
            self._strike(last)
        engine.hold.unlink(missing_ok=True)
        self._wait(lambda: engine.has_ended)
        is_whole = all(slot.process.poll() == 0 for slot in engine.slots)
        if last.kind == "started after the end" and is_whole:
            self._start_late(last)

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
        here = [slot for slot in engine.slots if slot.host == event.host and slot.due_s is None]
        if event.kind in ("killed", "told"):
            here = [self._dice.choice(here)] if here else []
        at = self._note(event)
        if event.kind == "killed":
            for slot in here:
                slot.process.kill()
            if self._job.engine == "torchrun":  # ranks outlive a torchrun that is killed
                engine.kill(event.host)
        elif event.kind == "agent killed":
            engine.kill(event.host, only_agent=True)
        elif event.kind == "moved":
            self._move(event.host)
            if len({slot.host for slot in engine.slots}) <= self._job.most_hosts:
                is_back = functools.partial(self._trains, event.host, at + 0.2)
                self.found.moved += 1
                self.found.back += self._wait(is_back, _BACK_S)
        elif event.kind in ("told", "host told", "all told"):
            engine.is_told = event.kind == "all told"
            for slot in engine.slots if engine.is_told else here:
                slot.is_told, slot.returns_s = True, event.lasts_s
                slot.process.terminate()
        elif event.kind == "joined":
            engine.names = range(self._job.num_hosts + 1)
            engine.write_names()
            engine.start_host(event.host)
        elif event.kind == "split":
            self._split(event)

    def _trains(self, host: int, since_s: float) -> bool:
        notes = self._engine.notes(str(host))
        return any(note["what"] == "try" and note["at"] > since_s for note in notes)

    def _move(self, host: int) -> None:
        engine, place = self._engine, self._places[host]
        if place.host is not None:
            place.host.set_link(up=False)
        while engine.pids(host):
            engine.kill(host)
            time.sleep(_POLL_S)
        first, last = place.address.rsplit(".", 1)
        address = f"{first}.{int(last) % 250 + 1 if place.host is None else int(last) + 100}"
        if place.host is not None:
            device = f"dev {place.host.interface}"
            there = f"ip address flush {device} && ip address add {address}/24 {device}"
            subprocess.run(place.inside(["sh", "-c", there]), check=True)
            place.host.set_link(up=True)
        place.address = address
        engine.write_names()

    def _split(self, event: Event) -> None:
        """Cut a host, and half of the time another one, off the others."""
        cut = (
            {event.host, self._dice.randrange(self._job.num_hosts)}
            if self._job.num_hosts > 3
            else {event.host}
        )
        hosts = [place.host for number, place in enumerate(self._places) if number in cut]
        for up in (False, True):
            for host in hosts:
                assert host is not None
                host.set_link(up=up)
            if not up:
                self._wait(lambda: False, event.lasts_s)

    def _start_late(self, event: Event) -> None:
        """Start a host's ranks when the job has ended, as an engine does that has seen a node die."""
        engine = self._engine
        at, before = self._note(event), len(engine.slots)
        engine.start_host(event.host)
        late = self.late = engine.slots[before:]
        wait_until(lambda: all(slot.process.poll() is not None for slot in late), time.monotonic() + _BACK_S)
        self.found.late_codes = [slot.process.poll() for slot in late]
        self.found.late_trained = any(n["what"] == "try" and n["at"] > at for n in engine.notes())


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
        (note["at"], note["at"] + _KILLER_S * (note["how"] == "memory"))
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

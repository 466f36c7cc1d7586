"""Kill jobs that a shadow follows at random moments; measure what the shadow costs, next to other ways to save.

    paceline study shadow --cases 200          # seeds that the report has are left out
    paceline study shadow --cost --cases 5     # turns of 20 s a side: no shadow, a shadow, async_save, torch.save
    paceline study shadow --cost --free-core   # ranks share the machine's cores but one, which the shadow has
    paceline study shadow --cost --free-core --hosts   # as root: four emulated hosts of 1 Gbit/s, with a rank each
    paceline study shadow --cost --free-core --apart   # the same, and the shadow on a fifth
    paceline study shadow --spare --cases 20   # ranks are killed one after the other: how long the others stand still
    paceline study shadow --sharded --cases 50 # ranks with sharded steps are killed, which need the shadow's state
    paceline study shadow --sharded --hosts    # ranks of two or three hosts, which are addresses of this machine

A case kills all ranks at once, or ranks and shadow, or the shadow alone. Then the job is started again, and has to end
with the bits of a run that lost nothing. In `--cost` one job trains on while the sides take turns.
"""

import contextlib
import functools
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline_lab.checkout import in_repository
from paceline_lab.emulation import ClusterSpec, EmulatedCluster
from paceline_lab.experiments.options import REPORT_FOLDER, Quick, ReportFolder

sys.path.insert(0, str(in_repository("tests", "a Python that starts at once (tests/harness)")))

from harness import terminal  # found in the tests' folder

_TRAINING = ["-m", "paceline_lab.experiments.survival.shadow_training"]
_EPOCHS = 14  # of 15 steps
_PACES_S = (0.02, 0.05, 0.1)
_KINDS = ("ranks", "ranks", "ranks", "ranks and shadow", "shadow")
_SHARDED_KINDS, _SHARDED_EPOCHS = ("killed", "two killed", "told"), 100
_HOST = "host lost"  # which has no shadow
_FOLLOWS = "follows the training"
_TURN_S = 20.0


def main(
    cases: Annotated[int, typer.Option(min=1, help="Number of cases, or of turns of each side.")] = 200,
    first_seed: Annotated[int, typer.Option(help="Random seed of the first case. The others follow.")] = 0,
    cost: Annotated[bool, typer.Option(help="Instead: what a shadow costs.")] = False,
    free_core: Annotated[bool, typer.Option(help="With --cost: the shadow has a core of its own.")] = False,
    hosts: Annotated[bool, typer.Option(help="With --cost or --sharded: ranks on several hosts.")] = False,
    apart: Annotated[bool, typer.Option(help="With --cost: a host for the shadow, four for ranks.")] = False,
    spare: Annotated[bool, typer.Option(help="Instead: how fast it takes a lost rank's place.")] = False,
    sharded: Annotated[bool, typer.Option(help="Instead: kill ranks whose steps are sharded.")] = False,
    quick: Quick = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Kill trainings that a shadow follows, or measure what it costs them."""
    if cost:
        _measure(1 if quick else cases, report_folder, free_core, 5 if apart else 4 * hosts)
        return
    if spare:
        _lose_ranks(2 if quick else cases, report_folder)
        return
    path = report_folder / f"shadow{'-sharded' * sharded}{'-hosts' * (sharded and hosts)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    seeds = range(first_seed, first_seed + (2 if quick else cases))
    for seed in seeds:
        if seed not in {each["seed"] for each in stored}:
            found = _sharded_case(seed, hosts) if sharded else _case(seed)
            stored.append(found)
            with path.open("a") as lines:
                lines.write(json.dumps(found) + "\n")
            print(found, flush=True)
    chosen = [each for each in stored if each["seed"] in seeds]
    print(_sharded_words(chosen) if sharded else _words(chosen))


def _words(found: Sequence[dict[str, Any]]) -> str:
    lines = []
    for kind in dict.fromkeys(_KINDS):
        own = [each for each in found if each["kind"] == kind]
        lost = sorted(each["lost"] for each in own)
        if own:
            lines.append(
                f"{kind}: {len(own)} cases, {sum(each['is_equal'] for each in own)} ended with equal bits; steps lost: "
                f"median {statistics.median(lost):g}, most {lost[-1]}, at most one in {sum(n <= 1 for n in lost)}"
            )
    return "\n".join(lines)


def _command(num_ranks: int, folder: Path, kind: str, epochs: int, pace_s: float) -> list[str]:
    launch = ["paceline", "run", "--nproc-per-node", str(num_ranks), "--min-ranks", "1"]
    return [*launch, *_TRAINING, kind, str(folder), str(epochs), str(pace_s)]


def _case(seed: int) -> dict[str, Any]:
    """Return what became of one job."""
    drawn = random.Random(seed)
    num_ranks, pace_s, kind = drawn.randint(2, 4), drawn.choice(_PACES_S), drawn.choice(_KINDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = _command(num_ranks, folder, "small", 10_000, pace_s)
        shadow_words = ["--write-every", f"{drawn.uniform(0.2, 3.0):.2f}s", "--", *command[6:]]
        with terminal.started(command, folder) as job:
            pids = [int(_after(job.stdout, r"pid (\d+)")) for _ in range(num_ranks)]
            with terminal.started(["paceline", "shadow", "checkpoints", *shadow_words], folder) as shadow:
                _after(shadow.stderr, f"({_FOLLOWS})")
                time.sleep(drawn.uniform(0.0, 4.0))
                completed = max(int((folder / f"progress-{pid}").read_bytes()) for pid in pids)
                if kind == "shadow":
                    _kill(terminal.alive(shadow))
                    time.sleep(1.0)
                    goes_on = max(int((folder / f"progress-{pid}").read_bytes()) for pid in pids)
                    assert goes_on > completed, f"seed {seed}: the ranks stopped with their shadow"
                _send(pids, signal.SIGSTOP)  # else some go on without the first that is killed
                _kill(pids)
                if kind == "ranks and shadow":
                    _kill(terminal.alive(shadow))
                completed = max(int((folder / f"progress-{pid}").read_bytes()) for pid in pids)
                shadow.wait(terminal.DEADLINE_S)
                went_on = "go on after step" in job.communicate(timeout=terminal.DEADLINE_S)[1]
        found = sorted(folder.glob("checkpoints/step-*"))
        step = int(found[-1].name[5:]) if found else 0
        last = -(-(step + 20) // 15)  # so many epochs that some steps are left
        again = terminal.run(
            _command(num_ranks, folder, "small", last, 0.0), folder, {"PACELINE_RESUME": "checkpoints"}
        )
        begun = {int(each) for each in re.findall(r"begins after step (\d+)", again.out)}
    return {
        "seed": seed,
        "kind": kind,
        "num_ranks": num_ranks,
        "pace_s": pace_s,
        "completed": completed,
        "checkpoint": step,
        "lost": completed - step,
        "went_on": went_on,  # some ranks trained on before they were killed: other bits are right then
        "is_equal": _bits(again.out) == _undisturbed(num_ranks, last) and begun == {step},
        "load": os.getloadavg()[0],
    }


def _sharded_words(found: Sequence[dict[str, Any]]) -> str:
    events = [event for each in found for event in each["events"]]
    kinds = ", ".join(f"{events.count(kind)} {kind}" for kind in (*_SHARDED_KINDS, _HOST))
    return (
        f"{len(found)} cases with {kinds}: {sum(each['is_equal'] for each in found)} ended with equal bits; completed "
        f"steps that were undone: {sum(each['undone'] for each in found)}, most in a case "
        f"{max(each['undone'] for each in found)}"
    )


def _sharded_case(seed: int, on_hosts: bool) -> dict[str, Any]:
    """Return what became of one job whose ranks are lost, or leave, one after the other."""
    drawn = random.Random(f"sharded {seed} {on_hosts}")
    num_hosts = drawn.randint(2, 3) if on_hosts else 1
    ranks_per_host = drawn.randint(1, 2) if on_hosts else drawn.randint(2, 4)
    num_ranks, pace_s = num_hosts * ranks_per_host, drawn.choice(_PACES_S)
    kinds = (*_SHARDED_KINDS, *[_HOST] * on_hosts)
    events = [drawn.choice(kinds) for _ in range(drawn.randint(1, 3))]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        command = _command(ranks_per_host, folder, "sharded", _SHARDED_EPOCHS, pace_s)
        port = _free_port()

        def begin(host: int) -> Any:
            words = [*command]
            if on_hosts:
                options = (
                    f"--nnodes {num_hosts} --node-rank {host} --master-addr 127.79.0.1 --master-port {port}"
                )
                words[2:2] = [*options.split(), "--local-addr", f"127.79.0.{host + 1}"]
            return stack.enter_context(terminal.started(words, folder))

        def ranks_of(host: int, count: int) -> list[tuple[int, int]]:
            return [(host, int(_after(jobs[host].stdout, r"pid (\d+)"))) for _ in range(count)]

        jobs = {host: begin(host) for host in range(num_hosts)}
        ranks = list(itertools.chain.from_iterable(ranks_of(host, ranks_per_host) for host in jobs))
        _after(jobs[0].stderr, f"({_FOLLOWS})")
        for kind in events:
            time.sleep(drawn.uniform(0.0, 2.0))
            num_lost = min(2 if kind == "two killed" else 1, num_ranks - 1)
            lost = drawn.sample(ranks, num_lost)
            if kind == _HOST:
                host = drawn.randrange(1, num_hosts)
                lost = [each for each in ranks if each[0] == host]
                _kill([jobs[host].pid, *(pid for _, pid in lost)])
                jobs[host] = begin(host)
            else:
                _send([pid for _, pid in lost], signal.SIGTERM if kind == "told" else signal.SIGKILL)
            ranks = [each for each in ranks if each not in lost]
            for host, _ in lost:
                ranks += ranks_of(host, 1)
            _after(jobs[0].stderr, f"({num_ranks} ranks go on after step)")
        (folder / "hurry").touch()
        # a busy machine takes long for so many steps
        ended = [each.communicate(timeout=3 * terminal.DEADLINE_S) for each in jobs.values()]
    out, err = ("".join(each[place] for each in ended) for place in (0, 1))
    undone = [int(each) for each in re.findall(r"undone (\d+)", out)] or [-1]
    return {
        "seed": seed,
        "num_ranks": num_ranks,
        "num_hosts": num_hosts,
        "pace_s": pace_s,
        "events": events,
        "undone": max(undone),
        "is_equal": _bits(out) == _undisturbed(num_ranks, _SHARDED_EPOCHS, "logical"),
        "said": err if min(undone) < 0 else "",
        "load": os.getloadavg()[0],
    }


@functools.cache
def _undisturbed(num_ranks: int, num_epochs: int, kind: str = "small") -> set[str]:
    """Return the bits of a run that loses nothing."""
    with tempfile.TemporaryDirectory() as name:
        return _bits(terminal.run(_command(num_ranks, Path(name), kind, num_epochs, 0.0), Path(name)).out)


def _bits(out: str) -> set[str]:
    return set(re.findall(r"bits ([0-9a-f]{64})", out)) or {out}


def _free_port() -> int:
    with socket.create_server(("127.79.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _after(stream: Any, pattern: str) -> str:
    """Return what a pattern finds in the next line that has it."""
    for line in stream:
        if match := re.search(pattern, line):
            return match[1]
    raise AssertionError(f"{pattern} did not come")


def _kill(pids: Any) -> None:
    _send(pids, signal.SIGKILL)


def _send(pids: Any, number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _lose_ranks(num_ranks_lost: int, report_folder: Path) -> None:
    """Kill one rank after the other of a job with a spare, print how long the others stood still, and store it."""
    drawn, stalls_s = random.Random(0), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = _command(4, folder, "small", 100_000, _PACES_S[0])
        command[2:2] = ["--shadow", "checkpoints"]
        with terminal.started(command, folder) as job:
            pids = [int(_after(job.stdout, r"pid (\d+)")) for _ in range(4)]
            for _ in range(num_ranks_lost):
                _after(job.stderr, f"({_FOLLOWS})")
                time.sleep(drawn.uniform(0.5, 1.5))
                lost = pids.pop(drawn.randrange(4))
                stalls_s.append(_stall(folder / f"progress-{pids[0]}", lost))
                pids.append(int(_after(job.stderr, r"the shadow \(pid (\d+)\) takes the place")))
                _after(job.stderr, "(4 ranks go on after step)")
                print(f"{stalls_s[-1]:.3f} s, load {os.getloadavg()[0]:.1f}", flush=True)
            _kill(terminal.alive(job))
    report_folder.mkdir(parents=True, exist_ok=True)
    record = {"stalls_s": stalls_s, "load": os.getloadavg(), "cores": os.cpu_count()}
    (report_folder / "shadow-spare.json").write_text(json.dumps(record))
    worst = sorted(stalls_s)[max(0, -(-len(stalls_s) * 95 // 100) - 1)]
    print(f"{len(stalls_s)} ranks lost: median {statistics.median(stalls_s):.3f} s, p95 {worst:.3f} s")


def _stall(progress: Path, lost: int) -> float:
    """Kill a rank. Return the longest time between two steps of the rank that writes `progress`, of ten."""
    step, seen_s, longest_s = progress.read_bytes(), time.monotonic(), 0.0
    _kill([lost])
    for _ in range(10):
        while (now := progress.read_bytes()) == step:
            time.sleep(0.001)
        longest_s = max(longest_s, time.monotonic() - seen_s)
        step, seen_s = now, time.monotonic()
    return longest_s


@contextlib.contextmanager
def _timed_job(
    folder: Path, cores: Sequence[int], num_hosts: int
) -> Iterator[tuple[list[str], Callable[[Sequence[str]], list[str]]]]:
    """Start a job of four ranks. Yield what follows `paceline shadow`, and a function: the command that runs it.

    With emulated hosts the first four have a rank each. The shadow is on the first of them, or on a fifth.
    """
    command = _command(4, folder, "timed", 100_000, 0.0)
    script, options = command[-len(_TRAINING) - 4 :], list[str]()
    with contextlib.ExitStack() as stack:
        commands, environment = [_on(cores, command)], dict[str, str]()
        beside: Any = list
        if num_hosts:
            spec = ClusterSpec.parse(hosts=num_hosts, rate="1Gbit")
            hosts = stack.enter_context(EmulatedCluster(spec)).hosts
            environment = {"PACELINE_TOKEN": "of the study", "PACELINE_JOB": "timed", "PACELINE_NODES": "4:4"}
            peers = ",".join(each.address for each in hosts[:4])
            commands = []
            for host in hosts[:4]:
                own = _command(1, folder, "timed", 100_000, 0.0)
                own[2:2] = ["--peers", peers, "--local-addr", host.address]
                commands.append(host.command(_on(cores, own)))
            at, setting = (
                hosts[0 if num_hosts == 4 else 4],
                [f"{name}={it}" for name, it in environment.items()],
            )

            def beside(words: Sequence[str]) -> list[str]:
                return at.command(["env", *setting, *words])

            options = ["--peers", peers] if num_hosts > 4 else []
        jobs = [
            stack.enter_context(terminal.started(each, folder, environment, cold=True)) for each in commands
        ]
        for rank in range(4):
            _after(jobs[rank % len(jobs)].stdout, r"pid (\d+)")
        yield [*options, "--", *script], beside
        for each in jobs:
            _kill(terminal.alive(each))


def _measure(num_turns: int, report_folder: Path, has_free_core: bool, num_hosts: int) -> None:
    """Print the steps of each side, and store all times."""
    cores = sorted(os.sched_getaffinity(0))
    theirs, the_shadows = (cores[:-1], cores[-1:]) if has_free_core else (cores, cores)
    windows: dict[str, list[tuple[float, float]]] = {"none": [], "shadow": [], "async": [], "plain": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mode").write_text("none")
        with _timed_job(folder, theirs, num_hosts) as (script, beside):
            for turn in range(num_turns):
                for side in sorted(windows, key=lambda _: random.Random(turn).random()):
                    windows[side].append(_one_turn(side, folder, script, the_shadows, beside))
        times = [float(line) for line in (folder / "times").read_text().splitlines()]
        saves = [json.loads(line) for line in (folder / "saves").read_text().splitlines()]
    steps = {
        side: [
            later - sooner
            for begin, end in own
            for sooner, later in itertools.pairwise(times)
            if begin <= sooner and later <= end
        ]
        for side, own in windows.items()
    }
    report_folder.mkdir(parents=True, exist_ok=True)
    record = {"steps_s": steps, "saves": saves, "load": os.getloadavg(), "cores": [theirs, the_shadows]}
    name = (
        "shadow-cost"
        + "-free-core" * has_free_core
        + "-4x1-1000mbit" * (num_hosts > 0)
        + "-apart" * (num_hosts > 4)
    )
    (report_folder / f"{name}.json").write_text(json.dumps(record))
    base = statistics.median(steps["none"])
    for side, own in steps.items():
        ninety_nine = statistics.quantiles(own, n=100)[98]
        mean = statistics.fmean(own) / statistics.fmean(steps["none"])
        took = [done - taken for kind, taken, done in saves if kind == side]
        age = f", a save takes {statistics.median(took):.2f} s" if took else ""
        median = statistics.median(own)
        print(
            f"{side}: {len(own)} steps, median {median * 1e3:.1f} ms ({median / base:.3f}), "
            f"p99 {ninety_nine / statistics.quantiles(steps['none'], n=100)[98]:.3f}, mean {mean:.3f}{age}"
        )
    print(f"load {os.getloadavg()[0]:.1f}; ranks on cores {theirs}, the shadow on {the_shadows}")


def _on(cores: Sequence[int], command: Sequence[str]) -> list[str]:
    """Return a command that keeps to these cores, if it is no fork of another process."""
    return ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]


def _one_turn(
    side: str,
    folder: Path,
    script: Sequence[str],
    cores: Sequence[int],
    beside: Callable[[Sequence[str]], list[str]],
) -> tuple[float, float]:
    """Return when the side began and ended."""
    if side != "shadow":
        (folder / "mode").write_text(side)
        begin = time.time()
        time.sleep(_TURN_S)
        (folder / "mode").write_text("none")
        return begin, time.time()
    words = ["paceline", "shadow", "checkpoints", "--keep", "1", "--write-every", "10s", *script]
    with terminal.started(beside(_on(cores, words)), folder, cold=True) as shadow:
        _after(shadow.stderr, f"({_FOLLOWS})")
        begin = time.time()
        time.sleep(_TURN_S)
        end = time.time()
        shadow.send_signal(signal.SIGTERM)
        shadow.communicate(timeout=terminal.DEADLINE_S)
    return begin, end

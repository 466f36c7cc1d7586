"""Engines of the survival study's random histories, which start ranks again: this process, torchrun, Slurm or Ray."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engine_clusters import RAY_DRIVER, Host, RayCluster, Slurm
from paceline_lab.emulation.cluster import EmulatedHost
from paceline_lab.experiments.survival.job import read_notes, wait_until

if TYPE_CHECKING:
    from paceline_lab.experiments.survival.guests import GuestJob

MARK = "PACELINE_SURVIVAL_GUEST"
_TRAINING = "paceline_lab.experiments.survival.training"
_NAME = "trainers.test"
_AGENT = "paceline.elastic.guest"
_RESTART_S, _LOOK_S, _POLL_S = 0.5, 1.0, 0.1


class Engine(ABC):
    """Starts the ranks of a job, and starts them again. Ranks of host 2 leave their notes in the folder `host2`."""

    def __init__(self, job: GuestJob, folder: Path) -> None:
        self._job, self._folder = job, folder
        self.mark, self._token = uuid.uuid4().hex, uuid.uuid4().hex
        self.is_told = False  # all are: nothing is started again
        self.hold = folder / "hold"
        for each in ("record", "peers", *(f"host{host}" for host in range(job.num_hosts + 1))):
            (folder / each).mkdir()
        self.per_host = job.job.num_ranks // job.num_hosts
        self._num_started = job.num_hosts
        self.hold.touch()

    def settings(self, peers: str) -> dict[str, str]:
        """Return the variables of the ranks."""
        job, ranks = self._job, self._job.job
        return {
            "OMP_NUM_THREADS": "1",
            "PACELINE_PEERS": peers,
            "PACELINE_NODES": f"{max(1, job.num_hosts - 1)}:{job.most_hosts}",
            "PACELINE_MIN_RANKS": str(ranks.min_ranks),
            "PACELINE_RANKS_PER_HOST": str(self.per_host),
            "PACELINE_JOB": self.mark,
            "PACELINE_TOKEN": self._token,
            "PACELINE_JOB_FOLDER": str(self._folder / "record"),
            "PACELINE_JOIN_TIMEOUT": "8",
            "PACELINE_LOST_AFTER": f"{ranks.lost_after_s:g}",
        }

    def arguments(self, host: object) -> list[str]:
        """Return the training's arguments on a host."""
        return [str(self._folder / f"host{host}"), "--hold", str(self.hold), *self._job.job.options]

    def notes(self, host: str = "*") -> list[dict[str, Any]]:
        files = self._folder.glob(f"host{host}/rank-*.jsonl")
        return [note for file in files for note in read_notes(file)]

    def last_step(self) -> int:
        """Return the last step that a rank has completed."""
        return max((note["step"] for note in self.notes() if note["what"] == "done"), default=-1)

    @abstractmethod
    def start(self) -> None:
        """Start the ranks of all hosts with which the job begins."""

    @abstractmethod
    def tend(self) -> None:
        """Start again what has ended."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether nothing runs any more, and nothing is to be started again."""

    @abstractmethod
    def codes(self) -> list[int | None]:
        """Return the exit codes of the ranks that the job had at its end; None: one had to be ended."""

    @abstractmethod
    def kill_rank(self, host: int, dice: random.Random) -> None:
        """Kill a rank of this host."""

    @abstractmethod
    def kill_agent(self, host: int) -> None:
        """Kill the agent of this host."""

    @abstractmethod
    def move(self, host: int) -> None:
        """Kill all on a host, which comes back at another address."""

    @abstractmethod
    def tell(self, host: int | None, returns_s: float, one_of_it: random.Random | None) -> None:
        """Tell all ranks of a host to go, or one of them, or those of all hosts. They return after so long."""

    @abstractmethod
    def join(self, host: int) -> None:
        """Start one host more."""

    @abstractmethod
    def start_late(self, host: int, limit_s: float) -> list[int | None]:
        """Start a host's ranks when the job has ended, and return their exit codes."""

    @property
    def has_room(self) -> bool:
        """Return whether all hosts that were started may train."""
        return self._num_started <= self._job.most_hosts

    @abstractmethod
    def left(self) -> int:
        """Return how many processes of the job there still are."""

    @abstractmethod
    def close(self) -> None:
        """End what is left."""

    def know_names(self) -> None:
        """Let the name by which hosts find each other have their addresses. Here the engine itself knows them."""
        return


@dataclass
class Place:
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


class Loop(Engine):
    """This process. It starts processes again unless they end with 0 or were told to."""

    def __init__(self, job: GuestJob, places: Sequence[Place], folder: Path) -> None:
        super().__init__(job, folder)
        self._places = places
        self._slots: list[_Slot] = []
        self._late: list[_Slot] = []  # started after the end
        self._names = range(job.num_hosts)  # hosts that the name has

    def start(self) -> None:
        for host in range(self._job.num_hosts):
            self._start_host(host)

    def _start_host(self, host: int) -> None:
        for local in range(1 if self._job.engine == "torchrun" else self.per_host):
            self._slots.append(_Slot(host, local, self._start(host, local)))

    def _start(self, host: int, local: int) -> subprocess.Popen[bytes]:
        job, place = self._job.job, self._places[host]
        python = Path(job.python)
        command = [str(python), "-m", _TRAINING]
        if self._job.engine == "torchrun":
            command = [str(python.with_name("torchrun")), "--nnodes", "1", "--master-port", "0"]
            command += ["--nproc-per-node", str(self.per_host), "--max-restarts", "100", "-m", _TRAINING]
        command += self.arguments(host)
        for fault in job.faults:
            command += ["--fault", str(fault)]
        peers = "local" if self._job.num_hosts == 1 else f"dns:{_NAME}"
        environment = {**os.environ, MARK: f"{self.mark}-{host}", **self.settings(peers)}
        if self._job.engine != "torchrun":
            environment["LOCAL_RANK"] = str(local)
        if place.host is None and self._job.num_hosts > 1:
            environment["PACELINE_LOCAL_ADDR"] = place.address
        with (self._folder / f"host{host}.txt").open("ab") as said:
            return subprocess.Popen(
                place.inside(command), stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment
            )

    def tend(self) -> None:
        for slot in self._slots:
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
        return all(slot.has_ended for slot in self._slots)

    def codes(self) -> list[int | None]:
        return [slot.process.poll() for slot in self._slots if slot not in self._late]

    def _of(self, host: int, dice: random.Random | None = None) -> list[_Slot]:
        """Return what runs on this host, or one of that."""
        here = [slot for slot in self._slots if slot.host == host and slot.due_s is None]
        return [dice.choice(here)] if dice is not None and here else here

    def kill_rank(self, host: int, dice: random.Random) -> None:
        for slot in self._of(host, dice):
            slot.process.kill()
        if self._job.engine == "torchrun":  # ranks outlive a torchrun that is killed
            self._kill(host)

    def kill_agent(self, host: int) -> None:
        self._kill(host, only_agent=True)

    def tell(self, host: int | None, returns_s: float, one_of_it: random.Random | None) -> None:
        self.is_told = host is None
        for slot in self._slots if host is None else self._of(host, one_of_it):
            slot.is_told, slot.returns_s = True, returns_s
            slot.process.terminate()

    def join(self, host: int) -> None:
        self._names, self._num_started = range(host + 1), host + 1
        self.know_names()
        self._start_host(host)

    def move(self, host: int) -> None:
        place = self._places[host]
        if place.host is not None:
            place.host.set_link(up=False)
        while self._pids(host):
            self._kill(host)
            time.sleep(_POLL_S)
        first, last = place.address.rsplit(".", 1)
        address = f"{first}.{int(last) % 250 + 1 if place.host is None else int(last) + 100}"
        if place.host is not None:
            device = f"dev {place.host.interface}"
            there = f"ip address flush {device} && ip address add {address}/24 {device}"
            subprocess.run(place.inside(["sh", "-c", there]), check=True)
            place.host.set_link(up=True)
        place.address = address
        self.know_names()

    def start_late(self, host: int, limit_s: float) -> list[int | None]:
        before = len(self._slots)
        self._start_host(host)
        late = self._late = self._slots[before:]
        wait_until(lambda: all(slot.process.poll() is not None for slot in late), time.monotonic() + limit_s)
        return [slot.process.poll() for slot in late]

    def left(self) -> int:
        return sum(len(self._pids(host)) for host in range(len(self._places)))

    def close(self) -> None:
        for host in range(len(self._places)):
            self._kill(host)
        for slot in self._slots:
            slot.process.wait()

    def know_names(self) -> None:
        for place in self._places:
            kept = [line for line in place.hosts_file.read_text().splitlines() if _NAME not in line]
            named = [f"{self._places[host].address} {_NAME}" for host in self._names]
            place.hosts_file.write_text("\n".join([*kept, *named, ""]))

    def _pids(self, host: int, only_agent: bool = False) -> list[int]:
        """Return the processes of a host, as this namespace numbers them."""
        found, needle = [], f"{MARK}={self.mark}-{host}".encode()
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_agent = f"\0{_AGENT}\0".encode() in (each / "cmdline").read_bytes()
                if needle in (each / "environ").read_bytes().split(b"\0") and (is_agent or not only_agent):
                    found.append(int(each.name))
        return found

    def _kill(self, host: int, only_agent: bool = False) -> None:
        for pid in self._pids(host, only_agent):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class _OnCluster(Engine):
    """An engine with nodes of its own: the hosts. It runs on a further host, which no event hits."""

    def __init__(self, job: GuestJob, hosts: Sequence[EmulatedHost], folder: Path) -> None:
        super().__init__(job, folder)
        *self._nodes, self._head = [Host(each, folder) for each in hosts]
        self._num_moved, self._looked_s = 0, 0.0
        self._returns: dict[str, float] = {}  # what was told to go, and when it may run again

    def tend(self) -> None:
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._look()
            self._looked_s = time.monotonic()

    @abstractmethod
    def _look(self) -> None:
        """Ask the engine what runs, and let return what has to."""

    @abstractmethod
    def _start_node(self, host: int) -> None:
        """Start what the engine has on each node."""

    def kill_agent(self, host: int) -> None:
        self._nodes[host].kill(f" {_AGENT}")

    def move(self, host: int) -> None:
        node = self._nodes[host]
        node.lose_power()
        self._num_moved += 1
        others = [each for each in (*self._nodes, self._head) if each is not node]
        node.move_to(f"{node.address.rpartition('.')[0]}.{100 + self._num_moved}", others)
        self._start_node(host)

    def join(self, host: int) -> None:
        self._num_started = host + 1
        self._start_node(host)

    def left(self) -> int:
        words = (f" {_AGENT}", _TRAINING, "ray::Rank.")
        return sum(any(w in line for w in words) for n in self._nodes for line in n.processes().values())

    def close(self) -> None:
        for host in (*self._nodes, self._head):
            host.kill_all()


# Slurm ends a task's processes once its script has ended, so that it has to wait for torchrun as the recipe does.
_TASK = """#!/usr/bin/env bash
set -uo pipefail
ranks= told=
trap 'told=yes; [ -z "$ranks" ] || kill -TERM "$ranks"' TERM
torchrun --nnodes 1 --master-port 0 --nproc-per-node {per_host} --max-restarts 100 -m {arguments} &
ranks=$!
[ -z "$told" ] || kill -TERM "$ranks"
status=0
wait "$ranks" || status=$?
while kill -0 "$ranks" 2>/dev/null; do
  status=0
  wait "$ranks" || status=$?
done
exit "$status"
"""


def _tasks_of(numbers: str) -> list[str]:
    """Return the numbers of the tasks in a record of an array. Those that have never run share one, `0-2,4`."""
    found = re.findall(r"(\d+)-?(\d*)", numbers)
    return [str(each) for first, last in found for each in range(int(first), int(last or first) + 1)]


class SlurmArray(_OnCluster):
    """An array of Slurm tasks, of a node each, as in examples/clusters/elastic.sbatch."""

    def __init__(self, job: GuestJob, hosts: Sequence[EmulatedHost], folder: Path) -> None:
        super().__init__(job, hosts, folder)
        self._slurm = Slurm(self._head, self._nodes, folder / "slurm")
        self._tasks: dict[str, dict[str, str]] = {}
        self._array = ""

    def move(self, host: int) -> None:
        node = self._nodes[host]
        node.lose_power()
        # Otherwise Slurm misses for minutes that a young task is lost, because its node comes back at once.
        self._slurm.say("scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=lost")
        super().move(host)

    def _start_node(self, host: int) -> None:
        node = self._nodes[host]
        self._slurm.say("scontrol", "update", f"NodeName={node.name}", f"NodeAddr={node.address}")
        self._slurm.start_node(node)

    def start(self) -> None:
        num_hosts = self._job.num_hosts
        joins = any(event.kind == "joined" for event in self._job.events)  # its task waits for a node
        for host in range(num_hosts):
            self._start_node(host)
        self._slurm.wait_for_nodes(num_hosts)
        script = self._folder / "task.sbatch"
        arguments = " ".join([_TRAINING, *self.arguments("${SLURMD_NODENAME#host}")])
        script.write_text(_TASK.format(per_host=self.per_host, arguments=arguments))
        options = ["--parsable", "--requeue", "--nodes=1", "--open-mode=append", "--signal=B:TERM@25"]
        options += [f"--array=0-{num_hosts - 1 + joins}", f"--output={self._folder}/host%a.txt"]
        programs = os.pathsep.join((str(Path(self._job.job.python).parent), os.environ["PATH"]))
        setting = {**self.settings("slurm"), "PATH": programs}
        said = self._slurm.say("sbatch", *options, str(script), **setting)
        self._array = said.strip()
        if not self._array.isdecimal():
            raise RuntimeError(f"sbatch: {said}")
        self._look()

    def _look(self) -> None:
        said = self._slurm.say("scontrol", "show", "job", self._array)
        found = [dict(re.findall(r"(\w+)=(\S*)", each)) for each in said.split("\n\n")]
        for each in found:
            self._tasks |= dict.fromkeys(_tasks_of(each.get("ArrayTaskId", "")), each)
        for number, task in self._tasks.items():
            name = f"{self._array}_{number}"
            is_due = time.monotonic() >= self._returns.get(name, 0.0) and not self.is_told
            if task["JobState"] == "PENDING" and task.get("Restarts", "0") != "0" and is_due:
                self._slurm.run_now(name)

    def _state(self, number: str) -> str:
        return self._tasks[number]["JobState"]

    @property
    def has_ended(self) -> bool:
        ends = ("COMPLETED", "FAILED", "CANCELLED", *["PENDING"] * self.is_told)
        return bool(self._tasks) and all(self._state(number) in ends for number in self._tasks)

    def codes(self) -> list[int | None]:
        if not self.has_ended:
            return [None]
        return [0 if self._state(n) != "FAILED" else 1 for n in self._tasks]

    def kill_rank(self, host: int, dice: random.Random) -> None:
        lines = self._nodes[host].processes()
        ranks = [pid for pid, line in lines.items() if _TRAINING in line and "torchrun" not in line]
        if ranks:
            os.kill(dice.choice(sorted(ranks)), signal.SIGKILL)

    def tell(self, host: int | None, returns_s: float, one_of_it: random.Random | None) -> None:
        self.is_told = host is None
        if host is None:
            self._slurm.say("scancel", self._array)
            return
        for number, task in self._tasks.items():
            if task["JobState"] == "RUNNING" and task["NodeList"] == self._nodes[host].name:
                self._returns[f"{self._array}_{number}"] = time.monotonic() + returns_s
                self._slurm.say("scontrol", "requeue", f"{self._array}_{number}")

    def start_late(self, host: int, limit_s: float) -> list[int | None]:
        before = self._tasks["0"]["Restarts"]
        self._slurm.say("scontrol", "requeue", f"{self._array}_0")

        def is_done() -> bool:
            self.tend()
            return self._state("0") == "COMPLETED" and self._tasks["0"]["Restarts"] != before

        return [0 if wait_until(is_done, time.monotonic() + limit_s) else None]


class RayActors(_OnCluster):
    """Actors of Ray, one a node."""

    def __init__(self, job: GuestJob, hosts: Sequence[EmulatedHost], folder: Path) -> None:
        super().__init__(job, hosts, folder)
        self._cluster = RayCluster(self._head, folder / "ray", folder)
        self._drivers: list[subprocess.Popen[bytes]] = []

    def _start_node(self, host: int) -> None:
        self._cluster.start_node(self._nodes[host])

    def start(self) -> None:
        (self._folder / "driver.py").write_text(RAY_DRIVER)
        for host in range(self._job.num_hosts):
            self._start_node(host)
        self._drive(self._job.num_hosts)

    def _drive(self, num_ranks: int) -> None:
        (self._folder / "ranks").write_text(str(num_ranks))
        command = [sys.executable, str(self._folder / "driver.py"), self._cluster.address, str(self._folder)]
        command += [_TRAINING, *self.arguments("")]
        command[5] = str(self._folder / "@HOST")
        setting = self.settings(f"file:{self._folder / 'peers'}") | {"EXECUTABLE": self._job.job.python}
        self._drivers.append(self._head.start(command, SETTING=json.dumps(setting)))

    def _look(self) -> None:
        for name, at in list(self._returns.items()):
            if time.monotonic() >= at and not self.is_told:
                Path(name).unlink()
                del self._returns[name]

    @property
    def has_ended(self) -> bool:
        return self._drivers[0].poll() is not None

    def codes(self) -> list[int | None]:
        return [self._drivers[0].poll()]

    def kill_rank(self, host: int, dice: random.Random) -> None:
        self._nodes[host].kill("ray::Rank.")

    def tell(self, host: int | None, returns_s: float, one_of_it: random.Random | None) -> None:
        self.is_told = host is None
        if host is None:
            (self._folder / "stops").touch()
        for node in self._nodes if host is None else [self._nodes[host]]:
            notice = self._folder / f"notice-{node.address}"
            notice.touch()
            self._returns[str(notice)] = time.monotonic() + returns_s

    def join(self, host: int) -> None:
        super().join(host)
        (self._folder / "ranks").write_text(str(self._job.num_hosts + 1))

    def start_late(self, host: int, limit_s: float) -> list[int | None]:
        self._drive(1)
        driver = self._drivers[-1]
        wait_until(lambda: driver.poll() is not None, time.monotonic() + limit_s)
        return [driver.poll()]

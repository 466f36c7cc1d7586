"""Engines on one machine, whose hosts are network namespaces: Slurm and Ray, for their tests and the survival study."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.engine_jobs import wait_until
from harness.terminal import environment
from paceline_lab.emulation import EmulatedHost

SLURM = """
ClusterName=paceline
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
TreeWidth=65533
ReturnToService=2
SlurmdTimeout=30
KillWait=120
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
NodeName={nodes} CPUs=2 RealMemory=1000
PartitionName=all Nodes={nodes} Default=YES State=UP OverSubscribe=EXCLUSIVE
"""


class Host:
    """A host whose engine a test plays. It can lose its power, and come back at another address."""

    def __init__(self, inside: EmulatedHost, folder: Path) -> None:
        self.inside, self._folder = inside, folder
        self.name, self.address = inside.name, inside.address
        self._started: list[subprocess.Popen[bytes]] = []
        first = inside.hosts_file.parents[2]  # /proc/PID of the host's first process
        self._network = (first / "ns" / "net").readlink()

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of what is started here."""
        return environment(self._folder, cold=True) | {"ENGINE_HOST": self.name}

    def run(self, *command: str) -> None:
        """Run a command to its end."""
        subprocess.run(self.inside.command(command), check=True, capture_output=True)

    def start(self, command: Sequence[str], **setting: str) -> subprocess.Popen[bytes]:
        """Start a command. Its output goes to a file of the folder."""
        env = self.environment | setting
        with (self._folder / f"out-{self.name}").open("ab") as out:
            started = subprocess.Popen(
                self.inside.command(command),
                cwd=self._folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(started)
        return started

    def processes(self) -> dict[int, str]:
        """Return the command lines of what lives on this host, also of what others have started there."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                is_emulation = "paceline_lab.emulation.laboratory" in words or "namespaces.py" in words
                if words and not is_emulation and (entry / "ns" / "net").readlink() == self._network:
                    found[int(entry.name)] = words
        return found

    def kill(self, words: str) -> None:
        """Kill the processes whose command lines have these words."""
        for pid, line in self.processes().items():
            if words in line:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def lose_power(self) -> None:
        """Kill all processes of this host at once; its network goes first."""
        self.inside.set_link(up=False)
        self.kill_all()

    def kill_all(self) -> None:
        while self.processes():
            self.kill("")
        for each in self._started:
            each.wait()

    def move_to(self, address: str, knowing: Sequence[Host] = ()) -> None:
        """Take another address, as a new machine does in the place of a lost one. Hosts that know its name learn it."""
        interface = self.inside.interface
        self.run("ip", "address", "flush", "dev", interface)
        self.run("ip", "address", "add", f"{address}/24", "dev", interface)
        for host in (self, *knowing):  # torchrun meets at the host's own name
            names = host.inside.hosts_file
            old = rf"^{re.escape(self.address)}\b"
            names.write_text(re.sub(old, address, names.read_text(), flags=re.MULTILINE))
        self.inside.set_link(up=True)
        self.address = address

    def wait_until_empty(self) -> None:
        """Wait until no process is left."""
        wait_until(lambda: not self.processes(), lambda: f"{self.name} still has {self.processes()}")


class Slurm:
    """A cluster of Slurm: a controller and nodes, which are started one by one."""

    def __init__(self, controller: Host, nodes: Sequence[Host], folder: Path) -> None:
        self._controller, self._folder = controller, folder
        self._setting = {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "state").mkdir(parents=True)
        names = ",".join(node.name for node in nodes)
        (folder / "slurm.conf").write_text(
            SLURM.format(folder=folder, controller=controller.name, nodes=names)
        )
        controller.start(["slurmctld", "-D"], **self._setting)

    def start_node(self, node: Host) -> None:
        node.start(["slurmd", "-D", "-b", "-N", node.name], **self._setting)  # as if the machine had begun

    def wait_for_nodes(self, number: int) -> None:
        """Wait until so many nodes are idle."""
        wait_until(
            lambda: f"idle {number}" in self.say("sinfo", "--noheader", "--format=%T %D").splitlines(),
            lambda: f"Slurm did not start: {self.say('sinfo')}; see {self._folder}",
        )

    def say(self, *command: str, **setting: str) -> str:
        """Return what a command on the controller's host prints, with its errors."""
        out = self._folder / "said"
        with out.open("wb") as file:
            words = self._controller.inside.command(command)
            env = {**self._controller.environment, **self._setting, **setting}
            subprocess.run(
                words, check=False, env=env, cwd=self._folder.parent, stdout=file, stderr=file, timeout=60
            )
        return out.read_text()

    def start(self, command: list[str], **setting: str) -> subprocess.Popen[bytes]:
        """Start a command on the controller's host."""
        return self._controller.start(command, **self._setting, **setting)

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm says of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.say("scontrol", "show", "job", number)))

    def run_now(self, number: str) -> None:
        """Let a job that was queued again run at once, and not after two minutes."""
        self.say("scontrol", "update", f"JobId={number}", "StartTime=now")


class RayCluster:
    """A cluster of Ray: a head, and nodes with a core each, which are started one by one."""

    def __init__(self, head: Host, sessions: Path, out: Path) -> None:
        self.address, self._sessions = f"{head.address}:6379", sessions
        self._common = ["--disable-usage-stats", "--block", "--object-store-memory=80000000"]
        self._common += ["--include-log-monitor=false"]
        options = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false", "--no-monitor"]
        self._start(head, *options)
        said = out / f"out-{head.name}"
        wait_until(lambda: "Ray runtime started" in said.read_text(), said.read_text)

    def start_node(self, host: Host) -> None:
        self._start(host, f"--address={self.address}", "--num-cpus=1")

    def _start(self, host: Host, *which: str) -> None:
        # Ray gives a node 30 s to start, which no option changes. On a busy machine it may need more, so try again.
        again = ["sh", "-c", 'until "$@"; do sleep 1; done', "sh"]
        ray = [*again, sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
        # A folder for each node. Otherwise two nodes that start at once take the same names of sockets, and one fails.
        own = [f"--node-ip-address={host.address}", f"--temp-dir={self._sessions / host.name}"]
        setting = {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_worker_niceness": "0"}  # 15 by default
        host.start([*ray, *own, *self._common, *which], **setting)


# Each rank is an actor. Ray starts an actor whose process was lost again, and calls `train` again. An actor whose node
# goes soon returns 143, one whose agent was lost fails. Another one takes its place. The number of ranks is in a file,
# because it may grow.
RAY_DRIVER = """
import json, os, pathlib, runpy, sys, time
import ray

address, folder, *script = sys.argv[1:]
folder = pathlib.Path(folder)
ray.init(address=address, log_to_driver=False)

@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")
class Rank:
    def train(self, number, setting):
        node = ray.util.get_node_ip_address()
        notice = folder / f"notice-{node}"
        while notice.exists():
            if (folder / "stops").exists():  # all ranks are told to end: this one has not begun, and never does
                return 143
            time.sleep(0.1)
        sys.executable = setting.pop("EXECUTABLE", sys.executable)  # that starts the agent
        os.environ.pop("PYTHONBREAKPOINT", None)  # with this variable of Ray's a Python would not be warm
        os.environ.update(setting, PACELINE_LOCAL_ADDR=node, LOCAL_RANK=str(number))
        host = os.uname().nodename
        sys.argv = [each.replace("@HOST", host) for each in script]
        run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
        said = os.open(folder / f"{host}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1), os.dup2(said, 2)
        try:
            run(sys.argv[0], init_globals={"notice": notice.exists}, run_name="__main__")
        except SystemExit as left:
            return left.code
        return 0

setting = json.loads(os.environ["SETTING"])
waits, codes, begun, stops = {}, [], 0, folder / "stops"
def begin(number):
    actor = Rank.remote()
    waits[actor.train.remote(number, setting)] = number, actor

while waits or not begun:
    while begun < int((folder / "ranks").read_text()):
        begin(begun)
        begun += 1
    ended, _ = ray.wait(list(waits), num_returns=1, timeout=0.5)
    for each in ended:
        number, actor = waits.pop(each)
        try:
            codes.append(ray.get(each))
        except ray.exceptions.RayError as error:
            print(error, flush=True)
            codes.append(1)
        (folder / "codes").write_text(json.dumps(codes))
        if codes[-1] != 0 and not stops.exists():
            begin(number)
"""

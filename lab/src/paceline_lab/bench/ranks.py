"""Starting the ranks of a benchmark, as processes on loopback or on hosts of an emulated cluster.

Rules
1. A task is a function at the top level of a module. It goes to the ranks by name. Its configuration and its results
   are files of a private folder that is removed afterwards, even after SIGKILL.
2. Every rank is a process under torchrun's environment, with one thread and a Gloo group that is open already.
3. If one rank fails, all are stopped.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from paceline.errors import ConfigurationError
from paceline.launch import Watchdog, launch, parse
from paceline.launch.watchdog import MARK
from paceline_lab.bench import mpi, rank_program
from paceline_lab.bench.protocol import RanksFailedError
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.report.terminal import progress_bar

if TYPE_CHECKING:
    from typing_extensions import Self

    from paceline_lab.emulation import ClusterSpec, EmulatedCluster, Scenario


Config = TypeVar("Config")
Result = TypeVar("Result")
Task = Callable[[Config, TellProgress], Result]

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_POLL_S = 0.2
DEFAULT_RANKS = 2


class Ranks(ABC):
    """A place where tasks run, one after another; a context manager.

    Attributes:
        num_ranks: Number of processes of a task.
        rate_bytes_per_s: Rate of the slowest host's link; None where ranks share memory's speed.
        label: Part of file names, such as 4hosts or 2ranks.
    """

    num_ranks: int
    label: str
    rate_bytes_per_s: float | None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Rows for a report: where this was measured."""

    def run(
        self,
        task: Task[Config, Result],
        config: Config,
        title: str,
        environment: Mapping[str, str] | None = None,
    ) -> list[Result]:
        """Run `task(config, tell_progress)` on fresh processes and return the results by rank.

        Args:
            task: Called inside a Gloo group, on every rank.
            config: The same for every rank; must pickle.
            title: Text of the progress bar.
            environment: Variables of the processes.

        Raises:
            PacelineError: A rank raised, died, or could not be started; its own output says why.
        """
        variables = {**ONE_THREAD, **(environment or {})}
        with self._prepared(task, config, title) as (folder, _):
            self._start(["-m", "paceline_lab.bench.rank_program", str(folder)], variables)
            return self._results(folder, title)

    def run_mpi(
        self, task: Task[Config, Result], config: Config, title: str, *, tcp_only: bool
    ) -> list[Result]:
        """Run a task like `run`, but started by mpirun: no process group, and no torch that the task does not import.

        Args:
            task: Function that is called on every rank.
            config: Configuration, the same for every rank. It must pickle.
            title: Text of the progress bar.
            tcp_only: Whether ranks of one host talk over TCP as well, instead of shared memory.
        """
        with self._prepared(task, config, title) as (folder, launch_id):
            variables = {**os.environ, **ONE_THREAD, MARK: launch_id}
            with self._mpi_command(folder, variables, tcp_only=tcp_only) as command:
                done = subprocess.run(command, env=variables, stdout=sys.stderr, check=False)
            if done.returncode != 0:
                raise RanksFailedError(
                    f"mpirun ended with exit code {done.returncode} in {title!r}; its own output is above. "
                    f"The command was {shlex.join(command)}."
                )
            return self._results(folder, title)

    @contextmanager
    def _prepared(self, task: Task[Any, Any], config: Any, title: str) -> Iterator[tuple[Path, str]]:
        """Yield a folder with the task, watched for progress, and the mark by which the job's processes are ended."""
        launch_id = uuid.uuid4().hex
        with Watchdog(launch_id) as watchdog, progress_bar(title) as show:
            rank_program.save_task(watchdog.folder, task, config)
            with _watched(watchdog.folder, show):
                yield watchdog.folder, launch_id

    def _results(self, folder: Path, title: str) -> list[Any]:
        try:
            return [rank_program.read_result(folder, rank) for rank in range(self.num_ranks)]
        except FileNotFoundError as error:
            raise RanksFailedError(f"a rank left no result in {title!r}; its own output is above.") from error

    @abstractmethod
    def _start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run a program on every rank to its end; raise if one fails."""

    @abstractmethod
    def _mpi_command(
        self, folder: Path, environment: Mapping[str, str], *, tcp_only: bool
    ) -> contextlib.AbstractContextManager[list[str]]:
        """Words that run a folder's task under mpirun; they work inside the block."""


class LoopbackRanks(Ranks):
    """Processes of this machine."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ConfigurationError(
                f"--ranks-per-host {num_ranks} measures nothing. Pass 1 or more; 2 is a good start."
            )
        self.num_ranks, self.rate_bytes_per_s = num_ranks, None
        self.label = f"{num_ranks}ranks"

    def describe(self) -> dict[str, str]:
        return {"ranks": str(self.num_ranks), "network": "loopback: no rate, no latency, the cores copy"}

    @contextmanager
    def _mpi_command(
        self, folder: Path, environment: Mapping[str, str], *, tcp_only: bool
    ) -> Iterator[list[str]]:
        yield mpi.local_command(self.num_ranks, folder, tcp_only=tcp_only)

    def _start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        local = ["--standalone", "--local-addr", "127.0.0.1", "--share-devices"]
        with _environment({"GLOO_SOCKET_IFNAME": "lo", **environment}):
            launch(parse([*local, "--nproc-per-node", str(self.num_ranks), *words]), note=lambda _: None)


class ClusterRanks(Ranks):
    """Processes on the hosts of an emulated cluster, which stands from enter to exit.

    Args:
        spec: The cluster.
        scenario: Changes of the cluster during each task.
    """

    def __init__(self, spec: ClusterSpec, scenario: Scenario | None = None) -> None:
        self.spec = spec
        self.scenario = scenario
        self.num_ranks = spec.num_ranks
        self.rate_bytes_per_s = slowest_rate_bytes_per_s(spec)
        self.label = _label(spec)
        self.cluster: EmulatedCluster | None = None

    def __enter__(self) -> Self:
        from paceline_lab.emulation import EmulatedCluster  # noqa: PLC0415  # loopback needs none of it

        self.cluster = EmulatedCluster(self.spec)
        self.cluster.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.cluster is not None:
            self.cluster.__exit__(kind, error, trace)

    def describe(self) -> dict[str, str]:
        return {str(name): str(value) for name, value in dict(self.spec.describe()).items()}

    @contextmanager
    def _mpi_command(
        self, folder: Path, environment: Mapping[str, str], *, tcp_only: bool
    ) -> Iterator[list[str]]:
        assert self.cluster is not None
        with mpi.remote_start(self.cluster, folder, environment) as agent:
            yield mpi.cluster_command(self.cluster, folder, agent, tcp_only=tcp_only)

    def _start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        assert self.cluster is not None
        outcome = self.cluster.run(
            list(words), environment=environment, on_line=_to_stderr, scenario=self.scenario
        )
        if outcome.exit_code != 0:
            raise RanksFailedError(
                f"the ranks on host {outcome.failed_host} of the emulated cluster ended with exit code "
                f"{outcome.exit_code}. Their own message is above. Next: run without --hosts, "
                "which shows whether the network matters."
            )


def choose_place(hosts: int | None, *, ranks_per_host: int | str | None = None, **links: str | None) -> Ranks:
    """Return where to run; not entered yet.

    Args:
        hosts: Number of hosts of an emulated cluster; None: this machine, over loopback.
        ranks_per_host: Processes on each host, or one number a host, separated by commas. None: 1, on this machine 2.
        links: Options of ClusterSpec.parse, as strings; None: its default.

    Raises:
        ConfigurationError: A link is described without hosts, or the cluster cannot be.
    """
    given: dict[str, Any] = {name: value for name, value in links.items() if value is not None}
    if hosts is None:
        if given:
            names = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ConfigurationError(
                f"{names} shapes the links of an emulated cluster, and there is none on loopback. Pass --hosts N, "
                f"or drop {names}."
            )
        if ranks_per_host is None:
            return LoopbackRanks(DEFAULT_RANKS)
        words = str(ranks_per_host)
        if not words.strip().lstrip("+-").isdecimal():
            raise ConfigurationError(
                f"--ranks-per-host {words} is not a whole number, and without --hosts there is one host. Pass, for "
                "example, 2."
            )
        return LoopbackRanks(int(words))
    from paceline_lab.emulation import ClusterSpec  # noqa: PLC0415  # loopback needs none of it

    return ClusterRanks(
        ClusterSpec.parse(
            hosts=hosts, ranks_per_host=1 if ranks_per_host is None else ranks_per_host, **given
        )
    )


def slowest_rate_bytes_per_s(spec: ClusterSpec) -> float | None:
    """Return the rate of the slowest host, all its links together; None where none is limited."""
    rates = [rate for rate in (*spec.rate_bits_per_s, *spec.port_rate_bits_per_s) if rate is not None]
    return min(rates) / 8 * spec.links if rates else None


def _label(spec: ClusterSpec) -> str:
    rates = sorted({rate for rate in spec.rate_bits_per_s if rate is not None})
    words = [spec.shape, *[f"{rate / 1e6:g}mbit" for rate in rates[:1]]]
    return "-".join(words)


def _to_stderr(host: int, rank: int | None, text: str) -> None:
    who = "scenario" if host < 0 else f"host {host}{'' if rank is None else f', rank {rank}'}"
    print(f"[{who}] {text}", file=sys.stderr)


def gather(value: Result) -> list[Result]:
    """Return every rank's value, on every rank. Collective; call it outside timed regions."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def _watched(folder: Path, show: TellProgress) -> Iterator[None]:
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            show(rank_program.done_ratio(folder))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

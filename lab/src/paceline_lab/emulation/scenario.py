"""Changes of a running cluster as checked records, and scenarios that time them.

Rules
1. A change is checked against the cluster as it is by then, by the rules of `ClusterSpec`; a scenario as a whole
   before anything starts. What `ClusterSpec` would refuse, no change brings about.
2. Words are those of the command line: `cores` is --cpu, and so on.
3. A line of a scenario is a time, hosts and a change: `20s host1,host2 cores 25%`. `#` begins a comment. A host may
   be one of its links alone: `20s all/link1 rate 40Mbit`. The clock runs from the start of the job. Below a line
   `after WORDS` it starts anew: at the first line of output with WORDS after all changes above.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import quantities as q
from paceline.errors import ConfigurationError, PacelineError
from paceline_lab.emulation import quantities as sizes
from paceline_lab.emulation.cluster_spec import ClusterSpec

if TYPE_CHECKING:
    from typing_extensions import Self

_HOST = re.compile(r"(?:all|host(\d+))(?:/link(\d+))?")
_EXAMPLE = "a line is a time, hosts and a change, for example: 20s host1 cores 25%"
_KINDS = "cores 50%, rate 100Mbit, loss 1%, delay 5ms (of all hosts), link down or link up"


@dataclass(frozen=True)
class Change:
    """One property of one host, or of all, from now on.

    Attributes:
        kind: `cores`, `rate`, `loss`, `delay` or `link`.
        host: The host; None: all hosts.
        value: Cores, bits per second, fraction of the packets, seconds, or whether the link is up.
        link: Link of the host, for `rate`, `loss` and `link`; None: all, or of `link` the first.
    """

    kind: str
    host: int | None
    value: float
    link: int | None = None

    @classmethod
    def parse(cls, kind: str, host: int | None, value: str, link: int | None = None) -> Change:
        """A change from the words of the command line."""
        parsers: dict[str, Callable[[str, str], float]] = {
            "cores": q.percentage,
            "rate": q.rate,
            "loss": q.percentage,
            "delay": q.seconds,
            "link": _is_up,
        }
        if kind not in parsers:
            raise ConfigurationError(f"{kind!r} is nothing that can change; these can: {_KINDS}.")
        if link is not None and kind not in ("rate", "loss", "link"):
            raise ConfigurationError(f"{kind!r} is not a property of a link: write the host alone.")
        return cls(kind, host, parsers[kind](value, kind), link)

    def applied_to(self, spec: ClusterSpec) -> ClusterSpec:
        """The cluster after this change.

        Raises:
            ConfigurationError: There can be no such cluster, or not without building it again.
        """
        if self.host is not None and not 0 <= self.host < spec.hosts:
            raise ConfigurationError(f"there is no host{self.host}: {_hosts_of(spec)}.")
        if self.link is not None and not 0 <= self.link < spec.links:
            who = "a host" if self.host is None else f"host{self.host}"
            raise ConfigurationError(f"{who} has no link {self.link}; it has {spec.links}.")
        if self.kind == "cores":
            return self._with_cores(spec)
        if self.kind == "rate":
            return self._with_rate(spec)
        if self.kind == "loss":
            changed = replace(spec, loss_ratio=self._put(spec.loss_ratio))
            return changed if self.link is None else spec  # which says nothing of one link alone
        if self.kind == "delay":
            return self._with_delay(spec)
        return spec

    def _with_cores(self, spec: ClusterSpec) -> ClusterSpec:
        if all(cores is None for cores in spec.cores):
            raise ConfigurationError(
                "cores can change where hosts were given some: their processes belong to a quota from the start. "
                "Pass --cpu, for example --cpu 200%."
            )
        return replace(spec, cores=self._put(spec.cores))

    def _with_rate(self, spec: ClusterSpec) -> ClusterSpec:
        if spec.mark_bytes is not None or spec.drop_bytes is not None:
            raise ConfigurationError("the rate of ports that mark or drop by their backlog cannot change.")
        ports = spec.port_rate_bits_per_s
        if None in [rates[host] for rates in (spec.rate_bits_per_s, ports) for host in self._hosts(spec)]:
            raise ConfigurationError("a rate can change where there is one from the start. Pass --rate.")
        changed = replace(
            spec, rate_bits_per_s=self._put(spec.rate_bits_per_s), port_rate_bits_per_s=self._put(ports)
        )
        return changed if self.link is None else spec  # which says nothing of one link alone

    def _with_delay(self, spec: ClusterSpec) -> ClusterSpec:
        if self.host is not None:
            raise ConfigurationError("the delay is one for all hosts; write all in place of the host.")
        if not spec.delay_s:
            raise ConfigurationError(
                "a delay can change where there is one from the start: it is a process a link. Pass --delay, for "
                "example --delay 1ms."
            )
        if self.value <= 0:
            raise ConfigurationError("a link that has a delay keeps one; write 1us for the least.")
        return replace(spec, delay_s=self.value, jitter_s=0.0)

    def _hosts(self, spec: ClusterSpec) -> Sequence[int]:
        return range(spec.hosts) if self.host is None else [self.host]

    def _put(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(self.value if self.host in (None, host) else was for host, was in enumerate(values))

    def describe(self) -> str:
        """Return the change as a line of a scenario says it."""
        shows: dict[str, Callable[[float], str]] = {
            "cores": sizes.show_percentage,
            "rate": q.show_rate,
            "loss": sizes.show_percentage,
            "delay": q.show_seconds,
            "link": lambda up: "up" if up else "down",
        }
        where = "all" if self.host is None else f"host{self.host}"
        where += "" if self.link is None else f"/link{self.link}"
        return f"{where} {self.kind} {shows[self.kind](self.value)}"


@dataclass(frozen=True)
class Scene:
    """Changes by one clock.

    Attributes:
        changes: Pairs of seconds since the clock's start, and a change, in order of time.
        after: Words that a rank has to print for the clock to start; None: it starts with the job.
    """

    changes: tuple[tuple[float, Change], ...]
    after: str | None = None


@dataclass(frozen=True)
class Scenario:
    """Changes and when they happen.

    Attributes:
        scenes: One after another; each begins when the one before it is done and its words were said.
    """

    scenes: tuple[Scene, ...]

    @classmethod
    def read(cls, path: str) -> Scenario:
        """Read a scenario's file.

        Raises:
            ConfigurationError: There is none, or a line of it is wrong; names the line.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigurationError(f"--scenario {path} cannot be read: {reason}.") from error
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, name: str = "scenario") -> Scenario:
        """Return the scenario of a text; errors call it `name`."""
        scenes: list[tuple[str | None, list[tuple[float, Change]]]] = [(None, [])]
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.partition("#")[0].strip()
            try:
                if words.split(maxsplit=1)[:1] == ["after"]:
                    scenes.append((_after(words), []))
                elif words:
                    scenes[-1][1].extend(_changes(words))
            except ConfigurationError as error:
                raise ConfigurationError(f"{name}, line {number}: {error}") from error
        if not scenes[0][1]:
            del scenes[0]
        if not scenes:
            raise ConfigurationError(f"{name} holds no change; {_EXAMPLE}.")
        for after, changes in scenes:
            if not changes:
                raise ConfigurationError(f"{name} holds no change below `after {after}`; {_EXAMPLE}.")
        return cls(
            tuple(
                Scene(tuple(sorted(changes, key=lambda change: change[0])), after)
                for after, changes in scenes
            )
        )

    @property
    def changes(self) -> tuple[tuple[float, Change], ...]:
        """Return the changes of all scenes, with their times."""
        return tuple(change for scene in self.scenes for change in scene.changes)

    def check(self, spec: ClusterSpec) -> None:
        """Make sure that every change is possible on this cluster, in turn.

        Raises:
            ConfigurationError: One is not; names it. Nothing was started.
        """
        for at_s, change in self.changes:
            try:
                spec = change.applied_to(spec)
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"the scenario's change '{q.show_seconds(at_s)} {change.describe()}' is not possible: {error}"
                ) from error

    @property
    def needs_packets(self) -> bool:
        """Return whether single packets will matter though the cluster's start does not tell."""
        return any(change.kind == "loss" and change.value for _, change in self.changes)


class Director:
    """A context manager that performs a scenario during a job; its end is the scenario's.

    Args:
        scenario: Changes and their times.
        apply: Carries out one change.
        tell: Called with one line for everything that is done, from another thread.
    """

    def __init__(
        self, scenario: Scenario, apply: Callable[[Change], None], tell: Callable[[str], None]
    ) -> None:
        self._scenario, self._apply, self._tell = scenario, apply, tell
        self._over = threading.Event()
        self._said = [threading.Event() for _ in scenario.scenes]
        self._place = 0  # of the scene that is under way, or waits for its words
        self._awaited: str | None = None  # words that the scene at hand waits for
        self._num_done = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for said in self._said:
            said.set()
        self._thread.join()
        left = len(self._scenario.changes) - self._num_done
        if left:
            why = f"no rank said {self._awaited!r}" if self._awaited is not None else "the job had ended"
            self._tell(f"{left} of {len(self._scenario.changes)} change(s) did not happen: {why}")

    def hear(self, text: str) -> None:
        """A line of a rank's output: it may start the clock."""
        place = self._place
        words = self._scenario.scenes[place].after
        if words is not None and words in text:
            self._said[place].set()

    def _run(self) -> None:
        for place, scene in enumerate(self._scenario.scenes):
            self._place, self._awaited = place, scene.after
            if scene.after is not None:
                self._said[place].wait()
            if self._over.is_set():
                return
            self._awaited = None
            if not self._play(scene):
                return

    def _play(self, scene: Scene) -> bool:
        """Return whether all of a scene's changes were carried out."""
        started_s = time.monotonic()
        for at_s, change in scene.changes:
            if self._over.wait(max(0.0, started_s + at_s - time.monotonic())):
                return False
            try:
                self._apply(change)
            except PacelineError as error:  # the job goes on without it
                self._tell(f"{change.describe()} failed: {error}")
                return False
            self._num_done += 1
            self._tell(f"{time.monotonic() - started_s:.1f} s: {change.describe()}")
        return True


def _after(line: str) -> str:
    words = line.removeprefix("after").strip()
    if not words:
        raise ConfigurationError(
            "`after WORDS` says what a rank's output has to contain, such as: after step 10."
        )
    return words


def _changes(line: str) -> list[tuple[float, Change]]:
    words = line.split(maxsplit=3)
    if len(words) != 4:
        raise ConfigurationError(f"{_EXAMPLE}.")
    when, hosts, kind, value = words
    at_s = q.seconds(when, "the time")
    if at_s < 0:
        raise ConfigurationError(f"the time {when} lies before the start.")
    return [(at_s, Change.parse(kind, host, value, link)) for host, link in _places(hosts)]


def _places(text: str) -> list[tuple[int | None, int | None]]:
    """Pairs of a host, None for all, and one of its links, None for all."""
    found = [_HOST.fullmatch(name) for name in text.split(",")]
    places = [
        tuple(None if number is None else int(number) for number in place.groups())
        for place in found
        if place
    ]
    if len(places) != len(found):
        raise ConfigurationError(f"{text!r} names no hosts; write host1, host0,host2, all or host1/link0.")
    return [(host, link) for host, link in places]


def _hosts_of(spec: ClusterSpec) -> str:
    return "there is host0 alone" if spec.hosts == 1 else f"there are host0 to host{spec.hosts - 1}"


def _is_up(text: str, option: str) -> float:
    if text not in ("up", "down"):
        raise ConfigurationError(f"{option} {text!r} is neither up nor down.")
    return float(text == "up")

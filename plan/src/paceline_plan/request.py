"""`PlanRequest`: what the command line of `paceline plan` says, checked; what it leaves out is measured or assumed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import quantities
from paceline.errors import ConfigurationError
from paceline.planning.bucket_assignment import MEBIBYTE
from paceline.schedules.topology import Link
from paceline_plan.deployment import DEFAULT_CAPS_BYTES, Cluster, HostLink, ReductionPlan, Servers
from paceline_plan.links_here import LinkHere
from paceline_plan.round_patterns import ALL_REDUCES
from paceline_plan.workload import RecordedWorkload

DEFAULT_STEPS = 20
_RANKS_PER_HOST = 8
_MOST_DEVICES = 1_000_000
_LEAST_BYTES_PER_S = 1 / 8
_LONGEST_LATENCY_S = 3600.0
ASSUMED = {"rate": "25Gbit", "latency": "30us", "ranks_per_host": str(_RANKS_PER_HOST), "within": "800Gbit"}
_COLLECTIVE_S = 3e-5  # of a library, for one collective; NCCL's launches are of that order
_MESSAGE_S = 5e-6  # of a further message in a round


@dataclass(frozen=True)
class PlanRequest:
    """The options of the command line; None if not given, and then measured on these hosts or taken from `ASSUMED`."""

    source: str  # a script, a file with a workload, a trace or a profile, or the name of a shipped workload
    arguments: tuple[str, ...] = ()  # of the script
    to: int = 256  # the largest number of devices
    steps: int | None = None  # to record; None: `DEFAULT_STEPS`
    ranks_per_host: int | None = None  # devices a host
    rate: str | None = None  # of each host's link, in words
    latency: str | None = None  # of a round between hosts, in words
    within: str | None = None  # rate within a host, all its devices together, in words
    loss: str | None = None  # of packets, in words
    bucket_cap_mb: float | None = None  # none: torch's default, 1 and then 25 MiB
    algorithm: str = "ring"  # of the all-reduce
    half: bool = False  # gradients travel in 16 bits
    sync_every: int | None = None  # micro-steps a synchronization, which is a step; None: as recorded
    servers: int = 0  # parameter servers; 0: an all-reduce
    server_rate: str | None = None  # of each server's link, in words; None: as the hosts'
    batch: int | None = None  # samples a device and forward; None: as recorded
    epoch_samples: int | None = None  # none: epochs are not asked for
    price: float | None = None  # of a device and hour
    scratch: bool = False  # the script runs in a copy of the folder
    link_here: LinkHere | None = None  # measured between the hosts that it runs on; None: they are one

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> PlanRequest:
        """Make a request from the command line's options, by name; those that are no field are left out."""
        fields = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in options.items() if name in fields}
        return cls(**{**given, "arguments": tuple(given.get("arguments") or ())})

    def __post_init__(self) -> None:
        if not 1 <= self.to <= _MOST_DEVICES:
            raise ConfigurationError(f"--to {self.to} must be from 1 to {_MOST_DEVICES:,} devices.")
        for option in ("ranks_per_host", "batch", "epoch_samples", "steps"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigurationError(
                    f"--{option.replace('_', '-')} {value} is not possible. Pass 1 or more."
                )
        if self.servers < 0:
            raise ConfigurationError(
                f"--servers {self.servers} is not possible. Pass 1 or more, or 0 for an all-reduce."
            )
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ConfigurationError(
                f"--price {self.price} is not possible. Pass the price of a device and hour."
            )
        cap = self.bucket_cap_mb
        if cap is not None and not cap >= 0:
            raise ConfigurationError(f"--bucket-cap-mb {cap} is not possible. Pass MiB, 0 or more.")
        if self.algorithm not in ("auto", *ALL_REDUCES):
            raise ConfigurationError(
                f"--algorithm {self.algorithm} is not one. Pass auto, or one of {', '.join(ALL_REDUCES)}."
            )
        self._refuse_what_would_be_ignored()
        self.plan()
        self.cluster(self.to)

    def _refuse_what_would_be_ignored(self) -> None:
        is_script = self._is_script()
        ignored = {
            "--price": ("--epoch-samples, the samples of an epoch", self.epoch_samples, self.price),
            "--server-rate": ("--servers, how many there are", self.servers, self.server_rate),
            "--steps": ("a script: nothing else is recorded", is_script, self.steps),
            "--scratch": ("a script: nothing else is run", is_script, self.scratch or None),
            "arguments": ("a script: nothing else takes any", is_script, self.arguments),
        }
        for option, (needed, has_it, value) in ignored.items():
            if not has_it and value not in (None, ()):
                raise ConfigurationError(f"{option} {value} would change nothing without {needed}.")
        if self.servers and self.algorithm != "ring":
            raise ConfigurationError(
                f"--algorithm {self.algorithm} would change nothing: with --servers there is no all-reduce."
            )

    def cluster(self, num_ranks: int) -> Cluster:
        """Return the cluster of so many devices."""
        latency_s, message_s = self._latency_s()
        loss_ratio = 0.0 if self.loss is None else quantities.percentage(self.loss, "--loss")
        link = HostLink(self._link_bytes_per_s(), latency_s, loss_ratio, message_s)
        within = Link(5e-6, self._rate("within"))
        per_host = self.ranks_per_host or (
            _RANKS_PER_HOST if self.link_here is None else self.link_here.ranks_per_host
        )
        made = Cluster.of_equal_hosts(num_ranks, link, per_host, within)
        return dataclasses.replace(made, collective_s=_COLLECTIVE_S)

    def plan(self, recorded_micro_steps: int = 1) -> ReductionPlan:
        """Return how gradients are reduced, for a workload that was recorded with so many micro-steps per step."""
        cap = self.bucket_cap_mb
        caps: tuple[float, ...] = DEFAULT_CAPS_BYTES if cap is None else (cap * MEBIBYTE,)
        servers = None
        if self.servers:
            rate = self._link_bytes_per_s() if self.server_rate is None else self._rate("server_rate")
            servers = Servers(self.servers, rate)
        return ReductionPlan(
            caps,
            self.algorithm,
            payload_ratio=0.5 if self.half else 1.0,
            sync_every=recorded_micro_steps if self.sync_every is None else self.sync_every,
            servers=servers,
        )

    def _link_bytes_per_s(self) -> float:
        if self.rate is None and self.link_here is not None:
            return self.link_here.bytes_per_s
        return self._rate("rate")

    def _latency_s(self) -> tuple[float, float]:
        """Return the latency of a round between hosts, and of a further message in it."""
        if self.latency is None and self.link_here is not None:
            return self.link_here.latency_s, self.link_here.message_s
        latency_s = quantities.seconds(self.latency or ASSUMED["latency"], "--latency")
        if latency_s > _LONGEST_LATENCY_S:
            raise ConfigurationError(
                f"--latency {self.latency} is too long for a message. Pass a time such as 30us."
            )
        return latency_s, _MESSAGE_S

    def _rate(self, name: str) -> float:
        text = getattr(self, name) or ASSUMED[name]
        rate = quantities.rate(text, f"--{name.replace('_', '-')}") / 8
        if rate < _LEAST_BYTES_PER_S:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} {text} carries nothing. Pass a rate above 0, 1bit or more."
            )
        return rate

    def assumptions(self, recorded_micro_steps: int = 1) -> str:
        """Return the options that were assumed, in words; empty if all were given or measured."""
        missing = {name: ASSUMED[name] for name in ASSUMED if self.origin(name) == "assumed"}
        if recorded_micro_steps > 1 and self.sync_every is None:
            missing["sync_every"] = f"{recorded_micro_steps} (as recorded)"
        return ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in missing.items())

    def origin(self, name: str) -> str:
        """Return where a figure of `ASSUMED` comes from: "given", "measured" or "assumed"."""
        if getattr(self, name) is not None:
            return "given"
        return "assumed" if self.link_here is None or name == "within" else "measured"

    def links(self) -> dict[str, Any]:
        """Return the figures of the link between hosts, and the source of each, in bytes per second and seconds."""
        return {
            "rate": {"bytes_per_s": self._link_bytes_per_s(), "from": self.origin("rate")},
            "latency": {"s": self._latency_s()[0], "from": self.origin("latency")},
            "within": {"bytes_per_s": self._rate("within"), "from": self.origin("within")},
            "measured": None if self.link_here is None else dataclasses.asdict(self.link_here),
        }

    def link_words(self) -> str:
        """Return the figures of the link between hosts in one line."""
        rate = quantities.show_rate(8 * self._link_bytes_per_s())
        words = (
            f"link between hosts: {rate} ({self.origin('rate')}), {quantities.show_seconds(self._latency_s()[0])} a "
            f"round ({self.origin('latency')})"
        )
        here = self.link_here
        if here is not None:
            shared = ", which share a machine, with what that costs" if here.on_one_machine else ""
            return (
                f"{words}; measured over TCP between the {here.num_hosts} hosts here{shared}: "
                f"{quantities.show_rate(8 * here.bytes_per_s)}, {quantities.show_seconds(here.latency_s)} a round"
            )
        if "assumed" in (self.origin("rate"), self.origin("latency")):
            words += "; this is one host, which has no such link to measure (as a job on several hosts it is measured)"
        return words

    def workload(self) -> RecordedWorkload:
        """Record the script (RecordingError if it fails), or read the workload (ConfigurationError if none)."""
        path = Path(self.source)
        if self._is_script():
            from paceline_plan.script_recording import record_script  # noqa: PLC0415  the launcher imports torch

            found = record_script(path, self.arguments, self.steps or DEFAULT_STEPS, scratch=self.scratch)
        elif path.exists() or path.suffix:
            found = RecordedWorkload.load(path)
        else:
            found = RecordedWorkload.shipped(self.source)
        if self.batch is None:
            return found
        return dataclasses.replace(found, samples_per_step=self.batch * found.num_micro_steps)

    def _is_script(self) -> bool:
        return Path(self.source).suffix == ".py"

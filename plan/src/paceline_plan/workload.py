"""A training step as it was recorded: how long each layer computes, and how many bytes of gradients it produces.

`RecordedWorkload.load` reads two kinds of file. A *trace* is what `record_workload` writes while a script
trains: a header, then a line per step. So what was written before a crash can be read. A *workload* is what follows
from it: medians, as one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, median_low, mode
from typing import Any

from paceline.errors import ConfigurationError

WORKLOAD_FORMAT, WORKLOAD_VERSION = "paceline workload", 1
TRACE_FORMAT, TRACE_VERSION = "paceline trace", 1
NUM_WARM_UP = 2  # steps at the beginning of a trace, which do not count
RECORD_AGAIN = "Record it again with `paceline plan record SCRIPT`."
_SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class LayerTimes:
    """One layer; its gradients become ready together.

    Attributes:
        name: The module's.
        forward_s: Of its forward.
        backward_s: From the layer before it in backward to its own last gradient.
        gradient_bytes: One a parameter.
    """

    name: str
    forward_s: float
    backward_s: float
    gradient_bytes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.gradient_bytes)


@dataclass(frozen=True)
class RecordedWorkload:
    """One training step of one device, without communication.

    Attributes:
        name: The model's or script's.
        source: Where the times are from, in words for a report.
        layers: In the order of forward.
        optimizer_s: After the last backward: clipping, the optimizer.
        other_s: Before the forward of each micro-step, such as loading data.
        samples_per_step: Of one device, in all micro-steps; None if unknown.
        relative_steps: Computing of each recorded micro-step over the median: how it varies. Empty: it does not.
        ready_order: Indices into `layers` in the order in which their gradients are ready. Empty: the last first.
        num_micro_steps: How many forwards and backwards, each of `layers`, a step had when it was recorded.
    """

    name: str
    source: str
    layers: tuple[LayerTimes, ...]
    optimizer_s: float = 0.0
    other_s: float = 0.0
    samples_per_step: int | None = None
    relative_steps: tuple[float, ...] = ()
    ready_order: tuple[int, ...] = ()
    num_micro_steps: int = 1

    def __post_init__(self) -> None:
        times = [self.optimizer_s, self.other_s]
        times += [seconds for layer in self.layers for seconds in (layer.forward_s, layer.backward_s)]
        sizes = [size for layer in self.layers for size in layer.gradient_bytes]
        if not all(0 <= x < math.inf for x in (*times, *sizes)):
            raise ConfigurationError(
                f"the workload {self.name} has times or sizes that are below 0 or not finite: a step cannot be "
                f"predicted from them. {RECORD_AGAIN}"
            )
        if not any(sizes):
            raise ConfigurationError(
                f"the workload {self.name} has no gradients: there is nothing to reduce, and nothing to plan."
            )
        if self.samples_per_step is not None and self.samples_per_step < 1:
            raise ConfigurationError(
                f"the workload {self.name} has steps of {self.samples_per_step} samples: 1 or more. {RECORD_AGAIN}"
            )
        if not all(0 < ratio < math.inf for ratio in self.relative_steps):
            raise ConfigurationError(
                f"the workload {self.name} has a recorded step without a duration. {RECORD_AGAIN}"
            )
        if self.ready_order and sorted(self.ready_order) != list(range(len(self.layers))):
            raise ConfigurationError(
                f"the workload {self.name}: its ready order does not name every layer once."
            )
        if self.num_micro_steps < 1:
            raise ConfigurationError(
                f"the workload {self.name} has steps of {self.num_micro_steps} micro-steps. {RECORD_AGAIN}"
            )

    @property
    def order(self) -> tuple[int, ...]:
        """Return the indices of the layers in the order in which their gradients become ready."""
        return self.ready_order or tuple(reversed(range(len(self.layers))))

    @property
    def forward_s(self) -> float:
        """Return the seconds of forward in one micro-step."""
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        """Return the seconds of backward in one micro-step."""
        return sum(layer.backward_s for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Return the seconds of a step on one device alone."""
        return self.num_micro_steps * (self.forward_s + self.backward_s + self.other_s) + self.optimizer_s

    @property
    def gradient_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)

    def ready_gradients(self) -> list[tuple[float, int]]:
        """Return pairs for every gradient, in the order of readiness: seconds since backward began, and bytes."""
        found, now_s = [], 0.0
        for index in self.order:
            now_s += self.layers[index].backward_s
            found += [(now_s, size) for size in reversed(self.layers[index].gradient_bytes)]
        return found

    def taking(self, compute_ratio: float) -> RecordedWorkload:
        """Return this workload on a device whose computing takes `compute_ratio` times as long."""
        layers = tuple(
            LayerTimes(x.name, x.forward_s * compute_ratio, x.backward_s * compute_ratio, x.gradient_bytes)
            for x in self.layers
        )
        return replace(self, layers=layers, optimizer_s=self.optimizer_s * compute_ratio)

    def save(self, path: Path) -> None:
        """Write it as one JSON object.

        Raises:
            ConfigurationError: It cannot be written.
        """
        record = {"format": WORKLOAD_FORMAT, "version": WORKLOAD_VERSION, **dataclasses.asdict(self)}
        layers = ",\n ".join(map(json.dumps, record.pop("layers")))  # a line each
        try:
            path.write_text(f'{json.dumps(record)[:-1]}, "layers": [\n {layers}\n]}}\n')
        except OSError as error:
            raise ConfigurationError(
                f"the workload {path} cannot be written ({error.strerror}). Pass another file."
            ) from error

    @classmethod
    def shipped(cls, name: str) -> RecordedWorkload:
        """Read one that comes with Paceline.

        Raises:
            ConfigurationError: There is none of this name.
        """
        names = shipped_names()
        if name not in names:
            raise ConfigurationError(
                f"{name!r} is neither a file nor a shipped workload. Pass a script, a recorded workload, or one of "
                f"{', '.join(names)}."
            )
        return cls.load(_SHIPPED / f"{name}.json")

    @classmethod
    def load(cls, path: Path) -> RecordedWorkload:
        """Read a workload or a trace.

        Raises:
            ConfigurationError: It cannot be read, is of another version, or holds no complete step.
        """
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ConfigurationError(
                f"the workload {path} cannot be read ({reason}). {RECORD_AGAIN}"
            ) from error
        header = parsed(text.partition("\n")[0])
        is_trace = isinstance(header, dict) and header.get("format") == TRACE_FORMAT
        record = header if is_trace else parsed(text)
        try:
            if is_trace:
                check_version(record, TRACE_VERSION, path)
                return _from_trace(record, text.splitlines()[1:], path)
            if isinstance(record, dict) and record.get("format") == WORKLOAD_FORMAT:
                check_version(record, WORKLOAD_VERSION, path)
                return _from_record(record)
        except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
            if isinstance(error, ConfigurationError):
                raise
            kind = "trace" if is_trace else "workload"
            raise ConfigurationError(
                f"the {kind} {path} is damaged ({type(error).__name__}: {error}). {RECORD_AGAIN}"
            ) from error
        found = "other JSON" if record is not None else "not JSON, or cut off in the middle"
        if not text.strip():
            found = "empty"
        raise ConfigurationError(f"{path} is neither a workload nor a trace: it is {found}. {RECORD_AGAIN}")


def shipped_names() -> list[str]:
    """Return the workloads that come with Paceline."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def _from_record(record: Mapping[str, Any]) -> RecordedWorkload:
    layers = tuple(
        LayerTimes(
            str(x["name"]),
            float(x["forward_s"]),
            float(x["backward_s"]),
            tuple(int(n) for n in x["gradient_bytes"]),
        )
        for x in record["layers"]
    )
    samples = record["samples_per_step"]
    return RecordedWorkload(
        str(record["name"]),
        str(record["source"]),
        layers,
        float(record["optimizer_s"]),
        float(record["other_s"]),
        None if samples is None else int(samples),
        tuple(map(float, record["relative_steps"])),
        tuple(map(int, record["ready_order"])),
        int(record["num_micro_steps"]),
    )


def _from_trace(header: Mapping[str, Any], lines: Sequence[str], path: Path) -> RecordedWorkload:
    """Return the workload of the medians of all complete steps."""
    steps = [parsed(line) for line in lines if line.strip()]
    complete = [step for step in steps if isinstance(step, dict)]
    cut_off = len(steps) - len(complete)
    if header.get("num_ranks", 1) != 1:
        raise ConfigurationError(
            f"the trace {path} was recorded on {header['num_ranks']} ranks: its steps contain waiting for others. "
            "Score a prediction with it (`paceline plan score`), or record one rank alone to predict from."
        )
    layers = header["layers"]
    warm = [step for step in complete if not step["warm_up"]]
    num_micro_steps = 1 + mode(len(step.get("earlier_s", ())) for step in warm) if warm else 1
    timed = [step for step in warm if 1 + len(step.get("earlier_s", ())) == num_micro_steps]
    if not timed:
        raise ConfigurationError(
            f"the trace {path} holds no complete step after {len(complete)} of warm-up: the script ended too "
            f"early, or was cut off while it wrote. {RECORD_AGAIN}"
        )
    order = _order([step["ready_s"] for step in timed])
    backward_s = _gaps([step["ready_s"] for step in timed], order)
    forward_s = _gaps([step["forward_ends_s"] for step in timed], range(len(layers)))
    last = order[-1]
    tail_s = median(step["backward_s"] - max(step["ready_s"]) for step in timed)
    backward_s[last] += max(tail_s, 0.0)
    spare_s = median(step["forward_s"] - max(step["forward_ends_s"]) for step in timed)
    forward_s[-1] += max(spare_s, 0.0)  # the loss
    lengths = [step["forward_s"] + step["backward_s"] for step in timed]
    lengths += [seconds for step in timed for seconds in step.get("earlier_s", ())]
    notes = f"; {cut_off} incomplete line(s) ignored" if cut_off else ""
    return RecordedWorkload(
        str(header["name"]),
        f"recorded: median of {len(timed)} steps on {header['device']}{notes}",
        tuple(
            LayerTimes(str(x["name"]), forward_s[i], backward_s[i], tuple(map(int, x["gradient_bytes"])))
            for i, x in enumerate(layers)
        ),
        median(step["optimizer_s"] for step in timed),
        median(step["other_s"] for step in timed) / num_micro_steps,
        _samples(timed),
        tuple(length / median(lengths) for length in lengths),
        tuple(order),
        num_micro_steps,
    )


def _samples(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the samples of a step; None if no step says."""
    said: list[int] = [step["samples"] for step in steps if step.get("samples") is not None]
    return median_low(said) if said else None


def _order(ready_s: Sequence[Sequence[float]]) -> list[int]:
    """Return layers by the median time at which they are ready."""
    medians = [median(column) for column in zip(*ready_s, strict=True)]
    return sorted(range(len(medians)), key=lambda i: medians[i])


def _gaps(ends_s: Sequence[Sequence[float]], order: Sequence[int]) -> list[float]:
    """Median seconds of each layer from the end of the one before it in `order`; 0 where it was done before."""
    samples: list[list[float]] = [[] for _ in order]
    for step in ends_s:
        now_s = 0.0
        for index in order:
            samples[index].append(max(step[index] - now_s, 0.0))
            now_s = max(now_s, step[index])
    return [median(values) for values in samples]


def check_version(record: Mapping[str, Any], version: int, path: Path) -> None:
    """Raise ConfigurationError for a workload or trace of another version."""
    if record.get("version") != version:
        raise ConfigurationError(
            f"{path} is of version {record.get('version')}, this Paceline reads version {version}. {RECORD_AGAIN}"
        )


def parsed(text: str) -> Any:
    """Return the parsed JSON; None if it is none, such as a line that was cut off."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the latter: nested more deeply than Python reads
        return None

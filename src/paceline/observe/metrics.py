"""Metrics of a training for other tools: numbers for a logger, and OpenMetrics text in a file or on loopback.

The text is valid OpenMetrics 1.0. Prometheus and node_exporter read it too, because it has gauges and one counter only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigurationError
from paceline.observe.timings import HISTORY_STEPS, StepTimings

if TYPE_CHECKING:
    from paceline.diagnosis import Diagnosis

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_PARTS = {"waiting for gradients": "waiting", "loading and the rest": "loading"}


def step_metrics(timings: StepTimings, num_steps: int = HISTORY_STEPS) -> dict[str, float]:
    """Return where the time of the last steps went, as numbers by name, for a logger.

    Args:
        timings: `model.timings`.
        num_steps: Each value in seconds is a median of so many steps; as many as passed since you logged last.

    Returns:
        The number of steps so far is `paceline/steps`. Seconds are named as `paceline/step_s` is: the step, and its
        parts forward, backward, waiting, optimizer and loading. Hidden communication is `hidden`. Empty before the
        first step.

    Contract:
        Local; mutates nothing. Waits for no device.
    """
    steps = timings.recent(num_steps)
    if not steps:
        return {}
    rows = {_PARTS.get(name, name): [step.parts_s[name] for step in steps] for name in steps[0].parts_s}
    rows["hidden"] = [step.overlapped_s for step in steps]
    rows["step"] = [sum(step.parts_s.values()) for step in steps]
    return {
        "paceline/steps": float(steps[-1].step),
        **{f"paceline/{name}_s": median(row) for name, row in rows.items()},
    }


def open_metrics(
    timings: StepTimings | None = None, diagnosis: Diagnosis | None = None, *, rank: int | None = None
) -> str:
    """Return a rank's step times, or what the doctor found, as OpenMetrics text.

    Args:
        timings: `model.timings`.
        diagnosis: What `model.doctor()` returned.
        rank: The value of the label `rank` of the step times. None: no label.

    Contract:
        Local; mutates nothing. Waits for no device.
    """
    lines: list[str] = []
    if timings is not None:
        label = {} if rank is None else {"rank": str(rank)}
        values = step_metrics(timings)
        if values:
            lines += ["# HELP paceline_steps Synchronized steps.", "# TYPE paceline_steps counter"]
            lines.append(_sample("paceline_steps_total", label, values.pop("paceline/steps")))
        lines += _gauge("paceline_step_seconds", "Median time of recent steps, by part.") if values else []
        for name, value in values.items():
            part = name.removeprefix("paceline/").removesuffix("_s").replace("step", "all")
            lines.append(_sample("paceline_step_seconds", {**label, "part": part}, value))
    if diagnosis is not None:
        lines += _of_doctor(diagnosis)
    return "\n".join([*lines, "# EOF\n"])


def _of_doctor(diagnosis: Diagnosis) -> Iterator[str]:
    found = diagnosis.finding
    for name, words, value in (
        ("steps", "Steps that were compared.", diagnosis.num_steps),
        ("ranks", "Ranks that were compared.", diagnosis.num_ranks),
        ("unhealthy", "Statements about parameters that differ or are not finite.", len(diagnosis.health)),
        ("step_seconds", "Median time of a step.", diagnosis.step_s),
    ):
        yield from _gauge(f"paceline_doctor_{name}", words)
        yield _sample(f"paceline_doctor_{name}", {}, value)
    if found is not None:
        labels = {
            "kind": found.kind,
            "rank": "" if found.rank is None else str(found.rank),
            "host": found.host,
            "phase": found.phase,
            "cause": found.cause,
        }
        yield from _gauge("paceline_doctor_delay_seconds", "What the named rank or link adds to a step.")
        yield _sample("paceline_doctor_delay_seconds", labels, found.delay_s)
        if found.without is not None:
            yield from _gauge("paceline_doctor_without_seconds", "Predicted step without that delay.")
            yield _sample("paceline_doctor_without_seconds", {}, found.without.step_s)


def _gauge(name: str, words: str) -> list[str]:
    unit = [f"# UNIT {name} seconds"] if name.endswith("_seconds") else []
    return [f"# HELP {name} {words}", f"# TYPE {name} gauge", *unit]


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    escaped = {
        key: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for key, text in labels.items()
    }
    inside = ",".join(f'{key}="{text}"' for key, text in escaped.items())
    return f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def write_metrics(path: str | Path, text: str) -> None:
    """Write a metrics file for node_exporter's textfile collector. Readers never see half of it.

    Args:
        path: The file, which ends in `.prom` for node_exporter. One file per rank.
        text: What `open_metrics` returns.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigurationError(
            f"the metrics file {path} cannot be written ({error.strerror}). Name a file in a folder that this process "
            "may write to."
        ) from error


class MetricsServer:
    """An HTTP server on loopback that answers each request with metrics, until `close`.

    Args:
        text: Called on a thread of the server for each request, such as `lambda: open_metrics(model.timings)`.
        port: The port of 127.0.0.1; 0: any free one, which the attribute `port` has.

    Raises:
        ConfigurationError: The port is taken.
    """

    def __init__(self, text: Callable[[], str], port: int = 0) -> None:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Answer)
        except OSError as error:
            raise ConfigurationError(
                f"port {port} of 127.0.0.1 cannot be used for metrics ({error.strerror}). Each rank of a host needs "
                "its own: pass 0, or a base plus LOCAL_RANK."
            ) from error
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="paceline-metrics", daemon=True).start()

    def close(self) -> None:
        """End the server and free its port."""
        self._server.shutdown()
        self._server.server_close()

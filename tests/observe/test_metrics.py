"""Metrics for other tools: the text is OpenMetrics, the file is never half written, the server is loopback's alone."""

from __future__ import annotations

import re
import sys
import urllib.request
from types import ModuleType

import pytest

from harness.terminal import REPOSITORY
from paceline.diagnosis import Diagnosis
from paceline.diagnosis.findings import Finding, Prediction
from paceline.errors import ConfigurationError
from paceline.observe import MetricsServer, StepTiming, StepTimings, open_metrics, step_metrics, write_metrics

_SAMPLE = re.compile(
    r'([a-z_]+)(?:\{([a-z]+="(?:[^"\\\n]|\\[\\"n])*"(?:,[a-z]+="(?:[^"\\\n]|\\[\\"n])*")*)\})? (\S+)'
)


def timings_of(*backward_s):
    timings = StepTimings()
    for step, seconds in enumerate(backward_s, start=1):
        timings.add(
            StepTiming(step, 1.0, 0.0, seconds, exposed_s=0.5, buckets=(), optimizer_s=0.25, other_s=0.125)
        )
    return timings


def diagnosis_of(finding):
    return Diagnosis(finding, ("bad",), 40, 4, 0.1, "", (), ())


FOUND = Finding(
    "rank",
    2,
    'a "host"\\\n',
    "loading",
    "",
    "since",
    "loader",
    0.06,
    0.1,
    Prediction(0.04, 0.0, 0.0, 0.0),
    (),
    0.9,
    "",
    "",
)


def parsed(text):
    """Every sample by name and labels; fails if the text breaks OpenMetrics' rules that concern us."""
    assert text.endswith("# EOF\n")
    samples, family = {}, ""
    for line in text.splitlines()[:-1]:
        if line.startswith("# "):
            _, _, family, *_ = line.split()
            continue
        name, labels, value = _SAMPLE.fullmatch(line).groups()
        assert name in (family, f"{family}_total"), "a sample stands under its family"
        assert (name, labels) not in samples
        samples[name, labels] = float(value)
    return samples


def test_parts_add_up_to_the_step_and_are_medians_of_as_many_steps_as_asked():
    timings = timings_of(9.0, 2.0, 3.0, 4.0)
    values = step_metrics(timings, 3)
    assert values["paceline/steps"] == 4
    assert values["paceline/backward_s"] == 3.0
    parts = ("forward", "backward", "waiting", "optimizer", "loading")
    assert values["paceline/step_s"] == sum(values[f"paceline/{part}_s"] for part in parts) == 4.875


def test_there_are_no_numbers_before_the_first_step():
    assert step_metrics(StepTimings()) == {}
    assert open_metrics(StepTimings()) == "# EOF\n"


def test_step_times_as_text():
    samples = parsed(open_metrics(timings_of(2.0), rank=3))
    assert samples["paceline_steps_total", 'rank="3"'] == 1
    assert samples["paceline_step_seconds", 'rank="3",part="backward"'] == 2.0
    assert samples["paceline_step_seconds", 'rank="3",part="all"'] == 3.875
    assert ("paceline_step_seconds", 'part="waiting"') in parsed(open_metrics(timings_of(2.0)))


def test_the_doctors_finding_as_text():
    samples = parsed(open_metrics(diagnosis=diagnosis_of(FOUND)))
    labels = r'kind="rank",rank="2",host="a \"host\"\\\n",phase="loading",cause="loader"'
    assert samples["paceline_doctor_delay_seconds", labels] == 0.06
    assert samples["paceline_doctor_without_seconds", None] == 0.04
    assert samples["paceline_doctor_unhealthy", None] == 1
    nothing = parsed(open_metrics(diagnosis=diagnosis_of(None)))
    assert {name for name, _ in nothing} == {
        f"paceline_doctor_{name}" for name in ("steps", "ranks", "unhealthy", "step_seconds")
    }


def test_a_file_is_replaced_as_a_whole_and_leaves_nothing_beside(tmp_path):
    path = tmp_path / "rank0.prom"
    for text in ("one\n", "another\n"):
        write_metrics(path, text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigurationError, match=r"missing/rank0.prom cannot be written \(No such file"):
        write_metrics(tmp_path / "missing" / "rank0.prom", "x")


def test_the_server_answers_with_what_is_true_now_and_frees_its_port():
    timings = timings_of(2.0)
    server = MetricsServer(lambda: open_metrics(timings))
    try:
        for num_steps in (1, 2):
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
                assert answer.headers["Content-Type"].startswith(
                    "application/openmetrics-text; version=1.0.0"
                )
                assert parsed(answer.read().decode())["paceline_steps_total", None] == num_steps
            timings.add(StepTiming(2, 1.0, 0.0, 1.0, exposed_s=0.5, buckets=()))
        with pytest.raises(ConfigurationError, match=f"port {server.port} of 127.0.0.1 cannot be used"):
            MetricsServer(str, server.port)
    finally:
        server.close()
    MetricsServer(str, server.port).close()


def test_the_functions_of_the_page_hand_all_numbers_to_each_logger(monkeypatch):
    """The loggers' libraries are not installed here; their stand-ins take the arguments that the libraries take."""
    page = (REPOSITORY / "docs/guide/metrics.md").read_text()
    (text,) = re.findall(r'^```python title="loggers.py"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    got = {}

    class Writer:
        def add_scalar(self, tag, scalar_value, global_step=None):
            got.setdefault("tensorboard", {})[tag, global_step] = scalar_value

    def log(data, step=None):
        got["wandb"] = {(name, step): value for name, value in data.items()}

    def log_metrics(metrics, step=None):
        got["mlflow"] = {(name, step): value for name, value in metrics.items()}

    for name, function in (("wandb", log), ("mlflow", log_metrics)):
        module = ModuleType(name)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    timings, functions = timings_of(2.0, 3.0, 4.0), {}
    exec(text, functions)
    functions["to_wandb"](timings, 7)
    functions["to_mlflow"](timings, 7)
    functions["to_tensorboard"](timings, 7, Writer())
    expected = {(name, 7): value for name, value in step_metrics(timings).items()}
    assert len(expected) == 8
    assert got == dict.fromkeys(("wandb", "mlflow", "tensorboard"), expected)

"""Recording a script's steps: what a trace says of a model that is known, and what does not disturb it."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import ConfigurationError
from paceline_plan import RecordedWorkload, record_workload
from paceline_plan.scoring import measured_run
from paceline_plan.workload_recording import HostClock


class Slow(nn.Module):
    """Keeps the order of its layers visible: the last one is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 2)
        self.first = nn.Linear(4, 8)
        self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


def train_micro_steps(model: nn.Module, num_steps: int, micro_steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(micro_steps):
            nn.functional.mse_loss(model(torch.ones(16, 4)), torch.zeros(16, 2)).backward()
        optimizer.step()


def test_a_recording_is_the_models(tmp_path: Path) -> None:
    path, model = tmp_path / "trace.jsonl", Slow()
    with record_workload(path, name="slow"):
        with torch.no_grad():
            model(torch.ones(1, 4))  # evaluation is no step
        train_micro_steps(model, 5, micro_steps=2)
    found = RecordedWorkload.load(path)
    assert (found.name, found.samples_per_step, len(found.relative_steps)) == ("slow", 32, 6)
    assert [(x.name, x.gradient_bytes) for x in found.layers] == [("last", (64, 8)), ("first", (128, 32))]
    assert found.order == (0, 1)
    assert 0 < found.forward_s < 60
    assert 0 < found.backward_s < 60
    assert measured_run(path).num_ranks == 1
    before = path.read_text()
    train_micro_steps(model, 2)  # the hooks are gone
    assert path.read_text() == before
    assert not model.last.weight._post_accumulate_grad_hooks


def test_every_micro_step_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = itertools.count()
    monkeypatch.setattr(HostClock, "mark", lambda _: next(marks))  # a second from one mark to the next
    path, model = tmp_path / "trace.jsonl", Slow()
    with record_workload(path):
        train_micro_steps(model, 4, micro_steps=1)
        before = next(marks)
        train_micro_steps(model, 1, micro_steps=1)
        num_marks = next(marks) - before - 1
    alone = RecordedWorkload.load(path)
    with record_workload(path):
        train_micro_steps(model, 6, micro_steps=4)
        train_micro_steps(model, 1, micro_steps=3)  # the end of an epoch
    four = RecordedWorkload.load(path)
    assert (alone.num_micro_steps, alone.samples_per_step, alone.compute_s) == (1, 16, num_marks)
    assert (four.num_micro_steps, four.samples_per_step) == (4, 64)
    assert len(four.relative_steps) == 4 * 4  # of the steps that are alike
    assert (four.forward_s, four.backward_s) == (alone.forward_s, alone.backward_s)
    step_s = measured_run(path).step_s
    assert step_s == four.compute_s  # every second of a step is somewhere
    assert step_s == 4 * (num_marks - 2) + 2  # of which two are the optimizer's
    four.save(path)
    assert RecordedWorkload.load(path) == four


def test_a_forward_of_which_nothing_follows_is_no_micro_step(tmp_path: Path) -> None:
    path, model = tmp_path / "trace.jsonl", Slow()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with record_workload(path):
        for step in range(6):
            model(torch.ones(2, 4))  # a look at the loss, with gradients left on
            model(torch.ones(16, 4)).sum().backward()
            if step == 4:
                model(torch.ones(2, 4))  # between backward and the optimizer: a step that cannot be told
            optimizer.step()
    found = RecordedWorkload.load(path)
    assert (found.num_micro_steps, found.samples_per_step, len(found.relative_steps)) == (1, 16, 3)


def test_enough_is_enough_and_too_little_is_said(tmp_path: Path) -> None:
    path, ended = tmp_path / "trace.jsonl", []
    recording = record_workload(path, num_steps=2)
    recording.when_done(lambda: ended.append(True))
    train_micro_steps(Slow(), 6)
    assert ended == [True]
    assert len(path.read_text().splitlines()) == 1 + 2 + 2
    with record_workload(path):
        Slow()(torch.ones(2, 4))
    with pytest.raises(ConfigurationError, match="empty"):
        RecordedWorkload.load(path)
    with record_workload(path):
        train_micro_steps(Slow(), 2)
    for read in (RecordedWorkload.load, measured_run):
        with pytest.raises(ConfigurationError, match="no complete step"):
            read(path)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        record_workload(tmp_path / "not" / "there")


def test_only_a_trace_scores_and_only_one_rank_predicts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with record_workload(path, name="slow"):
        train_micro_steps(Slow(), 4)
    header, *steps = path.read_text().splitlines()
    path.write_text(
        "\n".join([json.dumps({**json.loads(header), "num_ranks": 4, "ranks_of_host": [2, 2]}), *steps])
    )
    assert measured_run(path).num_ranks == 4
    with pytest.raises(ConfigurationError, match="recorded on 4 ranks"):
        RecordedWorkload.load(path)
    for text in ("", "{}", json.dumps({**json.loads(header), "version": 7}), header + '\n{"warm_up": false}'):
        path.write_text(text)
        with pytest.raises(ConfigurationError):
            measured_run(path)

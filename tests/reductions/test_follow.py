"""Other ranks take the members' places while threads of the old membership still compress."""

import threading

import pytest
import torch
from torch.nn import Parameter

from paceline.compression import TopK
from paceline.observe import StepTiming
from paceline.reductions import Compressed, PowerSGD
from paceline.reductions.lossy import Lossy
from paceline.reductions.reduction import Message, StepEnd

SHAPE = (32, 32)
MADE = {
    "topk": lambda: Compressed(TopK(0.1)),
    "topk with momentum": lambda: Compressed(TopK(0.1), momentum=0.9),
    "powersgd": lambda: PowerSGD(2),
}


class Alone:
    """A group of one rank."""

    def rank(self):
        return 0

    def size(self):
        return 1


def gradient(seed):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def launch(reduction, parameter, seed):
    reduction.begin_step(1)
    grad = gradient(seed)
    flat = grad.view(-1)
    return reduction.launch(Message(0, True, flat, flat.numel(), [grad], [parameter], Alone()))


def end(reduction):
    reduction.end_step(StepEnd(StepTiming(1, 0.0, 0.0, 0.0, 0.0, ())))


@pytest.mark.parametrize("name", MADE)
def test_a_bucket_of_the_old_membership_writes_no_state_of_the_new(name, monkeypatch):
    """It is held where it keeps its residual, until the new members' step has kept its own."""
    parameter, states = Parameter(torch.zeros(SHAPE)), []
    for is_lost in (False, True):
        reduction: Lossy = MADE[name]()
        reduction.prepare({"weight": parameter}, Alone())
        launch(reduction, parameter, 0).wait()
        end(reduction)
        reached, go_on = threading.Event(), threading.Event()
        old = None
        if is_lost:
            keep = type(reduction)._keep_residual

            def held(*args, keep=keep, reached=reached, go_on=go_on):
                reached.set()
                assert go_on.wait(60)
                return keep(*args)

            with monkeypatch.context() as patch:
                patch.setattr(type(reduction), "_keep_residual", held)
                old = launch(reduction, parameter, 1)
                assert reached.wait(60)
        reduction.follow({"weight": parameter}, Alone(), True)
        launch(reduction, parameter, 2).wait()
        if old is not None:
            go_on.set()
            old.wait()
        end(reduction)
        states.append(reduction.state_dict())
    clean, lost = states
    for kind, memory in clean["memories"].items():
        assert torch.equal(lost["memories"][kind]["weight"], memory["weight"]), kind
    for weight, factor in clean.get("factors", {}).items():
        assert torch.equal(lost["factors"][weight], factor)

"""`reduction=`: by name or as an object; wrong ones are refused on every rank before anything is started."""

import copy

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel.distributed import _MixedPrecision

from harness.models import Mlp, digest, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError, ReplicaMismatchError
from paceline.reductions import Mean, Reduction, choose_reduction
from paceline.reductions.by_name import BY_NAME

pytestmark = pytest.mark.processes


def test_no_compression_has_a_name():
    """As on the command line, where None cannot be typed."""
    assert isinstance(choose_reduction(None, "none"), Mean)
    assert isinstance(choose_reduction("adasum", "none"), type(choose_reduction("adasum")))
    with pytest.raises(ConfigurationError, match="'auto', 'none' or a"):
        choose_reduction(None, "zip")


class Recorder(Reduction):
    """The mean; writes down what it is told."""

    def __init__(self, words="recorder"):
        self.words, self.told, self.mean = words, [], Mean()

    def __repr__(self):
        return self.words

    def prepare(self, named_parameters, process_group):
        self.told.append(("prepare", *named_parameters))

    def begin_step(self, num_ranks, active_ratio=1.0, share=None):
        self.told.append("begin")
        return super().begin_step(num_ranks)

    def launch(self, message):
        self.told.append("launch")
        return self.mean.launch(message)

    def end_step(self, ended):
        self.told.append(("end", ended.timing.step))


def backward(model, rank, step):
    squares(model(torch.randn(4, 8, generator=generator(rank, step), dtype=torch.float64).float())).backward()


def stations(rank, _num_ranks):
    torch.manual_seed(0)
    recorder, plain = Recorder(), Mlp()
    twin = DistributedDataParallel(copy.deepcopy(plain))
    model = DistributedDataParallel(plain, reduction=recorder)
    assert model.reduction is recorder
    digests = []
    for each in (model, twin):
        for step in range(2):
            each.zero_grad()
            backward(each, rank, step)
        with each.no_sync():
            backward(each, rank, 2)
        backward(each, rank, 3)
        digests.append(digest(p.grad for p in each.parameters()))
    return recorder.told, digests


def test_a_reduction_is_told_of_every_step():
    """Prepare with the names; begin, one launch a bucket and end for every synchronized backward, none otherwise."""
    names = [name for name, _ in Mlp().named_parameters()]
    for told, digests in pool(2).run(stations):
        assert told[0] == ("prepare", *names)
        assert [word for word in told[1:] if word != "launch"] == [
            word for step in (1, 2, 3) for word in ("begin", ("end", step))
        ]
        assert told.count("launch") >= 3
        assert digests[0] == digests[1]


def reduction_refused(rank, _num_ranks, case):
    kwargs = {
        "unknown": {"reduction": "median"},
        "not one": {"reduction": 5},
        "mixed": {"reduction": Mean(), "mixed_precision": _MixedPrecision(reduce_dtype=torch.float16)},
        "differs": {"reduction": Recorder(f"recorder {rank}")},
    }[case]
    with pytest.raises((ConfigurationError, ReplicaMismatchError)) as caught:
        DistributedDataParallel(Mlp(), **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", "'median' is not a reduction. Give one of 'mean'"),
        ("not one", "5 is not a reduction"),
        ("mixed", "both decide how gradients are combined"),
        ("differs", "recorder 1"),
    ],
)
def test_refused(case, words):
    """Before anything is started, on every rank."""
    assert all(words in message for message in pool(2).run(reduction_refused, case))


def hook_too(_rank, _num_ranks):
    model = DistributedDataParallel(Mlp(), reduction=Recorder())
    with pytest.raises(RuntimeError, match="which the hook would replace"):
        model.register_comm_hook(None, allreduce_hook)
    assert repr(copy.deepcopy(model).reduction) == "recorder"


def test_a_hook_beside_a_reduction_is_refused():
    """Two ways to combine the same gradients; a copy keeps the one it has."""
    pool(1).run(hook_too)


def test_every_name_makes_a_reduction():
    """The table's own contract: a fresh object each time, whose words are equal."""
    for make in BY_NAME.values():
        assert isinstance(make(), Reduction)
        assert make() is not make()
        assert repr(make()) == repr(make())

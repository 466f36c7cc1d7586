"""What cannot go on with other ranks is refused before training, with the reason; what follows is not."""

import os
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from harness.ranks import pool
from paceline import DistributedDataParallel, convert_sync_batchnorm
from paceline.comm import device_vote
from paceline.comm.device_steps import check_lead
from paceline.data import GlobalBatch, GlobalShuffle, GlobalStream
from paceline.elastic import conflicts, elastic
from paceline.elastic.agent_connection import AgentConnection, Ready, difference
from paceline.elastic.checkpoints import RankCheckpoints
from paceline.errors import ConfigurationError
from paceline.optim import shard
from paceline_adasum import AdasumOptimizer
from paceline_recipes import GradientNoiseScale, LocalSGD
from paceline_servers import ParameterServers


def layers():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


@pytest.mark.parametrize("is_guest", [True, False])
def test_logical_ranks_have_to_be_known(is_guest):
    """A guest begins as rank 0 of 1, so it cannot count the others. Without an agent, all have to be there."""
    words = (
        r"Write GlobalBatch\.of\(8, ranks=4\), with your number"
        if is_guest
        else "the batch is for 3 logical ranks"
    )
    refused = GlobalBatch.of(8, 1) if is_guest else GlobalBatch.of(8, ranks=3)
    sampler = GlobalShuffle(range(8), refused)
    with pytest.raises(ConfigurationError, match=words):
        elastic._check_logical(sampler, is_guest=is_guest, is_plain=not is_guest)
    elastic._check_logical(GlobalShuffle(range(8), GlobalBatch.of(8, ranks=3)), is_guest=True, is_plain=False)


def said(_rank, num_ranks, cases):
    """What the check says of each case, by its name."""
    found = {}
    for case, is_deterministic, options in cases:
        net = layers()
        if case == "synchronized":
            net = convert_sync_batchnorm(net)
        if case == "synchronized apart":
            net = convert_sync_batchnorm(net, dist.new_group())
        shuffle = GlobalShuffle(range(8), GlobalBatch.of(4, num_ranks))
        drops = {"droppable": [net[0]]} if case == "droppable" else {}
        model = DistributedDataParallel(net, batch_sampler=shuffle, **options, **drops)
        if case == "hook":
            model.register_comm_hook(None, allreduce_hook)
        others = {
            "no sampler": None,
            "a stream": GlobalStream(range(8), GlobalBatch.of(4, num_ranks)),
            "another sampler": GlobalShuffle(range(8), GlobalBatch.of(4, num_ranks)),
        }
        try:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            if case.startswith("sharded"):  # with one rank, else it is as it was
                shard(optimizer, model, master_weights=case == "sharded with masters")
            sampler = others.get(case, shuffle)
            conflicts.check(model, [optimizer], [], sampler, is_deterministic)
            found[case] = conflicts.card(model, [optimizer], [], sampler)
            with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1", WORLD_SIZE="4"):
                assert conflicts.card(model, [optimizer], [], sampler) == found[case]  # on several hosts
        except ConfigurationError as error:
            found[case] = str(error)
    return found


@pytest.mark.processes
def test_what_follows_and_what_is_refused():
    """Each refusal names what to leave out or to take instead."""
    follow = [
        ("plain", False, {}),
        ("residuals", False, {"compression": "topk"}),
        ("adasum", False, {"reduction": "adasum"}),
        ("balance", False, {"balance": "auto"}),
        ("unused", False, {"skip_all_reduce_unused_params": True}),
        ("synchronized", False, {}),
        ("sharded", False, {}),
    ]
    refused = [
        ("synchronized apart", False, {}),
        ("hook", False, {}),
        ("droppable", False, {}),
        ("sharded with masters", False, {}),
        ("deterministic", True, {}),
        ("no sampler", False, {}),
        ("a stream", False, {}),
        ("another sampler", False, {}),
    ]
    expected = [
        "process_group",
        "HookReduction",
        "droppable=",
        "Leave out master_weights=",
        "running statistics",
    ]
    expected += [f"sampler={given} cannot move a lost rank's samples" for given in (None, "GlobalStream")]
    (found,) = pool(1).run(said, [*follow, *refused])
    assert all("GlobalShuffle of 8 samples" in found[case] for case, *_ in follow)
    # which ranks compare when they meet: an agent has to know it before, or the others' model would refuse
    assert "reduction" in difference(found["plain"], found["adasum"])
    for (case, *_), words in zip(refused, [*expected, "batch_sampler=sampler"], strict=True):
        assert found[case].startswith("Elastic: ")
        assert words in found[case]


def test_sharded_steps_need_a_shadow():
    """Each refusal says what to do."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    conflicts.check_given("checkpoints", None, 0, [optimizer])
    optimizer.__dict__["_divide_later"] = None  # as `shard` marks it on one rank
    with pytest.raises(ConfigurationError, match="shadow=1"):
        conflicts.check_given("checkpoints", None, 0, [optimizer])
    conflicts.check_given("checkpoints", None, 1, [optimizer])


def outside_of_a_window(_rank, num_ranks):
    """What a model that outlives ranks says of a forward outside of windows."""
    net, data = nn.Linear(4, 2), [torch.ones(4)] * 8
    shuffle = GlobalShuffle(data, GlobalBatch.of(4, num_ranks))
    model = DistributedDataParallel(net, batch_sampler=shuffle)
    model._paceline_coordinator.handle_faults(object())
    with pytest.raises(ConfigurationError, match=r"Call shard\(\) before paceline.Elastic"):
        shard(torch.optim.SGD(net.parameters(), lr=0.1), model)
    for batches in shuffle.steps(DataLoader(data, batch_sampler=shuffle)):
        try:
            model(batches[0])
        except ConfigurationError as error:
            return str(error)
    return ""


@pytest.mark.processes
def test_a_step_that_could_not_be_repeated_is_refused_before_a_rank_is_lost():
    """It had trained until then, and the error of the lost rank ended all others."""
    assert "Train each step within `with model.accumulate" in pool(1).run(outside_of_a_window)[0]


def test_what_a_reduction_measures_says_whether_it_outlives_ranks():
    assert not GradientNoiseScale().why_not_over(None)
    assert "is for 2 ranks alone" in GradientNoiseScale(shares=(0.5, 0.5)).why_not_over(None)
    assert (
        GradientNoiseScale(ParameterServers()).why_not_over(None)
        == ParameterServers().why_not_over(None)
        != ""
    )


def test_the_card_of_a_large_model_is_one_message():
    """Of 20,000 tensors; a rank whose card did not arrive would be waited for without a word."""
    facts = [f"params[{i}]: layers.{i}.weight: sizes [768, 768], torch.float32" for i in range(20_000)]
    card = "\n".join(conflicts.shortened(facts))
    other = "\n".join(conflicts.shortened([*facts[:700], "params[700]: another", *facts[701:]]))
    agent, theirs = AgentConnection.pair()
    rank = AgentConnection(theirs)
    assert rank.tell(Ready(card))
    assert agent.hear() == Ready(card)
    assert "layers.600.weight" in difference(card, other)
    assert conflicts.shortened(facts[:9]) == facts[:9]
    agent.close()
    rank.close()


class Device(types.SimpleNamespace):
    """A model's parameters on a device that this process has not."""


def of_device(monkeypatch, backends, *devices, reaches_host=True, **of_parameters):
    """What is refused of a model with parameters on these devices, over a group of these backends."""
    monkeypatch.setattr(dist, "get_backend_config", lambda _group: backends)
    where = torch.device("cpu" if reaches_host else devices[0])
    monkeypatch.setattr(device_vote, "device_for_metadata", lambda *_: where)
    parameters = [Device(device=torch.device(each), **of_parameters) for each in devices]
    model = types.SimpleNamespace(module=types.SimpleNamespace(parameters=lambda: parameters))
    return " ".join(conflicts._of_device(model, None, torch.device(devices[0])))


def test_what_is_refused_on_a_device(monkeypatch):
    """The backend, torch's watchdog, several devices, optimizers within backward: each with what to do instead."""
    for name, value in device_vote._OF_NCCL.items():
        monkeypatch.setenv(name, value)
    mixed = "cpu:gloo,cuda:nccl"
    assert of_device(monkeypatch, mixed, "cuda:0") == ""
    assert '"cpu:gloo,cuda:nccl"' in of_device(monkeypatch, "cuda:nccl", "cuda:0", reaches_host=False)
    assert "'cpu:gloo,cuda:gloo'" in of_device(monkeypatch, "cpu:gloo,cuda:gloo", "cuda:0")
    assert "by a revoke, which was not tried" in of_device(monkeypatch, "cpu:gloo,cuda:nccl2", "cuda:0")
    assert "several devices of this process" in of_device(monkeypatch, mixed, "cuda:0", "cuda:1")
    assert "steps within backward" in of_device(monkeypatch, mixed, "cuda:0", _in_backward_optimizers=[])
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    said = of_device(monkeypatch, mixed, "cuda:0")
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING is not set" in said
    assert "Start with TORCH_NCCL_ASYNC_ERROR_HANDLING=0 TORCH_NCCL_ENABLE_MONITORING=0 paceline run" in said
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    assert "TORCH_NCCL_ENABLE_MONITORING is 1" in of_device(monkeypatch, mixed, "cuda:0")


def test_optimizers_that_no_vote_can_stop_are_refused_on_a_device():
    parameters = [nn.Parameter(torch.zeros(2))]

    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """Stands for torch's, which imports deprecated code."""

    refused = {
        "computes gradients within its step": torch.optim.LBFGS(parameters),
        "AdamW(capturable=True) is stepped within a CUDA graph": torch.optim.AdamW(
            parameters, capturable=True
        ),
        "communicates in its step, behind the devices' vote": ZeroRedundancyOptimizer(parameters),
    }
    for words, optimizer in refused.items():
        assert words in " ".join(conflicts._of_optimizers([optimizer], on_device=True))
        assert list(conflicts._of_optimizers([optimizer], on_device=False)) == []


@pytest.mark.parametrize("kind", [LocalSGD, AdasumOptimizer])
def test_optimizers_that_communicate_in_their_step_are_refused(kind):
    refused = list(conflicts._of_optimizers([object.__new__(kind)], on_device=False))
    assert refused[0].startswith(f"{kind.__name__} communicates in its step")


def test_a_folder_for_checkpoints_is_refused_on_a_device():
    with pytest.raises(ConfigurationError, match="on an accelerator is a function, not a folder"):
        RankCheckpoints.of("checkpoints", types.SimpleNamespace(device=torch.device("cuda:0")), "")


@pytest.mark.parametrize("lead", [0, -1, 1.5, True, None])
def test_a_lead_is_a_positive_number_of_steps(lead):
    with pytest.raises(ConfigurationError, match="1 or more"):
        check_lead(lead)

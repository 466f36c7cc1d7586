"""A rank that comes has the others' bits although they went on training meanwhile; and knows it if it has not."""

import collections
import itertools
import math
import queue
import socket
import threading
import types

import numpy as np
import pytest
import torch

from paceline.data import GlobalBatch, GlobalShuffle
from paceline.elastic.handover import Carried, RankStates, hand_over
from paceline.elastic.replay import Giver, receive
from paceline.elastic.rollback import TrainingPosition
from paceline.elastic.state_tree import PackedState, unpack

AT = TrainingPosition(0, 0, 0), GlobalBatch((8,))  # which only a shadow is told


def training(kind):
    """A model with its optimizer and schedule."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    optimizer = kind(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    return types.SimpleNamespace(
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        carried=Carried(model, [optimizer], [schedule], None),
    )


def train(it):
    """A step, with gradients that are cut behind backward."""
    it.model(torch.randn(8, 5)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(it.model.parameters(), 0.5)
    it.optimizer.step()
    it.schedule.step()
    it.optimizer.zero_grad()


def given(kind, monkeypatch, meddle=lambda _: None):
    """One training, another that has followed it, the former's digest and what the latter says."""
    monkeypatch.setattr(
        "paceline.elastic.replay._LEAST_BYTES", 100
    )  # so that the snapshot takes several steps
    monkeypatch.setattr("paceline.elastic.replay._MOST_STATES", math.inf)  # these steps wait for nobody
    old, new = training(kind), training(kind)
    for _ in range(3):
        train(old)
    here, there = socket.socketpair()
    told, result = [], []
    receiver = threading.Thread(
        target=lambda: result.append(receive(there, new.carried, bool, lambda: told.append(1)))
    )
    receiver.start()
    giver = Giver(here, old.carried)
    for _ in range(12):
        giver.go_on(*AT)
        train(old)
    meddle(old)
    giver.end(TrainingPosition(15, 0, 0), AT[1])
    receiver.join()
    assert told == [1]
    return old, new, old.carried.digest(), result[0]


@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    ],
    ids=["SGD", "AdamW"],
)
def test_who_follows_the_gradients_has_the_same_bits(kind, monkeypatch):
    """Parameters and optimizers' states, with gradient clipping and a schedule."""
    old, new, digest, replayed = given(kind, monkeypatch)
    assert all(map(torch.equal, new.model.parameters(), old.model.parameters()))
    assert (replayed.step, replayed.digest) == (15, digest)
    for mine, theirs in zip(new.carried.parameters, old.carried.parameters, strict=True):
        states = new.optimizer.state[mine], old.optimizer.state[theirs]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_what_a_fused_optimizer_is_told_travels_with_the_gradients(monkeypatch):
    """The devices' vote masks every third step, and a scaler divides the gradients: also where they are replayed."""
    made, scale = [], torch.tensor(0.5)

    def kind(parameters):
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        if not made:
            optimizer.register_step_pre_hook(tell)
        made.append(optimizer)
        return optimizer

    def tell(optimizer, *_):
        optimizer.grad_scale, optimizer.found_inf = scale, torch.tensor(float(next(numbers) % 3 == 0))

    numbers = itertools.count()
    *_, digest, replayed = given(kind, monkeypatch)
    assert (replayed.step, replayed.digest) == (15, digest)
    assert not hasattr(made[1], "found_inf")
    assert not hasattr(made[1], "grad_scale")


def test_what_changes_parameters_behind_the_optimizer_is_noticed(monkeypatch):
    """One element by one bit is enough."""

    @torch.no_grad()
    def meddle(old):
        old.model[2].bias[1].nextafter_(torch.tensor(9.0))

    *_, digest, replayed = given(torch.optim.SGD, monkeypatch, meddle)
    assert digest not in (0, replayed.digest)
    assert RankStates(((15, 1, digest), (15, 0, replayed.digest))).lacks_all(1)


def test_a_giver_that_dies_is_no_giver():
    """Whoever followed it asks to be let in, and receives everything."""
    here, there = socket.socketpair()
    here.sendall((100).to_bytes(8, "big") + b"half")
    here.close()
    told = []
    assert receive(there, training(torch.optim.SGD).carried, bool, lambda: told.append(1)) is None
    assert told == [1]


def test_nobody_waits_for_a_receiver_that_does_not_read(monkeypatch):
    """The giver gives up."""
    monkeypatch.setattr("paceline.elastic.replay._LEAST_BYTES", 100)
    monkeypatch.setattr("paceline.elastic.replay._MOST_STATES", 1.0)
    it, (here, there) = training(torch.optim.AdamW), socket.socketpair()
    with there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        giver = Giver(here, it.carried)
        while not giver.is_over:
            giver.go_on(*AT)
            train(it)
        giver.end(*AT)


def test_who_lacks_what():
    """Whole ranks at the newest step nothing; who has followed one of them the rest; everybody else all."""
    rows = RankStates(((7, 1, 0), (7, 1, 55), (7, 0, 55), (7, 0, 56), (6, 1, 0), (-1, 1, 0), (9, 0, 55)))
    ranks = range(len(rows.rows))
    assert rows.holder == 0
    assert [each for each in ranks if not rows.lacks_something(each)] == [0, 1]
    assert [each for each in ranks if rows.lacks_all(each)] == [3, 4, 5, 6]


class Messages:
    """A group of threads that sends messages between two ranks alone, and counts the bytes that each receives."""

    def __init__(self, size):
        self.ends = collections.defaultdict(queue.SimpleQueue)
        self.received = [0] * size

    def of(self, rank):
        def receive_from(tensors, peer, _tag):
            def wait(_limit):
                tensors[0].copy_(self.ends[peer, rank].get(timeout=20))
                self.received[rank] += tensors[0].nbytes

            return types.SimpleNamespace(wait=wait)

        def send(tensors, peer, _tag):
            self.ends[rank, peer].put(tensors[0].clone())
            return types.SimpleNamespace(wait=lambda _limit: True)

        size = len(self.received)
        return types.SimpleNamespace(rank=lambda: rank, size=lambda: size, send=send, recv=receive_from)


def test_each_rank_receives_what_it_lacks_and_no_more(monkeypatch):
    """Two are whole, two have followed the second one, three lack everything. Afterwards all have the same bits."""
    monkeypatch.setattr("paceline.elastic.handover._MESSAGE_BYTES", 100)
    torch.manual_seed(5)
    ranks = [training(torch.optim.AdamW) for _ in range(7)]
    for it in ranks:
        it.carried.sampler = types.SimpleNamespace(state_dict=dict, load_state_dict=lambda *_, **__: None)
    for it in ranks[:4]:  # the same steps, but the followers' buffers and schedules are of the beginning
        torch.manual_seed(6)
        for _ in range(3):
            train(it)
    for it in ranks[2:4]:
        it.model[1].reset_running_stats()
        it.schedule.load_state_dict(training(torch.optim.AdamW).schedule.state_dict())
    digest = ranks[1].carried.digest()
    rows = [(3, 1, 0), (3, 1, digest)] + [(3, 0, it.carried.digest()) for it in ranks[2:4]] + [(-1, 1, 0)] * 3
    group, position, batch = Messages(7), TrainingPosition(3, 0, 24), GlobalBatch.of(8, 2)
    given = [None] * 7

    def perform(rank):
        found = hand_over(ranks[rank].carried, RankStates(tuple(rows)), position, batch, group.of(rank))
        if found:
            ranks[rank].carried.take(found, is_new=True)
        given[rank] = found

    threads = [threading.Thread(target=perform, args=(rank,)) for rank in range(7)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert ["parameters" in each for each in given] == [False] * 4 + [True] * 3
    assert [bool(each) for each in given] == [False] * 2 + [True] * 5
    assert all(each["position"] == [3, 0, 24] and each["batch"] == batch.as_dict() for each in given[2:])
    assert group.received[:2] == [0, 0]
    assert 0 < group.received[2] == group.received[3] < group.received[4] == group.received[6]
    for it in ranks[1:]:
        assert it.carried.digest() == digest
        assert all(map(torch.equal, it.model.buffers(), ranks[0].model.buffers()))
        assert it.schedule.state_dict() == ranks[0].schedule.state_dict()


class MasterSGD(torch.optim.Optimizer):
    """Keeps weights and momentum in float32, and more that only its own `state_dict` has."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        self.state["all"] = {"num_steps": self.num_steps}
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                master = self.state[parameter].setdefault("master", parameter.float())
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(master))
                master.sub_(0.01 * momentum.mul_(0.9).add_(parameter.grad.float()))
                parameter.copy_(master)

    def state_dict(self):
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.num_steps = state_dict["num_steps"]


class Grows(torch.nn.Linear):
    """Its extra state counts its steps, and its buffers get other shapes with them; `label` it saves by itself."""

    def __init__(self):
        super().__init__(4, 4, dtype=torch.bfloat16)
        self.num_steps, self.label = 0, "new"
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("late", None)

    def get_extra_state(self):
        return {
            "num_steps": self.num_steps,
            "rows": np.arange(self.num_steps, dtype=np.uint32),
            "is": b"\xff\0",
        }

    def set_extra_state(self, state):
        assert state["rows"].dtype == np.uint32
        assert len(state["rows"]) == state["num_steps"]
        self.num_steps = state["num_steps"]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "label"] = self.label

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.label = state_dict.pop(prefix + "label")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x):
        self.num_steps, self.label = self.num_steps + 1, f"after {self.num_steps}"
        self.seen = torch.cat([self.seen, x.detach().float().mean()[None]])
        self.late = self.seen.double()
        return super().forward(x) * min(1, self.num_steps / 8)


def grown(kind, num_steps):
    """After so many steps."""
    torch.manual_seed(3)
    model = Grows()
    it = types.SimpleNamespace(model=model, optimizer=kind(model.parameters()))
    it.carried = Carried(model, [it.optimizer], [], GlobalShuffle(8, GlobalBatch((8,)), 0))
    grow(it, num_steps)
    return it


def grow(it, num_steps):
    for _ in range(num_steps):
        it.optimizer.zero_grad()
        it.model(torch.randn(8, 4).bfloat16()).square().mean().backward()
        it.optimizer.step()


@pytest.mark.parametrize("kind", [MasterSGD, torch.optim.NAdam])
@pytest.mark.parametrize("own_steps", [0, 2])
def test_all_state_arrives_in_its_own_dtype_and_shape(kind, own_steps):
    """Float32 state of bfloat16 parameters was rounded by `load_state_dict`, and ranks differed from then on."""
    old, new = grown(kind, 3), grown(kind, own_steps)
    found = {}
    for packed in (old.carried.rest(TrainingPosition(3, 0, 8), GlobalBatch((8,))), old.carried.whole()):
        found |= unpack(PackedState(packed.words, [each.clone() for each in packed.tensors]))
    new.carried.take(found, is_new=True)
    assert (new.model.num_steps, new.model.label) == (3, "after 2")
    for it in (old, new):
        torch.manual_seed(4)
        grow(it, 2)
    assert new.carried.digest() == old.carried.digest()
    assert all(map(torch.equal, new.model.buffers(), old.model.buffers()))
    if kind is MasterSGD:
        assert new.optimizer.num_steps == new.optimizer.state["all"]["num_steps"] == 5

"""A shadow of ranks with sharded steps holds all parts of the state, and other ranks take their parts from it."""

import socket
import tempfile
import threading
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.models import digest, generator
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.elastic import replay
from paceline.elastic.agent_connection import ShadowOrders
from paceline.elastic.checkpoints import CheckpointFolder
from paceline.elastic.client import ElasticClient
from paceline.elastic.handover import Carried, Piece, hand_over_to_all
from paceline.elastic.replay import CONFIRMED, HELD_BYTES, Giver, Share, state_of_shadow
from paceline.elastic.rollback import TrainingPosition
from paceline.elastic.shadow import Shadow
from paceline.elastic.watcher import OverError
from paceline.optim import full_state_dict, shard
from paceline.optim.shard import divide_among_members

pytestmark = pytest.mark.processes
BATCH = GlobalBatch((4, 4))
KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


class Net(nn.Module):
    """A channels-last kernel, parameters that are cut, one that is frozen, and one that a plain optimizer steps."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False).to(memory_format=torch.channels_last)
        self.last, self.other = nn.Linear(288, 33), nn.Linear(33, 3)
        self.frozen = nn.Parameter(torch.ones(200), requires_grad=False)

    def forward(self, x):
        return self.other(torch.tanh(self.last(self.conv(x).flatten(1))))


class Training:
    """A model, wrapped or not, with a sharded or plain optimizer, and a plain one for the last layer."""

    def __init__(self, kind, is_wrapped=True):
        torch.manual_seed(3)
        self.net = Net()
        rest = [each for name, each in self.net.named_parameters() if not name.startswith("other")]
        self.optimizer, self.plain = KINDS[kind](rest), torch.optim.SGD(self.net.other.parameters(), lr=0.1)
        self.carried = Carried(self.net, [self.optimizer, self.plain], [], GlobalShuffle(800, BATCH, 0))
        self.carried.seeds = ((1, 2, 3),)
        self.step = 0
        if is_wrapped:
            self.model = DistributedDataParallel(self.net)
            shard(self.optimizer, self.model)

    def position(self):
        return TrainingPosition(self.step, 0, self.step * 8)

    def train(self, rank):
        self.optimizer.zero_grad()
        self.plain.zero_grad()
        self.model(torch.randn(4, 3, 8, 8, generator=generator(self.step, rank))).square().mean().backward()
        self.optimizer.step()
        self.plain.step()
        self.step += 1


def ends_of(rank, num_ranks):
    """Return this rank's end of its connection to the shadow, and on rank 0 all ends of the shadow.

    The shadow is on the host of rank 0, and other ranks are on other hosts.
    """
    port = torch.zeros(1, dtype=torch.int64)
    if rank:
        dist.broadcast(port, 0)
        end = socket.create_connection(("127.0.0.1", int(port)))
        end.sendall(bytes([rank]))
        return end, []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port[0] = listener.getsockname()[1]
        dist.broadcast(port, 0)
        own, theirs = socket.socketpair()
        ends = {0: theirs}
        for _ in range(num_ranks - 1):
            end, _ = listener.accept()
            ends[end.recv(1)[0]] = end
    return own, [ends[index] for index in range(num_ranks)]


def follow(rank, num_ranks, path):
    """Let a shadow follow each kind of optimizer from the third step on. Return what differs, on rank 0."""
    wrong = []
    for kind in KINDS:
        it, shadow, thread = Training(kind), None, None
        for _ in range(2):
            it.train(rank)
        with mock.patch.object(replay, "_LEAST_BYTES", 100):  # so that the snapshot takes several steps
            end, ends = ends_of(rank, num_ranks)
            if ends:
                followed = Training(kind, is_wrapped=False)
                followed.optimizer.__dict__["_divide_later"] = None  # as `shard` marks it on one rank
                folder = CheckpointFolder(Path(path) / f"{kind}-checkpoints", "a card")
                shadow = Shadow(followed.carried, folder, ShadowOrders("", 3, 1000.0, "none"))
                shadow.begin(ends)
                thread = threading.Thread(target=shadow.follow, daemon=True)
                thread.start()
            giver = Giver(end, it.carried, Share(rank, num_ranks))
            for _ in range(12):
                giver.go_on(it.position(), BATCH)
                giver.drain()
                if giver._confirmed < giver._turned_at:
                    wrong.append((kind, "not confirmed", it.step))
                it.train(rank)
            giver.end(it.position(), BATCH)
        state = full_state_dict(it.optimizer)
        if thread is None:
            continue
        thread.join(30)
        shadow.finish()  # else it may still write as the folder is removed
        if (shadow.is_whole, shadow.step) != (True, 14) or shadow._num_differences:
            wrong.append((kind, shadow.is_whole, shadow.step, shadow._num_differences))
        if not all(map(torch.equal, it.net.parameters(), followed.net.parameters())):
            wrong.append((kind, "parameters"))
        theirs = followed.optimizer.state_dict()["state"]
        for index, kept in state["state"].items():
            for name, value in kept.items():
                if not torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[index][name])):
                    wrong.append((kind, index, name))
    return wrong


def test_a_shadow_holds_all_parts():
    """Also of parameters that are cut, of any strides, and of what one rank steps as a whole."""
    with tempfile.TemporaryDirectory() as path:
        assert pool(2).run(follow, path) == [[], []]


def take(rank, num_ranks):
    """Train, let all ranks take another state, and return whether they go on as a plain optimizer would."""
    wrong = []
    for kind in KINDS:
        it, other, alone = (Training(kind, is_wrapped) for is_wrapped in (True, True, False))
        for _ in range(3):
            other.train(rank)
        states, tree = full_state_dict(other.optimizer), None
        if rank == 0:  # as a shadow holds it
            alone.optimizer.load_state_dict(states)
            for mine, theirs in zip(alone.net.parameters(), other.net.parameters(), strict=True):
                mine.data.copy_(theirs)
            alone.plain.load_state_dict(other.plain.state_dict())
            tree = {**alone.carried.whole_tree(), **other.carried.rest_tree(other.position(), BATCH)}
        it.train(rank)  # with which it is in another place
        it.carried.take(hand_over_to_all(tree, dist.group.WORLD), is_new=False)
        for each in it.carried.optimizers:
            divide_among_members(each)
        it.step = other.step
        for num_steps in (0, 2):
            for _ in range(num_steps):
                it.train(rank)
                other.train(rank)
            taken, own = (full_state_dict(each.optimizer) for each in (it, other))
            is_equal = all(map(torch.equal, it.net.parameters(), other.net.parameters()))
            if not is_equal or (rank == 0 and digest_of(taken) != digest_of(own)):
                wrong.append((kind, num_steps))
            if kind == "Adafactor":
                break  # it reduces gradients, whose place in memory counts
    return wrong


def gather(rank, num_ranks):
    """Let all ranks hold the whole state between two steps; return what then differs."""
    wrong = []
    for kind in KINDS:
        it, other = Training(kind), Training(kind)
        for step in range(4):
            it.train(rank)
            other.train(rank)
            if step == 2:
                before = full_state_dict(it.optimizer)
                it.optimizer.gather_whole()
                held = {
                    index: it.optimizer.whole(each)
                    for index, each in enumerate(it.optimizer.param_groups[0]["params"])
                }
                held = {"state": {index: kept for index, kept in held.items() if kept}}
                if before is not None and digest_of(held) != digest_of(before):
                    wrong.append((kind, "whole"))
                divide_among_members(it.optimizer)
                after = full_state_dict(it.optimizer)
                if before is not None and digest_of(after) != digest_of(before):
                    wrong.append((kind, "divided"))
        if not all(map(torch.equal, it.net.parameters(), other.net.parameters())):
            wrong.append(kind)
    return wrong


def test_ranks_gather_the_state_before_some_leave():
    """So a rank that is told to go takes nothing along, and one that comes receives all."""
    assert pool(2).run(gather) == [[], []]


def digest_of(state):
    return [(index, sorted(kept), digest(list(kept.values()))) for index, kept in state["state"].items()]


def test_ranks_take_their_parts_of_a_whole_state():
    """Nothing is left of what they held, and they train on as the others do."""
    assert pool(2).run(take) == [[], []]


def test_an_epoch_ends_when_the_shadow_has_applied_its_last_step():
    """A rank that is lost afterwards takes its part along, and a loop that has ended cannot go back."""
    it = Training("SGD", is_wrapped=False)
    it.optimizer.__dict__["_divide_later"] = None  # as `shard` marks it on one rank
    own, theirs = socket.socketpair()
    giver = Giver(own, it.carried, Share(0, 1))
    giver.go_on(TrainingPosition(5, 0, 40), BATCH)
    waits = threading.Thread(target=giver.drain)
    waits.start()
    for step in (4, 5):
        waits.join(0.2)
        assert waits.is_alive()
        theirs.sendall((CONFIRMED - step).to_bytes(HELD_BYTES, "big", signed=True))
    waits.join(5)
    assert not waits.is_alive()
    giver.end(TrainingPosition(5, 0, 40), BATCH)
    theirs.close()


def test_a_run_of_a_gradient_is_in_the_order_of_the_parameters_memory():
    """A script may have put a gradient into other strides."""
    it = Training("SGD", is_wrapped=False)
    own, theirs = socket.socketpair()
    giver = Giver(own, it.carried, Share(0, 1))
    index = next(index for index, each in enumerate(it.carried.parameters) if each.ndim == 2)
    gradient = torch.randn(it.carried.parameters[index].shape)
    turned = gradient.t().contiguous().t()
    assert turned.stride() != gradient.stride()
    assert torch.equal(giver._part(Piece(index, (1, 4)), turned), gradient.flatten()[1:4])
    giver.end(TrainingPosition(0, 0, 0), BATCH)
    theirs.close()


def test_a_shadow_that_holds_nothing_says_so():
    """Whoever asks has the folder's checkpoint then; so it is if the shadow is gone."""
    with tempfile.TemporaryDirectory() as path:
        followed = Training("SGD", is_wrapped=False)
        shadow = Shadow(
            followed.carried, CheckpointFolder(path, "a card"), ShadowOrders("", 3, 1000.0, "none")
        )
        own, theirs = socket.socketpair()
        shadow.begin([theirs])
        assert state_of_shadow(own, 5.0) == (-1, None)
        theirs.close()
        assert state_of_shadow(own, 5.0) == (-1, None)
        own.close()


@pytest.mark.parametrize("comes_in", [True, False])
def test_a_membership_that_ends_before_a_shadow_follows_goes_back_to_no_checkpoint(comes_in):
    """The next one asks again. If ranks are to come in, this one ends for that: their host's shadow waits for it."""
    client, told = object.__new__(ElasticClient), []
    looks = iter([False] * 5)

    class Watching:
        epoch, wants_pause = 7, comes_in

        @property
        def is_over(self):
            return next(looks, True)

        def to_give(self):
            return None

    client.watcher, client.connection = Watching(), types.SimpleNamespace(tell=told.append)
    client._troubled_in = -1
    with pytest.raises(OverError, match="before a shadow gave its state"):
        client.state_of_shadow()
    assert [each.epoch for each in told] == [7] * comes_in

"""A replacement runs its script from the top: it trains the others' epochs and no further ones, however it counts."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from paceline.data import GlobalBatch, GlobalShuffle
from paceline.elastic.handover import Carried
from paceline.elastic.late_start import LateStart
from paceline.elastic.rollback import Rollback, TrainingPosition
from paceline.elastic.world import forget_world
from paceline.errors import ConfigurationError

EPOCHS, SAMPLES = 4, 12  # three steps each


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    forget_world()


class Replacement:
    """A rank that comes in at `position`; its script had loaded the sampler's state of `loaded` before."""

    def __init__(self, position, loaded=0):
        self.sampler = GlobalShuffle(SAMPLES, GlobalBatch((4,)), 0)
        self.sampler.load_state_dict(self.sampler.state_dict() | {"epoch": loaded})
        own = self.sampler.epoch
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(position.epoch):
            with contextlib.suppress(UserWarning):
                self.schedule.step()
        self.sampler.move(GlobalBatch((4,)), 0, position.epoch, position.num_samples)
        carried = Carried(net, [optimizer], [self.schedule], self.sampler)
        rollback = Rollback(net, [optimizer], [self.schedule])
        self.late = LateStart(carried, self.sampler, own, position, rollback)
        self.weight = net.weight
        self.trained = []

    def loop(self, epoch):
        """What `elastic.steps` does, and what a script does behind an epoch."""
        if self.late is not None:
            if self.late.passes_over():
                self.schedule.step()
                return
            self.late = None
        assert self.schedule.last_epoch == epoch
        for _ in self.sampler.steps(self.sampler):
            self.trained.append((epoch, self.sampler._epoch, self.sampler.step.position))
        self.schedule.step()


def counts(rank):
    for epoch in range(EPOCHS):
        rank.loop(epoch)


def reads(rank):
    for epoch in range(rank.sampler.epoch, EPOCHS):
        rank.loop(epoch)


def names(rank):
    for epoch in range(EPOCHS):
        rank.sampler.set_epoch(epoch)
        rank.loop(epoch)


def asks(rank):
    while (epoch := rank.sampler.epoch) < EPOCHS:
        rank.loop(epoch)


def counts_from_a_checkpoint(rank):
    for epoch in range(1, EPOCHS):
        rank.loop(epoch)
        print(rank.sampler.epoch)  # behind the first loop that says nothing any more


@pytest.mark.usefixtures("world")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("script", [counts, reads, names, asks, counts_from_a_checkpoint])
@pytest.mark.parametrize(
    "position",
    [
        TrainingPosition(0, 0, 0),
        TrainingPosition(4, 1, 4),
        TrainingPosition(6, 1, 12),
        TrainingPosition(11, 3, 8),
    ],
    ids=str,
)
def test_it_trains_what_the_others_train(script, position):
    """Each with its own number of the epoch; a schedule that was stepped behind epochs that are over is as theirs."""
    if script is counts_from_a_checkpoint and not position.epoch:
        pytest.skip("the checkpoint is of a later epoch")
    rank = Replacement(position, loaded=int(script is counts_from_a_checkpoint))
    script(rank)
    everything = [(epoch, epoch, at) for epoch in range(EPOCHS) for at in range(0, SAMPLES, 4)]
    assert rank.trained == [each for each in everything if each[1:] >= (position.epoch, position.num_samples)]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_communication_that_no_other_rank_meets_is_refused(world):
    """It had waited for the others, which waited for it in their step. What asks for ranks and sizes is answered."""
    rank, one = Replacement(TrainingPosition(4, 1, 4)), torch.ones(1)
    rank.loop(0)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    calls = [dist.barrier, lambda: dist.all_reduce(one), lambda: dist.broadcast_object_list([1])]
    for call in calls:
        with pytest.raises(
            ConfigurationError, match=r"rank 0 came in while .* range\(sampler.epoch, epochs\)"
        ):
            call()
    rank.loop(1)
    assert dist.group.WORLD is world
    for call in calls:
        call()


@pytest.mark.usefixtures("world")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_parameters_that_a_script_changes_before_the_first_step_are_noticed():
    """A checkpoint that is loaded behind `Elastic(...)` is older than what the others train."""
    rank = Replacement(TrainingPosition(4, 1, 4))
    rank.loop(0)
    with torch.no_grad():
        rank.weight.add_(1e-6)
    with pytest.raises(ConfigurationError, match=r"has changed parameters .* Load checkpoints before"):
        rank.loop(1)

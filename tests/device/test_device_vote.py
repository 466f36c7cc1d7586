"""The devices' vote on a step: however a rank is lost, a rank's parameter is that of its last good step."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from device import late, real
from device.elastic import mutants
from device.marks import device
from device.nccl import moments
from device.nccl.exchange import FOLDER, Pause
from device.ranks import on_device, ranks
from paceline.comm.device_steps import DeviceSteps
from paceline.comm.device_vote import DeviceExit, DeviceVote
from paceline.errors import ConfigurationError

pytestmark = device

NUM_STEPS, BAD = 4, 2  # in step BAD, counted from 0, rank 2 is lost
GRADIENTS, VOTE = 2 * BAD, 2 * BAD + 1  # numbers of that step's collectives
LOST = {
    "before its gradients": "rank 2 launches nothing from step BAD on",
    "before its vote": "rank 2 launches the gradients of step BAD, and not its vote",
    "for the others alone": "rank 2 is cut off, comes to step BAD after the others have aborted, and goes on",
    "by its own abort": "rank 2 aborts by itself within the gradients of step BAD, and never comes to its vote",
    "its abort, and lives": "rank 2 aborts by itself within the vote of step BAD, and goes on",
}
"""How rank 2 is lost, and what it does."""


class Lost:
    """One rank of a group that loses rank 2; what they tell each other are files."""

    def __init__(self, rank, how, here, name):
        self.rank, self.how, self.device = rank, how, here.device
        self.mutant = name.rpartition("/")[2]
        self.group = dist.new_group(backend="latenccl")
        self.folder = Path(os.environ[FOLDER]) / name.replace("/", "_")
        self.folder.mkdir(exist_ok=True)
        self.leave = DeviceExit(here.device)
        self.leave.abort = self.group.abort  # of this group alone: the ranks stay up
        self.leave.enter()
        self.vote = DeviceVote(self.leave, self.group, name, here.device)
        self.parameter = torch.nn.Parameter(torch.zeros(3, device=here.device))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0, fused=True)
        self.at = [threading.Event() for _ in range(2 * NUM_STEPS)]
        self.unlisten = moments.listen(self.come)

    def come(self, _rank, number, place):
        """The device has come to a place of a collective."""
        if place == "within":
            self.at[int(number)].set()
            if int(number) > {"its abort, and lives": VOTE, "for the others alone": GRADIENTS}.get(
                self.how, 99
            ):
                self.say(f"at {number}")
                self.wait(f"at {number}", 0, 1, 2)  # nothing is missing behind the abort
        elif (number, place) == (str(GRADIENTS), "end"):
            self.say("has gradients")
        elif self.how == "by its own abort" and self.rank == 2 and (number, place) == (str(VOTE), "begin"):
            self.wait("out", 0, 1)  # it never comes there
            raise RuntimeError("dead")

    def say(self, what):
        (self.folder / f"{what} {self.rank}").touch()

    def wait(self, what, *of):
        pause = Pause()
        while not all((self.folder / f"{what} {rank}").exists() for rank in of):
            pause.sleep()

    def launch(self, number):
        """Launch the gradients or the vote of a step."""
        if number % 2:
            self.vote.cast()
            self.optimizer.found_inf = self.vote.found_inf
            self.optimizer.step()
        else:
            self.parameter.grad = torch.full(
                (3,), -(self.rank + 1) * 10.0 ** (number // 2), device=self.device
            )
            dist.all_reduce(self.parameter.grad, group=self.group, async_op=True).wait()

    def launch_all(self, first):
        for number in range(first, 2 * NUM_STEPS):
            self.launch(number)

    def draining(self):
        thread = threading.Thread(target=drain)
        thread.start()
        return thread

    def abort_within(self, number):
        """Go on until the device waits in a collective, and abort."""
        thread = self.draining()
        self.at[number].wait()
        self.group.abort()
        self.say("aborted")
        return thread

    def be_lost(self):
        """Rank 2."""
        if self.how == "before its vote":
            self.launch(GRADIENTS)
        elif self.how == "for the others alone":
            self.wait("has gradients", 0, 1)
            self.launch_all(GRADIENTS)
            drain()
        elif self.how == "by its own abort":
            self.launch(GRADIENTS)
            self.launch(VOTE)
            self.abort_within(GRADIENTS)
        elif self.how == "its abort, and lives":
            self.launch_all(GRADIENTS)
            self.abort_within(VOTE)
        self.wait("out", 0, 1)
        self.group.abort()

    def survive(self, hears_late):
        """Ranks 0 and 1: launch all, and leave when the device waits for rank 2, or has come out."""
        first = GRADIENTS
        if self.how == "its abort, and lives":
            self.launch(GRADIENTS)
            first = VOTE
        if self.how in ("by its own abort", "its abort, and lives"):
            self.draining()
            self.wait("aborted", 2)
            if self.rank == 1:
                self.wait("past", 0)
        self.launch_all(first)
        thread = self.draining()
        waits_in = {"before its vote": VOTE, "by its own abort": VOTE}.get(self.how, first)
        if self.mutant == "the vote":  # a collective a step
            waits_in = BAD
        if self.how == "its abort, and lives":
            late_to = VOTE + 1 if self.rank == 0 else VOTE
            self.at[late_to].wait()
            self.say("past")
            thread.join()
        else:
            self.at[waits_in].wait()
            self.say("past")
            self.say("within")
            self.wait("within", 0, 1)
            if self.rank == 1 and hears_late:
                self.wait("away", 0)
                thread.join(0.5)
        self.leave.withdraw()
        self.leave.abort()
        self.say("away")
        thread.join()
        self.say("out")


def drain():
    try:
        late.drain()
    except RuntimeError:
        assert dist.get_rank() == 2


def steps(rank, num_ranks, how, hears_late, mutant):
    """Perform steps; returns how many this rank's device counts, and its parameter."""
    here = on_device(rank, "latenccl")
    with mutants.left_out(mutant):
        lost = Lost(rank, how, here, f"{how}/{hears_late}/{mutant}")
        for number in range(GRADIENTS):
            lost.launch(number)
        late.drain()
        if rank == 2:
            lost.be_lost()
        else:
            lost.survive(hears_late)
        drain()
        lost.unlisten()
        dist.barrier()
        return lost.vote.num_good() if rank < 2 else None, lost.parameter[0].item() if rank < 2 else None


def what_is_wrong(found):
    """Return what does not hold on ranks 0 and 1, which survive; "" if all does."""
    sums = [sum(6.0 * 10.0**step for step in range(number)) for number in range(NUM_STEPS + 1)]
    counts = [number for number, _ in found[:2]]
    if [value for _, value in found[:2]] != [sums[number] for number in counts]:
        return f"parameters {found} are not those after so many steps: {sums}"
    return "" if max(counts) - min(counts) <= 1 else f"ranks differ by more than a step: {found}"


@pytest.mark.brief
@pytest.mark.parametrize("hears_late", [False, True])
@pytest.mark.parametrize("how", LOST)
def test_a_parameter_is_that_of_the_last_good_step(how, hears_late):
    """Ranks differ by at most one step, whether rank 1 leaves with rank 0, or behind it."""
    assert what_is_wrong(ranks(3).run(steps, how, hears_late, "")) == ""


SHOWN_BY = [
    ("the vote", "before its gradients"),
    ("numbers that cannot be guessed", "by its own abort"),
    ("numbers of the step", "by its own abort"),
    ("withdrawing the vote", "for the others alone"),
    ("a bad step for good", "its abort, and lives"),
]
"""By mutant, the loss that shows it."""


@pytest.mark.parametrize(("mutant", "how"), SHOWN_BY)
def test_what_is_left_out_of_the_vote_is_noticed(mutant, how):
    """Each rule of the vote has a loss that shows it. The abort posts old bytes in all of them."""
    assert what_is_wrong(ranks(3).run(steps, how, True, mutant)) != ""


NO_WAIT = "waiting for the count"


def ended(rank, _num_ranks, mutant):
    """End a membership of two steps that the device has yet to begin; what the host knows, and how many are counted."""
    here = on_device(rank, "latenccl")
    with mutants.left_out(mutant), late.scheduled("latest"):
        steps = DeviceSteps([], has_scaler=False)
        leave = DeviceExit(here.device)
        leave.enter()
        steps.begin(DeviceVote(leave, here.group, f"ended {mutant}", here.device), 10)
        steps.complete_window()
        steps.complete_window()
        return steps.num_known, steps.end()


@pytest.mark.brief
def test_the_end_of_a_membership_waits_for_the_count():
    """No load decides what the device has done by then: it does nothing until something waits for it."""
    assert ranks(1).run(ended, "") == [(10, 12)]


def test_a_count_that_is_not_waited_for_is_noticed():
    """In a job it would show only where the count has not arrived by then."""
    assert ranks(1).run(ended, NO_WAIT) == [(10, 10)]


def captured(rank, _num_ranks):
    """Step an optimizer of elastic training while the device says that a graph is captured, and once more."""
    here = on_device(rank, "latenccl")
    leave = DeviceExit(here.device)
    leave.enter()
    parameter = torch.nn.Parameter(torch.ones(3, device=here.device))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    steps = DeviceSteps([optimizer], has_scaler=False)
    steps.begin(DeviceVote(leave, here.group, "captured", here.device), 0)
    parameter.grad = torch.ones_like(parameter)
    steps.complete_window()
    module = torch.get_device_module(here.device)
    module.is_current_stream_capturing = lambda: True
    try:
        with pytest.raises(ConfigurationError) as refused:
            optimizer.step()
    finally:
        del module.is_current_stream_capturing
    unchanged = parameter[0].item()
    optimizer.step()
    return str(refused.value), unchanged, parameter[0].item()


@pytest.mark.brief
def test_a_step_that_is_captured_into_a_graph_is_refused():
    """No vote would stop the graph when it is run again. The same step outside of a graph is done."""
    ((words, unchanged, stepped),) = ranks(1).run(captured)
    assert "this optimizer's step is captured into a CUDA graph" in words
    assert (unchanged, stepped) == (1.0, 0.0)


def of_one_rank(rank, num_ranks):
    return real.voted(rank, num_ranks, real.find(late.DEVICE))


@pytest.mark.brief
def test_what_make_test_gpu_asks_of_one_rank_holds_on_this_device():
    """The vote, the mask and the abort."""
    assert ranks(1).run(of_one_rank) == [""]

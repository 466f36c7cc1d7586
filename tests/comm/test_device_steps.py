"""The steps of a device that is behind its host: which optimizers are masked, and for which steps the host waits."""

import pytest
import torch

from paceline.comm import device_vote
from paceline.comm.device_steps import DeviceSteps, why_awaited
from paceline.errors import ConfigurationError, DeviceLostError, PeerLostError


class Value:
    """A count on its way from the device."""

    def __init__(self, number):
        self.number, self.has_come, self.was_waited_for = number, False, False

    def has_arrived(self):
        return self.has_come

    def read(self):
        self.was_waited_for, self.has_come = self.was_waited_for or not self.has_come, True
        return torch.tensor(self.number)


class Vote:
    """Votes whose results are given, by the number of good steps after each."""

    def __init__(self, *counts):
        self.values = [Value(each) for each in counts]
        self.found_inf, self.is_good = torch.zeros(()), torch.ones((), dtype=torch.bool)
        self.num_cast = 0

    def cast(self):
        self.num_cast += 1
        return self.values[self.num_cast - 1]

    def num_good(self):
        return self.values[-1].number


def adamw(**options):
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], **options)


def begun(vote, step=0, optimizer=None, has_scaler=False):
    steps = DeviceSteps([optimizer or adamw(fused=True)], has_scaler)
    steps.begin(vote, step)
    return steps


def test_the_host_waits_for_no_step_within_its_lead():
    """With a lead of 2, the fourth step begins when the first is known; the two before it are not waited for."""
    vote = Vote(1, 2, 3, 4, 5)
    steps = begun(vote, step=10)
    for number in range(5):
        steps.complete_window()
        assert steps.has_kept_up()
        assert [each.was_waited_for for each in vote.values] == [place + 2 <= number for place in range(5)]
        assert steps.num_known == 10 + max(0, number - 1)


def test_a_bad_step_is_told_at_once_when_it_has_arrived_and_for_good():
    vote = Vote(1, 1, 1)
    steps = begun(vote)
    steps.complete_window()
    steps.complete_window()
    assert steps.has_kept_up()
    vote.values[0].has_come = vote.values[1].has_come = True
    assert not steps.has_kept_up()
    assert not steps.has_kept_up()
    assert (steps.num_known, steps.end()) == (1, 1)
    assert steps.end() is None  # of no membership


def test_the_end_of_a_membership_counts_steps_whose_votes_have_not_arrived():
    """The host knows of none of them. If it went back behind them, ranks would do them twice."""
    steps = begun(Vote(1, 2), step=10)
    steps.complete_window()
    steps.complete_window()
    assert (steps.num_known, steps.end()) == (10, 12)


def test_a_process_that_exits_withdraws_its_vote(monkeypatch):
    """Before its groups are torn down. That aborts them, and other ranks then take old bytes for gradients."""
    at_exit = []
    monkeypatch.setattr(device_vote.atexit, "register", at_exit.append)
    leave = device_vote.DeviceExit(torch.device("cpu"))
    leave.enter()
    assert leave.word == 1
    for each in at_exit:
        each()
    assert leave.word == 0


def test_an_optimizer_that_is_not_fused_waits_for_each_vote():
    vote = Vote(1, 1)
    steps = begun(vote, optimizer=adamw(foreach=True))
    assert "because AdamW is not fused" in steps.how
    steps.complete_window()
    assert vote.values[0].was_waited_for
    with pytest.raises(PeerLostError, match="before its device had sent"):
        steps.complete_window()


def test_only_fused_optimizers_are_masked():
    assert why_awaited(adamw(fused=True)) is None
    assert why_awaited(torch.optim.Adadelta([torch.nn.Parameter(torch.zeros(2))])) == "Adadelta is not fused"


def test_a_masked_step_changes_nothing_and_leaves_nothing_behind():
    """A scaler's own word is combined with the vote's, and given back to it, because the scaler removes it."""
    optimizer, vote = adamw(fused=True, lr=1.0), Vote(0)
    steps = begun(vote, optimizer=optimizer, has_scaler=True)
    (parameter,) = optimizer.param_groups[0]["params"]
    for voted, scaled, moves in ((1.0, None, False), (0.0, 1.0, False), (1.0, 0.0, False), (0.0, 0.0, True)):
        vote.found_inf.fill_(voted)
        if scaled is not None:
            optimizer.found_inf = torch.tensor(scaled)
        parameter.grad = torch.ones(2)
        before = parameter.detach().clone()
        optimizer.step()
        assert torch.equal(parameter, before) is not moves
        if scaled is None:
            assert not hasattr(optimizer, "found_inf")
        else:
            assert optimizer.found_inf == scaled
            del optimizer.found_inf
    steps.end()
    optimizer.found_inf = torch.ones(())  # by a rank whose steps are replayed
    optimizer.step()
    assert hasattr(optimizer, "found_inf")


def test_a_scaler_that_was_not_given_is_refused_in_its_first_step():
    optimizer = adamw(fused=True)
    begun(Vote(1), optimizer=optimizer)
    optimizer.grad_scale = torch.ones(())
    with pytest.raises(ConfigurationError, match="GradScaler that Elastic was not given"):
        optimizer.step()


def test_a_device_that_fails_for_good_ends_the_process():
    """The launcher then starts a replacement, as for any rank that raises alone."""
    vote = Vote(1)
    vote.num_good = lambda: torch.zeros(2) @ torch.zeros(3)
    with pytest.raises(DeviceLostError, match=r"fails since another rank was lost: .* counts as lost"):
        begun(vote).end()

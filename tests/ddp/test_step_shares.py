"""What a rank reports of its share: how long it worked, for what, and where it is; without a process group."""

import pytest
import torch

from paceline.data import Balance, GlobalBatch, GlobalShuffle, TokenShuffle
from paceline.ddp.step_shares import StepShares
from paceline.errors import ProtocolError
from paceline.observe import StepTiming


class Indices:
    """As a loader that fetches one batch after another."""

    def __init__(self, shuffle):
        self.shuffle = shuffle

    def __iter__(self):
        return iter(self.shuffle)


def timing(step, started_s, backward_s, exposed_s):
    return StepTiming(step, 0.1, started_s, backward_s, exposed_s, ())


def work_of(shuffle):
    """Samples and seconds that are reported of the second step: 5 s, of which half a second was waited for others."""
    shares = StepShares(shuffle, None, 0, 2, torch.device("cpu"))
    loop = shuffle.steps(Indices(shuffle))
    next(loop)
    assert shares.report(None)[5:7] == (0, 0)
    next(loop)
    assert shares.report(timing(1, 10.0, 2.0, 1.0))[5:7] == (0, 0)  # when it began is not known
    shares.waited(0.5)
    next(loop)
    words = shares.report(timing(2, 16.0, 2.0, 9.0))
    assert shares.report(timing(2, 16.0, 2.0, 9.0)) is words
    next(loop)
    assert shares.report(timing(2, 16.0, 2.0, 9.0))[5:7] == (0, 0)  # no step has ended since
    return words[5:7]


def test_work_is_what_a_rank_does_itself():
    """From the end of a step, waiting for others included, to its last gradient of the next."""
    assert work_of(GlobalShuffle(64, GlobalBatch((4, 2)), 0)) == (4, 4.5)


def test_work_for_tokens_is_said_for_the_share():
    """Whole sequences have more or fewer tokens than that; of steps that have far fewer nothing is said."""
    nine = TokenShuffle([3] * 64, GlobalBatch((8, 8)), 0)
    next(nine.steps(Indices(nine)))
    assert nine._plan.step_at(0).tokens == ((9, 6),)
    nine.set_epoch(0)
    assert work_of(nine) == (8, pytest.approx(4.5 * 8 / 9))
    assert work_of(TokenShuffle([10] * 64, GlobalBatch((15, 4)), 0)) == (0, 4.5)


def test_balance_moves_behind_what_the_furthest_has_fetched():
    """From the same words on every rank; ranks at other places, or with other cuts, are told."""
    shuffle = GlobalShuffle(400, GlobalBatch((4, 4)), 0)
    balance = Balance(num_ignored=0)
    balance.tells = False
    shares = StepShares(shuffle, balance, 0, 2, torch.device("cpu"))
    loop = shuffle.steps(Indices(shuffle))
    while shuffle.batch == GlobalBatch((4, 4)):
        next(loop)
        own = shares.report(None)
        mine, other = (*own[:4], own[4], 4.0, 1.0), (*own[:4], own[4] + 16, 4.0, 3.0)
        shares.take([mine, other])
    assert shuffle.batch == GlobalBatch((6, 2))
    later = shuffle._plan.steps(shuffle.step.end)
    assert [next(later).samples for _ in range(3)] == [(4, 4), (4, 4), (6, 2)]
    for changed in ((own[0], own[1] + 1, *own[2:]), (*own[:3], own[3] + 1, *own[4:])):
        with pytest.raises(ProtocolError, match="do not train the same global batch"):
            shares.take([own, changed])
    shares.take([own, (0.0,) * 7])  # it takes no part any more


def test_all_pause_behind_the_step_in_which_one_is_asked():
    """The word travels with the step's report; following others takes it back."""
    every = []
    for rank in range(2):
        shuffle = GlobalShuffle(40, GlobalBatch((4, 4)), rank)
        every.append(StepShares(shuffle, None, rank, 2, torch.device("cpu")))
    loops = [shares.sampler.steps(Indices(shares.sampler)) for shares in every]
    for is_asked in (False, True):
        every[1].pause_when(lambda asked=is_asked: asked)
        for loop in loops:
            next(loop)
        reports = [shares.report(None) for shares in every]
        for shares in every:
            shares.take(reports)
        assert [shares.pauses for shares in every] == [is_asked] * 2
    every[0].follow(GlobalBatch((8,)), 0, every[0].data_position(None), [0])
    assert not every[0].pauses

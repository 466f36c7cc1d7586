"""Elastic training on a device: ranks die on the host and on the device, and no bit shows it in the end."""

from __future__ import annotations

import pytest
import torch

from device import test_device_vote
from device.elastic.mutants import MUTANTS, left_out
from device.elastic.runs import Run, perform
from device.marks import device
from elastic import test_replay, test_rollback

pytestmark = device

TWO = ("1 5 within middle", "2 13 begin first")
SLOWLY = ("--pause", "0.05")  # so that a replacement comes in while the others train
TOPK = ("--ordinary", "--wrapped", '{"compression": "topk"}', *SLOWLY)


def survive(folder, run, num_deaths):
    """Perform a run in which so many ranks die; nothing that must hold may be broken."""
    outcome = perform(run, folder)
    assert not outcome.wrong, f"{run}: {outcome.wrong}\n{outcome.said[-4000:]}"
    assert outcome.num_killed == num_deaths, outcome.said[-4000:]
    return outcome


@pytest.mark.brief
def test_ranks_die_on_the_device_and_on_the_host(tmp_path):
    """Within the gradients, before the first collective, and behind the vote; hosts are up to five steps ahead."""
    run = Run((*TWO, "0 21 between"), lead=5, options=SLOWLY)
    end = survive(tmp_path, run, 3).ends[0]
    assert end["decided"].startswith("on the device")
    assert end["told"] == end["decided"]
    assert any(num_new for _, _, num_new, _ in end["history"])


@pytest.mark.brief
def test_an_optimizer_that_is_not_fused_waits_on_the_host(tmp_path):
    """The host waits once a step. What is saved within the loop is of the step that its name says."""
    run = Run(("1 7 within last",), optimizer="adamw foreach", options=("--saves",))
    outcome = survive(tmp_path, run, 1)
    assert outcome.ends[0]["decided"].startswith("on the host")
    assert "AdamW is not fused" in outcome.ends[0]["decided"]
    saved = torch.load(tmp_path / "end.saved29.rank0.pt")["state"]
    assert all(map(torch.equal, saved, outcome.ends[0]["state"]))


@pytest.mark.brief
def test_no_healthy_step_waits_for_the_device(tmp_path):
    """The lead is without a bound. The first step copies from the host, and an epoch's end waits for the device."""
    for end in survive(tmp_path, Run(lead=100), 0).ends:
        waits = [sum(causes.values()) for causes in end["waits"]]
        steady = [each for step, each in enumerate(waits) if step % 10]
        assert steady == [0] * len(steady), waits


@pytest.mark.lab
@pytest.mark.parametrize("lead", [2, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd", "deaths": ("1 0 within middle", "2 13 end vote")},
        {"optimizer": "adagrad", "deaths": TWO},
        {"optimizer": "adam", "deaths": TWO, "schedule": "others"},
        {"optimizer": "lars", "deaths": TWO},
        {"optimizer": "sgd foreach", "deaths": ("1 5 within vote",), "options": ("--scaler",)},
        {"deaths": TWO, "options": ("--scaler", *SLOWLY)},
        {"deaths": TWO, "hears_late_s": 0.3},
        {"deaths": ("1 9 within last", "2 29 within middle")},
        {"deaths": ("0 5 begin last",), "garbage": "wild"},
        {"deaths": ("0 5 within middle",), "garbage": "wild", "options": ("--saves", "--reads-loss")},
        {"deaths": ("1 7 self-abort",), "hears_late_s": 0.3},
        {"deaths": TWO, "options": ("--ordinary",)},
        {"deaths": TWO, "options": ("--ordinary", "--wrapped", '{"compression": "bf16"}')},
        {"deaths": TWO, "options": TOPK},
        {"deaths": TWO, "options": ("--ordinary", "--wrapped", '{"compression": "powersgd"}', *SLOWLY)},
        {"deaths": TWO, "options": ("--autocast", *SLOWLY)},
        {"deaths": TWO, "options": ("--ordinary", "--wrapped", '{"balance": "auto"}')},
        {"deaths": TWO, "options": ("--ordinary", "--sync-batch-norm")},
    ],
    ids=str,
)
def test_options_survive_losses(tmp_path, options, lead):
    """Fused and other optimizers, scalers, what hears late, wild garbage, compression, balance, synchronized layers."""
    survive(tmp_path, Run(**options, lead=lead), len(options["deaths"]))


def test_a_rank_whose_device_fails_since_a_peer_died_is_replaced(tmp_path):
    """Each later wait of its host is an error, as after an illegal address. The error counts the rank as lost."""
    run = Run(TWO[:1], options=("--fails-with-peer", "2", *SLOWLY))
    outcome = survive(tmp_path, run, 1)
    assert "DeviceLostError: this rank's device fails since another rank was lost" in outcome.said
    assert sum(len(lost) for _, lost, _, _ in outcome.ends[0]["history"]) == 2


SHOWN_BY = {
    "the bound of the host's lead": Run(),
    "the abort": Run(TWO[:1]),
    "the count of the device, instead of the host's": Run(TWO, lead=5),
    "the mask": Run(TWO, lead=5),
    "a note of each step": Run(TWO, lead=5),
    "undoing buffers": Run(TWO, lead=5),
    "a vote over the new group": Run(TWO[:1]),
    "waiting for the device at an epoch's end": Run(("1 9 within last", "2 29 within middle"), lead=5),
    "dropping state that a masked step has made": Run(
        ("1 0 within middle",), optimizer="sgd", hears_late_s=3.0
    ),
    "undoing the scale": Run(TWO, lead=5, options=("--scaler",)),
    "taking away found_inf": Run(TWO),
    "what a scaler has found": Run(options=("--scaler",)),
    "keeping residuals until they are copied": Run(TWO, options=TOPK),
}
"""The runs that show what is left out of the loop.

`test_device_vote.py` shows what is left out of the vote and of its count, SHOWN_BY_TESTS what a test on the host shows.
"""


SHOWN_BY_TESTS = {
    "taking back indices": test_rollback.test_indices_of_a_bad_step_are_taken_back_on_the_device,
    "sending the vote to a replacement": test_replay.test_what_a_fused_optimizer_is_told_travels_with_the_gradients,
}
"""Without the second, a replacement has other bits, which is noticed: it then receives everything instead."""


@pytest.mark.lab
@pytest.mark.parametrize("mutant", SHOWN_BY)
def test_what_is_left_out_is_noticed(tmp_path, mutant):
    """Other bits, ranks that differ, or a job that does not end well."""
    run = SHOWN_BY[mutant]
    assert mutant in MUTANTS
    assert perform(Run(**{**vars(run), "mutant": mutant, "limit_s": 90.0}), tmp_path).wrong


@pytest.mark.parametrize("mutant", SHOWN_BY_TESTS)
def test_what_is_left_out_is_noticed_on_the_host(mutant, monkeypatch):
    test = SHOWN_BY_TESTS[mutant]
    with left_out(mutant), pytest.raises(AssertionError):
        test(*([monkeypatch] if "monkeypatch" in test.__code__.co_varnames else []))


def test_each_mutant_has_a_test():
    of_the_vote = {test_device_vote.NO_WAIT, *(each for each, _ in test_device_vote.SHOWN_BY)}
    assert {*SHOWN_BY, *SHOWN_BY_TESTS, *of_the_vote} == {*MUTANTS}

"""The example `mlstm_shakespeare.py`: ranks share streams without a seam, and train what one process trains."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.ranks import pool, torchrun

EXAMPLE = Path(__file__).parents[3] / "examples" / "mlstm_shakespeare.py"
TEXT = torch.randint(0, 256, (1 + 8 * 22,), generator=torch.Generator().manual_seed(5))
SIZES = {
    "hidden_size": 6,
    "embedding_size": 4,
    "streams": 8,
    "segment_length": 5,
}  # 22 = 4 segments and 2 bytes
STEPS = 8  # more than once through the streams


def example():
    """The example as a module, the same in every process."""
    if "mlstm_shakespeare" not in sys.modules:
        spec = importlib.util.spec_from_file_location("mlstm_shakespeare", EXAMPLE)
        sys.modules["mlstm_shakespeare"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["mlstm_shakespeare"])
    return sys.modules["mlstm_shakespeare"]


def make_trainer(rank, num_ranks, **settings):
    mlstm = example()
    chosen = mlstm.Settings(**{**SIZES, **settings})
    torch.manual_seed(rank)  # the wrapper hands out rank 0's parameters
    model = mlstm.Mlstm(chosen.embedding_size, chosen.hidden_size).to(torch.get_default_dtype())
    streams = mlstm.Streams(TEXT, chosen.streams, chosen.segment_length, rank, num_ranks)
    return mlstm.Trainer(chosen, model, streams)


def in_float64(function):
    torch.set_default_dtype(torch.float64)
    try:
        return function()
    finally:
        torch.set_default_dtype(torch.float32)


def trained(rank, num_ranks, streams=8):
    """Losses, clipped gradients of every step, and the parameters at the end, in float64."""

    def run():
        trainer = make_trainer(rank, num_ranks, streams=streams)
        losses, gradients = [], []
        for step in range(STEPS):
            losses.append(trainer.step(step / STEPS))
            gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).numpy().copy())
        return losses, gradients, [p.detach().numpy() for p in trainer.model.parameters()]

    return in_float64(run)


@pytest.mark.processes
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_train_what_one_process_trains(num_ranks):
    """Every step's mean loss and reduced gradient, and the parameters, agree to 1e-11; ranks are bitwise equal."""
    ((losses, gradients, parameters),) = pool(1).run(trained)
    ranks = pool(num_ranks).run(trained)
    means = [sum(step) / num_ranks for step in zip(*(rank[0] for rank in ranks), strict=True)]
    assert means == pytest.approx(losses, abs=1e-11)
    for step in range(STEPS):
        assert abs(ranks[0][1][step] - gradients[step]).max() < 1e-11
        assert all((rank[1][step] == ranks[0][1][step]).all() for rank in ranks)
    for mine, alone in zip(ranks[0][2], parameters, strict=True):
        assert abs(mine - alone).max() < 1e-9  # Adam divides by small numbers


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_streams_read_every_byte_once_and_on(num_ranks):
    """A row's segments follow one another; all ranks' rows together are the text; a target is the byte after."""
    rows = []
    for rank in range(num_ranks):
        parts = list(example().Streams(TEXT, 8, 5, rank, num_ranks).segments())
        assert [part[0].shape for part in parts] == 4 * [(8 // num_ranks, 5)] + [(8 // num_ranks, 2)]
        inputs, targets = (torch.cat(side, dim=1) for side in zip(*parts, strict=True))
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        rows.append(inputs)
    assert torch.equal(torch.cat(rows).flatten(), TEXT[:-1])


def states(rank, num_ranks):
    """The state after each step of training with a learning rate of 0, and what one long forward says."""

    def run():
        trainer = make_trainer(rank, num_ranks)
        carried = []
        for _ in range(6):
            trainer.step(progress=1.0)
            carried.append(trainer.state[0])
        whole = torch.cat([inputs for inputs, _ in trainer.streams.segments()], dim=1)
        zeros = torch.zeros(trainer.streams.num_rows, SIZES["hidden_size"])
        with torch.no_grad():
            at = [trainer.model.module(whole[:, :end], (zeros, zeros))[1] for end in (5, 10, 15, 20, 22)]
        assert not any(state.requires_grad for state in carried)
        return [float((a - b).abs().max()) for a, b in zip(carried, [*at, at[0]], strict=True)]

    return in_float64(run)


@pytest.mark.processes
def test_the_state_persists_over_segments_and_ends_with_the_stream():
    """Five segments later the state is that of one long forward; the sixth step starts from an empty state."""
    for differences in pool(2).run(states):
        assert max(differences) < 1e-12


def half_steps(rank, num_ranks, bad_rank):
    """Per step: skipped so far, loss scale, and all parameters; step 2 overflows on one rank."""
    trainer = make_trainer(rank, num_ranks, half=True)
    head = trainer.model.module.head.weight
    found = []
    for step in range(5):
        handle = None
        if step == 2 and rank == bad_rank:
            handle = head.register_hook(lambda gradient: torch.full_like(gradient, 7e4))
        trainer.step(0.0)
        if handle is not None:
            handle.remove()
        values = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).numpy().copy()
        found.append((trainer.num_skipped, trainer.scaler.get_scale(), values))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_an_overflow_on_one_rank_skips_the_step_on_all(bad_rank):
    """70,000 does not fit into 16 bits: no rank steps, every rank halves its scale, and all stay bitwise equal."""
    ranks = pool(2).run(half_steps, bad_rank)
    for step, (mine, theirs) in enumerate(zip(*ranks, strict=True)):
        assert mine[:2] == theirs[:2] == ((0, 2.0**16) if step < 2 else (1, 2.0**15))
        assert (mine[2] == theirs[2]).all()
    values = [found[2] for found in ranks[0]]
    changed = [bool((before != after).any()) for before, after in itertools.pairwise(values)]
    assert changed == [True, False, True, True]


def half_and_single(rank, num_ranks):
    """The gradients of a first step reduced in 16 and in 32 bits."""
    found = []
    for half in (True, False):
        trainer = make_trainer(0, num_ranks, half=half)
        trainer.streams = example().Streams(TEXT, 8, 5, rank, num_ranks)
        trainer.step(0.0)
        found.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    return float((found[0] - found[1]).norm() / found[1].norm())


@pytest.mark.processes
def test_half_precision_is_close_to_single():
    """16 bits keep 11 digits: relative to the gradient's norm, the mean is off by less than one in a thousand."""
    assert all(0 < difference < 1e-3 for difference in pool(2).run(half_and_single))


@pytest.mark.parametrize(("num_streams", "rate"), [(128, 5e-4), (64, 2.5e-4), (768, 3e-3), (4096, 3e-3)])
def test_the_studys_learning_rate(num_streams, rate):
    assert example().peak_learning_rate(num_streams) == pytest.approx(rate)


@pytest.mark.processes
def test_the_learning_rate_falls_linearly_and_the_norm_is_clipped():
    """Checked where they act: in the optimizer, and in the gradients it sees."""
    rates, norms = pool(1).run(rates_and_norms)[0]
    assert rates == pytest.approx([5e-4 / 16 * (1 - step / 4) for step in range(4)])
    assert all(norm == pytest.approx(1.0, rel=1e-4) for norm in norms)


def rates_and_norms(rank, num_ranks):
    trainer = make_trainer(rank, num_ranks)
    with torch.no_grad():
        trainer.model.module.head.weight.mul_(30)  # so that the gradient is longer than 1
    rates, norms = [], []
    for step in range(4):
        trainer.step(step / 4)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        norms.append(nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]).item())
    return rates, norms


def test_streams_that_cannot_be_shared_are_refused():
    with pytest.raises(SystemExit, match="8 streams cannot be shared equally by 3 ranks"):
        example().Streams(TEXT, 8, 5, 0, 3)
    with pytest.raises(SystemExit, match="too short for 8 streams"):
        example().Streams(TEXT[:8], 8, 5, 0, 2)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(100)
def test_the_example_learns(tmp_path):
    """As a user starts it, at its smallest: bits per character fall on the training and on the held-out text."""
    job = torchrun(EXAMPLE, "--quick", "--half", "--out", str(tmp_path), deadline_s=80).checked()
    curve = json.loads((tmp_path / "mlstm-shakespeare.json").read_text())["curve"]
    assert len(curve) == 2
    for key in ("train_bits_per_character", "held_out_bits_per_character"):
        assert curve[1][key] < curve[0][key] < 8.0
    assert curve[1]["held_out_bits_per_character"] < 7.0
    assert job.stdout.count("bits per character") == 2

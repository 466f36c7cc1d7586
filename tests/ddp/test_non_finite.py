"""One rank's NaN is in every rank's parameters after the step: who it was, and when nothing is said."""

import warnings

import pytest
import torch

from harness.models import Mlp, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.optim import overlap

pytestmark = pytest.mark.processes

CASES = ["loss", "middle", "embedding", "all infinite", "skipped", "scaled", "deferred"]


class Embedded(torch.nn.Module):
    """Beside the layers, a table of which a batch uses two rows."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 8)
        self.body = Mlp()

    def forward(self, x):
        return self.body(x + self.table(torch.tensor([7, 9])).sum(0))


def said_in_four_steps(rank, num_ranks, case):
    """What is said in four steps; the gradients of rank 1's second are not finite. Others go before, if deferred."""
    torch.manual_seed(0)
    module = Embedded()
    is_deferred = case == "deferred"
    model = DistributedDataParallel(
        module, bucket_cap_mb=0.0001, overlap_forward="always" if is_deferred else False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = overlap(optimizer, model) if is_deferred else optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38 if case == "scaled" else 1.0)
    bad = [False]
    place = {"middle": module.body.layers[1], "embedding": module.table}.get(case)
    if place is not None:
        place.register_forward_hook(
            lambda _m, _x, y: y.register_hook(lambda g: g * float("nan") if bad[0] else g) and None
        )
    said = []
    for step in range(-8 if is_deferred else 0, 4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            x = torch.randn(2, 8, generator=generator(8 + step, rank))
            bad[0] = step == 1 and (rank == 1 or case == "all infinite")
            loss = scaler.scale(squares(model(x)))
            if bad[0] and place is None:
                loss = loss * float("inf" if case == "all infinite" else "nan")
            loss.backward()
            if case == "scaled":
                scaler.step(optimizer)
                scaler.update()
            elif case != "skipped" or model.gradients_are_finite():
                optimizer.step()
        said += [(step, str(w.message)) for w in caught if "finite" in str(w.message)]
    return said


def said_in_all_cases(rank, num_ranks):
    return {case: said_in_four_steps(rank, num_ranks, case) for case in CASES}


@pytest.mark.filterwarnings("ignore")
def test_the_first_gradient_that_is_not_finite_is_named():
    """Rank, step and parameter, once, with the next forward, on every rank; nothing where the step was skipped."""
    first = {"middle": "body.layers.1"}
    for rank, said in enumerate(pool(2).run(said_in_all_cases)):
        assert said.pop("skipped") == said.pop("scaled") == []
        ((step, words),) = said.pop("embedding")  # rows that the sample does not hold: the next step shows it
        assert step == 3
        assert "They were already not finite before step 3. Which rank caused it is unknown" in words
        for case, messages in said.items():
            assert [step for step, _ in messages] == [2], (case, messages)
            words = messages[0][1]
            assert ("In step 10 " if case == "deferred" else "In step 2 ") in words
            culprits = "0 and 1" if case == "all infinite" else "1"
            assert words.startswith(f"rank {rank}: parameters are not finite any more. In step "), words
            assert f"gradients of rank {culprits} were not" in words, words
            assert f"was that of {first.get(case, 'body.layers.3')}" in words, words

"""`overlap_forward`: bitwise what the same training makes without it, whatever reads the model in between.

Parameters are stepped only when somebody needs them, on the thread that does. So a reader that does not wait sees the
parameters of before the step, however fast gradients arrive: other bits.
"""

import copy
import dataclasses
import functools
import io
import itertools
import os
import pickle
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.models import digest, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.comm.peers import Peers
from paceline.ddp.forward_overlap import agreement, piece_sync
from paceline.ddp.forward_overlap.agreement import agree
from paceline.errors import ConfigurationError, PeerAbortedError
from paceline.observe import timings as timings_module
from paceline.optim import overlap
from paceline.planning import TrialConfig
from paceline.planning.forward_overlap import Gain
from paceline_recipes import LAMB, LARS

pytestmark = pytest.mark.processes

STEPS = 7
CAP_MB = 0.002  # several buckets, and the large ones alone


class Aliased(nn.Module):
    """Reads the memory of its own parameter, which no function of torch that takes the parameter sees."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(
            torch.zeros(600)
        )  # closes its bucket: no earlier module's hook completes it
        self.memory = [self.offset.data]

    def forward(self, x):
        return x * (1 + self.memory[0].sum()) + self.offset[:16]


class ManyReaders(nn.Module):
    """What makes waiting difficult: tied and reused modules, parameters read past their module's forward, a list."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.attention = nn.MultiheadAttention(
            16, 2, batch_first=True
        )  # reads out_proj.weight, never calls out_proj
        self.norm = nn.BatchNorm1d(16)
        self.block = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))  # called twice
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))])
        self.aliased = Aliased()
        self.borrowed = nn.Linear(16, 16)  # its weight is used by a function
        self.rare = nn.Linear(16, 16)  # used on some ranks in some steps
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.uses_rare = False
        self.checkpoints = None

    def forward(self, words):
        x = self.embedding(words)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x.flatten(0, 1)).view_as(x)
        x = self.aliased(x)
        x = x + nn.functional.linear(x, self.borrowed.weight, self.borrowed.bias)
        for _ in range(2):
            if self.checkpoints is None:
                x = x + self.block(x)
            else:
                x = x + checkpoint(self.block, x, use_reentrant=self.checkpoints)
        if self.uses_rare:
            x = x + self.rare(x)
        return self.head(x * self.scales[0] + self.scales[1])


class ComplexLayers(nn.Module):
    """Complex parameters of two dtypes among real ones; the forward reads them in the ways that only they have."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.turn = nn.Linear(16, 33, dtype=torch.complex64)
        self.phases = nn.Parameter(torch.randn(33, dtype=torch.complex64))
        self.fine = nn.Parameter(torch.ones(7, dtype=torch.complex128))
        self.back = nn.Linear(33, 5)

    def forward(self, words):
        x = self.turn(self.embedding(words).to(torch.complex64)) * self.phases.conj()
        x = self.back((x + torch.view_as_real(self.phases).sum()).abs().tanh())
        return x * (self.fine.real + self.fine.imag).mean()


class Run:
    """One training: with or without overlap, otherwise the same. `saw` is everything that was read on the way."""

    def __init__(self, rank, mode, make=None, build=ManyReaders, **options):
        torch.manual_seed(0)
        self.rank, self.mode, self.saw, self.num_deferred = rank, mode, [], 0
        options = {"find_unused_parameters": True, "bucket_cap_mb": CAP_MB, **options}
        self.model = DistributedDataParallel(build(), overlap_forward=mode, **options)
        make = make or (
            lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-3)
        )
        self.optimizer = make(self.model.parameters())
        if mode:
            self.optimizer = overlap(self.optimizer, self.model)

    def batch(self, *parts):
        return torch.randint(0, 17, (3, 4), generator=generator(self.rank, *parts))

    def backward(self, *parts):
        squares(self.model(self.batch(*parts))).backward()

    def step(self):
        self.optimizer.step()
        self.num_deferred += bool(self.mode) and self.model.forward_overlap.has_outstanding

    def see(self, *tensors):
        assert all(bool(tensor.isfinite().all()) for tensor in tensors)  # two NaNs may differ in bits
        self.saw.append(digest([tensor.detach() for tensor in tensors]))

    def plainly(self, between=lambda *_: None):
        for step in range(STEPS):
            self.optimizer.zero_grad()
            self.backward(step)
            self.step()
            between(self, step)
        return self

    def result(self):
        state = self.optimizer.state_dict()["state"]
        own = [
            state[index] for index in sorted(state)
        ]  # they are made in the order in which gradients arrive
        tensors = [t for each in own for t in each.values() if isinstance(t, torch.Tensor)]
        self.see(*self.model.state_dict().values(), *tensors)
        self.see(*self.model.parameters())
        return self.saw, self.num_deferred


# ---- kinds of training; each takes (rank, mode), and returns what was seen


def with_optimizer(make, build=ManyReaders):
    return lambda rank, mode: Run(rank, mode, make, build).plainly().result()


def scheduled(rank, mode):
    def make(parameters):
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        optimizer.scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1)
        return optimizer  # the scheduler is there before overlap()

    return Run(rank, mode, make).plainly(lambda run, _: run.optimizer.scheduler.step()).result()


def groups_and_late_rates(rank, mode):
    def make(parameters):
        parameters = list(parameters)
        rate = torch.tensor(0.02)  # changed in place below
        return torch.optim.Adam(
            [
                {"params": parameters[::2], "lr": rate},
                {"params": parameters[1::2], "lr": 0.01, "weight_decay": 0.1},
            ],
            foreach=False,
        )

    def change(run, _step):
        run.optimizer.param_groups[0]["lr"].mul_(0.5)
        run.optimizer.param_groups[1]["weight_decay"] *= 0.5

    return Run(rank, mode, make).plainly(change).result()


def zeroing(rank, mode):
    """Gradients dropped after the step, in place, by the model, not at all, or without a step."""
    run = Run(rank, mode)
    for step in range(STEPS + 5):
        run.backward(step)
        if step != STEPS:
            run.step()
        if step % 5 == 0:
            run.optimizer.zero_grad()
        elif step % 5 == 1:
            run.optimizer.zero_grad(set_to_none=False)
        elif step % 5 == 2:
            run.model.zero_grad()
        elif step % 5 == 3:
            run.model.zero_grad(set_to_none=False)
            run.see(*[p.grad for p in run.model.parameters() if p.grad is not None])
    return run.result()


def accumulated(rank, mode):
    run = Run(rank, mode)
    for step in range(STEPS):
        if step % 2:
            run.optimizer.zero_grad()
            with run.model.accumulate([1, 2], weight=float) as micro_batches:
                for place in micro_batches:
                    run.backward(step, place)
        else:
            run.optimizer.zero_grad()
            with run.model.no_sync():
                run.backward(step, 1)
            run.backward(step, 2)
        run.step()
    run.optimizer.zero_grad()
    with run.model.no_sync():
        run.backward(99)
    run.model.sync_gradients()
    run.optimizer.step()
    return run.result()


def checkpointed(rank, mode):
    run = Run(rank, mode)
    run.model.module.checkpoints = False
    return run.plainly().result()


def reentrant(rank, mode):
    run = Run(rank, mode, static_graph=True, find_unused_parameters=False)
    run.model.module.uses_rare, run.model.module.checkpoints = True, True
    return run.plainly().result()


def rarely_used(rank, mode):
    def switch(run, step):
        run.model.module.uses_rare = step == 3 or (step == 4 and run.rank == 0)

    return Run(rank, mode).plainly(switch).result()


def two_forwards(rank, mode):
    run = Run(rank, mode)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        first, second = run.model(run.batch(step, 1)), run.model(run.batch(step, 2))
        (squares(first) + squares(second)).backward()
        run.step()
    return run.result()


def evaluated(rank, mode):
    def evaluate(run, step):
        run.model.eval()
        with torch.no_grad():
            run.see(run.model(run.batch(step, 1)) if step % 2 else run.model.module(run.batch(step, 1)))
        run.model.train()

    return Run(rank, mode).plainly(evaluate).result()


def read_everywhere(rank, mode):
    """Every way to read a model, an optimizer and gradients; the first of each step finds everything outstanding."""
    held = []

    def read(run, step):
        model, optimizer = run.model, run.optimizer
        held[:] = held or list(model.parameters())
        ways = [
            lambda: run.see(*held),
            lambda: run.see(*model.state_dict().values()),
            lambda: run.see(*copy.deepcopy(model.module).state_dict().values()),
            lambda: run.see(*pickle.loads(pickle.dumps(model.module)).state_dict().values()),
            lambda: run.see(*[t for own in optimizer.state.values() for t in own.values()]),
            lambda: run.see(*[t for own in copy.deepcopy(optimizer).state.values() for t in own.values()]),
            lambda: run.see(model.module.borrowed.weight.data, model.module.rare.weight + 1),
            lambda: run.see(torch.cat([p.detach().flatten() for p in model.parameters()])),
            lambda: run.see(torch.nn.utils.parameters_to_vector(held)),
            lambda: run.see(*torch._foreach_mul(held, 2.0)),
            lambda: run.see(torch.from_numpy(held[3].detach().numpy().copy())),
            lambda: torch.save(model.module.state_dict(), io.BytesIO()),
        ]
        ways[step % len(ways)]()

    run = Run(rank, mode)
    for step in range(17):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
        read(run, step - 4 if step >= 4 else step)
    return run.result()


def clipped(rank, mode):
    """What needs all gradients first waits for them, and says so."""
    run = Run(rank, mode)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    held = list(run.model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS + 4):
            run.optimizer.zero_grad()
            if step % 2:
                run.backward(step)
                run.see(nn.utils.clip_grad_norm_(held, 0.1))
                run.step()
            else:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = squares(run.model(run.batch(step)))
                scaler.scale(loss).backward()
                scaler.step(run.optimizer)
                scaler.update()
    said = [str(each.message) for each in caught if "a gradient was read before" in str(each.message)]
    assert len(said) <= 1
    saw, _ = run.result()
    return saw, 1


def with_closure(rank, mode):
    run = Run(rank, mode)
    for step in range(STEPS):

        def closure(step=step):
            run.optimizer.zero_grad()
            loss = squares(run.model(run.batch(step)))
            loss.backward()
            return loss

        run.see(run.optimizer.step(closure))
        run.num_deferred += bool(mode) and run.model.forward_overlap.has_outstanding
    return run.result()


def hooked(rank, mode):
    """Hooks of the optimizer see a whole step, so there is nothing to defer."""
    run = Run(rank, mode)
    run.optimizer.register_step_post_hook(
        lambda *_: run.see(*[p.data for p in run.model.module.parameters()])
    )
    run.plainly()
    return run.result()[0], 1


def two_optimizers(rank, mode):
    run = Run(rank, mode)
    head = [run.model.module.borrowed.weight]
    rest = [p for p in run.model.parameters() if p is not head[0]]
    first, second = torch.optim.SGD(rest, lr=1e-3), torch.optim.Adam(head, lr=0.01)
    if mode:
        first, second = overlap(first, run.model), overlap(second, run.model)
    run.optimizer = first
    for step in range(STEPS):
        first.zero_grad()
        second.zero_grad()
        run.backward(step)
        second.step()
        run.step()
    run.see(second.state_dict()["state"][0]["exp_avg"])
    return run.result()


def unfrozen(rank, mode):
    run = Run(rank, mode).plainly()  # wrapped again with a step outstanding
    run.model.module.borrowed.weight.requires_grad_(False)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        run.model.module, bucket_cap_mb=CAP_MB, find_unused_parameters=True, overlap_forward=mode
    )
    run.model, run.optimizer = model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if mode:
        run.optimizer = overlap(run.optimizer, model)
    run.plainly()
    model.module.borrowed.weight.requires_grad_(True)
    return run.plainly().result()


def raising(rank, mode):
    """A rank whose backward raises: everybody drops the step, parameters are untouched, training goes on."""
    run = Run(rank, mode)
    run.plainly()
    before = digest(list(run.model.parameters()))
    run.optimizer.zero_grad()
    loss = squares(run.model(run.batch(50)))
    if rank == 1:
        strike = run.model.module.block[0].weight.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward()
        strike.remove()
    else:
        with pytest.raises(PeerAbortedError, match="rank 1 raised"):
            loss.backward()
    assert digest(list(run.model.parameters())) == before
    return run.plainly().result()


def fail(_):
    raise ValueError("on purpose")


CASES = {
    "sgd": with_optimizer(None),
    "adam": with_optimizer(lambda p: torch.optim.Adam(p, lr=0.01)),
    "adamw foreach": with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True)),
    "adamw fused": with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    "rmsprop": with_optimizer(lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True)),
    "nadam": with_optimizer(lambda p: torch.optim.NAdam(p, lr=0.01)),
    "lars": with_optimizer(lambda p: LARS(p, lr=0.1, momentum=0.9)),
    "lamb": with_optimizer(lambda p: LAMB(p, lr=0.01)),
    "complex sgd": with_optimizer(None, ComplexLayers),
    "complex adam": with_optimizer(lambda p: torch.optim.Adam(p, lr=0.01), ComplexLayers),
    "scheduled": scheduled,
    "groups and late rates": groups_and_late_rates,
    "zeroing": zeroing,
    "accumulated": accumulated,
    "checkpointed": checkpointed,
    "reentrant": reentrant,
    "rarely used": rarely_used,
    "two forwards": two_forwards,
    "evaluated": evaluated,
    "read everywhere": read_everywhere,
    "clipped": clipped,
    "closure": with_closure,
    "hooked": hooked,
    "two optimizers": two_optimizers,
    "unfrozen": unfrozen,
    "raising": raising,
}


def all_cases(rank, _num_ranks, names):
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        without, _ = CASES[name](rank, False)
        with_it, num_deferred = CASES[name](rank, "always")
        found[name] = (without, with_it, num_deferred)
    return found


@pytest.mark.parametrize("names", [list(CASES)[:12], list(CASES)[12:]], ids=["first", "second"])
def test_the_same_bits_as_without(names):
    """With two ranks, everything that is read on the way is the same with forward overlap, and steps are deferred."""
    per_rank = pool(2).run(all_cases, names)
    for name in names:
        for without, with_it, num_deferred in (found[name] for found in per_rank):
            assert len(without) == len(with_it)
            assert with_it == without, name
            assert num_deferred > 0, f"{name}: nothing was deferred"
        assert per_rank[0][name][1][-1] == per_rank[1][name][1][-1], f"{name}: the ranks differ"


def deferred_or_flushed(rank, num_ranks):
    """With more than two ranks the order of sums depends on how gradients are cut: compare the same pieces."""
    warnings.simplefilter("ignore")
    agreement.AGREES_AGAIN_EVERY, last = 2, []
    for flushes in (False, True):
        run = Run(rank, "always", lambda p: torch.optim.Adam(p, lr=0.01), bucket_cap_mb=0.01)
        for step in range(STEPS):
            run.optimizer.zero_grad()
            run.backward(step)
            if flushes:
                run.model.flush()
            run.step()
        last.append(run.result())
    return last


def test_three_ranks_make_the_same_put_off_or_at_once():
    """What is deferred is exact for any number of ranks, and all ranks agree."""
    per_rank = pool(3).run(deferred_or_flushed)
    for (deferred, many), (at_once, none) in per_rank:
        assert deferred == at_once
        assert (many > 0, none) == (True, 0)
    assert len({found[0][0][-1] for found in per_rank}) == 1


def refusals(rank, num_ranks):
    """What was said to each thing that cannot be."""
    warnings.simplefilter("ignore")

    def said_to(make):
        try:
            make()
        except (ConfigurationError, RuntimeError) as error:
            return str(error)
        return ""

    def wrap(module=None, **options):
        return DistributedDataParallel(module or ManyReaders(), overlap_forward="always", **options)

    class Other(torch.optim.SGD):
        pass

    model = wrap()
    plain = DistributedDataParallel(ManyReaders())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced.step = lambda: None
    compiled = ManyReaders()
    compiled.block.compile()
    cases = {
        "must be True, False": lambda: DistributedDataParallel(ManyReaders(), overlap_forward="maybe"),
        "init_sync=False": lambda: wrap(init_sync=False),
        "only the mean": lambda: wrap(compression="fp16"),
        "sparse gradients": lambda: wrap(nn.Embedding(5, 3, sparse=True)),
        "a compiled or scripted part": lambda: wrap(compiled),
        "join() and overlap_forward": model.join,
        "register_comm_hook and overlap_forward": lambda: model.register_comm_hook(None, print),
        "the model is a Linear": lambda: overlap(sgd, nn.Linear(1, 1)),
        "without overlap_forward": lambda: overlap(sgd, plain),
        "not a torch.optim.Optimizer": lambda: overlap(None, model),
        "Other is not known to step each parameter": lambda: overlap(
            Other(model.parameters(), lr=0.1), model
        ),
        "LBFGS is not known": lambda: overlap(torch.optim.LBFGS(model.parameters()), model),
        "has been replaced on the object": lambda: overlap(replaced, model),
        "through overlap() before": lambda: overlap(overlap(sgd, model), model),
    }
    return {words: said_to(make) for words, make in cases.items()}


def test_what_cannot_be_exact_is_refused():
    for said in pool(2).run(refusals):
        for words, message in said.items():
            assert words in message, (words, message)


def agree_on(gain, *given, needed_s=None):
    if needed_s is not None:
        needed_s.append(given[1].needed_s)
    return dataclasses.replace(agree(*given), gain=gain)


def where_it_is_on(rank, num_ranks):
    """Whether it is on, the hooks that it leaves, and how often steps were deferred: by hosts and predicted gain."""
    warnings.simplefilter("ignore")
    before = dict(os.environ)
    found = {}
    for hosts, with_s in (("one", 0.5), ("several", 0.99), ("several", 0.5)):
        told = []
        os.environ.update({"LOCAL_WORLD_SIZE": "2" if hosts == "one" else "1", "WORLD_SIZE": "2"})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agreement, "AGREES_AGAIN_AFTER", (4, 5))
            patch.setattr(agreement, "TRIAL", TrialConfig(num_sweeps=1, turn_steps=STEPS - 4))
            patch.setattr(timings_module, "tell", lambda *words, told=told: told.append(words))
            patch.setattr(agreement, "agree", functools.partial(agree_on, Gain(1.0, with_s)))
            try:
                run = Run(rank, True)
                if run.model.forward_overlap is None:
                    run.mode = False  # the optimizer is as it was
                run.plainly()
            finally:
                os.environ.clear()
                os.environ.update(before)
        steps = run.model.forward_overlap
        hooks = sum(len(part._forward_pre_hooks) for part in run.model.module.modules())
        words = run.model.timings.decisions["overlap_forward"]
        assert f"overlap_forward: {words}" in str(run.model.timings).splitlines()
        assert told == ([("overlap_forward", f"overlap_forward=True: {words}")] if rank == 0 else [])
        found[hosts, with_s] = (steps and steps.is_on, hooks > 0, run.num_deferred > 0, words)
    return found


def test_it_is_off_where_nothing_can_be_gained():
    """On one host it is never on; elsewhere the ranks measure three steps, and it is on if that predicts a gain."""
    for found in pool(2).run(where_it_is_on):
        assert found == {
            ("one", 0.5): (
                None,
                False,
                False,
                "off, because all ranks are on one host, so no gradient crosses a link",
            ),
            ("several", 0.99): (
                False,
                False,
                False,
                "off, because it is predicted to save 1.0% of a step, less than 2% (990 ms with it, 1 s without)",
            ),
            ("several", 0.5): (
                True,
                True,
                True,
                "on, to be tried in turns; predicted to save 50.0% of a step (500 ms with it, 1 s without)",
            ),
        }


class Told:
    """Stands for the timings of a module's steps: those that were deferred last 1 s or 2 s, on rank 1 a bit longer."""

    def __init__(self, timings, deferred, is_shorter, rank):
        self._timings = timings
        lasted_s = [(1.0 if (each == "x") == is_shorter else 2.0) + rank / 8 for each in deferred]
        self._started_s = [0.0, *itertools.accumulate(lasted_s)]

    def recent(self):
        steps = zip(self._timings.recent(), self._started_s, strict=False)
        return [dataclasses.replace(step, started_s=at_s) for step, at_s in steps]

    def settle(self):
        pass


def what_comparing_decides(rank, num_ranks):
    """By whether steps with it are the shorter ones: which steps were deferred, whether it stays, what was seen.

    And of each plan, whether it knew that forward needs some gradients before others.
    """
    compare, trial = agreement.Agreement._compare, TrialConfig(num_sweeps=1, turn_steps=3, warm_up_steps=1)
    warnings.simplefilter("ignore")
    found = {}
    for is_shorter in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", "1")
            patch.setenv("WORLD_SIZE", "2")
            run, deferred, needed_s = Run(rank, True), [], []
            patch.setattr(agreement, "agree", functools.partial(agree_on, Gain(1.0, 0.5), needed_s=needed_s))
            patch.setattr(agreement, "TRIAL", trial)

            def told(self, trial, timings, deferred=deferred, is_shorter=is_shorter):
                compare(self, trial, Told(timings, deferred, is_shorter, rank))

            patch.setattr(agreement.Agreement, "_compare", told)
            for step in range(21):
                run.optimizer.zero_grad()
                run.backward(step)
                run.step()
                deferred.append("x" if run.model.forward_overlap.has_outstanding else ".")
                if step == 5:  # the forward before the plan after 6 steps waits for nothing
                    run.model.state_dict()
        steps = run.model.forward_overlap
        knew = [max(each) > min(each) for each in needed_s]
        words = run.model.timings.decisions["overlap_forward"]
        found[is_shorter] = ("".join(deferred), steps.is_on, steps.gain, steps.seen, knew, words)
    return found


def test_a_predicted_gain_stays_only_if_it_is_seen():
    first, second = pool(2).run(what_comparing_decides)
    assert first == second  # all ranks see the same
    deferred, is_on, gain, seen, knew, words = first[True]
    assert words == "on: measured, it saves 47.1% of a step (1.12 s with it, 2.12 s without)"
    assert (deferred, is_on, gain) == ("." * 7 + "x" * 8 + "." * 4 + "xx", True, Gain(1.0, 0.5))
    assert seen == Gain(without_s=2.125, with_s=1.125)  # the slower rank's
    assert knew == [True] * 4  # after 3, 6, 12 and 16 steps
    deferred, is_on, gain, seen, _, words = first[False]
    assert words == "off, because it saves nothing: measured, 2.12 s with it, 1.12 s without"
    assert (deferred, is_on, gain) == ("." * 7 + "x" * 4 + "." * 10, False, Gain(1.0, 0.5))
    assert seen == Gain(without_s=1.125, with_s=2.125)


def what_is_known_of_unfrozen_layers(rank, num_ranks):
    """When forward needed the gradients of each bucket, by the first plan after the front layer was unfrozen."""
    warnings.simplefilter("ignore")
    net, needed_s = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), []
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net, bucket_cap_mb=CAP_MB / 4, overlap_forward="always")
    optimizer = overlap(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "agree", functools.partial(agree_on, Gain(1.0, 0.5), needed_s=needed_s))
        for step in range(9):
            net.requires_grad_(requires_grad=step >= 5)
            net[1:].requires_grad_()
            squares(model(torch.randn(4, 16, generator=generator(rank, step)))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return needed_s[-1]


def test_layers_that_are_unfrozen_are_planned_for_when_they_are_needed():
    for needed_s in pool(2).run(what_is_known_of_unfrozen_layers):
        assert needed_s[-1] < needed_s[0]  # the front layer's are ready last and needed first
        assert sorted(needed_s, reverse=True) == list(needed_s)


WAITED_S = 0.02


def parts_and_duration(rank, num_ranks):
    """What the timings of some deferred steps add up to, of which each waits for gradients, and how long they took."""

    def wait_longer(peers, pending, doing, *consequence, wait=Peers.wait, **how):
        if doing.startswith("waiting for bucket"):
            time.sleep(WAITED_S)
        wait(peers, pending, doing, *consequence, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Peers, "wait", wait_longer)
        patch.setattr(piece_sync._Progress, "has_ended", False)  # so every bucket is waited for
        run = Run(rank, "always")
        deferred = []
        for step in range(STEPS):
            run.optimizer.zero_grad()
            run.backward(step)
            run.step()
            deferred.append(run.model.forward_overlap.has_outstanding)
        run.model.flush()
    *steps, last = run.model.timings
    began_s = steps[deferred.index(True)].started_s
    between = [step for step in steps if step.started_s >= began_s]
    parts_s = sum(sum(step.parts_s.values()) for step in between[1:]) + between[0].exposed_s
    return parts_s, last.started_s - between[0].started_s, sum(step.exposed_s for step in between)


def test_the_parts_of_deferred_steps_add_up():
    """Waiting within the next forward counts once. So the parts are never longer than what has passed."""
    for parts_s, passed_s, waited_s in pool(2).run(parts_and_duration):
        assert waited_s >= 3 * WAITED_S
        assert parts_s <= passed_s

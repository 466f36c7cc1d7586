"""`overlap_forward`: who reads at an awkward moment, in another thread or in another context, sees whole steps, too."""

import _thread
import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

from harness.models import digest, generator
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError
from paceline.optim import overlap

pytestmark = pytest.mark.processes

STEPS = 6
PUT_OFF_FROM = 3  # the ranks measure three steps


class Run:
    """A training of a small net of three layers, each in a bucket of its own."""

    def __init__(self, rank, mode, make=None, **using):
        torch.manual_seed(0)
        warnings.simplefilter("ignore")
        layers = (nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
        self.rank, self.net = rank, nn.Sequential(*layers)
        self.model = DistributedDataParallel(self.net, overlap_forward=mode, bucket_cap_mb=0.0005)
        self.mode, self.num_deferred = mode, 0
        self.use(make or (lambda parameters: torch.optim.SGD(parameters, lr=0.01)), **using)

    def use(self, make, **options):
        self.optimizer = make(self.model.parameters())
        if self.mode:
            self.optimizer = overlap(self.optimizer, self.model, **options)

    def batch(self, *parts):
        return torch.randn(8, 16, generator=generator(self.rank, *parts))

    def step(self, *parts):
        self.optimizer.zero_grad()
        self.model(self.batch(*parts)).square().mean().backward()
        self.optimizer.step()
        self.num_deferred += bool(self.mode) and self.model.forward_overlap.has_outstanding

    def result(self):
        return digest(list(self.model.parameters()))


def read_between(rank, _num_ranks, who):
    """70 steps, after each of which one weight is read; the ranks agree on an order in four of them."""
    runs = []
    for mode in (False, "always"):
        run = Run(rank, mode)
        for step in range(70):
            run.step(step)
            if rank in who:
                float(run.net[4].weight.norm())
        runs.append(run)
    without, with_it = runs
    return with_it.result() == without.result(), with_it.num_deferred


@pytest.mark.parametrize("who", [(0, 1), (0,)], ids=["all ranks", "rank 0"])
def test_one_weight_is_read_after_every_step(who):
    assert pool(2).run(read_between, who) == [(True, 70 - PUT_OFF_FROM)] * 2


class Failing(torch.optim.SGD):
    """Steps half of what it is given, then raises, once it is told to."""

    error = None

    def step(self, closure=None):
        super().step(closure)
        if self.error is not None and any(
            p.shape[0] == 32 for group in self.param_groups for p in group["params"]
        ):
            raise self.error


def raise_within(rank, _num_ranks):
    """What each read says after an optimizer has raised, or was interrupted, in a step that was deferred."""
    found = []
    for error in (RuntimeError("out of memory"), KeyboardInterrupt()):
        run = Run(rank, "always", lambda parameters: Failing(parameters, lr=0.01), per_parameter=True)
        for step in range(STEPS):
            run.step(step)
        run.optimizer.error = error
        found.append([said_by(run.step)])  # its forward reads
        found[-1] += map(
            said_by, (run.model.state_dict, run.net[2].weight.sum, run.net[4].weight.sum, run.step)
        )
    return found


def said_by(read):
    try:
        read()
    except (RuntimeError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_step_in_which_the_optimizer_raised_is_refused():
    for raised, interrupted in pool(2).run(raise_within):
        assert raised[0] == "RuntimeError: out of memory"
        assert all("because the optimizer raised: out of memory" in said for said in raised[1:]), raised
        assert interrupted[0] == "KeyboardInterrupt: "
        assert all("because the optimizer raised: KeyboardInterrupt" in said for said in interrupted[1:])


LONG_ENOUGH_S = 0.1  # for a thread that nothing stops


class Watched(torch.optim.SGD):
    """Calls `before` within each step, once it has what it steps."""

    def before(self, groups):
        """Nothing."""

    def step(self, closure=None):
        self.before(self.param_groups)
        super().step(closure)


class FlushesWhenCopied:
    """A setting of a group: as `step()` notes it, another thread completes what is outstanding."""

    model = None

    def __copy__(self):
        if self.model is not None:
            meanwhile(self.model.flush)
        return copy.copy(None)


def meanwhile(read):
    """Start this on another thread, which it may finish if nothing stops it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    thread.join(LONG_ENOUGH_S)
    return thread, found


def read_by_threads(rank, _num_ranks):
    """Another thread reads while this one steps, and completes while this one defers."""
    without = Run(rank, False, lambda p: torch.optim.SGD(p, lr=0.01))
    setting = FlushesWhenCopied()
    run = Run(
        rank,
        "always",
        lambda p: Watched([{"params": list(p), "setting": setting}], lr=0.01),
        per_parameter=True,
    )
    for step in range(STEPS):
        without.step(step)
        run.step(step)
    groups, reads = [], []

    def watch(stepped):
        parameter = stepped[0]["params"][0]
        reads.append((parameter, *meanwhile(lambda: parameter.detach().clone())))
        groups.append(sum(len(group["params"]) for group in run.optimizer.param_groups))

    run.optimizer.before = watch
    run.model.flush()
    del run.optimizer.before
    whole = []
    for parameter, thread, found in reads:
        thread.join()
        whole.append(torch.equal(found[0], parameter.detach()))
    setting.model = run.model
    run.step(STEPS)
    setting.model = None
    run.step(STEPS + 1)
    for step in (STEPS, STEPS + 1):
        without.step(step)
    return whole, set(groups), run.result() == without.result()


def test_other_threads_see_whole_steps():
    for whole, groups, is_same in pool(2).run(read_by_threads):
        assert whole == [True] * len(whole)
        assert len(whole) >= 3  # buckets
        assert groups == {6}  # who steps a bucket does not take the optimizer's groups from others
        assert is_same


def another_optimizer(run, make):
    """Its first step makes its state, in an evaluation without inference tensors; the next ones update it."""
    for step in range(STEPS):
        run.step(step)
    run.use(make)
    for step in range(3):
        run.step(STEPS, step)
        run.net.eval()
        with torch.inference_mode():
            run.net(run.batch(99, step))
        run.net.train()


def in_lower_precision(run, make):
    """The forward, which completes a step, runs under autocast; the step did not."""
    run.use(make)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.model(run.batch(step)).float().square().mean()
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()


def stepped_in_lower_precision(run, make):
    """The other way round."""
    run.use(make)
    for step in range(STEPS):
        loss = run.model(run.batch(step)).square().mean()
        run.optimizer.zero_grad()
        loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            run.optimizer.step()


def made_without_inference_mode(run, make):
    """A step under inference mode makes state that is of it, and stays so."""
    run.use(make)
    for step in range(STEPS):
        with torch.inference_mode():
            run.optimizer.zero_grad()
        run.model(run.batch(step)).square().mean().backward()
        with torch.inference_mode():
            run.optimizer.step()


def adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=0.01)


CONTEXTS = {
    "SGD, then inference mode": (another_optimizer, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
    "AdamW, then inference mode": (another_optimizer, lambda p: torch.optim.AdamW(p, lr=0.01)),
    "Adafactor, then autocast": (in_lower_precision, adafactor),
    "Adafactor under autocast": (stepped_in_lower_precision, adafactor),
    "AdamW under inference mode": (made_without_inference_mode, lambda p: torch.optim.AdamW(p, lr=0.01)),
}


def read_in_contexts(rank, _num_ranks):
    found = {}
    for name, (train, make) in CONTEXTS.items():
        bits = []
        for mode in (False, "always"):
            run = Run(rank, mode)
            train(run, make)
            is_put_off = bool(mode) and run.model.forward_overlap.has_outstanding
            bits.append(run.result())
        found[name] = (bits[0] == bits[1], is_put_off)
    return found


def test_a_step_is_made_in_the_context_of_its_call():
    for found in pool(2).run(read_in_contexts):
        assert found == {name: (True, "then inference" not in name) for name in CONTEXTS}


def loss_of(net, batch):
    return lambda named: torch.func.functional_call(net, named, (batch,)).square().sum()


def from_a_transform(run):
    """Of a module that is given its parameters."""
    named, batch = dict(run.net.named_parameters()), run.batch(99)
    by_module = torch.func.grad(loss_of(run.net, batch))(named)
    return [by_module[name] for name in sorted(named)]


def by_copies(run):
    copies = [copy.deepcopy(run.net[2].weight), *copy.deepcopy(run.net).parameters()]
    assert {type(each) for each in copies} == {nn.Parameter}
    return copies


READS = {
    "vmap": lambda run: [torch.vmap(lambda row: row * 2)(run.net[2].weight)],
    "a closure in vmap": lambda run: [torch.vmap(lambda x: run.net[0].weight @ x)(run.batch(99))],
    "grad of functional_call": from_a_transform,
    "jvp": lambda run: torch.func.jvp(torch.sin, (run.net[2].weight,), (torch.ones(32, 32),)),
    "copies": by_copies,
}


def read_by_unusual_ways(rank, _num_ranks):
    """Whether each first read of a step sees what the second does, when nothing is outstanding; and the end's bits."""
    without, run = Run(rank, False), Run(rank, "always")
    found = {}
    for step in range(PUT_OFF_FROM):
        run.step(step)
    for place, (name, read) in enumerate(READS.items(), PUT_OFF_FROM):
        run.step(place)
        first = digest(read(run))
        run.model.flush()
        found[name] = first == digest(read(run))
    for step in range(PUT_OFF_FROM + len(READS)):
        without.step(step)
    return found, run.num_deferred, run.result() == without.result()


def test_transforms_and_copies_see_whole_steps():
    for found, num_deferred, is_same in pool(2).run(read_by_unusual_ways):
        assert found == dict.fromkeys(READS, True)
        assert num_deferred == len(READS)
        assert is_same


def put(weight):
    taken = torch.zeros_like(weight.detach() if type(weight) is nn.Parameter else torch.empty(8, 32))
    taken.data = weight
    return taken


def without_functions(weight):
    with torch._C.DisableTorchFunction():
        return weight * 1


PAST_THE_HOOKS = {
    "tensor": torch.tensor,
    "asarray": lambda weight: torch.asarray(weight, copy=True),
    "new_tensor": lambda weight: torch.zeros(1).new_tensor(weight),
    "data": put,
    "as_subclass": lambda weight: weight.as_subclass(torch.Tensor),
    "without functions": without_functions,
    "parameter": nn.Parameter,
}


def read_past_the_hooks(rank, _num_ranks):
    """Of each read, whether it saw the whole step, or NaN; and the end's bits."""
    warnings.simplefilter("ignore")
    without, run = Run(rank, False), Run(rank, "always")
    for step in range(PUT_OFF_FROM):
        run.step(step)
    found = {}
    for place, (name, read) in enumerate(PAST_THE_HOOKS.items(), PUT_OFF_FROM):
        run.step(place)
        weight = run.net[4].weight
        seen = read(weight).detach().clone()
        run.model.flush()
        is_right = torch.equal(seen, weight)
        found[name] = "right" if is_right else "NaN" if bool(seen.isnan().all()) else "stale"
    for step in range(PUT_OFF_FROM + len(PAST_THE_HOOKS)):
        without.step(step)
    is_same = run.result() == without.result()
    run.step(0)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        run.net[4].weight.add_(1.0)
    return found, run.num_deferred, is_same, said_by(run.model.flush)


def test_what_torch_cannot_see_is_never_stale():
    for found, num_deferred, is_same, said_of_a_write in pool(2).run(read_past_the_hooks):
        assert found.pop("parameter") == "right"
        assert not [name for name, seen in found.items() if seen == "stale"], found
        assert num_deferred > len(found)
        assert is_same
        assert "a parameter was written" in said_of_a_write


def drop(rank, _num_ranks):
    """Wrappers that nobody has any more, with a step under way: of a module that is kept, and of one that is not."""
    kept, without, gone = Run(rank, "always"), Run(rank, False), Run(rank, "always")
    for step in range(STEPS):
        for run in (kept, without, gone):
            run.step(step)
    net, alive = kept.net, weakref.ref(gone.net[0].weight)
    is_outstanding = kept.model.forward_overlap.has_outstanding and gone.model.forward_overlap.has_outstanding
    del kept, gone, run
    gc.collect()  # the wrappers
    gc.collect()  # what completing their steps has left
    kinds = {type(parameter) for parameter in net.parameters()}
    return (
        is_outstanding,
        kinds == {nn.Parameter},
        digest(list(net.parameters())) == without.result(),
        alive(),
    )


def test_a_model_that_is_dropped_is_completed_and_freed():
    assert pool(2).run(drop) == [(True, True, True, None)] * 2


def let_go_on_a_foreign_thread(rank, _num_ranks):
    """The names of the threads that complete a step, if a thread that Python has not started lets the model go."""
    run = Run(rank, "always", lambda p: Watched(p, lr=0.01), per_parameter=True)
    for step in range(STEPS):
        run.step(step)
    names, stepped, is_done = set(), [], threading.Event()

    def watch(groups):
        names.add(threading.current_thread().name)
        stepped.extend(groups[0]["params"])
        if len(stepped) == 6:
            is_done.set()

    run.optimizer.before = watch
    _thread.start_new_thread(run.model.forward_overlap.let_go, ())
    assert is_done.wait(20)
    run.model.flush()
    return names


def test_no_thread_of_the_network_waits_for_itself():
    assert pool(2).run(let_go_on_a_foreign_thread) == [{"paceline-flush"}] * 2


def refusals(rank, _num_ranks):
    """What is said to an optimizer of another model, where it is on and where it is not. A GAN's goes on."""
    run, strangers, said = Run(rank, "always"), nn.Linear(3, 2), []
    for mode in ("always", True):  # on one host, True sets nothing up
        model = DistributedDataParallel(nn.Linear(4, 2), overlap_forward=mode)
        with pytest.raises(ConfigurationError) as caught:
            overlap(torch.optim.SGD(strangers.parameters(), lr=0.01), model)
        said.append(str(caught.value))
    both = torch.optim.SGD([*strangers.parameters(), *run.net[4].parameters()], lr=0.01)
    overlap(both, run.model)
    return said


def test_an_optimizer_of_none_of_the_parameters_is_refused():
    for said in pool(2).run(refusals):
        for message in said:
            assert "none of the 2 parameters that this SGD steps is the model's" in message

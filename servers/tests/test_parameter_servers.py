"""`reduction=ParameterServers()` and `ServerOptimizer`, by real processes over real sockets."""

import copy
from functools import partial

import pytest
import torch

from harness.models import Mlp, digest, generator, random_batch, squares
from harness.ranks import pool
from harness.running_servers import in_threads
from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError, PeerAbortedError, ServerLostError
from paceline.reductions import Mean
from paceline_servers import ParameterServers, ServerOptimizer

pytestmark = pytest.mark.processes

CAP_MB = 0.0005  # several buckets


def wrapped(addresses, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return DistributedDataParallel(
        Mlp().to(dtype), reduction=ParameterServers(addresses), bucket_cap_mb=CAP_MB
    )


def summed(num_ranks, step, module, dtype):
    """The ranks' gradients, each divided by their number, added up in the order of the ranks by one process."""
    totals = None
    for rank in range(num_ranks):
        module.zero_grad()
        squares(module(random_batch(rank, step, dtype=dtype))).backward()
        scaled = [p.grad.mul(1 / num_ranks) for p in module.parameters()]
        if dtype.itemsize == 2:
            scaled = [g.float() for g in scaled]
        totals = scaled if totals is None else [a + b for a, b in zip(totals, scaled, strict=True)]
    return [total.to(dtype) for total in totals]


def means(rank, num_ranks, addresses):
    """Against one process bitwise, against torch's DDP (bitwise for two ranks); two models beside each other."""
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        model, other = wrapped(addresses, dtype), wrapped(addresses, dtype, seed=1)
        plain = copy.deepcopy(model.module)
        torchs = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
        for step in range(3):
            for each in (model, other, torchs):
                each.zero_grad()
                squares(each(random_batch(rank, step, dtype=dtype))).backward()
            expected = summed(num_ranks, step, plain, dtype)
            for ours, theirs, one in zip(model.parameters(), torchs.parameters(), expected, strict=True):
                assert torch.equal(ours.grad, one), (dtype, step)
                exact = num_ranks == 2 and dtype.itemsize > 2
                tolerance = 0 if exact else {2: 2e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)
            found.append(digest([p.grad for m in (model, other) for p in m.parameters()]))
    sent, received = model.reduction.bytes_by_server
    return found, sent, received


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_are_those_of_one_process_in_the_order_of_ranks(num_ranks):
    with in_threads(2) as addresses:
        outcomes = pool(num_ranks).run(means, addresses)
    assert all(outcome[0] == outcomes[0][0] for outcome in outcomes)
    for _, sent, received in outcomes:
        size_bytes = 3 * 2 * sum(p.numel() for p in Mlp().parameters())
        assert all(0.4 < part / sum(sent) < 0.6 for part in sent)
        assert size_bytes < sum(sent) < 4 * size_bytes  # frames and keys of so small a model weigh as much
        assert size_bytes < sum(received) < 4 * size_bytes


class Conv(torch.nn.Module):
    """Channels last, a scalar, a part that is used in some steps, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.sometimes = torch.nn.Linear(8, 8)
        self.frozen = torch.nn.Linear(8, 4).requires_grad_(False)

    def forward(self, x, uses_all):
        features = self.conv(x).mean((2, 3)) * self.scale
        return self.frozen(self.sometimes(features) if uses_all else features)


def optimizers(module):
    groups = [
        {"params": [*module.conv.parameters()], "weight_decay": 0.01},
        {"params": [module.scale, *module.sometimes.parameters()], "lr": 0.05},
    ]
    yield torch.optim.SGD([dict(group) for group in groups], lr=0.1, momentum=0.9, nesterov=True)
    yield torch.optim.AdamW([dict(group) for group in groups], lr=0.01, betas=(0.8, 0.99))


def step_on_servers(rank, num_ranks, addresses, others):
    """Ranks that step by themselves and servers that step: the same bits; also resumed with other servers."""
    torch.set_num_threads(1)
    found = []
    for which in range(2):
        torch.manual_seed(0)
        local = DistributedDataParallel(
            Conv(), reduction=ParameterServers(addresses), bucket_cap_mb=CAP_MB, find_unused_parameters=True
        )
        here = list(optimizers(local.module))[which]
        make = lambda module, where: DistributedDataParallel(  # noqa: E731
            module, reduction=ParameterServers(where), bucket_cap_mb=CAP_MB, find_unused_parameters=True
        )
        served = make(copy.deepcopy(local.module), addresses)
        there = ServerOptimizer(list(optimizers(served.module))[which], served)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (here, there)]
        for step in range(8):
            x = torch.randn(2, 3, 6, 6, generator=generator(rank, step))
            for model, optimizer in ((local, here), (served, there)):
                optimizer.zero_grad()
                squares(model(x, step % 3 != 1)).backward()
                if model is served:
                    assert all(p.grad is None for p in model.parameters())
                optimizer.step()
            for schedule in schedules:
                schedule.step()
            for ours, theirs in zip(served.parameters(), local.parameters(), strict=True):
                assert torch.equal(ours, theirs), (which, step)
            if step == 3:
                checkpoint = there.state_dict() if rank == 0 else None
                plain = here.state_dict()
                if rank == 0:
                    for index, state in plain["state"].items():
                        for name, item in state.items():
                            assert torch.equal(checkpoint["state"][index][name], item), (index, name)
                    assert checkpoint["state"].keys() == plain["state"].keys()
                # What the plain optimizer saved is what servers load: other ones, and another number of them.
                served = make(copy.deepcopy(local.module), others)
                there = ServerOptimizer(list(optimizers(served.module))[which], served)
                there.load_state_dict(plain)
                schedules[1].optimizer = there
            if step == 5:  # parameters that somebody changes here are changed there
                for model in (local, served):
                    with torch.no_grad():
                        model.module.scale.add_(0.25)
        found.append(digest(list(served.parameters())))
    return found


def test_servers_step_as_ranks_do_and_resume_on_other_servers():
    with in_threads(2) as addresses, in_threads(3) as others:
        outcomes = pool(2).run(step_on_servers, addresses, others)
    assert outcomes[0] == outcomes[1]


def abandoned(rank, num_ranks, addresses):
    """A backward that raises on one rank, and a step that is dropped, change nothing on the servers."""
    served = wrapped(addresses)
    optimizer = ServerOptimizer(torch.optim.Adam(served.parameters(), lr=0.1), served)
    twin = wrapped(addresses)
    plain = torch.optim.Adam(twin.parameters(), lr=0.1)
    for step in range(6):
        if step == 2:
            handle = served.module.layers[0].weight.register_hook(lambda _: 1 / 0 if rank else None)
            error = ZeroDivisionError if rank == 1 else PeerAbortedError
            with pytest.raises(error):
                squares(served(random_batch(rank, 100))).backward()
            handle.remove()
        if step == 4:
            squares(served(random_batch(rank, 200))).backward()
            if rank == 0:
                assert optimizer.state_dict()["state"][0]["step"] == 4
        optimizer.zero_grad()
        plain.zero_grad()
        for model in (served, twin):
            squares(model(random_batch(rank, step))).backward()
        optimizer.step()
        plain.step()
        for ours, theirs in zip(served.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, theirs), step
    squares(served(random_batch(rank, 0))).backward()
    with pytest.raises(ConfigurationError, match=r"backward ran twice without optimizer\.step"):
        squares(served(random_batch(rank, 0))).backward()
    for model, each in ((served, optimizer), (twin, plain)):  # neither of the two has left anything behind
        each.zero_grad()
        squares(model(random_batch(rank, 6))).backward()
        each.step()
    assert all(torch.equal(a, b) for a, b in zip(served.parameters(), twin.parameters(), strict=True))
    return digest(list(served.parameters()))


def test_steps_that_are_not_used_are_taken_back():
    with in_threads(2) as addresses:
        outcomes = pool(2).run(abandoned, addresses)
    assert outcomes[0] == outcomes[1]


def changed_before_step(rank, num_ranks, addresses):
    """What somebody changes between backward and step: sent if the backward has not used it, refused if it has."""
    torch.manual_seed(0)
    twin = Conv()
    served = DistributedDataParallel(
        copy.deepcopy(twin), reduction=ParameterServers(addresses), find_unused_parameters=True
    )
    local = DistributedDataParallel(twin, reduction=ParameterServers(addresses), find_unused_parameters=True)
    there = ServerOptimizer(torch.optim.SGD(served.parameters(), lr=0.1, momentum=0.9), served)
    here = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        x = torch.randn(2, 3, 6, 6, generator=generator(rank, step))
        for model, optimizer in ((local, here), (served, there)):
            optimizer.zero_grad()
            squares(model(x, step not in (2, 3))).backward()
            if step == 2:
                with torch.no_grad():
                    model.module.sometimes.weight.mul_(3)
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(served.parameters(), local.parameters(), strict=True)), (
            step
        )
    before = digest(list(served.parameters()))
    there.zero_grad()
    squares(served(x, True)).backward()
    with torch.no_grad():
        served.module.scale.add_(0)
    with pytest.raises(ConfigurationError, match="changed between backward and step"):
        there.step()
    assert digest(list(served.parameters())) == before
    for model, optimizer in ((local, here), (served, there)):
        optimizer.zero_grad()
        squares(model(x, True)).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(served.parameters(), local.parameters(), strict=True))
    found = digest(list(served.parameters()))
    there.zero_grad()
    squares(served(x, True)).backward()
    if rank == 0:
        there.step()
    else:
        with torch.no_grad():
            served.module.scale.add_(0)
        with pytest.raises(ConfigurationError, match="changed between backward and step"):
            there.step()
    with pytest.raises(ConfigurationError, match="another account of the last step than rank"):
        squares(served(x, True)).backward()
    return found


def test_parameters_that_are_changed_between_backward_and_step():
    """What all ranks have changed, all refuse; what one has, all hear of in the next backward."""
    with in_threads(2) as addresses:
        outcomes = pool(2).run(changed_before_step, addresses)
    assert outcomes[0] == outcomes[1]


def disagree(rank, num_ranks, addresses):
    """What ranks may not differ in, and what the servers' ends say; each a line."""
    said = []

    def words(act):
        try:
            act()
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")

    served = wrapped(addresses)
    optimizer = ServerOptimizer(torch.optim.SGD(served.parameters(), lr=0.1 * (1 + rank)), served)
    words(squares(served(random_batch(rank, 0))).backward)
    del served, optimizer

    def step(servers):
        served = wrapped(servers)
        squares(served(random_batch(rank, 0))).backward()

    for servers in (["127.0.0.1:9"], None, [*addresses, *addresses, *addresses] * 9):
        words(partial(step, servers))
    return said


def test_ranks_that_differ_and_servers_that_are_not_there_are_named():
    with in_threads(2) as addresses:
        for first, nowhere, none, many in pool(2).run(disagree, addresses):
            assert first.startswith("ConfigurationError: rank"), first
            assert "has another optimizer than rank" in first
            assert nowhere.startswith("ServerLostError"), nowhere
            assert "parameter server 0 at 127.0.0.1:9 cannot be reached" in nowhere
            assert "has no servers. Start the job with paceline run --servers 2" in none
            assert "54 parameter servers are too many for a model of" in many
    assert issubclass(ServerLostError, TimeoutError)


def test_wrong_arguments_are_refused_before_anything_is_sent():
    for addresses in ([], "127.0.0.1:7000"):
        with pytest.raises(ConfigurationError, match="give a list of servers"):
            ParameterServers(addresses)
    assert repr(copy.deepcopy(ParameterServers(["a:1"]))) == "ParameterServers(addresses=['a:1'])"
    module = Mlp()

    class Wrapped:
        reduction = Mean()

    with pytest.raises(ConfigurationError, match="Wrap it as"):
        ServerOptimizer(torch.optim.SGD(module.parameters()), Wrapped())
    Wrapped.reduction = ParameterServers(["a:1"])
    Wrapped.reduction.prepare(dict(module.named_parameters()), None)
    for optimizer, words in (
        (torch.optim.LBFGS(module.parameters()), "do not step LBFGS"),
        (torch.optim.SGD(module.layers[0].parameters()), "Missing: "),
        (
            torch.optim.SGD([*module.parameters(), torch.nn.Parameter(torch.ones(1))]),
            "Not part of the model: 1",
        ),
    ):
        with pytest.raises(ConfigurationError, match=words):
            ServerOptimizer(optimizer, Wrapped())

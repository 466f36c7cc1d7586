"""`torch.compile` around, inside and beside the wrapper."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from harness.models import Mlp, digest, generator, squares
from harness.ranks import Ranks, pool
from paceline import DistributedDataParallel, SyncBatchNorm
from paceline.errors import ConfigurationError
from paceline.optim import overlap

pytestmark = pytest.mark.processes


def forward_and_backward(model, x):
    squares(model(x)).backward()


def gradients(model, rank, seed, num_steps=3, train=forward_and_backward):
    for step in range(num_steps):
        model.zero_grad()
        train(model, torch.randn(6, 8, generator=generator(seed, step, rank)))
    return [p.grad.clone() for p in model.parameters()]


def compiled(rank, _num_ranks, seed, where, backend, options, make=Mlp):
    """Largest difference of any gradient to the one without compilation."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    expected = gradients(DistributedDataParallel(make(), **options), rank, seed)
    torch.manual_seed(seed)
    module, train = make(), forward_and_backward
    if where == "whole step":
        model = DistributedDataParallel(module, **options)
        train = torch.compile(train, backend=backend)
    elif where == "outside":
        model = torch.compile(DistributedDataParallel(module, **options), backend=backend)
    elif where == "inside":
        model = DistributedDataParallel(torch.compile(module, backend=backend), **options)
    elif where == "in place":
        module.compile(backend=backend)
        model = DistributedDataParallel(module, **options)
    else:
        model = DistributedDataParallel(module, **options)
        model.compile(backend=backend)
    pairs = zip(gradients(model, rank, seed, train=train), expected, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "backend"),
    [
        ("outside", "eager"),
        ("whole step", "eager"),
        *((where, "aot_eager") for where in ("outside", "inside", "in place", "wrapper in place")),
    ],
)
def test_compiled_gradients_are_the_same(where, backend):
    """Wherever torch.compile goes, the reduced gradients are those of the plain module."""
    assert max(pool(2).run(compiled, 1, where, backend, {})) < 1e-6


def with_compiled_autograd(rank, _num_ranks):
    """Compile backward, and use torch's context: both are refused, and then the model trains."""
    torch._dynamo.reset()
    model = DistributedDataParallel(Mlp())

    def backward_in_a_context(x):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            forward_and_backward(model, x)

    with torch._dynamo.config.patch(compiled_autograd=True, optimize_ddp="python_reducer"):
        backward = torch.compile(torch.Tensor.backward, backend="eager")
        for train in (lambda x: backward(squares(model(x))), backward_in_a_context):
            with pytest.raises(ConfigurationError, match="compiled autograd runs this backward"):
                train(torch.ones(6, 8))
    assert all(p.grad is None for p in model.parameters())
    return digest(gradients(model, rank, 3))


@pytest.mark.filterwarnings("ignore")
def test_compiled_autograd_is_refused():
    """It would leave every parameter without a gradient, and say nothing."""
    first, second = pool(2).run(with_compiled_autograd)
    assert first == second


class CountsGraphs:
    """A compiler that leaves graphs as they are."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(self, graph, _inputs):
        self.num_graphs += 1
        return graph


class SixLayers(nn.Module):
    """Six layers of 1 MiB each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def graphs_and_breaks(_rank, _num_ranks, wrap, where):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiler, net = CountsGraphs(), SixLayers()
    if where == "inside":
        model = wrap(torch.compile(net, backend=compiler), bucket_cap_mb=2)
    else:
        model = torch.compile(wrap(net, bucket_cap_mb=2), backend=compiler)
    squares(model(torch.ones(2, 512))).backward()
    return compiler.num_graphs, sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.filterwarnings("ignore")
def test_dynamo_cuts_graphs_where_buckets_end(where):
    """The first bucket has one layer, each other two. They are sent before backward ends, also by torch's class."""
    expected = [(4, 0)] * 2
    assert pool(2).run(graphs_and_breaks, DistributedDataParallel, where) == expected
    assert [cuts for cuts, _ in pool(2).run(graphs_and_breaks, TorchDDP, where)] == [4, 4]


def one_whole_graph(_rank, _num_ranks):
    torch._dynamo.reset()
    model = torch.compile(DistributedDataParallel(Mlp()), backend="eager", fullgraph=True)
    squares(model(torch.ones(6, 8))).backward()
    return digest([p.grad for p in model.parameters()])


@pytest.mark.filterwarnings("ignore")
def test_the_wrapper_compiles_with_fullgraph():
    """Dynamo runs the wrapper as it is, and compiles the module in one piece."""
    first, second = pool(2).run(one_whole_graph)
    assert first == second


def stepped_by(_rank, _num_ranks, overlaps, compiles):
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = DistributedDataParallel(Mlp(), overlap_forward=overlaps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if overlaps:
        optimizer = overlap(optimizer, model)
    step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
    for number in range(4):
        optimizer.zero_grad()
        squares(model(torch.randn(6, 8, generator=generator(number)))).backward()
        step()
    model.flush()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("overlaps", [False, "always"])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_optimizer_makes_the_same_steps(overlaps):
    """Up to rounding: dynamo computes Adam's bias correction in tensors."""
    plain, compiled = (pool(2).run(stepped_by, overlaps, compiles) for compiles in (False, True))
    for ours, theirs in zip(plain, compiled, strict=True):
        assert max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) < 1e-4


@pytest.mark.parametrize(
    "options",
    [{"bucket_cap_mb": 1}, {"static_graph": True}, {"find_unused_parameters": True}, {"compression": "bf16"}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_compiled_with_options(options):
    """The options work under torch.compile too."""
    assert max(pool(2).run(compiled, 2, "outside", "eager", options)) < 1e-6


def compiled_and_put_off(rank, _num_ranks, overlaps):
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = DistributedDataParallel(Mlp(), overlap_forward=overlaps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if overlaps:
        optimizer = overlap(optimizer, model)
    step = torch.compile(model, backend="eager")
    torch._dynamo.utils.counters.clear()
    for number in range(7):
        optimizer.zero_grad()
        squares(step(torch.randn(6, 8, generator=generator(number, rank)))).backward()
        optimizer.step()
    assert not [reason for reason in torch._dynamo.utils.counters["graph_break"] if "perf_counter" in reason]
    if overlaps:
        assert model.forward_overlap.has_outstanding
    return digest(list(model.parameters()))


def test_a_step_that_is_put_off_is_made_before_a_compiled_forward():
    """What dynamo makes of a module may not run its hooks, so everything arrives first: the same bits."""
    assert pool(2).run(compiled_and_put_off, False) == pool(2).run(compiled_and_put_off, "always")


def compiled_norm(rank, _num_ranks):
    """Output and input gradient of a compiled layer that communicates, and of the layer."""
    torch._dynamo.reset()
    layer = SyncBatchNorm(3)
    results = []
    for module in (layer, torch.compile(layer, backend="aot_eager")):
        x = torch.randn(4, 3, 5, generator=generator(1, rank)).requires_grad_()
        y = module(x)
        y.pow(3).sum().backward()
        results.append((y.detach(), x.grad))
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


def test_compiled_synchronized_batch_norm():
    """Dynamo understands the all-reduce inside the layer."""
    assert max(pool(2).run(compiled_norm)) < 1e-6


def matrices():
    """No operation of which inductor would make a kernel in C++: each takes the compiler seconds."""
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))


def compiled_by_inductor(rank, num_ranks, seed):
    """On rank 0 alone: each process that compiles imports inductor first, for four seconds of a processor."""
    return compiled(rank, num_ranks, seed, "outside", "eager" if rank else "inductor", {}, matrices)


def test_inductor(tmp_path):
    """The default backend, which allocates gradients itself; the other rank computes as it is written."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # Inductor is imported for seconds, on a busy machine for many.
    with Ranks(2, env=env, group_timeout_s=100.0) as ranks:
        assert max(ranks.run(compiled_by_inductor, 4, deadline_s=110.0)) < 1e-5

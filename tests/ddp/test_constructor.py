"""The constructor: torch's signature, torch's words, and replicas that are proven equal."""

import inspect
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from harness.models import Mlp, digest, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel, version
from paceline.errors import ReplicaMismatchError

pytestmark = pytest.mark.processes

TorchDdp = nn.parallel.DistributedDataParallel


def test_signature_is_torchs():
    """Every argument of torch's, in torch's order, with torch's default."""
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    theirs = inspect.signature(TorchDdp.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {n: p.default for n, p in ours.items() if n in theirs} == {n: p.default for n, p in theirs.items()}
    assert all(p.kind is p.KEYWORD_ONLY for n, p in ours.items() if n not in theirs)


def test_it_is_torchs_class_to_whoever_asks():
    """A subclass, so that isinstance checks inside torch accept it, with torch's class attributes."""
    assert issubclass(DistributedDataParallel, TorchDdp)
    assert issubclass(DistributedDataParallel, torch.distributed.algorithms.join.Joinable)
    assert DistributedDataParallel._get_active_ddp_module() is None


def build_pair(case):
    """A module and keyword arguments that the constructor must refuse."""
    module = Mlp()
    if case == "nothing to train":
        return module.requires_grad_(requires_grad=False), {}
    if case == "no parameter":
        return nn.ReLU(), {}
    if case == "lazy":
        return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), {}
    if case == "two ids":
        return module, {"device_ids": [0, 1]}
    if case == "ids on cpu":
        return module, {"device_ids": [0]}
    if case == "output device on cpu":
        return module, {"output_device": 1}
    if case == "two kinds of device":
        module.layers[0] = nn.Linear(8, 16, device="meta")
        return module, {}
    if case == "group and mesh":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        return module, {"process_group": dist.group.WORLD, "device_mesh": mesh}
    if case == "2d mesh":
        return module, {"device_mesh": dist.device_mesh.init_device_mesh("cpu", (1, dist.get_world_size()))}
    if case == "delay without hook":
        return module, {"delay_all_reduce_named_params": [("layers.0.weight", module.layers[0].weight)]}
    raise ValueError(case)


REFUSALS = {
    "nothing to train": (
        "RuntimeError",
        "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.",
    ),
    "no parameter": (
        "RuntimeError",
        "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.",
    ),
    "lazy": (
        "RuntimeError",
        (
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        ),
    ),
    "two ids": ("ValueError", "device_ids can only be None or contain a single element."),
    "ids on cpu": (
        "ValueError",
        "DistributedDataParallel device_ids and output_device arguments only work with",
    ),
    "output device on cpu": (
        "ValueError",
        "DistributedDataParallel device_ids and output_device arguments only work with",
    ),
    "two kinds of device": (
        "ValueError",
        (
            "DistributedDataParallel's input module must be on the same type of devices, "
            "but input module parameters locate in"
        ),
    ),
    "group and mesh": ("RuntimeError", "Cannot specify both process_group and device_mesh arguments."),
    "2d mesh": ("RuntimeError", "Only 1D device mesh is supported, but got"),
    "delay without hook": (
        "ValueError",
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.",
    ),
}


def construct(_rank, _num_ranks, case):
    module, options = build_pair(case)
    DistributedDataParallel(module, **options)


@pytest.mark.parametrize("case", sorted(REFUSALS))
def test_refusals_are_torchs(case):
    """What torch refuses with a message, ours refuses with the same class and the same words."""
    kind, words = REFUSALS[case]
    for outcome in pool(2).outcomes(construct, case):
        assert outcome.error is not None, outcome.story()
        assert outcome.error.is_a(kind), outcome.story()
        assert words in outcome.error.message, outcome.story()


def gradients_over_a_mesh(rank, num_ranks, kind):
    mesh = dist.device_mesh.init_device_mesh("cpu", (num_ranks,))
    torch.manual_seed(3)
    model = kind(Mlp(), device_mesh=mesh)
    assert model.device_mesh is mesh
    squares(model(torch.randn(3, 8, generator=generator(3, rank)))).backward()
    return digest([parameter.grad for parameter in model.parameters()])


def test_a_mesh_of_one_dimension_stands_for_its_group():
    """As torch's class takes it: the same gradients, on all ranks."""
    ours = pool(2).run(gradients_over_a_mesh, DistributedDataParallel)
    assert len(set(ours)) == 1
    assert pool(2).run(gradients_over_a_mesh, TorchDdp) == ours


def warnings_of(rank, _num_ranks, options, seed):
    torch.manual_seed(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DistributedDataParallel(Mlp(), **options)
    squares(model(torch.randn(3, 8, generator=generator(seed, rank)))).backward()
    return [(w.category.__name__, str(w.message)) for w in caught], digest(
        [p.grad for p in model.parameters()]
    )


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (
            {"check_reduction": True},
            "FutureWarning",
            "The `check_reduction` argument in `DistributedDataParallel`",
        ),
        ({"broadcast_buffers": True}, "FutureWarning", "`broadcast_buffers` is deprecated"),
        ({"broadcast_buffers": False}, "FutureWarning", "`broadcast_buffers` is deprecated"),
        (
            {"broadcast_buffers": True, "forward_sync_buffers": False},
            "FutureWarning",
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified",
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_deprecated_and_ignored_arguments_warn(options, kind, words):
    """A deprecated argument warns with torch's words, an ignored one says so, and training goes on."""
    results = pool(2).run(warnings_of, options, 1)
    assert results[0][1] == results[1][1]
    for caught, _ in results:
        assert any(category == kind and words in message for category, message in caught), caught


@pytest.mark.parametrize(
    "options",
    [
        {"device_ids": []},
        {"device_ids": None, "output_device": None, "dim": 0},
        {"bucket_cap_mb": 0.001},
        {"bucket_cap_mb": 1},
        {"bucket_cap_mb_list": [1, 2, 5]},
        {"batched_grad_copy": True},
        {"gradient_as_bucket_view": False},
        {"static_graph": True, "find_unused_parameters": False},
        {"forward_sync_buffers": True},
    ],
    ids="+".join,
)
def test_every_other_argument_is_taken_silently(options):
    """Legal values warn about nothing and train."""
    results = pool(2).run(warnings_of, options, 2)
    assert results[0][1] == results[1][1]
    assert [caught for caught, _ in results] == [[], []]


def attributes(_rank, _num_ranks):
    model = DistributedDataParallel(Mlp(), bucket_cap_mb=2)
    before = model.broadcast_buffers
    model.broadcast_buffers = False
    wanted = [
        "_get_ddp_logging_data",
        "register_comm_hook",
        "_register_builtin_comm_hook",
        "_register_fused_optim",
        "_register_buffer_comm_hook",
        "_default_broadcast_coalesced",
        "join",
        "no_sync",
        "_set_static_graph",
        "_build_params_for_reducer",
        "_build_debug_param_to_name_mapping",
        "_sync_final_model",
        "_check_reducer_finalized",
        "_remove_autograd_hooks",
        "_set_ddp_sink_clone",
        "_set_ddp_runtime_logging_sample_rate",
        "_set_sparse_metadata",
        "_update_process_group",
        "_join_config",
        "parameters_to_ignore",
        "process_group",
        "forward_sync_buffers",
        "broadcast_buffers",
        "reducer",
        "logger",
        "_set_params_and_buffers_to_ignore_for_model",
        "_get_data_parallel_params",
        "_active_ddp_module",
        "_get_active_ddp_module",
        "require_backward_grad_sync",
        "require_forward_param_sync",
        "device",
        "device_type",
        "device_ids",
        "output_device",
        "dim",
        "module",
        "find_unused_parameters",
        "static_graph",
        "gradient_as_bucket_view",
        "bucket_bytes_cap",
        "is_multi_device_module",
        "join_hook",
        "join_device",
        "join_process_group",
        "mixed_precision",
    ]
    missing = [name for name in wanted if not hasattr(model, name)]
    missing += [
        f"reducer.{n}" for n in ("_get_local_used_map", "_ddp_graph_static") if not hasattr(model.reducer, n)
    ]
    return missing, before, model.forward_sync_buffers, model.bucket_bytes_cap, repr(model)


def test_attributes_that_integrations_use():
    """The private surface is there; `broadcast_buffers` is an alias of `forward_sync_buffers`."""
    for missing, before, after, cap, text in pool(2).run(attributes):
        assert missing == []
        assert (before, after, cap) == (True, False, 2 * 1024 * 1024)
        assert "DistributedDataParallel" in text


class Replica(nn.Module):
    """A module that rank `odd` builds differently, in one of the ways of `DIFFERENCES`."""

    def __init__(self, difference):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, dtype=torch.float64 if difference == "dtype" else torch.float32)
        self.conv = nn.Conv2d(2, 3, 3)
        if difference == "count":
            self.third = nn.Linear(4, 4)
        if difference == "names":
            self.renamed = self.second
            del self.second
        if difference == "shape":
            self.second = nn.Linear(2, 8)
            self.second.bias = nn.Parameter(torch.zeros(4))
        if difference == "strides":
            self.conv.to(memory_format=torch.channels_last)
        if difference == "requires_grad":
            self.second.weight.requires_grad_(requires_grad=False)
        dtype = torch.float64 if difference == "buffer dtype" else torch.float32
        shape = (3, 2) if difference == "buffer shape" else (2, 3)
        name = "moved" if difference == "buffer name" else "table"
        if difference != "buffer missing":
            self.register_buffer(name, torch.zeros(shape, dtype=dtype))
        if difference == "ignored":
            self._ddp_params_and_buffers_to_ignore = ["second.weight"]
        if difference == "order":
            self.first, self.second = self.second, self.first
            order = ["second", "first", "conv"]
            self._modules = {name: self._modules[name] for name in order}


DIFFERENCES = {
    "count": "third.weight",
    "names": "renamed.weight|second.weight",
    "order": "second.weight|first.weight",
    "shape": "second.weight",
    "strides": "conv.weight",
    "dtype": "second.weight",
    "requires_grad": "second.weight",
    "buffer dtype": "table",
    "buffer shape": "table",
    "buffer name": "moved|table",
    "buffer missing": "table",
    "ignored": "second.weight",
}


def differ(rank, num_ranks, difference, odd):
    try:
        DistributedDataParallel(Replica(difference if rank == odd else "none"))
    except RuntimeError as error:
        tensor = torch.tensor(1.0)
        dist.all_reduce(tensor)  # the group still works, in step on all ranks
        return type(error).__name__, str(error), tensor.item() == num_ranks
    return None


@pytest.mark.parametrize("difference", sorted(DIFFERENCES))
@pytest.mark.parametrize(("num_ranks", "odd"), [(2, 1), (2, 0), (3, 1)])
def test_replicas_that_differ_are_refused_on_every_rank(difference, num_ranks, odd):
    """All ranks raise the same ReplicaMismatchError, which names a rank and a parameter or buffer."""
    results = pool(num_ranks).run(differ, difference, odd)
    assert results[0] is not None
    name, message, group_works = results[0]
    assert results == [results[0]] * num_ranks
    assert name == "ReplicaMismatchError"
    assert group_works
    assert re.search(DIFFERENCES[difference], message), message
    assert re.search(rf"(rank |\[){odd or '[01]'}\b", message), message


def wrap_otherwise(rank, num_ranks):
    """What is raised where rank 1 alone wraps the same module with another argument, or runs another version."""
    same = {"init_sync": True}
    cases = {
        "find_unused_parameters": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
        "forward_sync_buffers": {"forward_sync_buffers": False},
        "broadcast_buffers": {"broadcast_buffers": False},
        "mixed_precision": {
            "mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        },
        "delayed": {"delay_all_reduce_named_params": ()},
        "bucket caps": {"bucket_cap_mb": 3},
        "reduction": {"compression": "fp16"},
        "version": {},
    }
    raised = {}
    for case, odd in cases.items():
        module = nn.Sequential(Mlp(), nn.BatchNorm1d(4))
        options = {**same, **(odd if rank == 1 else {})}
        if "delay_all_reduce_named_params" in options:
            options["delay_all_reduce_named_params"] = [("0.layers.0.weight", module[0].layers[0].weight)]
            options["param_to_hook_all_reduce"] = module[0].layers[2].weight
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")
            if case == "version" and rank == 1:
                patch.setattr(version, "__version__", "0.0.7")
            try:
                DistributedDataParallel(module, **options)
            except ReplicaMismatchError as error:
                raised[case] = str(error)
    dist.all_reduce(tensor := torch.ones(()))
    return raised, tensor.item() == num_ranks


def test_arguments_and_version_are_the_same_on_every_rank():
    """An argument that shapes what is exchanged, and the version: every rank raises, with rank and both values."""
    values = {
        "find_unused_parameters": ("find_unused_parameters", "True", "False"),
        "static_graph": ("static_graph", "True", "False"),
        "forward_sync_buffers": ("forward_sync_buffers", "True", "False"),
        "broadcast_buffers": ("buffers", "True", "False"),
        "mixed_precision": ("mixed_precision|reduction", "bfloat16|Narrow", "None|Mean"),
        "delayed": ("layers.0.weight", "delayed", "requires_grad=True"),
        "bucket caps": ("bucket caps", "3145728", "default"),
        "reduction": ("reduction", "Fp16", "Mean"),
        "version": ("Paceline", "0.0.7", re.escape(version.__version__)),
    }
    (first, works), *others = pool(3).run(wrap_otherwise)
    assert works
    assert others == [(first, True)] * 2
    assert sorted(first) == sorted(values)
    for case, message in first.items():
        for word in (*values[case], r"rank 1|\[1\]"):
            assert re.search(word, message), (case, message)


def join_with_another_version(rank, _num_ranks):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(version, "__version__", "0.0.7")
        dist.new_group(backend="paceline")


def test_a_group_of_two_versions_is_refused():
    """The backend's ranks compare versions before they map each other's memory."""
    for outcome in pool(2).outcomes(join_with_another_version):
        assert outcome.error is not None
        assert f"rank 1 runs Paceline 0.0.7, rank 0 Paceline {version.__version__}" in outcome.error.message


def shared_start(rank, _num_ranks, seed, options):
    torch.manual_seed(seed + rank)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[0].requires_grad_(requires_grad=False)
    module[1].running_mean.normal_()
    before = digest([*module.parameters(), *module.buffers()])
    model = DistributedDataParallel(module, **options)
    return before, digest([*model.parameters(), *model.buffers()])


def test_everybody_starts_with_rank_0s_state():
    """Parameters, frozen ones too, and buffers are rank 0's after construction."""
    results = pool(3).run(shared_start, 3, {})
    assert {after for _, after in results} == {results[0][0]}


def test_init_sync_false_starts_as_it_is():
    """init_sync=False: no collective, every rank keeps what it had."""
    for before, after in pool(2).run(shared_start, 4, {"init_sync": False}):
        assert before == after


def delayed(rank, num_ranks, seed, hooked):
    """Gradients of delayed parameters against the mean of both ranks' local gradients."""
    torch.manual_seed(seed)
    module = Mlp()
    late = [(n, p) for n, p in module.named_parameters() if n.startswith("layers.2")]
    model = DistributedDataParallel(
        module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=module.layers[hooked].weight
    )
    torch.manual_seed(seed)
    alone = Mlp()
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        squares(model(torch.randn(3, 8, generator=generator(seed, step, rank)))).backward()
        for r in range(num_ranks):
            (squares(alone(torch.randn(3, 8, generator=generator(seed, step, r)))) / num_ranks).backward()
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("hooked", [0, 3], ids=["hook fires after", "hook fires before"])
def test_delayed_parameters_are_reduced_and_waited_for(hooked):
    """delay_all_reduce_named_params: their gradients are the mean too when backward returns."""
    assert max(pool(2).run(delayed, 5, hooked)) < 1e-6


def delay_all(rank, num_ranks, seed):
    torch.manual_seed(seed)
    module = nn.Linear(4, 2)
    model = DistributedDataParallel(
        module,
        delay_all_reduce_named_params=list(module.named_parameters()),
        param_to_hook_all_reduce=module.weight,
    )
    xs = [torch.randn(3, 4, generator=generator(seed, r)) for r in range(num_ranks)]
    model(xs[rank]).sum().backward()
    return (module.weight.grad - sum(x.sum(0) for x in xs) / num_ranks).abs().max().item()


def test_all_parameters_delayed():
    """Delaying every parameter, which torch 2.13 refuses by accident, gives the mean as well."""
    assert max(pool(2).run(delay_all, 6)) < 1e-6


def on_a_mesh(rank, _num_ranks, seed):
    torch.manual_seed(seed + rank)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model = DistributedDataParallel(Mlp(), device_mesh=mesh)
    squares(model(torch.randn(3, 8, generator=generator(seed, rank)))).backward()
    return digest([p.grad for p in model.parameters()]), model.device_mesh == mesh


def test_device_mesh():
    """A 1-D mesh names the process group."""
    first, second = pool(2).run(on_a_mesh, 7)
    assert first == second
    assert first[1]


def static_and_unused(rank, _num_ranks, seed):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(seed)
        model = DistributedDataParallel(Mlp(), static_graph=True, find_unused_parameters=True)
        squares(model(torch.randn(3, 8, generator=generator(seed, rank)))).backward()
    return digest([p.grad for p in model.parameters()]), [str(w.message) for w in caught]


def test_static_graph_with_find_unused_parameters():
    """Both at once: it trains, and if one of them is ignored it says so."""
    first, second = pool(2).run(static_and_unused, 8)
    assert first[0] == second[0]


def too_late(rank, _num_ranks):
    model = DistributedDataParallel(Mlp())
    squares(model(torch.zeros(1, 8) + rank)).backward()
    model._set_static_graph()


def test_static_graph_cannot_come_after_the_first_iteration():
    """`_set_static_graph` after training began is refused, as torch does."""
    for outcome in pool(2).outcomes(too_late):
        assert outcome.error is not None
        assert outcome.error.is_a("RuntimeError")

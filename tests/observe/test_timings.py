"""What the wrapper says about itself: timings per step and bucket, torch's logging data, profiler ranges."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.models import Mlp, conv_net, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.comm.collectives import Work
from paceline.ddp.gradient_sync import LEAST_CALLED_BACK_BYTES, BucketSync
from paceline.observe import BucketTiming, StepTiming

pytestmark = pytest.mark.processes

TorchDdp = nn.parallel.DistributedDataParallel


def run_steps(model, rank, seed, num_steps, shape=(3, 8)):
    for step in range(num_steps):
        model.zero_grad()
        squares(model(torch.randn(shape, generator=generator(seed, step, rank)))).backward()


def record(rank, _num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(Mlp(), bucket_cap_mb=0.0005)
    empty = list(model.timings.recent(5))
    run_steps(model, rank, seed, 4)
    with model.no_sync():
        run_steps(model, rank, seed, 1)
    steps = [
        {
            "step": t.step,
            "durations": (t.forward_s, t.backward_s, t.exposed_s),
            "buckets": [(b.ready_s, b.launched_s, b.done_s) for b in t.buckets],
        }
        for t in model.timings.recent(3)
    ]
    return empty, steps, len(list(model.timings.recent(100)))


def test_step_timings():
    """One record a synchronized step; each bucket is ready, then launched, then done; launches are in order."""
    for empty, steps, num in pool(2).run(record, 1):
        assert empty == []
        assert num == 4
        assert [step["step"] for step in steps] == [2, 3, 4]
        for step in steps:
            assert min(step["durations"]) >= 0
            assert len(step["buckets"]) > 1
            launches = [launched for _, launched, _ in step["buckets"]]
            assert launches == sorted(launches)
            assert all(ready <= launched <= done for ready, launched, done in step["buckets"])


class Sent(Work):
    """What was launched; over when the test says so."""

    def __init__(self):
        self.is_over, self.callbacks = False, []

    def is_done(self):
        return self.is_over

    def on_done(self, callback):
        self.callbacks.append(callback)


def test_small_messages_are_looked_at_instead_of_calling_back():
    """A callback holds up the backend's thread: a small message's end is noted when the next one is launched."""
    sizes = [8, LEAST_CALLED_BACK_BYTES, 8]
    sent = [Sent() for _ in sizes]
    buckets = [
        SimpleNamespace(index=i, size_bytes=size, ready_s=0.0, launch=lambda *_, i=i: sent[i])
        for i, size in enumerate(sizes)
    ]
    flight = BucketSync(None, [None], None, buckets, times=None)
    for bucket in buckets[:2]:
        flight.launch(bucket)
    assert [len(work.callbacks) for work in sent] == [0, 1, 0]
    sent[0].is_over = True
    assert flight.timings()[0].done_s == 0.0
    flight.launch(buckets[2])
    first, second, third = flight.timings()
    assert second.launched_s <= first.done_s <= third.launched_s
    assert second.done_s == third.done_s == 0.0


def logging_data(rank, _num_ranks, seed, options):
    """Keys and types of torch's and of our logging data."""
    results = {}
    for name, ddp_class in (("ours", DistributedDataParallel), ("torch", TorchDdp)):
        torch.manual_seed(seed)
        model = ddp_class(conv_net(), **options)
        run_steps(model, rank, seed, 4, shape=(4, 3, 8, 8))
        data = model._get_ddp_logging_data()
        results[name] = {key: type(value).__name__ for key, value in data.items()}
        results[f"{name} values"] = {
            key: data.get(key)
            for key in (
                "world_size",
                "rank",
                "module_name",
                "num_parameter_tensors",
                "total_parameter_size_bytes",
                "backend_name",
                "dtypes",
                "find_unused_parameters",
                "bucket_cap_bytes",
                "broadcast_buffers",
                "has_sync_bn",
                "is_multi_device_module",
                "torch_distributed_debug",
            )
        }
    return results


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_logging_data_has_torchs_keys(options):
    """`_get_ddp_logging_data()`: every key of torch's, with a value of the same type; facts are equal."""
    for result in pool(2).run(logging_data, 2, options):
        assert sorted(set(result["torch"]) - set(result["ours"])) == []
        assert {key: result["ours"][key] for key in result["torch"]} == result["torch"]
        assert result["ours values"] == result["torch values"]


def logged_error(_rank, _num_ranks):
    model = DistributedDataParallel(Mlp())
    model._set_ddp_runtime_logging_sample_rate(1)
    model.logger  # noqa: B018  integrations read it
    return model._get_ddp_logging_data().get("comm_hook")


def test_logger_surface():
    """`logger`, `_set_ddp_runtime_logging_sample_rate` and an empty `comm_hook` are there."""
    assert all(not value for value in pool(2).run(logged_error))


def profiled(rank, _num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(Mlp(), bucket_cap_mb=0.0005)
    run_steps(model, rank, seed, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run_steps(model, rank, seed, 1)
    names = [event.name for event in profiler.events()]
    return (
        names.count("DistributedDataParallel.forward"),
        sum(name in ("gloo:all_reduce", "paceline:all_reduce") for name in names),
        len(model.reducer.buckets),
    )


def test_profiler_ranges():
    """The profiler shows torch's range around forward, and one all-reduce for each bucket."""
    for forwards, reductions, num_buckets in pool(2).run(profiled, 3):
        assert forwards == 1
        assert reductions == num_buckets


def rebuilt(rank, _num_ranks, seed):
    """Launch orders of parameters before and after the first step, for a module registered in reverse."""

    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(8, 4)
            self.first = nn.Linear(8, 8)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    torch.manual_seed(seed)
    model = DistributedDataParallel(Reversed(), bucket_cap_mb=0.0001)
    names = {id(p): n for n, p in model.module.named_parameters()}
    orders = []
    for _ in range(3):
        orders.append(
            [names[id(p)].split(".")[0] for bucket in model.reducer.buckets for p in bucket.parameters]
        )
        run_steps(model, rank, seed, 1)
    return orders, model._get_ddp_logging_data()["has_rebuilt_buckets"]


def test_buckets_follow_the_observed_order():
    """From the second step on buckets follow the order in which backward finished gradients, the same on all ranks."""
    first, second = pool(2).run(rebuilt, 4)
    assert first == second
    orders, has_rebuilt = first
    assert orders[0] == ["first", "first", "last", "last"]
    assert orders[1] == orders[2] == ["last", "last", "first", "first"]
    assert has_rebuilt == 1


class Uneven(nn.Module):
    """Only rank 0 uses the second layer."""

    def __init__(self, rank):
        super().__init__()
        self.first, self.second, self.uses_all = nn.Linear(4, 4), nn.Linear(4, 4), rank == 0

    def forward(self, x):
        return self.second(self.first(x)) if self.uses_all else self.first(x)


def rebuilt_where_graphs_differ(rank, _num_ranks, options):
    torch.manual_seed(3)
    model = DistributedDataParallel(Uneven(rank), bucket_cap_mb=0.0001, **options)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
    return model._get_ddp_logging_data()["has_rebuilt_buckets"], [p.grad.tolist() for p in model.parameters()]


def test_buckets_follow_the_observed_order_where_graphs_differ():
    """With `find_unused_parameters`, where torch's do not (`test_different_graph_across_ranks`). Same gradients."""
    options = [{"find_unused_parameters": True}, {"static_graph": True}]
    (searched, *others), static = (pool(2).run(rebuilt_where_graphs_differ, each) for each in options)
    assert all(each == searched for each in [*others, *static])
    assert searched[0] == 1


def test_communication_that_overlaps_counts_once():
    """Two buckets under way from 1 to 4 s, a third from 5 to 6 s; 1.5 s of it were waited for."""
    spans = [(1.0, 3.0), (2.0, 4.0), (5.0, 6.0)]
    buckets = tuple(BucketTiming(i, 8, *(a, a, b), 0.0) for i, (a, b) in enumerate(spans))
    step = StepTiming(1, 0.0, 0.0, 4.0, 1.5, buckets)
    assert (step.communication_s, step.overlapped_s) == (4.0, 2.5)

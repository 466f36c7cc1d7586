"""What is special on a device: our own cases, failed steps, refusals, step times, and mutants."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from device import late, mutants, our_cases
from device.cases import SIDES, made, vectors, wrapped
from device.marks import device
from device.ranks import differences, on_cpu, on_device, ranks
from harness.models import Mlp, sgd, squares
from paceline.comm.device import why_without_streams
from paceline.errors import ConfigurationError, PeerAbortedError, PeerLostError
from paceline_lossy.datagrams.datagram_loop import compile_all

pytestmark = device


def performed(rank, _num_ranks, name, side, schedule):
    return differences(functools.partial(our_cases.CASES[name], side=side), rank, SIDES[side], schedule)


LONG = {
    "sharded",
    "parameter servers",
    "servers that step",
    "lossy servers",
    "adasum optimizer",
    "local SGD",
    "DiLoCo",
}


@pytest.mark.parametrize("schedule", late.SCHEDULES)
@pytest.mark.parametrize("side", ["nccl", "paceline"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.lab] if n in LONG else []) for n in our_cases.CASES]
)
def test_paceline_s_own_cases(name, side, schedule):
    """Two ranks, no race, bitwise the CPU's."""
    if name == "lossy servers":
        compile_all()  # for a while, and ranks have a deadline
    assert ranks().run(performed, name, side, schedule) == ["", ""]


# ---- failures


def failing_backward(rank, _num_ranks, side, schedule):
    """One rank's backward raises in the second step of four: what each rank sees, and whether parameters stayed."""
    here = on_device(rank, SIDES[side])
    model = wrapped(made(Mlp, here), here, side)
    optimizer, seen, before = sgd(model), [], []
    with late.scheduled(schedule):
        for step in range(4):
            optimizer.zero_grad()
            loss = squares(model(vectors(here, step)))
            if step == 1:
                before = [p.detach().clone() for p in model.parameters()]
            breaks = step == 1 and rank == 1
            hook = next(iter(model.parameters())).register_hook(_raise) if breaks else None
            try:
                loss.backward()
            except (ZeroDivisionError, PeerAbortedError) as error:
                seen.append(type(error).__name__)
                unchanged = all(map(torch.equal, before, [p.detach() for p in model.parameters()]))
                seen.append(str(unchanged))
                if hook is not None:
                    hook.remove()
                continue
            optimizer.step()
        late.drain()
        return seen, [p.detach().cpu() for p in model.parameters()]


def _raise(_):
    raise ZeroDivisionError


@pytest.mark.parametrize("schedule", late.SCHEDULES)
@pytest.mark.parametrize("side", ["nccl", "paceline"])
def test_a_failed_backward_is_an_error_on_all_ranks(side, schedule):
    """In that very step, before any optimizer has stepped; and then training goes on."""
    (other, theirs), (own, ours) = ranks().run(failing_backward, side, schedule)
    assert own == ["ZeroDivisionError", "True"]
    assert other == ["PeerAbortedError", "True"]
    assert all(map(torch.equal, ours, theirs))


def dying(rank, _num_ranks, side):
    """Rank 1 is killed in the second step's backward, when buckets are on their way; what the other is told."""
    here = on_device(rank, SIDES[side])
    model = wrapped(made(Mlp, here), here, side, bucket_cap_mb=0.0003)
    with late.scheduled("latest"):
        squares(model(vectors(here, 0))).backward()
        if rank == 1:
            next(iter(model.parameters())).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(PeerLostError) as lost:
            squares(model(vectors(here, 1))).backward()
        here.group.abort()  # or the end of this would wait for what the other has launched alone
    return str(lost.value)


@pytest.mark.parametrize("side", ["nccl", pytest.param("paceline", marks=pytest.mark.lab)])
def test_a_killed_rank_is_named(side):
    """Its device will never come to the collectives that are under way; the host does not wait for them."""
    survivor, victim = ranks().outcomes(dying, side)
    assert victim.exit_code == -signal.SIGKILL
    assert survivor.clean, survivor.story()
    assert "rank 1" in survivor.value


# ---- what is refused


def refusals(rank, _num_ranks):
    """The words of each refusal."""
    there, host = on_device(rank, SIDES["nccl"]), on_cpu(rank)
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4).to(there.device))
    words = []
    for module, group in ((Mlp().to(there.device), host), (Mlp(), there), (mixed, there)):
        with pytest.raises((ConfigurationError, ValueError)) as refused:
            wrapped(module, group, "nccl")
        words.append(str(refused.value))
    model = wrapped(made(Mlp, there), there, "nccl")
    with pytest.raises(RuntimeError) as elsewhere:
        model(torch.randn(2, 8, device="late:1"))
    model.to("cpu")
    with pytest.raises(ConfigurationError) as caught:
        model(torch.randn(2, 8))
    words += [str(elsewhere.value), str(caught.value), why_without_streams(torch.device("cuda", 0))]
    dist.barrier()
    return words


def test_devices_and_groups_that_do_not_fit_are_refused():
    """A group without the module's device, whichever that is; inputs of another device; a module that was moved."""
    for without, of_the_host, mixed, elsewhere, moved, other in ranks().run(refusals):
        assert (
            "the module is on late:0, and the process group's backend 'gloo' does not support it" in without
        )
        assert (
            "the module is on cpu, and the process group's backend 'latenccl' does not support it"
            in of_the_host
        )
        assert "must be on the same type of devices" in mixed  # torch's words
        assert "got tensors on late:1 and on late:0" in elsewhere or "on late:0 and on late:1" in elsewhere
        assert "the module was moved to cpu after it had been wrapped on late:0" in moved
        assert other == "this process's accelerator is late"


# ---- step times


def recorded_steps(rank, _num_ranks, overlaps):
    """Whether the records of steps are the device's, in order, once it has done them."""
    from paceline import optim

    here = on_device(rank, SIDES["nccl"])
    options = {"overlap_forward": "always"} if overlaps else {}
    model = wrapped(made(Mlp, here), here, "nccl", **options)
    optimizer = optim.overlap(sgd(model), model) if overlaps else sgd(model)
    with late.scheduled("others"):
        for step in range(6):
            optimizer.zero_grad()
            squares(model(vectors(here, step))).backward()
            optimizer.step()
        model.flush()
        before = list(model.timings)
        model.timings.settle()
        after = list(model.timings)
    return [
        old.step == new.step
        and all(b.launched_s <= b.done_s and b.waited_s >= 0 for b in new.buckets)
        and new.exposed_s == pytest.approx(sum(b.waited_s for b in new.buckets))
        for old, new in zip(before, after, strict=True)
    ], sum(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("overlaps", [False, True])
def test_records_have_the_device_s_times(overlaps):
    for are_right, num_settled in ranks().run(recorded_steps, overlaps):
        assert len(are_right) == 6
        assert all(are_right)
        assert num_settled > 0


# ---- mutants


def test_every_wait_can_be_left_out():
    """The table of mutants is of the source as it is: each statement is found, and taken out of a live function."""
    found = mutants.mutants()
    assert len(found) > 30
    assert {mutant.kind for mutant in found} >= {
        "stream wait",
        "event record",
        "record_stream",
        "stream guard",
    }
    for mutant in found:
        with mutants.applied(mutant):
            pass


@pytest.mark.parametrize(
    ("where", "case"),
    [
        ("LaneWork.wait self._performed.order()", "read on another stream"),
        ("_waited keep_for_current_streams([tensor, *others])", "compression bf16"),
        ("BucketSync.wait self._peers.wait", "mlp"),
        ("Memory._gather keep_for_current_streams", "kept residuals"),
        ("Memory.by_name keep_for_current_streams", "kept residuals"),
        ("to_host StreamEvent([tensor.device]).block()", "mlp"),
    ],
)
def test_a_missing_wait_is_caught(where, case):
    """Some of them here; all of them by `python -m device.mutants`."""
    function, _, text = where.partition(" ")
    mutant = next(m for m in mutants.mutants() if m.function == function and m.text.startswith(text))
    found = mutants.hunt(mutant, ranks().run, late.SCHEDULES, [case])
    assert found.by is not None

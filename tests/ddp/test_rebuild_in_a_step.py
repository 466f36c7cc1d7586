"""What belongs to a step when other ranks take the members' places: gradients, windows, `join`, forward overlap."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.models import digest, squares
from harness.ranks import pool
from harness.rebuilding import batch, bits_of, mlp, refused, train_steps
from paceline import DistributedDataParallel
from paceline.data import GlobalBatch
from paceline.optim import overlap
from paceline_adasum import Adasum

pytestmark = pytest.mark.processes


def kept_gradients(rank, _num_ranks):
    model = DistributedDataParallel(mlp())
    alone = mlp()
    train_steps(model, rank, range(2))
    alone.load_state_dict(model.module.state_dict())
    model.zero_grad()
    with model.no_sync():
        squares(model(batch(5, rank))).backward()
    group = dist.new_group([0, 2])
    if rank == 1:
        return 0.0
    model.membership.rebuild(group)
    squares(model(batch(6, rank))).backward()
    for step in (5, 6):
        for other in (0, 2):
            (squares(alone(batch(step, other))) / 2).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((p.grad - q.grad).abs().max().item() for p, q in pairs)


@pytest.mark.processes
def test_gradients_of_no_sync_are_kept():
    """What was accumulated before is reduced with the rest, over the new members."""
    assert max(pool(3).run(kept_gradients)) < 1e-12


def uneven(rank, _num_ranks):
    model = DistributedDataParallel(mlp())
    group = dist.new_group([0, 2])
    with model.join():
        told = refused(lambda: model.membership.rebuild(group))
        train_steps(model, rank, range(2))
    if rank == 1:
        return None
    model.membership.rebuild(group)
    alone = mlp()
    alone.load_state_dict(model.module.state_dict())
    norms = []
    with model.join(divide_by_initial_world_size=False):
        for step in range(1 + rank):
            model.zero_grad()
            squares(model(batch(step, rank))).backward()
            norms.append(digest([p.grad for p in model.parameters()]))
    if rank == 2:
        squares(alone(batch(2, 2))).backward()  # alone in the last step
        norms.append(digest([p.grad for p in alone.parameters()]))
    return told, norms


@pytest.mark.processes
def test_uneven_inputs_after_a_rebuild():
    """Within `join` a rebuild is refused; after one, ranks without batches shadow the new members."""
    (told, first), _, (_, last) = pool(3).run(uneven)
    assert "torch's Join goes on with the ranks that it began with" in told
    assert first[0] == last[0]
    assert last[2] == last[3]


def other_refusals(rank, _num_ranks):
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(mlp())
    told = []
    with model.accumulate([batch(0, rank)]) as micro_batches:
        told.append(refused(lambda: model.membership.rebuild(group)))
        for x in micro_batches:
            squares(model(x)).backward()
    told.append(refused(lambda: model.membership.rebuild("gloo")))
    told.append(refused(lambda: model.membership.rebuild(group, source=2)))
    told.append(refused(lambda: model.membership.rebuild(group, batch=GlobalBatch((1, 1, 1)))))
    for options in (
        {"reduction": Adasum(hosts=[[0], [1]])},
        {"overlap_forward": "always"},
    ):
        model = DistributedDataParallel(mlp(), **options)
        backend, members = ("paceline", [0, 1]) if "overlap_forward" in options else ("gloo", [rank])
        other = [dist.new_group([r], backend=backend) for r in range(2)][rank]
        if len(members) > 1:
            other = dist.new_group(members, backend=backend)
        told.append(refused(lambda model=model, other=other: model.membership.rebuild(other)))
    model = DistributedDataParallel(mlp())
    state = type("State", (), {"process_group": dist.group.WORLD})()
    model.register_comm_hook(state, lambda _, bucket: bucket)
    told.append(refused(lambda model=model: model.membership.rebuild(group)))
    return told


@pytest.mark.processes
def test_what_cannot_go_on_is_refused_in_words():
    """Before anything is changed, the same on every rank."""
    told, others = pool(2).run(other_refusals)
    assert told == others
    words = [
        "within a window",
        "is given a process group",
        "ranks 0 to 1",
        "is for 3 ranks",
        "Name each rank",
        "pieces of gradients travel over Gloo",
        "state.process_group = group",
    ]
    assert len(told) == len(words)
    assert [word for word, said in zip(words, told, strict=True) if word not in said] == []


def graph_of_before(rank, _num_ranks):
    model = DistributedDataParallel(mlp())
    train_steps(model, rank, range(1))
    loss = squares(model(batch(1, rank)))
    model.membership.rebuild(dist.new_group())
    with pytest.warns(UserWarning, match="without a forward of the wrapped model"):
        loss.backward()
    model.zero_grad()
    return train_steps(model, rank, range(2, 4))


@pytest.mark.processes
def test_a_graph_of_before_reduces_nothing():
    """The backward of a forward before the rebuild stays this rank's own, and says so; nobody waits for it."""
    first, second = pool(2).run(graph_of_before)
    assert first == second


def overlapped(rank, _num_ranks, num_steps):
    groups = dist.new_group([1, 0]), dist.new_group([0, 1])
    bits, were_outstanding = [], []
    for wanted in ("always", False):
        model = DistributedDataParallel(mlp(), overlap_forward=wanted, bucket_cap_mb=0.0005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = overlap(optimizer, model) if wanted else optimizer
        for step in range(num_steps + 18):
            optimizer.zero_grad()
            squares(model(batch(step, rank))).backward()
            optimizer.step()
            if step in (num_steps, num_steps + 9):
                had = wanted and model.forward_overlap.has_outstanding
                model.membership.rebuild(groups[step == num_steps])
                has = wanted and model.forward_overlap.has_outstanding
                were_outstanding.append((had, has))
        bits.append(bits_of(model))
    return bits, were_outstanding[:2]


@pytest.mark.processes
@pytest.mark.parametrize(("num_steps", "first_is"), [(2, False), (7, True)])
def test_a_step_that_was_deferred_is_completed(num_steps, first_is):
    """With forward overlap: the bits of training without it, before and after, and steps are deferred again."""
    (bits, were), (others, were_there) = pool(2).run(overlapped, num_steps)
    assert bits[0] == bits[1] == others[0] == others[1]
    assert were == were_there == [(first_is, False), (True, False)]


def normalised(rank, _num_ranks):
    def build():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()

    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(build()))
    for step in range(2):
        squares(model(batch(step, rank))).backward()
    model.zero_grad()
    group = dist.new_group([0, 2])
    if rank == 1:
        return 0.0
    model.membership.rebuild(group)
    alone = build()
    squares(model(batch(7, rank))).backward()
    x = torch.cat([batch(7, 0), batch(7, 2)])
    squares(alone(x)).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((p.grad - q.grad).abs().max().item() for p, q in pairs)


@pytest.mark.processes
def test_synchronized_batch_norm_follows():
    """It normalises over the batches of the new members."""
    assert max(pool(3).run(normalised)) < 1e-12

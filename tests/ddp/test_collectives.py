"""Which collectives a step launches, in every mode, in which order and how large: as in the stored list.

A mode's line is what each rank launched, by group: `S` a sum, `B` a broadcast, `G` a gather, with the bytes that a
rank gives; `|` where the script went on to the next part of the mode. A change of this list changes what ranks of two
versions send each other: `PACELINE_STORE_COLLECTIVES=1 pytest tests/ddp/test_collectives.py` stores it anew.
"""

import contextlib
import os
import threading
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from harness.models import random_batch, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.optim import overlap

pytestmark = pytest.mark.processes

STORED = Path(__file__).with_name("collectives.txt")
LETTERS = {"allreduce": "S", "broadcast": "B", "allgather": "G"}


class Log:
    """Every collective of this process, by group, in the order of launches."""

    def __init__(self):
        self._groups, self._lines, self._lock = [], [], threading.Lock()

    def note(self, group, letter, tensors):
        while isinstance(tensors[0], list):
            tensors = tensors[0]
        num_bytes = sum(each.numel() * each.element_size() for each in tensors)
        with self._lock:
            if group not in self._groups:
                self._groups.append(group)
                self._lines.append([])
            self._lines[self._groups.index(group)].append(f"{letter}{num_bytes}")

    def mark(self):
        """The script goes on to the next part."""
        for line in self._lines:
            line.append("|")

    def lines(self):
        return [" ".join(line) for line in self._lines]


@contextlib.contextmanager
def logged():
    """Log what is launched within."""
    log = Log()

    def noting(method, letter):
        def launch(group, *args):
            log.note(group, letter, args[-2] if letter == "G" else args[0])
            return method(group, *args)

        return launch

    with contextlib.ExitStack() as stack:
        for name, letter in LETTERS.items():
            stack.enter_context(
                mock.patch.object(ProcessGroup, name, noting(getattr(ProcessGroup, name), letter))
            )
        yield log


class Net(nn.Module):
    """Two linear layers with a batch normalisation between them, and one that can be frozen or left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 40), nn.BatchNorm1d(40), nn.Linear(40, 4)
        self.more = nn.Linear(8, 40)
        self.raises = False

    def forward(self, x, uses_more=True):
        hidden = self.first(x) + (self.more(x) if uses_more and self.more.weight.requires_grad else 0)
        if self.raises:
            hidden.register_hook(_stumble)
        return self.last(self.norm(hidden))


def _stumble(_):
    raise ValueError("on purpose")


def wrapped(module=None, **options):
    """Over a Gloo group of its own, as between hosts, in several buckets."""
    return DistributedDataParallel(
        module or Net(), process_group=dist.new_group(), bucket_cap_mb=0.001, **options
    )


def warmed(rank, **options):
    """A model that has the order of its buckets."""
    model = wrapped(**options)
    for step in range(2):
        squares(model(x(rank, step))).backward()
        model.zero_grad()
    return model


def x(rank, step=0, num_samples=4):
    return random_batch(rank, step, shape=(num_samples, 8))


# ---- the modes; each takes the rank, warms up, and then yields once a part


def first_steps(rank):
    """The constructor, and the first two steps."""
    yield
    model = wrapped()
    yield
    for step in range(2):
        squares(model(x(rank, step))).backward()
        yield


def no_sync(rank):
    """A backward under `no_sync`, then one that synchronizes."""
    model = warmed(rank)
    yield
    with model.no_sync():
        squares(model(x(rank))).backward()
    yield
    squares(model(x(rank))).backward()


def last_forward_under_no_sync(rank):
    """Two forwards, the second under `no_sync`, and one backward of both."""
    model = warmed(rank)
    yield
    loss = squares(model(x(rank)))
    with model.no_sync():
        loss = loss + squares(model(x(rank)))
    yield
    loss.backward()


def sync_gradients(rank):
    """What `no_sync` has left is reduced without another backward; then, within a forward that is still open."""
    model = warmed(rank)
    yield
    with model.no_sync():
        squares(model(x(rank))).backward()
    model.sync_gradients()
    yield
    loss = squares(model(x(rank)))
    model.sync_gradients()
    yield
    loss.backward()


def retained(rank):
    """Two backwards of one forward."""
    model = warmed(rank)
    yield
    loss = squares(model(x(rank)))
    loss.backward(retain_graph=True)
    yield
    loss.backward()


def two_forwards(rank):
    """Two forwards and one backward; a forward in evaluation between them."""
    model = warmed(rank)
    yield
    loss = squares(model(x(rank)))
    with torch.no_grad():
        model(x(rank))
    loss = loss + squares(model(x(rank)))
    yield
    loss.backward()


def window(rank):
    """Micro-batches: two on rank 0, one on rank 1; then none on rank 1."""
    model = warmed(rank)
    yield
    for count in (2 - rank, 1 - rank):
        model.zero_grad()
        with model.accumulate([x(rank)] * count, weight=len) as micro_batches:
            for each in micro_batches:
                squares(model(each)).backward()
        yield


def window_that_raises(rank):
    """Rank 1 raises in its window; the next one is complete."""
    model = warmed(rank)
    yield
    for raises in (rank == 1, False):
        model.zero_grad()
        with contextlib.suppress(Exception), model.accumulate([x(rank)] * 2) as micro_batches:
            for each in micro_batches:
                squares(model(each)).backward()
                if raises:
                    raise ValueError
        yield


def weighed(rank):
    """Plain steps by weight: batches of other sizes; then two backwards of one forward."""
    model = warmed(rank, weight=len)
    yield
    squares(model(x(rank, 0, 2 + rank))).backward()
    yield
    loss = squares(model(x(rank, 0, 2 + rank)))
    loss.backward(retain_graph=True)
    yield
    loss.backward()


def shares(rank):
    """Plain steps of a `batch_sampler`."""
    sampler = GlobalShuffle(12, GlobalBatch((2, 1)), rank=rank)
    model = wrapped(batch_sampler=sampler)
    yield
    for batches in sampler.steps(torch.utils.data.DataLoader(range(12), batch_sampler=sampler)):
        squares(model(x(rank, 0, 1 + len(batches[0])))).backward()
        yield
        model.zero_grad()


def skipping(rank):
    """A step that skips a layer, and one that does not."""
    module = Net()
    model = wrapped(module, droppable=[module.more])
    for step in range(2):
        squares(model(x(rank, step))).backward()
    yield
    with model.skip(module.more):
        squares(model(x(rank), False)).backward()
    yield
    squares(model(x(rank))).backward()


def deferred(rank):
    """Forward overlap: steps that are deferred. Pieces leave at any time, in a measured order: they are sorted."""
    model = wrapped(overlap_forward="always")
    optimizer = overlap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(8):
        optimizer.zero_grad()
        squares(model(x(rank, step))).backward()
        optimizer.step()
    model.flush()
    yield from ()


def joined(rank):
    """`join`: two steps on rank 0, one on rank 1; once divided by all, once by those that have batches."""
    model = warmed(rank)
    yield
    for by_all in (True, False):
        with model.join(divide_by_initial_world_size=by_all):
            for step in range(2 - rank):
                squares(model(x(rank, step))).backward()
        yield


def joined_windows(rank):
    """As `joined`, in windows."""
    model = warmed(rank)
    yield
    model.zero_grad()
    with model.join():
        for step in range(2 - rank):
            model.zero_grad()
            with model.accumulate([x(rank, step)]) as micro_batches:
                for each in micro_batches:
                    squares(model(each)).backward()


def aborted(rank):
    """A backward that raises on rank 1, and on both; the steps after each."""
    model = warmed(rank)
    yield
    for raises in (rank == 1, False, True, False):
        model.module.raises = raises
        with contextlib.suppress(Exception):
            squares(model(x(rank))).backward()
        model.zero_grad()
        yield


def evaluated_behind_a_raise(rank):
    """A backward that raises on rank 1, which then evaluates; the next step."""
    model = warmed(rank)
    yield
    model.module.raises = rank == 1
    with contextlib.suppress(Exception):
        squares(model(x(rank))).backward()
    model.module.raises = False
    with torch.no_grad():
        model(x(rank))
    yield
    squares(model(x(rank))).backward()


def forward_without_backward(rank):
    """Rank 1 runs a forward more, whose backward never comes; the step after it."""
    model = warmed(rank)
    yield
    if rank == 1:
        model(x(rank))
    with contextlib.suppress(Exception):
        squares(model(x(rank))).backward()
    yield
    squares(model(x(rank))).backward()


def unfrozen(rank):
    """A layer is unfrozen between two steps."""
    module = Net()
    module.more.requires_grad_(False)
    model = wrapped(module)
    for step in range(2):
        squares(model(x(rank, step))).backward()
    yield
    module.more.requires_grad_(True)
    squares(model(x(rank))).backward()
    yield
    squares(model(x(rank))).backward()


def two_modules(rank):
    """One backward through two wrapped modules over one group."""
    group = dist.new_group()
    first, second = (
        DistributedDataParallel(nn.Linear(8, 8), process_group=group, bucket_cap_mb=0.0001) for _ in range(2)
    )
    for _ in range(2):
        squares(second(first(x(rank)))).backward()
    yield
    squares(second(first(x(rank)))).backward()


def rebuilt(rank):
    """Over another group, with a gradient of `no_sync`."""
    model = warmed(rank)
    yield
    with model.no_sync():
        squares(model(x(rank))).backward()
    model.membership.rebuild(dist.new_group())
    yield
    squares(model(x(rank))).backward()


MODES = [
    first_steps,
    no_sync,
    last_forward_under_no_sync,
    sync_gradients,
    retained,
    two_forwards,
    window,
    window_that_raises,
    weighed,
    shares,
    skipping,
    deferred,
    joined,
    joined_windows,
    aborted,
    evaluated_behind_a_raise,
    forward_without_backward,
    unfrozen,
    two_modules,
    rebuilt,
]


def performed(rank, _num_ranks):
    """By mode, each group's line."""
    warnings.simplefilter("ignore")
    found = {}
    for mode in MODES:
        with logged() as log, mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}):  # as between hosts
            for _ in mode(rank):
                log.mark()
        found[mode.__name__] = log.lines()
    found["deferred"][1] = " ".join(sorted(found["deferred"][1].split()))
    return found


def as_text(ranks):
    """A mode, then a line for each group: rank 0's, and rank 1's if its script was elsewhere meanwhile."""
    text = ""
    for mode, lines in ranks[0].items():
        text += f"{mode}\n"
        for first, second in zip(lines, ranks[1][mode], strict=True):
            text += f"    {first}\n" + (f"    rank 1: {second}\n" if second != first else "")
    return text


def test_collectives_are_those_of_the_stored_list():
    """The same on both ranks, in any mode that a step knows."""
    ranks = pool(2).run(performed)
    unmarked = [
        {m: [line.replace("| ", "").rstrip(" |") for line in ls] for m, ls in each.items()} for each in ranks
    ]
    assert unmarked[0] == unmarked[1]
    if os.environ.get("PACELINE_STORE_COLLECTIVES"):
        STORED.write_text(as_text(ranks))
    assert as_text(ranks) == STORED.read_text()

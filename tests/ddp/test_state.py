"""State on its way out and in: state_dict, torch's checkpoint utilities, pickle and deepcopy."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint_state

from harness.models import Mlp, digest, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel, SyncBatchNorm

pytestmark = pytest.mark.processes

TorchDdp = nn.parallel.DistributedDataParallel


class HoldsModule(nn.Module):
    """A model with an attribute that is itself called `module`, and buffers."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.modules_list = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.modules_list[0](self.norm(self.module(x)))


class ExtraState(nn.Linear):
    """A layer with extra state."""

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        self.restored = state


class HoldsHeads(nn.Module):
    """Two layers of one name and shape, one of them within a child called `module`."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.module = nn.Module()
        self.module.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.module.head(x))


BUILDERS = {
    "mlp": Mlp,
    "module called module": HoldsModule,
    "extra state": lambda: ExtraState(4, 2),
    "one linear": lambda: nn.Linear(4, 2),
}


def keys_and_round_trips(_rank, _num_ranks, name, seed):
    torch.manual_seed(seed)
    ours = DistributedDataParallel(BUILDERS[name]())
    theirs = TorchDdp(BUILDERS[name]())
    plain = ours.module.state_dict()
    results = {"keys": list(ours.state_dict()) == list(theirs.state_dict())}
    bare = BUILDERS[name]()
    bare.load_state_dict({key[len("module.") :]: value for key, value in ours.state_dict().items()})
    results["ours to bare, by cutting the prefix off"] = digest(list(bare.parameters())) == digest(
        list(ours.parameters())
    )

    def equal(a, b):
        return digest(list(a.parameters())) == digest(list(b.parameters()))

    fresh = DistributedDataParallel(BUILDERS[name]())
    fresh.load_state_dict(ours.state_dict())
    results["ours to ours"] = equal(fresh, ours)
    fresh.load_state_dict(theirs.state_dict())
    results["torch's, with prefix, to ours"] = equal(fresh, theirs)
    fresh.load_state_dict(plain)
    results["bare to ours"] = equal(fresh, ours)
    theirs.load_state_dict(ours.state_dict())
    results["ours to torch's"] = equal(theirs, ours)
    theirs = TorchDdp(BUILDERS[name]())
    checkpoint_state.set_model_state_dict(theirs, checkpoint_state.get_model_state_dict(ours))
    results["ours to torch's by checkpoint utilities"] = equal(theirs, ours)
    theirs = TorchDdp(BUILDERS[name]())
    checkpoint_state.set_model_state_dict(fresh, checkpoint_state.get_model_state_dict(theirs))
    results["torch's to ours by checkpoint utilities"] = equal(fresh, theirs)
    before = ours.state_dict()
    results["input is not changed"] = list(theirs.state_dict()) == list(
        TorchDdp(BUILDERS[name]()).state_dict()
    )
    results["metadata"] = before._metadata.keys() == theirs.state_dict()._metadata.keys()
    return results


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_state_dict_goes_everywhere(name):
    """Torch's `module.` prefix out; with or without it in; to and from the bare module, torch's DDP, DCP utilities."""
    for results in pool(2).run(keys_and_round_trips, name, 1):
        assert results == dict.fromkeys(results, True)


def inside_another_module(_rank, _num_ranks, seed):
    """A wrapped module as a child of another one."""
    torch.manual_seed(seed)
    outer = nn.ModuleDict({"net": DistributedDataParallel(Mlp()), "head": nn.Linear(4, 2)})
    plain = nn.ModuleDict({"net": Mlp(), "head": nn.Linear(4, 2)})
    theirs = nn.ModuleDict({"net": TorchDdp(Mlp()), "head": nn.Linear(4, 2)})
    same_keys = list(outer.state_dict()) == list(theirs.state_dict())
    outer.load_state_dict(plain.state_dict())
    theirs.load_state_dict(outer.state_dict())
    torch.manual_seed(seed)
    theirs = nn.ModuleDict({"net": TorchDdp(Mlp()), "head": nn.Linear(4, 2)})
    outer.load_state_dict(theirs.state_dict())
    return same_keys, digest(list(outer.parameters())) == digest(list(theirs.parameters()))


def test_state_dict_of_a_wrapped_child():
    """The names are those of torch's class within the outer module; both forms load."""
    assert pool(2).run(inside_another_module, 2) == [(True, True)] * 2


def strict_loading(_rank, _num_ranks):
    model = DistributedDataParallel(nn.Linear(4, 2))
    missing = model.load_state_dict({"weight": torch.ones(2, 4), "fc.weight": torch.ones(1)}, strict=False)
    try:
        model.load_state_dict({"weight": torch.ones(2, 4), "stranger": torch.ones(1)})
    except RuntimeError as error:
        text = str(error)
    return list(missing.missing_keys), list(missing.unexpected_keys), '"stranger"' in text, "bias" in text


def test_strict_loading_tells_what_is_wrong():
    """Missing and unexpected keys are reported; strict=True raises."""
    for missing, unexpected, stranger, bias in pool(2).run(strict_loading):
        assert [key.removeprefix("module.") for key in missing] == ["bias"]
        assert unexpected == ["fc.weight"]
        assert stranger
        assert bias


def partial_loading(_rank, _num_ranks):
    """What loads of a part, or of another model's state, change and say, by our class and by torch's."""
    results = []
    for cls in (DistributedDataParallel, TorchDdp):
        torch.manual_seed(0)
        model = cls(HoldsHeads())
        own = model.state_dict()
        parts = [
            {name: torch.full_like(value, 7.0) for name, value in own.items() if name.startswith(prefix)}
            for prefix in ("module.head.", "module.module.", "module.module.head.w", "module.head.b")
        ]
        parts += [{"module.fc.weight": torch.zeros(1)}, {"module.module.fc.weight": torch.zeros(1)}]
        for part in parts:
            model.load_state_dict(own)
            said = model.load_state_dict(part, strict=False)
            results.append(
                (digest(list(model.state_dict().values())), said.missing_keys, said.unexpected_keys)
            )
    fresh = DistributedDataParallel(HoldsHeads())
    bare = model.module.state_dict()
    versions = dict(bare._metadata)
    fresh.load_state_dict(bare)
    is_whole = digest(list(fresh.parameters())) == digest(list(model.parameters()))
    return results[: len(parts)], results[len(parts) :], is_whole and versions == dict(bare._metadata)


def test_a_part_of_the_own_state_goes_where_its_names_say():
    """Also where it would fit without the prefix; and what fits nowhere is named as in the file."""
    for ours, theirs, bare_loads in pool(2).run(partial_loading):
        assert ours == theirs
        assert bare_loads


def load_then_train(rank, _num_ranks, seed):
    """Digest after: train, save, train on; and after: load into a new one, train on."""
    digests = []
    torch.manual_seed(seed)
    first = DistributedDataParallel(HoldsModule())
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)

    def steps(model, optimizer, start):
        for step in range(start, start + 3):
            optimizer.zero_grad()
            squares(model(torch.randn(5, 4, generator=generator(seed, step, rank)))).backward()
            optimizer.step()
        digests.append(digest([*model.parameters(), *model.buffers()]))

    steps(first, optimizer, 0)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    steps(first, optimizer, 3)
    file.seek(0)
    saved = torch.load(file)
    second = DistributedDataParallel(HoldsModule())
    second.load_state_dict(saved["model"])
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(saved["optimizer"])
    steps(second, optimizer, 3)
    return digests[1] == digests[2]


def test_a_run_goes_on_from_its_checkpoint():
    """Saving and loading model and optimizer, then training on, gives the same bits as not stopping."""
    assert pool(2).run(load_then_train, 3) == [True, True]


def distributed_checkpoint(rank, _num_ranks, seed, folder):
    torch.manual_seed(seed)
    ours = DistributedDataParallel(Mlp())
    optimizer = torch.optim.Adam(ours.parameters())
    squares(ours(torch.randn(3, 8, generator=generator(seed, rank)))).backward()
    optimizer.step()
    model_state, optimizer_state = checkpoint_state.get_state_dict(ours, optimizer)
    names = set(optimizer_state["state"])
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    theirs = TorchDdp(Mlp())
    their_optimizer = torch.optim.Adam(theirs.parameters())
    their_state = dict(
        zip(("model", "optimizer"), checkpoint_state.get_state_dict(theirs, their_optimizer), strict=True)
    )
    dcp.load(their_state, checkpoint_id=folder)
    checkpoint_state.set_state_dict(
        theirs,
        their_optimizer,
        model_state_dict=their_state["model"],
        optim_state_dict=their_state["optimizer"],
    )
    return names == set(ours.module.state_dict()), digest(list(theirs.parameters())) == digest(
        list(ours.parameters())
    )


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoint_from_ours_to_torchs(tmp_path):
    """`torch.distributed.checkpoint` saves ours under clean names, and torch's DDP loads it."""
    assert pool(2).run(distributed_checkpoint, 4, str(tmp_path)) == [(True, True)] * 2


def copies(rank, _num_ranks, seed, how):
    """Digests of three steps of a model, and of a copy made before them."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(HoldsModule(), bucket_cap_mb=0.0001)
    squares(model(torch.randn(5, 4, generator=generator(seed, 99, rank)))).backward()
    model.zero_grad()
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    digests = []
    for one in (model, other):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            squares(one(torch.randn(5, 4, generator=generator(seed, step, rank)))).backward()
            optimizer.step()
        digests.append(digest([*one.parameters(), *one.buffers()]))
        digests.append(list(one.state_dict()))
    return digests


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_train_like_the_original(how):
    """deepcopy, pickle and torch.save: the copy synchronizes and trains to the same bits."""
    first, second = pool(2).run(copies, 5, how)
    assert first[:2] == first[2:]
    assert first == second


class Branching(nn.Module):
    """A normalised layer below a head that a rank may leave out."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = SyncBatchNorm(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x, uses_head):
        y = self.norm(self.body(x))
        return self.head(y) if uses_head else y


def normalised_copies(rank, _num_ranks):
    """What a model and its copies train, where ranks fill buckets at different times between the layers' sums."""
    torch.manual_seed(3)
    model = DistributedDataParallel(Branching(), bucket_cap_mb=1e-5, find_unused_parameters=True)
    trained = []
    for one in [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]:
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            squares(one(torch.randn(5, 4, generator=generator(3, step, rank)), step % 2 == rank)).backward()
            optimizer.step()
        one.eval()
        if rank == 0:
            one(torch.ones(2, 4), True)  # a rank may evaluate alone
        trained.append(digest([*one.parameters(), *one.buffers()]))
    return trained


def test_copies_with_synchronized_batch_norm_train_like_the_original():
    """A copy's layers get a group of their own: over the gradients' group the ranks would keep different orders."""
    first, second = pool(2).run(normalised_copies)
    assert first == second
    assert len(set(first)) == 1


def pickle_of_a_subgroup(_rank, _num_ranks):
    group = torch.distributed.new_group([0, 1])
    return pickle.dumps(DistributedDataParallel(nn.Linear(2, 2), process_group=group)) is not None


def test_pickling_needs_the_default_group():
    """With another group, pickling is refused in torch's words."""
    words = "DDP Pickling/Unpickling are only supported when using DDP with the default process group"
    for outcome in pool(2).outcomes(pickle_of_a_subgroup):
        assert outcome.error is not None
        assert words in outcome.error.message

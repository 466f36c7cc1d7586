"""A state arrives as it was: all bits, all kinds of keys, and nothing that would have to be unpickled."""

import copy

import numpy as np
import pytest
import torch

from paceline.elastic.state_tree import PackedState, empty_tensors, pack, unpack
from paceline.errors import ConfigurationError


def sent(tree):
    """As another rank has it."""
    packed = pack(tree)
    room = empty_tensors(packed.words)
    for mine, theirs in zip(room, packed.tensors, strict=True):
        mine.copy_(theirs)
    return unpack(PackedState(packed.words, room))


def test_the_state_of_an_optimizer_arrives_in_all_its_bits():
    """Keys that are numbers, a step that is a tensor, floats that are no decimal fractions."""
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + 0.2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    model(torch.randn(4, 3).double()).sum().backward()
    optimizer.step()
    schedule.step()
    state = optimizer.state_dict()
    found = sent({"optimizer": state, "schedule": schedule.state_dict()})
    assert found["schedule"] == schedule.state_dict()
    assert found["optimizer"]["param_groups"] == state["param_groups"]
    assert list(found["optimizer"]["state"]) == [0, 1]
    for index, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(found["optimizer"]["state"][index][name], value)
    other = torch.optim.AdamW(copy.deepcopy(model).parameters())
    other.load_state_dict(found["optimizer"])
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_containers_numbers_and_shapes_stay_what_they_are():
    """A tuple is no list, True is no 1, and a tensor of no elements has its shape."""
    tree = {"a": (1, [2.5, None]), 3: True, "nan": float("inf"), "t": torch.zeros(0, 4, dtype=torch.int32)}
    twice, conjugate = torch.ones(2), torch.tensor([1 + 2j]).conj()
    tree |= {"b": b"\xff\0", "one": np.float32(0.1), "rows": np.arange(6, dtype=np.uint16).reshape(2, 3).T}
    tree |= {"none": (b"", np.zeros(0)), "twice": [twice, twice], "conjugate": conjugate}
    found = sent(tree)
    assert (found["b"], found["none"][0], found["none"][1].shape) == (tree["b"], b"", (0,))
    assert (type(found["one"]), found["one"]) == (np.float32, tree["one"])
    assert found["rows"].dtype == np.uint16
    assert np.array_equal(found["rows"], tree["rows"])
    assert found["twice"][0] is found["twice"][1]
    assert len(pack(tree["twice"]).tensors) == 1
    assert torch.equal(found["conjugate"], conjugate)
    assert found["a"] == (1, [2.5, None])
    assert found[3] is True
    assert found["nan"] == float("inf")
    assert found["t"].shape == (0, 4)
    assert found["t"].dtype == torch.int32


@pytest.mark.parametrize(
    "value",
    [object(), {1}, np.array(["x"]), torch.ones(2).to_sparse(), 1j],
    ids=lambda value: type(value).__name__,
)
def test_what_would_have_to_be_unpickled_is_refused_by_its_place(value):
    """The error says where it is, and where it may come from."""
    name = type(value).__name__
    with pytest.raises(ConfigurationError, match=rf"state\['x'\]\[1\] is a {name}.* and get_extra_state"):
        pack({"x": [1, value]})

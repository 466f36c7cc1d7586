"""Who opens a Gloo group stops waiting for a rank that does not come, once its membership is over."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline.comm.given_up import given_up_when
from paceline.errors import PeerLostError
from paceline.process_group.connections import make_gloo

PATIENCE = timedelta(seconds=3)


@pytest.mark.parametrize(
    "open_group",
    [
        lambda: c10d.ProcessGroupGloo(dist.HashStore(), 0, 2, timeout=PATIENCE),
        lambda: make_gloo(dist.HashStore(), 0, 2, PATIENCE, "127.0.0.1", connects_now=True),
    ],
    ids=["c10d", "within our backend"],
)
def test_who_opens_a_group_stops_waiting_when_it_is_over(open_group):
    over = threading.Event()
    threading.Timer(0.2, over.set).start()
    with given_up_when(over.is_set), pytest.raises(PeerLostError, match="was lost while"):
        open_group()
    assert c10d.ProcessGroupGloo is dist.ProcessGroupGloo


def test_a_group_is_opened_otherwise():
    store = dist.HashStore()
    with given_up_when(lambda: False):
        group = c10d.ProcessGroupGloo(store, 0, 1, timeout=PATIENCE)
        assert isinstance(group, c10d.ProcessGroupGloo)
        with pytest.raises(RuntimeError, match="rank < size"):
            c10d.ProcessGroupGloo(store, 3, 1, timeout=PATIENCE)
    assert type(group) is dist.ProcessGroupGloo

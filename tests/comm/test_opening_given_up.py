"""Who opens a Gloo group stops waiting for a rank that does not come, once its membership is over."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline.comm import opened_groups
from paceline.errors import PeerLostError

PATIENCE = timedelta(seconds=3)


def test_who_opens_a_group_stops_waiting_when_it_is_over():
    over = threading.Event()
    threading.Timer(0.2, over.set).start()
    with opened_groups.given_up_when(over.is_set), pytest.raises(PeerLostError, match="was lost while"):
        c10d.ProcessGroupGloo(dist.HashStore(), 0, 2, timeout=PATIENCE)
    assert c10d.ProcessGroupGloo is dist.ProcessGroupGloo


def test_a_group_is_opened_otherwise():
    store = dist.HashStore()
    with opened_groups.given_up_when(lambda: False):
        group = c10d.ProcessGroupGloo(store, 0, 1, timeout=PATIENCE)
        assert isinstance(group, c10d.ProcessGroupGloo)
        with pytest.raises(RuntimeError, match="rank < size"):
            c10d.ProcessGroupGloo(store, 3, 1, timeout=PATIENCE)
    assert type(group) is dist.ProcessGroupGloo

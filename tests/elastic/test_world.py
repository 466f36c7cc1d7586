"""The default group is made anew in the same process."""

import socket
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from paceline.elastic import world
from paceline.elastic.world import forget_world, reach_store
from paceline.launch.elastic.starting import listening_store


def test_an_error_names_its_rank_once():
    """Torch puts a hook before the last one for each default group: after seven changes a line began with eight."""
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert sys.excepthook is not hook
    forget_world()
    assert sys.excepthook is hook
    assert not dist.is_initialized()


def test_a_rank_gives_up_a_store_whose_agent_is_lost(monkeypatch):
    """Torch alone tries again for half an hour, and the rank would count as lost."""
    monkeypatch.setattr(world, "_REACH", timedelta(seconds=0.5))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    asked = []

    def is_over():
        asked.append(time.monotonic())
        return len(asked) > 1

    began_s = time.monotonic()
    with pytest.raises(dist.DistNetworkError):
        reach_store("127.0.0.1", port, timedelta(minutes=30), is_over)
    assert len(asked) == 2
    assert time.monotonic() - began_s < 60


def test_a_store_that_is_reached_has_the_timeout_of_the_group():
    server = listening_store("127.0.0.1")
    store = reach_store("127.0.0.1", server.port, timedelta(minutes=30), lambda: False)
    assert store.timeout == timedelta(minutes=30)
    with pytest.raises(dist.DistStoreError):
        reach_store("127.0.0.1", server.port, timedelta(seconds=0.1), lambda: False).get("nothing")

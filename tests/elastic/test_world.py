"""The default group is made anew in the same process."""

import sys

import torch.distributed as dist

from paceline.elastic.world import forget_world


def test_an_error_names_its_rank_once():
    """Torch puts a hook before the last one for each default group: after seven changes a line began with eight."""
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert sys.excepthook is not hook
    forget_world()
    assert sys.excepthook is hook
    assert not dist.is_initialized()

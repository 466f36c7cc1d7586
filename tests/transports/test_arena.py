"""Memory that ranks share: places are taken and given back, whenever garbage is collected."""

import threading

import torch

from paceline.transports.shared_memory.arena import Arena


def test_a_tensor_may_be_collected_while_its_owner_allocates():
    """A finalizer runs wherever garbage is collected, also within `allocate`, which holds the arena's lock."""
    arena = Arena(Arena.create(2**20), reserved_bytes=0)
    tensors = [arena.allocate(1000, torch.float32)]
    start = arena.place_of(tensors[0]).start

    def collect_within_allocate():
        with arena._lock:
            tensors.clear()

    thread = threading.Thread(target=collect_within_allocate, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    again = arena.allocate(1000, torch.float32)
    assert arena.place_of(again).start == start

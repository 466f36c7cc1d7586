"""Memory that is kept grows at once, and shrinks when a large message was the only one of its kind."""

import torch

from paceline.process_group.executor import LOOKS_AFTER, KeptMemory


def test_a_large_message_does_not_stay():
    """As large as the largest of the last calls; of one size, allocated once, whatever the dtype."""
    sizes = []

    def allocate(num_bytes):
        sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    kept = KeptMemory(allocate)
    for _ in range(3 * LOOKS_AFTER):
        assert kept.take(100, torch.float32).shape == (100,)
        assert kept.take(120, torch.bfloat16).dtype == torch.bfloat16
    assert sizes == [400]
    kept.take(1000, torch.float32)
    for _ in range(LOOKS_AFTER - 1):
        kept.take(100, torch.float32)
        kept.take(130, torch.float32)
    assert sizes[:2] == [400, 4000]
    assert sizes[-1] == 520
    assert kept.take(130, torch.float32).data_ptr() == kept.take(130, torch.float32).data_ptr()
    kept.take(0, torch.float32)
    assert len(sizes) == 3

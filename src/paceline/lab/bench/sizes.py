"""Sizes of messages as people type them."""

from __future__ import annotations

from paceline.errors import ConfigurationError
from paceline.lab.emulation.quantities import size

FLOAT_BYTES = 4


def parse_sizes(text: str) -> tuple[int, ...]:
    """Turn "64KiB,1MiB" into bytes, each at least one float32.

    Raises:
        ConfigurationError: A size has no unit, is no number, or is too small.
    """
    sizes = tuple(size(word, "--sizes") for word in text.split(",") if word.strip())
    small = [num_bytes for num_bytes in sizes if num_bytes < FLOAT_BYTES or num_bytes % FLOAT_BYTES]
    if small or not sizes:
        raise ConfigurationError(
            f"--sizes {text!r} holds {small or 'nothing'}; a message is made of float32 numbers, so its bytes are a "
            "multiple of 4. Pass sizes such as 64KiB,1MiB,25MiB."
        )
    return sizes

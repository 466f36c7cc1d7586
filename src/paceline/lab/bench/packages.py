"""Which packages of peers are here? Only benchmarks need them: benchmarks/peers-requirements.txt."""

from __future__ import annotations

import importlib.util

from paceline.errors import ConfigurationError

PEERS = ("accelerate", "deepspeed", "torchft", "mpi4py")


def require(package: str) -> None:
    """Refuse a peer that is not installed; other names pass.

    Raises:
        ConfigurationError: Says what to install.
    """
    if package in PEERS and importlib.util.find_spec(package) is None:
        raise ConfigurationError(
            f"{package} is not installed; pip install -r benchmarks/peers-requirements.txt (in the source "
            f"repository), or pip install {package}."
        )

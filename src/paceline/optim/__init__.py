"""Optimizers, their shares on ranks, and the use of a reduced gradient before all of them have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use
from paceline.optim.adopted_optimizer import why_not_by_parameter
from paceline.optim.exchanging_optimizer import ExchangingOptimizer, FlatParameters, digest_of, flatten
from paceline.optim.overlap import overlap
from paceline.optim.shard import full_state_dict, shard

if TYPE_CHECKING:
    from paceline.optim.shard_parts import sharded_state_dict

__all__ = [
    "ExchangingOptimizer",
    "FlatParameters",
    "digest_of",
    "flatten",
    "full_state_dict",
    "overlap",
    "shard",
    "sharded_state_dict",
    "why_not_by_parameter",
]

# torch's checkpoints take a second to import
__getattr__ = on_first_use(__name__, {"shard_parts": "sharded_state_dict"})

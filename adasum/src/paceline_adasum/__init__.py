"""Adasum: combines ranks' gradients or updates so that parallel ones are averaged and orthogonal ones added.

`reduction="adasum"` combines gradients, `AdasumOptimizer` updates. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use

if TYPE_CHECKING:
    from paceline_adasum.adasum import Adasum
    from paceline_adasum.local_tree import combine
    from paceline_adasum.optimizer import AdasumOptimizer

__all__ = ["Adasum", "AdasumOptimizer", "combine"]

__getattr__ = on_first_use(
    __name__, {"adasum": "Adasum", "local_tree": "combine", "optimizer": "AdasumOptimizer"}
)

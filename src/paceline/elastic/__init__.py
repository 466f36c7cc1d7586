"""Training that outlives its ranks: what a rank does under `paceline run --min-ranks`.

`Elastic` is what a script sees. `line` is how a rank and its agent talk, and the only module here that the launcher
imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use

if TYPE_CHECKING:
    from paceline.elastic.elastic import Elastic

__all__ = ["Elastic"]

__getattr__ = on_first_use(__name__, {"elastic": "Elastic"})

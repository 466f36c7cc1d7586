"""Parameter servers: processes that sum what ranks push, and may step an optimizer with it; and the ranks' part.

A server imports numpy, and torch only if it is given an optimizer to step. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use

if TYPE_CHECKING:
    from paceline_servers.ranks.servers_mean import ParameterServers
    from paceline_servers.server_optimizer import ServerOptimizer

SERVERS = "PACELINE_SERVERS"
"""Environment variable: addresses of parameter servers, `host:port,host:port`. `paceline run --servers` sets it."""

__all__ = ["ParameterServers", "ServerOptimizer"]

__getattr__ = on_first_use(
    __name__, {"ranks.servers_mean": "ParameterServers", "server_optimizer": "ServerOptimizer"}
)

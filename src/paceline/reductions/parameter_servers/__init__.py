"""Gradients summed by parameter servers, which may also step the optimizer."""

from paceline.reductions.parameter_servers.servers_mean import ParameterServers

__all__ = ["ParameterServers"]

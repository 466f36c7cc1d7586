"""The launcher behind `paceline run`: starts the ranks of a script on this machine, and ends with all of them gone.

torchrun's own parser, rendezvous and agent do the work. This package adds checks before anything starts, and one
paragraph in place of a banner when a rank fails. It also adds a watchdog: a supervisor process that ends the ranks if
the launcher is killed.
"""

from paceline.launch.agent import launch
from paceline.launch.command_line import LaunchArguments, num_cores, parse
from paceline.launch.launch_errors import InterruptedLaunchError, LaunchError
from paceline.launch.watchdog import Watchdog

__all__ = [
    "InterruptedLaunchError",
    "LaunchArguments",
    "LaunchError",
    "Watchdog",
    "launch",
    "num_cores",
    "parse",
]

"""Start the ranks of a script on this machine, and end with all of them gone.

torchrun's own parser, rendezvous and agent do the work; this package adds checks before anything starts, one
paragraph in place of a banner when a rank fails, and a keeper that leaves no orphan even after SIGKILL.
"""

from paceline.launch.agent import InterruptedLaunchError, LaunchError, launch
from paceline.launch.arguments import LaunchArguments, num_cores, parse
from paceline.launch.keeper import Keeper

__all__ = [
    "InterruptedLaunchError",
    "Keeper",
    "LaunchArguments",
    "LaunchError",
    "launch",
    "num_cores",
    "parse",
]

"""What `paceline run --min-ranks` may be asked for, and with which of torchrun's options. Asked before all starts."""

from __future__ import annotations

import argparse
import math

from paceline.errors import ConfigurationError

LOST_AFTER_S = 30.0


def check_elastic(args: argparse.Namespace, num_local_ranks: int, num_machines: int) -> None:
    """Raise ConfigurationError for values of --min-ranks and --lost-after that cannot be."""
    least = args.min_ranks
    if least is None:
        if args.lost_after is not None:
            raise ConfigurationError(
                f"--lost-after {args.lost_after:g} has no effect without --min-ranks. Add --min-ranks, or leave it out."
            )
        return
    num_ranks = num_local_ranks * num_machines
    if least < 1:
        raise ConfigurationError(f"--min-ranks {least} keeps no rank. Pass 1 to {num_ranks}.")
    if least > num_ranks:
        raise ConfigurationError(
            f"--min-ranks {least} is more than the {num_ranks} rank(s) of this launch. Pass 1 to {num_ranks}, or a "
            "larger --nproc-per-node."
        )
    if args.lost_after is not None and not 0 < args.lost_after < math.inf:
        raise ConfigurationError(
            f"--lost-after {args.lost_after:g} is no time. Pass the seconds that a rank may stand still, such as 30."
        )
    is_range = len(set(str(args.nnodes).split(":"))) > 1
    for option, is_given, why in (
        ("--nnodes MIN:MAX", is_range, "the job begins with a fixed number of hosts, and goes on with fewer"),
        ("--max-restarts", args.max_restarts > 0, "lost ranks are replaced one by one, never all together"),
        ("--servers", args.servers is not None, "a step on servers cannot be computed again"),
        ("--watch", args.watch, "it shows the ranks that were there at the start"),
        ("--run-path", args.run_path, "a replacement is a process of its own"),
        (
            "--tee, --redirects and --local-ranks-filter",
            args.tee != "0" or args.redirects != "0" or bool(args.local_ranks_filter),
            "the ranks' output goes where the launcher's goes",
        ),
    ):
        if is_given:
            raise ConfigurationError(f"--min-ranks and {option} exclude each other: {why}. Leave one out.")

"""Which place was asked for: processes on loopback, or an emulated cluster? Checked before anything is built."""

from __future__ import annotations

from typing import Any

from paceline.errors import ConfigurationError
from paceline.lab.bench.ranks import ClusterRanks, LoopbackRanks, Ranks

DEFAULT_RANKS = 2


def choose_place(
    hosts: int | None, ranks: int | None, *, ranks_per_host: int = 1, **links: str | None
) -> Ranks:
    """Return where to run; not entered yet.

    Args:
        hosts: Of an emulated cluster; None: loopback.
        ranks: Processes on loopback.
        ranks_per_host: On each host of a cluster.
        links: What ClusterSpec.parse takes, as strings; None: its default.

    Raises:
        ConfigurationError: The two are mixed, or the cluster cannot be.
    """
    given: dict[str, Any] = {name: value for name, value in links.items() if value is not None}
    if hosts is None:
        if given or ranks_per_host != 1:
            names = ", ".join("--" + name.replace("_", "-") for name in (given or ["ranks_per_host"]))
            raise ConfigurationError(
                f"{names} shapes the links of an emulated cluster, and there is none on loopback. Pass --hosts N, "
                f"or drop {names}."
            )
        return LoopbackRanks(DEFAULT_RANKS if ranks is None else ranks)
    if ranks is not None:
        raise ConfigurationError(
            f"--ranks {ranks} counts processes on loopback; with --hosts {hosts} pass --ranks-per-host instead."
        )
    from paceline.lab.emulation import ClusterSpec  # noqa: PLC0415  # loopback needs none of it

    return ClusterRanks(ClusterSpec.parse(hosts=hosts, ranks_per_host=ranks_per_host, **given))

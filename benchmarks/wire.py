"""How can ranks on one machine share a wire that is slower than its memory?

Loopback's rate is that of cores copying: communication then takes cores from computation, and what one measures is
that contention. A benchmark may start itself again inside a network namespace of its own, whose loopback device
serves packets of 1,500 bytes at a given rate (token bucket). The traffic stays real; the namespace goes with the
process.
"""

import os
import re
import shutil
import sys

from paceline.bench.errors import BenchmarkError


class NoWireError(BenchmarkError, RuntimeError):
    """The wire that an option asks for cannot be made here."""


_INSIDE = "PACELINE_BENCHMARK_WIRE"
_SET_UP = (
    "ip link set lo mtu 1500 up && "
    'tc qdisc add dev lo root tbf rate "$0" burst 256kb latency 50ms && exec "$@"'
)


def restart_behind(rate: str, module: str) -> None:
    """Run this very command again behind a wire of `rate`, such as "4gbit"; returns at once when already behind it.

    Raises:
        NoWireError: the rate has no unit, or this machine cannot make the wire.
    """
    if os.environ.get(_INSIDE) == rate:
        return
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate, re.IGNORECASE):
        raise NoWireError(f"{rate!r} is not a rate such as 4gbit or 500mbit.")
    missing = [program for program in ("unshare", "ip", "tc") if shutil.which(program) is None]
    if missing:
        raise NoWireError(
            f"{' and '.join(missing)} not found; install util-linux and iproute2, or leave out --rate."
        )
    if os.geteuid() != 0:
        raise NoWireError("a wire with a rate needs root (a network namespace); leave out --rate.")
    os.environ[_INSIDE] = rate
    command = ["unshare", "--net", "sh", "-c", _SET_UP, rate, sys.executable, "-m", module, *sys.argv[1:]]
    os.execvp(command[0], command)

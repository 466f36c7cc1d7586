"""Cost of emulating a cluster in its predicted steps: its hosts share one machine's cores."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import ConfigurationError
from paceline_plan import Cluster


@dataclass(frozen=True)
class EmulationCost:
    """Processor time that emulated hosts take from each other because they share a machine; a real cluster has none.

    Attributes:
        cores: Cores of the machine that emulates.
        collective_s: Time of one rank for one collective.
        message_s: Time of sending one message and receiving it.
        s_per_byte: Time of sending and receiving one byte.
        layer_s: Time of one rank for one layer's forward or backward: sleeping and waking up, and autograd.
    """

    cores: int = 1
    collective_s: float = 0.0
    message_s: float = 0.0
    s_per_byte: float = 0.0
    layer_s: float = 0.0

    def __post_init__(self) -> None:
        costs = (self.collective_s, self.message_s, self.s_per_byte, self.layer_s)
        if self.cores < 1 or not all(0 <= cost < math.inf for cost in costs):
            raise ConfigurationError(f"{self}: at least one core, and no cost below 0")


@dataclass(frozen=True)
class EmulatedHosts(Cluster):
    """A cluster whose hosts are emulated.

    Attributes:
        emulation: Costs of the emulation.
    """

    emulation: EmulationCost = EmulationCost()

    def overhead_s(self, messages: int, bytes_ratio: float) -> tuple[float, float]:
        """The library's, and processor time that ranks take from each other."""
        cost = self.emulation
        shared_s = self.num_ranks / cost.cores * cost.collective_s
        fixed_s = self.collective_s + shared_s + messages / cost.cores * cost.message_s
        return fixed_s, bytes_ratio / cost.cores * cost.s_per_byte

    def layer_overhead_s(self) -> float:
        """Longer where more ranks than cores wake up."""
        return self.emulation.layer_s * max(1.0, self.num_ranks / self.emulation.cores)

    def describe(self) -> str:
        """One line for a report."""
        return f"{super().describe()}, with what emulation costs"

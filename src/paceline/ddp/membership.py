"""Who reduces one module's gradients together: the groups, and the ranks that are waited for."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from paceline.comm.peers import Peers


class Membership:
    """Of one wrapped module, on one rank. Whoever communicates about its steps holds this.

    Args:
        process_groups: That the script asked for.
        name: Identifies the module in failure detection; the same on every rank.
        device: Of the module.

    Attributes:
        process_group: The first of them.
        gradient_groups: That carry gradients.
        peers: For waiting.
        device: Of the module.
        number: Of the module, among those over this group.
    """

    def __init__(self, process_groups: list[ProcessGroup], name: str, device: torch.device) -> None:
        self.process_group = process_groups[0]
        self.gradient_groups = process_groups
        self.device = device
        self.peers = self._peers(name)
        self.number = int(name.rpartition("/")[-1])

    def _peers(self, name: str) -> Peers:
        return Peers(self.process_group, name, in_slices=self.device.type == "cpu")

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.process_group.size()

    def take_number(self, number: int) -> None:
        """Rank 0 calls the module so. Local."""
        self.number = number

    def carry_gradients_over(self, groups: list[ProcessGroup]) -> None:
        """Let these groups carry gradients, with the same ranks. Local."""
        self.gradient_groups = groups

    def move_to(self, process_group: ProcessGroup) -> None:
        """Go on with the ranks of another process group. Local; every member must do so in the same step."""
        self.process_group = process_group
        self.gradient_groups = [process_group]
        self.number = 0  # a rank that joins now does not know it
        self.peers = self._peers(f"group {process_group.group_name}")

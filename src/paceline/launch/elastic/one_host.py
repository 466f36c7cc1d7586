"""Who decides where there is one host: its agent, at once."""

from __future__ import annotations

import socket

from paceline.launch.elastic.plan import NOT_STARTED, Plan, Proposal


class OneHost:
    """As `plan.Decider`, without anybody to ask."""

    is_alone = True

    def __init__(self) -> None:
        self.name = socket.gethostname()

    def decide(self, proposal: Proposal) -> Plan | None:
        """The ranks that were there before, in their order, and those that have come."""
        members = tuple(proposal.steps)
        holder = max(members, key=lambda member: proposal.steps[member])
        return Plan(
            epoch=proposal.epoch,
            members=members,
            voters=(holder.host,),
            tie_breaker=holder.host,
            step=proposal.steps[holder],
            holder=holder,
            store=proposal.store,
            num_new=sum(step == NOT_STARTED for step in proposal.steps.values()),
        )

    def why_over(self, epoch: int) -> str | None:
        return None

"""Predictions and trials that training asks before it acts: of shares, orders, buckets and codecs. Pure Python."""

from paceline.planning.replay import AlphaBetaCost
from paceline.planning.shares import (
    Proposal,
    Speed,
    SpeedEstimate,
    best_shares,
    lower_bound_s,
    makespan_s,
    propose,
)
from paceline.planning.trial import Trial, TrialConfig

__all__ = [
    "AlphaBetaCost",
    "Proposal",
    "Speed",
    "SpeedEstimate",
    "Trial",
    "TrialConfig",
    "best_shares",
    "lower_bound_s",
    "makespan_s",
    "propose",
]

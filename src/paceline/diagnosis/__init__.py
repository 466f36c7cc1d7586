"""What a run's records say: which rank or link delays steps, why, and what a step would be without it."""

from __future__ import annotations

from paceline.diagnosis.findings import Diagnosis, Finding, diagnose

__all__ = ["Diagnosis", "Finding", "diagnose"]

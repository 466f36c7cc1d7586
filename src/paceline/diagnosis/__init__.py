"""The diagnosis of a run from its records: the rank or link that delays steps, why, and a step without it."""

from __future__ import annotations

from paceline.diagnosis.findings import Diagnosis, Finding, diagnose

__all__ = ["Diagnosis", "Finding", "diagnose"]

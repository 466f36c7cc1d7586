"""Results to tables, JSON and figures; knows nothing of how they were measured."""

from paceline_lab.report.publication import ReportFolder
from paceline_lab.report.terminal import table

__all__ = ["ReportFolder", "table"]

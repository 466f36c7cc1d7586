"""Rows to tables, JSON and figures; knows no domain."""

from paceline.report.figures import lines_figure, stacked_bars_figure
from paceline.report.folder import ReportFolder
from paceline.report.table import table

__all__ = ["ReportFolder", "lines_figure", "stacked_bars_figure", "table"]

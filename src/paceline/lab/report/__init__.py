"""Rows to tables, JSON and figures; knows no domain."""

from paceline.lab.report.figures import lines_figure, stacked_bars_figure
from paceline.lab.report.folder import ReportFolder
from paceline.lab.report.table import table

__all__ = ["ReportFolder", "lines_figure", "stacked_bars_figure", "table"]

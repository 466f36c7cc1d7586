"""Results to tables, JSON and figures; knows nothing of what was measured."""

from paceline.lab.report.figures import lines_figure, stacked_bars_figure
from paceline.lab.report.publication import ReportFolder
from paceline.lab.report.terminal import table

__all__ = ["ReportFolder", "lines_figure", "stacked_bars_figure", "table"]

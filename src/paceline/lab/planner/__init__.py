"""`paceline plan`: records a script, asks the simulator how it would scale, and shows the answer."""

from paceline.lab.planner.asked import Asked
from paceline.lab.planner.forecast import forecast
from paceline.lab.planner.scoring import show_scores
from paceline.lab.planner.script_recording import record_script

__all__ = ["Asked", "forecast", "record_script", "show_scores"]

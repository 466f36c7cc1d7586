"""`paceline plan`: records a script, asks the simulator how it would scale, and shows the answer."""

from paceline.plan.asked import Asked
from paceline.plan.forecast import forecast
from paceline.plan.scoring import show_scores
from paceline.plan.script_recording import record_script

__all__ = ["Asked", "forecast", "record_script", "show_scores"]

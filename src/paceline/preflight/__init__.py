"""`paceline doctor` before a run: would a training run well here, and if not, which command mends it?"""

from paceline.preflight.check_result import CheckResult

__all__ = ["CheckResult"]

"""`paceline doctor` before a run: would a training run well here, and if not, which command mends it?"""

from paceline.preflight.this_host import CheckResult

__all__ = ["CheckResult"]

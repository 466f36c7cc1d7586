"""What a benchmark says when it cannot answer. What was asked wrongly is a ConfigurationError instead.

PacelineError
└── BenchmarkError
    ├── RanksFailedError  (also RuntimeError) one of the processes raised or died
    └── WrongAnswerError  (also RuntimeError) a side does not compute what it should: its times mean nothing
"""

from __future__ import annotations

from paceline.errors import PacelineError


class BenchmarkError(PacelineError):
    """Root of everything that ends a benchmark with one paragraph instead of a traceback."""


class RanksFailedError(BenchmarkError, RuntimeError):
    """A rank raised an exception or was killed; the others have been stopped."""


class WrongAnswerError(BenchmarkError, RuntimeError):
    """Ranks or sides ended with different numbers."""

"""What a benchmark says when it cannot answer.

BenchmarkError
    UnknownNameError     (also ValueError)   a side, a workload or a size that does not exist
    NoWireError          (also RuntimeError) the wire that an option asks for cannot be made here
    RankFailedError      (also RuntimeError) one of the processes raised or died
    WrongAnswerError     (also RuntimeError) the sides do not compute the same thing: their times mean nothing
"""


class BenchmarkError(Exception):
    """Root of everything that ends a benchmark with one paragraph instead of a traceback."""


class UnknownNameError(BenchmarkError, ValueError):
    """An option names something that is not in the table."""


class NoWireError(BenchmarkError, RuntimeError):
    """The wire that an option asks for cannot be made here."""


class RankFailedError(BenchmarkError, RuntimeError):
    """A rank raised an exception or was killed; the others have been stopped."""


class WrongAnswerError(BenchmarkError, RuntimeError):
    """The two sides ended with different parameters."""

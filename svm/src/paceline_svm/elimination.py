"""When samples are eliminated that can no longer be in a violating pair: the heuristics, by name (LIBSVM's shrinking).

The names are those of the paper: single or multi (whether elimination goes on after eliminated samples were brought
back), and a threshold in pair updates: a number, or per cent of the samples. `reconstruction.py` says which samples are
eliminated, and reconstructs their gradients.

Source:
    Narasimhan, Vishnu et al. 2014 (arXiv 1406.5161). Theirs tests each sample while its gradient is updated; here all
    are tested between two working sets, so a threshold below a working set's updates means "every time".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import ConfigurationError

_NAME = re.compile(r"(single|multi)-(\d+)(%?)")
_ADAPTIVE_RATIO = 0.05
_LEAST_GAIN_RATIO = 0.1


@dataclass(frozen=True)
class Elimination:
    """A heuristic.

    Attributes:
        every: Pair updates between two tests, or the fraction of the samples if `is_ratio`; None: never.
        is_ratio: What `every` counts.
        again: Whether to go on eliminating after the first reconstruction.
        only_short_of_memory: Whether to test only when kernel rows are computed again for want of memory.
        least_gain_ratio: Eliminate only if it drops at least this fraction of a rank's active samples.
    """

    every: float | None = None
    is_ratio: bool = False
    again: bool = True
    only_short_of_memory: bool = False
    least_gain_ratio: float = 0.0

    @classmethod
    def named(cls, name: str) -> Elimination:
        """The heuristic of that name.

        Args:
            name: `adaptive`, `none`, or such as `multi-5%`, `multi-500`, `single-50%`.

        Raises:
            ConfigurationError: There is none of that name.
        """
        if name == "none":
            return cls()
        if name == "adaptive":
            return cls(_ADAPTIVE_RATIO, True, True, True, _LEAST_GAIN_RATIO)
        match = _NAME.fullmatch(name)
        if match is None or int(match[2]) == 0:
            raise ConfigurationError(
                f"there is no elimination heuristic {name!r}. Pass 'adaptive', 'none', or single or multi with a "
                "threshold in pair updates or per cent of the samples: 'multi-5%', 'multi-500', 'single-50%'."
            )
        every = float(match[2])
        return cls(every / 100 if match[3] else every, bool(match[3]), match[1] == "multi")

    def is_due(
        self, steps_since: int, num_samples: int, num_reconstructions: int, short_of_memory: bool
    ) -> bool:
        """Whether to test the samples now.

        Args:
            steps_since: Pair updates since the last test.
            num_samples: Of the whole problem.
            num_reconstructions: So far.
            short_of_memory: Whether that is so, on any rank.
        """
        if self.every is None or (num_reconstructions and not self.again):
            return False
        if self.only_short_of_memory and not short_of_memory:
            return False
        return steps_since >= (self.every * num_samples if self.is_ratio else self.every)

"""How many datagrams may take one way at a time: a window adapted once a round trip, by marks, losses and delay.

Rules
1. Congestion marks shrink the window in proportion to their share, as DCTCP does.
2. The window follows the queue on the way there, which receivers measure: it grows while datagrams wait for less than
   a target, and shrinks in proportion while they wait for longer. So transfers that share a queue come to share it
   evenly, and find the path's rate without losses of their own making. The way back does not count: what a receiver
   says waits behind its own data there.
3. Where the queue stays long though this rank yields, others fill it that do not look at delay, as TCP does. Then the
   window grows until something is lost, as theirs.
4. A loss while the queue is long means that it overflowed, and so do many at a time, of a queue that is never long:
   the window shrinks, never below what the path carries without a queue. Others are the link's, and say nothing about
   the rate.
5. Silence for a few round trips halves it; datagrams are paced, so that a window never leaves as one burst.

Source:
    Alizadeh et al. 2010, "Data center TCP", section 3.3, for rule 1. Kumar et al. 2020, "Swift", section 3.2, for
    rule 2, once a round trip and with the delay of one way only. Arun & Balakrishnan 2018, "Copa", section 4.2, for
    rule 3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.transports.bounded_loss import endpoint_state as e
from paceline.transports.bounded_loss.machine_code import compiled, inner

FIRST_WINDOW = 16.0
SMALLEST_WINDOW = 2.0
LARGEST_WINDOW = 4096.0
TARGET_US = 5000.0
_FORGET_US = 10_000_000
_FEW, _OVERLOAD = 3, 0.1
_GROWTH = 2.0
_YIELD = 0.4
_MOST_YIELD = 0.3
_PATIENCE_US = 300_000


@compiled
def reset(way: Any, rate: Any) -> None:
    """Set up the rows of a way in `ways` and `rates`."""
    rate[e.R_WINDOW] = FIRST_WINDOW
    rate[e.R_RTT] = 2000.0
    rate[e.R_ROUND_WAIT] = rate[e.R_MIN_WAIT] = np.inf
    way[e.W_IS_STARTING] = 1
    way[e.W_REORDER] = 8
    way[e.W_RX_LARGEST] = -1


@inner
def note_round_trip(way: Any, rate: Any, rtt_us: float, way_us: int, now_us: int) -> None:
    """Take one sample of the round-trip time, and one of the way there: `way_us`, by two clocks, modulo 2^32."""
    if not way[e.W_HAS_DELAY]:
        way[e.W_HAS_DELAY], way[e.W_DELAY] = 1, way_us
        rate[e.R_RTT] = rtt_us
    rate[e.R_RTT] += (rtt_us - rate[e.R_RTT]) / 8
    change = (way_us - way[e.W_DELAY]) & 0xFFFFFFFF
    wait = float(change - 0x100000000 if change >= 0x80000000 else change)
    if wait < rate[e.R_MIN_WAIT] or now_us - rate[e.R_MIN_WAIT_AT] > _FORGET_US:
        rate[e.R_MIN_WAIT] = wait
        rate[e.R_MIN_WAIT_AT] = now_us
    rate[e.R_ROUND_WAIT] = min(wait, rate[e.R_ROUND_WAIT])


@inner
def end_round(way: Any, rate: Any, now_us: int) -> None:
    """Adapt the window to what became of the datagrams of a round trip, and begin the next round."""
    good, lost, marked = way[e.W_ROUND_GOOD], way[e.W_ROUND_LOST], way[e.W_ROUND_MARKED]
    window = rate[e.R_WINDOW]
    wait = rate[e.R_ROUND_WAIT] - rate[e.R_MIN_WAIT]
    if wait <= TARGET_US:
        rate[e.R_SHORT_AT] = now_us
    marked_ratio = min(1.0, marked / max(1, good))
    rate[e.R_ALPHA] += (marked_ratio - rate[e.R_ALPHA]) / 8
    is_overload = lost >= _FEW and lost > _OVERLOAD * (good + lost)
    if marked > 0:
        if way[e.W_IS_STARTING]:
            rate[e.R_ALPHA] = max(rate[e.R_ALPHA], marked_ratio)
        window *= 1.0 - rate[e.R_ALPHA] / 2
        way[e.W_IS_STARTING] = 0
    elif lost > 0 and (wait > TARGET_US or is_overload):
        carried = good * (1.0 - min(1.0, wait / max(1.0, rate[e.R_RTT])))  # without a queue
        window = min(window, max(0.7 * window, carried))
        way[e.W_IS_STARTING] = 0
    elif wait > TARGET_US and now_us - rate[e.R_SHORT_AT] > max(_PATIENCE_US, 20 * rate[e.R_RTT]):
        window += 1.0
    elif wait > TARGET_US:
        window *= 1.0 - min(_MOST_YIELD, _YIELD * (wait - TARGET_US) / wait)
        way[e.W_IS_STARTING] = 0
    elif good >= window / 2:  # else nobody asked for more
        faster = window / 8 if wait < TARGET_US / 2 else 0.0  # far from the path's rate
        window += good if way[e.W_IS_STARTING] else max(_GROWTH, faster)
    rate[e.R_WINDOW] = min(max(window, SMALLEST_WINDOW), LARGEST_WINDOW)
    rate[e.R_ROUND_WAIT] = np.inf
    way[e.W_ROUND_GOOD] = way[e.W_ROUND_LOST] = way[e.W_ROUND_MARKED] = 0
    way[e.W_ROUND_END] = way[e.W_NEXT]


@inner
def note_silence(way: Any, rate: Any) -> None:
    """Shrink the window: nothing was heard for a few round trips."""
    rate[e.R_WINDOW] = max(SMALLEST_WINDOW, rate[e.R_WINDOW] / 2)
    way[e.W_IS_STARTING] = 0


@inner
def pause_us(way: Any, rate: Any) -> float:
    """Microseconds between two datagrams that take this way."""
    gain = 2.0 if way[e.W_IS_STARTING] else 1.25
    return float(rate[e.R_RTT] / (gain * rate[e.R_WINDOW]))

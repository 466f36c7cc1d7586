"""How many datagrams may be under way to a peer: a window adapted once a round trip, by marks, losses and delay.

Rules
1. Congestion marks shrink the window in proportion to their share, as DCTCP does.
2. A loss while the queue is long means that it overflowed: the window shrinks, never below what the path carries
   without a queue. A loss while the queue is short is the link's, and says nothing about the rate.
3. The window grows while the queue is short, and stands while it is longer than a target: so it finds the path's rate
   without losses of its own making.
4. Silence for a few round trips halves it; datagrams are paced, so that a window never leaves as one burst.

Source:
    Alizadeh et al. 2010, "Data center TCP", section 3.3, for rule 1. Rules 2 and 3 are delay-based control in the
    manner of Kumar et al. 2020, "Swift", simplified: additive increase up to a target, no decrease by delay alone.
"""

from __future__ import annotations

from typing import Any

from paceline.transports.bounded_loss import endpoint_state as e
from paceline.transports.bounded_loss.machine_code import compiled

FIRST_WINDOW = 16.0
SMALLEST_WINDOW = 4.0
LARGEST_WINDOW = 4096.0
TARGET_US = 5000.0
_FORGET_US = 10_000_000
_OVERLOAD = 0.2


@compiled
def reset(peer: Any, rate: Any) -> None:
    """Set up a peer's rows of `peers` and `rates`."""
    rate[e.R_WINDOW] = FIRST_WINDOW
    rate[e.R_RTT] = 2000.0
    peer[e.P_IS_STARTING] = 1
    peer[e.P_REORDER] = 8
    peer[e.P_RX_LARGEST] = -1


@compiled
def note_round_trip(rate: Any, rtt_us: float, now_us: int) -> None:
    """Take one sample of the round-trip time."""
    if rate[e.R_MIN_RTT] == 0.0:
        rate[e.R_RTT] = rtt_us
    if rate[e.R_MIN_RTT] == 0.0 or rtt_us < rate[e.R_MIN_RTT] or now_us - rate[e.R_MIN_RTT_AT] > _FORGET_US:
        rate[e.R_MIN_RTT] = rtt_us
        rate[e.R_MIN_RTT_AT] = now_us
    rate[e.R_RTT] += (rtt_us - rate[e.R_RTT]) / 8
    rate[e.R_MAX_RTT] = max(rtt_us, rate[e.R_MAX_RTT])
    if rate[e.R_ROUND_RTT] == 0.0 or rtt_us < rate[e.R_ROUND_RTT]:
        rate[e.R_ROUND_RTT] = rtt_us


@compiled
def end_round(peer: Any, rate: Any) -> None:
    """Adapt the window to what became of the datagrams of a round trip, and begin the next round."""
    good, lost, marked = peer[e.P_ROUND_GOOD], peer[e.P_ROUND_LOST], peer[e.P_ROUND_MARKED]
    window = rate[e.R_WINDOW]
    delay = rate[e.R_ROUND_RTT] - rate[e.R_MIN_RTT]
    marked_ratio = min(1.0, marked / max(1, good))
    rate[e.R_ALPHA] += (marked_ratio - rate[e.R_ALPHA]) / 8
    is_long = delay > 1000.0 and delay > 0.5 * (rate[e.R_MAX_RTT] - rate[e.R_MIN_RTT])
    if marked > 0:
        if peer[e.P_IS_STARTING]:
            rate[e.R_ALPHA] = max(rate[e.R_ALPHA], marked_ratio)
        window *= 1.0 - rate[e.R_ALPHA] / 2
        peer[e.P_IS_STARTING] = 0
    elif lost > 0 and (is_long or lost > _OVERLOAD * (good + lost)):
        carried = good * rate[e.R_MIN_RTT] / max(1.0, rate[e.R_RTT])  # without a queue
        window = min(window, max(0.7 * window, carried))
        peer[e.P_IS_STARTING] = 0
    elif delay > TARGET_US:
        peer[e.P_IS_STARTING] = 0
    elif good >= window / 2:  # else nobody asked for more
        window += good if peer[e.P_IS_STARTING] else 2.0
    rate[e.R_WINDOW] = min(max(window, SMALLEST_WINDOW), LARGEST_WINDOW)
    rate[e.R_MAX_RTT] -= (rate[e.R_MAX_RTT] - rate[e.R_ROUND_RTT]) / 256
    rate[e.R_ROUND_RTT] = 0.0
    peer[e.P_ROUND_GOOD] = peer[e.P_ROUND_LOST] = peer[e.P_ROUND_MARKED] = 0
    peer[e.P_ROUND_END] = peer[e.P_NEXT]


@compiled
def note_silence(peer: Any, rate: Any) -> None:
    """Shrink the window: nothing was heard for a few round trips."""
    rate[e.R_WINDOW] = max(SMALLEST_WINDOW, rate[e.R_WINDOW] / 2)
    peer[e.P_IS_STARTING] = 0


@compiled
def pause_us(peer: Any, rate: Any) -> float:
    """Microseconds between two datagrams to this peer."""
    gain = 2.0 if peer[e.P_IS_STARTING] else 1.25
    return float(rate[e.R_RTT] / (gain * rate[e.R_WINDOW]))

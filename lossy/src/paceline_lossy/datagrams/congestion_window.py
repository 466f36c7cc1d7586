"""The congestion window of a way: adapted once per round trip by congestion marks, losses and delay.

Rules
1. Congestion marks shrink the window in proportion to their share, as in DCTCP.
2. The window follows the queue on the way to the receiver, which the receiver measures. It grows while datagrams wait
   for less than a target, and shrinks in proportion while they wait for longer. So transfers that share a queue come
   to share it evenly, and find the path's rate without causing losses. The way back does not count, because
   acknowledgements wait there behind the receiver's own data.
3. If the queue stays long although this rank yields, other flows fill it that ignore delay, such as TCP. Then the
   window returns to its earlier size, and grows and shrinks as in TCP CUBIC. If the queue is less than half as long
   again as the target, the window stays. Ranks differ in their estimate of an empty queue. Competing ranks would keep
   the queue long after the other flows have ended. So all ranks that send to one receiver yield at once, every 10 s by
   its clock. The window's earlier size is forgotten slowly, because the queue is short at moments while other flows
   grow.
4. A loss while the queue is long means that the queue overflowed, and so do many losses at a time in a short queue.
   Then the window shrinks, but never below what the path carries without a queue. Other losses are the link's, and say
   nothing about the rate. When competing (rule 3) every loss counts, once per round trip, but not soon after the last
   one that did. Datagrams leave in bursts, which a full queue hits more often than TCP's segments, and links lose
   some, too.
5. Silence for a few round trips halves the window. Datagrams are paced, so a window never leaves as one burst.

Source:
    Alizadeh et al. 2010, "Data center TCP", section 3.3, for rule 1. Kumar et al. 2020, "Swift", section 3.2, for rule
    2, once per round trip and with the delay of one way only. Arun & Balakrishnan 2018, "Copa", section 4.2, for when
    rule 3 holds, and RFC 9438 (CUBIC), sections 4.1 to 4.7, for its window. Unlike Copa, the least delay is not
    forgotten while competing, because every later sample would include the other flows' queue.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams.machine_code import compiled, inner

FIRST_WINDOW = 16.0
SMALLEST_WINDOW = 2.0
LARGEST_WINDOW = 4096.0
TARGET_US = 5000.0
_DRIFT = 1e-4  # how much two clocks may differ in rate; the least known delay ages as fast
_FEW, _OVERLOAD = 3, 0.1
_GROWTH = 2.0
_YIELD = 0.4
_MOST_YIELD = 0.3
_FADES_US = 3e6  # until a third of the window's earlier size is remembered
_LONG_US = 7500.0  # more than the target and the difference between ranks' estimates of an empty queue
_PATIENCE_US, _PATIENCE_ROUNDS, _PERIOD_US = 300_000, 8.0, 10_000_000
_SHRINK, _CUBE, _GENTLE = 0.7, 0.4, 0.53  # CUBIC's; the last is Reno's growth with this shrink factor
_REST = 0.1  # of the time that CUBIC takes to come back; no loss counts again before it


@compiled
def reset(way: Any, rate: Any) -> None:
    """Set up the rows of a way in `ways` and `rates`."""
    rate[e.R_WINDOW] = FIRST_WINDOW
    rate[e.R_RTT] = 2000.0
    rate[e.R_ROUND_WAIT] = rate[e.R_MIN_WAIT] = np.inf
    way[e.W_IS_STARTING] = 1
    way[e.W_REORDER] = 8
    way[e.W_RX_LARGEST] = -1
    way[e.W_RX_GAP] = -e.RING


@inner
def note_round_trip(way: Any, rate: Any, rtt_us: float, way_us: int, now_us: int) -> None:
    """Take one sample of the round-trip time, and one of the way there: `way_us`, by two clocks, modulo 2^32."""
    if not way[e.W_HAS_DELAY]:
        way[e.W_HAS_DELAY], way[e.W_DELAY] = 1, way_us
        rate[e.R_RTT] = rtt_us
    rate[e.R_RTT] += (rtt_us - rate[e.R_RTT]) / 8
    change = (way_us - way[e.W_DELAY]) & 0xFFFFFFFF
    wait = float(change - 0x100000000 if change >= 0x80000000 else change)
    if not rate[e.R_MOST]:
        rate[e.R_MIN_WAIT] += _DRIFT * (now_us - rate[e.R_HEARD_AT])
    rate[e.R_MIN_WAIT], rate[e.R_HEARD_AT] = min(wait, rate[e.R_MIN_WAIT]), now_us
    rate[e.R_ROUND_WAIT] = min(wait, rate[e.R_ROUND_WAIT])


@inner
def end_round(way: Any, rate: Any, now_us: int) -> None:
    """Adapt the window to the outcome of the datagrams of a round trip, and begin the next round."""
    good, lost, marked = way[e.W_ROUND_GOOD], way[e.W_ROUND_LOST], way[e.W_ROUND_MARKED]
    window = rate[e.R_WINDOW]
    wait = rate[e.R_ROUND_WAIT] - rate[e.R_MIN_WAIT]
    took_us = now_us - rate[e.R_ROUND_AT]
    rate[e.R_ROUND_AT] = now_us
    patience_us = max(_PATIENCE_US, _PATIENCE_ROUNDS * rate[e.R_RTT])
    all_yield = _receivers_us(way, rate, now_us) % _PERIOD_US <= patience_us
    if wait <= TARGET_US or took_us > patience_us:  # or nothing was sent for long
        rate[e.R_SHORT_AT] = now_us
        faded = 0.0 if rate[e.R_MOST] else rate[e.R_KEPT] * np.exp(-took_us / _FADES_US)
        rate[e.R_KEPT] = max(window, faded)
        if not all_yield:
            rate[e.R_MOST] = 0.0
    is_crowded = now_us - rate[e.R_SHORT_AT] > patience_us and not all_yield
    marked_ratio = min(1.0, marked / max(1, good))
    rate[e.R_ALPHA] += (marked_ratio - rate[e.R_ALPHA]) / 8
    is_overload = lost >= _FEW and lost > _OVERLOAD * (good + lost)
    if marked > 0:
        if way[e.W_IS_STARTING]:
            rate[e.R_ALPHA] = max(rate[e.R_ALPHA], marked_ratio)
        window *= 1.0 - rate[e.R_ALPHA] / 2
        rate[e.R_KEPT] = window
        way[e.W_IS_STARTING] = 0
    elif is_crowded and wait > _LONG_US:
        window = _compete(rate, lost > 0, good >= window / 2, took_us)
        way[e.W_IS_STARTING] = 0
    elif lost > 0 and (wait > TARGET_US or is_overload):
        carried = good * (1.0 - min(1.0, wait / max(1.0, rate[e.R_RTT])))  # without a queue
        window = min(window, max(0.7 * window, carried))
        way[e.W_IS_STARTING] = 0
    elif wait > TARGET_US and is_crowded:
        pass  # this rank's estimate of an empty queue may be lower than the others'
    elif wait > TARGET_US:
        window *= 1.0 - min(_MOST_YIELD, _YIELD * (wait - TARGET_US) / wait)
        way[e.W_IS_STARTING] = 0
    elif good >= window / 2 and not (all_yield and rate[e.R_MOST]):  # otherwise the window was not used up
        faster = window / 8 if wait < TARGET_US / 2 else 0.0  # far from the path's rate
        window += good if way[e.W_IS_STARTING] else max(_GROWTH, faster)
    rate[e.R_WINDOW] = min(max(window, SMALLEST_WINDOW), LARGEST_WINDOW)
    rate[e.R_ROUND_WAIT] = np.inf
    way[e.W_ROUND_GOOD] = way[e.W_ROUND_LOST] = way[e.W_ROUND_MARKED] = 0
    way[e.W_ROUND_END] = way[e.W_NEXT]


@inner
def _receivers_us(way: Any, rate: Any, now_us: int) -> int:
    """Return the receiver's clock when a datagram sent now arrives, if there is no queue."""
    return int(now_us + way[e.W_DELAY] + np.int64(rate[e.R_MIN_WAIT])) & 0xFFFFFFFF


@inner
def _compete(rate: Any, has_lost: bool, is_used: bool, took_us: float) -> float:
    """Return the window after a round trip in a crowded queue. Its times leave out pauses of this rank."""
    window = max(rate[e.R_WINDOW], rate[e.R_KEPT])
    is_new = rate[e.R_MOST] == 0.0
    most = window if is_new else rate[e.R_MOST]
    back_us = 1e6 * (most * (1.0 - _SHRINK) / _CUBE) ** (1.0 / 3.0)
    grown_us = back_us if is_new else rate[e.R_GROWN_US] + took_us
    if has_lost and grown_us > max(1.5 * rate[e.R_RTT], _REST * back_us):
        most = window * (1.0 + _SHRINK) / 2.0 if window < most else window
        window *= _SHRINK
        grown_us = 0.0
    elif is_used:
        since_s = (grown_us - back_us) / 1e6
        wanted = most + _CUBE * since_s * since_s * since_s
        window += max(_GENTLE * took_us / rate[e.R_RTT], min(wanted - window, window / 2.0))
    rate[e.R_KEPT], rate[e.R_MOST], rate[e.R_GROWN_US] = window, most, grown_us
    return float(window)


@inner
def note_silence(way: Any, rate: Any) -> None:
    """Shrink the window after a few round trips without an answer."""
    rate[e.R_WINDOW] = max(SMALLEST_WINDOW, rate[e.R_WINDOW] / 2)
    rate[e.R_KEPT] /= 2
    way[e.W_IS_STARTING] = 0


@inner
def pause_us(way: Any, rate: Any) -> float:
    """Return the microseconds between two datagrams that take this way."""
    gain = 2.0 if way[e.W_IS_STARTING] else 1.25
    return float(rate[e.R_RTT] / (gain * rate[e.R_WINDOW]))

"""TCP's congestion control: cubic as in Linux with HyStart, DCTCP, BBR version 1; compiled.

Source:
    RFC 9438 (cubic), sections 4.1 to 4.8; Ha & Rhee 2011 (HyStart) with the thresholds of Linux; Alizadeh et al. 2010
    (DCTCP), section 3.3; RFC 6937 (the window during repairs); Cardwell et al. 2016 (BBR), and Linux's tcp_bbr.c for
    policers (what it calls long-term rates). Left out of BBR: probing for the round-trip time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_lab.packet_network import tcp_state as c
from paceline_lab.packet_network.machine_code import compiled

_BETA, _CUBE = 0.7, 0.4
_LEAST_HYSTART_WINDOW = 16
_STARTUP, _DRAIN, _PROBE = range(3)
_HIGH_GAIN, _PHASES = 2.885, 8
_SAMPLING, _POLICED = 1, 2
_LEAST_ROUNDS, _MOST_ROUNDS, _POLICED_ROUNDS = 4, 16, 48


@compiled
def least_rtt(f: Any) -> float:
    """The smallest round trip; the handshake's while there is no other, since all segments were sent twice."""
    return float(f[c.F_MIN_RTT] if f[c.F_MIN_RTT_AT] > 0 else f[c.F_RTT])


@compiled
def on_loss(x: Any, f: Any) -> None:
    """A loss was found: once a round trip at most."""
    x[c.C_REPAIR_FLIGHT], x[c.C_REPAIR_GOOD], x[c.C_REPAIR_SENT] = x[c.C_FLIGHT] + x[c.C_LOST], 0, 0
    if x[c.C_KIND] == c.BBR:
        f[c.F_MOST] = f[c.F_WINDOW]
        f[c.F_WINDOW] = x[c.C_FLIGHT] + 1
        return
    beta = _BETA if x[c.C_KIND] == c.CUBIC else 0.5
    f[c.F_EPOCH] = 0
    window = f[c.F_WINDOW]
    f[c.F_MOST] = window * (1 + _BETA) / 2 if window < f[c.F_MOST] else window
    f[c.F_THRESHOLD] = max(np.floor(window * beta), 2.0)


@compiled
def repair(x: Any, f: Any, good: int, is_clean: bool) -> None:
    """While losses are repaired: the window follows what arrives, down to the threshold (RFC 6937).

    Args:
        x: The connection's numbers.
        f: Its floating numbers.
        good: Segments that have just arrived.
        is_clean: Whether these moved the front on, and nothing else was lost.
    """
    x[c.C_REPAIR_GOOD] += good
    if x[c.C_KIND] == c.BBR:
        f[c.F_WINDOW] = max(f[c.F_WINDOW], x[c.C_FLIGHT] + good)
        return
    threshold, flight = np.int64(f[c.F_THRESHOLD]), x[c.C_FLIGHT]
    if flight > threshold:
        room = -(-x[c.C_REPAIR_GOOD] * threshold // max(1, x[c.C_REPAIR_FLIGHT])) - x[c.C_REPAIR_SENT]
    else:
        room = max(x[c.C_REPAIR_GOOD] - x[c.C_REPAIR_SENT], good) + (1 if is_clean else 0)
        room = min(threshold - flight, room)
    f[c.F_WINDOW] = flight + max(room, 1 if x[c.C_REPAIR_SENT] == 0 else 0)


@compiled
def end_repair(x: Any, f: Any) -> None:
    """All that was under way when a loss was found has arrived."""
    if x[c.C_KIND] == c.BBR:
        f[c.F_WINDOW] = max(f[c.F_WINDOW], f[c.F_MOST])
    elif not x[c.C_IS_TIMEOUT]:
        f[c.F_WINDOW] = f[c.F_THRESHOLD]


@compiled
def on_timeout(x: Any, f: Any) -> None:
    """Nothing was heard: begin anew with one segment."""
    if x[c.C_KIND] != c.BBR:
        on_loss(x, f)
    else:
        f[c.F_MOST] = max(f[c.F_MOST], f[c.F_WINDOW])
    x[c.C_TIMEOUTS] += 1
    f[c.F_WINDOW] = 1.0


@compiled
def on_ack(x: Any, f: Any, good: int, marked: int, rtt: float, rate: float, now: int) -> None:
    """Adapt to `good` segments that arrived, with `marked` marks; `rtt` (ns) and `rate` (segments a ns) 0: unknown."""
    if x[c.C_KIND] == c.BBR:
        _bbr(x, f, good, rate, now)
        return
    if x[c.C_DELIVERED] >= x[c.C_ROUND_END]:
        if x[c.C_KIND] == c.DCTCP:
            _dctcp_round(x, f)
        x[c.C_ROUND_END] = x[c.C_DELIVERED] + x[c.C_FLIGHT]
        f[c.F_ROUND_AT], f[c.F_ROUND_RTT] = now, 1e18
    x[c.C_ROUND_GOOD] += good
    x[c.C_ROUND_MARKED] += marked
    if x[c.C_RECOVERY_TO] >= 0 and not x[c.C_IS_TIMEOUT]:
        return
    if not x[c.C_IS_LIMITED]:
        return
    if f[c.F_WINDOW] < f[c.F_THRESHOLD]:
        f[c.F_WINDOW] += good
        if x[c.C_KIND] == c.CUBIC and rtt > 0:
            _hystart(f, rtt, now)
    elif x[c.C_KIND] == c.DCTCP:
        f[c.F_WINDOW] += good / f[c.F_WINDOW]
    else:
        _cubic(f, good, now)
    f[c.F_WINDOW] = min(f[c.F_WINDOW], c.RING / 2)


@compiled
def _hystart(f: Any, rtt: float, now: int) -> None:
    f[c.F_ROUND_RTT] = min(f[c.F_ROUND_RTT], rtt)
    if f[c.F_WINDOW] < _LEAST_HYSTART_WINDOW:
        return
    least = f[c.F_MIN_RTT]
    is_train = now - f[c.F_LAST_ACK] <= 2e6 and now - f[c.F_ROUND_AT] > least
    f[c.F_LAST_ACK] = now
    if is_train or f[c.F_ROUND_RTT] > least + min(max(least / 8, 4e6), 16e6):
        f[c.F_THRESHOLD] = f[c.F_WINDOW]


@compiled
def _cubic(f: Any, good: int, now: int) -> None:
    window = f[c.F_WINDOW]
    if f[c.F_EPOCH] == 0:
        f[c.F_EPOCH] = now
        f[c.F_K] = ((f[c.F_MOST] - window) / _CUBE) ** (1 / 3) if window < f[c.F_MOST] else 0.0
        f[c.F_ORIGIN] = max(window, f[c.F_MOST])
        f[c.F_ESTIMATE] = window
    elapsed = (now - f[c.F_EPOCH] + least_rtt(f)) / 1e9 - f[c.F_K]
    target = min(f[c.F_ORIGIN] + _CUBE * elapsed * elapsed * elapsed, 1.5 * window)
    f[c.F_ESTIMATE] += good * 3 * (1 - _BETA) / (1 + _BETA) / window
    window += good * max((target - window) / window, 0.01 / window)
    f[c.F_WINDOW] = max(window, f[c.F_ESTIMATE])


@compiled
def _dctcp_round(x: Any, f: Any) -> None:
    marked = x[c.C_ROUND_MARKED] / max(1, x[c.C_ROUND_GOOD])
    f[c.F_ALPHA] += (min(1.0, marked) - f[c.F_ALPHA]) / 16
    if x[c.C_ROUND_MARKED] > 0:
        f[c.F_WINDOW] = max(2.0, f[c.F_WINDOW] * (1 - f[c.F_ALPHA] / 2))
        f[c.F_THRESHOLD] = f[c.F_WINDOW]
    x[c.C_ROUND_GOOD] = x[c.C_ROUND_MARKED] = 0


@compiled
def best_rate(x: Any, f: Any) -> float:
    """BBR's estimate of the path's rate, in segments per ns: a policer's, or the best of the last rounds."""
    if x[c.C_POLICE_STATE] == _POLICED:
        return float(f[c.F_POLICE_RATE])
    best = 0.0
    for i in range(c.RATES):
        best = max(best, f[c.F_RATES + i])
    return best


@compiled
def pause_ns(x: Any, f: Any) -> float:
    """BBR's time between two segments."""
    rate = best_rate(x, f)
    if rate == 0:
        return float(f[c.F_RTT] / (_HIGH_GAIN * f[c.F_WINDOW]))
    return float(1 / (f[c.F_GAIN] * rate * 0.99))


@compiled
def _look_for_policer(x: Any, f: Any, is_new_round: bool, is_limited: bool, now: int) -> None:
    """Where a fifth is lost over two intervals of the same rate, a policer is taken to be there: keep to that rate."""
    has_lost = x[c.C_EVER_LOST] > x[c.C_LOST_SEEN]
    x[c.C_LOST_SEEN] = x[c.C_EVER_LOST]
    if x[c.C_POLICE_STATE] == _POLICED:
        x[c.C_POLICE_ROUNDS] += is_new_round
        if x[c.C_POLICE_ROUNDS] >= _POLICED_ROUNDS:
            x[c.C_POLICE_STATE], f[c.F_POLICE_RATE] = 0, 0.0
        return
    if x[c.C_POLICE_STATE] == 0:
        if not has_lost:
            return
        x[c.C_POLICE_STATE] = _SAMPLING
        _begin_interval(x, now)
    if is_limited or x[c.C_POLICE_ROUNDS] > _MOST_ROUNDS:
        x[c.C_POLICE_STATE], f[c.F_POLICE_RATE] = 0, 0.0
        return
    x[c.C_POLICE_ROUNDS] += is_new_round
    lost, good = x[c.C_EVER_LOST] - x[c.C_POLICE_LOST], x[c.C_DELIVERED] - x[c.C_POLICE_GOOD]
    took = now - x[c.C_POLICE_AT]
    if x[c.C_POLICE_ROUNDS] < _LEAST_ROUNDS or not has_lost or 256 * lost < 50 * good or took < 1e6:
        return
    rate = good / took
    before = f[c.F_POLICE_RATE]
    f[c.F_POLICE_RATE] = rate
    _begin_interval(x, now)
    if before > 0 and abs(rate - before) * 8 <= before:
        f[c.F_POLICE_RATE] = (rate + before) / 2
        x[c.C_POLICE_STATE] = _POLICED
        f[c.F_GAIN] = 1.0


@compiled
def _begin_interval(x: Any, now: int) -> None:
    x[c.C_POLICE_LOST], x[c.C_POLICE_GOOD] = x[c.C_EVER_LOST], x[c.C_DELIVERED]
    x[c.C_POLICE_AT], x[c.C_POLICE_ROUNDS] = now, 0


@compiled
def _bbr(x: Any, f: Any, good: int, rate: float, now: int) -> None:
    is_new_round = False
    if x[c.C_DELIVERED] >= x[c.C_ROUND_END]:
        x[c.C_ROUND_END] = x[c.C_DELIVERED] + x[c.C_FLIGHT]
        x[c.C_ROUND] += 1
        is_new_round = True
    is_limited = x[c.C_APP_LIMITED] > 0
    _look_for_policer(x, f, is_new_round, is_limited, now)
    if rate > 0 and (not is_limited or rate > best_rate(x, f)):
        for passed in range(max(x[c.C_RATED_ROUND] + 1, x[c.C_ROUND] - c.RATES + 1), x[c.C_ROUND] + 1):
            f[c.F_RATES + passed % c.RATES] = 0.0
        x[c.C_RATED_ROUND] = x[c.C_ROUND]
        slot = c.F_RATES + x[c.C_ROUND] % c.RATES
        f[slot] = max(f[slot], rate)
    best = best_rate(x, f)
    least = least_rtt(f)
    ahead = best * least
    if x[c.C_MODE] == _STARTUP and is_new_round and not is_limited:
        if best >= 1.25 * f[c.F_FULL_RATE]:
            f[c.F_FULL_RATE] = best
            x[c.C_FULL_COUNT] = 0
        else:
            x[c.C_FULL_COUNT] += 1
            if x[c.C_FULL_COUNT] >= 3:
                x[c.C_MODE], f[c.F_GAIN] = _DRAIN, 1 / _HIGH_GAIN
    if x[c.C_MODE] == _DRAIN and x[c.C_FLIGHT] <= ahead:
        x[c.C_MODE], x[c.C_PHASE], f[c.F_PHASE_AT], f[c.F_GAIN] = _PROBE, 2, now, 1.0
    if x[c.C_MODE] == _PROBE:
        is_over = now - f[c.F_PHASE_AT] > least
        if x[c.C_PHASE] == 0:
            is_over = is_over and (x[c.C_LOST] > 0 or x[c.C_FLIGHT] >= 1.25 * ahead)
        elif x[c.C_PHASE] == 1:
            is_over = is_over or x[c.C_FLIGHT] <= ahead
        if is_over:
            x[c.C_PHASE] = (x[c.C_PHASE] + 1) % _PHASES
            f[c.F_PHASE_AT] = now
            f[c.F_GAIN] = 1.25 if x[c.C_PHASE] == 0 else 0.75 if x[c.C_PHASE] == 1 else 1.0
        if x[c.C_POLICE_STATE] == _POLICED:
            f[c.F_GAIN] = 1.0
    at_once = max(2.0, np.floor(best * 1e6))  # segments of a millisecond: what Linux hands over in one piece
    gain = 2.0 if x[c.C_MODE] == _PROBE else _HIGH_GAIN
    target = gain * ahead + 3 * at_once
    if best == 0 or x[c.C_MODE] == _STARTUP:
        f[c.F_WINDOW] = f[c.F_WINDOW] + good if best == 0 or f[c.F_WINDOW] < target else f[c.F_WINDOW]
    else:
        f[c.F_WINDOW] = min(f[c.F_WINDOW] + good, target)
    f[c.F_WINDOW] = min(max(f[c.F_WINDOW], 4.0), c.RING / 2)

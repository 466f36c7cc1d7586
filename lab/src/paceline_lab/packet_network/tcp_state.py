"""The memory of simulated TCP connections, and the names of its columns. A connection carries data one way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline_lab.packet_network.leaf_spine import BANDS

SEGMENT_BYTES = 1448
HEADER_BYTES = 14 + 20 + 32  # Ethernet, IP, TCP with timestamps
CUBIC, DCTCP, BBR = range(3)
RING = 8192  # segments between the oldest unconfirmed and the newest; a power of 2

# connections: what it is; messages; the sender; its timer; the receiver
(
    C_SOURCE,
    C_TARGET,
    C_SPINE,
    C_BAND,
    C_KIND,
    C_MIN_RTO,
    C_PER_MESSAGE,
    C_LAST_BYTES,
    C_TOTAL,
    C_OPEN,
    C_GRANTED,
    C_NEXT,
    C_NOTIFY,
    C_GRANTS,
    C_BASE,
    C_FIRST_PHASE,
    C_SEEN,
    C_DONE_AT,
    C_UNA,
    C_NXT,
    C_FLIGHT,
    C_HIGH,
    C_SACKED,
    C_LOST,
    C_LOST_FROM,
    C_RECOVERY_TO,
    C_IS_TIMEOUT,
    C_BACKOFF,
    C_PROBED_TO,
    C_DEADLINE,
    C_WHY,
    C_PLANNED,
    C_PACE_PLANNED,
    C_HOST_QUEUE,
    C_HOST_LIMIT,
    C_DELIVERED,
    C_DELIVERED_AT,
    C_FIRST_AT,
    C_RACK_AT,
    C_RACK_SEQUENCE,
    C_RACK_RTT,
    C_REORDERED,
    C_IS_LIMITED,
    C_APP_LIMITED,
    C_SENT_AT,
    C_MARKS_SEEN,
    C_NEEDED,
    C_AHEAD,
    C_PENDING,
    C_ACK_PLANNED,
    C_MARKS,
    C_LAST_MARK,
    C_MESSAGES,
    C_BLOCKS,
) = range(54)
_BLOCK_COLUMNS = 6
# congestion control, whole numbers
C_ROUND_END = C_BLOCKS + _BLOCK_COLUMNS
(
    C_ROUND,
    C_MODE,
    C_PHASE,
    C_FULL_COUNT,
    C_ROUND_GOOD,
    C_ROUND_MARKED,
    C_REPAIR_FLIGHT,
    C_REPAIR_GOOD,
    C_REPAIR_SENT,
    C_RETRANSMITS,
    C_TIMEOUTS,
    C_RATED_ROUND,
    C_EVER_LOST,
    C_LOST_SEEN,
    C_POLICE_STATE,
    C_POLICE_ROUNDS,
    C_POLICE_LOST,
    C_POLICE_GOOD,
    C_POLICE_AT,
    NUM_C,
) = range(C_ROUND_END + 1, C_ROUND_END + 21)
TIMEOUT, PROBE, REORDER = range(3)
"""Why the timer is set."""

# floating; times in ns
(
    F_WINDOW,
    F_THRESHOLD,
    F_RTT,
    F_DEVIATION,
    F_MIN_RTT,
    F_MIN_RTT_AT,
    F_MOST,
    F_EPOCH,
    F_K,
    F_ORIGIN,
    F_ESTIMATE,
    F_ALPHA,
    F_ROUND_AT,
    F_ROUND_RTT,
    F_LAST_ACK,
    F_PACE_AT,
    F_GAIN,
    F_FULL_RATE,
    F_PHASE_AT,
    F_POLICE_RATE,
    F_RATES,
) = range(21)
RATES = 10
NUM_F = F_RATES + RATES

# segments: at a connection's sender
UNSENT, FLYING, SACKED, MISSING = range(4)
T_STATE, T_AT, T_IS_REPEATED, T_DELIVERED, T_DELIVERED_AT, T_FIRST_AT, NUM_T = range(7)


class Tcp(NamedTuple):
    """All connections of a network."""

    connections: NDArray[np.int64]
    rates: NDArray[np.float64]
    segments: NDArray[np.int64]  # connection, sequence % RING, column
    got: NDArray[np.uint8]  # connection, sequence % RING: what arrived behind a gap
    running: NDArray[
        np.int64
    ]  # connections with messages that have not arrived; then the handing-over time, ns


def new_connections(count: int, handing_over_us: float = 60.0) -> Tcp:
    """Memory for `count` connections, none of which has anything to send."""
    connections, rates = np.zeros((count, NUM_C), np.int64), np.zeros((count, NUM_F))
    connections[:, [C_NEXT, C_NOTIFY, C_GRANTS, C_RECOVERY_TO]] = -1
    connections[:, C_PER_MESSAGE] = 1
    connections[:, C_BAND] = BANDS - 1
    rates[:, F_WINDOW] = 10.0
    rates[:, F_THRESHOLD] = rates[:, F_MIN_RTT] = 1e18
    rates[:, F_RTT], rates[:, F_DEVIATION] = 1e6, 0.25e6  # of the handshake
    rates[:, F_GAIN] = 2.89
    return Tcp(
        connections,
        rates,
        np.zeros((count, RING, NUM_T), np.int64),
        np.zeros((count, RING), np.uint8),
        np.array([0, round(handing_over_us * 1e3)], np.int64),
    )

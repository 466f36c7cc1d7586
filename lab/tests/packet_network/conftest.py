"""The simulator's functions run interpreted here: compiling them takes ten times as long as these small networks do.

The protocol's own code is compiled as everywhere. That compiled and interpreted networks do the same is `lab`'s to see.
"""

from __future__ import annotations

import importlib

import numba

import paceline.transports.bounded_loss.datagram_loop
import paceline.transports.bounded_loss.endpoint  # noqa: F401  compiled: before the switch

_was = numba.config.DISABLE_JIT
numba.config.DISABLE_JIT = True
importlib.import_module("paceline_lab.packet_network.sides")
numba.config.DISABLE_JIT = _was

"""Sums over UDP of which a bounded part may be lost: a protocol without sockets (`endpoint`), and its sockets.

Importing it takes about half a second, for numba; whoever does not use it does not pay for it.
"""

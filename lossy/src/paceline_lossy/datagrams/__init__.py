"""Sums over UDP of which a bounded part may be lost: a protocol without sockets (`endpoint`), and its sockets.

Importing it takes about half a second, for numba, so the package imports it at the first use only.
"""

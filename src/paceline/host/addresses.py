"""Addresses of this host: which are its alone, and from which one it reaches others."""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = "127.0.0.1"
ELSEWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737): no host of any network here
_DISCARD_PORT = 9


def is_loopback(host: str) -> bool:
    """Return whether a name or an address, in brackets or not, is reached from this host alone. Looks nothing up."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def addresses_of(name: str) -> list[str]:
    """Return the addresses behind a host's name, IPv4 first. Raises OSError if there are none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty part between two dots, or one that is too long
        raise OSError(0, "this cannot be the name of a host") from error
    return sorted({str(each[4][0]) for each in found}, key=lambda address: (":" in address, address))


def own_address_towards(host: str, family: int = socket.AF_UNSPEC) -> str:
    """This host's address on the route to another, by name or address; "" if there is none. Sends nothing."""
    try:
        found = socket.getaddrinfo(host, _DISCARD_PORT, family, socket.SOCK_DGRAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # of datagrams: only asks the kernel for the route
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""

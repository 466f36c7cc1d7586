"""Addresses of this host: which are its alone, and from which one it reaches others."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

LOOPBACK = "127.0.0.1"
ELSEWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737): no host of any network here
_DISCARD_PORT = 9
_SIOCGIFADDR = 0x8915


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
    """Return this host's address on the route to another host; "" if there is no route. Sends nothing."""
    try:
        found = socket.getaddrinfo(host, _DISCARD_PORT, family, socket.SOCK_DGRAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # of datagrams: only asks the kernel for the route
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface of this host that others may reach, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                words = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if not is_loopback(address := socket.inet_ntoa(words[20:24])):
                    found[name] = address
    return found


def interface_towards(host: str) -> str:
    """Return the name of the network interface that leads to another host; "" if none, or loopback, does."""
    own = own_address_towards(host)
    return next((name for name, address in interfaces().items() if address == own), "")

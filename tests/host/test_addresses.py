"""Which addresses are this host's alone: asked by the launcher, the servers and the choice of a group."""

import socket

import pytest

from paceline.host.addresses import interfaces, is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "[::1]"])
def test_loopback_by_name_or_address(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "10.0.0.1", "192.0.2.1", "2001:db8::1", "node1", "127.0.0.1.example.org"]
)
def test_others_are_not(host):
    assert not is_loopback(host)


def test_the_addresses_of_interfaces_are_of_this_host():
    for address in interfaces().values():
        assert not is_loopback(address)
        with socket.socket() as probe:
            probe.bind((address, 0))

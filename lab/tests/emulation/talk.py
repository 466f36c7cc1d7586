"""Python inside emulated hosts: small programs, and datagrams whose fate can be counted."""

from __future__ import annotations

import json
import subprocess
import sys

DEADLINE_S = 60
RECEIVE = """
import json, socket
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("0.0.0.0", 0))
try:
    udp.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE: room for all, however late this process is
except OSError:
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
udp.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
print(udp.getsockname()[1], flush=True)
arrived = []
while True:
    data, ancillary, _, peer = udp.recvmsg(65536, 64)
    number = int(data.split(b" ")[0])
    if number >= 0:
        arrived.append([number, ancillary[0][2][0]])
        continue
    if arrived is not None:
        print(json.dumps(arrived), flush=True)
        arrived = None
    udp.sendto(b"heard", peer)
"""
SEND = """
import json, socket, sys
address, port, bursts, size = json.loads(sys.argv[1])
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
for first, count, service in bursts:
    udp.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, service)
    for number in range(first, first + count):
        udp.sendto((b"%d " % number).ljust(size, b"."), (address, port))
# The last word waits behind everything else; it may get lost, so it is said until it was heard.
udp.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0)
udp.settimeout(0.1)
while True:
    udp.sendto(b"-1 ", (address, port))
    try:
        udp.recv(64)
        break
    except TimeoutError:
        pass
"""


def python(host, code, *words):
    """Run `code` to its end inside a host and return what it printed."""
    done = subprocess.run(
        host.command([sys.executable, "-I", "-S", "-c", code, *words]),
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def send(source, target, *bursts, size=1000):
    """Send bursts (first number, count, service byte) as fast as it goes, one after another.

    Returns number and service byte of each datagram that arrived, in the order of arrival.
    """
    command = target.command([sys.executable, "-I", "-S", "-c", RECEIVE])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        try:
            port = int(receiver.stdout.readline())
            python(source, SEND, json.dumps([target.address, port, bursts, size]))
            return [tuple(pair) for pair in json.loads(receiver.stdout.readline())]
        finally:
            receiver.kill()

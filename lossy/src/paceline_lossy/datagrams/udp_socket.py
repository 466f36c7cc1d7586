"""The UDP sockets of a rank, one of which receives; how the ranks of a group learn addresses and keys of each other."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import secrets
import socket
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.comm import Rendezvous
from paceline.errors import ConfigurationError
from paceline_lossy.datagrams.datagram import MOST_PORTS, payload_room

_SEND_BUFFER_BYTES = 1024 * 1024
_RECEIVE_BUFFER_BYTES = 4 * 1024 * 1024
_LEAST_RECEIVE_BUFFER_BYTES = 1024 * 1024
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_RECVTOS = 10, 2, 13
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921
_ECN_CAPABLE = 2
_SO_ATTACH_FILTER, _SO_MEMINFO = 26, 55
_TAKE_NOTHING = struct.pack("=HBBI", 6, 0, 0, 0)  # a socket filter of one instruction: return 0
_MEMINFO, _DROPS = struct.Struct("=9I"), 8
_PRIME = int(
    "ffffffffffffffffc90fdaa22168c234c4c6628b80dc1cd129024e088a67cc74"
    "020bbea63b139b22514a08798e3404ddef9519b3cd3a431b302b0a6df25f1437"
    "4fe1356d6d51c245e485b576625e7ec6f44c42e9a637ed6b0bff5cb6f406b7ed"
    "ee386bfb5a899fa5ae9f24117c4b1fe649286651ece45b3dc2007cb8a163bf05"
    "98da48361c55d39a69163fa8fd24cf5f83655d23dca3ad961c62f356208552bb"
    "9ed529077096966d670c354e4abc9804f1746c08ca18217c32905e462e36ce3b"
    "e39e772c180e86039b2783a2ec07a28fb5c55df06f4c52c9de2bcbf695581718"
    "3995497cea956ae515d2261898fa051015728e5a8aacaa68ffffffffffffffff",
    16,
)
_GENERATOR = 2
_EXPONENT_BITS = 256


class KeyAgreement:
    """One rank's side of agreeing on a secret with every other rank, through a store that others may read.

    Each rank publishes g^x and keeps x. The store carries the job's code (`SealedStore`), so under `paceline run`
    only its ranks have written them. A process that merely reads the store learns no secret.

    Attributes:
        public: The value to be published, in hexadecimal.

    Source:
        Diffie & Hellman 1976; the group is number 14 of RFC 3526, section 3.
    """

    def __init__(self) -> None:
        self._exponent = secrets.randbits(_EXPONENT_BITS) | 1 << (_EXPONENT_BITS - 1)
        self.public = f"{pow(_GENERATOR, self._exponent, _PRIME):x}"

    def secret_with(self, public: str) -> bytes:
        """Return the 32 bytes that only this rank and the one that published `public` can compute.

        Raises ValueError if `public` is not a valid public value.
        """
        theirs = int(public, 16)
        if not 1 < theirs < _PRIME - 1:
            raise ValueError(f"{public[:20]}... is not a member of the group")
        shared = pow(theirs, self._exponent, _PRIME)
        return hashlib.sha256(b"paceline bounded loss " + shared.to_bytes(256, "big")).digest()


@dataclass(frozen=True)
class Members:
    """The addresses and secret keys of a group's members, and the sockets of this one."""

    # The bound sockets of this rank. It sends by all of them, and receives on the first.
    sockets: Sequence[socket.socket]
    places: Sequence[tuple[str, int]]  # address and port of each, in the order of the ranks
    keys: dict[
        int, bytes
    ]  # for every peer the secret that only the two ranks know; for this rank a random one
    payload_bytes: int  # the bytes that a datagram carries: as many as fit the smallest MTU of all
    names: Sequence[str] = ()  # the name of each member in messages; if empty, its rank

    def name_of(self, peer: int) -> str:
        """Return the name of a member for messages."""
        return self.names[peer] if self.names else f"rank {peer}"


def find_members(rendezvous: Rendezvous, address: str, num_ports: int = 1) -> Members:
    """Open sockets, and exchange addresses and public keys with the other ranks.

    Args:
        rendezvous: The rendezvous of the ranks, used for this alone.
        address: The address of this host on which this rank listens.
        num_ports: Number of ports that it sends from; the same on every rank. Networks that choose among paths by ports
            (ECMP) then carry one rank's datagrams over several paths, each at its own rate.

    Contract:
        Collective over the ranks.  Blocks: until every rank has come.

    Raises:
        ConfigurationError: No socket can listen there, or another rank has another number of ports.
        PeerLostError: A rank did not come.
    """
    if not 1 <= num_ports <= MOST_PORTS:
        raise ConfigurationError(
            f"paths={num_ports!r} must be from 1 to {MOST_PORTS} ports. For two paths 8 are enough."
        )
    introduction = Introduction(address, num_ports)
    try:
        return _exchange(rendezvous, introduction, num_ports)
    except BaseException:
        introduction.close()
        raise


def _exchange(rendezvous: Rendezvous, introduction: Introduction, num_ports: int) -> Members:
    rank = rendezvous.rank
    rendezvous.publish("place", json.dumps(introduction.announcement))
    announced = [json.loads(words) for words in rendezvous.collect("place")]
    for other, said in enumerate(announced):
        if said["ports"] != num_ports:
            raise ConfigurationError(
                f"rank {rank} was told paths={num_ports} and rank {other} paths={said['ports']}. Pass the same on all."
            )
    announced[rank] = None
    return introduction.members(announced)


class Introduction:
    """The sockets of one end of a datagram exchange, and the address, public key and MTU that it announces.

    Attributes:
        announcement: The announced values, for JSON.

    Raises:
        ConfigurationError: No socket can listen on `address`.
    """

    def __init__(self, address: str, num_ports: int = 1) -> None:
        self._sockets = [_bind(address)]
        self._sockets += [_bind_sender(address) for _ in range(num_ports - 1)]
        self._agreement = KeyAgreement()
        self.announcement: dict[str, Any] = {
            "place": self._sockets[0].getsockname(),
            "public": self._agreement.public,
            "mtu": _mtu_of(address),
            "ports": num_ports,
        }

    def members(self, announced: Sequence[Mapping[str, Any] | None], names: Sequence[str] = ()) -> Members:
        """Return the group of these announcements, in order. It takes over the sockets of this end.

        None stands for this end, and for ends that it exchanges no datagrams with.
        """
        here = self._sockets[0].getsockname()
        return Members(
            self._sockets,
            [here if each is None else (str(each["place"][0]), int(each["place"][1])) for each in announced],
            {
                peer: secrets.token_bytes(32) if each is None else self._agreement.secret_with(each["public"])
                for peer, each in enumerate(announced)
            },
            payload_room(
                min(int(each["mtu"]) for each in (self.announcement, *announced) if each is not None)
            ),
            tuple(names),
        )

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def _bind(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _ECN_CAPABLE)
        made.setsockopt(socket.IPPROTO_IP, _IP_RECVTOS, 1)
        made.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        with contextlib.suppress(PermissionError):
            made.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BUFFER_BYTES)
            made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
        got = made.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        if got < _LEAST_RECEIVE_BUFFER_BYTES:
            warnings.warn(
                f"the kernel gives a socket {got // 1024} KiB to receive into, so bursts from several ranks overflow "
                "it and count as lost. Raise it on every host: sysctl -w net.core.rmem_max=4194304.",
                UserWarning,
                stacklevel=2,
            )
        made.bind((address, 0))
    except OSError as error:
        made.close()
        raise ConfigurationError(
            f"no UDP socket can listen on {address}: {error}. Set GLOO_SOCKET_IFNAME to the interface that the other "
            "hosts reach."
        ) from error
    return made


def dropped_by_kernel(socket_: socket.socket) -> int:
    """Return how many datagrams at a socket the kernel has dropped. On a socket that only sends, all are strangers'."""
    words = socket_.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
    return int(_MEMINFO.unpack(words)[_DROPS])


def _bind_sender(address: str) -> socket.socket:
    """Return a socket that only sends. The kernel drops and counts the datagrams that come there."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
    program = ctypes.create_string_buffer(_TAKE_NOTHING)
    made.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))
    made.bind((address, 0))
    return made


def socket_addresses(places: Sequence[tuple[str, int]]) -> NDArray[np.int64]:
    """Return one sockaddr_in per peer, shape (P, 2)."""
    raw = b"".join(
        struct.pack("=H", socket.AF_INET) + struct.pack(">H", port) + socket.inet_aton(address) + bytes(8)
        for address, port in places
    )
    found: NDArray[np.int64] = np.frombuffer(raw, np.int64).reshape(-1, 2).copy()
    return found


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface, or of the first one in a list with commas.

    Raises ConfigurationError if there is no such interface, or it has no address.
    """
    name, names = interface.partition(",")[0], [name for _, name in socket.if_nameindex()]
    if name not in names:
        raise ConfigurationError(
            f"there is no interface {name!r} on this host; there are {', '.join(names)}."
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            raise ConfigurationError(f"the interface {name!r} has no IPv4 address: {error}.") from error
    return socket.inet_ntoa(answer[20:24])


def _mtu_of(address: str) -> int:
    """Return the MTU of the interface that has this address, or 1500 if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == address:
                    return int(struct.unpack("=i", fcntl.ioctl(probe, _SIOCGIFMTU, request)[16:20])[0])
    return 1500

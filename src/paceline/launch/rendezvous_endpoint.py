"""Chooses where the machines of a launch meet: at an address or by a shared file, and what to type on the next one.

Rules
1. Several machines without a word about where to meet: this one is the first. It takes its own address, a free port, an
   id and a token, and says what to type on the others.
2. `--rdzv-endpoint` with an address or `file:///path` and no `--node-rank`: machines are started in any order, and
   torch's dynamic rendezvous numbers them.
3. `--node-rank` or `--master-addr`: torch's static rendezvous, as with torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import shlex
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed import run as torchrun

from paceline.comm import TOKEN
from paceline.errors import ConfigurationError
from paceline.host.addresses import ELSEWHERE, LOOPBACK, addresses_of, own_address_towards
from paceline.launch.stores import addresses_here

FILE = "file://"
_USUAL_PORT = 29400
_JOIN_TIMEOUT_S = 600.0
_KNOCK_S = 0.5
_QUIET_S = 3.0


def choose_backend(args: argparse.Namespace, num_machines: int) -> bool:
    """Fill in torch's arguments. Return whether to say where to meet. Raises ConfigurationError."""
    endpoint = args.rdzv_endpoint or ""
    is_static = args.node_rank is not None or args.master_addr is not None or args.standalone
    if endpoint.startswith(FILE):
        _check_file(endpoint)
        if args.rdzv_backend not in (None, "c10d") or is_static:
            raise ConfigurationError(
                f"--rdzv-endpoint {endpoint} meets by a file, which torch's backend c10d does, without --node-rank, "
                "--master-addr or --standalone. Drop those, or name an address."
            )
        args.rdzv_backend, args.rdzv_endpoint = "c10d", endpoint.removeprefix(FILE)
        args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, "store_type=file"]))
    elif num_machines > 1 and args.rdzv_backend is None and not is_static:
        args.rdzv_backend = "c10d"
    is_first = num_machines > 1 and args.rdzv_backend == "c10d" and not args.rdzv_endpoint
    args.rdzv_backend = args.rdzv_backend or "static"
    said = re.search(r"join_timeout=([^,]*)", args.rdzv_conf or "")
    if args.rdzv_backend == "static" and said and ",timeout=" not in f",{args.rdzv_conf}":
        args.rdzv_conf += f",timeout={said[1]}"  # what torch's static rendezvous calls it
    args.node_rank = 0 if args.node_rank is None else args.node_rank
    args.master_addr = args.master_addr or LOOPBACK
    return is_first


def meets_by_file(args: argparse.Namespace) -> bool:
    """Return whether the machines meet by a file that all of them see."""
    return "store_type=file" in (args.rdzv_conf or "").replace(" ", "").split(",")


def patience_s(args: argparse.Namespace) -> float:
    """Return how long machines wait for each other: torch's `join_timeout` of --rdzv-conf, 10 minutes by default."""
    return float(torchrun._parse_rendezvous_config(args.rdzv_conf or "").get("join_timeout", _JOIN_TIMEOUT_S))


def be_first(args: argparse.Namespace, words: Sequence[str], note: Callable[[str], None]) -> None:
    """Choose where the others come to, in `args`, and say what to type there. Raises ConfigurationError."""
    address = args.local_addr or own_address()
    if address is None:
        raise ConfigurationError(
            "this machine has no address that others could reach. Name one with --local-addr, or one where all "
            "machines meet with --rdzv-endpoint HOST:PORT."
        )
    token = os.environ.setdefault(TOKEN, secrets.token_hex(16))
    args.rdzv_endpoint = f"{address}:{_free_port(address)}"
    args.rdzv_id = args.rdzv_id if args.rdzv_id != "none" else uuid.uuid4().hex[:8]
    args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, "is_host=true"]))
    args.local_addr = address
    where = ["--rdzv-endpoint", args.rdzv_endpoint, "--rdzv-id", args.rdzv_id]
    num_script_s = 1 + len(args.training_script_args)
    options = without(words[:-num_script_s], ("--local-addr", "--local_addr", "--rdzv-id", "--rdzv_id"))
    command = ["paceline", "run", *where, *options, *words[-num_script_s:]]
    note("this is the first machine. On each of the others, in any order, type")
    note(f"  cd {shlex.quote(str(Path.cwd()))} && {TOKEN}={token} {shlex.join(command)}")


def without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the words without these options and their values."""
    kept: list[str] = []
    left = iter(words)
    for word in left:
        name, sign, _ = word.partition("=")
        if name not in options:
            kept.append(word)
        elif not sign:
            next(left, None)
    return kept


def find_own_address(args: argparse.Namespace) -> None:
    """Tell torch which address of this machine the other machines reach. By default torch takes its name."""
    if args.local_addr is not None or args.rdzv_backend != "c10d":
        return
    host = None if meets_by_file(args) else args.rdzv_endpoint.rpartition(":")[0]
    args.local_addr = own_address(host or ELSEWHERE)


def wait_for_store(args: argparse.Namespace, note: Callable[[str], None]) -> None:
    """Wait until the first machine's store listens, if it is elsewhere: machines start in any order."""
    host, _, port = (args.rdzv_endpoint or "").rpartition(":")
    if meets_by_file(args) or args.rdzv_backend != "c10d" or not port.isdigit() or addresses_here(host):
        return
    began_s, has_told = time.monotonic(), False
    while time.monotonic() - began_s < patience_s(args):
        addresses_of_meeting(host, f"--rdzv-endpoint {args.rdzv_endpoint}")
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
            return
        if time.monotonic() - began_s > _QUIET_S and not has_told:
            has_told = True
            note(f"nothing listens at {args.rdzv_endpoint} yet; waiting for the launcher there")
        time.sleep(_KNOCK_S)


def addresses_of_meeting(host: str, option: str) -> list[str]:
    """Return addresses of the host where machines meet, as `option` names it. Raises ConfigurationError if unknown."""
    try:
        return addresses_of(host.strip("[]"))
    except OSError as error:
        raise ConfigurationError(
            f"{option}: this host does not know the name {host} ({error.strerror}). Check the spelling, or name the "
            "address."
        ) from error


def own_address(towards: str = ELSEWHERE) -> str | None:
    """Return the address of this machine from which others are reached, or that its name has; None if there is none."""
    found = own_address_towards(towards, socket.AF_INET)
    if found and not found.startswith("127."):
        return found
    named = addresses_here(socket.gethostname())
    return next((address for address in named if not address.startswith("127.") and address != "::1"), None)


def _free_port(address: str) -> int:
    for port in (_USUAL_PORT, 0):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            return int(probe.getsockname()[1])
    raise ConfigurationError(
        f"--local-addr {address} is not an address of this machine. Leave it out, or name one of its own."
    )


def _check_file(endpoint: str) -> None:
    path = Path(endpoint.removeprefix(FILE))
    if not path.is_absolute():
        raise ConfigurationError(
            f"--rdzv-endpoint {endpoint} is not a full path. Write three slashes, as in {FILE}/shared/job1."
        )
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigurationError(
            f"--rdzv-endpoint {endpoint}: {path.parent} is not a folder in which a file {path.name} can be written. "
            "Name a file in a folder that all machines share."
        )

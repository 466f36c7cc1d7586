"""Makes sure that the machines of a launch fit together, before torch's rendezvous: all compare their facts.

Rules
1. Every launcher writes its node's facts into the store behind the rendezvous, and reads all others'. All are compared
   with the first node; a difference is an error on every machine, which names the machine and both values.
2. No rank is started before all nodes are there, so machines that do not fit fail in seconds, not by a timeout.
3. Node facts are sealed with the job's token (`comm/sealed_store.py`). A wrong seal counts as absent, so a stranger
   cannot end a job. A launcher that finds the first node sealed otherwise has another token itself, and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.comm import TOKEN
from paceline.comm.sealed_store import SealedStore
from paceline.errors import PacelineError

_PAUSE_S = 0.1
_QUIET_S = 3.0  # so long nothing is said about waiting
_MOST_NODES = 10_000  # that are read, whatever a stranger says of their number
_LINGER_S = 5.0  # keep the store open so that the others can read the error


class MachinesDifferError(PacelineError):
    """The machines of a launch do not fit together; nothing was started on any."""

    def __init__(self, words: str) -> None:
        super().__init__(f"{words} `paceline explain does not fit` says more.")


@dataclass(frozen=True)
class NodeInfo:
    """The facts of one machine, which all machines compare."""

    name: str  # its host name
    num_ranks: int  # that it will run
    # The values that must be the same on every machine, by their name in messages.
    must_agree: Mapping[str, str]
    node_rank: int | None  # its number, if it was given one
    arguments: tuple[str, ...] = ()  # the script's; they may differ, but seldom should

    @classmethod
    def of_this_machine(cls, args: argparse.Namespace, num_ranks: int) -> NodeInfo:
        """Return the node of a launch with these arguments of torch's parser, on this machine."""
        return cls(
            name=socket.gethostname(),
            num_ranks=num_ranks,
            must_agree={
                "--nnodes": str(args.nnodes),
                # What follows + says for which devices it was built, and those may differ.
                "torch": torch.__version__.partition("+")[0],
                "Paceline": _own_version(),
                "the script": _script(args),
            },
            node_rank=args.node_rank if args.rdzv_backend == "static" else None,
            arguments=tuple(args.training_script_args),
        )

    @classmethod
    def decode(cls, text: bytes | None) -> NodeInfo | None:
        """Return the node that `encode` wrote; None if it is none. Without a token, a stranger may write anything."""
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            fields = json.loads(text or b"")
            node = cls(**fields | {"arguments": tuple(fields["arguments"])})
            shown = [node.name, f"{node.num_ranks + 0}", *node.must_agree.values(), *node.arguments]
            if all(words.isprintable() for words in shown):
                return node
        return None

    def encode(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class MachineRendezvous:
    """The meeting of a launch's machines: the place, their number, and how long to wait."""

    node: NodeInfo  # of this machine
    num_machines: int  # that have to come
    waits: bool  # whether to wait for all of them; otherwise (an elastic job) each is only compared with the first
    takes_latecomers: bool  # whether a machine may come once all are there, in the place of one that failed
    where: str  # for messages
    job: str = "none"  # the launch's --rdzv-id: several may meet in one store
    timeout_s: float = 600.0  # how long to wait for the others

    def hold(self, store: dist.Store, is_server: bool, note: Callable[[str], None]) -> list[NodeInfo]:
        """Compare this machine with the others in a `store` that all reach; return all that came, in their order.

        Collective over the machines, if it `waits`, and then blocks. `is_server`: the store ends with this process.
        `note` is called with lines for the user. Raises MachinesDifferError on all machines that are there, if one does
        not fit or came too late.
        """
        store = dist.PrefixStore(f"paceline launch {self.job}", store)
        number = store.add(_COUNT, 1) - 1
        sealed = SealedStore(store, "machines")
        sealed.set(_key(number), self.node.encode())
        try:
            nodes = self._gather(store, sealed, number, note)
        except MachinesDifferError:
            self._linger(store, is_server)
            raise
        store.add(_HEARD, 1)
        return list(_told_apart(nodes).values())

    def _gather(
        self, store: dist.Store, sealed: SealedStore, number: int, note: Callable[[str], None]
    ) -> dict[int, NodeInfo]:
        began_s, has_told = time.monotonic(), False
        nodes, strangers = dict[int, NodeInfo](), set[int]()
        while True:
            for other in range(min(store.add(_COUNT, 0), _MOST_NODES)):
                if other in nodes or not store.check([_key(other)]):
                    continue
                node = NodeInfo.decode(sealed.get(_key(other)))
                if node is not None:
                    nodes[other] = node
                    self._compare(_told_apart(nodes), other, note)
                elif other == 0:
                    raise MachinesDifferError(
                        f"{self.node.name} has another {TOKEN} than the machine where the launch began, at "
                        f"{self.where}. Neither can read what the other wrote there. Give every machine the same, or "
                        "none. Nothing was started here."
                    )
                elif other not in strangers:
                    strangers.add(other)
                    note(f"a process connected to {self.where} without this job's {TOKEN}; it does not count")
            if number >= self.num_machines + len(strangers) and not self.takes_latecomers:
                raise MachinesDifferError(
                    f"{self.node.name} came too late: the {self.num_machines} machine(s) of --nnodes have met at "
                    f"{self.where} already ({_names(nodes)}). If they have ended, name another port or file, or remove "
                    "the file. If this machine belongs to them, start all with a larger --nnodes."
                )
            missing = self.num_machines - len(nodes)
            if 0 in nodes and (missing <= 0 or not self.waits):
                break
            waited_s = time.monotonic() - began_s
            if waited_s > self.timeout_s:
                raise MachinesDifferError(
                    f"only {len(nodes)} of {self.num_machines} machines came to {self.where} within "
                    f"{self.timeout_s:.0f} s: {_names(nodes)}. Look at the others' launchers: they need the same "
                    "--rdzv-id, and have to be paceline run's, not torchrun's; --rdzv-conf join_timeout=3600 waits "
                    "longer. Nothing was started."
                )
            if waited_s > _QUIET_S and not has_told:
                has_told = True
                note(
                    f"{_names(nodes)} at {self.where}; {missing} more of {self.num_machines} machine(s) to come"
                )
            time.sleep(_PAUSE_S)
        if has_told:
            ranks = sum(node.num_ranks for node in nodes.values())
            note(f"all {self.num_machines} machines are there, {ranks} ranks: {_names(nodes)}")
        return nodes

    def _linger(self, store: dist.Store, is_server: bool) -> None:
        """Wait so that the other machines, also late ones, read the error before the store ends."""
        store.add(_HEARD, 1)
        ends_s = time.monotonic() + _LINGER_S
        while is_server and store.add(_HEARD, 0) < self.num_machines and time.monotonic() < ends_s:
            time.sleep(_PAUSE_S)

    def _compare(self, nodes: Mapping[int, NodeInfo], new: int, note: Callable[[str], None]) -> None:
        """Compare the first machine's node with a new one. If the first one is new, compare it with all."""
        first = nodes.get(0)
        if first is None:
            return
        for number in [new] if new else [other for other in nodes if other]:
            node = nodes[number]
            for what, value in first.must_agree.items():
                found = node.must_agree.get(what)
                if found != value:
                    raise MachinesDifferError(
                        f"{node.name} does not fit {first.name}, where the launch began: {what} is {found} on "
                        f"{node.name}, {value} on {first.name}. All machines need the same; nothing was started on any "
                        f"of the {self.num_machines}."
                    )
            for other in nodes:
                if (
                    other != number
                    and not self.takes_latecomers
                    and node.node_rank is not None
                    and nodes[other].node_rank == node.node_rank
                ):
                    names = " and ".join(nodes[each].name for each in sorted((other, number)))
                    raise MachinesDifferError(
                        f"{names} were both given --node-rank {node.node_rank}. Each machine needs a number of its "
                        "own, from 0; or leave --node-rank out. Nothing was started."
                    )
            if node.arguments != first.arguments and self.node.name == first.name:
                note(
                    f"{node.name} gives the script other arguments than {first.name}: {' '.join(node.arguments)!r}"
                )


_COUNT, _HEARD = "machines", "machines that know"


def _key(number: int) -> str:
    return f"machine {number}"


def _told_apart(nodes: Mapping[int, NodeInfo]) -> dict[int, NodeInfo]:
    """Return the nodes in the order of coming, and add a number to a name that came before."""
    apart: dict[int, NodeInfo] = {}
    names: set[str] = set()
    for number in sorted(nodes):
        node = nodes[number]
        # Two containers, or two shells of one machine.
        apart[number] = (
            replace(node, name=f"{node.name} (number {number + 1} to come)") if node.name in names else node
        )
        names.add(node.name)
    return apart


def _names(nodes: Mapping[int, NodeInfo]) -> str:
    return ", ".join(f"{node.name} ({node.num_ranks} rank(s))" for node in _told_apart(nodes).values())


def _script(args: argparse.Namespace) -> str:
    """Return the script's name, and a digest of its file if it has one."""
    name = str(args.training_script)
    path: str | None = name
    if args.module:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
        path = found.origin if found is not None else None
    elif args.no_python:
        path = shutil.which(name)
    if path is None or not Path(path).is_file():
        return name
    return f"{Path(name).name} (digest {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]})"


def _own_version() -> str:
    """Return the version, and a digest of the sources: a version says little while they are being worked on."""
    folder = Path(__file__).parents[1]
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    package = sys.modules[folder.name]  # whose import statement would be one of training
    return f"{package.__version__} (sources {total.hexdigest()[:12]})"

"""A rank's part of an optimizer on the servers: its settings, the stepped parameters, and when they take effect.

Rules
1. Servers step a piece as soon as all ranks have pushed it, with the settings that the groups had when backward began.
   The stepped values wait in separate memory until `install`, which is the optimizer's `step()`.
2. When the next backward begins, ranks tell the servers whether they have installed the last step, and which
   parameters no rank used. Servers take back steps that were not installed. So a failed backward changes nothing
   anywhere.
3. Servers hold copies of the parameters. Rank 0 sends those that have changed here since the servers last had them, as
   torch's version counters tell. Before the first step it sends all. `install` refuses if a parameter was changed
   between its backward and `install`, because it would overwrite the change. Changed parameters that backward has not
   used are sent with the next step.
4. `.grad` is None after backward, because no rank has the mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm import Work
from paceline.errors import ConfigurationError
from paceline.reductions import Message
from paceline_servers.link import PATIENCE_S
from paceline_servers.ranks.server_connections import ServerConnections, ask_all
from paceline_servers.response_future import ResponseFuture
from paceline_servers.stepping import described_state, read_state
from paceline_servers.wire import Frame, Kind, pack, pack_state, unpack_state

SCALARS = frozenset({"step", "eta", "mu", "mu_product"})  # state of a parameter, not of its elements
State = dict[int, dict[str, Any]]
"""The state of an optimizer: by a parameter's index, by name."""


class SteppedModel:
    """The optimizer of one model on its servers. Rank 0, with `is_first`, sends parameters and state.

    The optimizer is never stepped here.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Parameter], is_first: bool) -> None:
        self._optimizer = optimizer
        self._kind = next(
            kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.")
        )
        self._parameters = list(parameters)
        self._is_first = is_first
        self._group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._connection: ServerConnections | None = None
        self._begin: bytes | None = None  # the BEGIN of the next step, until it is sent
        self._used, self._unused = False, list[Parameter]()  # of the last step; reported to the servers
        self._awaits = False  # whether a step has come back and is not installed
        self._pulled: dict[int, Tensor] = {}  # by bucket
        self._arrived: list[tuple[Parameter, Tensor]] = []
        self._versions: dict[int, int] = {}  # versions of the parameters on the servers
        self._pushed_versions: dict[int, int] = {}  # when the step under way was launched
        self._to_load: State | None = None

    def settings(self) -> list[dict[str, Any]]:
        """Return the current settings of the groups."""
        return [
            {name: _plain(name, group[name]) for name in self._optimizer.defaults if name in group}
            for group in self._optimizer.param_groups
        ]

    def set_up(self, connection: ServerConnections) -> None:
        """Send the servers the optimizer and its keys. Runs on the lane, after the servers have answered."""
        self._connection = connection
        groups = self.settings()
        answers = ResponseFuture(connection.link.num_servers)
        for server in range(connection.link.num_servers):
            keys = [
                [
                    key.number,
                    self._group_of[id(self._parameters[key.parameter])],
                    key.stop - key.start,
                    str(self._parameters[key.parameter].dtype),
                ]
                for key in connection.cutting.keys
                if key.server == server
            ]
            words = {"optimizer": self._kind, "groups": groups, "keys": keys}
            frame = Frame(Kind.SET_UP, body=(pack(words),))
            connection.link.ask(server, frame, answers, patience_s=PATIENCE_S)
        answers.wait()  # before requests that must be answered within the timeout

    # ---- a step

    def begin_step(self) -> None:
        """Begin a synchronized backward. Local."""
        self._begin = pack({"groups": self.settings(), **self._used_words()})
        self._used, self._unused, self._arrived = False, [], []
        if self._awaits:
            # this backward would step on the servers again, and only the last step can be taken back
            self._awaits = False
            raise ConfigurationError(
                "backward ran twice without optimizer.step() between, and the servers have stepped with the first "
                "one's gradients; both are dropped. Accumulate under no_sync() or accumulate(), or drop the first "
                "before the second: optimizer.zero_grad()."
            )

    def _used_words(self) -> dict[str, Any]:
        unused: list[int] = []
        if self._connection is not None:
            cutting = self._connection.cutting
            indices = [cutting.index_of[id(parameter)] for parameter in self._unused]
            unused = [key.number for index in indices for key in cutting.keys_of(index)]
        return {"used": self._used, "unused": unused}

    def launch(self, connection: ServerConnections, message: Message) -> Work:
        """Start to push a bucket of gradients and to pull the stepped parameters. Collective; does not block."""
        pulled = self._pulled.get(message.index)
        if pulled is None or pulled.shape != message.body.shape or pulled.dtype != message.body.dtype:
            pulled = self._pulled[message.index] = torch.empty_like(message.body)
        self._pushed_versions |= {id(p): p._version for p in message.parameters}
        first = message.body.storage_offset()
        views = [
            pulled.as_strided(g.shape, g.stride(), g.storage_offset() - first) for g in message.gradients
        ]
        self._arrived += zip(message.parameters, views, strict=True)
        begin, self._begin = self._begin, None

        def before() -> None:
            if begin is not None:
                self._load(connection)
                for server in range(connection.link.num_servers):
                    connection.link.ask(server, Frame(Kind.BEGIN, body=(begin,)))
            self._send_changed(connection, message)

        return connection.launch(message, pulled, before)

    def _send_changed(self, connection: ServerConnections, message: Message) -> None:
        """Send the changed parameters of a bucket that is about to be pushed (rule 3)."""
        if not self._is_first:
            return
        parts: dict[int, tuple[list[int], list[Tensor]]] = {}
        for parameter in message.parameters:
            if self._versions.get(id(parameter)) == parameter._version:
                continue
            flat = flat_of(parameter).cpu()
            for key in connection.cutting.keys_of(connection.cutting.index_of[id(parameter)]):
                numbers, values = parts.setdefault(key.server, ([], []))
                numbers.append(key.number)
                values.append(flat[key.start : key.stop])
        for server, (numbers, values) in parts.items():
            packed = struct.pack(f"<{len(numbers)}I", *numbers)
            body = (packed, *(_bytes(value) for value in values))
            connection.link.ask(server, Frame(Kind.PARAMETERS, num_keys=len(numbers), body=body))

    def end_step(self, parameters: Iterable[Parameter], unused: Sequence[Parameter]) -> None:
        """End a backward that succeeded on all ranks, with all pieces here (rule 4).

        The `unused` parameters do not change, like a parameter without a gradient.
        """
        self._unused = list(unused)
        self._awaits = True
        for parameter in parameters:
            parameter.grad = None

    @torch.no_grad()
    def install(self) -> bool:
        """Install the stepped parameters. Return whether there was a step. Local.

        Raises ConfigurationError if parameters have changed since backward.
        """
        if not self._awaits:
            return False
        unused = set(map(id, self._unused))
        arrived = [(p, view) for p, view in self._arrived if id(p) not in unused]
        self._awaits = False
        self._raise_if_changed([p for p, _ in arrived])
        torch._foreach_copy_([p for p, _ in arrived], [view for _, view in arrived])
        self._versions |= self._pushed_versions | {id(p): p._version for p, _ in arrived}
        self._used = True
        return True

    def _raise_if_changed(self, parameters: Sequence[Parameter]) -> None:
        changed = [p for p in parameters if p._version != self._pushed_versions[id(p)]]
        if changed:
            indices = {id(p): index for index, p in enumerate(self._parameters)}
            raise ConfigurationError(
                f"{len(changed)} parameter(s) were changed between backward and step(), the first being number "
                f"{indices[id(changed[0])]} of the model's, of the shape {tuple(changed[0].shape)}. The servers have "
                "stepped with what they were in backward, which would overwrite the change. The step was dropped. "
                "Change parameters after step(), or before backward."
            )

    def drop(self) -> None:
        """Drop a step that has come back and is not installed. Local."""
        self._awaits = False

    # ---- checkpoints

    def fetch(self) -> State:
        """Return the state on the servers after the last installed step, of whole parameters. Local; blocks."""
        if self._to_load is not None:
            return self._to_load
        connection = self._connection
        if connection is None:
            return {}
        found: list[Any] = []
        words = pack(self._used_words())

        def perform() -> None:
            found.extend(ask_all(connection.link, lambda _: Frame(Kind.FETCH, body=(words,))))

        connection.run(perform).wait()
        by_key: dict[int, dict[str, Any]] = {}
        for body in found:
            by_key |= read_state(*unpack_state(body))
        keys_of = connection.cutting.keys_of
        indices = self._indices()
        state = {
            indices[id(p)]: _joined([by_key[key.number] for key in keys_of(i)], p)
            for i, p in enumerate(self._parameters)
        }
        return {index: own for index, own in sorted(state.items()) if own}

    def load(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the state on the servers, before the next step."""
        self._to_load = {
            index: {name: item.clone() if isinstance(item, Tensor) else item for name, item in own.items()}
            for index, own in state.items()
        }

    def _load(self, connection: ServerConnections) -> None:
        """Send the state to load. Runs on the lane, before a step begins."""
        state, self._to_load = self._to_load, None
        if state is None or not self._is_first:
            return
        indices = self._indices()
        heads: list[list[list[Any]]] = [[] for _ in range(connection.link.num_servers)]
        chunks: list[list[Any]] = [[] for _ in heads]
        for key in connection.cutting.keys:
            own = dict(state.get(indices[id(self._parameters[key.parameter])], {}))
            for name, item in own.items():
                if isinstance(item, Tensor) and name not in SCALARS:
                    own[name] = flat_of(item)[key.start : key.stop]
            described, parts = described_state(own)
            heads[key.server].append([key.number, described])
            chunks[key.server] += parts
        for server, (head, data) in enumerate(zip(heads, chunks, strict=True)):
            body = pack_state({"keys": head}) + b"".join(data)
            connection.link.ask(server, Frame(Kind.LOAD, body=(body,)))

    def _indices(self) -> dict[int, int]:
        """Return torch's numbers of the parameters in a checkpoint, in the order of the groups."""
        members = [p for group in self._optimizer.param_groups for p in group["params"]]
        return {id(parameter): index for index, parameter in enumerate(members)}


@torch.no_grad()
def flat_of(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's elements in the order in which a bucket holds its gradient, shape (N,)."""
    return torch.empty_like(tensor).copy_(tensor).as_strided((tensor.numel(),), (1,))


def _joined(parts: Sequence[Mapping[str, Any]], parameter: Tensor) -> dict[str, Any]:
    """Return the state of a parameter from the states of its keys."""
    joined: dict[str, Any] = {}
    for name, first in parts[0].items() if parts else ():  # a parameter without elements has no keys
        if name in SCALARS or not isinstance(first, Tensor):
            joined[name] = first
            continue
        whole = torch.empty_like(parameter, dtype=first.dtype, device="cpu", requires_grad=False)
        whole.as_strided((whole.numel(),), (1,)).copy_(torch.cat([part[name] for part in parts]))
        joined[name] = whole
    return joined


def _bytes(tensor: Tensor) -> memoryview:
    values: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(values)


def _plain(name: str, value: Any) -> Any:
    """Return a setting as JSON takes it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list) and all(isinstance(each, bool | int | float) for each in value):
        return list(value)
    raise ConfigurationError(
        f"the optimizer's setting {name}={value!r} cannot be sent to servers: numbers, pairs of numbers and words can."
    )

"""`Endpoint`: one rank's part of sums with bounded loss; a `DatagramEnd`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_lossy.datagrams import datagram as d
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams.datagram_end import DatagramEnd
from paceline_lossy.datagrams.receiving import allowed_losses
from paceline_lossy.datagrams.sending import advance
from paceline_lossy.datagrams.shards import (
    first_chunk,
    mask_bytes,
    num_chunks,
    shard_bytes,
    transfer_chunks,
)
from paceline_lossy.lossy_sums import add_survivors, lost_ranges
from paceline_lossy.lossy_transport import Bound, Losses

_PPM = 1_000_000
_REPLIES = 6  # the class selector of replies


class Endpoint(DatagramEnd):
    """One rank's state of sums of vectors.

    Args:
        num_servers: How many of the first ranks are servers; the same on all ranks. Servers sum what the other ranks
            push, contribute nothing, and talk to those ranks only. 0: all ranks sum and contribute.

    The other arguments are `DatagramEnd`'s.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        keys: Mapping[int, bytes],
        payload_bytes: int,
        silence_us: int,
        num_servers: int = 0,
        num_ports: int = 1,
    ) -> None:
        super().__init__(rank, num_ranks, keys, payload_bytes, silence_us, num_ports)
        self._num_servers = num_servers
        others = [peer for peer in range(num_ranks) if peer != rank]
        self._partners = [
            peer for peer in others if not num_servers or (peer < num_servers) != self._is_server
        ]
        self._held: dict[int, NDArray[Any]] = {}  # the vectors whose addresses are in `slots`
        self._buffers: list[list[NDArray[np.uint8]]] = [[np.empty(0, np.uint8)] * 3 for _ in range(e.SLOTS)]

    @property
    def _is_server(self) -> bool:
        return self.rank < self._num_servers

    @property
    def can_begin(self) -> bool:
        """Return whether there is room for one more collective."""
        return bool(self.tables.slots[int(self.tables.numbers[e.BEGUN_HERE]) % e.SLOTS, e.S_STAGE] == e.FREE)

    def begin(self, vector: NDArray[Any], bound: Bound, now_us: int) -> int:
        """Begin replacing `vector` by the sum over the ranks; return the collective's number.

        Args:
            vector: Shape (N,), N > 0, float32 or float64, contiguous; mutated until it is finished.
            bound: The part that may be lost; the same on every rank.
            now_us: The time.

        Contract:
            Collective: every rank, same order, the same N and dtype.  Blocks: no.  After `can_begin` was true.
        """
        assert self.can_begin
        t, payload = self.tables, int(self.tables.numbers[e.PAYLOAD])
        collective = int(t.numbers[e.BEGUN_HERE])
        slot = collective % e.SLOTS
        item = vector.itemsize
        per_rank = -(-len(vector) // (self._num_servers or self.num_ranks))
        shard = -(-per_rank * item // 8) * 8
        self._held[collective] = vector
        row = t.slots[slot]
        row[:] = 0
        row[e.S_COLLECTIVE], row[e.S_STAGE], row[e.S_BYTES] = collective, e.REDUCING, vector.nbytes
        row[e.S_SHARD], row[e.S_ITEM] = shard, item
        row[e.S_BOUND_PPM] = int(bound.ratio * _PPM)
        row[e.S_PROTECT_PPM] = int(bound.protected_ratio * _PPM)
        row[e.S_IS_SCALED], row[e.S_IS_EARLY], row[e.S_PRIORITY] = (
            bound.is_scaled,
            bound.is_early,
            bound.priority,
        )
        row[e.S_MASK_ROOM] = mask_bytes(row, 0, self.num_ranks, payload)  # no shard is longer than the first
        staging, _, masks = self._memory(slot, shard, num_chunks(shard, payload) * payload)
        t = self.tables = e.with_room(t, transfer_chunks(row, 1, 0, self.num_ranks, payload))
        for peer in range(self.num_ranks):
            self._expect(slot, 0, peer, staging.ctypes.data + peer * shard, 0)
            mask = masks.ctypes.data + peer * int(t.slots[slot, e.S_MASK_ROOM])
            self._expect(slot, 1, peer, vector.ctypes.data + peer * shard, mask)
        t.outgoing[slot] = 0
        t.outgoing[slot, :, :, e.O_NUMBER] = collective
        self._start_phase(slot, 0)
        t.numbers[e.BEGUN_HERE] += 1
        self._order()
        t.peers[:, e.P_SENDING] = t.peers[:, e.P_RECEIVING] = t.numbers[e.BEGUN_HERE]
        for peer in self._partners:
            t.peers[peer, e.P_ANSWER] = 1  # the peer may wait for this collective
            self._take_stashed(peer, collective, now_us)
        self.go_on(now_us)
        return collective

    def go_on(self, now_us: int) -> None:
        """Sum the shards that are complete, and start to send them. Called after compiled code has set ARRIVED_ALL."""
        t = self.tables
        advance(t, now_us)
        while len(slots := np.flatnonzero(t.slots[:, e.S_STAGE] == e.ARRIVED_ALL)):
            for slot in slots:
                self._reduce_shard(int(slot))
                t.slots[slot, e.S_STAGE] = e.GATHERING
                self._start_phase(int(slot), 1)
            advance(t, now_us)

    def take_finished(self) -> list[Losses]:
        """Return the collectives that have finished since the last call. Their vectors are the caller's again."""
        t, found = self.tables, []
        for slot in np.flatnonzero(t.slots[:, e.S_STAGE] == e.FINISHED):
            row = t.slots[slot]
            found.append(self._losses(int(slot)))
            row[e.S_STAGE] = e.RETIRED
            del self._held[int(row[e.S_COLLECTIVE])]
        if found:
            advance(t, 0)
        return sorted(found, key=lambda finished: finished.collective)

    def _order(self) -> None:
        """Sort the transfers: higher priorities first, then contributions before sums, then older collectives."""
        t = self.tables
        newest = int(t.numbers[e.BEGUN_HERE])
        age, phase = np.divmod(np.arange(2 * e.SLOTS), 2)
        priority = t.slots[(newest - e.SLOTS + age) % e.SLOTS, e.S_PRIORITY]
        t.order[:] = np.lexsort((age, phase, -priority))
        if t.slots[(newest - 1) % e.SLOTS, e.S_PRIORITY]:
            t.numbers[e.REPLY_FLAGS] = _REPLIES << d.CLASS_SHIFT

    def _expect(self, slot: int, phase: int, peer: int, address: int, mask_address: int) -> None:
        """Set up a transfer from a peer in a phase, and its target address."""
        t, payload = self.tables, int(self.tables.numbers[e.PAYLOAD])
        row, incoming = t.slots[slot], t.incoming[slot, phase, peer]
        owner = self.rank if phase == 0 else peer
        chunks = transfer_chunks(row, phase, owner, self.num_ranks, payload) if peer in self._partners else 0
        incoming[:] = 0
        incoming[e.I_NUMBER] = row[e.S_COLLECTIVE]
        incoming[e.I_CHUNKS] = chunks
        incoming[e.I_DONE] = chunks == 0
        incoming[e.I_ADDRESS], incoming[e.I_BYTES] = address, shard_bytes(row, owner)
        if phase == 1:
            incoming[e.I_TAIL_ADDRESS] = mask_address
            incoming[e.I_TAIL_BYTES] = mask_bytes(row, owner, self.num_ranks, payload)
        t.have[slot, phase, peer, :chunks] = 0

    def _losses(self, slot: int) -> Losses:
        """Return the losses of a finished collective on all ranks, from the masks behind the reduced shards.

        A server knows only the losses of its own shard.
        """
        row, payload = self.tables.slots[slot], int(self.tables.numbers[e.PAYLOAD])
        item, ranks = int(row[e.S_ITEM]), self.num_ranks
        chunks = [int(num_chunks(shard_bytes(row, owner), payload)) for owner in range(ranks)]
        ranges = [np.empty((0, 3), np.int64)]
        masks = self._buffers[slot][2]
        for owner in range(ranks):
            first, size = owner * int(row[e.S_MASK_ROOM]), int(mask_bytes(row, owner, ranks, payload))
            mask = masks[first : first + size]
            if mask.any() and not (self._is_server and owner != self.rank):
                bits = np.unpackbits(mask.reshape(ranks, -1), axis=1, count=chunks[owner])
                begin = owner * int(row[e.S_SHARD]) // item
                end = begin + int(shard_bytes(row, owner)) // item
                ranges.append(lost_ranges(bits, begin, end, payload // item))
            else:
                ranges.append(ranges[0])
        return Losses(
            collective=int(row[e.S_COLLECTIVE]),
            missing=tuple(len(of_owner) for of_owner in ranges[1:]),
            expected=tuple((ranks - (self._num_servers or 1)) * count for count in chunks),
            ranges=np.concatenate(ranges),
        )

    def _start_phase(self, slot: int, phase: int) -> None:
        """Start to send a phase's chunks to every peer."""
        t, payload = self.tables, int(self.tables.numbers[e.PAYLOAD])
        row = t.slots[slot]
        collective = int(row[e.S_COLLECTIVE])
        for peer in range(self.num_ranks):
            owner = peer if phase == 0 else self.rank
            outgoing = t.outgoing[slot, phase, peer]
            outgoing[:] = 0
            outgoing[e.O_NUMBER] = collective
            chunks = (
                transfer_chunks(row, phase, owner, self.num_ranks, payload) if peer in self._partners else 0
            )
            outgoing[e.O_CHUNKS] = chunks
            outgoing[e.O_BYTES] = shard_bytes(row, owner)
            outgoing[e.O_FLAGS] = int(row[e.S_PRIORITY]) << d.CLASS_SHIFT
            if phase == 0 and row[e.S_PRIORITY] and row[e.S_BOUND_PPM]:
                outgoing[e.O_FLAGS] |= d.DROPPABLE
            if phase == 0:
                outgoing[e.O_ADDRESS] = self._held[collective].ctypes.data + peer * int(row[e.S_SHARD])
            else:
                outgoing[e.O_ADDRESS] = self._buffers[slot][1].ctypes.data
                outgoing[e.O_TAIL_BYTES] = mask_bytes(row, owner, self.num_ranks, payload)
            if chunks == 0:
                continue
            outgoing[e.O_ACTIVE] = 1
            outgoing[e.O_START] = first_chunk(collective, self.rank, peer, chunks)
            t.chunk_state[slot, phase, peer, :chunks] = e.UNSENT
            if phase == 0:
                protected = self._protect(slot, peer, chunks)
                outgoing[e.O_PROTECTED] = protected
                outgoing[e.O_ALLOWED] = allowed_losses(chunks - protected, int(row[e.S_BOUND_PPM]))

    def _protect(self, slot: int, peer: int, chunks: int) -> int:
        """Choose the chunks that must arrive, those of the largest mean magnitude. Return how many."""
        t = self.tables
        row = t.slots[slot]
        protected = -(-chunks * int(row[e.S_PROTECT_PPM]) // _PPM)
        t.chunk_class[slot, peer, :chunks] = 0
        if protected:
            vector, item = self._held[int(row[e.S_COLLECTIVE])], int(row[e.S_ITEM])
            first, length = peer * int(row[e.S_SHARD]) // item, shard_bytes(row, peer) // item
            edges = np.arange(0, length, int(t.numbers[e.PAYLOAD]) // item)
            sums = np.add.reduceat(np.abs(vector[first : first + length]), edges)
            means = sums / np.diff(np.append(edges, length))
            t.chunk_class[slot, peer, np.argsort(means)[chunks - protected :]] = 1
        return protected

    def _reduce_shard(self, slot: int) -> None:
        """Sum the contributions to this rank's shard that arrived, into a buffer to send from and into the vector."""
        t = self.tables
        row = t.slots[slot]
        vector, item, shard = self._held[int(row[e.S_COLLECTIVE])], int(row[e.S_ITEM]), int(row[e.S_SHARD])
        size = shard_bytes(row, self.rank)
        if size == 0:
            return
        into = vector[self.rank * shard // item :][: size // item]
        staging, reduced, masks = self._buffers[slot]
        staged = staging[: self.num_ranks * shard].reshape(self.num_ranks, shard)[:, :size].view(vector.dtype)
        result = reduced[:size].view(vector.dtype)
        payload = int(t.numbers[e.PAYLOAD])
        chunks = num_chunks(size, payload)
        arrived = t.have[slot, 0, :, :chunks]
        own, givers = (None, slice(self._num_servers, None)) if self._is_server else (into, slice(None))
        is_scaled = bool(row[e.S_IS_SCALED])
        add_survivors(result, own, staged[givers], arrived[givers], self.rank, payload // item, is_scaled)
        into[:] = result
        length = mask_bytes(row, self.rank, self.num_ranks, payload)
        if length:
            missing = arrived == 0
            missing[: self._num_servers] = False
            missing[self.rank] = False
            mask = np.packbits(missing, axis=1).reshape(-1)
            reduced[chunks * payload :][:length] = masks[self.rank * int(row[e.S_MASK_ROOM]) :][:length] = (
                mask
            )

    def _memory(self, slot: int, shard: int, whole_chunks: int) -> list[NDArray[np.uint8]]:
        """Return buffers for the contributions to this rank's shard, its sum with a mask, and all masks."""
        room = int(self.tables.slots[slot, e.S_MASK_ROOM])
        sizes = (self.num_ranks * shard, whole_chunks + room, self.num_ranks * room)
        for number, size in enumerate(sizes):
            if self._buffers[slot][number].nbytes < size:
                self._buffers[slot][number] = np.zeros(size, np.uint8)
        return self._buffers[slot]

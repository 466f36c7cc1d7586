"""The assignment of gradients to buckets: pure functions of sizes, without tensors.

Rules
1. Gradients of one (dtype, device) share buckets; a sparse gradient has one of its own.
2. A bucket is closed by the gradient that brings it to its cap, so it may exceed the cap by one gradient. What remains
   is the last bucket. Cutting from the end, the remainder is bucket 0; under half a cap it joins bucket 1. A bucket
   then has no more bytes than all before it, so that the first ones grow.
3. Buckets are numbered in the order in which they close when gradients become ready in the given order. Those still
   open at the end follow, by their last gradient. So bucket i is full before bucket i+1 is.
4. Gradients of a unit share buckets with no others, and its last one closes one: a step may leave out what it skips.
   The cap of later buckets holds for all of them.
5. Only sizes, keys and the order go in: the same input gives the same plan on every rank.

Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3. Two things differ from torch. Torch appends the open
buckets in registration order, or in the order of a hash map. Our default for CPUs of several hosts has other caps,
which count from the end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigurationError
from paceline.given import number

MEBIBYTE = 1024 * 1024
DEFAULT_BUCKET_CAP_MB = 25
DEFAULT_FIRST_BUCKET_BYTES = MEBIBYTE
LAST_BUCKET_BYTES = MEBIBYTE // 2  # between hosts
MANY_HOSTS_BUCKETS = 12
FINE_BUCKETS, FINE_CAP_MB = 48, 5  # between hosts, where the next forward waits for whole buckets
FEW_RANKS = 4  # among which buckets of 1 MiB are as good as of 2, or better
MANY_RANKS_BYTES_EACH = MEBIBYTE // 2  # of a bucket, for each rank


@dataclass(frozen=True)
class GradientSpec:
    """One gradient: its size, and a key that the gradients of its bucket share."""

    size_bytes: int  # of the gradient
    key: Hashable  # gradients of different keys share no bucket
    sparse: bool = False  # it has a bucket of its own
    # The number of what can be left out of a step as a whole, and which this belongs to (rule 4).
    unit: int | None = None


@dataclass(frozen=True)
class BucketCaps:
    """The numbers of bytes that close the first bucket, the second, ...; the last number repeats."""

    caps_bytes: tuple[float, ...]  # in the order in which buckets are cut
    # Buckets are cut from the last gradient on: the first cap is that of the last bucket.
    from_end: bool = False
    # From the end: as many bytes a bucket may have though fewer are before it; infinite: it does not matter.
    least_bytes: float = math.inf

    @classmethod
    def from_arguments(cls, cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> BucketCaps | None:
        """Read torch's two arguments: a list wins; one cap holds for the first bucket too. None: use a default."""
        if cap_mb_list is not None:
            if not isinstance(cap_mb_list, list | tuple) or not cap_mb_list:
                raise ConfigurationError(
                    f"bucket_cap_mb_list={cap_mb_list!r} is no list of caps. Give the MiB that make the first, second, "
                    "... bucket full, such as [1, 25]; or leave it out."
                )
            return cls(tuple(_cap_bytes(cap, "bucket_cap_mb_list") for cap in cap_mb_list))
        if cap_mb is not None:
            return cls((_cap_bytes(cap_mb, "bucket_cap_mb"),))
        return None

    @classmethod
    def default(
        cls,
        size_bytes: int,
        any_on_cpu: bool,
        on_one_host: bool,
        num_ranks: int,
        overlaps_forward: bool = False,
    ) -> BucketCaps:
        """Return the default caps: 1 MiB for the first bucket, and 25 MiB for the others.

        On CPUs of several hosts it is a twelfth of all gradients, and half a MiB for the last bucket. That twelfth is
        at least 1 MiB (with more than 4 ranks half a MiB for each), and at most 25 MiB. With forward overlap it is a
        48th and at most 5 MiB. Buckets are cut from the end: what remains, which may be next to nothing, is the first
        one and not the last, which nothing hides. The reasons are in docs/decisions/bucket-caps.md.
        `any_on_cpu` is agreed on (`replicas.verify`): by its own device each rank would cut other buckets.
        """
        if on_one_host or not any_on_cpu:
            return cls((DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_BUCKET_CAP_MB * MEBIBYTE))
        most = DEFAULT_BUCKET_CAP_MB * MEBIBYTE
        least = min(num_ranks * MANY_RANKS_BYTES_EACH, most) if num_ranks > FEW_RANKS else MEBIBYTE
        if overlaps_forward:
            share = min(max(size_bytes // FINE_BUCKETS, least), max(least, FINE_CAP_MB * MEBIBYTE))
            return cls((LAST_BUCKET_BYTES, share), from_end=True)
        share = min(max(size_bytes // MANY_HOSTS_BUCKETS, least), most)
        return cls((LAST_BUCKET_BYTES, share), from_end=True, least_bytes=least)

    def of(self, bucket_number: int) -> float:
        return self.caps_bytes[min(bucket_number, len(self.caps_bytes) - 1)]


def _cap_bytes(cap_mb: float, argument: str) -> int:
    if not 0 <= number(cap_mb) < math.inf:
        raise ConfigurationError(
            f"{argument}: {cap_mb!r} is not a cap. Give the MiB that make a bucket full, 0 or more; the default is 25."
        )
    return int(float(cap_mb) * MEBIBYTE)


@dataclass
class _OpenBucket:
    members: list[int] = field(default_factory=list)
    size_bytes: int = 0
    closed: list[list[int]] = field(default_factory=list)  # of the same key


def assign_buckets(specs: Sequence[GradientSpec], order: Sequence[int], caps: BucketCaps) -> list[list[int]]:
    """Cut gradients into buckets of indices in launch order, by `order`, in which they are ready (rules 1 to 4)."""
    closed: list[list[int]] = []
    open_by_key: dict[Hashable, _OpenBucket] = {}
    keys = [(spec.key, spec.unit) for spec in specs]
    to_come = Counter(keys[index] for index in order if not specs[index].sparse)
    left_bytes: Counter[Hashable] = Counter()  # not in a closed bucket yet
    for key, spec in zip(keys, specs, strict=True):
        left_bytes[key] += 0 if spec.sparse else spec.size_bytes
    for index in reversed(order) if caps.from_end else order:
        spec, key = specs[index], keys[index]
        if spec.sparse:
            closed.append([index])
            continue
        bucket = open_by_key.setdefault(key, _OpenBucket())
        bucket.members.append(index)
        bucket.size_bytes += spec.size_bytes
        to_come[key] -= 1
        ends_unit = spec.unit is not None and to_come[key] == 0
        if ends_unit or bucket.size_bytes >= _cap_of(bucket, spec.unit, caps, left_bytes[key]):
            closed.append(bucket.members)
            left_bytes[key] -= bucket.size_bytes
            open_by_key[key] = _OpenBucket(closed=[*bucket.closed, bucket.members])
    return _numbered(closed, open_by_key, order, caps)


def _cap_of(bucket: _OpenBucket, unit: int | None, caps: BucketCaps, left_bytes: int) -> float:
    """Return the cap of a bucket to which so many bytes are left; from the end, these are all before it (rule 2)."""
    cap = caps.of(len(bucket.closed)) if unit is None else caps.caps_bytes[-1]
    return min(cap, max(left_bytes / 2, caps.least_bytes)) if caps.from_end else cap


def _numbered(
    closed: list[list[int]], open_by_key: dict[Hashable, _OpenBucket], order: Sequence[int], caps: BucketCaps
) -> list[list[int]]:
    """Put the remaining gradients into buckets (rule 2), and number all buckets in launch order (rule 3)."""
    position = {index: place for place, index in enumerate(order)}
    rest = []
    for bucket in open_by_key.values():
        joins = caps.from_end and bucket.closed
        if joins and 2 * bucket.size_bytes < _cap_of(bucket, None, caps, bucket.size_bytes):
            bucket.closed[-1].extend(bucket.members)
        elif bucket.members:
            rest.append(bucket.members)
    if caps.from_end:
        return sorted((members[::-1] for members in closed + rest), key=lambda members: position[members[-1]])
    return closed + sorted(rest, key=lambda members: position[members[-1]])

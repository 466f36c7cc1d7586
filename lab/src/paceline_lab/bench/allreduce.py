"""Measure how long an all-reduce takes under each side, in launches that alternate.

    algbw = bytes / time
    busbw = 2 (P-1)/P * bytes / time        the rate at which every rank sends, whatever their number

Sides that can live in one process alternate there (`protocol`). A side that needs a launcher of its own runs in
launches that alternate with the others'. A time is the slowest rank's; a barrier goes before each. Afterwards, and
before any time counts, the sum must be right on every rank.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import ConfigurationError
from paceline_lab.bench.allreduce_sides import REDUCE_SIDES, Exchange
from paceline_lab.bench.protocol import WrongAnswerError, turns
from paceline_lab.bench.rank_program import TellProgress

if TYPE_CHECKING:
    from paceline_lab.bench.ranks import Ranks

WARM_UP = 2
NUM_LAUNCHES = 2  # of each group of sides, when there are several groups
_BYTES_PER_TURN = 32 * 2**20
_MOST_PER_TURN = 20
_COPY_BYTES = 25 * 2**20
_NUM_COPIES = 9


@dataclass(frozen=True)
class ReduceConfig:
    """The settings of a measurement of all-reduces.

    Attributes:
        side_names: Sides in the order of the report. The first one is the baseline.
        sizes_bytes: Sizes of the buffers.
        num_rounds: Number of rounds. Every side takes two turns in each.
    """

    side_names: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    num_rounds: int

    def __post_init__(self) -> None:
        if self.num_rounds < 2:
            raise ConfigurationError(
                f"--rounds {self.num_rounds} gives no spread. Pass 2 or more; 5 shows quartiles."
            )


@dataclass(frozen=True)
class ReduceSamples:
    """The times of all sides in one launch.

    Attributes:
        times_s: By side and size: for each round and turn, the mean time of the turn's all-reduces.
        right: By side: whether every rank had the right sum at every check.
        copy_bytes_per_s: Bytes that the slowest rank reads and writes in a second when all copy at once.
    """

    times_s: dict[str, dict[int, list[float]]]
    right: dict[str, bool]
    copy_bytes_per_s: float


def num_per_turn(num_bytes: int) -> int:
    """Return how many all-reduces of a size make one turn: short ones are repeated."""
    return max(1, min(_MOST_PER_TURN, _BYTES_PER_TURN // num_bytes))


def measure_sides(config: ReduceConfig, exchanges: dict[str, Exchange]) -> ReduceSamples:
    """Measure all sizes. Collective; every rank returns the same."""
    names = list(exchanges)
    times: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    right = dict.fromkeys(names, True)
    for num_bytes in config.sizes_bytes:
        for name in names:
            times[name][num_bytes] = []
            for _ in range(WARM_UP):
                right[name] &= _is_right(exchanges[name], num_bytes)
        for turn in turns(len(names), config.num_rounds):
            name = names[turn.side_index]
            times[name][num_bytes].append(_turn_s(exchanges[name], num_bytes))
        for name in names:
            right[name] &= _is_right(exchanges[name], num_bytes)
    return ReduceSamples(times, right, _copy_rate(next(iter(exchanges.values()))))


def _copy_rate(exchange: Exchange) -> float:
    """Measure the memory: bytes read plus bytes written in a second, by the slowest rank while all copy."""
    source, target = np.ones(_COPY_BYTES // 4, dtype=np.float32), np.zeros(_COPY_BYTES // 4, dtype=np.float32)
    times = []
    for _ in range(_NUM_COPIES):
        exchange.barrier()
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(max(exchange.gather(time.perf_counter() - start)))
    return 2 * _COPY_BYTES / float(np.median(times))


def _turn_s(exchange: Exchange, num_bytes: int) -> float:
    """Return seconds of one all-reduce, the mean of a turn, the slowest rank's."""
    buffer = exchange.make_buffer(num_bytes // 4)
    count = num_per_turn(num_bytes)
    exchange.barrier()
    start = time.perf_counter()
    for _ in range(count):
        exchange.all_reduce(buffer)
    return float(max(exchange.gather(time.perf_counter() - start))) / count


def _is_right(exchange: Exchange, num_bytes: int) -> bool:
    """Reduce numbers whose sum is known and exact in float32: i modulo 1,000, plus the rank."""
    ramp = np.arange(num_bytes // 4, dtype=np.float32) % 1000
    buffer = exchange.make_buffer(num_bytes // 4)
    buffer[:] = ramp + np.float32(exchange.rank)
    exchange.all_reduce(buffer)
    ranks = exchange.num_ranks
    right = bool(np.array_equal(buffer, ramp * ranks + np.float32(ranks * (ranks - 1) // 2)))
    return all(exchange.gather(right))


def launches(side_names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return which sides each launch has: all that share processes together, alternating with those that cannot."""
    groups: dict[str, list[str]] = {}
    for name in side_names:
        starter = REDUCE_SIDES[name].starter
        groups.setdefault(starter if starter == "torchrun" else name, []).append(name)
    once = [tuple(names) for names in groups.values()]
    if len(once) == 1:
        return once
    order: list[tuple[str, ...]] = []
    for launch in range(NUM_LAUNCHES):
        order += once if launch % 2 == 0 else once[::-1]
    return order


def measure(config: ReduceConfig, tell: TellProgress) -> ReduceSamples:
    """Measure all of the configuration's sides in these processes. Collective."""
    return measure_sides(config, {name: REDUCE_SIDES[name].open() for name in config.side_names})


@dataclass(frozen=True)
class Measured:
    """All launches together.

    Attributes:
        times_s: By side and size, in the order of rounds.
        copy_bytes_per_s: The memory's rate, as of `ReduceSamples`.
    """

    times_s: Mapping[str, Mapping[int, list[float]]]
    copy_bytes_per_s: float


def run_launches(config: ReduceConfig, ranks: Ranks) -> Measured:
    """Launch all sides.

    Raises:
        WrongAnswerError: A side's sum is not the sum.
    """
    plan = launches(config.side_names)
    alternate = len(plan) > 1
    rounds = max(2, -(-config.num_rounds // NUM_LAUNCHES)) if alternate else config.num_rounds
    times: dict[str, dict[int, list[float]]] = {
        name: {size: [] for size in config.sizes_bytes} for name in config.side_names
    }
    copy_rates = []
    for number, names in enumerate(plan):
        this = dataclasses.replace(config, side_names=names, num_rounds=rounds)
        title = (
            f"all-reduce on {ranks.num_ranks} ranks, launch {number + 1} of {len(plan)}: {', '.join(names)}"
        )
        samples = _launch(this, ranks, title)
        copy_rates.append(samples.copy_bytes_per_s)
        for name in names:
            if not samples.right[name]:
                raise WrongAnswerError(
                    f"the sum that {name} left is not the sum over the ranks, so its times mean nothing. Leave it "
                    "out of --vs."
                )
            for size in config.sizes_bytes:
                times[name][size] += samples.times_s[name][size]
    return Measured(times, max(copy_rates))


def _launch(config: ReduceConfig, ranks: Ranks, title: str) -> ReduceSamples:
    first = config.side_names[0]
    if REDUCE_SIDES[first].starter == "torchrun":
        return ranks.run(measure, config, title)[0]
    return ranks.run_mpi(measure, config, title, tcp_only=first.endswith("-tcp"))[0]

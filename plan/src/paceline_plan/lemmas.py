"""Two lemmas on how many devices and parameter servers to use, as printed, beside what the simulator says.

Lemma 3.1: with R = T_O / T_C, the overhead of an iteration over its computing, G devices that share its work reach

    efficiency = (1 + R) / (1 + G R)        and an efficiency of a needs R <= (1 - a) / (a G - 1).

It assumes that the overhead does not depend on G, and that none of it is hidden. Communication grows with G, so the
lemma promises too much where a link limits. Overlap hides some of it, so it promises too little where no link does.

Lemma 3.2: N_w workers whose gradients are S bytes hide their traffic in the computing time T_C with

    N_ps >= 2 S N_w / (B T_C)

parameter servers of B bytes per second. It assumes half-duplex servers with equal shards, and workers' links that never
limit. It also assumes that traffic overlaps with the whole of T_C, though it begins with the first gradient only.
Real servers send and receive at once, and have backward only to hide behind: `paceline study parameter-servers`.

Source: Zou et al. 2017, "Distributed Training Large-Scale Deep Architectures", lemmas 3.1 and 3.2; the formulas are
written down from memory: its full text was not to be had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.errors import ConfigurationError
from paceline.quantities import ms
from paceline_plan.deployment import Cluster, ReductionPlan, Servers
from paceline_plan.scaling import Grow, Question
from paceline_plan.simulator import simulate
from paceline_plan.workload import RecordedWorkload

_HIDDEN = 0.02  # of a step: exposed communication that counts as none
_MOST_SERVERS = 4096


def efficiency(R: float, G: int) -> float:
    """Return the efficiency of G devices with an overhead of R times the computing (lemma 3.1)."""
    return (1 + R) / (1 + G * R)


def largest_overhead(a: float, G: int) -> float:
    """Return the largest R with which G devices have an efficiency of a; infinity if any will do (lemma 3.1)."""
    if not 0 < a <= 1 or G < 1:
        raise ConfigurationError(
            f"an efficiency of {a} on {G} devices is not possible. Ask for more than 0 and at most 1."
        )
    return (1 - a) / (a * G - 1) if a * G > 1 else math.inf


def most_devices(a: float, R: float) -> float:
    """Return how many devices reach an efficiency of a with an overhead of R; infinity without overhead (lemma 3.1)."""
    largest_overhead(a, 1)  # refuses what cannot be
    return math.inf if R <= 0 else math.floor((1 + R - a) / (a * R) + 1e-9)


def fewest_servers(S: float, N_w: int, B: float, T_C: float) -> int:
    """Return how many parameter servers hide the traffic (lemma 3.2)."""
    if not (S > 0 and N_w >= 1 and B > 0 and T_C > 0):
        raise ConfigurationError(
            f"lemma 3.2 needs bytes, workers, a rate and a time above 0, not {S}, {N_w}, {B} and {T_C}."
        )
    return math.ceil(2 * S * N_w / (B * T_C) - 1e-9)


@dataclass(frozen=True)
class Beside:
    """A lemma's answer and the simulator's, for one number of devices."""

    num_ranks: int
    lemma: float
    simulated: float


def compare_efficiency(
    workload: RecordedWorkload, grow: Grow, plan: ReductionPlan, counts: tuple[int, ...]
) -> list[Beside]:
    """Lemma 3.1 where its work is shared: G devices compute a G-th each, and the optimizer and the rest stay whole.

    R is what one device shows: everything in a step of `plan.sync_every` micro-steps that is no forward or backward.
    The simulator adds communication.
    """
    T_C = plan.sync_every * (workload.forward_s + workload.backward_s)
    T_O = workload.optimizer_s + plan.sync_every * workload.other_s
    if T_C <= 0:
        raise ConfigurationError(f"the workload {workload.name} computes nothing; lemma 3.1 divides by it.")
    found = []
    for G in counts:
        part = replace(workload.taking(1 / G), optimizer_s=workload.optimizer_s)
        simulated = (T_C + T_O) / (G * simulate(part, grow(G), plan).step_s)
        found.append(Beside(G, efficiency(T_O / T_C, G), simulated))
    return found


@dataclass(frozen=True)
class ServerAnswers:
    """The numbers of parameter servers that hide the traffic."""

    lemma: int  # by lemma 3.2
    half_duplex: int | None  # by the simulator, with servers that send or receive; None: no number hides it
    duplex: int | None  # by the simulator, with servers that do both at once; None likewise
    worker_limit_s: float  # how long the fullest worker's own link takes each way, whatever the servers do
    window_s: float  # what the traffic can overlap with: backward after the first gradient


def compare_servers(
    workload: RecordedWorkload, cluster: Cluster, plan: ReductionPlan, server_bytes_per_s: float
) -> ServerAnswers:
    """Lemma 3.2, and the fewest servers with which the simulated step is as long as with infinitely many."""
    S, N_w = workload.gradient_bytes * plan.payload_ratio, cluster.num_ranks
    T_C = plan.sync_every * (workload.forward_s + workload.backward_s)
    found = {
        duplex: _fewest_simulated(workload, cluster, plan, server_bytes_per_s, duplex=duplex)
        for duplex in (False, True)
    }
    worker = Servers(1, math.inf).s_per_byte(cluster)[1]
    first_s = workload.ready_gradients()[0][0]
    return ServerAnswers(
        fewest_servers(S, N_w, server_bytes_per_s, T_C),
        found[False],
        found[True],
        worker * S,
        workload.backward_s - first_s,
    )


def _fewest_simulated(
    workload: RecordedWorkload, cluster: Cluster, plan: ReductionPlan, rate: float, *, duplex: bool
) -> int | None:
    """Search by bisection: with more servers only the pieces of a large bucket get larger, up to the bucket."""

    def step_s(number: int, bytes_per_s: float) -> float:
        servers = Servers(number, bytes_per_s, duplex)
        return simulate(workload, cluster, replace(plan, servers=servers)).step_s

    enough_s = step_s(_MOST_SERVERS, math.inf) * (1 + _HIDDEN)
    if step_s(_MOST_SERVERS, rate) > enough_s:
        return None
    low, high = 0, _MOST_SERVERS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if step_s(middle, rate) <= enough_s else (middle, high)
    return high


@dataclass(frozen=True)
class LemmasBeside:
    """The answers of both lemmas to a question about scaling, next to the simulator's."""

    num_ranks: int
    efficiency: float
    simulated: float
    servers: ServerAnswers

    @classmethod
    def of(cls, question: Question) -> LemmasBeside | None:
        """Return what the lemmas say about a question. None on one device, or if nothing is computed."""
        last = question.counts[-1]
        plan = replace(question.plan, servers=None)
        workload = replace(question.workload, relative_steps=())
        if last == 1 or workload.forward_s + workload.backward_s <= 0:
            return None
        one = compare_efficiency(workload, question.grow, plan, (last,))[0]
        server_rate = (
            question.plan.servers.bytes_per_s
            if question.plan.servers
            else question.grow(1).links[0].bytes_per_s
        )
        servers = compare_servers(workload, question.grow(last), plan, server_rate)
        return cls(last, one.lemma, one.simulated, servers)

    def words(self) -> list[str]:
        """Return a line for each lemma."""
        found = self.servers
        simulated = [
            "no number hides it" if number is None else f"{number}"
            for number in (found.half_duplex, found.duplex)
        ]
        first = (
            f"lemma 3.1 (one batch shared by {self.num_ranks} devices, overhead that does not grow): efficiency "
            f"{self.efficiency:.1%}; simulated, with communication: {self.simulated:.1%}"
        )
        second = (
            f"lemma 3.2 (half-duplex servers, traffic behind all of forward and backward): {found.lemma} parameter "
            f"servers; simulated: {simulated[0]} (half-duplex), {simulated[1]} (both directions at once)"
        )
        if 2 * found.worker_limit_s > found.window_s:
            second += (
                f" are as good as any number, but hide nothing: the workers' own links take "
                f"{ms(found.worker_limit_s)} each way, and backward leaves {ms(found.window_s)}"
            )
        return [first, second]

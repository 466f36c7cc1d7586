"""PACELINE_BETWEEN_HOSTS=udp: collectives between hosts by reliable datagrams, with the bits of TCP, or TCP for all."""

import contextlib
import os
import signal
import socket
import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import paceline  # noqa: F401  registers the backend
from harness.linear_oracle import train_linear
from harness.models import digest, generator
from harness.ranks import Ranks, pool
from paceline.errors import ConfigurationError, PeerLostError
from paceline.process_group import Options, path_between_hosts
from paceline.transports.bounded_loss import datagram_loop, udp_socket
from paceline.transports.bounded_loss.datagram_transport import DatagramTransport
from paceline.transports.bounded_loss.endpoint_state import SILENCE_US
from paceline.transports.shared_memory.neighbours import SWITCH

pytestmark = pytest.mark.processes

LINKS = "within=2e-5/4e9 between=1e-4/1e9"


@contextlib.contextmanager
def group_on(hosts, rank, path="udp", only=None, timeout_s=60):
    """A group whose rank r believes to be on host hosts[r]; only rank 0 says which path it wants."""
    words = {
        SWITCH: f"host {hosts[rank]}",
        "PACELINE_LINKS": LINKS,
        "PACELINE_BETWEEN_HOSTS": path if rank == 0 else "tcp",
        **({"PACELINE_ALLREDUCE": only} if only else {}),
    }
    with mock.patch.dict(os.environ, words):
        ours = dist.new_group(backend="paceline", timeout=timedelta(seconds=timeout_s))
        yield ours
        dist.destroy_process_group(ours)


def sums(rank, num_ranks, hosts, path, only):
    with group_on(hosts, rank, path, only) as ours:
        bits = []
        for size in (0, 1, 1000, 700_001):  # the last one is several parts of a message for two ranks
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                values = torch.randn(size, generator=generator(size, rank)).mul_(100).to(dtype)
                dist.all_reduce(values, group=ours)
                bits.append(digest([values]))
        mean = torch.randn(5000, generator=generator(7, rank))
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=ours)
        rows = [torch.zeros(3) for _ in range(num_ranks)]
        dist.all_gather(rows, torch.full((3,), float(rank)), group=ours)
        copies = []
        for root in range(num_ranks):
            copy = torch.full((40_000,), float(rank), dtype=torch.float64)
            dist.broadcast(copy, root, group=ours)
            copies.append(copy.unique().tolist())
        nothing = torch.zeros(0)
        dist.broadcast(nothing, 0, group=ours)
        dist.barrier(group=ours)
        return bits, digest([mean]), [row.tolist() for row in rows], copies, ours.explain(10**6)


@pytest.mark.parametrize(("hosts", "only"), [("01", "ring"), ("0012", None)])
def test_the_same_bits_as_over_tcp(hosts, only):
    """Every dtype and size, with one rank a host and with hosts of unequal size."""
    num_ranks = len(hosts)
    over_tcp = pool(num_ranks).run(sums, hosts, "tcp", only)
    over_udp = pool(num_ranks).run(sums, hosts, "udp", only)
    for (bits, mean, rows, copies, words), (udp_bits, udp_mean, udp_rows, udp_copies, udp_words) in zip(
        over_tcp, over_udp, strict=True
    ):
        assert udp_bits == bits == over_tcp[0][0]
        assert udp_mean == mean == over_tcp[0][1]
        assert udp_rows == rows == [[float(r)] * 3 for r in range(num_ranks)]
        assert udp_copies == copies == [[float(root)] for root in range(num_ranks)]
        assert "by datagrams" in udp_words
        assert "by datagrams" not in words


def train_by_datagrams(rank, num_ranks, hosts):
    with group_on(hosts, rank) as ours:
        return train_linear(rank, num_ranks, 2, (300, 200), 3, process_group=ours)


def test_data_parallel_by_datagrams():
    """Two hosts of two ranks: gradients equal one process on the whole batch, bitwise equal on all ranks."""
    results = pool(4).run(train_by_datagrams, "0011")
    assert max(error for error, _ in results) < 1e-12
    assert len({bits for _, bits in results}) == 1


class Elsewhere(socket.socket):
    """A socket that the others believe to be at a port where nobody listens: what a firewall is like."""

    def getsockname(self):
        return ("127.0.0.1", 9)


def blocked(rank, num_ranks, hosts, victim):
    bind = udp_socket._bind
    elsewhere = mock.patch.object(udp_socket, "_bind", lambda at: Elsewhere(fileno=bind(at).detach()))
    lie = elsewhere if rank == victim else contextlib.nullcontext()
    soon = mock.patch.object(path_between_hosts, "HANDSHAKE_S", 2.0)
    with warnings.catch_warnings(record=True) as caught, soon, lie:
        warnings.simplefilter("always")
        with group_on(hosts, rank) as ours:
            for _ in range(2):
                values = torch.full((1000,), float(rank))
                dist.all_reduce(values, group=ours)
            words = ours.explain(1000)
    said = [str(warning.message) for warning in caught if "PACELINE_BETWEEN_HOSTS" in str(warning.message)]
    return values.unique().tolist(), words, said


@pytest.mark.parametrize("victim", [0, 2])
def test_where_udp_is_blocked_all_fall_back_together(victim):
    """One rank of three is not reached: all take TCP, with the right sums, and only rank 0 says so, once."""
    answers = pool(3).run(blocked, "012", victim)
    for rank, (values, words, said) in enumerate(answers):
        assert values == [3.0]
        assert "by datagrams" not in words
        assert len(said) == (rank == 0)
    assert f"rank {victim}" in answers[0][2][0]
    assert "All ranks of this group use TCP" in answers[0][2][0]


def alone(rank, num_ranks, victim, what):
    """Only the victim finds that it cannot: at once, or when all others have heard everybody."""

    def refuse(*_):
        raise ConfigurationError("there is no such interface")

    def fail(*_):
        raise KeyError("numba fails as it likes")

    exchange = DatagramTransport.exchange

    def hear_nothing(*arguments):
        exchange(*arguments)
        raise PeerLostError("nothing came", 0)

    patches = {
        "check": mock.patch.object(path_between_hosts, "check_datagrams", refuse),
        "compile": mock.patch.object(datagram_loop, "drive", fail),
        "greeting": mock.patch.object(DatagramTransport, "exchange", hear_nothing),
    }
    with (
        warnings.catch_warnings(record=True) as caught,
        patches[what] if rank == victim else mock.patch.dict({}),
    ):
        warnings.simplefilter("always")
        with group_on("012", rank) as ours:
            values = torch.full((1000,), float(rank))
            dist.all_reduce(values, group=ours)
            words = ours.explain(1000)
    said = [str(warning.message) for warning in caught if "PACELINE_BETWEEN_HOSTS" in str(warning.message)]
    return values.unique().tolist(), "by datagrams" in words, len(said)


@pytest.mark.parametrize("what", ["check", "compile", "greeting"])
def test_one_rank_s_trouble_is_everybody_s(what):
    """The others have none of their own, and take TCP with it."""
    assert pool(3).run(alone, 1, what) == [([3.0], False, int(rank == 0)) for rank in range(3)]


def strict(rank, _num_ranks, victim):
    """Warnings are errors, as under `python -W error`."""
    refuse = mock.Mock(side_effect=ConfigurationError("there is no such interface"))
    patched = mock.patch.object(path_between_hosts, "check_datagrams", refuse)
    with warnings.catch_warnings(), patched if rank == victim else contextlib.nullcontext():
        warnings.simplefilter("error")
        with group_on("01", rank) as ours, pytest.raises(UserWarning) as caught:
            dist.all_reduce(torch.ones(1000), group=ours)
    return str(caught.value)


def test_a_warning_that_is_an_error_is_one_on_all_ranks():
    said = pool(2).run(strict, 1)
    assert said[0] == said[1]
    assert "All ranks of this group use TCP" in said[0]


def opted(rank, _num_ranks, option, environment):
    words = {SWITCH: f"host {rank}", "PACELINE_LINKS": LINKS, "PACELINE_BETWEEN_HOSTS": environment}
    with mock.patch.dict(os.environ, words):
        ours = dist.new_group(backend="paceline", pg_options=Options(option if rank == 0 else ""))
        values = torch.ones(1000)
        dist.all_reduce(values, group=ours)
        explained = ours.explain(1000)
        dist.destroy_process_group(ours)
    return values.unique().tolist(), "by datagrams" in explained


@pytest.mark.parametrize(
    ("option", "environment", "are_used"), [("udp", "tcp", True), ("tcp", "udp", False), ("", "udp", True)]
)
def test_a_group_s_options_come_before_the_environment(option, environment, are_used):
    assert pool(2).run(opted, option, environment) == [([2.0], are_used)] * 2


def test_options_that_cannot_be_are_refused():
    with pytest.raises(ConfigurationError, match="between_hosts='tdp'"):
        Options("tdp")
    with pytest.raises(ConfigurationError, match="not for the backend paceline"):
        Options.of(timedelta(1))


def unknown(_rank, _num_ranks):
    asked = mock.patch.dict(os.environ, {"PACELINE_BETWEEN_HOSTS": "tdp"})
    with asked, pytest.raises(ValueError, match=r"PACELINE_BETWEEN_HOSTS='tdp'"):
        dist.new_group(backend="paceline")
    return True


def test_an_unknown_path_is_refused_where_the_group_is_made():
    """Also on one host, where there is no path: it is refused before the job moves to several."""
    assert pool(2).run(unknown) == [True, True]


def lose(rank, _num_ranks, how):
    with group_on("01", rank) as ours:  # compiles, however long that takes
        dist.all_reduce(torch.ones(1000), group=ours)
    with group_on("01", rank, timeout_s=4) as ours:
        tensor = torch.ones(200_000)
        dist.all_reduce(tensor, group=ours)
        silence_us = int(ours._across._path._driver.endpoint.tables.numbers[SILENCE_US])
        if rank == 1:
            os.kill(os.getpid(), how)
        with pytest.raises(TimeoutError) as caught:
            dist.all_reduce(tensor, group=ours)
        return str(caught.value), silence_us


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_within_the_timeout(how):
    """Killed or stopped, on the other host: rank 0 names it after the group's timeout of 4 s."""
    with Ranks(2) as ranks:
        outcome = ranks.outcomes(lose, how)[0]
    message, silence_us = outcome.value
    assert "rank 1" in message
    assert silence_us == 4_000_000  # without the group's timeout: 20 s


def differ(rank, _num_ranks):
    with group_on("01", rank) as ours, pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(10 if rank == 0 else 12_000), group=ours)
    return str(caught.value)


def test_a_disagreement_is_named():
    """As over TCP: what each rank was in."""
    for message in pool(2).run(differ):
        assert "rank 0" in message
        assert "rank 1" in message
        assert "12000" in message.replace(",", "")


def bothered(rank, _num_ranks):
    with group_on("01", rank) as ours:
        values = torch.ones(1000)
        dist.all_reduce(values, group=ours)
        transport = ours._across._path
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for size in (0, 1, 39, 40, 500, 60_000):
                stranger.sendto(os.urandom(size), transport.place)
        dist.all_reduce(values, group=ours)
        until_s = time.monotonic() + 30
        while transport.counters["strangers"] < 6 and time.monotonic() < until_s:
            time.sleep(0.01)
        return values.unique().tolist(), transport.counters["strangers"]


def test_strangers_are_counted_and_change_nothing():
    assert pool(2).run(bothered) == [([4.0], 6)] * 2

"""Where `paceline plan` has the figures of the link between hosts from: measured, given or assumed; each is said."""

import dataclasses

import pytest

from paceline_plan.links_here import LinkHere
from paceline_plan.request import PlanRequest

HERE = LinkHere(num_hosts=4, ranks_per_host=2, bytes_per_s=6e6, latency_s=4e-4, message_s=2e-5)


def origins(asked: PlanRequest) -> tuple[str, str]:
    return asked.links()["rate"]["from"], asked.links()["latency"]["from"]


def test_what_was_measured_is_the_clusters_unless_it_was_given() -> None:
    cluster = PlanRequest("tiny", link_here=HERE).cluster(8)
    assert cluster.ranks_of_host == (2, 2, 2, 2)
    link = cluster.links[0]
    assert (link.bytes_per_s, link.latency_s, link.message_s) == (6e6, 4e-4, 2e-5)

    asked = PlanRequest("tiny", rate="1Gbit", ranks_per_host=4, link_here=HERE)
    assert asked.cluster(8).ranks_of_host == (4, 4)
    assert asked.cluster(8).links[0].bytes_per_s == 125e6
    assert asked.cluster(8).links[0].latency_s == 4e-4
    assert origins(asked) == ("given", "measured")

    asked = PlanRequest("tiny", latency="1ms", link_here=HERE)
    link = asked.cluster(8).links[0]
    assert (link.bytes_per_s, link.latency_s) == (6e6, 1e-3)
    assert link.message_s != HERE.message_s  # it was measured with the latency that does not count
    assert origins(asked) == ("measured", "given")


def test_servers_have_the_measured_link_unless_theirs_was_given() -> None:
    servers = PlanRequest("tiny", servers=2, link_here=HERE).plan().servers
    assert servers is not None
    assert servers.bytes_per_s == 6e6
    other = PlanRequest("tiny", servers=2, server_rate="8Mbit", link_here=HERE).plan().servers
    assert other is not None
    assert other.bytes_per_s == 1e6


@pytest.mark.parametrize(
    ("asked", "words", "assumed"),
    [
        (
            PlanRequest("tiny"),
            (
                "25 Gbit/s (assumed), 30 us a round (assumed); this is one host, which has no such link to measure "
                "(as a job on several hosts it is measured)"
            ),
            "--rate 25Gbit, --latency 30us, --ranks-per-host 8, --within 800Gbit",
        ),
        (
            PlanRequest("tiny", rate="1Gbit", latency="1ms"),
            "1 Gbit/s (given), 1 ms a round (given)",
            "--ranks-per-host 8, --within 800Gbit",
        ),
        (
            PlanRequest("tiny", rate="1Gbit", link_here=HERE),
            (
                "1 Gbit/s (given), 400 us a round (measured); measured over TCP between the 4 hosts here: 48 Mbit/s, "
                "400 us a round"
            ),
            "--within 800Gbit",
        ),
        (
            PlanRequest("tiny", within="1Gbit", link_here=dataclasses.replace(HERE, on_one_machine=True)),
            (
                "48 Mbit/s (measured), 400 us a round (measured); measured over TCP between the 4 hosts here, which "
                "share a machine, with what that costs: 48 Mbit/s, 400 us a round"
            ),
            "",
        ),
    ],
)
def test_every_figure_says_where_it_is_from(asked: PlanRequest, words: str, assumed: str) -> None:
    assert asked.link_words() == f"link between hosts: {words}"
    assert asked.assumptions() == assumed
    measured = asked.links()["measured"]
    assert measured == (None if asked.link_here is None else dataclasses.asdict(asked.link_here))

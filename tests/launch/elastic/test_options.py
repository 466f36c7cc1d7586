"""What `paceline run --min-ranks` refuses before anything starts."""

import pytest

from paceline.errors import ConfigurationError
from paceline.launch import parse
from paceline.launch.elastic.plan import Address
from paceline.launch.elastic.several_hosts import connected

SCRIPT = __file__


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--min-ranks", "5"], "--min-ranks 5 is more than the 4 rank"),
        (["--min-ranks", "0"], "--min-ranks 0 keeps no rank"),
        (["--min-ranks", "2", "--lost-after", "0"], "--lost-after 0 is not a time"),
        (["--lost-after", "3"], "has no effect without --min-ranks"),
        (["--min-ranks", "2", "--max-restarts", "1"], "--max-restarts exclude each other"),
        (["--min-ranks", "2", "--servers", "1"], "--servers exclude each other"),
        (["--min-ranks", "2", "--numa-binding", "node"], "--numa-binding exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(words, said):
    """The option, its value, what to do instead."""
    with pytest.raises(ConfigurationError, match=said):
        parse(["--nproc-per-node", "4", *words, SCRIPT])


def test_what_was_asked_for_reaches_the_launch():
    """Without --min-ranks a lost rank ends the launch."""
    arguments = parse(["--nproc-per-node", "4", "--min-ranks", "2", "--lost-after", "7", SCRIPT])
    assert (arguments.min_ranks, arguments.lost_after_s, arguments.hang_after_s) == (2, 7.0, 5.0)
    assert parse(["--nproc-per-node", "4", SCRIPT]).min_ranks is None


def test_several_hosts_need_a_token(monkeypatch):
    """Who knows it can end the training, and gets the parameters; with none, that would be everybody."""
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--local-addr", "10.0.0.2"]
    arguments = parse([*words, "--min-ranks", "1", SCRIPT])
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.2:29500 .* the same PACELINE_TOKEN"):
        connected(arguments, Address("10.0.0.2", 1), print).__enter__()

"""What `paceline run --min-ranks` refuses before anything starts."""

import socket

import pytest

from paceline.errors import ConfigurationError
from paceline.launch import parse
from paceline.launch.elastic import several_hosts
from paceline.launch.elastic.plan import Address
from paceline.launch.elastic.several_hosts import connected, find_own_address, where_the_first_is

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
        (
            ["--min-ranks", "2", "--local-addr", "198.51.100.7"],
            "--local-addr 198.51.100.7 is not an address of this",
        ),
        (
            ["--min-ranks", "2", "--nnodes", "2", "--rdzv-endpoint", "file:///tmp/x"],
            "file:// exclude each other",
        ),
        (["--min-ranks", "2", "--rdzv-backend", "etcd"], "--rdzv-backend etcd exclude each other"),
        (["--min-ranks", "2", "--nnodes", "2", "--rdzv-endpoint", "h:0"], "--min-ranks and port 0 exclude"),
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nodes 2", "--nodes has no effect without --peers"),
        ("--join-timeout 9", "--join-timeout has no effect without --peers"),
        ("--peers local --nodes 2", "--nodes 2 asks for several hosts, but --peers local names none"),
        ("--peers dns:x --nodes 4:2", "--nodes 4:2 is no number of hosts"),
        ("--peers dns:x --nodes 2 --join-timeout soon", "--join-timeout soon is no number of seconds"),
        (
            "--peers dns:x --nodes 2 --job-folder /no/such",
            "--job-folder /no/such is no folder that this host",
        ),
        ("--peers dns:x --nodes 2 --port none", "--port none is no number"),
        ("--peers dns:x --nodes 2 --min-ranks 9", r"--min-ranks 9 is more than the 8 rank\(s\) of this job"),
        ("--peers dns:x --nnodes 2", "--peers and --nnodes exclude each other"),
        ("--peers dns:x --node-rank 1", "--peers and --node-rank exclude each other"),
        ("--peers dns:x --max-restarts 1", "--max-restarts exclude each other"),
        ("--peers dns:x --lost-after 0", "--lost-after 0.0 is no number of seconds"),
    ],
)
def test_how_hosts_find_each_other_is_checked(words, said):
    """The option is named, not its variable."""
    with pytest.raises(ConfigurationError, match=said):
        parse(["--nproc-per-node", "4", *words.split(), SCRIPT])


def test_hosts_find_each_other_by_options_or_variables(monkeypatch, tmp_path):
    """An option counts more than its variable."""
    words = f"--peers dns:x --nodes 2:3 --join-timeout 9 --job run-7 --job-folder {tmp_path} --port 7 --lost-after 5"
    by_options = parse(["--ranks-per-host", "2", *words.split(), SCRIPT, "--lr", "1"])
    assert by_options.environment == {"PACELINE_PEERS": "dns:x"}  # which says to ranks that they begin alone
    assert (by_options.min_ranks, by_options.num_machines, by_options.lost_after_s) == (4, 3, 5.0)
    for name, value in {
        "PEERS": "dns:x",
        "NODES": "2:3",
        "JOIN_TIMEOUT": "9",
        "JOB": "run-7",
        "JOB_FOLDER": str(tmp_path),
        "PORT": "9",
        "LOST_AFTER": "5",
        "RANKS_PER_HOST": "2",
    }.items():
        monkeypatch.setenv(f"PACELINE_{name}", value)
    by_variables = parse(["--port", "7", SCRIPT, "--lr", "1"])
    assert by_variables.guest == by_options.guest
    assert by_variables.guest.arguments == "--lr 1"
    assert by_variables.guest.port == 7


@pytest.mark.parametrize(
    ("node_rank", "words", "said"),
    [
        (1, "--master-addr 127.0.0.1", "this host has 127.0.0.1 on the way to the first one at 127.0.0.1"),
        (1, "", "this host has 127.0.0.1 on the way"),
        (1, "--master-addr localhost", "this host has 127.0.0.1 on the way"),
        (1, "--master-addr ::1", "on the way to the first one at ::1"),
        (1, "--master-addr fe80::1", "this host has no address on the way to the first one at fe80::1"),
        (1, "--master-addr 198.51.100.7 --local-addr 127.0.0.2", "this host has 127.0.0.2 on the way"),
        (0, "--master-addr 198.51.100.7", "--master-addr 198.51.100.7 is no address of this machine"),
        (0, "--master-addr 1.2.3", "--master-addr 1.2.3 is no address of this machine"),
        (0, "--master-addr no..name", "--master-addr no..name: this host does not know the name"),
        (
            0,
            "--master-addr 0.0.0.0",
            "--master-addr 0.0.0.0 means 0.0.0.0 here, at which no other host reaches",
        ),
        (0, "--master-addr 224.0.0.1", "--master-addr 224.0.0.1 means 224.0.0.1 here"),
    ],
)
def test_an_address_at_which_hosts_cannot_meet_is_refused(node_rank, words, said):
    """Before anything starts; one that is missing, of another machine, of this machine alone, or unknown."""
    words = ["--nnodes", "2", "--node-rank", str(node_rank), "--min-ranks", "1", *words.split(), SCRIPT]
    with pytest.raises(ConfigurationError, match=said):
        find_own_address(parse(words))


def test_hosts_may_meet_at_any_address_of_the_first(monkeypatch):
    """Without a port it is the usual one; several on one machine have an address each."""
    words = ["--nnodes", "2", "--min-ranks", "1"]
    arguments = parse([*words, "--rdzv-endpoint", "127.0.0.1", SCRIPT])
    assert where_the_first_is(arguments) == (Address("127.0.0.1", 29500), True)
    one = ["--node-rank", "1", "--master-addr", "localhost", "--local-addr", "127.0.0.2"]
    arguments = parse([*words, *one, SCRIPT])
    find_own_address(arguments)
    assert arguments.torchrun.local_addr == "127.0.0.2"
    monkeypatch.setattr(several_hosts, "own_address_towards", {"10.0.0.1": "10.0.0.2"}.get)
    arguments = parse([*words, "--node-rank", "1", "--master-addr", "10.0.0.1", SCRIPT])
    find_own_address(arguments)
    assert arguments.torchrun.local_addr == "10.0.0.2"


def test_an_agents_port_that_is_taken_is_named():
    """At its address: of several hosts on one machine each has the port at an address of its own."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["--nnodes", "2", "--min-ranks", "1", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        other = parse([*words[:-1], f"127.0.0.2:{port}", SCRIPT])
        assert other.local_port is None
        with connected(other, Address("127.0.0.2", 1), print) as agents:
            assert agents.address == ("127.0.0.2", port)
        with pytest.raises(
            ConfigurationError, match=rf"listen at 127\.0\.0\.1:{port} \(Address already in use\)"
        ):
            connected(parse([*words, SCRIPT]), Address("127.0.0.1", 1), print).__enter__()


def test_several_hosts_need_a_token(monkeypatch):
    """Who knows it can end the training, and gets the parameters; with none, that would be everybody."""
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1"]
    arguments = parse([*words, "--min-ranks", "1", SCRIPT])
    arguments.torchrun.local_addr = "10.0.0.2"
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.2:29500 .* the same PACELINE_TOKEN"):
        connected(arguments, Address("10.0.0.2", 1), print).__enter__()

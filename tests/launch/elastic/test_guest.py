"""Ranks that an engine has started: what their agent sees of them, and how it leads them."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.elastic import discovery, guest
from paceline.elastic.agent_connection import AgentConnection
from paceline.elastic.guest import GuestSetting, PeerProcess
from paceline.errors import ConfigurationError, PeerLostError
from paceline.host.processes import Vitals
from paceline.launch.elastic import rank_process
from paceline.launch.elastic.council import Council
from paceline.launch.elastic.guest import Door, Voice, deciding, lead_as
from paceline.launch.elastic.record import JobRecord

# A rank without a model. Its first word says what it does in a membership. The second word is the size of the one in
# which it ends well, and how many of it are new. It writes down what it is told.
RANK = """
import atexit, os, signal, sys, time
from paceline.elastic.agent_connection import *
if sys.argv[1].startswith("first"):  # as the first process of a container
    atexit.register(lambda: say("record:", os.path.exists(os.environ["RECORD"])))
    os.getpid = lambda: 1
if sys.argv[1] == "first notice":
    AgentConnection.finish = lambda self: say("waits for the agent's end")
line = AgentConnection.of_this_process()
word, last = sys.argv[1].removeprefix("first "), sys.argv[2]
def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n"); sys.stdout.flush()
line.tell(Ready("a card", saves=True))
while said := line.hear():
    if isinstance(said, RankAssignment):
        say("rank", said.rank, "of", said.size, "without", *said.lost, "but", len(said.left), "left")
        line.tell(InLoop(True))
        line.tell(Following(said.epoch))
        if f"{said.size},{said.num_new}" == last:
            line.tell(InLoop(False, is_through=True))
            sys.exit()
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "exit":
            os._exit(7)
        if word == "notice":
            line.tell(Notice())
    elif isinstance(said, (Stop, Pause)):
        say(type(said).__name__)
        line.tell(Stopped(said.epoch, 3))
    elif isinstance(said, Receive):
        line.tell(CaughtUp())
    elif isinstance(said, Leave):
        if said.saves:
            say("saves")
            if word == "full":
                line.tell(Saved("OSError: no space left"))
                sys.exit(1)
            line.tell(Saved(""))
        say("leaves")
        sys.exit(said.code)
    elif isinstance(said, Ended):
        say("saves")
        sys.exit(1)
    elif isinstance(said, Said):
        say("said:", said.words)
"""


def _without(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    """Hide what kernels before 6.15, before 6.5, or other containers do not show."""
    names = {
        "exit codes": ["exit_status_by_pidfd"],
        "SO_PEERPIDFD": ["exit_status_by_pidfd", "peer_pidfd"],
        "pidfds": ["exit_status_by_pidfd", "peer_pidfd", "pidfd_of"],
        "processes": ["exit_status_by_pidfd", "peer_pidfd", "pidfd_of"],
    }
    for name in names.get(hidden, []):
        monkeypatch.setattr(guest, name, lambda _: None)
    if hidden == "processes":
        monkeypatch.setattr(guest, "credentials_of_peer", lambda _: (0, os.getuid()))


HIDDEN = ["nothing", "exit codes", "SO_PEERPIDFD", "pidfds", "processes"]


@pytest.mark.processes
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize(
    ("ends", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("raise SystemExit(0)", 0)]
)
def test_the_end_of_a_process_that_another_one_has_started(
    monkeypatch: pytest.MonkeyPatch, hidden: str, ends: str, code: int
) -> None:
    """It is seen on every kernel. Its exit code may be unknown, and is never wrong."""
    _without(monkeypatch, hidden)
    name = f"\0test-{os.getpid()}-{os.urandom(4).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(name)
        door.listen()
        # It takes a moment to free its memory, as a rank does. Its shell reaps it then.
        child = (
            f"import os, socket; memory = bytearray(1 << 26); end = socket.socket({int(socket.AF_UNIX)}, "
            f"{int(socket.SOCK_SEQPACKET)}); end.connect({name!r}); end.recv(1); {ends}"
        )
        with subprocess.Popen(["sh", "-c", f'"{sys.executable}" -IS -c "$1"; true', "sh", child]):
            end, _ = door.accept()
            process = PeerProcess(end)
            with end:
                assert not process.has_ended()
                assert not process.vitals().is_ending
                end.send(b"x")
                while not process.vitals().is_ending:
                    pass
                while not process.has_ended():
                    pass
                assert process.wait(10.0) in [code, None]
                process.close()


class Host:
    """A host whose ranks a test starts, and its agent in a thread of the test."""

    def __init__(self, folder: Path, linger_s: float = 2.0, **setting: object) -> None:
        defaults = {"job": f"test-{os.getpid()}-{folder.name}", "lost_after_s": 20.0}
        self.setting = GuestSetting(**{**defaults, **setting})  # type: ignore[arg-type]
        self._script = folder / "rank.py"
        self._script.write_text(RANK)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(self.setting.socket_name)
        listening.listen()
        self._listening = listening
        self.door, self.voice, self.told = Door(listening, "127.0.0.1", linger_s), Voice(), list[int]()
        self.notes: list[str] = []
        self.voice.note = self._note  # type: ignore[method-assign]
        self._ranks: list[subprocess.Popen[str]] = []
        self.door._busy_s = math.inf  # no rank has started the agent: it waits for the first one
        self.agent = threading.Thread(target=self._lead)
        self.agent.start()

    def _note(self, words: str) -> None:
        self.notes.append(words)
        Voice.note(self.voice, words)

    def _lead(self) -> None:
        with self._listening:
            lead_as(self.setting, self.door, self.voice, self.told)
        for rank in self.door.ranks:  # an agent's process would end here
            rank.connection.close()

    def start(self, *words: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PACELINE_PEERS": "local",
            "PACELINE_JOB": self.setting.job,
            "PACELINE_LOCAL_ADDR": self.setting.local_addr,
            "RECORD": f"{self.setting.record}/paceline-{self.setting.job}.ended",
        }
        rank = subprocess.Popen(
            [sys.executable, str(self._script), *words], env=environment, stdout=subprocess.PIPE, text=True
        )
        self._ranks.append(rank)
        return rank

    def ends(self) -> list[tuple[str, int]]:
        """Return what each rank has written, and its exit code, once all have ended, and the agent, too."""
        found = [(rank.communicate()[0], rank.returncode) for rank in self._ranks]
        self.agent.join()
        return found

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()
        self.agent.join()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(**setting: object) -> Host:
        made.append(Host(tmp_path, **setting))
        return made[-1]

    make.made = made  # type: ignore[attr-defined]
    yield make
    for each in made:
        each.close()


@pytest.mark.processes
@pytest.mark.parametrize("hidden", ["nothing", "SO_PEERPIDFD", "processes"])
def test_a_rank_that_dies_is_left_out_and_another_one_comes(
    host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """The agent starts none: the test does, as an engine would. It comes in between two steps."""
    _without(monkeypatch, hidden)
    here = host(num_local_ranks=3, min_ranks=2)
    here.start("stay", "3,1")
    here.start("stay", "3,1")
    here.start("exit", "").wait()
    here.start("stay", "3,1")
    assert [code for _, code in here.ends()] == [0, 0, 7, 0]
    ended = "exited with code 7" if hidden == "nothing" else "ended"
    assert [note for note in here.notes if ended in note or "exited with code 7" in note], here.notes


@pytest.mark.processes
def test_a_rank_that_is_told_to_end_leaves_between_two_steps(host: Callable[..., Host]) -> None:
    """No rank stops within a step for it, and none saves: enough stay."""
    here = host(num_local_ranks=3, min_ranks=2)
    for words in (("stay", "2,0"), ("notice", ""), ("stay", "2,0")):
        here.start(*words)
    ends = here.ends()
    assert [code for _, code in ends] == [0, 143, 0]
    assert all("Pause" in said and "Stop" not in said and "saves" not in said for said, _ in ends)
    assert all("of 2 without but 1 left" in ends[place][0] for place in (0, 2)), ends


@pytest.mark.processes
@pytest.mark.parametrize("how", ["each rank", "agent"])
def test_if_all_are_told_one_of_them_makes_a_checkpoint(host: Callable[..., Host], how: str) -> None:
    """If it fails, the next one is asked."""
    here = host(num_local_ranks=2, min_ranks=1)
    word = "notice" if how == "each rank" else "stay"
    first = here.start("full" if how == "agent" else word, "")
    here.start(word, "")
    if how == "agent":
        assert first.stdout is not None
        first.stdout.readline()
        here.told.append(signal.SIGTERM)
    ends = here.ends()
    assert sum("saves\nleaves" in said for said, _ in ends) == 1
    assert {code for said, code in ends if "leaves" in said} == {143}
    assert not any("Stop" in said for said, _ in ends)
    assert sum("has made a checkpoint after step 3" in note for note in here.notes) == 1


@pytest.mark.processes
def test_after_all_ranks_were_lost_others_begin_again(host: Callable[..., Host]) -> None:
    """From a checkpoint, as their engine's restarts do. The agent lives as long as one of them."""
    here = host(num_local_ranks=2, min_ranks=2, linger_s=60.0)
    lost = [here.start("die", ""), here.start("die", "")]
    for each in lost:
        each.wait()
    here.start("stay", "2,2")
    here.start("stay", "2,2")
    assert [code for _, code in here.ends()] == [-9, -9, 0, 0]


def test_a_rank_that_comes_as_its_agent_ends_finds_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first agent ends without having taken the rank: a job that has ended would look like a failure to it."""
    monkeypatch.setenv("PACELINE_PEERS", "local")
    monkeypatch.setenv("PACELINE_JOB", f"test-{os.getpid()}-{os.urandom(4).hex()}")
    name = GuestSetting.of(os.environ, "").socket_name
    next_one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def take() -> None:
        end, _ = next_one.accept()
        with end:
            end.send(guest.WELCOME)

    takes = threading.Thread(target=take)

    def open_next(opened: str, *_: object) -> None:
        next_one.bind(opened)
        next_one.listen()
        takes.start()

    monkeypatch.setattr(guest, "_open_door", open_next)
    with next_one, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
        first.bind(name)
        first.listen()
        ends = threading.Timer(0.2, first.close)
        ends.start()
        guest.connect().close()
        assert takes.ident, "the rank took the connection of the agent that ended"
        takes.join()
        ends.join()


@pytest.mark.processes
def test_ranks_that_wait_too_long_begin_with_fewer(host: Callable[..., Host]) -> None:
    """After the join timeout the fewest ranks suffice."""
    here = host(num_local_ranks=4, min_ranks=2, join_timeout_s=0.2)
    here.start("stay", "2,2")
    here.start("stay", "2,2")
    assert [code for _, code in here.ends()] == [0, 0]


def of_several(folder: Path, **setting: object) -> dict[str, object]:
    """The settings of a job of several hosts, which find each other in a folder."""
    peers, record = folder / "peers", folder / "record"
    peers.mkdir(exist_ok=True)
    record.mkdir(exist_ok=True)
    numbers = {"least_nodes": 2, "most_nodes": 3, "join_timeout_s": 1.0}
    return {**numbers, "peers": f"file:{peers}", "record": str(record), **setting}


@pytest.mark.processes
def test_a_host_that_is_lost_comes_back_at_another_address(host: Callable[..., Host], tmp_path: Path) -> None:
    """The others go on, and it comes in between two steps. A rank that is started after the end exits with 0."""
    setting = of_several(tmp_path, least_nodes=3)
    hosts = [host(local_addr=f"127.0.0.{i}", **setting) for i in (1, 2, 3)]
    for each, word in zip(
        hosts, ("exit", "stay", "stay"), strict=True
    ):  # any host may be the one that began the job
        each.start(word, "3,1")
    assert [code for _, code in hosts[0].ends()] == [7]
    again = host(local_addr="127.0.0.9", **setting)
    again.start("stay", "3,1")
    ends = [each.ends() for each in (*hosts[1:], again)]
    assert [[code for _, code in each] for each in ends] == [[0], [0], [0]]
    assert all(" of 2 " in each[0][0] for each in ends[:2]), (
        ends
    )  # who hears of the loss first has not followed before
    late = host(local_addr="127.0.0.1", **setting)
    late.start("stay", "")
    ((said, code),) = late.ends()
    assert (code, "rank" in said) == (0, False)
    assert "said: the job has ended well before" in said


@pytest.mark.processes
def test_after_the_ranks_of_all_hosts_were_lost_others_begin_again(
    host: Callable[..., Host], tmp_path: Path
) -> None:
    """At once: the agents know that no rank has the state any more. They had waited for 200 s, and then failed."""
    setting = of_several(tmp_path, min_ranks=2, linger_s=60.0)
    hosts = [host(local_addr=f"127.0.0.{i}", **setting) for i in (1, 2)]
    lost = [each.start("die", "") for each in hosts]
    for each in lost:
        each.wait()
    for each in hosts:
        each.start("stay", "2,2")
    assert [[code for _, code in each.ends()] for each in hosts] == [[-9, 0], [-9, 0]]


@pytest.mark.processes
def test_a_spare_host_joins_before_the_last_one_with_a_vote_ends(
    host: Callable[..., Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins late here. The other one had ended in between, and the spare said that no agent answers."""
    waits, asked_s = threading.Event(), list[float]()
    propose, join = Council._propose, Council._ask_to_join

    def notes_spare(council: Council, now_s: float) -> None:
        if council.is_full and not council.is_member:
            waits.set()
        propose(council, now_s)

    def joins_late(council: Council, now_s: float) -> None:
        if waits.is_set():
            asked_s.append(now_s)
        if not asked_s or now_s - asked_s[0] > 1.0:
            join(council, now_s)

    monkeypatch.setattr(Council, "_propose", notes_spare)
    monkeypatch.setattr(Council, "_ask_to_join", joins_late)
    setting = of_several(tmp_path, least_nodes=1, most_nodes=1, join_timeout_s=0.0)
    first = host(local_addr="127.0.0.1", **setting)
    lost = first.start("stay", "")
    assert lost.stdout is not None
    lost.stdout.readline()  # it trains
    spare = host(local_addr="127.0.0.2", **setting)
    spare.start("stay", "1,1")
    assert waits.wait(30)
    lost.kill()
    assert [code for _, code in spare.ends()] == [0], spare.notes


@pytest.mark.processes
def test_the_first_process_of_a_container_waits_for_the_record_of_the_end(
    host: Callable[..., Host], tmp_path: Path
) -> None:
    """Its end kills the agent. Without the record, Kubernetes would start another pod that trains everything again."""
    here = host(num_local_ranks=2, min_ranks=2, record=str(tmp_path))
    for _ in range(2):
        here.start("first", "2,2")
    assert [(code, "record: True" in said) for said, code in here.ends()] == [(0, True)] * 2
    assert not any("ended well" in note for note in here.notes)


@pytest.mark.processes
def test_the_first_process_of_a_container_does_not_wait_if_it_is_told_to_go(
    host: Callable[..., Host], tmp_path: Path
) -> None:
    """The agent goes on with the other ranks, and the machine may be gone in seconds."""
    here = host(num_local_ranks=3, min_ranks=2, record=str(tmp_path))
    for words in (("stay", "2,0"), ("first notice", ""), ("stay", "2,0")):
        here.start(*words)
    ends = here.ends()
    assert [code for _, code in ends] == [0, 143, 0]
    assert "leaves" in ends[1][0]
    assert "waits" not in ends[1][0]


@pytest.mark.processes
def test_a_host_that_is_told_to_go_leaves_the_others_at_work(
    host: Callable[..., Host], tmp_path: Path
) -> None:
    """Its ranks end with 143, and no rank of another host stops within a step. A spare host comes in then."""
    setting = of_several(tmp_path, most_nodes=2, num_local_ranks=2, min_ranks=2)
    hosts = [host(local_addr=f"127.0.0.{i}", **setting) for i in (1, 2)]
    first = [each.start("stay", "4,2") for each in hosts for _ in range(2)]
    for each in first:
        assert each.stdout is not None
        assert "of 4" in each.stdout.readline()
    del first[:]
    spare = host(local_addr="127.0.0.3", **setting)
    for _ in range(2):
        spare.start("stay", "4,2")
    hosts[0].told.append(signal.SIGTERM)
    assert [code for _, code in hosts[0].ends()] == [143, 143]
    ends = [end for each in (hosts[1], spare) for end in each.ends()]
    assert [code for _, code in ends] == [0, 0, 0, 0]
    assert not any("Stop" in said or "saves" in said for said, _ in ends), ends


@pytest.mark.processes
def test_two_jobs_of_other_names_do_not_understand_each_other(
    host: Callable[..., Host], tmp_path: Path
) -> None:
    """They have one token, and find each other's addresses."""
    setting = of_several(tmp_path, record="", most_nodes=2)
    jobs = [[host(local_addr=f"127.0.0.{i}", job=job, **setting) for i in (1, 2)] for job in ("a", "b")]
    for each in (one for job in jobs for one in job):
        each.start("stay", "2,2")
    assert [code for job in jobs for each in job for _, code in each.ends()] == [0, 0, 0, 0]


@pytest.mark.processes
def test_hosts_that_do_not_fit_say_so_at_once(host: Callable[..., Host], tmp_path: Path) -> None:
    """Another script ends both jobs before they begin. Other arguments, or another name, are only reported."""
    setting = of_several(tmp_path, record="", most_nodes=2, facts="train.py (1)")
    for i, other in ((1, {}), (2, {"facts": "train.py (2)"})):
        host(local_addr=f"127.0.0.{i}", **{**setting, **other}).start("stay", "")
    hosts = host.made[-2:]  # type: ignore[attr-defined]
    for each, mine, theirs in zip(hosts, "12", "21", strict=True):
        ((said, code),) = each.ends()
        assert (code, "leaves" in said, "saves" in said) == (1, True, False)  # it has trained nothing
        assert re.search(
            rf"said: .* runs train.py \({theirs}\), but .* runs train.py \({mine}\): they are no job", said
        )
    for i, other in ((3, {"arguments": "--lr 1"}), (4, {"arguments": "--lr 2"}), (5, {"job": "x"})):
        host(local_addr=f"127.0.0.{i}", **{**setting, "least_nodes": 1 + (i < 5), **other}).start(
            "stay", "2,2" if i < 5 else "1,1"
        )
    hosts = host.made[-3:]  # type: ignore[attr-defined]
    ends = [each.ends() for each in hosts]
    assert [code for each in ends for _, code in each] == [0, 0, 0]
    assert "has other arguments: --lr 2. Those of" in "".join(hosts[0].notes)
    assert "has another PACELINE_TOKEN or PACELINE_JOB than" in "".join(hosts[0].notes)


@pytest.mark.processes
def test_a_folder_that_the_hosts_do_not_share_is_said(host: Callable[..., Host], tmp_path: Path) -> None:
    """Each host would find only its own record, so a process that starts late would train again."""
    setting = of_several(tmp_path, most_nodes=2)
    hosts = []
    for i in (1, 2):
        record = tmp_path / f"record-{i}"
        record.mkdir()
        hosts.append(host(local_addr=f"127.0.0.{i}", **{**setting, "record": str(record)}))
        hosts[-1].start("stay", "")
    words = "is not the folder that the other hosts have: their record of this job is not in it"
    while not any(words in note for each in hosts for note in each.notes):
        pass


@pytest.mark.processes
def test_a_name_that_is_known_late_begins_the_job(
    host: Callable[..., Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the ranks are told what is waited for."""
    known: list[str] = []

    def look_up(name: str) -> list[str]:
        if name == "trainers.test" and not known:
            raise OSError(-2, "Name or service not known")
        return known

    monkeypatch.setattr(discovery, "addresses_of", look_up)
    monkeypatch.setattr("paceline.launch.elastic.guest._SAY_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    setting = of_several(tmp_path, peers=f"dns:trainers.test:{port}", least_nodes=1)
    here = host(**setting)
    here.start("stay", "1,1")
    while not here.notes:
        pass
    known.append("127.0.0.1")
    assert here.ends()[0][1] == 0
    assert "PACELINE_PEERS (or --peers) dns:trainers.test" in here.notes[0]
    assert "Name or service not known; waiting up to 200 s" in here.notes[0]


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        ("file:/no/such/folder", r"there is no folder /no/such/folder"),
        ("slurm", r"this is no Slurm job"),
        ("10.0.0.1:port", r"'port' is no port"),
        ("https://host", r"no address of a host"),
        ("dns:name:0", r"'0' is no port"),
        ("dns:", r"PACELINE_PEERS \(or --peers\) dns: has no name behind the colon"),
        ("file:", r"PACELINE_PEERS \(or --peers\) file: has no name behind the colon"),
        (",", r"PACELINE_PEERS \(or --peers\) names ''"),
    ],
)
def test_sources_that_cannot_be_are_refused(peers: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigurationError, match=words):
        discovery.Discovery(peers)


def test_a_name_server_names_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all addresses, an agent listens at the one that its host has. The name is asked again each time."""
    known: dict[str, list[str]] = {}

    def look_up(name: str) -> list[str]:
        if name not in known:
            raise OSError(-2, "Name or service not known")
        return known[name]

    monkeypatch.setattr(discovery, "addresses_of", look_up)
    trainers = discovery.Discovery("dns:trainers.test:29401")
    for ask in (trainers.find, trainers.listen):
        with pytest.raises(OSError, match="not known"):
            ask()
    known["trainers.test"] = ["192.0.2.7", "127.0.0.1"]
    assert trainers.find() == [("192.0.2.7", 29401), ("127.0.0.1", 29401)]
    assert trainers.listen() == ("127.0.0.1", 29401)
    known["trainers.test"].append("192.0.2.8")  # another host has come
    assert len(trainers.find()) == 3
    monkeypatch.setattr(
        discovery, "own_address_towards", lambda host: "10.1.2.3" if host == "192.0.2.7" else ""
    )
    known["trainers.test"] = ["192.0.2.8", "192.0.2.7"]  # without this one, which is on the way there
    assert trainers.listen() == ("10.1.2.3", 29401)
    monkeypatch.setattr(discovery, "own_address_towards", lambda _: "")
    with pytest.raises(OSError, match="names no address that this host reaches"):
        trainers.listen()


def test_a_list_has_addresses_names_and_ports() -> None:
    found = discovery.Discovery("127.0.0.1:7, 127.0.0.2,[::1]:9,::1").find()
    assert found == [
        ("127.0.0.1", 7),
        ("127.0.0.2", 29400),
        ("::1", 9),
        ("::1", 29400),
    ]


def test_a_network_without_a_way_out_has_an_address_that_others_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the agents of such a cluster would listen at 127.0.0.1, and wait for each other in vain."""
    monkeypatch.setattr(discovery, "own_address_towards", lambda _: "")
    monkeypatch.setattr(discovery, "interfaces", lambda: {"eth1": "10.1.2.3"})
    assert discovery.Discovery(f"file:{tmp_path}").listen() == ("10.1.2.3", 0)
    monkeypatch.setattr(discovery, "interfaces", dict)
    assert discovery.Discovery(f"file:{tmp_path}").listen() == ("127.0.0.1", 0)


def test_one_of_two_jobs_may_begin_and_another_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    """What has ended stays so."""
    first, second = JobRecord(tmp_path, "x"), JobRecord(tmp_path, "x")
    assert [first.claim("one"), second.claim("two"), first.claim("one")] == [True, False, True]
    assert second.holder() == "one"
    (born,) = tmp_path.glob("*.born")
    os.utime(born, (1, 1))
    assert [first.claim("one"), second.claim("two"), first.claim("one")] == [True, True, False]
    assert not first.has_ended()
    second.end()
    assert JobRecord(tmp_path, "x").has_ended()
    assert not JobRecord(tmp_path, "y").has_ended()


def test_without_a_token_other_hosts_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    setting = GuestSetting(peers=f"file:{tmp_path}", local_addr="192.0.2.7", most_nodes=2)
    words = "Give all hosts the same PACELINE_TOKEN"
    with pytest.raises(ConfigurationError, match=words):
        deciding(setting, print).__enter__()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"PACELINE_NODES": "4:2"}, r"PACELINE_NODES=4:2 is no number of hosts\. Give MIN:MAX"),
        ({"PACELINE_NODES": "0"}, r"with MIN at least 1"),
        ({"PACELINE_NODES": "two"}, r"PACELINE_NODES=two"),
        ({"PACELINE_NODES": "2"}, r"asks for several hosts, but PACELINE_PEERS=local names none"),
        ({"PACELINE_PEERS": " "}, r"PACELINE_PEERS is empty"),
        ({"PACELINE_MIN_RANKS": "3"}, r"PACELINE_MIN_RANKS=3 is more than the 2 rank\(s\) of this job"),
        ({"PACELINE_MIN_RANKS": "some"}, r"PACELINE_MIN_RANKS=some is no number"),
        ({"PACELINE_RANKS_PER_HOST": "0"}, r"PACELINE_RANKS_PER_HOST=0"),
        ({"PACELINE_JOIN_TIMEOUT": "soon"}, r"PACELINE_JOIN_TIMEOUT=soon is no number of seconds"),
        ({"PACELINE_JOB_FOLDER": "/no/such/folder"}, r"no folder that this host can write to"),
        ({"PACELINE_PORT": "none"}, r"PACELINE_PORT=none is no number"),
        ({"PACELINE_LOST_AFTER": "-1"}, r"PACELINE_LOST_AFTER=-1"),
        ({"PACELINE_SHUTDOWN_TIMEOUT": "nan"}, r"PACELINE_SHUTDOWN_TIMEOUT=nan"),
    ],
    ids=str,
)
def test_values_that_cannot_be_are_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        GuestSetting.of({"PACELINE_PEERS": "local", "PACELINE_RANKS_PER_HOST": "2", **given}, "train.py")


def test_the_job_decides_on_the_agents_name() -> None:
    """Jobs of other names, or of other scripts without names, have other agents."""
    settings = [
        GuestSetting(job="a"),
        GuestSetting(job="b"),
        GuestSetting(script="one.py"),
        GuestSetting(script="two.py"),
    ]
    assert len({each.socket_name for each in settings}) == 4
    assert rank_process.how_it_ended(None) == "ended"


def test_a_rank_is_told_that_its_agent_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What listens takes the connection and says nothing, as an agent does behind SIGSTOP."""
    monkeypatch.setenv("PACELINE_PEERS", "local")
    monkeypatch.setenv("PACELINE_JOB", str(tmp_path))
    monkeypatch.setattr(guest, "_ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stopped:
        stopped.bind(GuestSetting.of(os.environ, "train.py").socket_name)
        stopped.listen()
        with pytest.raises(PeerLostError, match=r"has not answered for 0.05 s"):
            guest.connect()


@pytest.mark.processes
def test_an_agent_welcomes_ranks_before_it_has_imported_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a busy machine the import takes minutes, and a rank that is not answered gives up."""
    ends = tmp_path / "import ends"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(ends)!r}): time.sleep(0.05)\nraise ImportError"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # a fresh interpreter: see tests/harness/warm_python.py
    monkeypatch.setenv("PACELINE_PEERS", "local")
    monkeypatch.setenv("PACELINE_JOB", str(tmp_path))
    monkeypatch.setattr(guest, "_ANSWER_S", 20.0)
    try:
        with guest.connect() as first, guest.connect() as second:
            ends.touch()
            assert (first.recv(1), second.recv(1)) == (b"", b"")
    finally:
        ends.touch()


class SpokenTo:
    """A rank to which the agent speaks; only these are used of it."""

    def __init__(self, is_ending: bool) -> None:
        self.connection, self.its_end = AgentConnection.pair()
        self._is_ending = is_ending

    def vitals(self) -> Vitals:
        return Vitals("S", self._is_ending, 0)

    def heard(self) -> bytes:
        """Return what has come and was not read, without waiting."""
        self.its_end.setblocking(False)
        try:
            return self.its_end.recv(1000)
        except BlockingIOError:
            return b""


def test_words_go_to_a_rank_that_does_not_end() -> None:
    """A killed rank's socket still takes words until its memory is free. If all end, the first of them is told."""
    dying, living, closed = SpokenTo(is_ending=True), SpokenTo(is_ending=False), SpokenTo(is_ending=False)
    closed.connection.close()
    voice = Voice()
    voice.note("2 ranks go on")
    voice.speak([closed, dying, living])  # type: ignore[list-item]
    assert b"2 ranks go on" in living.heard()
    assert not dying.heard()
    voice.note("the last words")
    voice.speak([closed, dying])  # type: ignore[list-item]
    assert b"the last words" in dying.heard()
    for each in (dying, living, closed):
        each.connection.close()
        each.its_end.close()

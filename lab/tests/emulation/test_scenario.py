"""Timed changes of an emulated cluster: what a file may say, what is refused before any start, when they happen."""

from __future__ import annotations

import threading

import pytest

from paceline.errors import ConfigurationError
from paceline_lab.emulation import Change, ClusterSpec, Scenario
from paceline_lab.emulation.scenario import Director
from paceline_lab.errors import EmulationError

TEXT = """\
# host1 is throttled, then its link fails
after step 10
20s   host1,host2  cores 25%   # of a core
1500ms host0       rate 10 Mbit/s
20s   all          loss 1%
30s   all          delay 5ms
31s   host1        link down
"""


def spec(**words):
    return ClusterSpec.parse(
        **{"hosts": 3, "rate": "100Mbit", "cpu": "200%", "delay": "1ms", "jitter": "1ms"} | words
    )


def test_a_file_becomes_changes_in_order_of_time():
    read = Scenario.parse(TEXT)
    assert [scene.after for scene in read.scenes] == ["step 10"]
    assert read.needs_packets
    assert [(at_s, change.describe()) for at_s, change in read.changes] == [
        (1.5, "host0 rate 10 Mbit/s"),
        (20, "host1 cores 25 %"),
        (20, "host2 cores 25 %"),
        (20, "all loss 1 %"),
        (30, "all delay 5 ms"),
        (31, "host1 link down"),
    ]
    read.check(spec())
    changed = spec()
    for _, change in read.changes:
        changed = change.applied_to(changed)
    assert changed.cores == (2, 0.25, 0.25)
    assert changed.rate_bits_per_s == changed.port_rate_bits_per_s == (1e7, 1e8, 1e8)
    assert changed.loss_ratio == (0.01,) * 3
    assert (changed.delay_s, changed.jitter_s) == (0.005, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "x holds no change; a line is a time, hosts and a change, for example: 20s host1 cores 25%"),
        ("# nothing", "x holds no change"),
        ("1s host0 cores 50%\n20 host1 cores 25%", "x, line 2: the time 20 has no unit"),
        ("soon host1 cores 25%", "x, line 1: the time 'soon' is not a time"),
        ("-1s host1 cores 25%", "lies before the start"),
        ("1s host1 cores", "x, line 1: a line is a time"),
        ("1s node1 cores 25%", "'node1' names no hosts; write host1, host0,host2, all or host1/link0"),
        ("1s host1/1 rate 1Mbit", "'host1/1' names no hosts"),
        ("1s host1/link1 cores 25%", "'cores' is not a property of a link"),
        ("1s host1, cores 25%", "'host1,' names no hosts"),
        ("1s host1 speed 25%", "'speed' is nothing that can change; these can: cores 50%"),
        ("1s host1 cores 25", "cores 25 has no unit"),
        ("1s host1 rate 1Gbps", "two ways"),
        ("1s host1 link maybe", "link 'maybe' is neither up nor down"),
        ("1s host1 cores 50%\nafter", "x, line 2: `after WORDS` says what a rank's output has to contain"),
        ("after step", "x holds no change below `after step`"),
        ("after a\n1s host1 cores 50%\nafter b", "x holds no change below `after b`"),
    ],
)
def test_a_line_that_is_wrong_is_named(text, says):
    with pytest.raises(ConfigurationError) as caught:
        Scenario.parse(text, "x")
    assert says in str(caught.value)


def test_one_link_of_a_host_or_of_all_may_change():
    """What the cluster is said to be stays: it has no words for links that differ."""
    read = Scenario.parse("0s all/link1 rate 40Mbit\n1s host2/link0 loss 5%\n2s host1/link1 link down")
    assert [change.describe() for _, change in read.changes] == [
        "all/link1 rate 40 Mbit/s",
        "host2/link0 loss 5 %",
        "host1/link1 link down",
    ]
    cluster = spec(links=2)
    assert [change.applied_to(cluster) for _, change in read.changes] == [cluster] * 3
    with pytest.raises(ConfigurationError, match=r"a host has no link 1; it has 1\."):
        read.check(spec())


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        (
            "1s host3 cores 25%",
            {},
            "'1 s host3 cores 25 %' is not possible: there is no host3: there are host0 to host2",
        ),
        ("1s host1 cores 0%", {}, "--cpu 0% is not possible"),
        ("1s host1 cores 50%", {"cpu": None}, "Pass --cpu, for example --cpu 200%"),
        ("1s host1 rate 1bit", {}, "cannot be emulated"),
        ("1s host1 rate 1Mbit", {"rate": None, "delay": None, "jitter": None}, "Pass --rate"),
        ("1s host1 rate 1Mbit", {"mark": "10KiB"}, "mark or drop by their backlog cannot change"),
        ("1s host1 loss 100%", {}, "--loss 100% is not possible"),
        ("1s host1 loss 1%", {"offload": True}, "--loss and --offload do not go together"),
        ("1s host1 delay 5ms", {}, "write all in place of the host"),
        ("1s all delay 5ms", {"delay": None, "jitter": None}, "Pass --delay"),
        ("1s all delay 11s", {}, "--delay 11s is not possible"),
    ],
)
def test_what_no_cluster_can_be_no_change_brings_about(text, words, says):
    with pytest.raises(ConfigurationError) as caught:
        Scenario.parse(text).check(spec(**words))
    assert says in str(caught.value)


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigurationError, match="--scenario no/file cannot be read: No such file"):
        Scenario.read("no/file")


def test_the_clock_starts_with_what_a_rank_says():
    """The first change waits for the words; an end in between leaves the rest undone, and says so."""
    done, told, first = [], [], threading.Event()

    def apply(change):
        done.append(change)
        first.set()

    read = Scenario.parse("after step 3\n0s host0 cores 50%\n600s host0 cores 100%")
    with Director(read, apply, told.append) as director:
        director.hear("step 2")
        assert not done
        director.hear("rank 0: step 3 of 9")
        assert first.wait(20)
    assert done == [Change("cores", 0, 0.5)]
    assert told[0].endswith(" s: host0 cores 50 %")
    assert told[1:] == ["1 of 2 change(s) did not happen: the job had ended"]


def test_each_scene_waits_for_its_own_words_and_for_the_scene_before_it():
    """Words of a later scene that come too early start nothing; each scene has a clock of its own."""
    done, told = [], []
    changed = threading.Semaphore(0)

    def apply(change):
        done.append(change.value)
        changed.release()

    read = Scenario.parse(
        "0s host0 cores 90%\nafter begin\n0s host0 cores 50%\nafter half\n1ms host0 cores 20%\n0s host0 cores 40%"
    )
    assert [(scene.after, len(scene.changes)) for scene in read.scenes] == [
        (None, 1),
        ("begin", 1),
        ("half", 2),
    ]

    def say(director, line, values):
        for _ in range(1000):  # a scene's words count from when the one before it is done
            if done == values:
                return
            director.hear(line)
            changed.acquire(timeout=0.05)

    with Director(read, apply, told.append) as director:
        director.hear("half")  # of nothing yet
        assert changed.acquire(timeout=20)
        assert done == [0.9]
        say(director, "begin", [0.9, 0.5])
        assert done == [0.9, 0.5]
        say(director, "half", [0.9, 0.5, 0.4, 0.2])
        assert done == [0.9, 0.5, 0.4, 0.2]
    assert len(told) == 4

    done.clear()
    told.clear()
    with Director(read, apply, told.append) as director:
        say(director, "begin", [0.9, 0.5])
    assert told[-1] == "2 of 4 change(s) did not happen: no rank said 'half'"


def test_words_that_nobody_says_and_changes_that_fail():
    told = []
    read = Scenario.parse("after step 3\n0s host0 cores 50%")
    with Director(read, told.append, told.append) as director:
        director.hear("step 2")
    assert told == ["1 of 1 change(s) did not happen: no rank said 'step 3'"]

    def fail(_change):
        raise EmulationError("the laboratory is gone")

    told.clear()
    with Director(Scenario.parse("0s host0 link down"), fail, told.append) as director:
        director._thread.join(20)
    assert told[0] == "host0 link down failed: the laboratory is gone"

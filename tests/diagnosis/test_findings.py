"""What is said: cause, remedy with its price, links, all ranks, health; and what is left unsaid, and why."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from harness import made_runs
from harness.made_runs import MadeRun, always, busy_core, link_samples
from paceline.diagnosis import diagnose
from paceline.observe.run_records import BucketTiming, Health, HostFacts, Sample

COMPUTES = ("forward", "embed", "body", "head")


def computing(culprit, seconds):
    """A rank computes longer, in all its phases."""
    return lambda rank, _: dict.fromkeys(COMPUTES, seconds / 4 if rank == culprit else 0.0)


def of_culprit(culprit, facts):
    return lambda rank, _: facts if rank == culprit else HostFacts(cpu_s=0.03, queued_s=0.001)


def test_the_sentence_says_who_where_why_and_what_to_do():
    facts = HostFacts(cpu_s=0.03, queued_s=0.030, throttled_s=0.029)
    run = MadeRun(computing(3, 0.031), host=of_culprit(3, facts), hosts=("a", "a", "b", "b")).make()
    found = diagnose(run)
    assert found.words == found.finding.sentence
    assert found.words.startswith("Rank 3 (host b) is 3")
    for words in (
        " late in every step, in forward and backward alike, because its cgroup is throttled for 29 ms a step. ",
        "Without it a step takes 58.8 ms",  # its part in collectives is as much shorter as its work
        'Raise its CPU quota, or pass balance="auto" (predicted ',
    ):
        assert words in found.words
    balanced = found.finding.remedies[1].predicted
    assert found.finding.without.step_s < balanced.step_s < found.finding.step_s


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (HostFacts(0.03, 0.060, 0.055), "throttled"),  # which is within what it waited for a core
        (HostFacts(0.03, 0.060), "core shared"),
        (HostFacts(0.03, 0.001, major_faults=40), "disk"),
        (HostFacts(0.09, 0.001), "computes longer"),
        (HostFacts(0.03, 0.001), "waits"),
    ],
)
def test_the_cause_is_what_the_kernel_says_of_this_rank_and_not_of_others(facts, kind):
    assert diagnose(MadeRun(computing(1, 0.06), host=of_culprit(1, facts)).make()).finding.cause == kind


def in_a_crowd(waits_s, asleep=None, seen_by=()):
    """Every rank waits for a core in its forward; one may sleep for 30 ms in its optimizer besides."""
    return MadeRun(
        lambda rank, _: {"forward": waits_s[rank], "optimizer": 0.03 * (rank == asleep)},
        host=lambda rank, _: HostFacts(0.03, waits_s[rank]),
        samples=lambda rank: busy_core(812, "postgres", 0.6) if rank in seen_by else [],
    ).make()


def test_a_rank_that_waits_longest_for_a_core_in_a_crowd_is_there_by_chance():
    found = diagnose(in_a_crowd([0.030, 0.055, 0.025, 0.035]))
    assert found.finding is None
    assert "Each waits 32.5 ms a step for a core, none much longer than the others" in found.words
    assert diagnose(in_a_crowd([0.030, 0.080, 0.025, 0.035])).finding.cause == "core shared"


def test_a_process_on_its_core_alone_tells_a_rank_from_a_crowd():
    found = diagnose(in_a_crowd([0.030, 0.055, 0.025, 0.035], seen_by=(1,))).finding
    assert (found.rank, found.cause) == (1, "core shared")
    assert diagnose(in_a_crowd([0.030, 0.055, 0.025, 0.035], seen_by=(1, 2))).finding.kind == "all ranks"


def test_a_process_on_the_cores_of_all_delays_all():
    found = diagnose(in_a_crowd([0.030, 0.031, 0.029, 0.030], seen_by=(1,)))
    assert (found.finding.kind, found.finding.rank, found.finding.cause) == ("all ranks", None, "core shared")
    assert found.words.startswith("The 4 ranks of host a each wait 30 ms of 9")
    assert (
        "process 812 (postgres) takes 60% of one. Keep other processes off their cores (predicted"
        in found.words
    )
    assert diagnose(in_a_crowd([0.001] * 4, seen_by=(1,))).finding is None  # they do not wait


def test_waits_for_a_process_go_with_it_and_waits_for_ranks_stay():
    """Each waits for the process and for three others that compute 30 ms, as long as these compute."""
    found = diagnose(in_a_crowd([0.030] * 4, seen_by=(1,))).finding
    of_process = 0.6 / (0.6 + 3 * 0.03 / found.step_s)
    assert found.without.step_s == pytest.approx(found.step_s - of_process * 0.030, abs=0.001)
    alone = diagnose(in_a_crowd([0.030, 0.055, 0.025, 0.035], seen_by=(1,))).finding
    longest_s = 0.035 * (1 - 0.6 / (0.6 + 3 * 0.03 / alone.step_s))
    assert alone.without.step_s == pytest.approx(alone.step_s - 0.055 + longest_s, abs=0.003)


def test_a_rank_that_is_late_in_a_crowd_is_told_from_those_that_wait_for_a_core():
    found = diagnose(in_a_crowd([0.030, 0.055, 0.025, 0.035], asleep=3)).finding
    assert (found.rank, found.phase, found.cause) == (3, "optimizer", "waits")
    assert found.delay_s == pytest.approx(0.030, abs=0.004)


def test_what_all_ranks_have_in_common_is_no_cause():
    run = MadeRun(computing(1, 0.06), host=lambda *_: HostFacts(0.03, 0.060, 0.055)).make()
    assert diagnose(run).finding.cause == "waits"


@pytest.mark.parametrize("kind", ["stolen", "disk"])
def test_what_is_sampled_of_a_host_counts_by_its_rate(kind):
    """Half of the time is lost on rank 1's host."""

    def looks(rank):
        lost = {f"{kind}_s": 0.5} if rank == 1 else {}
        return [
            Sample(at, float(at), 0.0, (), (), **{name: at * x for name, x in lost.items()})
            for at in range(4)
        ]

    assert diagnose(MadeRun(computing(1, 0.06), samples=looks).make()).finding.cause == kind


def test_the_process_on_its_core_is_named():
    run = MadeRun(
        computing(1, 0.06),
        host=of_culprit(1, HostFacts(0.03, 0.04)),
        samples=lambda rank: busy_core(812, "postgres", 0.6) if rank == 1 else [],
    ).make()
    assert "which process 812 (postgres) uses as well" in diagnose(run).words


def test_more_tokens_are_more_work():
    found = diagnose(
        MadeRun(computing(2, 0.03), tokens=lambda rank: 192 if rank == 2 else 128).make()
    ).finding
    assert found.cause == "more tokens"
    assert "it trains 192 tokens a step, the others 128" in found.sentence


@pytest.mark.parametrize("cause", ["garbage", "checkpoint"])
def test_some_phases_are_their_own_cause(cause):
    found = diagnose(MadeRun(always(0, cause, 0.04)).make()).finding
    assert found.cause == {"garbage": "garbage collection"}.get(cause, cause)


def test_shares_by_speed_do_not_help_against_a_wait():
    assert [x.words for x in diagnose(MadeRun(always(0, "forward", 0.04)).make()).finding.remedies] == [
        "Look at what it waits for there"
    ]


# ---- links


def meshed(num_ranks, rate, lost=lambda *_: 0):
    hosts = tuple("abcd"[:num_ranks])
    return MadeRun(
        num_ranks=num_ranks, hosts=hosts, samples=lambda rank: link_samples(rank, num_ranks, rate, lost)
    )


def test_links_that_are_alike_are_not_mentioned():
    assert diagnose(meshed(3, lambda *_: 15e6).make()).finding is None


@pytest.mark.parametrize("culprit", range(3))
def test_the_host_at_both_ends_of_whose_links_the_rate_is_low(culprit):
    found = diagnose(meshed(3, lambda a, b: 2.4e6 if culprit in {a, b} else 15e6).make()).finding
    assert (found.kind, found.rank, found.cause) == ("link", culprit, "slow link: rate")
    assert "carries 19.2 Mbit/s where others carry 120 Mbit/s" in found.sentence
    assert found.without.step_s < found.step_s


def test_the_connection_that_loses():
    found = diagnose(meshed(3, lambda *_: 15e6, lambda a, b: 200 * ((a, b) == (2, 0))).make()).finding
    assert (found.kind, found.rank, found.cause) == ("link", 2, "slow link: loss")
    assert "towards rank 0" in found.sentence


def test_a_connection_that_loses_much_is_slow_because_of_that():
    run = meshed(3, lambda *ends: 2.4e6 if 2 in ends else 15e6, lambda a, b: 200 * ((a, b) == (2, 0))).make()
    assert diagnose(run).finding.cause == "slow link: loss"


def test_the_host_that_is_farther_than_the_others():
    """5 ms of delay on the way to one host, both ways: a round trip of 10 ms, where others take half a millisecond."""

    def samples(rank):
        return link_samples(rank, 3, lambda *_: 15e6, rtt=lambda *ends: 0.0105 if 1 in ends else 0.0005)

    found = diagnose(MadeRun(num_ranks=3, hosts=("a", "b", "c"), samples=samples).make()).finding
    assert (found.kind, found.rank, found.cause) == ("link", 1, "slow link: delay")
    assert "takes 10.5 ms for a round trip, others 0.5 ms" in found.sentence


def test_of_two_hosts_nobody_can_say_whose_link_it_is():
    assert diagnose(meshed(2, lambda *_: 1e6).make()).finding is None


def test_what_stays_within_a_host_is_no_link(monkeypatch):
    monkeypatch.setattr(made_runs, "address", lambda rank, peer: f"127.0.0.1:{4000 + 10 * rank + peer}")
    assert diagnose(meshed(3, lambda a, b: 2.4e6 if 1 in {a, b} else 15e6).make()).finding is None


def test_a_slow_rank_is_not_taken_for_a_slow_link():
    made = replace(meshed(3, lambda *_: 15e6), extra=always(1, "forward", 0.06))
    assert diagnose(made.make()).finding.kind == "rank"


def test_of_a_late_rank_and_a_slow_link_the_one_that_costs_more_is_told(monkeypatch):
    monkeypatch.setattr(made_runs, "EXPOSED_S", 0.1)
    slow = meshed(3, lambda a, b: 2.4e6 if 2 in {a, b} else 15e6)
    for late_s, kind in ((0.02, "link"), (0.3, "rank")):
        assert diagnose(replace(slow, extra=always(1, "forward", late_s)).make()).finding.kind == kind


@pytest.mark.parametrize(
    ("slow", "direction", "words"),
    [
        ({(0, 2), (1, 2)}, "towards", "The link of rank 2 (host c) carries towards it 20 Mbit/s"),
        ({(2, 0), (2, 1)}, "from", "carries from it"),
        ({(0, 2), (1, 2), (2, 0), (2, 1)}, "both", "carries in both directions"),
    ],
)
def test_a_slow_direction_is_told_by_how_fast_data_arrive_at_best(slow, direction, words, monkeypatch):
    """Acknowledged bytes do not say it: they are as slow in both."""
    monkeypatch.setattr(made_runs, "EXPOSED_S", 0.1)

    def samples(rank):
        return link_samples(
            rank,
            3,
            lambda a, b: 2.5e6 if 2 in {a, b} else 15e6,
            peak=lambda *ends: 2.6e6 if ends in slow else 7e6,
        )

    found = diagnose(MadeRun(num_ranks=3, hosts=("a", "b", "c"), samples=samples).make())
    assert (found.finding.rank, found.finding.direction) == (2, direction)
    assert words in found.words
    assert "which direction of a link is slow" not in found.not_measured


def test_what_arrives_with_breaks_came_by_a_way_that_is_not_slow(monkeypatch):
    """It arrives at less than half of what others see, but at four times its mean."""
    monkeypatch.setattr(made_runs, "EXPOSED_S", 0.1)
    peaks = {0: 9e6, 1: 9e6, 2: 2.6e6}

    def samples(rank):
        rate = lambda *ends: 2.5e6 if 2 in ends else 15e6  # noqa: E731
        return link_samples(rank, 3, rate, peak=lambda *ends: peaks[ends[1]] if 2 in ends else 2e7)

    found = diagnose(MadeRun(num_ranks=3, hosts=("a", "b", "c"), samples=samples).make()).finding
    assert (found.rank, found.direction) == (2, "towards")


def test_arrivals_alone_make_no_link_slow():
    """With small buckets few looks see anything; where its mean is as high as the others' it is not slow."""

    def samples(rank):
        rate = lambda *ends: 3.9e6 if 1 in ends else 4e6  # noqa: E731
        return link_samples(rank, 3, rate, peak=lambda *ends: 5e6 if 1 in ends else 20e6)

    assert diagnose(MadeRun(num_ranks=3, hosts=("a", "b", "c"), samples=samples).make()).finding is None


def test_in_a_ring_the_others_mean_falls_and_arrivals_tell():
    def samples(arrival):
        slow = lambda a, b: 4.5e6 if 2 in {a, b} else 6e6  # noqa: E731
        return lambda rank: link_samples(rank, 3, slow, peak=arrival)

    found = MadeRun(num_ranks=3, hosts=("a", "b", "c"), samples=samples(lambda *_: 20e6)).make()
    assert diagnose(found).finding is None
    found = samples(lambda _, target: 6e6 if target == 2 else 20e6)
    found = MadeRun(num_ranks=3, hosts=("a", "b", "c"), samples=found).make()
    assert (diagnose(found).finding.rank, diagnose(found).finding.direction) == (2, "towards")


def test_a_link_s_repaired_step_plays_the_buckets_at_the_others_rate():
    """Each step sends 60 kB in two buckets, the last of 4 of 9 parts: 27 kB at 15 MB/s are all that is exposed."""
    run = meshed(3, lambda a, b: 2.4e6 if 2 in {a, b} else 15e6).make()
    for rank in run.ranks:
        rank.samples[-1] = replace(rank.samples[-1], step=rank.samples[0].step + 40)
    work_s = median(max(x.work_s for x in row) for row in run.rows()[3:])
    last_s = 2.4e6 / 40 * 4 / 9 / 15e6
    assert diagnose(run).finding.without.step_s == pytest.approx(work_s + last_s, rel=1e-3)
    for rank in run.ranks:
        rank.sizes = ()  # recorded by an earlier version
    assert diagnose(run).finding.without is None


# ---- all ranks


def crowded(rank):
    return [Sample(at, float(at), 0.0, (), (), 0, 8, 3.0 * at) for at in range(4)]


def test_more_threads_than_cores_are_nobodys_fault():
    found = diagnose(MadeRun(samples=crowded, headers={"num_threads": 8}).make()).finding
    assert (found.kind, found.rank, found.cause) == ("all ranks", None, "too many threads")
    assert "compute with 32 threads on 4 cores" in found.sentence
    assert "OMP_NUM_THREADS=1" in found.sentence
    one_each = MadeRun(samples=crowded, num_ranks=5).make()  # on four cores: with fewer nothing is gained
    assert diagnose(one_each).finding is None


def test_many_small_buckets_that_are_waited_for():
    run = MadeRun(jitter=0.01).make()
    buckets = tuple(BucketTiming(i, 4096, 0.0, 0.0, 0.0, 0.0) for i in range(20))
    for rank in run.ranks:
        rank.steps[:] = [replace(x, buckets=buckets, ended_s=x.ended_s + 0.03) for x in rank.steps]
        for i, x in enumerate(rank.steps):  # all leave it later, together
            rank.steps[i] = replace(x, began_s=x.began_s, ended_s=x.ended_s)
    found = diagnose(run).finding
    assert (found.kind, found.cause) == ("all ranks", "buckets too small")


# ---- health


def test_a_rank_whose_parameters_part_from_the_others_is_named_with_the_step():
    run = MadeRun().make()
    for rank in run.ranks:
        rank.health += [Health(16, "aa"), Health(64, "bb" if rank.header.rank == 2 else "cc")]
    (words,) = diagnose(run).health
    assert words.startswith(
        "After step 64 the parameters of rank 2 differ from the other ranks' (still equal"
    )


def test_ranks_that_agree_are_healthy():
    run = MadeRun().make()
    for rank in run.ranks:
        rank.health += [Health(16, "aa", "bb")]
    assert diagnose(run).health == ()


def test_the_first_gradient_that_is_not_finite():
    run = MadeRun().make()
    run.ranks[1].health.append(Health(9, not_finite="head.weight"))
    run.ranks[2].health.append(Health(8, not_finite="body.weight"))
    (words,) = diagnose(run).health
    assert words.startswith("In step 8 rank 2's own gradient of body.weight was not finite")
    for rank in run.ranks:
        rank.health.append(Health(7, not_finite="head.weight"))
    (words,) = diagnose(run).health
    assert words.startswith("In step 7 every rank's")
    assert "Which rank caused it is unknown" in words


# ---- silence


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (MadeRun(), "No rank and no link delays steps by 5% or more: 37 steps of "),
        (MadeRun(num_steps=9), "6 steps can be compared, and 12 are needed"),
        (MadeRun(num_ranks=1), "1 rank left records: there is no other rank to compare it with."),
        (MadeRun(num_ranks=0), "No rank left a record."),
    ],
)
def test_silence_says_why(made, words):
    found = diagnose(made.make())
    assert found.finding is None
    assert found.words.startswith(words)


def test_clocks_that_step_by_an_hour_change_nothing():
    """Of a rank's clock only differences within a step count."""
    run = MadeRun(always(1, "forward", 0.06)).make()
    before = diagnose(run).finding
    for i, x in enumerate(run.ranks[0].steps[20:], 20):
        moved = [replace(y, start_s=y.start_s + 3600, end_s=y.end_s + 3600) for y in x.intervals]
        marks = tuple((layer, at_s + 3600) for layer, at_s in x.gradients)
        times = {name: getattr(x, name) + 3600 for name in ("began_s", "work_ended_s", "ended_s")}
        run.ranks[0].steps[i] = replace(x, intervals=tuple(moved), gradients=marks, **times)
    after = diagnose(run).finding
    assert (after.rank, after.phase) == (before.rank, before.phase)
    assert after.delay_s == pytest.approx(before.delay_s)

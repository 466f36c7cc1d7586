"""The papers' studies: variants compute the mean, calibrations hold, findings follow from samples, commands run."""

import dataclasses
import json
import os
import socket
import struct

import pytest
import torch.distributed as dist

from harness.ranks import pool
from harness.terminal import paceline
from paceline.errors import ConfigurationError
from paceline_lab.bench.layer_profile import LayerTime, Profile, default_profile
from paceline_lab.bench.limit import ring_bytes_per_rank
from paceline_lab.bench.protocol import WrongAnswerError
from paceline_lab.bench.timed_model import gradient_bytes
from paceline_lab.experiments.papers import variants
from paceline_lab.experiments.papers.cluster_study import (
    Block,
    StudyConfig,
    StudyOptions,
    VariantOutcome,
    check,
    measure,
)
from paceline_lab.experiments.papers.ddp_scale_figures import SkippedSyncStudy
from paceline_lab.experiments.papers.mlstm_scaling import (
    METHODS,
    ScalingOptions,
    ScalingStudy,
    link_label,
    published_overheads_s,
)
from paceline_lab.experiments.papers.published import BREAKDOWN, GOODPUT, realisable, scale_for
from paceline_lab.experiments.papers.variants import Phases, Variant, VariantTrainee
from paceline_lab.experiments.registry import EXPERIMENTS

TINY = Profile("tiny", "a test", tuple(LayerTime(f"l{i}", ((8, 5), (3,)), 0.0, 0.0) for i in range(6)), 0.0)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="emulated hosts need root here")


def measured(rank, num_ranks, blocks, num_rounds):
    """Outcomes, and this rank's own last word on whether gradients are the mean."""
    return measure(StudyConfig(blocks, num_rounds), bool)


SETTINGS = [{}, {"half": True}]
WITH_BUCKETS = [{"sync_every": 3}, {"num_groups": 3}, {"cap_mb": 0.0}]
CASES = [(side, setting) for side in ("ours", "torch") for setting in SETTINGS + WITH_BUCKETS]
CASES += [("after", setting) for setting in SETTINGS]  # one all-reduce has neither buckets nor groups


@pytest.mark.processes
@pytest.mark.parametrize(
    ("num_ranks", "cases"), [(2, [(side, {}) for side in ("ours", "torch", "after")]), (3, CASES)]
)
def test_every_variant_computes_the_mean(num_ranks, cases):
    """Also with the last rank left out, and over several groups; a step has a time for every round and turn."""
    variants = tuple(Variant(side, num_ranks, **setting) for side, setting in cases)
    outcomes = pool(3).run(measured, (Block("tiny", TINY, 1.0, (Variant("none", num_ranks), *variants)),), 2)
    assert [x.per_rank for x in outcomes[2]] == [x.per_rank for x in outcomes[0]]
    check(outcomes[0])
    alone, *others = outcomes[0]
    for variant, found in zip(variants, others, strict=True):
        assert found.error <= (2e-3 if variant.half else 0.0 if num_ranks == 2 else 1e-6), variant
        assert len(found.per_rank) == num_ranks
        assert len(found.steps_s) == len(alone.steps_s) == 4


def test_a_wrong_mean_is_refused():
    """Times of a side that does not synchronize would mean nothing."""
    outcome = VariantOutcome("tiny", Variant("ours", 2), (), 0, 1, error=0.5)
    with pytest.raises(WrongAnswerError, match=r"0\.5 away from the mean"):
        check([outcome])


@pytest.mark.lab
@pytest.mark.processes
def test_caps_cut_resnet50_as_torch_would():
    """The scaled model has as many buckets as the real one: torch's rule on the order of readiness."""
    profile = default_profile("resnet50").taking(0.0)
    for cap, buckets in ((0.0, 161), (5.0, 13), (10.0, 9), (25.0, 5), (50.0, 3)):
        variants = tuple(Variant(side, 2, cap_mb=cap) for side in ("torch", "ours"))
        for outcome in pool(2).run(measured, (Block("resnet50", profile, 64.0, variants),), 1)[0]:
            # Rounding the first size up moves a border at most.
            assert abs(outcome.num_buckets - buckets) <= (cap > 0), cap


def collectives_by_group(rank, num_ranks, side):
    """How many collectives each of three groups has performed during two steps, its own barriers included."""
    groups = [dist.new_group(list(range(num_ranks))) for _ in range(3)]
    trainee = VariantTrainee(Variant(side, num_ranks, cap_mb=0.0, num_groups=3), TINY, 1.0, groups)
    trainee.step()  # torch cuts its buckets anew
    before = [group._get_sequence_number_for_group() for group in groups]
    for _ in range(2):
        trainee.step()
    return [group._get_sequence_number_for_group() - n for group, n in zip(groups, before, strict=True)]


@pytest.mark.processes
@pytest.mark.parametrize("side", ["ours", "torch"])
def test_groups_take_turns(side):
    """Twelve buckets a step: each group gets a third of them; the first also has a barrier before each step."""
    for first, *others in pool(2).run(collectives_by_group, side):
        assert min(first - 2, *others) >= 8
        assert max(first - 2, *others) - min(first - 2, *others) <= 1


def test_a_cap_is_on_every_connection_to_another_address():
    """And only there; lifting it lifts it."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.socket() as far, socket.socket() as near:
        far.bind(("127.0.0.2", 0))
        for connection in (far, near):
            connection.connect(listener.getsockname())
        accepted = [listener.accept()[0] for _ in range(2)]

        def rates():
            words = [x.getsockopt(socket.SOL_SOCKET, variants._SO_MAX_PACING_RATE, 8) for x in (far, near)]
            return [struct.unpack("=Q", word)[0] for word in words]

        assert variants.cap_flows(1e6) == 2  # both ends are ours
        assert rates() == [1_000_000, 2**64 - 1]
        variants.cap_flows(None)
        assert rates() == [2**64 - 1] * 2
        for connection in accepted:
            connection.close()


def test_the_scale_makes_communication_as_long_as_published():
    profile = default_profile("bert").taking(0.4)
    scale = scale_for(profile, 8, 12.5e6, 0.94)
    seconds = ring_bytes_per_rank(8, gradient_bytes(profile)) / scale / 12.5e6 / GOODPUT
    assert seconds == pytest.approx(0.94 * 0.4)
    assert scale_for(profile, 8, 1e15, 0.94) == 1.0  # never enlarges a model


def test_what_is_ready_last_cannot_hide():
    """BERT's words are a fifth of all bytes and come last; an mLSTM's matrices are ready when backward is over."""
    found = {name: realisable(default_profile(name), 0.94) for name in ("resnet50", "bert", "mlstm-4k")}
    assert found == pytest.approx({"resnet50": 1.0, "bert": 0.766, "mlstm-4k": 0.03}, abs=0.01)


def test_the_published_shares_are_those_of_the_text():
    """84 to 96 % of the ideal gain."""
    realised = sorted(published.realised for published in BREAKDOWN.values())
    assert [round(share, 2) for share in realised] == [0.84, 0.85, 0.96, 0.96]


def outcome(block, variant, step_s, communication_s=0.0, sent_bytes=0):
    """What a variant would bring home whose steps all take so long."""
    rest = step_s - communication_s
    phases = Phases([rest / 3], [rest * 2 / 3], [communication_s], [0.0])
    return VariantOutcome(block, variant, (phases,) * variant.num_ranks, sent_bytes, 1, 0.0)


def test_skipping_is_set_against_exposed_time_divided():
    """Steps made of 1 s of computing and 1/n s of waiting save what is expected: 25, 37 and 44 %."""
    study = SkippedSyncStudy()
    outcomes = []
    for block in ("NCCL-like", "Gloo-like"):
        outcomes.append(outcome(block, Variant("none", 8), 1.0))
        for n in (1, 2, 4, 8):
            outcomes += [
                outcome(block, Variant(side, 8, sync_every=n), 1 + 1 / n) for side in ("torch", "ours")
            ]
    found = study.find(outcomes, study.defaults).summaries["NCCL"]
    assert found["ours"] == pytest.approx([1, 0.75, 0.625, 0.5625])
    assert found["expected"] == pytest.approx(found["ours"])


def scaling_findings(communication_s):
    """What the mLSTM study says if computing takes 1 s and an all-reduce `communication_s[workload, rate]`."""
    options = dataclasses.replace(ScalingStudy.defaults, counts=(1, 4), num_ranks=4)
    outcomes = []
    for rate in options.rates:
        for name in options.workloads:
            outcomes.append((link_label(rate), outcome(name, Variant("none", 1), 1.0)))
            for side, half in METHODS.values():
                extra_s = communication_s[name, rate]
                made = outcome(
                    name, Variant(side, 4, half=half), 1 + extra_s, extra_s, sent_bytes=2 if half else 4
                )
                outcomes.append((link_label(rate), made))
    return ScalingStudy().find(outcomes, options)


def test_the_mlstms_claims_are_decided_by_the_figures():
    """Communication that only the link's rate decides: faster links win, size does not. A fixed cost: size wins."""
    cases = [(name, rate) for name in ("mlstm-4k", "mlstm-8k") for rate in (10.0, 1.0)]
    of_rate = scaling_findings({(name, rate): 1 / rate for name, rate in cases})
    assert [note.rpartition(": ")[2] for note in of_rate.notes[3:5]] == ["yes", "no, or less than 2 points"]
    fixed = scaling_findings({(name, rate): 0.4 if name == "mlstm-4k" else 0.1 for name, rate in cases})
    assert [note.rpartition(": ")[2] for note in fixed.notes[3:5]] == ["no, or less than 2 points", "yes"]
    assert fixed.summaries["speed_up"]["mlstm-8k, rate 10"]["Paceline, 16 bits"] == [(1, 1.0), (4, 4 / 1.1)]
    assert all("= 0.50" in row[-1] for row in fixed.rows)


def test_the_studys_own_curves_hide_a_fixed_cost():
    """By hand: 0.165 s and 0.224 s for 3.96 times the bytes leave 0.145 s that no byte explains."""
    found = published_overheads_s()
    assert found == pytest.approx({"4k": 0.165, "8k": 0.224, "fixed": 0.145}, abs=2e-3)


def test_scaling_keeps_the_studys_proportions():
    """On the slowest link the first model's reduction in 16 bits takes the published part of computing."""
    options = ScalingStudy.defaults
    profile = options.model("mlstm-4k")
    slowest = options.link(1.0).rate_bits_per_s[0] / 8
    seconds = ring_bytes_per_rank(16, gradient_bytes(profile) // 2) / options.scale() / slowest / GOODPUT
    assert 1 / (1 + seconds / 0.25) == pytest.approx(92.6 / 128)
    assert options.link(10.0).rate_bits_per_s[0] == 10 * options.link(1.0).rate_bits_per_s[0]
    large = options.model("mlstm-8k")
    assert (large.forward_s + large.backward_s) / 0.25 == pytest.approx(3.71 / 0.94)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sloth",), "No such command 'sloth'"),
        (("paper-overlap", "--ranks", "1"), "--ranks 1 is not possible"),
        (("paper-overlap", "--rate", "100"), "--rate 100 has no unit"),
        (("paper-overlap", "--rounds", "0"), "--rounds 0 measures nothing"),
        (("paper-overlap", "--compute-s", "-1"), "--compute-s -1.0 is not possible"),
        (("scaling", "--rates", "ten"), "--rates 'ten' has to be like 10:1"),
        (("scaling", "--rates", "1:1"), "different numbers"),
        (("scaling", "--ranks", "0,2"), "from 1 on"),
        (("scaling", "--workload", "mlstm-5k"), "there is no workload 'mlstm-5k'"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_refused(words, said, capsys):
    """Exit 2 and one paragraph, before a host is built. In this process: nothing is started."""
    from paceline.cli import main

    with pytest.raises(SystemExit) as left:
        main(["study", *words])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_every_study_has_a_quick_form_of_two_ranks():
    studies = [each.main().__self__ for each in EXPERIMENTS.values() if ":" in each.module]
    assert {study.quick.num_ranks for study in studies} == {2}
    assert len(studies) == 6
    with pytest.raises(ConfigurationError, match="--ranks 65"):
        StudyOptions(65, "1Gbit", 1.0, 1)
    with pytest.raises(ConfigurationError, match="--ranks"):
        ScalingOptions.parse(ScalingStudy.defaults, "mlstm-4k", "10:1", "1")


@pytest.mark.lab
@needs_root
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_study_as_a_user_types_it(tmp_path):
    """On real emulated hosts: half precision sends half the bytes, and the report says where it was measured."""
    done = paceline(
        "study", "scaling", "--quick", "--rates", "1", "--workload", "mlstm-8k", "--json", cwd=tmp_path
    )
    assert done.code == 0, done.err
    record = json.loads(done.out)
    ((_, half, single),) = record["summaries"]["sent_bytes"]["mlstm-8k, rate 1"]
    assert 0.45 < half / single < 0.6
    assert "timed compute" in " ".join(record["notes"])
    assert record["place"]["TCP"] == "cubic"
    assert record["samples"]["outcomes"][-1]["error"] < 2e-3
    assert (tmp_path / "paceline-report" / "study-mlstm-scaling-quick.json").exists()

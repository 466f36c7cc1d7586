"""Which tests are quick, which are long tests of `lab`, and which are begun first."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from harness import byte_code, warm

# An example, and finding one, may take as long as the machine takes for it. They are the same every time, so that what
# one machine finds red is red on others; `--hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile(
    "explore", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("paceline", hypothesis.settings.get_profile("explore"), derandomize=True)
hypothesis.settings.load_profile("paceline")

# Commands, clusters, timeouts, compilers; and what takes more than a few seconds of a processor.
NOT_QUICK = {
    "bench",
    "comm",
    "demo",
    "emulation",
    "experiments",
    "harness",
    "journeys",
    "launch",
    "process_group",
    "recipes",
    "integrations",
} | {
    "test_aborted_backward.py",
    "test_adasum_lost_peer.py",
    "test_bounded_loss_lost_peer.py",
    "test_forward_overlap_lost_peer.py",
    "test_lost_peers.py",
    "test_non_finite.py",
    "test_parameter_servers_lost.py",
    "test_adasum_optimizer.py",
    "test_adasum_over_ranks.py",
    "test_auto.py",
    "test_c10d.py",
    "test_compile.py",
    "test_compressed_training.py",
    "test_forward_overlap.py",
    "test_forward_overlap_readers.py",
    "test_local_steps.py",
    "test_lost.py",
    "test_mlstm_streams.py",
    "test_noise_scale.py",
    "test_parameter_servers.py",
    "test_random_programs.py",
}

# What nothing in the product imports, and takes long: whole benchmarks, peers, large networks, papers' studies.
LAB = (
    "test_bounded_loss_schedules.py::test_thousands_of_schedules",
    "test_benchmarks_run.py::test_benchmark_reports",
    "test_benchmarks_run.py::test_adasum_benchmark_reports",
    "test_benchmarks_run.py::test_the_benchmark_of_optimizers_reports",
    "test_benchmarks_run.py::test_the_benchmark_of_collectives_reports",
    "svm/tests/test_benchmark.py::test_the_benchmark_reports_every_side",
    "svm/tests/test_benchmark.py::test_every_heuristic_is_counted_on_both_caches",
    "test_bench_command.py::test_peer_gets_the_mean",
    "test_bench_command.py::test_step_on_an_emulated_cluster",
    "test_real_workloads.py::test_workload_trains_on_two_ranks[resnet50]",
    "test_real_workloads.py::test_workload_trains_on_two_ranks[vgg16]",
    "test_studies.py::test_a_study_as_a_user_types_it",
    "test_docs.py::test_every_block_does_what_the_page_says[docs/guide/bench.md]",
    "test_docs.py::test_every_block_does_what_the_page_says[docs/guide/studies.md]",
    "test_docs.py::test_every_block_does_what_the_page_says[docs/guide/large-batch-study.md]",
    "test_large_batch_study.py::test_a_stopped_study_goes_on",
    "test_large_batch_study.py::test_the_large_batch_loses_without_its_rate_and_not_with_it",
    "test_large_batch_study.py::test_the_report_is_there_and_can_be_shown_again",
    "test_network_studies.py::test_the_command_simulates_compiled_what_is_simulated_interpreted",
    # With everything around it what tests/servers/test_lost.py, and the transports' and reductions' tests, try alone.
    "test_parameter_servers_lost.py::test_who_falls_silent_is_named",
    "test_bounded_loss_training.py::test_replicas_agree_and_every_loss_is_within_its_bound_and_reported",
)


def pytest_configure(config: pytest.Config) -> None:
    """A worker is a fork of the warm server, but the interpreters that tests start by its name are fresh ones."""
    if hasattr(config, "workerinput"):
        if (real := Path(sys.executable).with_name("real")).is_symlink():
            sys.executable = str(real.readlink())
    else:
        config.option.testrunuid = os.environ["PYTEST_XDIST_TESTRUNUID"] = uuid.uuid4().hex


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Workers are forks of the server (`warm.py`), which has what they would import: it is imported once."""
    rewriting = threading.Thread(target=byte_code.rewrite_tests, args=(config,))
    rewriting.start()
    byte_code.import_beside_the_server()
    for spec in (spec for spec in specs if spec.popen):
        spec.python = str(warm.folder() / "python")
    rewriting.join()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests are quick unless something says otherwise, and tried once unless they depend on the clock."""
    if any(name in item.nodeid for name in LAB):
        item.add_marker(pytest.mark.lab)
    if (
        "svm" not in item.path.parts
        and NOT_QUICK.isdisjoint((item.path.parent.name, item.path.name))
        and not item.get_closest_marker("slow")
    ):
        item.add_marker(pytest.mark.quick)
    if item.get_closest_marker("clock"):
        item.add_marker(pytest.mark.flaky(reruns=2))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest tests first on every worker: who runs out of tests then finds short ones.

    Each worker is handed an equal part of the list, in order. A module's long tests stay together; pages of the docs
    are apart; what numba compiles stays together, so that it is compiled once and not by two workers at a time.
    """
    num_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    groups: dict[object, list[pytest.Item]] = {}
    short: list[pytest.Item] = []
    for item in items:
        if group := _long_group(item):
            groups.setdefault(group, []).append(item)
        else:
            short.append(item)
    ordered: list[pytest.Item] = []
    for worker in range(num_workers):
        size = (len(items) - len(ordered)) // (num_workers - worker)
        long = list(itertools.chain(*list(groups.values())[worker::num_workers]))
        ordered += [*long, *short[: max(size - len(long), 0)]]
        del short[: max(size - len(long), 0)]
    items[:] = [*ordered, *short]


def pytest_collection_finish() -> None:
    """What was imported to collect the tests stays: no collection of garbage need look at it again."""
    gc.freeze()


def _long_group(item: pytest.Item) -> object:
    """What a long test stays together with; None for a short test."""
    if "svm" in item.nodeid:
        return "svm"
    if item.path.name == "test_docs.py":
        return item.nodeid
    is_long = (
        item.path.parent.name in {"journeys", "launch", "demo", "experiments"}
        or item.get_closest_marker("slow") is not None
    )
    return item.path if is_long else None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """For .ci/run, which may run what failed once more: all tests have run, and nothing but a test has failed."""
    if not hasattr(session.config, "workerinput") and getattr(session.config, "cache", None):
        session.config.cache.set("paceline/only_failures", exitstatus == pytest.ExitCode.TESTS_FAILED)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As many threads compute as in a rank."""
    import torch  # the server of `warm.py` has it already; the controller needs none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

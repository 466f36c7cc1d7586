"""Machines of a launch compare what they have before anything starts, here as threads with a store in memory."""

from __future__ import annotations

import argparse
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.run import _parse_rendezvous_config

from paceline.comm import TOKEN
from paceline.comm.sealed_store import SealedStore
from paceline.errors import ConfigurationError
from paceline.launch import machines, parse
from paceline.launch.machines import MachineRendezvous, MachinesDifferError, NodeInfo
from paceline.launch.rendezvous_endpoint import be_first, patience_s, without

AGREED = {"--nnodes": "3", "torch": "2.13.0", "Paceline": "0.1.0 (sources ab)", "the script": "train.py"}


def machine(name, num_ranks=1, *, num_machines=3, waits=True, latecomers=False, timeout_s=20.0, **facts):
    rank, arguments = facts.pop("node_rank", None), facts.pop("arguments", ())
    node = NodeInfo(name, num_ranks, AGREED | facts, rank, arguments)
    return MachineRendezvous(node, num_machines, waits, latecomers, "10.0.0.1:29400", "job", timeout_s)


def _inside(store):
    """Where machines of a launch with this id write."""
    return dist.PrefixStore("paceline launch job", store)


def hold(*coming, store=None, quiet_s=0.0, each_waits=False, notes=None):
    """Every machine's nodes, or the words of its error, and what was said meanwhile.

    With `each_waits` one comes only once the one before it has said that it waits.
    """
    store, notes = store or dist.HashStore(), [] if notes is None else notes
    come = threading.Barrier(len(coming))

    def one(number, rendezvous):
        come.wait()
        num_told = number if each_waits else 0
        while _inside(store).add("machines", 0) < number or len(notes) < num_told:  # in this order
            time.sleep(0.001)
        try:
            return [node.name for node in rendezvous.hold(store, is_server=number == 0, note=notes.append)]
        except MachinesDifferError as error:
            return str(error)

    with (
        mock.patch.object(machines, "_QUIET_S", quiet_s),
        mock.patch.object(machines, "_PAUSE_S", 0.005),
        mock.patch.object(machines, "_LINGER_S", 0.2),
        ThreadPoolExecutor(len(coming)) as threads,
    ):
        return list(threads.map(one, range(len(coming)), coming)), notes


def test_machines_that_fit_learn_of_each_other():
    """Those of another launch in the same store do not count."""
    store = dist.HashStore()
    hold(replace(machine("x", num_machines=1), job="another"), store=store)
    found, notes = hold(machine("a", 4), machine("b", 2), machine("c"), store=store, each_waits=True)
    assert found == [["a", "b", "c"]] * 3
    assert "all 3 machines are there, 7 ranks: a (4 rank(s)), b (2 rank(s)), c (1 rank(s))" in notes


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"torch": "2.11.0"}, "torch is 2.11.0 on c, 2.13.0 on a"),
        ({"Paceline": "0.1.0 (sources cd)"}, "Paceline is 0.1.0 (sources cd) on c, 0.1.0 (sources ab) on a"),
        ({"the script": "train.py (digest 12)"}, "the script is train.py (digest 12) on c"),
        ({"--nnodes": "4"}, "--nnodes is 4 on c, 3 on a"),
    ],
)
def test_every_machine_names_the_one_that_does_not_fit(facts, says):
    found, _ = hold(machine("a"), machine("b"), machine("c", **facts))
    for words in found:
        assert words.startswith("c does not fit a, where the launch began: "), words
        assert says in words


def test_another_number_of_machines_is_noticed_whoever_waits_for_more():
    """The first waits for two machines, the second for three: both hear of it, instead of one starting alone."""
    two, three = {"num_machines": 2, "--nnodes": "2"}, {"num_machines": 3}
    for first, second in ((two, three), (three, two)):
        found, _ = hold(machine("a", **first), machine("b", **second))
        assert all(words.startswith("b does not fit a") for words in found), found


def test_machines_of_one_name_are_told_apart():
    """Containers, or two shells of one machine: by the order in which they came."""
    found, _ = hold(machine("vm"), machine("vm"), machine("vm", torch="2.11.0"))
    for words in found:
        assert words.startswith("vm (number 3 to come) does not fit vm, where the launch began: "), words
    found, _ = hold(machine("vm"), machine("vm"), machine("c"))
    assert found[0] == ["vm", "vm (number 2 to come)", "c"]


def test_one_number_given_twice():
    found, _ = hold(machine("a", node_rank=0), machine("b", node_rank=1), machine("c", node_rank=1))
    assert all("b and c were both given --node-rank 1" in words for words in found), found


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 0, 1), (2, 1, 0), (1, 2, 0)])
def test_cards_are_told_apart_by_number_whichever_is_written_first(order):
    """A machine takes its number, then writes its node: the next may be quicker at that."""
    coming = [machine(name, node_rank=rank) for name, rank in (("a", 0), ("b", 1), ("c", 1))]
    store, words = dist.HashStore(), []
    reader = ThreadPoolExecutor(1)
    _inside(store).add("machines", 3)
    watches = replace(machine("d"), num_machines=4)
    with mock.patch.object(machines, "_PAUSE_S", 0.0), mock.patch.object(machines, "_LINGER_S", 0.0), reader:
        waiting = reader.submit(watches.hold, store, is_server=False, note=words.append)
        for number in order:
            SealedStore(_inside(store), "machines").set(f"machine {number}", coming[number].node.encode())
            time.sleep(0.02)  # so that it is read before the next is written
        with pytest.raises(MachinesDifferError, match="b and c were both given --node-rank 1"):
            waiting.result()


def test_a_machine_too_many_and_one_that_comes_back():
    store = dist.HashStore()
    hold(machine("a"), machine("b"), machine("c"), store=store)
    (late,), _ = hold(machine("d"), store=store)
    assert late.startswith(
        "d came too late: the 3 machine(s) of --nnodes have met at 10.0.0.1:29400 already (a (1"
    )
    (back,), _ = hold(machine("b", latecomers=True), store=store)
    assert back == ["a", "b", "c", "d", "b (number 5 to come)"]
    (other,), _ = hold(machine("b", latecomers=True, torch="2.8.0"), store=store)
    assert other.startswith("b (number 6 to come) does not fit a")


def test_machines_that_do_not_come():
    notes, looks = [], threading.local()

    def monotonic():
        """Leaps for a machine that has looked again since both had said that they wait."""
        looks.number = getattr(looks, "number", 0) + (len(notes) == 2)
        return time.monotonic() + 1000 * (looks.number > 1)

    coming = machine("a", timeout_s=500.0), machine("b", timeout_s=500.0)
    with mock.patch.object(machines, "time", mock.Mock(monotonic=monotonic, sleep=time.sleep)):
        found, _ = hold(*coming, each_waits=True, notes=notes)
    assert all(
        words.startswith("only 2 of 3 machines came to 10.0.0.1:29400 within 500 s: a (1") for words in found
    )
    assert "a (1 rank(s)), b (1 rank(s)) at 10.0.0.1:29400; 1 more of 3 machine(s) to come" in notes
    assert hold(machine("a", waits=False))[0] == [["a"]]  # an elastic job begins with whoever is there


def test_other_arguments_of_the_script_are_said_once():
    found, notes = hold(machine("a"), machine("b"), machine("c", arguments=("--epochs", "3")), quiet_s=60)
    assert found == [["a", "b", "c"]] * 3
    assert notes == ["c gives the script other arguments than a: '--epochs 3'"]


def test_a_stranger_is_not_counted_and_another_token_is_an_error():
    store = dist.HashStore()
    with mock.patch.dict(os.environ, {TOKEN: "ours"}):
        inside = _inside(store)
        inside.add("machines", 1)
        machines.SealedStore(inside, "machines").set("machine 0", machine("a").node.encode())
        inside.add("machines", 1)
        inside.set("machine 1", "0123 {}")
        found, notes = hold(machine("b", num_machines=2), store=store)
        assert found == [["a", "b"]]
        assert (
            "a process connected to 10.0.0.1:29400 without this job's PACELINE_TOKEN; it does not count"
            in notes
        )
    for nonsense in (
        "[1]",
        "{}",
        '{"name": 1}',
        machine("a\x1b[2J").node.encode(),
        machine("a", num_ranks="x").node.encode(),
    ):
        assert NodeInfo.decode(nonsense.encode()) is None, nonsense
    with mock.patch.dict(os.environ, {TOKEN: "theirs"}):
        (words,), _ = hold(machine("c"), store=store)
    assert words.startswith("c has another PACELINE_TOKEN than the machine where the launch began")


def test_a_card_says_what_this_machine_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)")
    args = parse(
        ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "train.py", "-x"]
    ).torchrun
    node = NodeInfo.of_this_machine(args, 3)
    assert NodeInfo.decode(node.encode().encode()) == node
    assert (node.num_ranks, node.node_rank, node.arguments) == (3, 1, ("-x",))
    assert "+" not in node.must_agree["torch"]
    (tmp_path / "train.py").write_text("print(2)")
    changed = NodeInfo.of_this_machine(args, 3)
    assert changed.must_agree["the script"] != node.must_agree["the script"]
    assert replace(changed, must_agree=node.must_agree) == node


@pytest.mark.parametrize(
    ("words", "backend", "is_first"),
    [
        (["--nnodes", "3"], "c10d", True),
        (["--nnodes", "3", "--rdzv-endpoint", "10.0.0.1:29400"], "c10d", False),
        (["--nnodes", "3", "--node-rank", "0"], "static", False),
        (["--nnodes", "3", "--master-addr", "10.0.0.1"], "static", False),
        (["--nnodes", "3", "--rdzv-backend", "etcd"], "etcd", False),
        (["--nnodes", "3", "--rdzv-endpoint", "file:///tmp/job"], "c10d", False),
        (["--nnodes", "1"], "static", False),
        (["--standalone"], "static", False),
        ([], "static", False),
    ],
)
def test_how_machines_find_each_other_follows_from_what_was_said(
    words, backend, is_first, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    found = parse([*words, "train.py"])
    args = found.torchrun
    assert (args.rdzv_backend, found.is_first) == (backend, is_first)
    assert (args.node_rank, args.master_addr) == (0, "10.0.0.1" if "--master-addr" in words else "127.0.0.1")
    assert patience_s(args) == 600
    args.rdzv_conf = "is_host=1, join_timeout=90"
    assert patience_s(args) == 90


def test_machines_with_numbers_wait_for_each_other_as_long_as_was_said(tmp_path, monkeypatch):
    """Torch's static rendezvous knows `timeout` alone, and then waited for 10 minutes whatever was said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    words = [
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=10.0.0.1",
        "--rdzv-conf=join_timeout=90",
        "train.py",
    ]
    args = parse(words).torchrun
    assert _parse_rendezvous_config(args.rdzv_conf)["timeout"] == "90"


def test_a_file_is_what_torch_s_own_options_would_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    args = parse(["--nnodes", "3", "--rdzv-endpoint", "file:///tmp/job", "train.py"]).torchrun
    assert (args.rdzv_endpoint, args.rdzv_conf) == ("/tmp/job", "store_type=file")


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("file://job", "is not a full path. Write three slashes, as in file:///shared/job1"),
        ("file:///no/such/folder/job", "/no/such/folder is not a folder in which a file job can be written"),
        ("file:///tmp", "is not a folder in which a file tmp can be written"),
    ],
)
def test_files_that_cannot_be_met_by(endpoint, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigurationError) as caught:
        parse(["--nnodes", "2", "--rdzv-endpoint", endpoint, "train.py"])
    assert says in str(caught.value)
    with pytest.raises(ConfigurationError, match="without --node-rank"):
        parse(["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "file:///tmp/job", "train.py"])


def test_the_first_machine_says_what_to_type(monkeypatch):
    monkeypatch.setenv(TOKEN, "sesame")
    args = argparse.Namespace(local_addr="127.0.0.1", rdzv_id="none", rdzv_conf="", rdzv_endpoint="")
    args.training_script_args = ["--local-addr", "a b"]
    notes = []
    be_first(
        args, ["--local-addr=127.0.0.1", "--nnodes", "3", "train.py", "--local-addr", "a b"], notes.append
    )
    assert args.rdzv_endpoint.startswith("127.0.0.1:")
    where = f"--rdzv-endpoint {args.rdzv_endpoint} --rdzv-id {args.rdzv_id}"
    assert notes[1].endswith(
        f" && PACELINE_TOKEN=sesame paceline run {where} --nnodes 3 train.py --local-addr 'a b'"
    )
    args.local_addr = "192.0.2.1"
    with pytest.raises(ConfigurationError, match=r"--local-addr 192.0.2.1 is not an address of this machine"):
        be_first(args, ["train.py"], notes.append)
    assert without(["-a", "1", "-b=2", "-c"], ("-a", "-b")) == ["-c"]

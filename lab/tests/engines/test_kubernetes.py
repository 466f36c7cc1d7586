"""Kubernetes: the recipes fit the published schemas, and a job bears what Kubernetes does to pods.

A pod is a network namespace of its own with a process namespace in it, so that its first process takes all others with
it. The addresses of a headless service come from a name server on another host.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from harness.engine_jobs import TrainingFolder, wait_until
from harness.terminal import REPOSITORY

pytestmark = [pytest.mark.engines, pytest.mark.processes, pytest.mark.timeout(3600)]

SERVICE, DOMAIN = "trainers", "jobs.svc.cluster.local"
NAME_SERVER = """
import json, pathlib, sys
from dnslib import A, QTYPE, RCODE, RR
from dnslib.server import BaseResolver, DNSServer

class Zone(BaseResolver):
    def resolve(self, request, handler):
        reply, asked = request.reply(), request.q
        found = json.loads(pathlib.Path(sys.argv[1]).read_text()).get(str(asked.qname).rstrip("."))
        if found is None:
            reply.header.rcode = RCODE.NXDOMAIN
        elif asked.qtype == QTYPE.A:
            for address in found:
                reply.add_answer(RR(asked.qname, QTYPE.A, rdata=A(address), ttl=1))
        return reply

DNSServer(Zone(), address=sys.argv[2], port=53).start()
"""


class Pods:
    """Pods of a Job with a headless service."""

    def __init__(self, hosts: list, folder: Path, command: Sequence[str]) -> None:
        *self.hosts, self._name_server = hosts
        self._command = [sys.executable, *command]
        self._zone = folder / "zone.json"
        self._record = folder / "record"
        self._record.mkdir()
        (folder / "name_server.py").write_text(NAME_SERVER)
        (folder / "resolv.conf").write_text(
            f"nameserver {self._name_server.address}\nsearch {DOMAIN}\noptions ndots:5 timeout:1\n"
        )
        self.publish(None)
        script = [sys.executable, str(folder / "name_server.py"), str(self._zone), self._name_server.address]
        self._name_server.start(script)
        for host in self.hosts:
            host.run("mount", "--bind", str(folder / "resolv.conf"), "/etc/resolv.conf")

    def publish(self, addresses: Sequence[str] | None) -> None:
        """Have the name of the service mean these addresses; None: it is not known."""
        new = self._zone.with_suffix(".new")
        new.write_text(json.dumps({} if addresses is None else {f"{SERVICE}.{DOMAIN}": addresses}))
        new.replace(self._zone)

    def start(self, index: int) -> subprocess.Popen[bytes]:
        """Start a pod, as the Job does again and again."""
        setting = {
            "PACELINE_PEERS": f"dns:{SERVICE}",
            "PACELINE_NODES": "2:3",
            "PACELINE_SHUTDOWN_TIMEOUT": "25",
            "PACELINE_TOKEN": "a secret",
            "PACELINE_JOB": "the Job's uid",
            "PACELINE_JOB_FOLDER": str(self._record),
            "PACELINE_LOCAL_ADDR": self.hosts[index].address,
            "PACELINE_JOIN_TIMEOUT": "240",
        }
        container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        return self.hosts[index].start([*container, *self._command], **setting)

    def send(self, index: int, number: signal.Signals) -> None:
        """Send a signal to the first process of the pod's container."""
        (first,) = (
            pid
            for pid in self.hosts[index].processes()
            if Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1]
            == "1"
        )
        os.kill(first, number)


def test_what_kubernetes_does_to_pods(
    hosts: list, training: TrainingFolder, tmp_path: Path, undisturbed: str
) -> None:
    if importlib.util.find_spec("dnslib") is None:
        pytest.skip("dnslib is not installed: make test-engines")
    pods = Pods(hosts, tmp_path, training.command)
    addresses = [host.address for host in pods.hosts]
    runs = [pods.start(index) for index in range(3)]

    # The name is known late, and at first it does not have all addresses.
    wait_until(
        lambda: all("waiting up to" in (tmp_path / f"out-{host.name}").read_text() for host in pods.hosts),
        training.what_happened,
    )
    pods.publish(addresses[:2])
    pods.publish(addresses)
    training.wait_for_ranks(3)
    assert not training.repeated()

    # A container is killed, as if memory had run out, and its agent with it. The name loses its address. After a
    # back-off the Job starts another pod, at an address that the name has only later.
    pods.send(1, signal.SIGKILL)
    pods.publish([addresses[0], addresses[2]])
    training.wait_for_ranks(2)
    assert runs[1].wait() != 0
    assert len(training.repeated()) <= 1, training.what_happened()
    pods.hosts[1].move_to("10.77.0.41")
    runs[1] = pods.start(1)
    training.wait_for_ranks(3)
    pods.publish([addresses[0], "10.77.0.41", addresses[2]])
    again = training.repeated()

    # A pod is evicted: SIGTERM, and 30 s until SIGKILL.
    pods.send(2, signal.SIGTERM)
    training.wait_for_ranks(2)
    assert runs[2].wait(30) == 143
    pods.publish([addresses[0], "10.77.0.41"])
    training.let_it_end()
    assert [runs[0].wait(), runs[1].wait()] == [0, 0]
    assert training.repeated() == again
    assert not any(log.saved for log in training.logs())
    training.check_once()
    assert training.parameters() == undisturbed

    # After its back-off the Job starts the evicted pod again, though all is done.
    assert pods.start(2).wait() == 0
    training.check_once()


def recipes() -> list[tuple[str, dict]]:
    folder = REPOSITORY / "examples" / "clusters"
    return [
        (f"{file.name} {each['kind']}", each)
        for file in sorted(folder.glob("*.yaml"))
        for each in yaml.safe_load_all(file.read_text())
    ]


@pytest.mark.parametrize("version", ["1.31", "1.34", "1.37"])
def test_the_recipes_fit_the_published_schemas(version: str) -> None:
    """Kubernetes' own schemas, strictly: a word that they do not have is an error. JobSet's holds a Job."""
    validator = pytest.importorskip("kubernetes_validate")
    for name, given in recipes():
        checked = [given]
        if given["kind"] == "JobSet":
            checked = [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "metadata": {"name": each["name"]},
                    **each["template"],
                }
                for each in given["spec"]["replicatedJobs"]
            ]
        for each in checked:
            assert validator.validate(each, version, strict=True) == version, name
            each["spec"]["surprise"] = 1
            with pytest.raises(validator.ValidationError):
                validator.validate(each, version, strict=True)

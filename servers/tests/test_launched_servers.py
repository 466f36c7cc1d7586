"""`paceline run --servers` and `paceline serve` as a user types them: who starts, who ends, what is refused."""

import os
import signal
import time
from pathlib import Path

import pytest

from harness.terminal import alive, paceline, started
from paceline.comm import TOKEN
from paceline.errors import ConfigurationError
from paceline.launch import parse
from paceline_servers.handshake import RefusedError
from paceline_servers.link import Identity, ServerLink
from paceline_servers.local_servers import LocalServers, parse_servers

pytestmark = pytest.mark.processes

TRAIN = """\
import os, sys, torch, torch.distributed as dist
from paceline import DistributedDataParallel
from paceline_servers import ParameterServers
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 400), reduction=ParameterServers())
for step in range(100000 if "--long" in sys.argv else 2):
    model(torch.ones(2, 8)).sum().backward()
    if step == 1 and dist.get_rank() == 0:
        print("servers:", len(model.reduction.bytes_by_server[0]), os.environ["PACELINE_SERVERS"], flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def _servers_of(process):
    return {pid for pid, words in alive(process).items() if "paceline_servers" in words}


@pytest.mark.parametrize("victim", ["nobody", "server", "launcher"])
def test_servers_start_and_end_with_the_launch(script, victim):
    if victim == "nobody":
        done = paceline("run", "--servers", "2", "--nproc-per-node", "2", "train.py", cwd=script)
        assert done.code == 0, done.err
        assert "servers: 2 127.0.0.1:" in done.out
        return
    words = ["paceline", "run", "--servers", "2", "--nproc-per-node", "2", "train.py", "--long"]
    with started(words, script) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("servers: 2"), process.stderr.read()
        pids = sorted(_servers_of(process))
        assert len(pids) == 2
        os.kill(process.pid if victim == "launcher" else pids[0], signal.SIGKILL)
        if victim == "server":
            _, err = process.communicate(timeout=60)
            assert process.returncode == 1
            assert f"(process {pids[0]}) was killed by signal 9; then rank" in err, err
            assert "ServerLostError" in err
            assert "has closed the connection (" in err
        deadline_s = time.monotonic() + 30
        while alive(process) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not alive(process)


def test_what_cannot_be_is_refused_before_anything_starts(script):
    for words, said in (
        ("0", "starts no parameter server"),
        ("-1", "starts no parameter server"),
        ("5000", "starts no parameter server"),
        ("nowhere", "'nowhere' is not an address"),
        ("10.0.0.5:7000,10.0.0.6", "'10.0.0.6' is not an address"),
        ("10.0.0.5:70000", "is not an address"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            parse([f"--servers={words}", str(script / "train.py")])
    assert parse_servers("a:1,[::1]:2") == (0, ("a:1", "[::1]:2"))
    with (
        pytest.raises(ConfigurationError, match="did not start: see its own message"),
        LocalServers(1, (), "203.0.113.7", print),
    ):
        pass


def test_a_server_by_itself_makes_a_token_imports_no_torch_and_ends_on_a_signal(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    with started(["paceline", "serve"], tmp_path, cold=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        assert address.startswith("127.0.0.1:")
        assert "only ranks that know this token are let in" in process.stderr.readline()
        name, _, token = process.stderr.readline().split()[0].partition("=")
        assert name == TOKEN
        with pytest.raises(RefusedError):
            ServerLink([address], Identity(0, 1, "s", 60.0, ""))
        ServerLink([address], Identity(0, 1, "s", 60.0, token)).close(2.0)
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM


def test_a_token_that_is_given_is_not_printed(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, "sesame")
    with started(["paceline", "serve"], tmp_path, cold=True) as process:
        assert process.stdout is not None
        ServerLink([process.stdout.readline().strip()], Identity(0, 1, "s", 60.0, "sesame")).close(2.0)
        process.send_signal(signal.SIGTERM)
        assert "sesame" not in process.communicate(timeout=30)[1]

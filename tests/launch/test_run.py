"""`paceline run` as a user types it: torchrun's flags, errors that help, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

from harness.terminal import DEADLINE_S, REPOSITORY, alive, paceline, run, started
from paceline.cli import main
from paceline.launch import parse
from paceline.launch.watchdog import marked

pytestmark = pytest.mark.processes

HELLO = """\
import os, sys
words = " ".join(sys.argv[1:])
rank, ranks, threads = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"))
sys.stdout.write(f"rank {rank} of {ranks} says {words} on {threads}\\n")
"""
SLEEPS = """\
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
os.write(1, b"ready\\n")
time.sleep(600)
"""
DIES = """\
import os, signal, sys, time
if os.environ["RANK"] == "1":
    if sys.argv[1] == "raise":
        raise ValueError("the user's own mistake")
    if sys.argv[1] == "exit":
        sys.exit(7)
    os.kill(os.getpid(), getattr(signal, sys.argv[1], 40))
time.sleep(600)
"""


@pytest.fixture
def scripts(tmp_path):
    """A folder with a few small scripts."""
    (tmp_path / "hello.py").write_text(HELLO)
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    (tmp_path / "dies.py").write_text(DIES)
    return tmp_path


def _temporary_files(folder):
    return sorted(path.name for path in (folder / "tmp").iterdir())


def _refused(words, capsys):
    """Run the command in this process, which has torch loaded already; returns its one paragraph."""
    with pytest.raises(SystemExit) as left:
        main(["run", *words])
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paceline: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--nproc-per-node", "2"],
        ["--nproc_per_node=2"],
        ["--standalone", "--nnodes", "1", "--nproc-per-node", "2", "--max_restarts", "0"],
        ["--rdzv-backend=c10d", "--rdzv_endpoint=localhost:0", "--rdzv-id", "x", "--nproc-per-node=2"],
    ],
    ids=" ".join,
)
def test_every_rank_runs_the_script_with_its_own_arguments(flags, scripts):
    """Both spellings; what follows the script is the script's, even where it looks like ours."""
    cold = flags == ["--nproc-per-node", "2"]
    done = paceline("run", *flags, "hello.py", "--nproc-per-node", "9", "--", "x", cwd=scripts, cold=cold)
    assert done.code == 0, done.err
    says = "says --nproc-per-node 9 -- x on 1"
    assert sorted(done.out.splitlines()) == [f"rank 0 of 2 {says}", f"rank 1 of 2 {says}"]
    assert _temporary_files(scripts) == []


LISTENS = """\
import os, sys
from pathlib import Path
if "init" in sys.argv:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()  # who ends before all have connected ends their group
folder, = Path(os.environ["TMPDIR"]).glob("paceline-run-*")  # its name says who launched this
files = Path(f"/proc/{folder.name.split('.')[1]}/fd")
def target(fd):
    try: return os.readlink(fd)
    except OSError: return ""  # the launcher has closed it meanwhile
inodes = {link[8:-1] for link in map(target, files.iterdir()) if link.startswith("socket:")}
rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
listening = {row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
sys.stdout.write(f"listening on {sorted(listening)} master {os.environ['MASTER_ADDR']}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--standalone"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
        ["--rdzv-backend=static", "--master-addr=127.0.0.1", "--master-port=0"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--nnodes=1:2", "--local-addr=127.0.0.1"],
    ],
    ids=" ".join,
)
def test_stores_listen_on_one_address(flags, scripts):
    """With one machine nobody else can reach the job's stores. With several, loopback cannot be what is meant."""
    (scripts / "listens.py").write_text(LISTENS)
    limit = ["--rdzv-conf=last_call_timeout=1"] if "--nnodes=1:2" in flags else []
    use = [] if flags else ["init"]
    done = paceline("run", *flags, *limit, "--nproc-per-node=2", "listens.py", *use, cwd=scripts)
    assert done.code == 0, done.err
    loopback = "0100007F"
    if limit:
        assert "listens on every interface" in done.err
        assert loopback not in done.out
    else:
        assert done.out.splitlines() == [f"listening on ['{loopback}'] master 127.0.0.1"] * 2
        assert done.err == ""


def test_the_address_of_a_store(monkeypatch):
    """Its own name's; not loopback with several machines; a name that is not this machine's: everywhere."""
    from paceline.launch.stores import Listening

    notes = []
    one, several = Listening(1, notes.append), Listening(2, notes.append)
    assert one._place("localhost") == one._place("192.0.2.1") == "127.0.0.1"
    assert one._place("127.0.1.1") == "127.0.1.1"
    assert several._place("192.0.2.1") is None
    assert several._place("localhost") is None
    assert len(notes) == 1
    monkeypatch.setattr("paceline.launch.stores._is_mine", lambda _address: True)
    assert several._place("192.0.2.1") == "192.0.2.1"


def test_who_left_the_file_of_a_meeting_does_not_write_it_again(tmp_path, monkeypatch):
    """Torch's store writes when it is destroyed. The last to leave may have removed the file by then."""
    from paceline.launch.stores import Listening

    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    meeting = tmp_path / "job"
    first, last = Listening(2, print), Listening(2, print)
    for launcher in (first, last):
        launcher.file_store(str(meeting))
    first.__exit__()
    left = meeting.read_bytes()
    del launcher, first
    gc.collect()
    assert meeting.read_bytes() == left
    last.__exit__()
    assert not meeting.exists()


def test_torchruns_environment_variables_work(scripts):
    assert "rank 1 of 2" in paceline("run", "hello.py", cwd=scripts, env={"PET_NPROC_PER_NODE": "2"}).out


def test_modules_and_programs(scripts):
    assert "rank 0 of 1 says a" in paceline("run", "-m", "hello", "a", cwd=scripts).out
    done = paceline("run", "--no-python", sys.executable, "hello.py", "b", cwd=scripts)
    assert "rank 0 of 1 says b" in done.out


def test_cores_are_shared_among_the_ranks_and_it_says_so(scripts):
    """Where OMP_NUM_THREADS is unset; torchrun would give every rank one thread and a banner."""
    code = "import os; os.environ.pop('OMP_NUM_THREADS'); from paceline.cli import main; main()"
    with started(["python", "-c", code, "run", "--nproc-per-node", "2", "hello.py"], scripts) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"on {threads}\n" in out
    assert err.startswith(f"paceline run: OMP_NUM_THREADS is not set; each rank gets {threads} ")
    assert err.count("\n") == 1


def test_logs_that_were_asked_for_are_kept(scripts):
    done = paceline("run", "--nproc-per-node", "2", "--redirects", "3", "hello.py", cwd=scripts)
    (kept,) = (scripts / "tmp").iterdir()
    assert f"logs are kept in {kept}" in done.err
    assert "rank 1 of 2" in "".join(path.read_text() for path in kept.rglob("stdout.log"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mim-ranks", "2", "hello.py"], "Did you mean --min-ranks? "),
        (["--nprocs", "2", "hello.py"], "unknown option --nprocs. Did you mean --nproc"),
        (["--wrld", "2", "hello.py"], "unknown option --wrld"),
        ([], "no script to run"),
        (["--nproc-per-node", "2"], "no script to run"),
        (["helo.py"], "there is no script helo.py"),
        (["helo.py"], "Did you mean hello.py?"),
        (["."], "it is a folder without __main__.py"),
        (["-m", "no_such_module_here"], "there is no module no_such_module_here"),
        (["--no-python", "no-such-program"], "there is no program no-such-program"),
        (["--no-python", "-m", "hello"], "Drop one of them"),
        (["--nproc-per-node", "0", "hello.py"], "starts no rank"),
        (["--nproc-per-node", "-1", "hello.py"], "starts no rank"),
        (["--nproc-per-node", "many", "hello.py"], "Pass a number of ranks"),
        (["--nnodes", "0", "hello.py"], "is not a number of machines"),
        (["--nnodes", "3:2", "hello.py"], "is not a number of machines"),
        (["--max-restarts", "-1", "hello.py"], "is negative"),
        (["--node-rank", "first", "hello.py"], "invalid int value: 'first'"),
    ],
)
def test_impossible_command_lines_are_refused_before_anything_starts(
    words, says, scripts, capsys, monkeypatch
):
    monkeypatch.chdir(scripts)
    assert says in _refused(words, capsys)


def test_a_refusal_leaves_no_traceback_in_a_real_process(scripts):
    done = paceline("run", "--nproc_per_nod3=2", "hello.py", cwd=scripts)
    assert done.code == 2
    assert "unknown option --nproc_per_nod3=2. Did you mean --nproc_per_node?" in done.err
    assert "Traceback" not in done.err


def test_too_many_ranks_for_the_devices(scripts, capsys, monkeypatch):
    """Rank i takes device i by convention; the last would find none, so say it first. Two devices are pretended."""
    monkeypatch.chdir(scripts)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    says = _refused(["--nproc-per-node", "3", "hello.py"], capsys)
    assert "3 ranks were asked for and this machine shows 2 accelerator(s)" in says
    assert "--share-devices" in says
    for words in (["--nproc-per-node", "2"], ["--share-devices", "--nproc-per-node", "3"]):
        assert parse([*words, "hello.py"]).num_local_ranks == int(words[-1])


def test_ranks_may_share_the_processor(scripts):
    """More ranks than cores is slow, not wrong; it is how a laptop tests four ranks."""
    ranks = len(os.sched_getaffinity(0)) + 1
    assert (
        f"rank {ranks - 1} of {ranks}"
        in paceline("run", f"--nproc-per-node={ranks}", "hello.py", cwd=scripts).out
    )


@pytest.mark.parametrize(
    "flags", [["--master-port"], ["--rdzv-backend", "c10d", "--rdzv-endpoint"]], ids=["static", "c10d"]
)
def test_a_port_in_use(flags, scripts):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        where = str(port) if flags == ["--master-port"] else f"localhost:{port}"
        done = paceline("run", "--nproc-per-node", "2", *flags, where, "hello.py", cwd=scripts)
    assert done.code == 1
    assert done.out == ""
    assert f"port {port} is in use" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "exited with code 1"),
        ("exit", "exited with code 7"),
        ("SIGKILL", "was killed by SIGKILL"),
        ("SIGSEGV", "was killed by SIGSEGV"),
        ("a real-time signal", "was killed by signal 40"),  # Python has no name for it
    ],
)
def test_a_rank_that_dies_is_named_in_one_paragraph(how, says, scripts):
    done = paceline("run", "--nproc-per-node", "3", "dies.py", how, cwd=scripts)
    assert done.code == 1
    *own, paragraph = done.err.splitlines()
    assert paragraph.startswith("paceline: rank 1 of dies.py (pid ")
    assert says in paragraph
    assert "2 other rank(s) on this machine were stopped" in paragraph
    assert "`paceline explain " in paragraph
    # The rank's own traceback is the user's; the launcher adds none of its own.
    assert "\n".join(own).count("Traceback") == (how == "raise")
    assert ("ValueError: the user's own mistake" in own) == (how == "raise")
    assert _temporary_files(scripts) == []


def _launcher(folder):
    """The process itself, not what stands for it (`warm_python.py`): the folder of its launch has its number."""
    (name,) = _temporary_files(folder)
    return int(name.split(".")[1])


def test_a_pipe_shows_a_ranks_line_while_the_rank_runs(scripts):
    """Torch writes the lines of `--tee` without flushing; into a pipe they would wait for 8 KiB or the end."""
    words = ["run", "--nproc-per-node", "2", "--tee", "3", "sleeps.py"]
    with started(["paceline", *words], scripts, cold=True) as process:
        line = process.stdout.readline()
        assert line.endswith("ready\n")
        assert process.poll() is None


@pytest.mark.parametrize(
    ("received", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["SIGINT", "SIGTERM", "SIGKILL"],
)
def test_a_stopped_launcher_leaves_nothing(received, code, scripts):
    """Not even a rank's own child in a session of its own, and not even after SIGKILL."""
    with started(["paceline", "run", "--nproc-per-node", "2", "sleeps.py"], scripts) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "ready\n"]
        assert len(alive(process)) >= 5  # launcher, two ranks, their two children
        os.kill(_launcher(scripts), received)
        assert process.wait(timeout=60) == code
        # After SIGKILL the watchdog does it, a moment later. Asking again until a deadline is not a sleep to get lucky.
        deadline_s = time.monotonic() + 30
        while (left := alive(process) or _temporary_files(scripts)) and time.monotonic() < deadline_s:
            select.select([], [], [], 0.05)
        assert not left
        if received != signal.SIGKILL:
            assert (
                f"{received.name} received; all 2 rank(s) of sleeps.py were stopped." in process.stderr.read()
            )


def test_the_example_trains_the_same_under_torchrun_and_paceline_run(tmp_path):
    words = ("--nproc-per-node", "2", str(REPOSITORY / "examples/train_digits.py"), "--epochs", "3")
    ours, theirs = (
        run([*launcher, *words], cwd=tmp_path)
        for launcher in (("paceline", "run"), ("torchrun", "--standalone"))
    )
    assert ours.code == theirs.code == 0, ours.err + theirs.err
    assert ours.out == theirs.out
    last = ours.out.splitlines()[-1]
    assert last.startswith("epoch 3: ")
    assert float(last.partition("accuracy ")[2].partition(" ")[0]) > 85


def test_what_a_killed_launch_left_goes_with_the_next(scripts):
    """Launcher and watchdog killed together leave a folder; not taken for it: one that runs, another container's."""
    environment = {"TMPDIR": str(scripts / "tmp")}
    (scripts / "tmp").mkdir(exist_ok=True)
    with started(["paceline", "run", "sleeps.py"], scripts, env=environment) as process:
        assert process.stdout.readline() == "ready\n"
        (left,) = _temporary_files(scripts)
        namespace, pid, _, launch_id = left.removeprefix("paceline-run-").split(".")
        assert Path(f"/proc/{pid}/ns/pid").readlink().name == f"pid:[{namespace}]"
        assert paceline("run", "hello.py", cwd=scripts).code == 0
        assert _temporary_files(scripts) == [left]  # its owner lives
        watchdogs = [int(p.name) for p in Path("/proc").glob("[0-9]*") if launch_id in _command(p)]
        for number in [*watchdogs, int(pid), *marked(launch_id)]:
            with contextlib.suppress(ProcessLookupError):  # it has ended because of another's end
                os.kill(number, signal.SIGKILL)
        process.wait()
    elsewhere = f"paceline-run-{int(namespace) + 1}.{pid}.1.{launch_id}"
    (scripts / "tmp" / elsewhere).mkdir()
    assert _temporary_files(scripts) == sorted([left, elsewhere])
    assert paceline("run", "hello.py", cwd=scripts).code == 0
    assert _temporary_files(scripts) == [elsewhere]


def _command(folder):
    with contextlib.suppress(OSError):
        return (folder / "cmdline").read_text()
    return ""

"""The cluster recipes: files that parse, and commands whose every option `paceline run` takes. No cluster is needed."""

import json
import os
import shlex
import signal
import subprocess

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

from harness.terminal import REPOSITORY
from paceline.elastic.guest import GuestSetting
from paceline.launch import parse

FOLDER = REPOSITORY / "examples" / "clusters"
STUBS = {
    # Prints the words it was called with, one a line; the others stand for what runs it.
    "paceline": 'printf "%s\\n" "$@"',
    "srun": 'shift; exec "$@"',
    "scontrol": "echo node7; echo node8",
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder with a training script, on a machine that shows 8 devices."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "bin").mkdir()
    for name, body in STUBS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    return tmp_path


def words_of(command, machine, **env):
    """What a shell command would call `paceline` with."""
    path = os.pathsep.join((str(machine / "bin"), os.environ["PATH"]))
    done = subprocess.run(
        command, env={**env, "PATH": path}, capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.splitlines()


def launched(words):
    """The launcher's view of these words."""
    assert words[0] == "run"
    arguments = parse(words[1:])
    assert arguments.script == "train.py"
    assert arguments.num_local_ranks == 8
    return arguments.torchrun


@pytest.mark.processes
def test_two_nodes(machine):
    for node in range(2):
        words = words_of(["bash", str(FOLDER / "two_nodes.sh"), "10.0.0.1", str(node)], machine)
        args = launched(words)
        assert (args.nnodes, args.node_rank, args.master_addr, args.master_port) == (
            "2",
            node,
            "10.0.0.1",
            29500,
        )
        assert args.training_script_args == ["--backend", "nccl"]


@pytest.mark.processes
def test_slurm(machine):
    env = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "41"}
    args = launched(words_of(["bash", str(FOLDER / "job.sbatch")], machine, **env))
    assert (args.nnodes, args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id) == (
        "2",
        "c10d",
        "node7:29500",
        "41",
    )
    script = (FOLDER / "job.sbatch").read_text()
    assert script.index("export SRUN_CPUS_PER_TASK") < script.index(
        "\nsrun "
    )  # it does not inherit --cpus-per-task
    options = [
        line for line in (FOLDER / "job.sbatch").read_text().splitlines() if line.startswith("#SBATCH")
    ]
    assert all(len(shlex.split(line)) == 2 and line.startswith("#SBATCH --") for line in options)


@pytest.mark.processes
def test_kubernetes(machine):
    service, job = yaml.safe_load_all((FOLDER / "indexed_job.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert spec["completions"] == spec["parallelism"]  # all nodes at once
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    for rank in range(spec["completions"]):
        env = {"JOB_COMPLETION_INDEX": str(rank)}
        args = launched(words_of([*container["command"], *container["args"]], machine, **env))
        assert int(args.nnodes) == spec["completions"]
        # Kubernetes names pod 0 of an indexed Job JOB-0, and finds it below the pods' subdomain.
        first = f"{job['metadata']['name']}-0.{pod['subdomain']}"
        assert (args.node_rank, args.master_addr, args.master_port) == (rank, first, 29500)
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == 8
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


def is_elastic(container, known):
    """Check that torchrun takes the command of a container, and Paceline its variables."""
    words = [*container["command"], *container["args"]]
    assert words[0] == "torchrun"
    args = get_args_parser().parse_args(words[1:])
    assert (args.nnodes, args.training_script, args.training_script_args[0]) == (
        "1",
        "train.py",
        "--checkpoint",
    )
    given = {each["name"]: each.get("value", "given") for each in container["env"]}
    mounted = {each["mountPath"] for each in container["volumeMounts"]}
    assert given["PACELINE_JOB_FOLDER"] in mounted
    setting = GuestSetting.of(given | {"PACELINE_JOB_FOLDER": ""}, "train.py")
    assert setting.peers == f"dns:{known}"
    assert {"PACELINE_TOKEN", "PACELINE_JOB", "PACELINE_LOCAL_ADDR"} <= given.keys()
    return setting


def check_elastic_pods(spec, known):
    """Check a Job whose pods may be lost; `known` is the name behind which they are."""
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    setting = is_elastic(container, known)
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == setting.most_nodes  # all nodes at once
    assert setting.least_nodes < setting.most_nodes
    assert setting.grace_s < pod["terminationGracePeriodSeconds"]
    # A budget of restarts for each pod, which Kubernetes has only with pods that are not restarted in place.
    assert (pod["restartPolicy"], "backoffLimitPerIndex" in spec, "backoffLimit" in spec) == (
        "Never",
        True,
        False,
    )
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    return pod


def test_kubernetes_elastic():
    service, job = yaml.safe_load_all((FOLDER / "elastic_job.yaml").read_text())
    pod = check_elastic_pods(job["spec"], service["metadata"]["name"])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)


def test_jobset_elastic():
    """JobSet makes the service, with its own name. These are the words of its version v1alpha2 that the recipe uses."""
    given = yaml.safe_load((FOLDER / "elastic_jobset.yaml").read_text())
    assert (given["apiVersion"], given["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert given["spec"].keys() == {"network", "failurePolicy", "replicatedJobs"}
    assert given["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert given["spec"]["failurePolicy"].keys() == {"maxRestarts"}
    (job,) = given["spec"]["replicatedJobs"]
    assert (job.keys(), job["replicas"], job["template"].keys()) == (
        {"name", "replicas", "template"},
        1,
        {"spec"},
    )
    check_elastic_pods(job["template"]["spec"], given["metadata"]["name"])


@pytest.mark.processes
@pytest.mark.parametrize("is_told", [True, False])
def test_slurm_elastic(machine, is_told):
    """A task that Slurm has told to end queues itself again, once its ranks have left. One that fails does not."""
    ranks = """
        trap 'echo left; exit 1' TERM
        echo "$PACELINE_PEERS $PACELINE_NODES $*"
        until [ -e told ]; do sleep 0.02; done
        exit 3
    """
    stubs = {"torchrun": ranks, "scontrol": 'echo "scontrol $*"'}
    for name, body in stubs.items():
        (machine / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (machine / "bin" / name).chmod(0o755)
    env = {"PATH": os.pathsep.join((str(machine / "bin"), os.environ["PATH"])), "SLURM_JOB_ID": "42"} | {
        "SLURM_ARRAY_JOB_ID": "42",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    command = ["bash", str(FOLDER / "elastic.sbatch")]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as job:
        assert (
            job.stdout.readline() == "slurm 2:4 --nnodes 1 --nproc-per-node 8 --max-restarts 100 train.py\n"
        )
        if is_told:
            job.send_signal(signal.SIGTERM)
        else:
            (machine / "told").touch()
        said = job.stdout.read()
    assert (said, job.returncode) == (("left\nscontrol requeue 42_3\n", 0) if is_told else ("", 3))
    script = (FOLDER / "elastic.sbatch").read_text()
    for option in ("--requeue", "--signal=B:TERM@25", "--array=0-3", "--nodes=1", "--open-mode=append"):
        assert f"#SBATCH {option}\n" in script


def test_container(machine):
    lines = [line for line in (FOLDER / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    instructions = [line.partition(" ")[::2] for line in lines]
    assert [name for name, _ in instructions] == ["FROM", "COPY", "RUN", "WORKDIR", "COPY", "CMD"]
    program, *words = json.loads(instructions[-1][1])
    assert program == "paceline"
    launched([word if word != "auto" else "8" for word in words])  # auto counts real devices


@pytest.mark.processes
@pytest.mark.parametrize("name", ["two_nodes.sh", "job.sbatch", "elastic.sbatch"])
def test_shell_files_parse(name):
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True, timeout=20)


def test_the_guide_names_every_file_and_says_what_was_not_run():
    text = (REPOSITORY / "docs" / "guide" / "clusters.md").read_text()
    assert all(f"examples/clusters/{path.name})" in text for path in FOLDER.iterdir())
    assert "None of them has been run on several machines" in text

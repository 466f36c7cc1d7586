"""The cluster recipes: files that parse, and commands whose every option `paceline run` takes. No cluster is needed."""

import json
import os
import shlex
import subprocess

import pytest
import torch
import yaml

from harness.terminal import REPOSITORY
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


def test_container(machine):
    lines = [line for line in (FOLDER / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    instructions = [line.partition(" ")[::2] for line in lines]
    assert [name for name, _ in instructions] == ["FROM", "COPY", "RUN", "WORKDIR", "COPY", "CMD"]
    program, *words = json.loads(instructions[-1][1])
    assert program == "paceline"
    launched([word if word != "auto" else "8" for word in words])  # auto counts real devices


@pytest.mark.processes
@pytest.mark.parametrize("name", ["two_nodes.sh", "job.sbatch"])
def test_shell_files_parse(name):
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True, timeout=20)


def test_the_guide_names_every_file_and_says_what_was_not_run():
    text = (REPOSITORY / "docs" / "guide" / "clusters.md").read_text()
    assert all(f"examples/clusters/{path.name})" in text for path in FOLDER.iterdir())
    assert "None of them has been run on several machines" in text

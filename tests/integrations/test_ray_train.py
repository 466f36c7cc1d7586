"""Ray Train's released package: workers wrap with ours on two nodes, report, lose a worker and go on.

Ray starts a job in half a minute, and is not among what `make` installs: `make test-newest` runs these.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # Ray's, about itself
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]
NUM_STEPS = 12


def import_paceline():
    """So that `init_process_group("paceline")` is known in a worker before Ray calls it."""
    import paceline  # noqa: F401


@pytest.fixture(scope="module")
def two_nodes():
    """Two of Ray's nodes on this machine, of one worker each."""
    import ray
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker can import a test
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, runtime_env={"worker_process_setup_hook": import_paceline})
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def fit(storage, train, *, backend="gloo", max_failures=0, **config):
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    run = RunConfig(
        storage_path=str(storage), name="run", failure_config=FailureConfig(max_failures=max_failures)
    )
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=run,
        torch_config=TorchConfig(backend=backend, timeout_s=60),
    )
    return trainer.fit()


def a_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))


def train_step(model, optimizer, step, rank):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def compare(config):
    """Train by Ray's own wrapper, by ours in one line, and by Ray's line under the patch; report whether bits agree."""
    import ray
    import torch.distributed as dist
    from ray.train.torch import prepare_model

    import paceline

    def trained(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        losses = [train_step(model, optimizer, step, dist.get_rank()) for step in range(NUM_STEPS)]
        return losses, [p.tolist() for p in model.parameters()]

    torchs = prepare_model(a_model())
    ours = paceline.DistributedDataParallel(prepare_model(a_model(), parallel_strategy=None))
    with paceline.patch_torch(compression="bf16"):
        patched = prepare_model(a_model())
    expected = trained(torchs)
    seen = {
        "backend": dist.get_backend(),
        "node": ray.get_runtime_context().get_node_id(),
        "same": trained(ours) == expected,
        "another": trained(patched) == expected,
        "kinds": [isinstance(model, paceline.DistributedDataParallel) for model in (torchs, ours, patched)],
    }
    everybody = [None, None]
    dist.all_gather_object(everybody, seen)
    report({"ranks": everybody})


def report(metrics, **states):
    """As Ray's guide does it: rank 0 gives its checkpoint, everybody reports."""
    import tempfile

    import ray.train
    from ray.train import Checkpoint

    with tempfile.TemporaryDirectory() as folder:
        torch.save(states, Path(folder, "states.pt"))
        first = ray.train.get_context().get_world_rank() == 0
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder) if first else None)


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_ours_in_a_worker_has_the_bits_of_rays_wrapper(two_nodes, tmp_path, backend):
    ranks = fit(tmp_path, compare, backend=backend).metrics["ranks"]
    assert len({rank["node"] for rank in ranks}) == 2
    for rank in ranks:
        assert rank["backend"] == backend
        assert rank["kinds"] == [False, True, True]
        assert rank["same"]
        assert not rank["another"]


def train_and_lose_a_worker(config):
    """Rank 1 is killed in the middle, as often as the configuration says; a restart goes on at the checkpoint."""
    import ray.train
    from ray.train.torch import prepare_model

    from paceline import DistributedDataParallel

    rank = ray.train.get_context().get_world_rank()
    model = DistributedDataParallel(prepare_model(a_model(), parallel_strategy=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    begin = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            states = torch.load(Path(folder, "states.pt"))
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        begin = states["step"] + 1
    for step in range(begin, NUM_STEPS):
        killed = Path(config["folder"], f"killed{len(list(Path(config['folder']).glob('killed*')))}")
        if rank == 1 and step == 7 and int(killed.name.removeprefix("killed")) < config["kills"]:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(model, optimizer, step, rank)
        if step % 3 == 2:
            report(
                {"step": step, "began": begin, "sum": sum(p.sum().item() for p in model.parameters())},
                model=model.state_dict(),
                optimizer=optimizer.state_dict(),
                step=step,
            )


def test_a_killed_worker_is_named_and_the_restart_goes_on_at_the_checkpoint(two_nodes, tmp_path):
    folders = [tmp_path / name for name in ("undisturbed", "restarted", "ended")]
    for folder in folders:
        folder.mkdir()
    undisturbed, restarted = (
        fit(folder, train_and_lose_a_worker, max_failures=1, folder=str(folder), kills=kills)
        for kills, folder in enumerate(folders[:2])
    )
    assert undisturbed.metrics["began"] == 0
    assert restarted.metrics["began"] in (3, 6)  # Ray keeps a checkpoint some time after it was reported
    assert restarted.metrics["sum"] == undisturbed.metrics["sum"]
    with pytest.raises(Exception, match=r"PeerLostError: rank 0 .* rank 1 \(process \d+ on .*\) has died"):
        fit(folders[2], train_and_lose_a_worker, folder=str(folders[2]), kills=1)

"""Lightning's released package with `strategy="paceline"`, compared bitwise with its own `strategy="ddp"`."""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from harness.ranks import pool
from paceline_recipes import Curve, LargeMinibatch

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed"
    ),
]


def as_launched(rank, num_ranks):
    """What a launcher would have put into the environment; the group itself is open already."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="a test")


def data():
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(96, 6, generator=generator), torch.randint(3, (96,), generator=generator)
    )


def a_module(manual=False, recipe=False, tell=None):
    import pytorch_lightning as lightning

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
            self.losses = []
            self.automatic_optimization = not manual

        def training_step(self, batch, index):
            x, y = batch
            if tell is not None and self.global_step == 2:
                tell()
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.losses.append(loss.item())
            if not manual:
                return loss
            optimizer = self.optimizers()
            for scale in (1.0, 0.5):  # several backwards in one forward, as a GAN has them
                optimizer.zero_grad()
                self.manual_backward(nn.functional.cross_entropy(self.net(x), y) * scale)
                optimizer.step()
            return None

        def validation_step(self, batch, index):
            x, y = batch
            self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            if not recipe:
                return optimizer
            scheduler = LargeMinibatch(optimizer, reference_batch=8, batch=8, curve=Curve(total=8, warmup=2))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_start(self):
            self.wrappers = [self.trainer.strategy.model]  # in a list, because it is not a part of ours

        def result(self):
            return [*self.losses, *torch.cat([p.detach().flatten() for p in self.parameters()]).tolist()]

    return Classifier()


def fit(folder, strategy, epochs=1, manual=False, recipe=False, resume=None, tell=None, **options):
    """Train as Lightning's guide does it; returns the module and the trainer."""
    import pytorch_lightning as lightning

    module = a_module(manual, recipe, tell)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(module, DataLoader(data(), batch_size=8), DataLoader(data(), batch_size=48), ckpt_path=resume)
    return module, trainer


def train_with_lightning(rank, num_ranks, folder):
    from pytorch_lightning.strategies import DDPStrategy
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from paceline.integrations.lightning_strategy import PacelineStrategy

    as_launched(rank, num_ranks)
    seen = {}
    for name in ("ddp", "paceline"):
        for accumulate in (1, 2):
            module, trainer = fit(folder, name, accumulate_grad_batches=accumulate, gradient_clip_val=1.0)
            seen[name, accumulate] = module.result()
            seen[name, "is ours"] = isinstance(module.wrappers[0], paceline.DistributedDataParallel)
            seen[name, "accuracy"] = trainer.callback_metrics["accuracy"].item()
        seen[name, "manual"] = fit(folder, name, manual=True)[0].result()
    with paceline.patch_torch():
        for manual in (False, True):
            options = {} if manual else {"gradient_clip_val": 1.0}
            module, _ = fit(folder, DDPStrategy(find_unused_parameters=manual), manual=manual, **options)
            seen["patched", manual] = module.result()
            seen["patched", "is ours"] = isinstance(module.wrappers[0], paceline.DistributedDataParallel)
    module, _ = fit(folder, PacelineStrategy(compression="powersgd", bucket_cap_mb=3))
    seen["kwargs"] = (type(module.wrappers[0].reduction).__name__, module.wrappers[0].bucket_bytes_cap)
    module, _ = fit(folder, PacelineStrategy(ddp_comm_hook=fp16_compress_hook))
    seen["rate"] = fit(folder, "paceline", recipe=True)[1].optimizers[0].param_groups[0]["lr"]
    seen["hook"] = module.wrappers[0]._get_ddp_logging_data()["comm_hook"]
    return seen


@pytest.mark.slow
def test_training_accumulation_and_manual_optimization():
    """By its name, with arguments, and under a patch; validation goes around the wrapper."""
    with tempfile.TemporaryDirectory() as folder:
        for seen in pool(2).run(train_with_lightning, folder, deadline_s=110):
            assert [seen[name, "is ours"] for name in ("ddp", "paceline", "patched")] == [False, True, True]
            for what in (1, 2, "manual"):
                assert seen["paceline", what] == seen["ddp", what], what
            assert seen["paceline", 1] != seen["paceline", 2]
            assert seen["paceline", "accuracy"] == pytest.approx(seen["ddp", "accuracy"], abs=0.1)
            assert seen["patched", False] == seen["ddp", 1]
            assert seen["patched", True] == seen["ddp", "manual"]
            assert seen["kwargs"] == ("PowerSGD", 3 << 20)
            assert "fp16_compress_hook" in seen["hook"]
            assert seen["rate"] == pytest.approx(2 * 0.02)  # 16 samples a step instead of 8


def resume(rank, num_ranks, folder):
    as_launched(rank, num_ranks)
    seen = {}
    for name in ("ddp", "paceline"):
        _, trainer = fit(folder, name)
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")
        torch.distributed.barrier()
        seen[name, "straight"] = fit(folder, name, epochs=2)[0].result()[6:]
    for saved, loaded in (("ddp", "ddp"), ("paceline", "paceline"), ("ddp", "paceline"), ("paceline", "ddp")):
        module, _ = fit(folder, loaded, epochs=2, resume=f"{folder}/{saved}.ckpt")
        seen[saved, loaded] = module.result()
    return seen


def test_a_checkpoint_goes_on_under_either_strategy():
    with tempfile.TemporaryDirectory() as folder:
        for seen in pool(2).run(resume, folder, deadline_s=110):
            straight = seen["ddp", "straight"]
            assert straight == seen["paceline", "straight"]
            for saved in ("ddp", "paceline"):
                for loaded in ("ddp", "paceline"):
                    assert seen[saved, loaded] == straight, (saved, loaded)


def leave_on_notice(rank, num_ranks, folder):
    """Rank 1 alone is told, by a signal; then all by a file. Afterwards training goes on."""
    from paceline.integrations.lightning_strategy import PacelineStrategy

    as_launched(rank, num_ranks)
    straight = fit(f"{folder}/straight", "paceline", epochs=2)[0].result()
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    seen = {"straight": straight, "left": [], "steps": []}
    for told in ("signal", "file"):
        notice = Path(folder, "notice")

        def tell(told=told, notice=notice):
            if told == "file":
                notice.touch()
            elif rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        strategy = PacelineStrategy(notice=notice if told == "file" else None)
        with pytest.raises(SystemExit) as left:
            fit(f"{folder}/{told}", strategy, epochs=1000 if told == "file" else 2, tell=tell)
        seen["left"].append(left.value.code)
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == handlers
        seen["steps"].append(
            torch.load(f"{folder}/{told}/hpc_ckpt_1.ckpt", weights_only=False)["global_step"]
        )
    seen["resumed"] = fit(f"{folder}/signal", "paceline", epochs=2, resume="hpc")[0].result()
    return seen


@pytest.mark.slow
def test_all_ranks_leave_if_one_is_told_to_and_training_goes_on_from_there():
    with tempfile.TemporaryDirectory() as folder:
        for seen in pool(2).run(leave_on_notice, folder, deadline_s=110):
            assert seen["left"] == [143, 143]
            assert seen["steps"][0] == 4  # the signal came in step 3; all knew of it a step later
            assert seen["steps"][1] > 3
            assert (
                len(seen["straight"]) - len(seen["resumed"]) == 4
            )  # losses of steps that did not come again


def test_the_strategy_is_known_by_name_if_lightning_was_imported_first():
    """The other order is that of the tests above. A stand-in for Lightning: its own import takes seconds."""
    code = """if True:
        import sys, types
        strategies = types.ModuleType("lightning.pytorch.strategies")
        strategies.StrategyRegistry = types.SimpleNamespace(register=lambda name, *_, **__: print(name))
        sys.modules[strategies.__name__] = strategies
        import paceline
        assert "torch" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == "paceline\n"

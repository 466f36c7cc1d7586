"""Hugging Face's Trainer over our wrapper: the same curves, accumulation and resuming as over torch's."""

import contextlib
import importlib.util
import os
import signal
import tempfile

import pytest
import torch

import paceline
from harness.ranks import pool

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]


def side(name, **options):
    """Whose wrapper the Trainer finds."""
    return paceline.patch_torch(**options) if name == "ours" else contextlib.nullcontext()


def a_trainer(folder, steps, callbacks=(), **options):
    from accelerate.state import AcceleratorState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    AcceleratorState._reset_state()
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(32, (64, 16), generator=torch.Generator().manual_seed(5))
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=3,
        seed=1,
        **options,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, callbacks=list(callbacks))


def curve(trainer):
    """What a user sees: the logged losses and gradient norms; and every parameter."""
    rows = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
    return rows, torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist()


def train_with_trainer(rank, num_ranks, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), HF_HUB_OFFLINE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    seen = {}
    for name in ("torch", "ours"):
        with side(name):
            trainer = a_trainer(f"{folder}/{name}", steps=5)
            trainer.train()
            seen[name] = curve(trainer)
            seen[name, "is ours"] = isinstance(trainer.model_wrapped, paceline.DistributedDataParallel)
            torch.distributed.barrier()
            resumed = a_trainer(f"{folder}/{name}", steps=5)
            resumed.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-3")
            seen[name, "resumed"] = curve(resumed)
            accumulating = a_trainer(
                f"{folder}/{name}2", steps=2, gradient_accumulation_steps=2, ddp_bucket_cap_mb=1
            )
            accumulating.train()
            seen[name, "accumulated"] = curve(accumulating)
    with side("ours", compression="bf16"):
        trainer = a_trainer(f"{folder}/compressed", steps=1)
        trainer.train()
        seen["codec"] = type(trainer.model_wrapped.reduction).__name__
    return seen


def leave_on_notice(rank, num_ranks, folder):
    """Rank 1 alone is told, by a signal. Afterwards training goes on."""
    from transformers import TrainerCallback

    from paceline.integrations.trainer_callback import LeaveOnNotice

    class Tell(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if rank == 1 and state.global_step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), HF_HUB_OFFLINE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    # A rank of the pool may have trained by Lightning before, and has its handler still.
    handler = signal.SIG_DFL
    signal.signal(signal.SIGTERM, handler)
    with side("ours"):
        straight = a_trainer(f"{folder}/straight", steps=5)
        straight.train()
        trainer = a_trainer(f"{folder}/left", steps=5, callbacks=[Tell(), LeaveOnNotice()])
        with pytest.raises(SystemExit) as left:
            trainer.train()
        signal.signal(signal.SIGTERM, handler)
        resumed = a_trainer(f"{folder}/left", steps=5, callbacks=[LeaveOnNotice()])
        resumed.train(resume_from_checkpoint=True)
    assert signal.getsignal(signal.SIGTERM) == handler
    return left.value.code, trainer.state.global_step, curve(resumed), curve(straight)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_all_ranks_leave_if_one_is_told_to_and_training_goes_on_from_there():
    with tempfile.TemporaryDirectory() as folder:
        for code, step, resumed, straight in pool(2).run(leave_on_notice, folder, deadline_s=160):
            assert (code, step) == (143, 3)  # the signal came in step 2; all knew of it a step later
            assert resumed == straight


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_training_accumulating_and_resuming():
    """Losses, gradient norms and parameters, straight and resumed from a checkpoint, are torch's bit by bit."""
    with tempfile.TemporaryDirectory() as folder:
        for seen in pool(2).run(train_with_trainer, folder, deadline_s=160):
            assert [seen[name, "is ours"] for name in ("torch", "ours")] == [False, True]
            assert seen["ours"] == seen["torch"]
            assert seen["ours", "accumulated"] == seen["torch", "accumulated"]
            assert seen["ours", "resumed"] == seen["torch", "resumed"] == seen["torch"]
            assert seen["codec"] == "Compressed"

"""Real clients under plain torchrun: only the import changes, and the loss curve is that of torch's class."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from harness import warm
from harness.ranks import RanksFailedError, torchrun
from harness.terminal import TORCHS_ABORT

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"
OURS = "from paceline import DistributedDataParallel as DDP"
TORCHS = "from torch.nn.parallel import DistributedDataParallel as DDP"
ENDS = "    __import__('os')._exit(0)  # torch's own exit aborts or hangs now and then\n"

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def with_torchs_import(script, folder):
    """A copy of an example in which the one import line is torch's."""
    text = script.read_text()
    assert text.count(OURS) == 1
    copy = folder / f"torch_{script.name}"
    copy.write_text(text.replace(OURS, TORCHS) + ENDS)
    return copy


def run_script(script, out, *args):
    """Every rank's loss curve."""
    out.mkdir()
    words = (script, *args, "--out", str(out))
    env = {"HF_HUB_OFFLINE": "1"} | (
        {warm.ALSO: "transformers.models.gpt2.modeling_gpt2"} if "transformers" in script.name else {}
    )
    if not script.name.startswith("torch_"):
        torchrun(*words, env=env).checked()
        return losses_in(out)
    try:
        is_over = TORCHS_ABORT not in torchrun(*words, env=env, deadline_s=40).stderr
    except RanksFailedError:  # the thread that makes torch abort at exit may also hang there
        is_over = False
    if not is_over:
        torchrun(*words, env=env).checked()
    return losses_in(out)


def losses_in(out):
    return [json.loads((out / f"losses{rank}.json").read_text()) for rank in range(2)]


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("nanogpt_style.py", "sgd"),
        pytest.param("transformers_gpt2.py", "adamw", marks=needs_transformers),
    ],
)
def test_client_has_the_same_loss_curve(name, optimizer, tmp_path):
    """Two ranks, both imports: the losses of every step on every rank are equal, bit by bit, and they fall."""
    script = EXAMPLES / name
    args = ("--steps", "20", "--optimizer", optimizer)
    ours = run_script(script, tmp_path / "ours", *args)
    theirs = run_script(with_torchs_import(script, tmp_path), tmp_path / "torch", *args)
    assert ours == theirs
    assert len(ours[0]) == 20
    assert sum(ours[0][-5:]) < sum(ours[0][:5])
    if (
        name == "nanogpt_style.py"
    ):  # what it saved by `model.module.state_dict()` is a plain model's checkpoint
        saved = torch.load(tmp_path / "ours" / "checkpoint.pt")
        load_example("nanogpt_style").Gpt(64, 4, 2, 64).load_state_dict(saved["model"])

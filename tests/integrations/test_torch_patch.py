"""torch's name stands for ours: in modules that have it already, in scripts nobody edits, and not a moment longer."""

import copy
import os
import pickle
import sys
import types
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.parallel.distributed as home
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from harness.ranks import pool
from harness.terminal import REPOSITORY, run
from harness.terminal import paceline as command
from paceline.errors import ConfigurationError
from paceline.integrations import at_start, torch_patch
from paceline.reductions import Mean
from paceline_adasum import Adasum

OURS = paceline.DistributedDataParallel


@pytest.fixture
def framework():
    """A module that imported torch's class long ago, under a name of its own."""
    module = types.ModuleType("some_framework")
    module.Wrapper = TorchDDP
    sys.modules["some_framework"] = module
    yield module
    del sys.modules["some_framework"]


def test_every_name_becomes_ours_and_torchs_again(framework):
    with paceline.patch_torch():
        for replaced in (
            nn.parallel.DistributedDataParallel,
            home.DistributedDataParallel,
            framework.Wrapper,
        ):
            assert issubclass(replaced, OURS)
    for name in (nn.parallel.DistributedDataParallel, home.DistributedDataParallel, framework.Wrapper):
        assert name is home.DistributedDataParallel
        assert not issubclass(name, OURS)


def test_a_name_that_was_imported_meanwhile_is_put_back(framework):
    with paceline.patch_torch():
        framework.Another = nn.parallel.DistributedDataParallel
    assert framework.Another is home.DistributedDataParallel


def test_torchs_class_is_back_when_the_last_patch_is_undone():
    outer, inner = paceline.patch_torch(), paceline.patch_torch()
    outer.undo()
    outer.undo()
    assert issubclass(nn.parallel.DistributedDataParallel, OURS)
    inner.undo()
    assert not issubclass(nn.parallel.DistributedDataParallel, OURS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compression": "bf17"}, "is not a compression"),
        ({"reduction": "median"}, "is not a reduction"),
        ({"reduction": "adasum", "compression": "bf16"}, "Leave out one of them"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_replaced(options, says):
    with pytest.raises(ConfigurationError, match=says):
        paceline.patch_torch(**options)
    assert not issubclass(nn.parallel.DistributedDataParallel, OURS)


class Proxy:
    """Says that it is an instance of another class, as proxies of wrapt do."""

    def __init__(self, kind):
        self._kind = kind

    @property
    def __class__(self):
        return self._kind


def test_what_says_that_it_is_torchs_class_is_recognised_as_such():
    with paceline.patch_torch():
        patched = nn.parallel.DistributedDataParallel

        class Derived(patched):
            pass

        for kind in (TorchDDP, OURS, patched, Derived):
            assert isinstance(MagicMock(spec=kind), patched)
            assert isinstance(Proxy(kind), patched)
        assert not isinstance(MagicMock(spec=nn.Linear), patched)
        assert not isinstance(Proxy(TorchDDP), Derived)


def wrap_under_patches(rank, num_ranks):
    torchs = home.DistributedDataParallel(nn.Linear(2, 2))
    seen = {}
    with paceline.patch_torch(reduction=Adasum) as patch:
        patched = nn.parallel.DistributedDataParallel
        first, second = patched(nn.Linear(2, 2)), patched(nn.Linear(2, 2))
        own = patched(nn.Linear(2, 2), reduction="mean")

        class Derived(patched):
            pass

        derived = Derived(nn.Linear(2, 2))
        seen["recognised"] = [isinstance(x, patched) for x in (torchs, first, derived, nn.Linear(1, 1))]
        seen["not confused"] = [isinstance(x, Derived) for x in (torchs, first, derived)]
        seen["ours"] = [isinstance(x, OURS) for x in (torchs, first, derived)]
        seen["exact type"] = type(first) is patched
        seen["reductions"] = [type(x.reduction).__name__ for x in (first, own)]
        seen["own state"] = first.reduction is not second.reduction
        torchs(
            torch.ones(1, 2)
        ).sum().backward()  # torch's forward finds its class by the name that was replaced
        seen["nobody runs"] = TorchDDP._active_ddp_module is None and "_active_ddp_module" not in vars(
            patched
        )
        try:
            patched(first)
        except ConfigurationError as error:
            seen["twice"] = str(error)
        patch.undo()
    seen["torchs"] = [isinstance(x, home.DistributedDataParallel) for x in (torchs, first)]
    plain = torch_patch.DistributedDataParallel(nn.Linear(2, 2))
    seen["without a patch"] = type(plain.reduction) is Mean
    for twin in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        twin(torch.ones(1, 2)).sum().backward()
        seen.setdefault("copies", []).append(isinstance(twin, OURS))
    return seen


@pytest.mark.processes
def test_what_is_wrapped_under_a_patch_is_ours_and_recognised():
    for seen in pool(2).run(wrap_under_patches):
        assert seen["recognised"] == [True, True, True, False]
        assert seen["not confused"] == [False, False, True]
        assert seen["ours"] == [False, True, True]
        assert seen["exact type"]
        assert seen["reductions"] == ["Adasum", "Mean"]
        assert seen["own state"]
        assert seen["nobody runs"]
        assert "already. A module is synchronized by one wrapper" in seen["twice"]
        assert seen["torchs"] == [True, True]
        assert seen["without a patch"]
        assert seen["copies"] == [True, True]


SCRIPT = """\
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

if sys.argv[1:] == ["fail"]:
    raise ValueError(DDP.__module__)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 1))
x = torch.randn(16, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
for _ in range(5):
    model.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    with torch.no_grad():  # an optimizer would import half of torch
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
reduction = type(model.reduction).__name__ if hasattr(model, "reduction") else "torch's"
print(f"{__name__} {sys.argv[1:]} {reduction} {loss.item()!r}\\n", end="", flush=True)
dist.destroy_process_group()
"""
CUSTOMIZED = """\
import sys
sys.customized = True
"""


@pytest.fixture
def script(tmp_path):
    """A folder with a script whose author has never heard of Paceline."""
    (tmp_path / "theirs.py").write_text(SCRIPT)
    return tmp_path


def _lines(done):
    assert done.code == 0, done.err
    return sorted(done.out.splitlines())


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_is_replaced_without_a_changed_line(script):
    """Under its own name, with its own arguments; the losses are torch's, bit by bit."""
    words = ("--nproc-per-node", "2", "theirs.py", "--replace-ddp", "x")
    theirs = _lines(run(["torchrun", "--standalone", *words], cwd=script))
    ours = _lines(command("run", "--replace-ddp", *words, cwd=script))
    assert theirs[0].startswith("__main__ ['--replace-ddp', 'x'] torch's ")
    assert ours == [line.replace("torch's", "Mean") for line in theirs]


@pytest.mark.processes
def test_modules_and_compression(script):
    flags = ("--nproc-per-node", "1", "--replace_ddp", "--compression", "bf16")
    (line,) = _lines(command("run", *flags, "-m", "theirs", "y", cwd=script))
    assert line.startswith("__main__ ['y'] Compressed ")


def _as_a_rank(*words, cwd, site=None):
    """Run a fresh interpreter as the launcher would run it in a rank, `site` on its path."""
    folders = [str(folder) for folder in (site, REPOSITORY / "src", os.environ.get("PYTHONPATH")) if folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        env = at_start.environment({})
    return run(["python", *words], cwd=cwd, env=env, cold=True)


@pytest.mark.slow
@pytest.mark.processes
def test_a_traceback_is_the_scripts_own(script):
    done = _as_a_rank("theirs.py", "fail", cwd=script)
    assert 'theirs.py", line 7, in <module>' in done.err
    assert "ValueError: paceline.integrations.torch_patch" in done.err
    assert "sitecustomize" not in done.err
    assert "runpy" not in done.err


@pytest.mark.processes
def test_the_users_own_sitecustomize_still_runs(script):
    site = script / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(CUSTOMIZED)
    code = "import sys; print(sys.customized, sys.modules['sitecustomize'].__file__)"
    assert _as_a_rank("-c", code, cwd=script, site=site).out == f"True {site / 'sitecustomize.py'}\n"


@pytest.mark.processes
def test_a_process_without_torch_pays_nothing(script):
    code = "import sys; print('torch' in sys.modules, any('at_start' in folder for folder in sys.path))"
    assert _as_a_rank("-c", code, cwd=script).out == "False False\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--compression", "bf16", "theirs.py"], "Add --replace-ddp"),
        (["--replace-ddp", "--compression", "bf17", "theirs.py"], "is not a compression"),
        (["--replace-ddp", "--reduction", "median", "theirs.py"], "is not a reduction"),
    ],
)
def test_impossible_replacements_are_refused_before_anything_starts(words, says, script, capsys, monkeypatch):
    from paceline.cli import main

    monkeypatch.chdir(script)
    with pytest.raises(SystemExit) as left:
        main(["run", *words])
    assert left.value.code == 2
    assert says in capsys.readouterr().err

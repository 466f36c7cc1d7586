"""The registry: every experiment can be run by its name, and every module that measures is registered."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer

import paceline_lab.experiments
from harness.terminal import paceline
from paceline.cli.app import app
from paceline.errors import ConfigurationError
from paceline_lab import checkout
from paceline_lab.bench import provenance
from paceline_lab.experiments.registry import EXPERIMENTS

FOLDER = Path(paceline_lab.experiments.__file__).parent


def study():
    return typer.main.get_command(app).commands["study"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_takes_the_options_of_all_its_runs(name, tmp_path):
    experiment = EXPERIMENTS[name]
    command = study().loaded(name)
    assert name == name.lower().replace("_", "-")
    assert experiment.question.count("?") == 1
    assert command.help.startswith(f"Example: paceline study {name}\n")
    for options in experiment.runs:
        context = command.make_context(name, shlex.split(f"{options} --quick --report {tmp_path}"))
        assert context.params["quick"] is True


def test_every_module_with_a_command_is_registered():
    """A file with `main` that no line names could only be found by reading the folder."""
    modules = {experiment.module.partition(":")[0] for experiment in EXPERIMENTS.values()}
    for path in FOLDER.rglob("*.py"):
        name = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
        text = path.read_text()
        is_command = "\ndef main(" in text and "__main__" not in text
        assert not is_command or name in modules, f"{name} has a command that registry.py does not know"
        assert not (name in modules and "__main__" in text), f"{name} is run by `paceline study` alone"


@pytest.mark.processes
def test_the_list_says_what_each_asks_and_imports_none_of_them(tmp_path):
    done = paceline("study", cwd=tmp_path)
    assert done.code == 0
    for name, experiment in EXPERIMENTS.items():
        assert f"{name:22}{experiment.question}" in done.out
    script = (
        "import sys\nfrom paceline.cli import main\ntry:\n    main(['study'])\nexcept SystemExit:\n"
        "    print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'matplotlib')])"
    )
    from harness.terminal import run

    assert run(["python", "-c", script], cwd=tmp_path, temporary=tmp_path, cold=True).out.endswith("[]\n")


def test_what_only_a_checkout_has_is_asked_for_in_words(monkeypatch):
    """Installed from a wheel there are neither stored results nor the generator of random programs."""
    monkeypatch.setattr(checkout, "repository", lambda: None)
    for call in (
        lambda: checkout.stored_result("emulated-network"),
        lambda: checkout.in_repository("tests", "the generator"),
    ):
        with pytest.raises(ConfigurationError, match=r"pip install -e \. -e plan -e lab -e svm"):
            call()
    monkeypatch.setattr(provenance, "repository", lambda: None)
    assert provenance.collect(1).git_hash == "unknown"


@pytest.mark.processes
def test_a_checkout_is_dirty_if_one_of_the_packages_is_and_not_by_results(tmp_path, monkeypatch):
    """A measurement writes results; that alone must not make the next one look like another code's."""
    import subprocess

    def git(*words):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=tmp_path, check=True)

    for source in ("src", "lab/src", "svm/src", "lab/results"):
        (tmp_path / source).mkdir(parents=True)
        (tmp_path / source / "file").write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "a")
    monkeypatch.setattr(provenance, "repository", lambda: tmp_path)
    for source, is_dirty in (("lab/results", False), ("src", True), ("lab/src", True), ("svm/src", True)):
        (tmp_path / source / "file").write_text("changed")
        assert provenance.collect(1).git_dirty is is_dirty, source
        git("checkout", "-q", source)
    assert len(provenance.collect(1).git_hash) == 40

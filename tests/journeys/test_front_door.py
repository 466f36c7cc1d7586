"""What a newcomer meets first: the import, the help, the version."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from typing import Any

import pytest

import paceline as package
from harness.terminal import paceline
from paceline.cli import main
from paceline.cli.app import app, command_of


def _measured(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


@pytest.mark.processes
def test_importing_paceline_imports_no_torch():
    """The public names are lazy: the import itself costs next to nothing."""
    loaded = _measured("import json, sys, paceline; print(json.dumps(sorted(sys.modules)))")
    assert "torch" not in loaded
    assert "rich" not in loaded


@pytest.mark.processes
def test_our_wrapper_is_imported_in_few_calls():
    """What it takes beyond torch, counted, as times depend on the machine: 138,000 calls and returns are 0.2 s.

    Nor does it import what the SVM needs.
    """
    code = (
        "import json, sys, torch; events = []; sys.setprofile(lambda *_: events.append(1)); import paceline; "
        "paceline.DistributedDataParallel; sys.setprofile(None); "
        "print(json.dumps([len(events), sorted({'numba', 'sklearn', 'scipy'} & set(sys.modules))]))"
    )
    num_calls, of_the_svm = _measured(code)
    assert 50_000 < num_calls < 200_000
    assert of_the_svm == []


@pytest.mark.parametrize("name", package.__all__)
def test_every_public_name_is_there(name):
    assert getattr(package, name) is not None
    assert name in dir(package)


@pytest.mark.processes
def test_packages_are_attributes():
    """As with torch: `import paceline` is enough for `paceline.optim.shard`."""
    found = "dir(paceline), [paceline.optim.shard.__name__, paceline.data.GlobalBatch.__name__]"
    names, used = _measured(f"import json, paceline; print(json.dumps([{found}]))")
    assert used == ["shard", "GlobalBatch"]
    assert {"comm", "compression", "data", "observe", "optim", "reductions", "schedules"} <= {*names}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'DataParallel'"):
        package.DataParallel  # noqa: B018


@pytest.mark.processes
@pytest.mark.parametrize("words", [["--help"], ["demo", "--help"], ["--version"], []])
def test_help_imports_no_torch(words, tmp_path):
    done = paceline(*words, cwd=tmp_path, env={"PYTHONPROFILEIMPORTTIME": "1"}, cold=True)
    assert done.code == 0
    assert " paceline.cli" in done.err  # the record of imports is there
    assert " torch" not in done.err
    assert "paceline" in done.out


@pytest.mark.processes
def test_the_version_is_the_installed_one(tmp_path):
    assert (
        paceline("--version", cwd=tmp_path, cold=True).out
        == f"paceline {importlib.metadata.version('paceline')}\n"
    )


@pytest.mark.processes
def test_help_names_every_command(tmp_path):
    out = paceline("--help", cwd=tmp_path, cold=True).out
    assert "run" in out
    assert "demo" in out
    assert "emulate" in out


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian"], "No such command 'trian'"),
        (["--fast"], "No such option: --fast"),
        (["demo", "--rank", "2"], "--rank"),
        (["demo", "--ranks-per-host", "two"], "--ranks-per-host"),
    ],
)
def test_bad_usage_is_one_paragraph_and_exit_2(words, says, tmp_path):
    done = paceline(*words, cwd=tmp_path, cold=True)
    assert done.code == 2
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert says in done.err
    assert "--help" in done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["svm", "fit"],
            "Missing argument 'data': A .csv file, or one in LIBSVM's format. `paceline svm fit --help`",
        ),
        (
            ["demo", "--ranks-per-host", "two"],
            "'--nproc-per-node': it has to be a whole number, such as 2. `paceline demo --help`",
        ),
        (["svm", "fit", "x", "--C", "a"], "for '--C': it has to be a number, such as 0.5. "),
        (
            ["svm", "fit", "x", "--ranks-per-host", "0"],
            "for '--ranks-per-host' / '--nproc-per-node': it has to be at least 1. ",
        ),
        (["dmo"], "Did you mean 'demo'? `paceline --help`"),
        (["study", "scaling", "--ranks", "1,a"], "paceline: --ranks '1,a' has to be like 1,2,4,8,16."),
        (["study", "scaling", "--rates", "10:b"], "paceline: --rates '10:b' has to be like 10:1."),
    ],
)
def test_bad_usage_says_what_is_wrong_and_where_help_is(words, says, capsys):
    """The option that is wrong, in our words, and the command's own help."""
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Input should" not in err


@pytest.mark.parametrize("words", [["emulate"], ["svm", "fit"], ["bench", "step"], []])
def test_flags_have_no_type_in_help(words, capsys):
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    out = capsys.readouterr().out
    assert "--help" in out
    assert "bool" not in out.lower()


def test_a_command_without_a_command_shows_its_help_and_no_more(capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench"])
    assert left.value.code == 2
    seen = capsys.readouterr()
    assert "Usage: paceline bench [OPTIONS] COMMAND" in seen.out
    assert seen.err == ""


def test_the_launchers_help_shows_our_options_first(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    out = capsys.readouterr().out
    ours = [
        out.index(option) for option in ("--share-devices", "--replace-ddp", "--reduction", "--compression")
    ]
    assert max(ours) < min(
        out.index(option) for option in ("positional", "--help", "--nnodes", "--standalone")
    )
    assert out.startswith("usage: paceline run [options] training_script")


@pytest.mark.parametrize(
    "words", ["", "demo", "serve", "plan", "plan record", "emulate", "bench step", "study", "svm fit"]
)
def test_a_short_h_is_help(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "-h"])
    assert ended.value.code == 0
    assert f"Usage: {' '.join(['paceline', *words.split()])} " in capsys.readouterr().out


def _commands(command, path="paceline"):
    """Every command that does something by itself, with its path."""
    inner = getattr(command, "commands", {})
    for name, each in inner.items():
        yield from _commands(each, f"{path} {name}")
    if not inner or command.invoke_without_command:
        yield path, command


def test_help_of_every_command_begins_with_an_example_that_its_parser_takes():
    """Lists of commands show the sentence behind it."""
    found = dict(_commands(command_of(app)))
    assert len(found) > 60
    for path, command in found.items():
        example = command.help.split("\n\n")[0]
        assert example.startswith("Example: paceline"), path
        assert not command.short_help.startswith("Example"), path
        if command.name != "run":  # which torchrun's parser reads
            words = example.removeprefix("Example: ").removeprefix(path).split()
            if path not in {"paceline", "paceline demo"}:
                command.make_context(path, words)


@pytest.mark.parametrize(
    "words", ["demo", "plan predict", "emulate", "bench step", "bench allreduce", "svm fit"]
)
def test_the_number_of_processes_has_one_name_and_torchruns(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main([*words.split(), "--help"])
    assert "--ranks-per-host,--nproc-per-node" in capsys.readouterr().out


@pytest.mark.processes
def test_bash_completes_options(tmp_path):
    words = {
        "COMP_WORDS": "paceline bench step --nproc",
        "COMP_CWORD": "3",
        "_PACELINE_COMPLETE": "complete_bash",
    }
    assert paceline(cwd=tmp_path, env=words, cold=True).out.split() == ["--nproc-per-node"]

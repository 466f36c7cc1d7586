"""What docs/architecture.md promises about packages, where import-linter cannot see it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paceline"
OTHERS = {
    "paceline_adasum": ROOT / "adasum/src/paceline_adasum",
    "paceline_lab": ROOT / "lab/src/paceline_lab",
    "paceline_lossy": ROOT / "lossy/src/paceline_lossy",
    "paceline_plan": ROOT / "plan/src/paceline_plan",
    "paceline_recipes": ROOT / "recipes/src/paceline_recipes",
    "paceline_servers": ROOT / "servers/src/paceline_servers",
    "paceline_svm": ROOT / "svm/src/paceline_svm",
}

# The callers of a process group's methods. The laboratory, plan's measurement and the frameworks' notice use
# torch.distributed as a user would.
CALLERS = {"comm", "process_group", "integrations", "paceline_plan", "paceline_lab"}
# Names that only process groups have; and those that other things have, too, with the receivers that are no group.
METHODS = {
    *(
        "allreduce",
        "allreduce_coalesced",
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
    ),
    *("_allgather_base", "all_gather_single", "all_gather_single_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("send", "recv", "recv_anysource", "barrier", "monitored_barrier"),
}
SHARED_NAMES = {"broadcast", "reduce", "gather", "scatter"}
NO_GROUPS = {
    "paceline_svm": {"communicator", "_communicator", "self"}
}  # the SVM's own class, whose collectives go through comm
# Sockets and what sends on them, or is their protocol; import-linter keeps torch from the servers. And a generator.
SOCKETS = {
    "paceline_servers": {"connected", "connection", "_wake", "_woken"},
    "elastic": {"_end", "end"},
    "launch": {"connected", "end", "socket", "_end", "_process", "_wake", "_woken"},
    "paceline_lossy": {"endpoint"},
    "preflight": {"accepted", "line"},
    "ddp": {"_course"},
}
FUNCTIONS = {
    *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object"),
    *("all_gather_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv"),
    *(
        "recv_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
    ),
    *("send", "send_object_list"),
}
OTHER_COLLECTIVES = ("torch.distributed.nn", "torch.distributed._functional_collectives")
DISTRIBUTED = "torch.distributed"


def dotted(node):
    """The dotted name of an expression such as `dist.distributed_c10d`; "" if it is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def imported(tree):
    """What each name that the file imports stands for, in full."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.split(".")[0]
                found[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def collective_calls(source, package):
    """Line and text of every use of a process group's method, or of a collective of torch.distributed."""
    tree = ast.parse(source)
    names = imported(tree)
    found = []
    for name, full in names.items():
        parent, _, last = full.rpartition(".")
        if (parent.startswith(DISTRIBUTED) and last in FUNCTIONS) or full.startswith(OTHER_COLLECTIVES):
            found.append((0, f"import of {name}"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        first, _, rest = dotted(node.value).partition(".")
        receiver = ".".join(filter(None, (names.get(first, first), rest)))
        tail = receiver.rpartition(".")[2]
        if receiver.startswith(
            "paceline.schedules."
        ):  # a module that makes schedules, by the operation's name
            continue
        if receiver.startswith(DISTRIBUTED):
            is_collective = node.attr in FUNCTIONS
        elif node.attr in SHARED_NAMES:
            is_collective = first not in {"torch", "np", "functools"} and tail not in NO_GROUPS.get(
                package, ()
            )
        elif node.attr in {"send", "recv"} and tail in SOCKETS.get(package, ()):
            is_collective = False
        else:
            is_collective = node.attr in METHODS
        if is_collective:
            found.append((node.lineno, f"{receiver}.{node.attr}"))
    return found


def files():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        yield path, parts[0] if len(parts) > 1 else ""
    for package, folder in OTHERS.items():
        for path in sorted(folder.rglob("*.py")):
            yield path, package


def test_only_comm_and_process_group_call_process_groups():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, package in files()
        if package not in CALLERS
        for line, text in collective_calls(path.read_text(), package)
    ]
    assert not found, "call a function of paceline.comm.collectives instead"


@pytest.mark.parametrize(
    "source",
    [
        "group.allreduce([tensor], options)",
        "self._groups[0].broadcast([tensor], options)",
        "work = self.process_group.gather(rows, row)",
        "launch = backend.send",
        "import torch.distributed as dist\ndist.all_reduce(tensor)",
        "import torch\ntorch.distributed.broadcast(tensor, 0)",
        "from torch import distributed\ndistributed.all_gather_object(found, mine)",
        "from torch.distributed import barrier as meet\nmeet()",
        "from torch.distributed._functional_collectives import all_reduce",
        "import torch.distributed.nn as nn",
    ],
)
def test_the_search_sees_every_form_of_a_call(source):
    assert collective_calls(source, "ddp")


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("import torch.distributed as dist\ndist.get_rank(), dist.new_group([0])", "ddp"),
        ("import torch\ntorch.gather(values, 0, order)", "compression"),
        ("import functools\nfunctools.reduce(max, sizes)", "ddp"),
        ("self._communicator.gather(mine, doing)", "paceline_svm"),
        ("client.connected.send(piece)", "paceline_servers"),
        ("from paceline.comm.collectives import all_reduce\nlaunch_sum(tensor, group)", "ddp"),
    ],
)
def test_the_search_leaves_the_rest_alone(source, package):
    assert not collective_calls(source, package)


def modules_of(path):
    """Everything a file imports, and every dotted name in it, in full."""
    tree = ast.parse(path.read_text())
    names = imported(tree)
    found = set(names.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            found.add(".".join(filter(None, (names.get(first, first), rest))))
    return found


@pytest.mark.parametrize(
    ("package", "module"), [("compression", "torch.distributed"), ("reductions", "torch.autograd")]
)
def test_a_part_of_torch_stays_unknown(package, module):
    """import-linter knows torch as a whole only."""
    for path, where in files():
        if where == package:
            known = [name for name in modules_of(path) if name == module or name.startswith(f"{module}.")]
            assert not known, path


def test_every_package_has_a_row_and_every_row_its_contracts():
    """The table of docs/architecture.md: each package once, each with contracts that pyproject.toml has."""
    contracts = set(re.findall(r'^name = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    tables = (ROOT / "docs" / "architecture.md").read_text().split("| kept by |")[1:]
    table = "\n".join(text.partition("\n\n")[0] for text in tables)
    rows = re.findall(r"^\| `(\w+)`.* \| ([^|]+) \|$", table, re.MULTILINE)
    packages = {package for _, package in files()} - {""}
    assert sorted(name for name, _ in rows) == sorted(packages | {"errors"})
    named = {contract.strip() for _, cell in rows for contract in cell.split(",")}
    assert named <= contracts | {"test_architecture"}
    assert contracts - {"paceline"} <= named, "a contract that no row names"


def private_names(source):
    """Every `_name` of paceline that a source imports, or reaches through a module or class it has imported."""
    tree = ast.parse(source)
    names = {name: full for name, full in imported(tree).items() if full.split(".")[0] == "paceline"}
    found = [full for full in names.values() if is_private(full)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (text := dotted(node)):
            first, _, rest = text.partition(".")
            if first in names and is_private(rest):
                found.append(f"{names[first]}.{rest}")
    return found


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_the_laboratory_and_the_svm_use_no_private_name_of_paceline():
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in OTHERS.values()
        for path in sorted(folder.rglob("*.py"))
        for name in private_names(path.read_text())
    ]
    assert not found, "make the name public where it is, or move what needs it"


@pytest.mark.parametrize(
    "source",
    [
        "from paceline.comm.lane import _record",
        "from paceline.transports._raw import read",
        "import paceline.ddp.plan as plan\nplan._caps(1)",
        "from paceline.comm import lane as line\nline.Lane._fields",
        "import paceline.ddp\npaceline.ddp._reducer",
    ],
)
def test_a_private_name_is_noticed(source):
    assert private_names(source)


def test_public_names_and_other_packages_private_ones_are_no_offence():
    assert not private_names(
        "import os\nfrom paceline.ddp import plan\nos._exit(0)\nplan.__doc__\nself._x = plan.BucketCaps"
    )


# What each folder of tests may import of the other packages. The SVM's ranks can be threads of one process.
# Options are tested with every reduction that they go together with.
TESTS = {
    "tests": ("paceline_adasum", "paceline_lossy", "paceline_recipes", "paceline_servers"),
    "adasum/tests": ("paceline_adasum", "paceline_recipes"),
    "lossy/tests": ("paceline_lossy",),
    "plan/tests": ("paceline_plan",),
    "recipes/tests": ("paceline_recipes", "paceline_servers", "paceline_lossy", "paceline_adasum"),
    "servers/tests": ("paceline_lossy", "paceline_servers"),
    "svm/tests": ("paceline_svm", "paceline_lab.doubles"),
}
TESTS_OF_ALL = ("journeys", "harness")


def imports_of_others(source, allowed):
    """Imports of the laboratory or the SVM, also inside functions, beyond those that are allowed."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    others = [name for name in sorted(found) if name.split(".")[0] in OTHERS]
    return [name for name in others if not any(f"{name}.".startswith(f"{each}.") for each in allowed)]


@pytest.mark.parametrize("folder", TESTS)
def test_a_package_is_tested_without_the_packages_above_it(folder):
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.relative_to(ROOT / folder).parts[0] not in TESTS_OF_ALL
        for name in imports_of_others(path.read_text(), TESTS[folder])
    ]
    assert not found, "a test that needs another package is that package's: move it there"


def test_an_import_of_another_package_is_noticed():
    source = "def one():\n    from paceline_lab.doubles import in_process\nimport paceline_svm.solver"
    assert imports_of_others(source, ()) == ["paceline_lab.doubles.in_process", "paceline_svm.solver"]
    assert imports_of_others(source, TESTS["svm/tests"]) == []
    assert imports_of_others("from paceline_lab.doubles_of import x", TESTS["svm/tests"])


def test_every_name_that_is_imported_late_is_there():
    """The maps of `on_first_use` are strings, which no type checker follows when a module joins another."""
    missing = []
    for folder in (PACKAGE, *OTHERS.values()):
        for path in folder.rglob("__init__.py"):
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "on_first_use":
                    for module, names in ast.literal_eval(call.args[1]).items():
                        home = path.parent.joinpath(*module.split("."))
                        files = [home.with_suffix(".py"), home / "__init__.py"]
                        source = "".join(file.read_text() for file in files if file.is_file())
                        missing += [
                            f"{path.relative_to(ROOT)}: {name} of {module}"
                            for name in names.split()
                            if not re.search(rf"\b{name}\b", source)
                        ]
    assert missing == []

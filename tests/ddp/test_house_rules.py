"""What keeps `ddp` simple: no circle of imports, also for types, and nobody assigns another object's fields."""

import ast
from pathlib import Path

import paceline

HOME = Path(paceline.__file__).parent / "ddp"
REDUCER = HOME / "reducer.py"
# Fields that torch has others assign: gradients, the classes of its objects, and what its own wrapper is asked for.
OF_TORCH = {
    "_post_accumulate_grad_hooks",
    "grad",
    "__class__",
    "data",
    "_active_ddp_module",
    "_join_config",
    "_mp_param",
    "_fp_param",
}
OTHERS = {
    ("mixed_precision.py", "atexit"),  # of a weakref.finalize
    ("sync_batch_norm.py", "atexit"),
    ("sync_batch_norm.py", "process_group"),  # of torch's layer
    ("torch_compat/torch_surface.py", "_paceline_restored_names"),  # of the wrapper, between two of its hooks
    ("torch_compat/comm_hooks.py", "iter"),  # of the state of torch's PowerSGD
    ("torch_compat/dynamo.py", "_may_compile"),  # of a function
    ("torch_compat/dynamo.py", "_runs_module"),
    ("tensor_parallel.py", "_torchdynamo_disable"),
}


def sources():
    return {path.relative_to(HOME).as_posix(): path.read_text() for path in sorted(HOME.rglob("*.py"))}


def module_of(file):
    return "paceline.ddp." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def circles(texts):
    """Modules that can reach themselves by imports, those for types and within functions included."""
    modules = {module_of(file) for file in texts}
    edges = {}
    for file, text in texts.items():
        found = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                found |= {full if full in modules else node.module for full in inner.values()}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        edges[module_of(file)] = found & modules - {module_of(file)}
    return sorted(module for module in modules if module in reachable(edges, module))


def reachable(edges, start):
    seen, todo = set(), [start]
    while todo:
        for module in edges[todo.pop()] - seen:
            seen.add(module)
            todo.append(module)
    return seen


def declared(tree):
    """Fields of the classes that a file defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node):
            found.add(node.attr)
    return found


def is_self(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "ctx")


def outside_writes(file, text):
    """Assignments to fields of objects of other files."""
    tree = ast.parse(text)
    own = declared(tree)
    return [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not is_self(node)
        if node.attr not in OF_TORCH | own and (file, node.attr) not in OTHERS
    ]


def undeclared(text):
    """Fields that methods assign and `__init__` does not, by class."""
    found = []
    for kind in ast.walk(ast.parse(text)):
        if not isinstance(kind, ast.ClassDef):
            continue
        methods = [node for node in kind.body if isinstance(node, ast.FunctionDef)]
        fields = {
            method.name: {
                node.attr
                for node in ast.walk(method)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node)
            }
            for method in methods
        }
        first = fields.pop("__init__", set())
        found += [f"{kind.name}.{field}" for more in fields.values() for field in more - first]
    return sorted(set(found))


def test_no_module_of_ddp_reaches_itself():
    assert not circles(sources()), "hold what is needed instead of the whole object"


def test_a_circle_by_types_is_seen():
    texts = {
        "first.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from paceline.ddp.second import B\n",
        "second.py": "from paceline.ddp import first\n",
    }
    assert circles(texts) == ["paceline.ddp.first", "paceline.ddp.second"]


def test_nobody_assigns_anothers_fields():
    found = [line for file, text in sources().items() for line in outside_writes(file, text)]
    assert not found, "return it, or call a method"


def test_an_outside_write_is_seen():
    assert outside_writes("weights.py", "reducer.weight = 1.0\n") == ["weights.py:1: reducer.weight"]


def test_every_field_of_the_reducer_is_declared_by_its_constructor():
    assert not undeclared(REDUCER.read_text())


def test_the_reducer_knows_no_feature():
    text = REDUCER.read_text().lower()
    assert not [word for word in ("skip", "overlap", "droppable", "unit") if word in text]

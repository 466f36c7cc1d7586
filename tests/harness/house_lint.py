"""Check that the code keeps its shape: `make check` runs this over the sources of all packages.

Five rules, each printed with the place that breaks it:

1. A room (a folder of a package) stays within its budget of lines of code, files and public names. The budgets are in
   `house_budget.json`; they are changed in a commit of their own, with a reason.
2. No private name of another room is used: neither imported nor read from an object.
3. A function has at most seven parameters. Options of commands do not count. `house_budget.json` lists the
   constructors that mirror torch's or scikit-learn's.
4. A file under 60 lines has more than one importer. Otherwise it belongs to its importer.
5. A name in backticks in a docstring exists.

    python tests/harness/house_lint.py [--print]
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BUDGET = Path(__file__).with_name("house_budget.json")
MOST_PARAMETERS, SMALL_FILE_LINES = 7, 60
_WORD = re.compile(r"[A-Za-z_]\w*")
_NAMES = ("id", "attr", "arg", "name", "module", "asname")  # fields of nodes that hold identifiers
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


@dataclass(frozen=True)
class Source:
    """A Python file of a package.

    Attributes:
        package: Name of the top package, for example `paceline`.
        path: Path of the file.
        parts: Path below the package, without the suffix.
    """

    package: str
    path: Path
    parts: tuple[str, ...]

    @property
    def room(self) -> str:
        """Name of the room: the package and its first folder, or `package/.` for files beside the folders."""
        return f"{self.package}/{self.parts[0] if len(self.parts) > 1 else '.'}"

    @property
    def module(self) -> str:
        """Dotted name under which the file is imported."""
        parts = self.parts[:-1] if self.parts[-1] == "__init__" else self.parts
        return ".".join((self.package, *parts))

    @cached_property
    def text(self) -> str:
        """Content of the file."""
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree of the file."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of that tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def docstrings(self) -> list[tuple[Documented, ast.Constant]]:
        """Every module, class and function that has a docstring, with the docstring's node."""
        found: list[tuple[Documented, ast.Constant]] = []
        for node in self.nodes:
            if isinstance(node, Documented) and node.body and isinstance(node.body[0], ast.Expr):
                value = node.body[0].value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found.append((node, value))
        return found

    @cached_property
    def words(self) -> set[str]:
        """Every identifier, and the words of the strings other than docstrings."""
        skipped = {id(constant) for _, constant in self.docstrings}
        found: set[str] = set()
        for node in self.nodes:
            for field in _NAMES:
                if isinstance(value := getattr(node, field, None), str):
                    found.update(value.split("."))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                found.update(_WORD.findall(node.value))
        return found

    def __str__(self) -> str:
        return str(self.path.relative_to(REPOSITORY))


def sources(folders: Sequence[str]) -> list[Source]:
    """Return every Python file of these packages' folders."""
    return [
        Source(folder.name, path, path.relative_to(folder).with_suffix("").parts)
        for folder in (REPOSITORY / name for name in folders)
        for path in sorted(folder.rglob("*.py"))
    ]


def num_code_lines(source: Source) -> int:
    """Count the lines that hold code: without blanks, comments, docstrings and imports."""
    left_out: set[int] = set()
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for _, docstring in source.docstrings:
        left_out.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - left_out)


def public_names(source: Source) -> int:
    """Count the module's names without an underscore: functions, classes and constants."""
    count = 0
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef | Function):
            count += not node.name.startswith("_")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            count += sum(isinstance(name, ast.Name) and not name.id.startswith("_") for name in targets)
    return count


def measured(files: Sequence[Source]) -> dict[str, dict[str, int]]:
    """Return lines of code, files, public names and all lines of each room."""
    rooms: dict[str, Counter[str]] = {}
    for file in files:
        room = rooms.setdefault(file.room, Counter())
        room.update(
            code=num_code_lines(file), files=1, public=public_names(file), lines=file.text.count("\n")
        )
    return {name: dict(room) for name, room in sorted(rooms.items())}


def over_budget(rooms: dict[str, dict[str, int]], budgets: dict[str, dict[str, int]]) -> Iterator[str]:
    """Yield the rooms, and the packages as a whole, that are larger than their budget or have none."""
    packages: dict[str, Counter[str]] = {}
    for name, room in rooms.items():
        packages.setdefault(name.split("/")[0], Counter()).update(room)
    for name, size in {**rooms, **packages}.items():
        if name not in budgets:
            yield f"{BUDGET.name}: {name} has no budget"
            continue
        for what, most in budgets[name].items():
            if size.get(what, 0) > most:
                yield f"{name}: {size[what]:,} {what}, and its budget is {most:,} ({BUDGET.name})"
    for name in budgets.keys() - rooms.keys() - packages.keys():
        yield f"{BUDGET.name}: there is no {name}"


def _defined_privately(file: Source) -> set[str]:
    """Return the private names that a file defines, as attributes, methods, functions, classes or fields."""
    found = set()
    for node in file.nodes:
        if isinstance(node, ast.ClassDef | Function):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("_"):
            found.add(node.value)  # of `__slots__` and `setattr`
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def private_access(files: Sequence[Source], foreign_names: Sequence[str]) -> Iterator[str]:
    """Yield the places that use a private name of another room; `foreign_names` are those of torch and Python."""
    defined: dict[str, set[str]] = {}
    for file in files:
        defined.setdefault(file.room, set()).update(_defined_privately(file))
    anywhere = set().union(*defined.values())
    packages = {file.package for file in files}
    for file in files:
        foreign = anywhere - defined[file.room] - set(foreign_names)
        for node in file.nodes:
            if isinstance(node, ast.Attribute) and node.attr in foreign:
                yield f"{file}:{node.lineno}: {node.attr} is private to another room"
            elif isinstance(node, ast.ImportFrom) and node.module:
                ours = node.module.split(".")[0] in packages
                inside = f"{node.module}.".startswith(f"{file.room.replace('/', '.')}.")
                for alias in node.names:
                    if ours and not inside and alias.name.startswith("_") and alias.name != "__version__":
                        yield f"{file}:{node.lineno}: {alias.name} is private to {node.module}"


def many_parameters(files: Sequence[Source], mirrors: Sequence[str]) -> Iterator[str]:
    """Yield the functions with more than seven parameters.

    `self`, options of commands, and what numba compiles do not count: compiled code takes no objects.
    """
    found = set()
    for file in files:
        for node in file.nodes:
            if isinstance(node, Function):
                listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                counted = [
                    argument
                    for place, argument in enumerate(listed)
                    if not (place == 0 and argument.arg in ("self", "cls"))
                ]
                commanded = any(
                    "Annotated" in ast.dump(argument.annotation)
                    for argument in counted
                    if argument.annotation
                )
                compiled = any(
                    re.search("compile|njit|inner", ast.dump(each)) for each in node.decorator_list
                )
                name = f"{file.module}:{node.name}"
                if len(counted) > MOST_PARAMETERS and not commanded and not compiled:
                    found.add(name)
                    if name not in mirrors:
                        yield f"{file}:{node.lineno}: {node.name} has {len(counted)} parameters"
    for name in sorted(set(mirrors) - found):
        yield f"{BUDGET.name}: {name} does not need to be listed as a mirror of torch's"


def small_files(files: Sequence[Source], lone: Sequence[str]) -> Iterator[str]:
    """Yield the files under 60 lines that one other file alone imports."""
    modules = {file.module for file in files}
    importers: dict[str, set[str]] = {}
    for file in files:
        for node in file.nodes:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if name in modules and name != file.module:
                    importers.setdefault(name, set()).add(file.module)
    for file in files:
        by = importers.get(file.module, set())
        is_package = file.parts[-1] in ("__init__", "__main__", "version", "errors")
        lines = file.text.count("\n")
        if len(by) == 1 and lines < SMALL_FILE_LINES and not is_package and str(file) not in lone:
            yield f"{file}: {lines} lines, and only {min(by)} imports it: move it there"


def unknown_names(files: Sequence[Source], foreign_words: Sequence[str]) -> Iterator[str]:
    """Yield the names in backticks that nothing defines or uses.

    In the docstring of a package's `__init__` a plain name has to be a module of that package or defined in one.
    `foreign_words` are names of the kernel, of torch and of other libraries.
    """
    known = {*dir(builtins), *foreign_words, "self", "cls"}
    for file in files:
        known.update(file.parts, file.words)
    for file in files:
        here = known
        if file.parts[-1] == "__init__":
            inside = [each for each in files if each.path.is_relative_to(file.path.parent)]
            here = {file.package, *dir(builtins), *foreign_words}
            for each in inside:
                here.update(each.parts, each.words)
        for node, docstring in file.docstrings:
            names = here if isinstance(node, ast.Module) else known
            for quoted in re.findall(r"``?([^`]+)``?", str(docstring.value)):
                if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", quoted):
                    last = quoted.removesuffix("()").rstrip(".").split(".")[-1]
                    if last not in names and not _is_word_of_torch(quoted):
                        yield f"{file}:{docstring.lineno}: `{quoted}` is not defined anywhere"


def _is_word_of_torch(name: str) -> bool:
    return name.startswith(("torch.", "numpy.", "scipy.", "sklearn.", "numba.", "dist.", "c10d."))


def main(arguments: Sequence[str]) -> int:
    """Print the broken rules and return 1 if there are any; with `--print` print the sizes of all rooms instead."""
    listed = json.loads(BUDGET.read_text())
    files = sources(listed["packages"])
    rooms = measured(files)
    totals: dict[str, Counter[str]] = {}
    for name, room in rooms.items():
        totals.setdefault(name.split("/")[0], Counter()).update(room)
    if "--print" in arguments:
        for name, room in (*rooms.items(), *totals.items()):
            print(f"{name:34s}" + "".join(f"{what} {count:7,}  " for what, count in room.items()))
        return 0
    broken = [
        *over_budget(rooms, listed["budget"]),
        *private_access(files, listed["foreign_names"]),
        *many_parameters(files, listed["mirrors"]),
        *small_files(files, listed["lone_files"]),
        *unknown_names(files, listed["foreign_words"]),
    ]
    sizes = "; ".join(
        f"{name}: {size['code']:,} lines of code, {size['lines']:,} in all, {size['files']} files"
        for name, size in totals.items()
    )
    print("\n".join(broken) if broken else f"house: {sizes}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Hold the words of this project to a few rules: `make check` runs it over pages, docstrings, help texts and messages.

A sentence has at most 25 words and two numbers. Some words are refused (`WORDS`), and what to say instead is printed.
A line of a page has at most 140 characters. `prose_exceptions.txt` lists the sentences that may break a rule, and why.
`LONGEST` limits how many words pages have.

Every docstring of the rooms in `PLAIN`, public or not, begins with a verb or a noun phrase and has short sentences.
Docstrings and comments name the actor instead of using a word of `PRONOUNS`.

    python tests/harness/prose_lint.py [FILE ...]
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EXCEPTIONS = Path(__file__).with_name("prose_exceptions.txt")
MOST_WORDS, MOST_NUMBERS, MOST_COLUMNS = 25, 2, 140

# Pages are held to all rules; notes and contributors' pages to the list of words only.
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "docs/*.md",
    "docs/guide/*.md",
    "docs/explain/*.md",
    "docs/reference/*.md",
)
WORDS_ONLY = ("CONTRIBUTING.md", "docs/architecture.md", "docs/decisions/*.md", "docs/notebook/*.md")
SOURCES = (
    "src/paceline",
    "lab/src/paceline_lab",
    "adasum/src/paceline_adasum",
    "lossy/src/paceline_lossy",
    "plan/src/paceline_plan",
    "recipes/src/paceline_recipes",
    "servers/src/paceline_servers",
    "svm/src/paceline_svm",
)
HARNESS = "tests/harness"
# Files and folders whose every docstring and comment is held to `OPENINGS`, `PRONOUNS` and the length of sentences.
PLAIN: tuple[str, ...] = (*SOURCES, "tests/harness")
ONLY_HELP = "lab/src/paceline_lab/experiments"  # the words of pictures are looked at, not read

# How many words of prose pages may have, each or all together. What is code or printed by a program does not count.
LONGEST = (("README.md", 600), ("docs/guide/*.md", 950))
LONGEST_TOGETHER = ((("docs/guide/*.md",), 17_200), (PAGES, 34_300))

# Words that are refused, and what to say. Code in backticks is never looked at.
WORDS = {
    r"as ever|anew|likewise|thereby|by a hair|be it": "say it plainly",
    r"beside": "next to, or compared with",
    r"of which|to that|what there is|cannot be:|leave out either": "name the noun",
    r"wanted": "say what it is, not what it was to be",
    r"(?-i:^Of) (?:a|an|the|what|each|every|which|whose|those|these|this)": "begin with the noun",
    r"(?:^|(?<=[.;:,] ))else(?= |,)": "otherwise",
    r"ours|theirs|our|we": "Paceline, torch",
    r"(?:ms|[µu]s|s|MB|MiB|GB|bytes|seconds|times|samples|numbers|gradients) an? "
    r"(?:step|rank|second|host|bucket|layer|sample|epoch|parameter|device|element|node)": "per",
    r"\((?:if|when|unless|where|while)": "a condition is a sentence, not a parenthesis",
    r"iterations? of training|training iterations?": "step",
    r"minibatch size|batch size of all ranks": "global batch",
    r"bandwidths?": "rate",
    r"competitors?": "side",
    r"synchroni[sz]e gradients|aggregate gradients": "reduce",
}
_REFUSED = [
    (re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE), better) for words, better in WORDS.items()
]
OPENING_RULE = "a docstring begins with a verb or, of a class or module, with a noun phrase"
# A docstring that begins so has no subject or verb.
OPENINGS = frozenset(
    re.findall(
        r"\w+",
        "who whose whom whoever what whatever which wherever where when why how whether of as by for from in on at "
        "with without after before to until since if that because while once only nobody somebody "
        "everybody nothing not no is are does do be it its these those here there else",
    )
)
# A function does something, and its docstring begins with the verb.
ARTICLES = frozenset(("the", "a", "an", "all", "each", "whether", "this"))
PRONOUNS = re.compile(
    r"\b(?:whoever|whomever|nobody|somebody|everybody|someone|anybody)(?:'s)?\b", re.IGNORECASE
)
# Not those of a name (ResNet-50), a formula (2(P-1)/P) or a list that goes on (1, 2, 3, ...).
_NUMBER = re.compile(r"(?<![\w./-])\d+(?:[.,]\d+)*(?!\w|[.,]\d|[(/]|(?:, \d+)*, \.\.\.)")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_`\[{A-Z0-9])|\s·\s")
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Prose:
    """A paragraph, a table's cell, a help text or a message; `sentences` is false where only its words count."""

    path: Path
    line: int
    text: str
    sentences: bool = True
    numbers: bool = True


@dataclass(frozen=True)
class Finding:
    """A rule that a sentence breaks."""

    prose: Prose
    sentence: str
    rule: str

    def __str__(self) -> str:
        return f"{self.prose.path.relative_to(REPOSITORY)}:{self.prose.line}: {self.rule}: {self.sentence}"


def findings(prose: Prose) -> Iterator[Finding]:
    """Yield every rule that a piece of prose breaks."""
    for sentence in _SENTENCE_END.split(_plain(prose.text)):
        for pattern, better in _REFUSED:
            if found := pattern.search(sentence):
                yield Finding(prose, sentence, f"'{found[0].strip()}' ({better})")
        if not prose.sentences:
            continue
        if (num_words := _num_words(sentence)) > MOST_WORDS:
            yield Finding(prose, sentence, f"{num_words} words")
        num_numbers = len(_NUMBER.findall(sentence))
        if prose.numbers and num_numbers > MOST_NUMBERS:
            yield Finding(prose, sentence, f"{num_numbers} numbers")


def _num_words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def _plain(text: str) -> str:
    """Return the text as it is read: without markup, and with each piece of code as one word."""
    text = re.sub(r"``?[^`]+``?", "`code`", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|<[^>]+>", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+|\b[\d.]+:\d+\b", "`address`", text)
    return re.sub(r"\s+", " ", text.replace("**", "").replace("*", "")).strip()


def _without_code(path: Path) -> str:
    return _FENCE.sub(lambda block: "\n" * block[0].count("\n"), path.read_text())


def page(path: Path, *, words_only: bool = False) -> Iterator[Prose]:
    """Yield a page's paragraphs, list items, headings and cells of tables; code is left out."""
    text = _without_code(path)
    paragraph: list[str] = []
    begin, generated = 0, False
    for line, content in enumerate([*text.splitlines(), ""], start=1):
        words = content.strip()
        generated = words.startswith(":::") or (generated and content[:1] in ("", " "))
        new_item = re.match(r"([-*+]|\d+\.) |#|\||>|<|:::", words)
        if (not words or new_item) and paragraph:
            yield Prose(path, begin, " ".join(paragraph), sentences=not words_only)
            paragraph = []
        if words.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", words.strip("|")):
                yield Prose(path, line, cell, sentences=not words_only, numbers=False)
        elif words and not generated and not words.startswith("<"):
            begin = begin if paragraph else line
            paragraph.append(re.sub(r"^([-*+]|\d+\.|#+|>) ", "", words))


def long_lines(path: Path) -> Iterator[Finding]:
    """Yield the lines of prose that are longer than a review shows; tables, links and code may be."""
    text = _without_code(path)
    for line, content in enumerate(text.splitlines(), start=1):
        if len(content) > MOST_COLUMNS and not content.lstrip().startswith(("|", "[", "<", "!")):
            yield Finding(Prose(path, line, content), content, f"{len(content)} characters in a line")


def words_of(path: Path) -> int:
    """Return the number of words of prose on a page: headings, paragraphs and tables, without code and links."""
    return _num_words(_plain(_without_code(path)))


def too_long() -> Iterator[str]:
    """Yield the pages, and the groups of pages, that have more words than they may."""
    for pattern, most in LONGEST:
        for path in REPOSITORY.glob(pattern):
            if words_of(path) > most:
                yield f"{path.relative_to(REPOSITORY)}: {words_of(path):,} words, and at most {most:,} may be"
    for patterns, most in LONGEST_TOGETHER:
        paths = {path for pattern in patterns for path in REPOSITORY.glob(pattern)}
        for_contributors = {path for pattern in WORDS_ONLY for path in REPOSITORY.glob(pattern)}
        total = sum(map(words_of, paths - for_contributors))
        if total > most:
            yield f"{', '.join(patterns)}: {total:,} words together, and at most {most:,} may be"


@cache
def public_names() -> frozenset[str]:
    """Return the names that a package exports by `__all__`, or that the reference lists as members."""
    exported = [path for folder in SOURCES for path in (REPOSITORY / folder).rglob("__init__.py")]
    texts = [path.read_text() for path in [*exported, *REPOSITORY.glob("docs/reference/*.md")]]
    lists = [
        names for text in texts for names in re.findall(r"(?:__all__ =|members:) \[(.*?)\]", text, re.DOTALL)
    ]
    return frozenset(name for names in lists for name in re.findall(r"\w+", names))


def _documented(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield a module's public classes and functions, their public methods, and commands of the command line."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            decorators = " ".join(map(ast.dump, node.decorator_list))
            if node.name in public_names() or re.search("command|callback", decorators):
                yield node
                yield from (part for part in node.body if not getattr(part, "name", "_").startswith("_"))


def source(path: Path) -> Iterator[Prose]:
    """Yield the docstrings of a file's public names, and every string in it that reads as a sentence."""
    tree = ast.parse(path.read_text())
    for node in _documented(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            yield from _of_docstring(Prose(path, node.body[0].lineno, docstring))
    left_out: set[ast.AST] = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # docstrings
    for string in ast.walk(tree):
        if isinstance(string, ast.JoinedStr):
            left_out.update(part for value in string.values for part in ast.walk(value))
            yield from _of_string(path, string.lineno, "".join(map(_piece, string.values)))
        elif isinstance(string, ast.Constant) and isinstance(string.value, str) and string not in left_out:
            yield from _of_string(path, string.lineno, string.value)


def names_verbs(path: Path) -> bool:
    """Return whether functions of this file must begin their docstrings with a verb: not in the lab and the tests."""
    return not any(path.is_relative_to(REPOSITORY / each) for each in ("lab", "tests"))


def plain_findings(path: Path) -> Iterator[Finding]:
    """Yield the broken rules of `PLAIN` in every docstring and every comment of a file."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                line = node.body[0].lineno
                first = docstring.split("\n", maxsplit=1)[0]
                opening = re.split(r"[\s,:;.]+", docstring.lower(), maxsplit=1)[0]
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                if opening in OPENINGS or (is_function and opening in ARTICLES and names_verbs(path)):
                    yield Finding(Prose(path, line, docstring), first, OPENING_RULE)
                for prose in _of_docstring(Prose(path, line, docstring)):
                    for sentence in _SENTENCE_END.split(_plain(prose.text)):
                        if (num_words := _num_words(sentence)) > MOST_WORDS:
                            yield Finding(prose, sentence, f"{num_words} words")
                yield from _without_actor(Prose(path, line, docstring))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _without_actor(Prose(path, token.start[0], token.string))


def _without_actor(prose: Prose) -> Iterator[Finding]:
    for found in PRONOUNS.finditer(prose.text):
        sentence = re.sub(r"\s+", " ", prose.text[max(found.start() - 60, 0) : found.end() + 60])
        yield Finding(prose, sentence, f"'{found[0]}' (name the actor)")


def help_texts(path: Path) -> Iterator[Prose]:
    """Yield what a file's command line prints about its options."""
    for call in ast.walk(ast.parse(path.read_text())):
        for keyword in getattr(call, "keywords", ()):
            if keyword.arg == "help" and isinstance(keyword.value, ast.Constant):
                yield Prose(path, keyword.value.lineno, str(keyword.value.value))


def _piece(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else "X"


def _of_string(path: Path, line: int, text: str) -> Iterator[Prose]:
    """Yield a string as prose if it has some words and no line of code."""
    code = re.search(r"[;{}]\s*\n|^\s*#include", text, re.MULTILINE)
    if len(re.findall(r"\b[a-z]{2,}\b", text)) >= 5 and not code:
        yield Prose(path, line, text)


def _of_docstring(whole: Prose) -> Iterator[Prose]:
    """Yield a docstring's paragraphs and its arguments' sentences; sources, examples and formulas are left out."""
    paragraph: list[str] = []
    section = ""
    for content in [*_FENCE.sub("", whole.text).splitlines(), ""]:
        words = content.strip()
        heading = re.fullmatch(r"([A-Z][a-z]+(?: first)?):", words)
        section = heading[1] if heading and not content.startswith(" ") else section
        new_item = re.match(r"\d+\. ", words) or (
            re.match(r"[-*] |\w[\w., *`]*: ", words) and content.startswith(" ")
        )
        if paragraph and (not words or heading or new_item):
            yield replace(whole, text=" ".join(paragraph))
            paragraph = []
        code = re.match(r" {9}|>>>| +[\w.]+ = |\||[├│└]|.*\S {3,}\S", content)
        if words and not heading and not code and section not in ("Source", "References", "Example"):
            paragraph.append(
                re.sub(r"^[-*] |^\d+\. |^\w[\w., *`]*: (?=\S)", "", words) if new_item else words
            )


def _read(path: Path) -> Iterator[Finding]:
    """Yield the broken rules of a file of this repository."""
    words_only = any(path in REPOSITORY.glob(pattern) for pattern in WORDS_ONLY)
    if path.suffix == ".md":
        pieces = page(path, words_only=words_only)
    elif REPOSITORY / HARNESS in path.parents:
        pieces = iter(())
    else:
        pieces = help_texts(path) if REPOSITORY / ONLY_HELP in path.parents else source(path)
    if path.suffix == ".py" and any(path.is_relative_to(REPOSITORY / each) for each in PLAIN):
        yield from plain_findings(path)
    for prose in pieces:
        yield from findings(prose)
    if path.suffix == ".md" and not words_only:
        yield from long_lines(path)


@dataclass(frozen=True)
class Allowed:
    """A sentence that may break a rule, by its file and its first words; `*` are all of a file's."""

    path: str
    begins: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        """Return whether the exception is for that sentence."""
        path = str(finding.prose.path.relative_to(REPOSITORY))
        return self.path == path and (self.begins == "*" or finding.sentence.startswith(self.begins))


def exceptions() -> list[Allowed]:
    """Return the listed exceptions: `FILE | FIRST WORDS | REASON`, one per line."""
    lines = (line for line in EXCEPTIONS.read_text().splitlines() if line and not line.startswith("#"))
    return [Allowed(*(part.strip() for part in line.split("|"))) for line in lines]


def main(names: list[str]) -> int:
    """Print the broken rules, in these files or in all, and the exceptions that are no longer needed."""
    patterns = [*PAGES, *WORDS_ONLY, *(f"{folder}/**/*.py" for folder in (*SOURCES, HARNESS))]
    paths = {path for pattern in patterns for path in REPOSITORY.glob(pattern)}
    chosen = [Path(name).resolve() for name in names] or sorted(paths)
    found = [finding for path in chosen for finding in _read(path)]
    allowed = exceptions()
    broken = [str(finding) for finding in found if not any(each.covers(finding) for each in allowed)]
    if not names:
        idle = [each for each in allowed if each.begins != "*" and not any(map(each.covers, found))]
        broken += [
            f"{EXCEPTIONS.name}: nothing needs this any longer: {each.path} | {each.begins}" for each in idle
        ]
        broken += too_long()
    print("\n".join(broken) if broken else f"prose: {len(chosen)} files keep the rules", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

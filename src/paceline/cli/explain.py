"""`paceline explain`: what a message or a term means, from the pages that are installed with the package."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigurationError

_COPIES = Path(__file__).parent / "pages"
# A wheel has copies; a checkout the pages themselves.
_PAGES = _COPIES if _COPIES.is_dir() else Path(__file__).parents[3] / "docs"
_PLACEHOLDER = re.compile(r"\b(?:N|NAME)\b")
_NEAR = 0.6  # of the telling words, at least so many are in a heading that answers
# Words that every heading might have.
_COMMON = re.compile(
    "an?|and|are|as|at|be|but|by|did|do|does|for|has|have|in|is|its?|no|not|of|on|or|that|the|to|was"
)


@dataclass(frozen=True)
class Passage:
    """An entry of the troubleshooting page, or a word of the glossary."""

    heading: str
    text: str
    group: str

    @property
    def words(self) -> str:
        """Return the heading in the form in which it is compared: lower case, without punctuation and placeholders."""
        return _words(_PLACEHOLDER.sub(" ", self.heading))


def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="Words of a message, a whole message, or a term. Without words, all headings are listed."
        ),
    ] = None,
) -> None:
    """Explain an error message or a term, without a network.

    `paceline explain was killed by`
    """
    known = passages()
    if not words:
        for group, of_group in itertools.groupby(known, key=lambda passage: passage.group):
            print(f"{group}\n", *(f"  {passage.heading}" for passage in of_group), "", sep="\n")
        print("`paceline explain WORDS` prints a passage.")
        return
    asked = " ".join(words)
    found = answers(asked, known)
    if not found:
        near = sorted(known, key=lambda passage: -_likeness(_words(asked), passage))[:3]
        raise ConfigurationError(
            f"nothing explains {asked!r}. The nearest headings: {'; '.join(each.heading for each in near)}. "
            "`paceline explain` lists all; with the fixed words of a message it prints what to do."
        )
    # An error's name alone, with or without its "Error", does not tell its cases apart: all are printed.
    name = _words(asked).removesuffix("error")
    shown = [each for each in found if _words(each.text).startswith((f"{name} ", f"{name}error "))] or found[
        :1
    ]
    print("\n\n".join(f"{each.heading}\n\n{each.text}" for each in shown))
    if others := [each.heading for each in found if each not in shown]:
        print(f"\nSee also: {'; '.join(others[:3])}")


def passages() -> list[Passage]:
    """Return every entry of the troubleshooting page, then every term of the glossary."""
    page = (_PAGES / "troubleshooting.md").read_text(encoding="utf-8")
    entries = []
    for group, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL):
        for heading, text in re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", body, re.MULTILINE | re.DOTALL):
            entries.append(Passage(heading, _readable(text), group))
    rows = re.findall(
        r"^\| ([^|]+?) \| ([^|]+?) \|", (_PAGES / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    return [*entries, *(Passage(word, _readable(text), "Terms") for word, text in rows if word != "word")]


def answers(asked: str, known: list[Passage]) -> list[Passage]:
    """Return the passages of `known` that these words, a term or a whole message, are about; the best first."""
    query = _words(asked)
    terms = [each for each in known if query in (_words(term) for term in each.heading.split(","))]
    within = [each for each in known if f" {query} " in f" {each.words} "]
    within += [each for each in known if _words(each.text).startswith(f"{query}error ")]
    # The longest heading says the most about a whole message.
    around = [each for each in known if each.group != "Terms" and _fixed_words_are_in(query, each)]
    around.sort(key=lambda each: -len(each.words))
    if found := list(dict.fromkeys([*terms, *around, *within])):
        return found
    near = [each for each in known if _likeness(query, each) >= _NEAR]
    return sorted(near, key=lambda each: -_likeness(query, each))


def _fixed_words_are_in(query: str, passage: Passage) -> bool:
    parts = [_words(part) for part in _PLACEHOLDER.split(passage.heading)]
    longest = max(parts, key=len)
    return f" {longest} " in f" {query} "


def _likeness(query: str, passage: Passage) -> float:
    """Return the part of the query's telling words that the heading has; less if only the text has them."""
    telling = [word for word in query.split() if not _COMMON.fullmatch(word)] or query.split() or [""]
    here, text = passage.words.split(), _words(passage.text).split()
    in_heading = sum(any(each[:5] == word[:5] for each in here) for word in telling)  # skip, skipped, skips
    in_text = sum(word in text for word in telling)
    return max(in_heading, _NEAR * in_text) / len(telling)


def _words(text: str) -> str:
    return " ".join(re.findall(r"[a-z][a-z_=-]*", text.lower()))


def _readable(text: str) -> str:
    """Return the text without the markup of links; a page stays as its path in the documentation."""
    text = re.sub(r"\[([^\]]+)\]\(#[^)]*\)", r"\1", text)
    return re.sub(r"\[([^\]]+)\]\(([\w/.-]+)(?:#[\w-]+)?\)", r"\1 (docs/\2)", text).strip()

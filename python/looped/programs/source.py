"""Program text cut into lines of words, each with its place, and errors that name it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
WORD = re.compile(r"\[|\]|[,:=]|[^\s\[\],:=;#]+")
MOST_CHARACTERS = 4_000_000
MOST_DIGITS = 70  # the longest word of a number: 63 bits in binary, with room


class ProgramError(ValueError):
    """A mistake in a program: `file:line:column: what it is`."""

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(f"{place}: {message}")
        self.place = place


@dataclass(frozen=True)
class Place:
    """Where something stands in a program's text, counted from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Word:
    """A word or one of , : = [ ] and where it stands."""

    text: str
    place: Place

    def refuse(self, message: str) -> NoReturn:
        """Raise ProgramError at this word."""
        raise ProgramError(self.place, message)

    @property
    def is_name(self) -> bool:
        """Whether it can name a cell, a matrix or a line."""
        return NAME.match(self.text) is not None


def lines_of(text: str, file: str) -> Iterator[list[Word]]:
    """The words of every line that has some. Comments begin with ; or # and end with the line.

    Raises ProgramError for text that is too long or holds a character that is not printable.
    """
    if len(text) > MOST_CHARACTERS:
        raise ProgramError(Place(file, 1, 1), f"the program has {len(text)} characters; at most {MOST_CHARACTERS} are read")
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        code = re.split(r"[;#]", line, maxsplit=1)[0]
        for i, character in enumerate(code):
            if not (character.isprintable() or character == "\t"):
                raise ProgramError(Place(file, number, i + 1), f"the character {character!r} does not belong in a program")
        words = [Word(match[0], Place(file, number, match.start() + 1)) for match in WORD.finditer(code)]
        if words:
            yield words


def integer_of(word: Word) -> int | None:
    """A decimal, hexadecimal (0x) or binary (0b) integer, or None. Raises ProgramError for one of more than 70 characters."""
    if not re.match(r"[+-]?(0[xX][0-9a-fA-F]+|0[bB][01]+|[0-9]+)\Z", word.text):
        return None
    if len(word.text) > MOST_DIGITS:
        word.refuse(f"the number {word.text[:20]}... is too long")
    digits = word.text.lower().lstrip("+-")
    value = int(digits, 16 if digits.startswith("0x") else 2 if digits.startswith("0b") else 10)
    return -value if word.text.startswith("-") else value


class Names:
    """What has been named, and where: a name is given once."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}

    def take(self, word: Word, reserved: frozenset[str]) -> str:
        """The name that a word gives. Raises ProgramError where it is no name, reserved, or given before."""
        if not word.is_name:
            word.refuse(f"{word.text!r} is no name; names are letters, digits and _, and begin with no digit")
        if word.text.lower() in reserved:
            word.refuse(f"{word.text!r} is a word of the language; choose another name")
        if word.text in self.places:
            word.refuse(f"{word.text!r} is named twice, first in line {self.places[word.text].line}")
        self.places[word.text] = word.place
        return word.text

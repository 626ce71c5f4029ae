"""Flags of other programs as data: names, type, default, and what they become here; parsed as their parser does.

A flag is mapped by one of: `sets` (a recipe field with the same value), `run` (an option of `reconv train`), `none`
(no effect here, and why), `missing` (not supported, and what to do), or by the code of its program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reconv.core.errors import UsageError
from reconv.migrate.command_line import shorten, unfilled
from reconv.recipe.presets import nearest

Arity = int | Literal["+", "*", "?"]
Dialect = Literal["argparse", "absl", "exact"]
_EXAMPLE_WORDS = ("value", "VALUE", "N", "NUM", "X", "...")  # in documentation, for a number
_NUMBER = re.compile(r"-\d+(\.\d*)?(e-?\d+)?|-\.\d+")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of another program."""

    names: tuple[str, ...]
    type: Callable[[str], Any] = str
    default: Any = None
    arity: Arity = 1  # 0 is a switch
    const: Any = True  # the value of a switch, and of `?` without one
    choices: tuple[Any, ...] = ()
    positive: bool = False  # refuse numbers of 0 and below
    sets: str = ""
    convert: Callable[[Any], Any] | None = None  # of the value that `sets` writes
    run: str = ""
    none: str = ""
    missing: str = ""
    example: tuple[str, ...] = ()  # values for the documentation and tests
    beside: tuple[str, ...] = ()  # words of a command in which it means something
    changes_result: bool = True  # whether leaving out a `missing` one changes what is computed

    @property
    def name(self) -> str:
        """The name in messages: the first long one."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    @property
    def key(self) -> str:
        """The name of its value, as in argparse: `batch_size` of `--batch-size`."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def is_simple(self) -> bool:
        """True if the table alone says what becomes of it."""
        return bool(self.sets or self.run or self.none or self.missing)


def flag(names: str, type: Callable[[str], Any] = str, default: Any = None, **options: Any) -> Flag:
    """A flag with a value; names are separated by spaces."""
    return Flag(tuple(names.split()), type, default, **options)


def switch(names: str, default: Any = False, const: Any = True, **options: Any) -> Flag:
    """A flag without a value."""
    return Flag(tuple(names.split()), bool, default, 0, const, **options)


@dataclass(frozen=True, slots=True)
class Typed:
    """A flag in a command line, with its value."""

    flag: Flag
    value: Any
    text: str  # as typed
    unfilled: str | None = None  # what the user has to fill in; the value is then the default
    origin: str = ""  # a configuration that has it; empty: the command line


@dataclass(frozen=True, slots=True)
class ParsedWords:
    """The flags and positional arguments of a command line, and the words that follow the first positional one."""

    typed: tuple[Typed, ...]
    positional: tuple[str, ...]
    rest: tuple[str, ...] = ()


def text_bool(text: str) -> bool:
    """`True` in any case is true and everything else false, as several programs parse it."""
    return text.lower() == "true"


def yes_no(text: str) -> bool:
    """A boolean of absl and of launchers."""
    if text.lower() in ("true", "t", "1", "yes", "y", "on"):
        return True
    if text.lower() in ("false", "f", "0", "no", "n", "off"):
        return False
    raise ValueError("true or false")


def any_text_is_true(text: str) -> bool:
    """argparse with `type=bool`: every text but the empty one is true."""
    return bool(text)


class FlagParser:
    """Parses words as the parser of another program does."""

    def __init__(self, program: str, flags: Sequence[Flag], dialect: Dialect = "argparse") -> None:
        self.program = program
        self.flags = tuple(flags)
        self.dialect = dialect
        self._by_name: dict[str, Flag] = {}
        for item in flags:
            for name in item.names:
                assert name not in self._by_name, f"{program} has {name} twice"
                self._by_name[name] = item

    def parse(self, words: Sequence[str], *, stops: bool = False, may_lack_values: bool = False) -> ParsedWords:
        """The flags and positional words; with `stops`, parsing ends at the first positional word.

        With `may_lack_values`, a flag without its value has to be filled in.
        """
        typed: list[Typed] = []
        positional: list[str] = []
        queue = list(words)
        while queue:
            word = queue.pop(0)
            if word == "--":
                if stops:
                    return ParsedWords(tuple(typed), (), tuple(queue))
                positional += queue
                break
            if not self._is_option(word):
                if stops:
                    return ParsedWords(tuple(typed), (word,), tuple(queue))
                positional.append(word)
                continue
            if may_lack_values and not queue and "=" not in word and self._match(word)[0].arity in (1, "+"):
                queue.append(f"<{self._match(word)[0].key.replace('_', ' ')}>")
            for item, value, text in self._option(word, queue):
                typed.append(self._typed(item, value, text))
        return ParsedWords(tuple(typed), tuple(positional))

    def knows(self, word: str) -> bool:
        """True if a word is one of the flags."""
        try:
            return self._is_option(word) and bool(self._match(word))
        except UsageError:
            return False

    def _is_option(self, word: str) -> bool:
        return len(word) > 1 and word.startswith("-") and not _NUMBER.fullmatch(word)

    def _option(self, word: str, queue: list[str]) -> Iterator[tuple[Flag, str | list[str] | None, str]]:
        """The flag of a word with its value, which may follow in the queue; `-xy` may be several."""
        item, attached, more = self._match(word)
        if more:  # short switches written together
            yield item, None, f"-{word[1]}"
            yield from self._option(f"-{more}", queue)
            return
        if item.arity == 0:
            if attached is not None and self.dialect != "absl":
                raise self._error(item, f"takes no value, but has {attached!r}")
            yield item, attached, word
            return
        if attached is not None and item.arity in (1, "?", "+", "*"):
            yield item, attached if item.arity in (1, "?") else [attached], word
            return
        values = [] if attached is None else [attached]
        wanted = item.arity if isinstance(item.arity, int) else 1 if item.arity == "?" else len(queue)
        while queue and len(values) < wanted and not (self._is_option(queue[0]) and not self._is_value(item, queue[0])):
            if queue[0] == "--":
                break
            values.append(queue.pop(0))
        if isinstance(item.arity, int) and len(values) < item.arity:
            raise self._error(item, f"needs {'a value' if item.arity == 1 else f'{item.arity} values'}")
        if item.arity == "+" and not values:
            raise self._error(item, "needs at least one value")
        text = " ".join([word, *values])
        if item.arity == "?":
            yield item, values[0] if values else None, text
        else:
            yield item, values[0] if item.arity == 1 else values, text

    def _is_value(self, item: Flag, word: str) -> bool:
        """True if a word that looks like an option is a value: launchers take anything after their flags."""
        return self.dialect == "exact" and item.arity in (1, 2) and word not in self._by_name

    def _match(self, word: str) -> tuple[Flag, str | None, str]:
        """The flag of a word, the value attached to it, and further short switches."""
        name, equals, value = word.partition("=")
        attached = value if equals else None
        if self.dialect == "absl":
            return self._match_absl(name, attached)
        if word in self._by_name:
            return self._by_name[word], None, ""
        if name in self._by_name:
            return self._by_name[name], attached, ""
        if self.dialect == "exact":
            other = name[1:] if name.startswith("--") else f"-{name}"
            if other in self._by_name:
                return self._by_name[other], attached, ""
            raise self._unknown(name)
        if name.startswith("--"):
            found = {item.name: item for full, item in self._by_name.items() if full.startswith(name)}
            if len(found) == 1:
                return next(iter(found.values())), attached, ""
            if found:
                raise UsageError(
                    f"{self.program}: {name} is short for several flags", hint="write one of: " + ", ".join(found)
                )
            raise self._unknown(name)
        short = self._by_name.get(word[:2])
        if short is None:
            raise self._unknown(name)
        if short.arity == 0:
            return short, None, word[2:]
        return short, word[2:].removeprefix("="), ""

    def _match_absl(self, name: str, attached: str | None) -> tuple[Flag, str | None, str]:
        bare = name.lstrip("-").replace("-", "_")
        by_bare = {full.lstrip("-").replace("-", "_"): item for full, item in self._by_name.items()}
        if bare in by_bare:
            return by_bare[bare], attached, ""
        if bare.startswith("no") and bare[2:] in by_bare and by_bare[bare[2:]].arity == 0 and attached is None:
            return by_bare[bare[2:]], "false", ""
        raise self._unknown(name)

    def _typed(self, item: Flag, value: str | list[str] | None, text: str) -> Typed:
        if value is None:
            return Typed(item, item.const, text)
        words = value if isinstance(value, list) else [value]
        missing = next((part for part in map(unfilled, words) if part is not None), None)
        if missing is None and item.type in (int, float) and words[0] in _EXAMPLE_WORDS:
            missing = words[0]
        if missing is not None and item.type is not str:
            return Typed(item, item.default, text, missing)
        kind = yes_no if item.arity == 0 else item.type
        try:
            values = [kind(word) for word in words]
        except ValueError as error:
            raise self._error(item, f"cannot be {' '.join(words)!r}: {_kind_text(kind, error)}") from None
        if missing is None:
            wrong = [found for found in values if item.choices and found not in item.choices]
            if wrong:
                raise self._error(item, f"is one of {', '.join(map(str, item.choices))}, not {wrong[0]!r}")
            if item.positive and any(found <= 0 for found in values):
                raise self._error(item, f"must be above 0, and is {' '.join(words)}")
        elif item.choices:
            return Typed(item, item.default, text, missing)
        return Typed(item, values if isinstance(value, list) else values[0], text, missing)

    def _error(self, item: Flag, what: str) -> UsageError:
        return UsageError(f"{self.program}: {item.name} {what}", hint="correct this flag of the command")

    def _unknown(self, name: str) -> UsageError:
        near = nearest(name, self._by_name)
        return UsageError(
            f"{self.program} has no flag {shorten(name)}",
            why="every flag must be accounted for, and this one is not known",
            hint=f"did you mean {near}?" if near else "remove it, or name the program: reconv migrate --program NAME",
        )


def _kind_text(kind: Callable[[str], Any], error: ValueError) -> str:
    names: Mapping[Any, str] = {int: "a whole number is needed", float: "a number is needed"}
    return names.get(kind, str(error))

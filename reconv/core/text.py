"""Text from outside (names, paths, hosts, keys of files) made safe to print, and numbers with their nouns.

Control characters would act on the terminal, newlines would forge lines of output, and bidirectional overrides would
change the order of what is read. All other characters, of any language, stay as they are.

Whatever is printed of names, paths, hosts and keys goes through `printable`: errors, tables and notes of commands,
console and report. Text of several lines is made by `printable_lines`. JSON output keeps the names
(tests/cli/test_printable_output.py).
"""

from __future__ import annotations

import re

_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class PrintableLines(str):
    """Several lines of which each is printable: the newlines between them are meant."""

    __slots__ = ()


def printable(text: str) -> str:
    r"""The text on one line: an escape character becomes \x1b, a newline \n, a right-to-left override \u202e."""
    return text if isinstance(text, PrintableLines) else _UNSAFE.sub(_escape, text)


def printable_lines(*lines: str) -> PrintableLines:
    """The lines, each made printable, as one text."""
    return PrintableLines("\n".join(map(printable, lines)))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def count(number: int, noun: str) -> str:
    """`1 step`, `1,200 steps`."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun}{ending}"

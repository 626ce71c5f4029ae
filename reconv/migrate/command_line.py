"""A command line as it was typed, split like a shell does: assignments, commands, words, quotes, continuations.

Nothing is executed. Variables that the text itself sets are expanded; others stay as they are, and so do placeholders
such as `<path to imagenet>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from reconv.errors import UsageError

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>|;&\n]*(?<! )>|\[[A-Za-z][^\[\]|;&,\n'\"]*\](?=\s|$)")
_OPTION = re.compile(r"--?[A-Za-z]")
_ALTERNATIVES = re.compile(r"[A-Z0-9]+(\|[A-Z0-9]+)+(?=\s|$)")  # AMP|FP32, in documentation
_BRACES = re.compile(r"\{[^{}\n$'\"]*,[^{}\n'\"]*\}")
_REDIRECTION = re.compile(r"(?:[0-9]|&)?(?:>>|>|<<<|<)(?:&[0-9-]|&(?=\s*[\w./]))?")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_0-9]+)(?::?-([^{}]*))?\}|([A-Za-z_][A-Za-z_0-9]*|[0-9@*]))")
_OPERATORS = ("&&", "||", ";;", ";", "|&", "|", "&", "\n", "(", ")")
_TYPESET = re.compile(r"[\u2010-\u2015\u2212]|[\u201c\u201d\u2018\u2019]")  # dashes and quotes of word processors
_UNFILLED = re.compile(
    r"<[^<>]+>|^\[[A-Za-z][^\[\],]*\]$|\$\([^)]*\)|`[^`]*`|\$\{?[A-Za-z_0-9@*]+|[A-Z0-9]+\|[A-Z0-9|]+|\b[Yy]our_\w+|\b[Pp]ath[-_]to\b|[Xx]{3}[.,][Xx]{3}"
)
MAX_CHARACTERS = 200_000
_MAX_SHOWN = 200  # characters of a word in a message


@dataclass(slots=True)
class SimpleCommand:
    """A command without operators: `A=1 B=2 words...`."""

    assignments: list[tuple[str, str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    redirections: list[str] = field(default_factory=list)
    operator: str = ""  # what follows it: && || ; | &; empty: a line break or nothing


def split_commands(text: str) -> list[SimpleCommand]:
    """The commands of a text; raises UsageError where a quote is not closed.

    A line that begins with an option continues the line before, as in a command that was wrapped without backslashes.
    """
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"the command has {len(text):,} characters", why=f"the limit is {MAX_CHARACTERS:,}")
    variables: dict[str, str] = {}
    commands: list[SimpleCommand] = []
    current = SimpleCommand()
    redirects = False
    for kind, token in _tokens(re.sub(r"\\[ \t]*\r?\n", "\\\\\n", text).replace("\r\n", "\n")):
        if kind == "operator":
            current.operator = token.strip()
            if current.words or current.assignments or current.redirections:
                commands.append(current)
            current, redirects = SimpleCommand(), False
        elif kind == "redirection":
            current.redirections.append(token)
            redirects = re.search(r"&[0-9-]$", token) is None
        elif redirects:
            current.redirections[-1] += f" {token}"
            redirects = False
        else:
            if current == SimpleCommand() and commands and not commands[-1].operator and _OPTION.match(token):
                current = commands.pop()
            _add_word(current, token, kind, variables)
    if current.words or current.assignments or current.redirections:
        commands.append(current)
    return commands


def _add_word(command: SimpleCommand, token: str, kind: str, variables: dict[str, str]) -> None:
    """Add a word, or an assignment before the first word or after `export`."""
    exports = bool(command.words) and command.words[0] in ("export", "declare", "local", "setenv", "set")
    text = expand(token, variables)
    if _TYPESET.match(text):
        raise UsageError(
            f"{text!r} begins with a character of typeset text",
            why=f"{text[0]!r} is not the character that a shell knows",
            then='type dashes and quotes as - and "',
        )
    if kind != "quoted" and (not command.words or exports) and _ASSIGNMENT.match(token):
        name, _, value = text.partition("=")
        variables[name] = value
        command.assignments.append((name, value))
    elif kind == "bare" and text != token:  # a shell splits the value of a variable that is not quoted
        command.words += text.split()
    elif text:
        command.words.append(text)


def expand(text: str, variables: dict[str, str]) -> str:
    """The text with the variables that are known; `${NAME:-default}` is the default of one that is not."""

    def value(match: re.Match[str]) -> str:
        name, default, plain = match.groups()
        if (name or plain) in variables:
            return variables[name or plain]
        return match[0] if default is None else default

    return _VARIABLE.sub(value, text)


def unfilled(text: str) -> str | None:
    """The part of a value that the user has to fill in: `<batch size>`, `$DATA`, `your_dataset_path`; None: nothing."""
    match = _UNFILLED.search(text)
    if match is None:
        return None
    return match[0] if match[0].startswith(("<", "[", "$", "`")) else text


def shorten(text: str) -> str:
    """A text for a message: its beginning, if it is long."""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def quote(text: str) -> str:
    """A word for a POSIX shell; variables stay variables."""
    if re.fullmatch(r"(~/)?[A-Za-z0-9_@%+=:,./^-]+", text):
        return text
    if "$" in text and not re.search(r"[`\"\\<>]|\$\(", text):
        return f'"{text}"'
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text): bare (a word without quotes), word, quoted (it begins with one), operator or redirection."""
    position = 0
    while position < len(text):
        rest = text[position:]
        character = text[position]
        if rest.startswith("\\\n"):
            position += 2
        elif character in " \t":
            position += 1
        elif character == "#" and (position == 0 or text[position - 1] in " \t\n;"):
            position += len(rest.partition("\n")[0])
        elif (redirection := _REDIRECTION.match(rest)) and not _PLACEHOLDER.match(rest):
            yield "redirection", redirection[0]
            position += len(redirection[0])
        elif operator := next((sign for sign in _OPERATORS if rest.startswith(sign)), None):
            yield "operator", operator
            position += len(operator)
        else:
            word, length = _word(rest)
            has_quotes = re.search(r"['\"\\]", rest[:length]) is not None
            yield "quoted" if character in "'\"" else "word" if has_quotes else "bare", word
            position += length


def _word(text: str) -> tuple[str, int]:
    """The word at the start of a text, and how many characters it takes there."""
    parts: list[str] = []
    position = 0
    while position < len(text):
        rest, character = text[position:], text[position]
        if rest.startswith("\\\n"):
            length = 2
        elif character == "\\":
            parts.append(rest[1:2])
            length = 2
        elif character in "'\"":
            part, length = _quoted(rest)
            parts.append(part)
        elif character == "`" or rest.startswith("$("):
            close = rest.find("`" if character == "`" else ")", 1)
            length = close + 1 if close > 0 else len(rest)
            parts.append(rest[:length])
        elif match := _PLACEHOLDER.match(rest) or _BRACES.match(rest) or (not parts and _ALTERNATIVES.match(rest)):
            parts.append(match[0])
            length = len(match[0])
        elif character in " \t\n;|&()<>":
            break
        else:
            parts.append(character)
            length = 1
        position += length
    return "".join(parts), position


def _quoted(text: str) -> tuple[str, int]:
    """The content of the quoted text at the start, and its length with the quotes."""
    parts: list[str] = []
    quotes, position = text[0], 1
    while position < len(text):
        character = text[position]
        if character == quotes:
            return "".join(parts), position + 1
        if quotes == '"' and character == "\\" and text[position + 1 : position + 2] in ('"', "\\", "$", "`", "\n"):
            parts.append("" if text[position + 1] == "\n" else text[position + 1])
            position += 2
            continue
        parts.append(character)
        position += 1
    raise UsageError(
        f"a quote is not closed: {text[:40]!r}",
        why="the command ends inside of it",
        then="put the whole command into single quotes, or its text into a file: reconv migrate FILE",
    )

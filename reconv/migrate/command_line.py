"""A command line as it was typed, split like a shell does: assignments, commands, words, quotes, continuations.

Nothing is executed. Variables that the text itself sets are expanded; others stay as they are, and so do placeholders
such as `<path to imagenet>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from reconv.core.errors import UsageError

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
KEYWORDS = ("do", "then", "else", "{", "!", "$", "%", "#")  # before a command: of the shell, and prompts
_BLOCK_STARTS, _BLOCK_ENDS = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
MAX_CHARACTERS = 200_000
_MAX_SHOWN = 200  # characters of a word in a message


@dataclass(slots=True)
class SimpleCommand:
    """A command without operators: `A=1 B=2 words...`."""

    assignments: list[tuple[str, str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    redirections: list[str] = field(default_factory=list)
    operator: str = ""  # what follows it: && || ; | &; empty: a line break or nothing
    is_conditional: bool = False  # inside if, for or case, or after a test: it may not run, or run several times


def split_commands(text: str, variables: dict[str, str] | None = None) -> list[SimpleCommand]:
    """The commands of a text; raises UsageError where a quote is not closed.

    A line that begins with an option continues the line before, as in a command that was wrapped without backslashes.
    `variables` are known before the text, and get what it assigns.
    """
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"the command has {len(text):,} characters", why=f"the limit is {MAX_CHARACTERS:,}")
    variables = {} if variables is None else variables
    commands: list[SimpleCommand] = []
    current = SimpleCommand()
    redirects = False
    grown = 0  # characters that variables have added
    blocks = 0  # of if, for, while, until and case that are open
    for kind, token in _tokens(re.sub(r"\\[ \t]*\r?\n", "\\\\\n", text).replace("\r\n", "\n")):
        if kind == "operator":
            current.operator = token.strip()
            if current.words or current.assignments or current.redirections:
                commands.append(current)
            current, redirects = SimpleCommand(is_conditional=blocks > 0 or _may_be_skipped(current)), False
        elif kind == "redirection":
            current.redirections.append(token)
            redirects = re.search(r"&[0-9-]$", token) is None
        elif redirects:
            current.redirections[-1] += f" {token}"
            redirects = False
        else:
            is_empty = not (current.words or current.assignments or current.redirections)
            if is_empty and commands and not commands[-1].operator and _OPTION.match(token):
                current = commands.pop()
            if not current.words and kind == "bare":
                blocks = max(0, blocks + (token in _BLOCK_STARTS) - (token in _BLOCK_ENDS))
                current.is_conditional = current.is_conditional or blocks > 0
            grown += _add_word(current, token, kind, variables)
            if grown > MAX_CHARACTERS:
                raise _too_long(token)
    if current.words or current.assignments or current.redirections:
        commands.append(current)
    return commands


def _may_be_skipped(before: SimpleCommand) -> bool:
    """True if the command after this one may not run."""
    if before.operator == "||":
        return True
    is_test = bool(before.words) and before.words[0] in ("[", "[[", "test")
    return before.operator == "&&" and (is_test or before.is_conditional)


def _add_word(command: SimpleCommand, token: str, kind: str, variables: dict[str, str]) -> int:
    """Add a word, or an assignment before the first word or after `export`; returns how much longer it got."""
    exports = bool(command.words) and command.words[0] in ("export", "declare", "local", "setenv", "set")
    text = expand(token, variables)
    if _TYPESET.match(text):
        raise UsageError(
            f"{text!r} begins with a character of typeset text",
            why=f"{text[0]!r} is not the character that a shell knows",
            hint='type dashes and quotes as - and "',
        )
    if "for" in command.words[-1:] or "read" in command.words[-2:]:
        variables.pop(token, None)  # their values are not known
    is_first = all(word in KEYWORDS for word in command.words)
    if kind != "quoted" and (is_first or exports) and _ASSIGNMENT.match(token):
        name, _, value = text.partition("=")
        if command.is_conditional:
            variables.pop(name, None)  # its value is not known: references to it have to be filled in
        else:
            variables[name] = value
        command.assignments.append((name, value))
    elif kind == "bare" and text != token:  # a shell splits the value of a variable that is not quoted
        command.words += text.split()
    elif text:
        command.words.append(text)
    return len(text) - len(token)


def expand(text: str, variables: dict[str, str]) -> str:
    """The text with the variables that are known; `${NAME:-default}` is the default of one that is not.

    Raises UsageError where it gets too long: each `A=$A$A` doubles it.
    """
    parts: list[str] = []
    position = length = 0
    for match in _VARIABLE.finditer(text):
        name, default, plain = match.groups()
        known = variables.get(name or plain)
        value = known if known is not None else match[0] if default is None else default
        parts += [text[position : match.start()], value]
        position = match.end()
        length += len(parts[-2]) + len(value)
        if length > MAX_CHARACTERS:
            raise _too_long(text)
    return "".join(parts) + text[position:]


def _too_long(text: str) -> UsageError:
    return UsageError(
        f"with {shorten(text)} the command has more than {MAX_CHARACTERS:,} characters",
        why="variables are replaced by their values, which contain other variables",
        hint="write the values into the command",
    )


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
        hint="put the whole command into single quotes, or its text into a file: reconv migrate FILE",
    )

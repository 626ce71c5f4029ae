"""Code blocks of the documentation, and what tests do with them: python docs/generators/code_blocks.py counts them.

- `sh` blocks, and `python` blocks of the same pages, are run by tests, in order.
- Other blocks (`bash`, indented) are not run, but every `reconv` command in them is parsed by the command line's own
  parser, and its recipe is loaded with the fields that the command sets.
- A `python` block that no test runs has `<!-- not run: WHY -->` before it; it is compiled only.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SHELL = {"", "bash", "sh", "console"}
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([\w+-]*)")
_OPERATORS = {"|", "||", "&", "&&", ";", ">", ">>", "<", "<(", ")", "(", ";;", "|&", "2>", "&>"}


@dataclass(frozen=True)
class CodeBlock:
    """A block of a page."""

    page: str  # relative to the repository
    line: int
    language: str  # empty for an indented block
    text: str
    not_run: str  # why it is not run; empty if the page does not say

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every page: docs/ and the repository's root."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def code_blocks(page: Path) -> Iterator[CodeBlock]:
    """The fenced and indented blocks of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    name, number, reason = str(page.relative_to(ROOT)), 0, ""
    while number < len(lines):
        line, start = lines[number], number + 1
        marker = NOT_RUN.search(line)
        fence = _FENCE.match(line)
        if fence:
            end = number + 1
            while end < len(lines) and not lines[end].strip().startswith(fence[2]):
                end += 1
            yield CodeBlock(name, start, fence[3], _dedented(lines[number + 1 : end]), reason)
            number, reason = end, ""
        elif line.startswith("    ") and (number == 0 or not lines[number - 1].strip()) and not _in_list(lines, number):
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield CodeBlock(name, start, "", _dedented(lines[number:end]), reason)
            number, reason = end - 1, ""
        elif marker:
            reason = marker[1]
        elif line.strip():
            reason = ""
        number += 1


def _in_list(lines: list[str], number: int) -> bool:
    """True if an indented line is text of a list item or a note, and not code."""
    start = next((line for line in reversed(lines[:number]) if line.strip() and not line.startswith("  ")), "")
    is_deep = lines[number].startswith("       ")
    return not is_deep and bool(re.match(r"(?:[-*] |\d+\. |!!! )", start))


def _dedented(lines: list[str]) -> str:
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[indent:] for line in lines).strip("\n") + "\n"


def reconv_commands(block: CodeBlock) -> Iterator[list[str]]:
    """The arguments of each `reconv` command in a block of shell lines, also behind torchrun, mpirun or docker."""
    if block.language not in SHELL:
        return
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        yield from _commands_of(line)


def inline_commands(page: Path) -> Iterator[list[str]]:
    """The arguments of each `reconv` command in the running text and the tables of a page."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    for code in re.findall(r"`(reconv [^`]+)`", text):
        line = re.sub(r"\[(--?\w[^\]]*)\]", r"\1", " ".join(code.split()))  # what may be left out
        yield from _commands_of(line.replace("\\|", "|"))


def _commands_of(line: str) -> Iterator[list[str]]:
    if "reconv" not in line:
        return
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
    lexer.commenters, lexer.whitespace_split = "#", True
    try:
        words = list(lexer)
    except ValueError:  # a quote that a later line closes
        return
    for position, word in enumerate(words):
        is_program = word == "reconv" or re.fullmatch(r"reconv:\w+", word)
        before = words[position - 1] if position else ""
        if is_program and before not in ("install", "import", "--tag") and not before.startswith("["):
            args = []
            for arg in words[position + 1 :]:
                if arg in _OPERATORS:
                    break
                args.append(arg)
            if args and args[0] != "...":
                yield args


def count() -> dict[str, int]:
    """Numbers of blocks that are run, checked or neither."""
    counts: Counter[str] = Counter()
    for page in pages():
        blocks = list(code_blocks(page))
        is_run = any(block.language == "sh" for block in blocks)
        for block in blocks:
            if block.not_run:
                counts[f"not run: {block.not_run}"] += 1
            elif block.language == "sh" or (block.language == "python" and is_run):
                counts["run, in order, by a test of the page"] += 1
            elif block.language in ("python", "yaml"):
                counts[f"{block.language}: run or loaded by a test"] += 1
            elif any(True for _ in reconv_commands(block)):
                counts["commands parsed, their recipes loaded"] += 1
            else:
                counts[f"text, output and other programs ({block.language or 'indented'})"] += 1
    return dict(sorted(counts.items()))


if __name__ == "__main__":
    for what, number in count().items():
        print(f"{number:5} {what}")

"""The command line: parse, print, exit code.

Owns the verbs (one file per group), what errors look like and the exit code. Refuses to know how anything works; the
rest of the package is imported only inside a verb. Invariant: `--help` imports neither torch nor numpy nor pydantic.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click

from reconv import __version__
from reconv.cli.average import average
from reconv.cli.bench import bench
from reconv.cli.data import data
from reconv.cli.data_inspect import check, show
from reconv.cli.doctor import completion, doctor
from reconv.cli.eval import eval_command
from reconv.cli.options import CommandGroup
from reconv.cli.predict import predict
from reconv.cli.recipes import recipes
from reconv.cli.report import report
from reconv.cli.train import train
from reconv.errors import ExitCode, ReconvError

__all__ = ["main"]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="reconv", message="%(prog)s %(version)s")
def reconv() -> None:
    """Train the reference convolutional networks, fast and reproducibly, from a recipe.

    \b
    Examples:
      reconv train quickstart                  embedded data, CPU, a minute
      reconv recipes                           what can be trained, and what it promises
      reconv train resnet50 --data /imagenet   a reference recipe on your data
      reconv train resnet50 --resume           go on exactly where it was
      reconv report runs/quickstart/1          the run as one HTML page
    """


for _verb in (train, eval_command, predict, average, recipes, report, data, bench, doctor, completion):
    reconv.add_command(_verb)
for _verb in (check, show):
    data.add_command(_verb)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with the documented exit code."""
    words = list(sys.argv[1:] if args is None else args)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # it may take ASCII alone, and file names may be any bytes
    code = _run(words)
    _let_go_of_streams()
    sys.exit(code)


def _run(words: list[str]) -> int:
    """The exit code of one command line; every error is printed here and nowhere else."""
    debug = "--debug" in words
    try:
        code = reconv.main(words, prog_name="reconv", standalone_mode=False)
        return int(code or ExitCode.OK)
    except click.Abort:
        _say(_interrupted(words))
        return ExitCode.INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ReconvError as error:
        if error.code == ExitCode.PREEMPTED and not error.is_reported:
            _say(str(error), colour="yellow")  # saved, as it should be: no error
        elif not error.is_reported:
            _complain(str(error), debug)
        return error.code
    except Exception as error:
        if _is_out_of_memory(error):
            _complain("Out of memory.\n  next:  use a smaller --batch-size, or --set batch.micro=N", debug)
            return ExitCode.RESOURCES
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            _complain(f"Cannot write: {error}\n  next:  free some space, or choose another folder with --out", debug)
            return ExitCode.RESOURCES
        return _unexpected(error, debug)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether the host or a device had no memory; torch tells in ways of its own."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from reconv.device import is_out_of_memory

    return is_out_of_memory(error)


def _interrupted(words: Sequence[str]) -> str:
    """What an interrupt has left: trainings and conversions keep what they saved, the rest has nothing to lose."""
    if words[:2] == ["data", "convert"]:
        return "Interrupted. What is finished stands; to go on: the same command"
    if words[:1] != ["train"] or any(word.startswith(("--dry-run", "--compile-only")) for word in words):
        return "Interrupted."
    again = "the same command" if "--resume" in words else "the same command with --resume"
    return f"Interrupted without saving the current step. What was saved before stands; to go on: {again}"


def _let_go_of_streams() -> None:
    """Send what nobody took nowhere: Python would try once more and end with 120 instead of our code."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _unexpected(error: Exception, debug: bool) -> int:
    """Say that this is a bug, and how to see more of it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    lines = [
        f"Unexpected {type(error).__name__}: {error}",
        f"  where: {last.filename}:{last.lineno}",
        "  why:   most likely a bug in Reconv",
        "  next:  run the same command with --debug, and report what it prints",
    ]
    _complain("\n".join(lines), debug)
    return ExitCode.UNEXPECTED


def _complain(text: str, debug: bool) -> None:
    """Print an error in red on stderr, after its traceback if that was asked for."""
    if debug:
        _say(traceback.format_exc().rstrip())
    first, _, rest = text.partition("\n")
    _say(f"error: {first}", colour="red", bold=True)
    if rest:
        _say(rest, colour="red")


def _say(text: str, *, colour: str | None = None, bold: bool = False) -> None:
    """Print on stderr; with nobody there to read it, the exit code still tells."""
    with suppress(OSError):
        click.secho(text, fg=colour, bold=bold, err=True)

"""The `reconv` command line: one file per command, error output and exit codes.

Commands import the rest of the package only when they run, so `--help` imports neither torch nor numpy nor pydantic.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click

from reconv.cli.commands.average import average
from reconv.cli.commands.bench import bench
from reconv.cli.commands.data import data
from reconv.cli.commands.data_inspect import check, review_command, show
from reconv.cli.commands.doctor import completion, doctor
from reconv.cli.commands.eval import eval_command
from reconv.cli.commands.export import export, push
from reconv.cli.commands.inspect import inspect_command
from reconv.cli.commands.migrate import migrate
from reconv.cli.commands.plan import plan
from reconv.cli.commands.predict import predict
from reconv.cli.commands.recipes import recipes
from reconv.cli.commands.report import report
from reconv.cli.commands.resume import resume
from reconv.cli.commands.serve import serve
from reconv.cli.commands.status import status
from reconv.cli.commands.submit import rendezvous, submit
from reconv.cli.commands.train import train
from reconv.cli.commands.tune import tune
from reconv.cli.options import CommandGroup
from reconv.core.errors import ExitCode, ReconvError
from reconv.core.stop_signals import ignore_stop_signals
from reconv.core.text import printable, printable_lines
from reconv.core.version import __version__

__all__ = ["main"]

_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="reconv", message="%(prog)s %(version)s")
def reconv() -> None:
    """Train reference convolutional networks from recipes, fast and reproducibly.

    \b
    Examples:
      reconv train quickstart                  train on built-in data, seconds on a CPU
      reconv recipes                           list the recipes and their results
      reconv train resnet50 --data /imagenet   train a recipe on your data
      reconv resume runs/resnet50/1            continue a run exactly
      reconv report runs/quickstart/1          write an HTML report of a run
    """


for _command in (
    train,
    tune,
    resume,
    submit,
    status,
    eval_command,
    predict,
    serve,
    export,
    push,
    inspect_command,
    average,
    recipes,
    migrate,
    plan,
    report,
    data,
    bench,
    rendezvous,
    doctor,
    completion,
):
    reconv.add_command(_command)
for _command in (check, show, review_command):
    data.add_command(_command)


def _skip_last_collection() -> None:
    """Let Python exit without looking for garbage among all objects of torch, which takes 0.2 s.

    The bindings of Triton and onnx (nanobind) print what was not collected at exit as leaks.
    """
    if "triton" in sys.modules or "onnx" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()


def _has_cuda_context() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _exit_at_once(code: int) -> None:
    """End the process without freeing what it has on the GPU piece by piece, which takes half a second and more.

    The rest is as when Python exits. Executors are shut down, and threads that Python would wait for, such as those
    of a user's callback, are waited for; exit handlers are called; what was written to open files is kept.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush_streams()
    _flush_files()
    os._exit(code)


def _flush_files() -> None:
    """Flush files that were not closed, which Python does as it frees them."""
    gc.unfreeze()  # else files among the objects that were kept from the collector would not be found
    for found in gc.get_objects():
        if issubclass(type(found), _FILES):  # not isinstance, which asks a proxy for the class of what it stands for
            with suppress(Exception):  # closed, or the disk is full: Python ignores that as well
                found.flush()


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the documented exit code."""
    is_program = args is None
    args = list(sys.argv[1:] if args is None else args)
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # its encoding may be ASCII, and file names may be any bytes
    atexit.register(_skip_last_collection)
    code = _run(args)
    _flush_streams()
    if is_program and _has_cuda_context():
        _exit_at_once(code)
    sys.exit(code)


def _run(args: list[str]) -> int:
    """Run a command and return its exit code. All errors are printed here."""
    debug = "--debug" in args
    try:
        code = reconv.main(args, prog_name="reconv", standalone_mode=False)
        return int(code or ExitCode.OK)
    except click.Abort:
        _print(_interrupted(args))
        return ExitCode.INTERRUPTED
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        _print(printable_lines(*shown.getvalue().rstrip("\n").split("\n")))
        return error.exit_code
    except ReconvError as error:
        if error.code == ExitCode.PREEMPTED:
            # A scheduler may send several, and Python takes a while to exit; the code is decided.
            atexit.register(ignore_stop_signals)
        if error.code == ExitCode.PREEMPTED and not error.is_reported:
            _print(str(error), color="yellow")  # a checkpoint was saved: not an error
        elif not error.is_reported:
            _print_error(str(error), debug)
        return error.code
    except Exception as error:
        if _is_out_of_memory(error):
            _print_error("Out of memory\n  hint:  use a smaller --batch-size, or --set batch.micro=N", debug)
            return ExitCode.RESOURCES
        if (fault := _device_error(error)) is not None:
            _print_error(str(fault), debug)
            return fault.code
        if isinstance(error, OSError) and error.errno is not None:
            from reconv.storage.files import system_error

            refused = system_error(error)
            _print_error(str(refused), debug)
            return refused.code
        return _unexpected(error, debug)


def _is_out_of_memory(error: Exception) -> bool:
    """True if the host or a device ran out of memory."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from reconv.device import is_out_of_memory

    return is_out_of_memory(error)


def _device_error(error: Exception) -> ReconvError | None:
    """The error for a fault of a device; None for all others."""
    if "torch" not in sys.modules:
        return None
    from reconv.device import device_error

    return device_error(error)


def _interrupted(args: Sequence[str]) -> str:
    """The message after Ctrl-C: training, conversion and some others can be continued."""
    if args[:2] == ["data", "convert"]:
        return "Interrupted. Finished shards are kept; run the same command to continue."
    if args[:2] == ["data", "check"] or (args[:1] == ["predict"] and any(arg.startswith("--json") for arg in args)):
        return "Interrupted. What is finished is kept; run the same command to continue."
    if args[:1] != ["train"] or any(arg.startswith(("--dry-run", "--compile-only")) for arg in args):
        return "Interrupted."
    again = "the same command" if "--resume" in args else "the same command with --resume"
    return f"Interrupted before a checkpoint was saved. Earlier checkpoints are kept; to continue, run {again}."


def _open_closed_streams() -> None:
    """Discard output where the caller has closed stdout or stderr, which Python represents as None."""
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _flush_streams() -> None:
    """Flush stdout and stderr; discard what cannot be written, for which Python would exit with 120."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _unexpected(error: Exception, debug: bool) -> int:
    """Print an error that is probably a bug, and how to see its traceback."""
    from reconv.core.compat import untested_note

    last = traceback.extract_tb(error.__traceback__)[-1]
    lines = [
        f"Unexpected {type(error).__name__}: {printable(str(error))}",
        f"  where: {last.filename}:{last.lineno}",
        f"  why:   {untested_note() or 'most likely a bug in Reconv'}",
        "  hint:  run the same command with --debug, and report what it prints",
    ]
    _print_error("\n".join(lines), debug)
    return ExitCode.UNEXPECTED


def _print_error(text: str, debug: bool) -> None:
    """Print an error in red on stderr, with `--debug` after its traceback."""
    if debug:
        _print(printable_lines(*traceback.format_exc().rstrip().split("\n")))
    first, _, rest = text.partition("\n")
    _print(f"error: {first}", color="red", bold=True)
    if rest:
        _print(rest, color="red")


def _print(text: str, *, color: str | None = None, bold: bool = False) -> None:
    """Print to stderr; a closed stderr is ignored."""
    with suppress(OSError, ValueError):  # ValueError: the stream was closed
        click.secho(text, fg=color, bold=bold, err=True)

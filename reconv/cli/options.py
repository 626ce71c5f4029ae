"""Options, command classes and output helpers that several commands share. Imports only click at module level."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from reconv.core.errors import PipeClosedError, ResourceError, UsageError
from reconv.core.text import printable
from reconv.recipe.shortcuts import SHORTCUTS, Shortcut

if TYPE_CHECKING:
    from reconv.core.custom_code import CodeSource, TrustCode

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])

Override = tuple[str, object, str]  # a recipe field, its value and the option that set it

STDOUT = "-"
INIT_SCHEMES = ("torchvision:", "timm:", "hf://", "https://")  # of --init, besides files and runs
DEVICE_HELP = "auto, cpu, cuda, cuda:1, mps or hpu."
_MIN_LAST_COLUMN = 24


class NumberRange(click.FloatRange):
    """A range of numbers. `nan` is not one, though no comparison with a limit refuses it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found


json_option = click.option(
    "--json",
    "json_file",
    metavar="[FILE.json]",
    is_flag=False,
    flag_value=STDOUT,
    help="Write the result as JSON to stdout or to FILE.json (any other file name: --json=FILE).",
)


def complete_recipes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Preset names that start with what was typed so far; without a match, files."""
    from reconv.recipe.presets import preset_names

    names = [CompletionItem(name) for name in preset_names() if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names of Reconv's networks that start with what was typed so far."""
    from reconv.recipe.model_names import MODEL_NAMES

    return [CompletionItem(name) for name in MODEL_NAMES if name.startswith(incomplete)]


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The runs in `runs/` that start with what was typed so far, newest first; for `resume` those to be continued.

    Without a match, folders.
    """
    from reconv.logging.run_dir import runs_in

    runs = [run for folder in sorted(Path("runs").glob("*/")) for run in runs_in(folder)]
    if ctx.info_name == "resume":
        runs = [run for run in runs if not run.is_finished()]
    paths = [str(run.path) for run in runs if str(run.path).startswith(incomplete)]
    return [CompletionItem(path) for path in paths] or [CompletionItem(incomplete, type="file")]


def complete_init(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Values that --init takes: schemes, torchvision's networks after its name, runs, and files."""
    if incomplete.startswith("torchvision:"):
        from reconv.recipe.model_names import PUBLISHED_WEIGHTS

        names = [f"torchvision:{name}" for name in PUBLISHED_WEIGHTS]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]
    schemes = [CompletionItem(name) for name in INIT_SCHEMES if name.startswith(incomplete)]
    runs = complete_runs(ctx, param, incomplete)
    return [*schemes, *(item for item in runs if item.type != "file" or not schemes or not incomplete)]


def complete_fields(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Recipe fields, section by section, and after the `=` the choices of a field that has a fixed list."""
    from reconv.recipe.field_reference import field_choices, field_names

    field, equals, value = incomplete.partition("=")
    if equals:
        choices = field_choices(field)
        return [CompletionItem(f"{field}={choice}") for choice in choices if choice.startswith(value)]
    return [CompletionItem(f"{name}=") for name in field_names() if name.startswith(field)]


def complete_field_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The recipe's sections and fields that start with what was typed so far."""
    from reconv.recipe.field_reference import field_references

    return [CompletionItem(name) for name in field_references() if name.startswith(incomplete)]


set_option = click.option(
    "--set",
    "settings",
    metavar="A.B=V",
    multiple=True,
    shell_complete=complete_fields,
    help="Set any recipe field; repeatable.",
)
stop_after_option = click.option(
    "--stop-after",
    metavar="100step|3h",
    help="Save and end after these steps or epochs (2ep) of this command, or this time; the schedule stays.",
)
stop_at_option = click.option(
    "--stop-at",
    metavar="25%|2ep",
    help="Save and end at the first evaluation at this point of the run (500step) or later; the schedule stays.",
)
trust_option = click.option(
    "--trust-code", is_flag=True, help="Import the code that the recipe of a run names, without asking."
)


class Command(click.Command):
    """A command with `--debug`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error.")
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, bind_bare_json(args))


def bind_bare_json(args: Sequence[str]) -> list[str]:
    """Turn a bare `--json` into `--json=-` unless the next argument is clearly its file.

    click would take any next argument as the optional value: `reconv train --json quickstart` would lose its recipe.
    """
    bound: list[str] = []
    for position, arg in enumerate(args):
        following = args[position + 1] if position + 1 < len(args) else ""
        is_file = following.endswith(".json") or following == STDOUT
        bound.append(f"--json={STDOUT}" if arg == "--json" and not is_file else arg)
    return bound


# Commands of other programs, and ours for the same.
_HINTS = {
    "runs": "`reconv status` lists the runs",
    "list": "`reconv recipes` lists the recipes, `reconv status` the runs",
    "ls": "`reconv recipes` lists the recipes, `reconv status` the runs",
    "models": "`reconv recipes --all` lists the models with their recipes",
    "compare": "`reconv report RUN RUN` compares runs",
    "info": "`reconv inspect PATH` describes a run or a file, `reconv doctor` this machine",
    "version": "`reconv --version` prints the version",
    "help": "`reconv --help` lists the commands, `reconv COMMAND --help` describes one",
    "fit": "`reconv train RECIPE` trains",
    "finetune": "`reconv train finetune --data DIR --init WEIGHTS` adapts weights to your images",
    "val": "`reconv eval RUN` evaluates",
    "test": "`reconv eval RUN --split test` evaluates",
    "evaluate": "`reconv eval RUN` evaluates",
    "classify": "`reconv predict RUN IMAGE` predicts",
    "detect": "`reconv predict RUN IMAGE` predicts",
    "sweep": "`reconv tune RECIPE` searches recipe fields",
    "search": "`reconv tune RECIPE` searches recipe fields",
    "lr-find": "`reconv tune RECIPE --lr-range` finds a learning rate",
    "review": "`reconv data review RUN` finds wrong labels",
}


class CommandGroup(click.Group):
    """A group that suggests the closest command for a misspelled one, and prints summaries in full."""

    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The first sentence of each command, which click would cut to fit on one line."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(1000)) for name, command in self.commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # click would exit with 1
            raise PipeClosedError("the output was closed by its reader") from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from reconv.recipe.presets import nearest

            hint = _HINTS.get(args[0]) if args and ctx.parent is None else None
            if hint is not None:
                raise click.UsageError(f"{error.message.partition(' Did you')[0]} {hint}.", ctx) from error
            close = nearest(args[0], self.list_commands(ctx)) if args else None
            if close is None or "Did you mean" in error.message:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close!r}?", ctx) from error


def parse_settings(settings: Sequence[str]) -> list[Override]:
    """Parse each `--set FIELD=VALUE` into an override of a recipe field."""
    overrides: list[Override] = []
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals or not field.strip():
            raise UsageError(
                f"--set takes FIELD=VALUE, not {setting!r}",
                hint="for example --set optimizer.momentum=0.875; `reconv recipes show NAME` lists the fields",
            )
        overrides.append((field.strip(), value, "--set"))
    return overrides


def shortcut_options(*names: str, **helps: str) -> Callable[[CommandFunction], CommandFunction]:
    """The options of some shortcuts of recipe fields, in this order; `helps` replace help of the table."""

    def add(command: CommandFunction) -> CommandFunction:
        for name in reversed(names):
            command = _shortcut_option(SHORTCUTS[name], helps.get(name))(command)
        return command

    return add


def _shortcut_option(shortcut: Shortcut, help_text: str | None) -> Callable[[CommandFunction], CommandFunction]:
    kind: Any = click.Choice(shortcut.choices) if shortcut.choices else None
    if shortcut.type is int:
        kind = click.IntRange(min=shortcut.least)
    elif shortcut.type is float:
        kind = NumberRange(min=shortcut.least, min_open=True)
    return click.option(
        shortcut.option,
        metavar=shortcut.metavar,
        type=kind,
        is_flag=shortcut.type is bool,
        shell_complete={"model": complete_models, "init": complete_init}.get(shortcut.name),
        help=help_text or shortcut.help,
    )


def check_run(run: str) -> None:
    """Raise at once if RUN does not exist, before torch is imported."""
    from reconv.logging.run_dir import check_run_exists

    check_run_exists(run)


def trust_or_ask(trust_code: bool) -> TrustCode:
    """Consent to import the code of a run: as the option says, else asked if there is a terminal."""
    return trust_code or (_ask_for_trust if can_ask() else False)


def can_ask() -> bool:
    """True if there is a terminal for a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _ask_for_trust(sources: Sequence[CodeSource]) -> bool:
    print_note("The recipe of this run names code that would be imported:")
    for source in sources:
        print_note(f"  {source}")
    return click.confirm("Import it?", default=False, err=True)


def weights_options(command: CommandFunction) -> CommandFunction:
    """The options that choose the weights of RUN."""
    for option in (
        click.option(
            "--recipe",
            metavar="NAME",
            shell_complete=complete_recipes,
            help="The recipe of a weights file without one.",
        ),
        trust_option,
        click.option("--best", is_flag=True, help="Use the best checkpoint instead of the newest."),
        click.option("--raw", "weights", flag_value="raw", help="Use the weights as trained."),
        click.option("--ema", "weights", flag_value="ema", help="Use the EMA weights (the default if there are any)."),
        click.option("--averaged", "weights", flag_value="averaged", help="Use the average of the run's checkpoints."),
    ):
        command = option(command)
    return command


def model_options(command: CommandFunction) -> CommandFunction:
    """The options that choose the weights of RUN and the device they run on."""
    device = click.option("--device", metavar="NAME", default="auto", show_default=True, help=DEVICE_HELP)
    return device(weights_options(command))


def backend_options(command: CommandFunction) -> CommandFunction:
    """The options that choose how the network of RUN computes and how images are decoded."""
    decoder = click.option(
        "--decoder",
        type=click.Choice(["auto", "pillow", "native"]),
        default="auto",
        show_default=True,
        help="What decodes JPEG images: Pillow or the compiled decoder.",
    )
    return network_options(decoder(command))


def network_options(command: CommandFunction) -> CommandFunction:
    """The options that choose how the network of RUN computes."""
    for option in (
        click.option(
            "--calibration",
            metavar="DIR",
            type=click.Path(),
            help="Images to calibrate and check int8 with [default: the run's own data].",
        ),
        click.option(
            "--precision",
            type=click.Choice(["auto", "fp32", "bf16", "fp16", "int8"]),
            default="auto",
            show_default=True,
            help="Precision of the model [auto: as trained, if the device is fast in it; int8: CPUs].",
        ),
        click.option(
            "--backend",
            type=click.Choice(["auto", "eager", "folded", "fused", "onnxruntime"]),
            default="auto",
            show_default=True,
            help="How the model runs: eager is as in training, bit for bit; auto is the fastest that equals it.",
        ),
    ):
        command = option(command)
    return command


def emit_json(result: object, json_file: str) -> None:
    """Write a result as JSON to stdout or to a file."""
    if json_file == STDOUT:  # its encoding may be ASCII
        click.echo(json.dumps(result, indent=2, allow_nan=False))
    else:
        write_text(Path(json_file), json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def journal_of(json_file: str | None, doing: str) -> Path | None:
    """The folder beside a result file where finished work is kept until it is written; None without such a file."""
    if json_file in (None, STDOUT):
        return None
    return Path(json_file).with_name(f".{Path(json_file).name}.{doing}")


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named; raises `ResourceError` where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names may be any bytes
    except OSError as error:
        raise ResourceError(
            f"Cannot write {path}", where=str(path.parent), why=str(error.strerror), hint="choose another file"
        ) from error


def print_line(text: str = "", **style: Any) -> None:
    """Print a line to stdout, made printable, in a style of `click.secho`."""
    click.secho(printable(text), **style)


def print_note(text: str) -> None:
    """Print a message to stderr, apart from the result."""
    print_line(text, err=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, made printable; on a terminal the last one is wrapped to its width."""
    columns, *rows = ([printable(cell) for cell in line] for line in (columns, *rows))
    widths = [max(len(line[index]) for line in (columns, *rows)) for index in range(len(columns) - 1)]
    indent = sum(widths) + 2 * len(widths)
    width_left = sys.maxsize
    if sys.stdout.isatty():
        width_left = max(_MIN_LAST_COLUMN, shutil.get_terminal_size().columns - indent)
    for number, line in enumerate((columns, *rows)):
        cells = "".join(f"{cell:<{width + 2}}" for cell, width in zip(line, widths, strict=False))
        first, *more = textwrap.wrap(line[-1], width_left) or [""]
        click.secho((cells + first).rstrip(), bold=number == 0)
        for text in more:
            click.echo(" " * indent + text)


def percent(fraction: float) -> str:
    """A fraction in percent, as in 76.25 %."""
    return f"{100 * fraction:.2f} %"

"""The command to run on this machine instead of the one that was typed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reconv.migrate.command_line import quote
from reconv.migrate.migration import Migration, TargetMachine, takes_recipe
from reconv.migrate.translation import SHORT_OPTIONS, epochs_in, show_value

_MANY_CHANGES = 6  # from here on a recipe file is easier to read than options
_WEIGHTS = (".pth", ".pt", ".tar", ".pkl", ".bin", ".safetensors", ".npz")
WRITTEN_RECIPE = "my.yaml"  # the name that is proposed for it
_TRAIN_ONLY = ("--out", "--stop-after", "--profile", "--quiet", "--compile-only", "--resume")


def change_words(name: str, value: Any) -> list[str]:
    """A change as words of the command line: `--epochs 50` or `--set optimizer.momentum=0.875`."""
    text, option = show_value(value), SHORT_OPTIONS.get(name)
    if option == "--epochs":
        number = epochs_in(text)
        return ["--set", f"{name}={text}"] if number is None else [option, number]
    if option is not None and value is not None:
        return [option, text]
    return ["--set", f"{name}={text}"]


def command_words(migration: Migration, machine: TargetMachine, recipe_file: str | None = None) -> list[str]:
    """The words of the new command; with `recipe_file`, the changes are in that file."""
    action = migration.action
    if action.verb == "nothing":
        return []
    if action.verb == "help":
        return ["reconv", *action.arguments, "--help"]
    if migration.is_fragment:
        return _fragment_words(migration)
    words = ["reconv", *action.verb.split()]
    options = list(action.options)
    if takes_recipe(migration):
        words += action.arguments if action.verb == "data show" else []
        words += _recipe_words(migration, recipe_file, "--recipe" if action.verb == "data show" else None)
        words += [] if action.verb == "data show" else action.arguments
    else:
        words += action.arguments
        options += _weights_recipe(migration, recipe_file)
    if action.verb.startswith("bench"):
        options = [option for option in options if option[0] not in _TRAIN_ONLY]
    if action.verb in ("predict", "data show"):
        options = [option for option in options if option[0] != "--data"]
    for name, value in options:
        words += [name] if value is None else [f"{name}={value}"] if name == "--json" else [name, value]
    count = num_devices(migration, machine)
    if count > 1 and action.verb in ("train", "bench train", "eval"):
        words += ["--devices", str(count)]
    return words


def _fragment_words(migration: Migration) -> list[str]:
    """The options that flags alone become; RECIPE stands for any recipe."""
    words = ["reconv", *migration.action.verb.split(), *(["RECIPE"] if takes_recipe(migration) else [])]
    words += migration.action.arguments
    for name, setting in migration.settings.items():
        words += change_words(name, setting.value) if setting.is_typed else []
    for name, value in migration.action.options:
        if value != "DATA":
            words += [name] if value is None else [name, value]
    return words


def _recipe_words(migration: Migration, recipe_file: str | None, option: str | None) -> list[str]:
    match = migration.match
    if recipe_file is not None or match is None:
        return [*([option] if option else []), recipe_file or "RECIPE.yaml"]
    words = [*([option] if option else []), match.preset]
    changes: Mapping[str, Any] = match.changes
    for name, value in changes.items():
        pair = change_words(name, value)
        words += pair if migration.action.verb == "train" else ["--set", f"{name}={show_value(value)}"]
    return words


def _weights_recipe(migration: Migration, recipe_file: str | None) -> list[tuple[str, str | None]]:
    """`--recipe NAME` for weights that do not say which network they are."""
    weights = migration.action.arguments[0] if migration.action.arguments else ""
    if migration.match is None or migration.action.verb not in ("eval", "predict", "export"):
        return []
    is_file = weights.endswith(_WEIGHTS) or weights.startswith("<") or "checkpoint" in weights
    if not is_file:
        return []
    # These commands take a recipe, and no changes of it.
    return [("--recipe", recipe_file or (WRITTEN_RECIPE if migration.match.changes else migration.match.preset))]


def to_fill_in(migration: Migration, words: list[str]) -> list[tuple[str, str]]:
    """Placeholders of the new command that the user has to fill in, each with its meaning."""
    missing = [(part, text) for part, text in migration.to_fill if part not in ("DATA", "RUN") or part in words]
    if WRITTEN_RECIPE in words and not migration.is_fragment:
        missing.append((WRITTEN_RECIPE, f"the recipe of the network: --write {WRITTEN_RECIPE} writes it"))
    return list(dict.fromkeys(missing))


def num_devices(migration: Migration, machine: TargetMachine) -> int:
    """Number of devices of this machine to use: as many as theirs, as far as it has them and the batch divides."""
    wanted = min(migration.launch.num_processes, machine.num_devices)
    recipe = migration.match.recipe if migration.match is not None else migration.wanted
    if recipe is None or machine.kind == "cpu":
        return 1
    group = recipe.batch.group if isinstance(recipe.batch.group, int) else recipe.batch.size
    groups = max(1, recipe.batch.size // group)
    return max((count for count in range(1, wanted + 1) if groups % count == 0), default=1)


def command_text(words: list[str]) -> str:
    """The command for a shell."""
    return " ".join(map(quote, words))


def needs_file(migration: Migration) -> bool:
    """True if the recipe is better written to a file than changed by options."""
    return migration.match is None or len(migration.match.changes) > _MANY_CHANGES

"""Help is fast and complete: nothing heavy is imported, every command has examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from cli_page import commands

from reconv.checkpoint.download_weights import TORCHVISION
from reconv.cli import reconv
from reconv.recipe.model_names import PUBLISHED_WEIGHTS

HEAVY = {"torch", "numpy", "pydantic", "PIL", "yaml", "rich", "safetensors"}

_PROBE = """
import contextlib, io, json, sys
from reconv.cli import main
results = []
for args in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main(args)
        except SystemExit as end:
            code = end.code
    results.append({"code": code, "modules": sorted(sys.modules), "text": out.getvalue()})
print(json.dumps(results))
"""


def _commands(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every command, groups included."""
    children = command.commands if isinstance(command, click.Group) else {}
    return [path, *(found for name, child in children.items() for found in _commands(child, (*path, name)))]


COMMANDS = _commands(reconv)


def _run(*command_lines: list[str]) -> list[dict[str, Any]]:
    """Run command lines in one new process: exit code, imported modules and stdout of each."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, json.dumps(command_lines)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def test_all_documented_commands_exist() -> None:
    expected = [
        "train",
        "tune",
        "resume",
        "submit",
        "status",
        "eval",
        "predict",
        "serve",
        "average",
        "recipes",
        "migrate",
        "plan",
        "rendezvous",
        "report",
        "data",
        "bench",
        "doctor",
        "export",
        "push",
        "inspect",
        "completion",
    ]
    assert sorted(reconv.commands) == sorted(expected)
    assert {("recipes", "show"), ("recipes", "explain"), ("recipes", "fields"), ("recipes", "schema")} <= set(COMMANDS)
    assert {
        ("data", "get"),
        ("data", "check"),
        ("data", "show"),
        ("data", "convert"),
        ("data", "index"),
        ("data", "review"),
    } <= set(COMMANDS)
    assert {("bench", "train"), ("bench", "infer"), ("bench", "data")} <= set(COMMANDS)
    assert len(COMMANDS) == 1 + len(expected) + 13


def test_help_and_version_import_nothing_heavy_and_help_shows_examples() -> None:
    *helps, version = _run(*([*command, "--help"] for command in COMMANDS), ["--version"])
    for command, result in zip(COMMANDS, helps, strict=True):
        assert result["code"] == 0
        assert not HEAVY.intersection(result["modules"]), command
        assert f"reconv {' '.join(command)}".rstrip() in result["text"].partition("Examples:")[2]
    assert version["text"].startswith("reconv 0.")
    assert not HEAVY.intersection(version["modules"])


def test_every_option_says_what_it_does() -> None:
    bare = []
    for path in COMMANDS:
        command: click.Command = reconv
        for name in path:
            assert isinstance(command, click.Group)
            command = command.commands[name]
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        bare += [f"{' '.join(path)} {option.opts[0]}" for option in options if not option.help and not option.hidden]
    assert bare == []


def test_importing_the_package_does_not_import_torch() -> None:
    script = "import sys, reconv; print('torch' in sys.modules, 'train' in dir(reconv))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_completion_scripts_are_for_their_shell_and_call_reconv() -> None:
    shells = ("bash", "zsh", "fish")
    for shell, result in zip(shells, _run(*(["completion", shell] for shell in shells)), strict=True):
        assert "_RECONV_COMPLETE" in result["text"]
        assert f"{shell}_complete" in result["text"]


def test_completion_offers_the_preset_names_without_importing_a_recipe() -> None:
    script = """
import sys
from reconv.cli import main
try:
    main([])
except SystemExit:
    print("heavy", "torch" in sys.modules or "pydantic" in sys.modules or "yaml" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "_RECONV_COMPLETE": "bash_complete", "COMP_WORDS": "reconv train qui", "COMP_CWORD": "2"},
    )
    assert "plain,quickstart" in done.stdout.splitlines()
    assert "heavy False" in done.stdout.splitlines()


def _completed(words: str, index: int) -> list[str]:
    variables = {"_RECONV_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(index)}
    code = "import sys; from reconv.cli import main\ntry: main([])\nexcept SystemExit: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **variables})
    *completed, has_torch = done.stdout.splitlines()
    assert has_torch == "False"
    return [line.removeprefix("plain,") for line in completed]


def test_runs_and_initial_weights_are_completed() -> None:
    for number, code in (("1", "0"), ("2", "1")):
        folder = Path("runs/quickstart") / number
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text("name: quickstart\n")
        (folder / "summary.json").write_text(f'{{"exit_code": {code}, "steps": 1, "total_steps": 1}}')
    assert _completed("reconv resume ", 2) == ["runs/quickstart/2"]
    assert _completed("reconv predict runs/", 2) == ["runs/quickstart/2", "runs/quickstart/1"]
    assert _completed("reconv train finetune --init t", 4) == ["torchvision:", "timm:"]
    assert tuple(TORCHVISION) == PUBLISHED_WEIGHTS
    assert "torchvision:resnet50" in _completed("reconv train finetune --init torchvision:resnet5", 4)
    assert _completed("reconv train finetune --init h", 4)[:2] == ["hf://", "https://"]


def test_summaries_of_commands_are_not_cut() -> None:
    [listed, data] = _run(["--help"], ["data", "--help"])
    assert "..." not in listed["text"].partition("Commands:")[2] + data["text"].partition("Commands:")[2]


def test_nan_is_no_number_of_any_option() -> None:
    found = 0
    for _, command in commands(reconv, ("reconv",)):
        for option in command.params:
            if not isinstance(option.type, click.types.FloatParamType):
                continue
            with pytest.raises(click.BadParameter, match="'nan' is not a number"):
                option.type.convert("nan", option, None)
            found += 1
    assert found > 15

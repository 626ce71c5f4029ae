"""The help is instant and complete: nothing heavy is imported, every verb has examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest

from reconv.cli import reconv

HEAVY = ("torch", "numpy", "pydantic", "PIL", "yaml", "rich", "safetensors")

_PROBE = """
import json, sys
from reconv.cli import main
try:
    main(json.loads(sys.argv[1]))
except SystemExit as end:
    code = end.code
print("\\n" + json.dumps({"code": code, "modules": sorted(sys.modules)}))
"""


def _verbs(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every way to a verb, groups included."""
    children = command.commands if isinstance(command, click.Group) else {}
    return [path, *(found for name, child in children.items() for found in _verbs(child, (*path, name)))]


VERBS = _verbs(reconv)


def _modules_after(words: list[str]) -> tuple[int, set[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, json.dumps(words)], capture_output=True, text=True, check=True, timeout=60
    )
    text, _, last = done.stdout.rstrip().rpartition("\n")
    probe = json.loads(last)
    return probe["code"], set(probe["modules"]), text


def test_the_verbs_of_the_contract_are_all_there() -> None:
    expected = ["train", "eval", "predict", "average", "recipes", "report", "data", "bench", "doctor", "completion"]
    assert sorted(reconv.commands) == sorted(expected)
    assert ("recipes", "show") in VERBS
    assert {("data", "get"), ("data", "check"), ("data", "show"), ("data", "convert")} <= set(VERBS)
    assert {("bench", "train"), ("bench", "infer"), ("bench", "data")} <= set(VERBS)
    assert len(VERBS) == 1 + len(expected) + 8


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb) or "reconv")
def test_help_imports_nothing_heavy_and_shows_examples(verb: tuple[str, ...]) -> None:
    code, modules, text = _modules_after([*verb, "--help"])
    assert code == 0
    assert not modules.intersection(HEAVY)
    assert "Examples:" in text
    assert f"reconv {' '.join(verb)}".rstrip() in text.partition("Examples:")[2]


def test_version_imports_nothing_heavy() -> None:
    code, modules, text = _modules_after(["--version"])
    assert code == 0
    assert text.strip().startswith("reconv 0.")
    assert not modules.intersection(HEAVY)


def test_importing_the_package_imports_no_torch_until_a_function_is_used() -> None:
    script = "import sys, reconv; print('torch' in sys.modules, 'train' in dir(reconv))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_for_the_shell_and_calls_reconv(shell: str) -> None:
    _, _, text = _modules_after(["completion", shell])
    assert "_RECONV_COMPLETE" in text
    assert f"{shell}_complete" in text
    assert "reconv" in text


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

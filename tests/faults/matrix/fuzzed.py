"""Recipes and command lines with random mistakes: a documented exit code and a message, never a traceback or a hang."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import Lab

NUM_RECIPES, NUM_COMMANDS = 700, 500
VALUES = (
    "-1",
    "0",
    "1e999",
    "nan",
    ".inf",
    "null",
    "true",
    "[]",
    "{}",
    "''",
    "9" * 400,
    "0x10",
    "1e-400",
    "2^-11",
    "1ep",
)
VALUES += (
    "[1, [2, [3]]]",
    "{a: {b: c}}",
    "&a [*a]",
    "*x",
    "!!python/object:os.system {}",
    '"\\x1b[31m"',
    "..",
    "../../etc/passwd",
)
VALUES += (
    "auto",
    "~",
    "1_000",
    "12:30:45",
    "2026-01-01",
    "\u202e",
    "é" * 300,
    "%",
    "{{",
    "- -",
    "? !",
    "/dev/zero",
    "0.1 per 0",
)
OPTIONS = (
    "--data",
    "--out",
    "--epochs",
    "--batch-size",
    "--lr",
    "--workers",
    "--device",
    "--devices",
    "--seed",
    "--model",
)
OPTIONS += (
    "--init",
    "--set",
    "--profile",
    "--stop-after",
    "--dry-run",
    "--json",
    "--resume",
    "--freeze",
    "--best",
    "--quiet",
)
ARGUMENTS = (
    *VALUES,
    "quickstart",
    "resnet50",
    "",
    " ",
    "-",
    "--",
    "-h",
    "run",
    "/",
    ".",
    "a" * 300,
    "\x00"[:0],
    "\udcff",
    "1,2",
)
COMMANDS = (
    ["train"],
    ["resume"],
    ["eval"],
    ["predict"],
    ["average"],
    ["recipes"],
    ["recipes", "show"],
    ["recipes", "explain"],
)
COMMANDS += (
    ["report"],
    ["data"],
    ["data", "check"],
    ["data", "show"],
    ["data", "convert"],
    ["completion"],
    ["nonsense"],
)


def recipe_cases(lab: Lab) -> Iterator[dict[str, Any]]:
    for seed in range(NUM_RECIPES):
        yield {"seed": seed}


def fuzzed_recipe(seed: int) -> bytes:
    """A preset with a few random mistakes."""
    from reconv.recipe.presets import preset_names, preset_path

    draw = random.Random(seed)
    names = sorted(preset_names())
    lines = preset_path(draw.choice(names)).read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(lines))
        mistake = draw.randrange(7)
        if mistake == 0:
            lines[at] = f"{lines[at].partition(':')[0]}: {draw.choice(VALUES)}"
        elif mistake == 1:
            lines.insert(at, lines[draw.randrange(len(lines))])
        elif mistake == 2:
            del lines[at]
            lines = lines or [""]
        elif mistake == 3:
            lines[at] = " " * draw.randint(0, 5) + lines[at].strip()
        elif mistake == 4:
            lines[at] = lines[at][: draw.randint(0, len(lines[at]))]
        elif mistake == 5:
            lines[at] = f"{draw.choice(VALUES)}: {draw.choice(VALUES)}"
        else:
            lines[at] += draw.choice((":", " #", "'", '"', "]", "\t", " &a", "|", ">"))
    data = bytearray("\n".join(lines).encode("utf-8", "surrogateescape"))
    if draw.random() < 0.2:
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def run_recipe(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    file = folder / "recipe.yaml"
    file.write_bytes(fuzzed_recipe(case["seed"]))
    return lab.command(["recipes", "show", str(file)]).problem("recipe.yaml", (2,))


def command_cases(lab: Lab) -> Iterator[dict[str, Any]]:
    for seed in range(NUM_COMMANDS):
        draw = random.Random(10_000 + seed)
        words = [*draw.choice(COMMANDS)]
        for _ in range(draw.randint(0, 4)):
            words.append(draw.choice(OPTIONS) if draw.random() < 0.5 else draw.choice(ARGUMENTS))
        if words[0] == "train":
            words += ["--stop-after", "1step"]
        yield {"words": words}


def run_command(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    import os

    os.chdir(folder)
    try:
        return lab.command(case["words"]).problem()
    finally:
        os.chdir(lab.folder)

"""Malicious paths and values on the command line."""

from __future__ import annotations

import os
from pathlib import Path

from malicious_cases import CASES, DIGITS, IMAGE, SPECIAL, Context, case, link_loop

# Predict


@case("predict/root")
def _(context: Context) -> list[str]:
    return ["predict", str(context.run), "/", "--device", "cpu"]


@case("predict/proc")
def _(context: Context) -> list[str]:
    return ["predict", str(context.run), "/proc", "--device", "cpu"]


@case("predict/zero")
def _(context: Context) -> list[str]:
    return ["predict", str(context.run), "/dev/zero", "--device", "cpu"]


@case("predict/folder-of-special-files")
def _(context: Context) -> list[str]:
    folder = context.folder / "images"
    folder.mkdir()
    for name, make in SPECIAL.items():
        make(folder / f"{name}.png")
    (folder / "up").symlink_to("..")
    (folder / "all").symlink_to("/")
    (folder / "good.png").write_bytes(context.image().read_bytes())
    return ["predict", str(context.run), str(folder), "--device", "cpu", "--json"]


@case("predict/not-utf8")
def _(context: Context) -> list[str]:
    path = Path(os.fsdecode(os.fsencode(context.folder) + b"/\xff\xfe.png"))
    path.write_bytes(context.image().read_bytes())
    return ["predict", str(context.run), str(path), "--device", "cpu"]


@case("predict/not-utf8-json")
def _(context: Context) -> list[str]:
    return [*CASES["predict/not-utf8"](context), "--json"]


@case("predict/not-utf8-json-file")
def _(context: Context) -> list[str]:
    return [*CASES["predict/not-utf8"](context), "--json", str(context.folder / "out.json")]


@case("predict/long-path")
def _(context: Context) -> list[str]:
    return ["predict", str(context.run), "x" * 300, "--device", "cpu"]


@case("predict/very-long-path")
def _(context: Context) -> list[str]:
    return ["predict", str(context.run), "x/" * 5000, "--device", "cpu"]


@case("predict/loop")
def _(context: Context) -> list[str]:
    link_loop(context.folder / "x.png")
    return ["predict", str(context.run), str(context.folder / "x.png"), "--device", "cpu"]


# Command lines


COMMANDS: dict[str, list[str]] = {
    "long-recipe": ["train", "r" * 5000],
    "long-out": ["train", "quickstart", "--out", "o" * 300, "--set", "length=1step", "--device", "cpu"],
    "very-long-out": ["train", "quickstart", "--out", "o/" * 3000, "--set", "length=1step", "--device", "cpu"],
    "long-name": ["train", "quickstart", "--set", f"name={'n' * 300}", "--set", "length=1step", "--device", "cpu"],
    "long-data": ["train", "resnet18", "--data", "d" * 300, "--dry-run", "1"],
    "long-eval": ["eval", "r" * 300],
    "long-report": ["report", "r" * 300],
    "long-resume": ["resume", "r" * 300],
    "long-check": ["data", "check", "d" * 300],
    "long-init": ["train", "quickstart", "--init", "w" * 300, "--dry-run", "1", "--device", "cpu"],
    "set-digits": ["train", "quickstart", "--set", f"seed={DIGITS}", "--dry-run", "1"],
    "set-hex": ["train", "quickstart", "--set", "seed=0x" + "f" * 100_000, "--dry-run", "1"],
    "set-deep": ["train", "quickstart", "--set", "model.options=" + "[" * 100_000, "--dry-run", "1"],
    "set-nan": ["train", "quickstart", "--set", "schedule.lr=.nan", "--dry-run", "1"],
    "set-long-field": ["train", "quickstart", "--set", "x." * 20_000 + "y=1", "--dry-run", "1"],
    "batch-digits": ["train", "quickstart", "--batch-size", DIGITS, "--dry-run", "1"],
    "batch-huge": ["train", "quickstart", "--batch-size", "9" * 15, "--dry-run", "1", "--device", "cpu"],
    "workers-huge": ["train", "quickstart", "--workers", "999999999", "--dry-run", "1", "--device", "cpu"],
    "workers-digits": ["train", "quickstart", "--workers", DIGITS, "--dry-run", "1", "--device", "cpu"],
    "check-workers": ["data", "check", "digits", "--workers", "999999999"],
    "check-workers-digits": ["data", "check", "digits", "--workers", DIGITS],
    "devices-huge": ["train", "quickstart", "--devices", "999999999"],
    "resume-devices-huge": ["resume", "RUN", "--devices", "99999999999999"],
    "bench-devices-huge": ["bench", "train", "quickstart", "--devices", "99999999999999"],
    "init-open-bracket": ["train", "quickstart", "--init", "http://[::1/x", "--dry-run", "1", "--device", "cpu"],
    "init-bad-host": ["train", "quickstart", "--init", "http://[1:2:3]/x", "--dry-run", "1", "--device", "cpu"],
    "init-blank": ["train", "quickstart", "--init", "https://exa mple/x", "--dry-run", "1", "--device", "cpu"],
    "data-open-bracket": ["train", "resnet18", "--data", "http://[::1/x", "--dry-run", "1", "--device", "cpu"],
    "data-bad-host": ["train", "resnet18", "--data", "http://[1:2:3]/x", "--dry-run", "1", "--device", "cpu"],
    "token-zero": ["serve", "RUN", "--device", "cpu", "--port", "0", "--token-file", "/dev/zero"],
    "dry-run-digits": ["train", "quickstart", "--dry-run", DIGITS, "--device", "cpu"],
    "stop-after-digits": ["train", "quickstart", "--stop-after", f"{DIGITS}step", "--device", "cpu"],
    "top-digits": ["predict", "RUN", "IMAGE", "--top", DIGITS, "--device", "cpu"],
    "top-huge": ["predict", "RUN", "IMAGE", "--top", "9" * 18, "--device", "cpu"],
    "not-utf8-recipe": ["train", os.fsdecode(b"\xff\xfe")],
    "not-utf8-out": [
        "train",
        "quickstart",
        "--out",
        os.fsdecode(b"\xff\xfe"),
        "--set",
        "length=2step",
        "--device",
        "cpu",
    ],
    "not-utf8-eval": ["eval", os.fsdecode(b"\xff\xfe")],
    "not-utf8-set": [
        "train",
        "quickstart",
        "--set",
        os.fsdecode(b"name=\xff\xfe"),
        "--set",
        "length=2step",
        "--device",
        "cpu",
    ],
    "not-utf8-set-description": [
        "train",
        "quickstart",
        "--set",
        os.fsdecode(b"description=\xff\xfe"),
        "--set",
        "length=2step",
        "--device",
        "cpu",
    ],
    "not-utf8-json": ["recipes", "--json=" + os.fsdecode(b"\xff\xfe")],
    "json-folder": ["recipes", "--json=/"],
    "json-long": ["recipes", "--json=" + "j" * 300],
    "check-out-long": ["data", "check", "digits", "--out", "o" * 300],
    "check-out-not-utf8": ["data", "check", "digits", "--out", os.fsdecode(b"\xff\xfe")],
    "show-out-long": ["data", "show", "digits", "--out", "o" * 300 + ".png"],
    "report-out-long": ["report", "RUN", "--out", "o" * 300],
    "average-out-long": ["average", "RUN", "--out", "o" * 300],
    "empty-data": ["train", "resnet18", "--data", "", "--dry-run", "1"],
    "empty-out": ["train", "quickstart", "--out", "", "--set", "length=1step", "--device", "cpu"],
    "empty-run": ["eval", ""],
    "empty-image": ["predict", "RUN", "", "--device", "cpu"],
}
for _name, _command in COMMANDS.items():

    def _command_line(context: Context, command: list[str] = _command) -> list[str]:
        return [str(context.run) if a == "RUN" else str(context.image()) if a == "IMAGE" else a for a in command]

    CASES[f"command/{_name}"] = _command_line


@case("command/token-pipe")
def _(context: Context) -> list[str]:
    os.mkfifo(context.folder / "tokens")
    return ["serve", str(context.run), "--device", "cpu", "--port", "0", "--token-file", "tokens"]


@case("command/migrate-doubling")
def _(context: Context) -> list[str]:
    (context.folder / "train.sh").write_text("A=x\n" + "A=$A$A\n" * 60 + "python train.py --name $A\n")
    return ["migrate", "train.sh"]


MIGRATED = {
    "deep": "a: " + "[" * 60_000,
    "deep-mappings": "".join(f"{' ' * depth}a:\n" for depth in range(600)),
    "merge-keys": "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60)),
}
for _name, _text in MIGRATED.items():

    def _migrate(context: Context, text: str = _text) -> list[str]:
        (context.folder / "config.yaml").write_text(text)
        return ["migrate", "config.yaml"]

    CASES[f"command/migrate-{_name}"] = _migrate


# Convert


for _kind, _file in (("folder", "packed"), ("folder", "images"), ("csv", "images"), ("coco", "tfrecord")):

    def _convert(context: Context, kind: str = _kind, to: str = _file) -> list[str]:
        root = context.data(kind)
        if kind == "folder":
            (root / "train" / ("c" * 255)).mkdir()
            (root / "train" / ("c" * 255) / "0.jpg").write_bytes(IMAGE)
        if kind == "csv":
            rows = [f"{n}.jpg,{'k' * 300 if n % 2 else 'a/../../b'},{'train' if n < 6 else 'val'}\n" for n in range(8)]
            (root / "labels.csv").write_text("file,label,split\n" + "".join(rows))
        return ["data", "convert", str(root), str(context.folder / "out"), "--to", to]

    CASES[f"convert/{_kind}-{_file}"] = _convert

"""Folders of strangers: every command beside every field that may name a file, an address or code, and kind of trap.

An audit hook in the command's process reports what a folder must never bring about without consent: its code compiled
or executed, a library of it loaded, a file outside written, an address looked up or connected to, a process started.
Afterwards nothing outside may have changed, and nothing of it may have been printed or copied.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import Ended, Lab, copy_run

sys.path.append(
    str(Path(__file__).resolve().parents[2] / "support")
)  # after this folder, which has modules of equal names

from checkpoint_examples import sign
from foreign_folders import OWNED, change_run, checkpoints, trap
from foreign_traps import (
    CANARY,
    FOLDER,
    OUTSIDE,
    TRAPS,
    json_documents,
    recipe_fields,
    set_place,
    set_recipe_field,
    shaped,
    text_places,
    trap_text,
)

_CHECKPOINT, _WEIGHTS = "{run}/checkpoints/step-000000002", "{run}/checkpoints/step-000000002/model.safetensors"
_SHORT = ("--set", "length=1step", "--set", "schedule.warmup=0ep", "--set", "data.subset_percent=3", "--quiet")
READING = {
    "eval": ("eval", "{run}"),
    "eval --all": ("eval", "{run}", "--all"),
    "eval of a checkpoint": ("eval", _CHECKPOINT),
    "predict": ("predict", "{run}", "a.png"),
    "export": ("export", "{run}", "--to", "safetensors", "--out", "exported"),
    "bench infer": ("bench", "infer", "{run}", "--batches", "1", "--iterations", "1"),
    "serve": ("serve", "{run}", "--port", "0"),
    "average": ("average", "{run}", "--last", "1step"),
    "resume": ("resume", "{run}", "--quiet"),
    "resume --fork": ("resume", "{run}", "--fork", "--out", "forked", "--quiet"),
    "train --resume": ("train", "quickstart", "--resume", "--out", "{run}", *_SHORT),
    "train --init": ("train", "quickstart", "--init", "{run}", "--out", "new", *_SHORT),
    "train with a teacher": ("train", "quickstart", "--set", "distill.teacher={run}", "--out", "new", *_SHORT),
    "report": ("report", "{run}"),
    "report of two": ("report", "{run}", "{run}", "--out", "compared.html"),
    "status": ("status", "{run}"),
    "inspect": ("inspect", "{run}"),
    "recipes show": ("recipes", "show", "{run}/recipe.yaml"),
    "plan": ("plan", "{run}/recipe.yaml"),
    "submit --dry-run": ("submit", "{run}/recipe.yaml", "--to", "slurm", "--dry-run"),
}
# The commands that read other files of a run than its recipe.
_OF_RUN = ("eval", "resume", "train --init", "report", "report of two", "status", "inspect")
_OF_CHECKPOINT = (*_OF_RUN, "eval --all", "eval of a checkpoint", "export")
EXPORT_COMMANDS = {
    "inspect": ("inspect", "{export}"),
    "eval": ("eval", "{export}"),
    "predict": ("predict", "{export}", "a.png"),
    "predict with its weights": ("predict", "{export}/model.safetensors", "a.png"),
    "train --init": ("train", "quickstart", "--init", "{export}/model.safetensors", "--out", "new", *_SHORT),
}
DATA_COMMANDS = {
    "train": ("train", "quickstart", "--data", "{data}", "--out", "new", "--set", "data.source=auto", *_SHORT),
    "data check": ("data", "check", "{data}"),
    "data show": ("data", "show", "{data}", "--out", "shown.png"),
    "data convert": ("data", "convert", "{data}", "packed"),
    "data index": ("data", "index", "{data}"),
    "inspect": ("inspect", "{data}"),
}
_RUN_FILES = ("run.json", "summary.json", "classification.json", "events.jsonl", "mirror.json")
_CHECKPOINT_FILES = ("best.json", *(f"checkpoints/step-000000002/{name}" for name in ("state.json", "manifest.json")))
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.truncate", "os.chmod")
_PROCESSES = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.spawn", "os.fork", "os.forkpty")
_ADDRESSES = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request")
LISTENING = "127.0.0.1"  # which `serve` looks up, and no trap names
_EXPORTS: dict[Path, Path] = {}  # of labs


def cases(lab: Lab) -> Iterator[dict[str, Any]]:
    for field, name, shape in recipe_fields():
        for command in READING:
            yield {"in": "recipe", "field": field, "shape": shape, "trap": name, "command": command}
    for name in TRAPS:
        yield {"in": "extends", "field": "extends", "trap": name, "command": "recipes show"}
        yield {"in": "extends", "field": "extends", "trap": name, "command": "inspect"}
    for file in (*_RUN_FILES, *_CHECKPOINT_FILES):
        original = lab.middle / file
        for place in _places(original if original.exists() else lab.reference / file, file):
            yield from _cases_of(file, place, _OF_RUN if file in _RUN_FILES else _OF_CHECKPOINT)
    export = export_of(lab)
    for file in ("preprocess.json", "report.json"):
        for place in _places(export / file, file):
            yield from _cases_of(file, place, EXPORT_COMMANDS, "export")
    for place in ("class", "image", "csv", "reconv.json", "coco"):
        yield from _cases_of(place, [place], DATA_COMMANDS, "data")


def _cases_of(file: str, place: list[Any], commands: Any, folder: str = "run") -> Iterator[dict[str, Any]]:
    for command in commands:
        for name in TRAPS:
            yield {"in": folder, "file": file, "field": place, "trap": name, "command": command}


def _places(file: Path, name: str) -> list[list[Any]]:
    """Where texts are in a file: the number of a document and the place in it; what the recipe has is left out."""
    if name == "mirror.json":
        return [[0, "url"]]
    found: list[list[Any]] = []
    kinds: set[object] = set()
    for number, document in enumerate(json_documents(file)):
        kind = document.get("kind")
        if kind in kinds:
            continue
        kinds |= {kind} if kind else set()
        left_out = ({"recipe"}, {"crc32c"})[name.endswith(".jsonl")]
        found += [[number, *place] for place in text_places(document) if place[0] not in left_out]
    if name.endswith("manifest.json"):
        found.append([0, "files", ""])  # the name of a file
    return found


def export_of(lab: Lab) -> Path:
    """An export of the undisturbed run."""
    if lab.folder not in _EXPORTS:
        out = lab.folder / "export"
        ended = lab.command(["export", str(lab.reference), "--to", "safetensors", "--out", str(out)])
        if ended.code:
            raise RuntimeError(f"the undisturbed export failed: {ended.stderr}")
        _EXPORTS[lab.folder] = out
    return _EXPORTS[lab.folder]


# A case


def run(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    """Open a foreign folder by a command; why it was not safe, or nothing."""
    folder = folder.resolve()
    _write_outside(folder)
    foreign = {"run": FOLDER, "recipe": FOLDER, "extends": FOLDER, "export": "export", "data": "data"}[case["in"]]
    _write_foreign(lab, case, folder)
    commands = {"export": EXPORT_COMMANDS, "data": DATA_COMMANDS}.get(case["in"], READING)
    places = {"run": folder / FOLDER, "export": folder / "export", "data": folder / "data"}
    words = [word.format(**places) for word in commands[case["command"]]]
    before = _contents(folder / OUTSIDE)
    (folder / "work").mkdir(exist_ok=True)
    shutil.copy(lab.reference / "images/first-batch.png", folder / "work/a.png")
    ended = call(lab, words, folder, case.get("trust", False))
    return find_problem(ended, folder, folder / foreign, before)


def call(lab: Lab, words: list[str], folder: Path, is_trusted: bool = False) -> Ended:
    """Run a command in a folder of its own, under the audit hook."""
    from reconv.cli import main

    def child() -> None:
        os.chdir(folder / "work")
        (folder / "work/temporary").mkdir()
        tempfile.tempdir = str(folder / "work/temporary")
        os.environ |= {"HOME": str(folder / "work/home"), "RECONV_CACHE": str(folder / "work/cache")}
        os.dup2(os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT, 0o600), 1)
        if words[0] == "serve":
            _stop_when_ready(lab.folder / "stderr.txt")
        sys.dont_write_bytecode = True  # of modules that are imported for the first time
        sys.addaudithook(Audit(folder, words[0]))
        main([*words, *(["--trust-code"] if is_trusted else [])])

    return lab.call(child)


class Audit:
    """Appends to a file what a command of a foreign folder must not do."""

    def __init__(self, folder: Path, command: str) -> None:
        self._command = command
        self._log = os.open(folder / "audit.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._foreign = tuple(str(folder / name) for name in (FOLDER, "export", "data", OUTSIDE))
        own = [str(folder / name) for name in ("work", FOLDER, "data", "export")]
        self._writable = (
            *own,
            "/dev/",
            "/proc/self/",
            str(folder.parent / "stderr.txt"),
            str(folder.parent / "result"),
        )

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        problem = self._problem(event, args)
        if problem:
            os.write(self._log, f"{event}: {problem}\n".encode(errors="backslashreplace"))

    def _problem(self, event: str, args: tuple[Any, ...]) -> str:
        if event == "exec":
            return self._if_foreign(getattr(args[0], "co_filename", ""))
        if event in ("compile", "ctypes.dlopen"):
            return self._if_foreign(args[-1 if event == "compile" else 0])
        if event == "open":
            is_written = isinstance(args[2], int) and args[2] & _WRITES
            return self._if_outside(args[0]) if is_written else ""
        if event in _CHANGES:
            names = args[:2] if event in ("os.rename", "os.link") else args[1:2] if event == "os.symlink" else args[:1]
            return next(filter(None, map(self._if_outside, names)), "")
        if event in _ADDRESSES:
            target = args[1] if event in ("socket.connect", "socket.sendto") else args[0]
            is_local = isinstance(target, str | bytes) and event == "socket.connect"  # a socket of this machine
            return "" if is_local or target == LISTENING else repr(target)
        if event == "subprocess.Popen" and self._command == "export" and args[1][:2] == [sys.executable, "-I"]:
            return ""  # the run.py that it has written, which sees installed packages alone
        return repr(args[:2]) if event in _PROCESSES else ""

    def _if_foreign(self, name: object) -> str:
        text = os.fsdecode(name) if isinstance(name, str | bytes) else ""
        return text if text.startswith(self._foreign) else ""

    def _if_outside(self, name: object) -> str:
        if not isinstance(name, str | bytes | os.PathLike):
            return ""  # a descriptor
        path = os.path.realpath(os.fsdecode(name))
        return "" if path.startswith(self._writable) else path


def _stop_when_ready(log: Path) -> None:
    """Send this process SIGTERM when it serves."""

    def wait() -> None:
        while b"ready:" not in log.read_bytes():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def find_problem(ended: Ended, folder: Path, foreign: Path, before: dict[str, bytes]) -> str:
    """Description of what was unsafe, or nothing."""
    audit = folder / "audit.txt"
    if audit.exists() and (text := audit.read_text()):
        return f"without consent: {text[:600]}"
    if owned := [*folder.rglob(OWNED)]:
        return f"executed: {owned}"
    if _contents(folder / OUTSIDE) != before:
        return "a file outside has changed"
    output = (folder / "output.txt").read_bytes() if (folder / "output.txt").exists() else b""
    printed = output + ended.stderr.encode(errors="replace")
    if b"\x1b" in printed or (b"\r" in printed and b"\rred" in printed):
        return f"escapes were printed: {printed[-300:]!r}"
    if CANARY.encode() in printed:
        return f"what a file outside has was printed: {printed[-300:]!r}"
    for place in (folder / "work", foreign):
        for path, content in _contents(place).items():
            if CANARY.encode() in content:
                return f"what a file outside has was copied to {path}"
    return ended.problem()


def _contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without those behind links, by their paths."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {str(path): path.read_bytes() for path in paths}


# Foreign folders


def _write_outside(folder: Path) -> None:
    outside = folder / OUTSIDE
    (outside / "images").mkdir(parents=True)
    for name in ("secret.txt", "images/secret.txt", "authorized_keys", "x"):
        (outside / name).write_text(CANARY)


def _write_foreign(lab: Lab, case: dict[str, Any], folder: Path) -> None:
    text = trap_text(case["trap"], folder)
    if case["in"] == "data":
        _write_data(folder, case["file"], text)
        return
    if case["in"] == "export":
        copy_run(export_of(lab), folder / "export")
        _set_texts(folder / "export" / case["file"], case["field"], text)
        return
    run = copy_run(lab.middle, folder / FOLDER)
    (run / "linked").symlink_to(folder / OUTSIDE) if case["trap"] == "a link" else None
    for place in (run, run / "lib", folder / "work"):
        place.mkdir(exist_ok=True)
        (place / "evil.py").write_text(trap("def make(*args, **options): return None"))
    if case["in"] == "recipe":
        value = shaped(text, case["shape"])

        def change(recipe: dict[str, Any]) -> None:
            recipe["code_path"] = [str(run / "lib")]
            set_recipe_field(recipe, case["field"], value)

        change_run(run, change)
    elif case["in"] == "extends":
        (run / "recipe.yaml").write_text(json.dumps({"extends": text}))
    else:
        file = run / case["file"]
        if case["file"] == "mirror.json":
            file.write_text(json.dumps({"url": ""}))
        elif not file.exists():  # a stopped run has none
            shutil.copy(lab.reference / case["file"], file)
        _set_texts(file, case["field"], text)
        for checkpoint in checkpoints(run) if file.name == "state.json" else ():
            sign(checkpoint)


def _set_texts(file: Path, place: list[Any], text: str) -> None:
    """Replace a text of a JSON file; the name of a manifest's file is a key."""
    documents = json_documents(file)
    number, *inside = place
    if inside[-1] == "" and inside[0] == "files":
        documents[number]["files"][text] = {"sha256": "0" * 64, "size": 1}
    else:
        set_place(documents[number], tuple(inside), text)
    if file.suffix != ".jsonl":
        file.write_text(json.dumps(documents[0]))
        return
    from reconv.logging.json_lines import add_checksum

    for document in documents:
        document.pop("crc32c", None)
    file.write_bytes(b"".join(add_checksum(json.dumps(each).encode()) + b"\n" for each in documents))


def _write_data(folder: Path, place: str, text: str) -> None:
    """A small dataset in which one name is a trap."""
    import numpy as np
    from PIL import Image

    data = folder / "data"
    if place == "csv":
        data.mkdir()
        (data / "train.csv").write_text(f"image,label\n{json.dumps(text)},a\n")
        (data / "val.csv").write_text(f"image,label\n{json.dumps(text)},a\n")
        return
    if place == "reconv.json":
        data.mkdir()
        content = {"format": text, "source": text, "files": {text: {"sha256": text, "size": 1}}, "shards": [text]}
        (data / place).write_text(json.dumps(content))
        return
    if place == "coco":
        (data / "annotations").mkdir(parents=True)
        image = {"id": 1, "file_name": text, "width": 8, "height": 8, "coco_url": text}
        content = {"images": [image], "annotations": [], "categories": [{"id": 1, "name": text}]}
        for split in ("train", "val"):
            (data / f"annotations/instances_{split}2017.json").write_text(json.dumps(content))
            (data / f"{split}2017").mkdir()
        return
    for split in ("train", "val"):
        for name in ("a", "b"):
            (data / split / name).mkdir(parents=True)
            for number in range(3):
                pixels = np.full((8, 8), 40 * number, np.uint8)
                Image.fromarray(pixels).save(data / split / name / f"{number}.png")
        target = folder / OUTSIDE / ("images" if place == "class" else "secret.txt")
        name = text.replace("/", "_").replace("\0", "")[:200]
        (data / split / name if place == "class" else data / split / "a" / f"{name}.png").symlink_to(target)

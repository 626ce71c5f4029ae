"""Files made to harm: code in pickles and YAML, paths that lead outside, sizes beyond memory, files without an end."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab import Lab, copy_run

OWNED = "owned"  # the file that harmful code would create


class _Harm:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {OWNED}",)


def _safetensors(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


def _torch_zip() -> bytes:
    path = Path("harm.zip")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(_Harm()))
        file.writestr("archive/version", "3")
    return path.read_bytes()


WEIGHTS: dict[str, Callable[[], bytes]] = {
    "a pickle that runs a command": lambda: pickle.dumps(_Harm()),
    "a torch file that runs a command": _torch_zip,
    "a header of 2^63 bytes": lambda: _safetensors(b"{}", 2**63),
    "a header of 2^40 bytes": lambda: _safetensors(b"{}", 2**40),
    "a header that is no JSON": lambda: _safetensors(b"\xff" * 50),
    "a deep header": lambda: _safetensors(b'{"a":' * 50_000),
    "offsets outside": lambda: _safetensors(b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'),
    "a shape of 2^62": lambda: _safetensors(
        b'{"w":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}}'
    ),
    "nothing": lambda: b"",
    "one byte": lambda: b"\0",
}
YAMLS = {
    "python objects": "!!python/object/apply:os.system ['touch owned']\n",
    "a billion laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)),
    "deep lists": "a: " + "[" * 50_000,
    "a long number": f"seed: {'9' * 100_000}\n",
    "control characters": 'name: "\\x1b]0;owned\\x07"\n',
    "an import": "extends: quickstart\nmodel:\n  name: os:system\n",
    "a path outside": "extends: ../../../../etc/passwd\n",
    "a device": "extends: /dev/zero\n",
}
RUN_FILES = ("recipe.yaml", "run.json", "events.jsonl", "summary.json", "best.json", "classification.json")
LINKS = ("/dev/zero", "/dev/urandom", "/dev/tty", "/proc/self/mem", "/etc/shadow", "/")


def cases(lab: Lab) -> Iterator[dict[str, Any]]:
    for name in WEIGHTS:
        for suffix in (".safetensors", ".pth", ".bin"):
            yield {"kind": "weights", "name": name, "suffix": suffix}
    for name in YAMLS:
        for use in ("recipe", "run"):
            yield {"kind": "yaml", "name": name, "use": use}
    for file in RUN_FILES:
        for link in LINKS:
            yield {"kind": "link", "file": file, "link": link}
    for name in ("../../outside", "/etc/passwd", "a/b", "", "x" * 5000):
        yield {"kind": "manifest", "name": name}


def run(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    os.chdir(folder)
    try:
        problem = _run(lab, case, folder)
    finally:
        os.chdir(lab.folder)
    return "a command of the file was run" if (folder / OWNED).exists() else problem


def _run(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    if case["kind"] == "weights":
        file = folder / f"weights{case['suffix']}"
        file.write_bytes(WEIGHTS[case["name"]]())
        return lab.command(["eval", str(file), "--recipe", "quickstart"]).problem(file.name, (2, 4, 6))
    if case["kind"] == "yaml":
        if case["use"] == "recipe":
            file = folder / "recipe.yaml"
            file.write_text(YAMLS[case["name"]])
            return lab.command(["train", str(file), "--dry-run", "1"]).problem("", (2,))
        run = copy_run(lab.middle, folder / "run")
        (run / "recipe.yaml").write_text(YAMLS[case["name"]])
        problems = [lab.command(words).problem("", (2, 4)) for words in (["resume", str(run)], ["report", str(run)])]
        return "; ".join(filter(None, problems))
    run = copy_run(lab.reference, folder / "run")
    if case["kind"] == "link":
        (run / case["file"]).unlink()
        (run / case["file"]).symlink_to(case["link"])
        commands = (["report", str(run)], ["resume", str(run)])
        return "; ".join(filter(None, (lab.command(words).problem("", (2, 4, 6)) for words in commands)))
    manifest = run / "checkpoints/step-000000004/manifest.json"
    content = json.loads(manifest.read_text())
    del content["digest"]
    content["files"][case["name"]] = {"sha256": "0" * 64, "size": 4}
    content["digest"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps(content))
    return lab.command(["eval", str(run)]).problem(run, (4,))

"""Malicious run directories, weights and recipes."""

# ruff: noqa: E501
from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from malicious_annotations import ALIASES
from malicious_cases import (
    CASES,
    CONTENT,
    DEEP,
    DIGITS,
    JSON,
    SPECIAL,
    Context,
    case,
    fifo,
    link_loop,
    not_utf8,
    register_files,
    sparse,
    zeros,
)
from malicious_labels import PICKLES

from reconv.logging.json_lines import CHECKSUM, add_checksum
from reconv.storage.tensorflow_encoding import encode_bytes_field, encode_varint, masked_crc32c

# Run directories


def _in_run(file: str, *arguments: str) -> Callable[[Context], tuple[Path, list[str]]]:
    def place(context: Context) -> tuple[Path, list[str]]:
        run = context.run
        path = (context.checkpoint / file[2:]) if file.startswith("*/") else run / file
        shown = [str(run) if a == "RUN" else str(context.image()) if a == "IMAGE" else a for a in arguments]
        return path, shown

    return place


_REPORT = ("report", "RUN")
_EVAL = ("eval", "RUN", "--device", "cpu")
_EVAL_BEST = ("eval", "RUN", "--best", "--device", "cpu")
_PREDICT = ("predict", "RUN", "IMAGE", "--device", "cpu")
_RESUME = ("resume", "RUN", "--device", "cpu")
for _title, _arguments in (("report", _REPORT), ("eval", _EVAL), ("resume", _RESUME), ("predict", _PREDICT)):
    for _file in ("recipe.yaml", "events.jsonl", "summary.json", "run.json"):
        register_files(f"{_title}-{_file}", _in_run(_file, *_arguments), SPECIAL, CONTENT, JSON)
for _title, _arguments in (("eval", _EVAL), ("resume", _RESUME)):
    for _file in ("*/manifest.json", "*/state.json", "*/model.safetensors", "*/optimizer.safetensors"):
        register_files(f"{_title}-{_file[2:]}", _in_run(_file, *_arguments), SPECIAL, CONTENT, JSON)
for _file in ("evaluations.csv", "classification.json", "detection.json", "report.html", "alive"):
    register_files(f"report-{_file}", _in_run(_file, *_REPORT), SPECIAL, CONTENT, JSON)
for _file in ("best.json",):
    register_files(f"eval-best-{_file}", _in_run(_file, *_EVAL_BEST), SPECIAL, CONTENT, JSON)
register_files("resume-lock", _in_run("lock", *_RESUME), SPECIAL, CONTENT)
register_files("resume-alive", _in_run("alive", *_RESUME), SPECIAL, CONTENT)
register_files("resume-best.json", _in_run("best.json", *_RESUME), SPECIAL, CONTENT, JSON)


def sign(checkpoint: Path) -> None:
    """Make the manifest of a checkpoint right for its files."""
    from reconv.checkpoint import manifest

    old = json.loads((checkpoint / "manifest.json").read_text())
    entries = {name: manifest.entry_of((checkpoint / name).read_bytes()) for name in old["files"]}
    new = manifest.Manifest(old["step"], entries, old["run_id"], old["recipe_digest"])
    (checkpoint / "manifest.json").write_bytes(manifest.render(new))


def _safetensors(header: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


SAFETENSORS = {
    "length-huge": _safetensors(b"{}", 2**63),
    "length-100m": _safetensors(b"{}", 100 << 20),
    "deep": _safetensors(b'{"a":' * DEEP),
    "deep-list": _safetensors(b'{"a":{"dtype":"F32","shape":' + b"[" * DEEP),
    "shape-huge": _safetensors(b'{"a":{"dtype":"F32","shape":[99999999999,99999999999],"data_offsets":[0,4]}}', data=bytes(4)),
    "shape-digits": _safetensors(b'{"a":{"dtype":"F32","shape":[' + DIGITS.encode() + b'],"data_offsets":[0,4]}}', data=bytes(4)),
    "offsets": _safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,99999999999]}}', data=bytes(4)),
    "offsets-negative": _safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}', data=bytes(4)),
    "overlap": _safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', data=bytes(4)),
    "dtype": _safetensors(b'{"a":{"dtype":"X7","shape":[1],"data_offsets":[0,4]}}', data=bytes(4)),
    "fp4": _safetensors(b'{"a":{"dtype":"F4","shape":[8],"data_offsets":[0,4]}}', data=bytes(4)),
    "name-surrogate": _safetensors(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', data=bytes(4)),
    "empty-shapes": _safetensors(b"{" + b",".join(b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(100_000)) + b"}"),
    "metadata-deep": _safetensors(json.dumps({"__metadata__": {"reconv": "[" * DEEP}}).encode()),
    "metadata-digits": _safetensors(json.dumps({"__metadata__": {"reconv": '{"format": ' + DIGITS + "}"}}).encode()),
    "metadata-number": _safetensors(b'{"__metadata__": {"reconv": 7}}'),
}  # fmt: skip
for _name, _content in SAFETENSORS.items():

    def _eval_weights(context: Context, content: bytes = _content) -> list[str]:
        (context.folder / "weights.safetensors").write_bytes(content)
        return ["eval", str(context.folder / "weights.safetensors"), "--recipe", "quickstart", "--device", "cpu"]

    def _eval_signed(context: Context, content: bytes = _content) -> list[str]:
        (context.checkpoint / "model.safetensors").write_bytes(content)
        sign(context.checkpoint)
        return ["eval", str(context.run), "--device", "cpu"]

    def _resume_signed(context: Context, content: bytes = _content) -> list[str]:
        (context.checkpoint / "optimizer.safetensors").write_bytes(content)
        sign(context.checkpoint)
        return ["resume", str(context.run), "--device", "cpu", "--set", "length=3step"]

    CASES[f"weights/{_name}"] = _eval_weights
    CASES[f"signed-model/{_name}"] = _eval_signed
    CASES[f"signed-optimizer/{_name}"] = _resume_signed


def _weights_file(context: Context) -> tuple[Path, list[str]]:
    path = context.folder / "weights.pth"
    return path, ["eval", str(path), "--recipe", "quickstart", "--device", "cpu"]


register_files("weights-file", _weights_file, SPECIAL, CONTENT, JSON)
for _name, _content in PICKLES.items():

    def _eval_pickle(context: Context, content: bytes = _content) -> list[str]:
        (context.folder / "weights.pth").write_bytes(content)
        return ["eval", str(context.folder / "weights.pth"), "--recipe", "quickstart", "--device", "cpu"]

    CASES[f"weights-pickle/{_name}"] = _eval_pickle


def _zip(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


ZIPS = {
    "bomb": lambda: _zip({"a/data.pkl": bytes(1 << 30), "a/version": b"3"}, zipfile.ZIP_DEFLATED),
    "pickle": lambda: _zip({"a/data.pkl": PICKLES["os-system"], "a/version": b"3"}),
    "laughs": lambda: _zip({"a/data.pkl": PICKLES["laughs"], "a/version": b"3"}),
    "no-pickle": lambda: _zip({"a/version": b"3"}),
    "empty": lambda: _zip({}),
}
for _name, _make in ZIPS.items():

    def _eval_zip(context: Context, make: Any = _make) -> list[str]:
        (context.folder / "weights.pth").write_bytes(make())
        return ["eval", str(context.folder / "weights.pth"), "--recipe", "quickstart", "--device", "cpu"]

    CASES[f"weights-zip/{_name}"] = _eval_zip


def _tf_index(context: Context) -> tuple[Path, list[str]]:
    path = context.folder / "model.ckpt.index"
    return path, ["eval", str(context.folder / "model.ckpt"), "--recipe", "quickstart", "--device", "cpu"]


def _tf_state(context: Context) -> tuple[Path, list[str]]:
    folder = context.folder / "tf"
    folder.mkdir()
    return folder / "checkpoint", ["eval", str(folder), "--recipe", "quickstart", "--device", "cpu"]


register_files("tf-index", _tf_index, SPECIAL, CONTENT)
register_files("tf-state", _tf_state, SPECIAL, CONTENT)


def tensorflow_table(block: bytes, handle: tuple[int, int] | None = None) -> bytes:
    def sealed(content: bytes) -> bytes:
        return content + b"\0" + masked_crc32c(content + b"\0").to_bytes(4, "little")

    data = sealed(block)
    pointer = encode_varint(0) + encode_varint(len(block))
    entry = encode_varint(0) + encode_varint(1) + encode_varint(len(pointer)) + b"z" + pointer
    top = entry + (0).to_bytes(4, "little") + (1).to_bytes(4, "little")
    at = len(data)
    data += sealed(top)
    where = handle or (at, len(top))
    footer = encode_varint(0) + encode_varint(0) + encode_varint(where[0]) + encode_varint(where[1])
    return data + footer + bytes(40 - len(footer)) + 0xDB4775248B80FB57.to_bytes(8, "little")


def _block(*entries: tuple[int, bytes, bytes]) -> bytes:
    body = b"".join(encode_varint(s) + encode_varint(len(k)) + encode_varint(len(v)) + k + v for s, k, v in entries)
    return body + (0).to_bytes(4, "little") + (1).to_bytes(4, "little")


def _entry(dtype: int, shape: list[int], size: int, offset: int = 0, file: int = 0) -> bytes:
    dims = b"".join(encode_bytes_field(2, b"\x08" + encode_varint(n)) for n in shape)
    numbers = b"".join(
        bytes([number << 3]) + encode_varint(value) for number, value in ((1, dtype), (3, file), (4, offset), (5, size))
    )
    return encode_bytes_field(2, dims) + numbers


_HEAD = (0, b"", b"\x08\x01")
TABLES = {
    "no-header": tensorflow_table(_block((0, b"a", b""))),
    "handle-outside": tensorflow_table(_block(_HEAD), (2**62, 2**62)),
    "shape-huge": tensorflow_table(_block(_HEAD, (0, b"a", _entry(1, [2**40, 2**40], 4)))),
    "shape-many": tensorflow_table(_block(_HEAD, (0, b"a", _entry(1, [1] * 10_000, 4)))),
    "size-huge": tensorflow_table(_block(_HEAD, (0, b"a", _entry(1, [2**45], 2**47)))),
    "negative": tensorflow_table(_block(_HEAD, (0, b"a", _entry(1, [2**64 - 1], 4)))),
    "dtype": tensorflow_table(_block(_HEAD, (0, b"a", _entry(99, [1], 4)))),
    "file-huge": tensorflow_table(_block(_HEAD, (0, b"a", _entry(1, [1], 4, 0, 2**60)))),
    "files-many": tensorflow_table(_block((0, b"", b"\x08" + encode_varint(2**60)))),
    "shared": tensorflow_table(_block(_HEAD, (99, b"a", b""))),
    "prefix-bomb": tensorflow_table(_block(_HEAD, (0, b"a" * 60_000, b""), *((60_000 + n, b"b", b"") for n in range(20_000)))),
    "restarts": tensorflow_table(b"\xff" * 8),
}  # fmt: skip
for _name, _content in TABLES.items():

    def _eval_table(context: Context, content: bytes = _content) -> list[str]:
        (context.folder / "model.ckpt.index").write_bytes(content)
        (context.folder / "model.ckpt.data-00000-of-00001").write_bytes(bytes(8))
        return ["eval", str(context.folder / "model.ckpt"), "--recipe", "quickstart", "--device", "cpu"]

    CASES[f"tf-table/{_name}"] = _eval_table


STATES: dict[str, Any] = {
    "step-huge": {"step": 10**30},
    "step-float": {"step": 1.5},
    "step-text": {"step": "x"},
    "total-huge": {"total_steps": 10**30},
    "history-text": {"history": "x"},
    "history-nan": {"history": [{"step": 1, "weights": "raw", "metrics": {"top1": float("nan")}}]},
    "history-many": {"history": [{"step": 1, "weights": "raw", "metrics": {"top1": 0.1}}] * 100_000},
    "recipe-list": {"recipe": []},
    "recipe-empty": {"recipe": {}},
    "recipe-deep": {"recipe": {"model": json.loads("[" * 400 + "]" * 400)}},
    "class-names-numbers": {"class_names": [1, 2]},
    "class-names-many": {"class_names": ["c"] * 1_000_000},
    "class-names-surrogate": {"class_names": ["\ud800"] * 10},
    "threads": {"threads": 10**9},
    "micro-groups": {"micro_groups": 10**30},
    "bad-images": {"bad_images": [{"split": "train", "index": 10**30, "step": 1, "path": "x", "why": "y"}]},
    "device": {"device": 7},
    "callbacks": {"callbacks": []},
    "code": {"code": {"x": 7}},
    "fingerprint": {"data_fingerprint": {"train": 7}},
}
for _name, _changes in STATES.items():

    def _edit_state(context: Context, changes: dict[str, Any] = _changes) -> None:
        file = context.checkpoint / "state.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        sign(context.checkpoint)

    def _resume_state(context: Context, edit: Any = _edit_state) -> list[str]:
        edit(context)
        return ["resume", str(context.run), "--device", "cpu", "--set", "length=3step"]

    def _predict_state(context: Context, edit: Any = _edit_state) -> list[str]:
        edit(context)
        return ["predict", str(context.run), str(context.image()), "--device", "cpu"]

    CASES[f"resume-state/{_name}"] = _resume_state
    CASES[f"predict-state/{_name}"] = _predict_state

RUN_JSON: dict[str, tuple[str, Any]] = {
    "summary-steps-text": ("summary.json", {"exit_code": 0, "steps": "x", "total_steps": "y"}),
    "summary-steps-list": ("summary.json", {"exit_code": 0, "steps": [], "total_steps": {}}),
    "summary-steps-inf": ("summary.json", {"exit_code": 0, "steps": float("inf"), "total_steps": float("nan")}),
    "best-step-inf": ("best.json", {"step": float("inf"), "metric": "top1", "value": 1, "weights": "raw"}),
    "best-step-text": ("best.json", {"step": "x", "metric": "top1", "value": "y", "weights": "raw"}),
    "best-value-huge": ("best.json", {"step": 1, "metric": "top1", "value": 10**400, "weights": "raw"}),
    "run-id-number": ("run.json", {"format": 1, "run_id": 7, "recipe_digests": 8}),
    "run-digests": ("run.json", {"format": 1, "run_id": "x", "recipe_digests": {"a": 1}}),
    "classification-empty": ("classification.json", {"version": 1}),
    "classification-text": ("classification.json", {"version": 1, "confusion": "x", "classes": 7}),
    "detection-empty": ("detection.json", {"version": 3}),
    "detection-text": ("detection.json", {"version": 3, "best_threshold": "x"}),
}
for _name, (_file, _value) in RUN_JSON.items():
    for _title, _arguments in (("report", _REPORT), ("eval-best", _EVAL_BEST), ("resume", _RESUME)):

        def _edit_run(
            context: Context, file: str = _file, value: Any = _value, arguments: Any = _arguments
        ) -> list[str]:
            (context.run / file).write_text(json.dumps(value))
            return [str(context.run) if a == "RUN" else a for a in arguments]

        CASES[f"{_title}-run-json/{_name}"] = _edit_run

MANIFESTS: dict[str, Any] = {
    "files-list": {"files": []},
    "size-huge": {"files": {"state.json": {"sha256": "x", "size": 10**30}}},
    "size-negative": {"files": {"state.json": {"sha256": "x", "size": -1}}},
    "size-inf": {"files": {"state.json": {"sha256": "x", "size": float("inf")}}},
    "size-text": {"files": {"state.json": {"sha256": "x", "size": "y"}}},
    "name-up": {"files": {"../../x": {"sha256": "x", "size": 1}}},
    "name-nul": {"files": {"a\0b": {"sha256": "x", "size": 1}}},
    "name-long": {"files": {"a" * 5000: {"sha256": "x", "size": 1}}},
    "name-surrogate": {"files": {"\ud800": {"sha256": "x", "size": 1}}},
    "step-inf": {"step": float("inf")},
    "step-text": {"step": "x"},
    "many-files": {"files": {f"f{n}": {"sha256": "x", "size": 1} for n in range(100_000)}},
}
for _name, _changes in MANIFESTS.items():

    def _eval_manifest(context: Context, changes: dict[str, Any] = _changes) -> list[str]:
        from reconv.checkpoint import manifest

        file = context.checkpoint / "manifest.json"
        body = {**json.loads(file.read_text()), **changes}
        body.pop("digest")
        file.write_text(json.dumps({**body, "digest": manifest._digest(body)}))
        return ["eval", str(context.run), "--device", "cpu"]

    CASES[f"manifest/{_name}"] = _eval_manifest

RECIPES = {
    "alias-bomb": ALIASES + "\n",
    "alias": "a: &a 1\nb: *a\n",
    "deep": "model: " + "[" * 20_000,
    "deep-map": "model: " + "{a: " * 20_000,
    "deep-block": "\n".join(" " * n + "a:" for n in range(3000)),
    "digits": f"seed: {DIGITS}\n",
    "hex-digits": "seed: 0x" + "f" * 500_000 + "\n",
    "float-digits": f"schedule:\n  lr: 0.{DIGITS}\n",
    "nan": "schedule:\n  lr: .nan\n",
    "inf": "schedule:\n  lr: .inf\n",
    "python-tag": "name: !!python/object/apply:os.system ['touch hacked']\n",
    "length": "length: 1e308ep\n",
    "length-digits": f"length: {DIGITS}ep\n",
    "size": "data:\n  preprocess:\n    size: 99999999999\n",
    "batch": "batch:\n  size: 99999999999999\n",
    "workers": "data:\n  num_workers: 999999999\n",
    "extends-self": "extends: recipe.yaml\n",
    "extends-zero": "extends: /dev/zero\n",
    "extends-list": "extends: [a]\n",
    "list": "- a\n",
    "long-key": "k" * 1_000_000 + ": 1\n",
    "many-keys": "\n".join(f"k{n}: 1" for n in range(20_000)),
    "flow-questions": "a: {" + "?" * 20_000,
    "name-long": "extends: quickstart\nname: " + "n" * 5000 + "\n",
    "name-slash": "extends: quickstart\nname: ../../x\n",
    "classes": "model:\n  options: {num_classes: 99999999999}\n",
}
for _name, _text in RECIPES.items():

    def _train_recipe(context: Context, text: str = _text) -> list[str]:
        path = context.folder / "recipe.yaml"
        path.write_text(text if "extends:" in text else "extends: quickstart\n" + text)
        return ["train", str(path), "--dry-run", "1", "--device", "cpu"]

    def _report_recipe(context: Context, text: str = _text) -> list[str]:
        (context.run / "recipe.yaml").write_text(text)
        return ["report", str(context.run)]

    CASES[f"recipe/{_name}"] = _train_recipe
    CASES[f"report-recipe/{_name}"] = _report_recipe


def _recipe_file(context: Context) -> tuple[Path, list[str]]:
    path = context.folder / "recipe.yaml"
    return path, ["train", str(path), "--dry-run", "1", "--device", "cpu"]


register_files("recipe-file", _recipe_file, SPECIAL, CONTENT, JSON)


@case("run/long-step")
def _(context: Context) -> list[str]:
    (context.run / "checkpoints" / ("step-" + "9" * 240)).mkdir()
    return ["eval", str(context.run), "--device", "cpu"]


@case("run/step-loop")
def _(context: Context) -> list[str]:
    (context.run / "checkpoints/step-999999999").symlink_to("step-999999999")
    return ["eval", str(context.run), "--device", "cpu"]


@case("run/step-fifo")
def _(context: Context) -> list[str]:
    os.mkfifo(context.run / "checkpoints/step-999999999")
    return ["eval", str(context.run), "--device", "cpu"]


@case("run/checkpoints-loop")
def _(context: Context) -> list[str]:
    shutil.rmtree(context.run / "checkpoints")
    link_loop(context.run / "checkpoints")
    return ["eval", str(context.run), "--device", "cpu"]


@case("run/run-is-loop")
def _(context: Context) -> list[str]:
    link_loop(context.folder / "x")
    return ["eval", str(context.folder / "x"), "--device", "cpu"]


@case("run/run-is-root")
def _(context: Context) -> list[str]:
    return ["eval", "/", "--device", "cpu"]


@case("run/run-is-zero")
def _(context: Context) -> list[str]:
    return ["eval", "/dev/zero", "--device", "cpu"]


@case("run/report-root")
def _(context: Context) -> list[str]:
    return ["report", "/"]


@case("run/resume-zero")
def _(context: Context) -> list[str]:
    return ["resume", "/dev/zero"]


@case("run/number-names")
def _(context: Context) -> list[str]:
    (context.folder / "runs").mkdir()
    (context.folder / "runs" / ("9" * 250)).mkdir()
    return ["eval", str(context.folder / "runs"), "--device", "cpu"]


_MADE_WEIGHTS: dict[str, Callable[[Path], object]] = {
    "init-fifo": fifo, "init-zeros": zeros, "init-sparse": sparse, "init-loop": link_loop, "init-not-utf8": not_utf8,
}  # fmt: skip
for _name, _make_weights in _MADE_WEIGHTS.items():

    def _train_init(context: Context, make: Callable[[Path], object] = _make_weights) -> list[str]:
        make(context.folder / "w.pth")
        return ["train", "quickstart", "--init", str(context.folder / "w.pth"), "--dry-run", "1", "--device", "cpu"]

    CASES[f"train/{_name}"] = _train_init


# Events with numbers that no run has, with the right checksum


def _change_event(context: Context, kind: str, change: Callable[[dict[str, Any]], None]) -> None:
    file = context.run / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    change(next(event for event in events if event["kind"] == kind))
    lines = [json.dumps({name: value for name, value in event.items() if name != CHECKSUM}) for event in events]
    file.write_bytes(b"".join(add_checksum(line.encode()) + b"\n" for line in lines))


@case("events/devices-huge")
def _(context: Context) -> list[str]:
    command = ["reconv", "train", "quickstart", "--devices", "99999999999999"]
    _change_event(context, "attempt", lambda event: event.update(command=command))
    return ["resume", str(context.run), "--device", "cpu"]


for _field in ("gap_px", "columns", "step"):
    for _number, _value in enumerate((2**62, -(2**62), 10**12)):

        def _image_event(context: Context, field: str = _field, value: int = _value) -> list[str]:
            _change_event(context, "image", lambda event: event.update({field: value}))
            return ["report", str(context.run)]

        CASES[f"events/{_field}-{_number}"] = _image_event


# What waits in a folder for a download


def _part(make: Callable[[Path], None], suffix: str) -> Callable[[Context], list[str]]:
    def write(context: Context) -> list[str]:
        (context.folder / "outside").write_text("private")
        (context.folder / "data").mkdir()
        make(context.folder / "data" / f"cifar-10-binary.tar.gz.part{suffix}")
        return ["data", "get", "cifar10", str(context.folder / "data"), "--base-url", "http://127.0.0.1:9/"]

    return write


for _suffix in ("", ".etag"):
    CASES[f"data-get/part{_suffix}-link"] = _part(lambda path: path.symlink_to("../outside"), _suffix)
    CASES[f"data-get/part{_suffix}-pipe"] = _part(lambda path: os.mkfifo(path), _suffix)

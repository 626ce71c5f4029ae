"""Fuzz targets: one for each parser of files and requests of others, called through the product's own functions.

Where a format has checksums, the target makes them right again: a mutation would otherwise end at them.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fuzz_runner import Target
from malicious_cases import Context
from malicious_runs import tensorflow_table

from reconv.checkpoint import manifest
from reconv.checkpoint.interop.tensorflow import read_tensorflow
from reconv.checkpoint.load_weights import read_weights
from reconv.checkpoint.manifest import STATE, check_state
from reconv.checkpoint.store import CheckpointStore
from reconv.checkpoint.weights_metadata import read_metadata
from reconv.core.errors import DataError, ReconvError
from reconv.data.inspect.check import check
from reconv.data.inspect.lenient_open import SPLITS
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detection.box_tfrecord import records_have_boxes
from reconv.data.readers.shards.index import _shards_key
from reconv.data.readers.shards.tfrecord_format import write_records
from reconv.logging.json_lines import CHECKSUM, add_checksum
from reconv.migrate.command_line import split_commands
from reconv.migrate.config_file import read_config
from reconv.recipe.loader import load
from reconv.recipe.parts.data import DataConfig
from reconv.report.html import render
from reconv.serve.http.protocol import parse_infer
from reconv.serve.http.request_images import split_body
from reconv.serve.limits import ApiError, Limits
from reconv.storage.object_stores.store import as_url, split_url

TARGETS: dict[str, Target] = {}
_LIMITS = Limits(max_images=16)

Parse = Callable[[bytes], object]


def _target(name: str, *refusals: type[BaseException]) -> Callable[[Callable[[Path], Parse]], Callable[[Path], Parse]]:
    def register(prepare: Callable[[Path], Parse]) -> Callable[[Path], Parse]:
        TARGETS[name] = Target(name, prepare, refusals or (ReconvError,))
        return prepare

    return register


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# Recipes


@_target("recipe")
def _(folder: Path) -> Parse:
    file = folder / "recipe.yaml"

    def parse(data: bytes) -> None:
        file.write_bytes(data)
        load(str(file))

    return parse


@_target("migrate-config")
def _(folder: Path) -> Parse:
    file = folder / "config.yaml"

    def parse(data: bytes) -> None:
        file.write_bytes(data)
        read_config(str(file))

    return parse


@_target("migrate-command")
def _(folder: Path) -> Parse:
    def parse(data: bytes) -> None:
        split_commands(data.decode("utf-8", "replace"))

    return parse


@_target("address")
def _(folder: Path) -> Parse:
    def parse(data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        with suppress(ReconvError):
            split_url(text)
        as_url(text)

    return parse


# Datasets: what `reconv data check` does, which goes on after a bad sample, and what training does, which does not


def _read_dataset(root: Path, boxes: bool) -> None:
    with suppress(DataError):
        check(str(root), DataConfig(), 1)
    for split in SPLITS:
        dataset = open_dataset("auto", root, split, DataConfig(), boxes=boxes)
        dataset.fingerprint()
        for index in range(min(len(dataset), 3)):
            dataset[index]


def _dataset(name: str, kind: str, file: str, boxes: bool = False) -> None:
    def prepare(folder: Path) -> Parse:
        root = Context(folder, folder).data(kind)

        def parse(data: bytes) -> None:
            (root / file).write_bytes(data)
            _read_dataset(root, boxes)

        return parse

    TARGETS[name] = Target(name, prepare, (ReconvError,))


_dataset("coco-json", "coco", "annotations/instances_train2017.json", boxes=True)
_dataset("voc-xml", "voc", "Annotations/i0.xml", boxes=True)
_dataset("yolo-data-yaml", "yolo", "data.yaml", boxes=True)
_dataset("yolo-labels", "yolo", "labels/train/i0.txt", boxes=True)
_dataset("csv", "csv", "labels.csv")
_dataset("tar", "tar", "train-0000.tar")
_dataset("tfrecord", "tfrecord", "train-00000-of-00001")


@_target("tfrecord-example")
def _(folder: Path) -> Parse:
    root = folder / "data"
    root.mkdir()

    def parse(data: bytes) -> None:
        for split in ("train", "val"):
            write_records(root / f"{split}-00000-of-00001", [data])
        _read_dataset(root, boxes=records_have_boxes(root))

    return parse


@_target("packed-shard")
def _(folder: Path) -> Parse:
    root = Context(folder, folder).data("packed")
    header = struct.Struct("<8sII6Q")

    def parse(data: bytes) -> None:
        if len(data) > header.size:
            fields = list(header.unpack(data[: header.size]))
            fields[2] = zlib.crc32(data[fields[4] :])
            fields[-1] = len(data)
            data = header.pack(*fields) + data[header.size :]
        (root / "train-00000-of-00001.packed").write_bytes(data)
        _read_dataset(root, boxes=False)

    return parse


@_target("shard-index")
def _(folder: Path) -> Parse:
    root = Context(folder, folder).data("tar")
    key = _shards_key(root, ["train-0000.tar"])

    def parse(data: bytes) -> None:
        text, _, rows = data.partition(b"\n")
        if (header := _object(text)) is not None:
            digest = hashlib.blake2b(rows, digest_size=16).hexdigest()
            text = json.dumps({**header, "key": key, "rows_digest": digest}).encode()
        content = b"reconv index 1\n" + len(text).to_bytes(8, "little") + text + rows
        (root / ".reconv-tar-train.index").write_bytes(content)
        _read_dataset(root, boxes=False)

    return parse


# Run directories and weights


@_target("manifest")
def _(folder: Path) -> Parse:
    checkpoint = folder / "step-00000002"
    checkpoint.mkdir()
    (checkpoint / STATE).write_bytes(b"{}")

    def parse(data: bytes) -> None:
        if (body := _object(data)) is not None:
            body.pop("digest", None)
            data = json.dumps({**body, "digest": manifest._digest(body)}).encode()
        (checkpoint / manifest.NAME).write_bytes(data)
        CheckpointStore(folder).verify(checkpoint)

    return parse


@_target("state")
def _(folder: Path) -> Parse:
    checkpoint = folder / "step-00000002"
    checkpoint.mkdir()

    def parse(data: bytes) -> None:
        (checkpoint / STATE).write_bytes(data)
        signed = manifest.Manifest(2, {STATE: manifest.entry_of(data)}, "", "")
        (checkpoint / manifest.NAME).write_bytes(manifest.render(signed))
        check_state(CheckpointStore(folder).read_state(checkpoint), checkpoint)

    return parse


def _seal(line: bytes) -> bytes:
    """A line of JSON with the right checksum."""
    record = _object(line)
    if record is None:
        return line
    record.pop(CHECKSUM, None)
    return add_checksum(json.dumps(record, separators=(",", ":")).encode()) if record else line


def _run_file(name: str, file: str, *, is_sealed: bool = True) -> None:
    def prepare(folder: Path) -> Parse:
        run = folder / "run"
        run.mkdir()
        (run / "events.jsonl").write_bytes(next((Path(__file__).parent / "corpus" / "events").iterdir()).read_bytes())

        def parse(data: bytes) -> None:
            if is_sealed:
                data = b"\n".join(map(_seal, data.split(b"\n")))
            (run / file).write_bytes(data)
            render([run]).encode("utf-8", "backslashreplace")  # as it is written

        return parse

    TARGETS[name] = Target(name, prepare, (ReconvError,))


_run_file("events", "events.jsonl")
_run_file("classification-json", "classification.json")
_run_file("detection-json", "detection.json")
_run_file("evaluations-csv", "evaluations.csv", is_sealed=False)
_run_file("run-recipe", "recipe.yaml", is_sealed=False)


@_target("safetensors")
def _(folder: Path) -> Parse:
    file = folder / "model.safetensors"

    def parse(data: bytes) -> None:
        """The length of the header is made right in one of two inputs."""
        header, separator, tensors = data[8:].partition(b"\n")
        if separator:
            data = len(header).to_bytes(8, "little") + header + tensors
        file.write_bytes(data)
        with suppress(ReconvError):
            read_metadata(file)
        read_weights(file)

    return parse


@_target("torch-weights")
def _(folder: Path) -> Parse:
    file = folder / "model.pt"

    def parse(data: bytes) -> None:
        """A file, or the pickle in it: the archive around that has checksums."""
        if not data.startswith(b"PK"):
            members = {
                "data.pkl": data,
                "byteorder": b"little",
                "data/0": bytes(16),
                "data/1": bytes(16),
                "version": b"3\n",
            }
            archive = io.BytesIO()
            with zipfile.ZipFile(archive, "w") as pack:
                for name, content in members.items():
                    pack.writestr(f"archive/{name}", content)
            data = archive.getvalue()
        file.write_bytes(data)
        read_weights(file)

    return parse


@_target("tensorflow-index")
def _(folder: Path) -> Parse:
    index = folder / "model.ckpt.index"
    (folder / "model.ckpt.data-00000-of-00001").write_bytes(bytes(8))

    def parse(data: bytes) -> None:
        """A file, or the first block of one, which has a checksum."""
        index.write_bytes(data if data.endswith(b"\xdb") else tensorflow_table(data))
        read_tensorflow(index)
        with suppress(ReconvError):  # hardly any has the names of a ResNet
            read_weights(index)

    return parse


# Requests


@_target("serve-images", ApiError)
def _(folder: Path) -> Parse:
    def parse(data: bytes) -> list[bytes]:
        content_type, _, body = data.partition(b"\n")
        return split_body(content_type.decode("latin-1"), bytearray(body), _LIMITS)

    return parse


@_target("serve-infer", ApiError)
def _(folder: Path) -> Parse:
    # What is asked of a predictor; to load one takes seconds.
    recipe = load("quickstart").recipe
    classes = [str(digit) for digit in range(10)]
    predictor: Any = SimpleNamespace(
        recipe=recipe, classes=classes, is_detector=False, step=1, backend=SimpleNamespace(name="torch")
    )

    def parse(data: bytes) -> object:
        """The JSON up to an empty line, then binary data."""
        text, separator, binary = data.partition(b"\n\n")
        length = str(len(text)) if separator else None
        return parse_infer(text + binary, length, predictor, _LIMITS)

    return parse

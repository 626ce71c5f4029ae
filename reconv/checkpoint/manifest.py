"""The checks of a checkpoint's files before they are used.

`manifest.json` says whose it is, and has the sha256 and size of each file and a digest of itself: a checkpoint that
verifies has, bit for bit, what was saved, run id, recipe digest and step included. That proves that it is what some
program wrote, not that the program was ours: a checkpoint may have been edited and signed again, or written by another
version. So the contents of `state.json` are checked as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from reconv.core.confidence import ConfidenceCalibration
from reconv.core.errors import CheckpointError, UnreadableRunError
from reconv.core.version import __version__
from reconv.recipe.parts.data import Decoder
from reconv.storage import read_limits
from reconv.storage.bounded import TooLargeError, parse_shallow_json
from reconv.storage.files import FileSystem
from reconv.storage.transient import is_machine_fault, retry_transient

NAME = "manifest.json"
STATE = "state.json"
FORMAT = 2  # 2: run_id and recipe_digest
_CHUNK_BYTES = 1 << 20
PARALLEL_BYTES = 4 << 20  # from this size on, digests are computed in threads
_MAX_THREADS = 4
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # of a file of a checkpoint
MAX_THREADS = 1 << 16


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The expected hash and size of a file."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The step of a checkpoint, its files, its run and the recipe it was trained with."""

    step: int
    files: Mapping[str, FileEntry]
    run_id: str = ""  # empty: saved outside of a run
    recipe_digest: str = ""

    @property
    def num_bytes(self) -> int:
        """The total size of all files."""
        return sum(entry.num_bytes for entry in self.files.values())


def entry_of(*pieces: bytes | memoryview) -> FileEntry:
    """The entry of a file with this content, given in pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return FileEntry(digest.hexdigest(), sum(len(piece) for piece in pieces))


def render(manifest: Manifest) -> bytes:
    """The text of `manifest.json`; equal for equal content."""
    body = {
        "format": FORMAT,
        "step": manifest.step,
        "run_id": manifest.run_id,
        "recipe_digest": manifest.recipe_digest,
        "files": {
            name: {"sha256": entry.sha256, "size": entry.num_bytes} for name, entry in sorted(manifest.files.items())
        },
    }
    return json.dumps({**body, "digest": _digest(body)}, indent=1).encode()


def read(folder: Path, files: FileSystem | None = None) -> Manifest:
    """Read the manifest of a checkpoint directory; raises `CheckpointError` when it is missing or damaged."""
    path = folder / NAME
    text = _bytes(path, files or FileSystem(), read_limits.MANIFEST_BYTES)
    try:
        content = parse_shallow_json(text)
        found = content.pop("digest")
        if content["format"] != FORMAT:
            raise _other_format(path, content["format"])
        if found != _digest(content):
            raise damaged(path, "is damaged: its digest does not match its content")
        entries = {name: FileEntry(str(item["sha256"]), int(item["size"])) for name, item in content["files"].items()}
        manifest = Manifest(int(content["step"]), entries, str(content["run_id"]), str(content["recipe_digest"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged(path, f"is damaged: {type(error).__name__}: {error}") from error
    for name in entries:
        if not _NAME.fullmatch(name) or name == NAME:
            raise damaged(path, f"lists {name!r:.80}, which is not a file in the directory")
    return manifest


def digest(folder: Path) -> str:
    """A short hash that identifies this checkpoint, from its manifest."""
    return hashlib.sha256(_bytes(folder / NAME, FileSystem(), read_limits.MANIFEST_BYTES)).hexdigest()[:16]


def verify(folder: Path, files: FileSystem | None = None) -> Manifest:
    """Check every file of a checkpoint in full; raises `CheckpointError` naming the file and the problem."""
    files = files or FileSystem()
    manifest = verify_sizes(folder, files)

    def digest_of(name: str) -> str:
        path = folder / name
        try:
            return retry_transient(lambda: _sha256(path, files), path)
        except OSError as error:
            raise unreadable(path, error) from error

    is_large = manifest.num_bytes >= PARALLEL_BYTES
    threads = ThreadPoolExecutor(_MAX_THREADS if is_large else 1, "reconv-digest")  # hashing releases the GIL
    try:
        digests = (threads.map if is_large else map)(digest_of, manifest.files)
        for (name, entry), found in zip(manifest.files.items(), digests, strict=True):
            _check_sha256(folder / name, found, entry)
    finally:
        threads.shutdown(cancel_futures=True)
    return manifest


def _sha256(path: Path, files: FileSystem) -> str:
    digest = hashlib.sha256()
    with files.open(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def verify_sizes(folder: Path, files: FileSystem | None = None) -> Manifest:
    """Check names and sizes only: finds incomplete checkpoints, not flipped bits."""
    files = files or FileSystem()
    manifest = read(folder, files)
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            num_bytes = path.stat().st_size
        except FileNotFoundError as error:
            raise damaged(path, "is missing") from error
        except OSError as error:
            raise unreadable(path, error) from error
        if num_bytes != entry.num_bytes:
            raise damaged(path, f"has {num_bytes} bytes instead of {entry.num_bytes}")
    try:
        names = files.listdir(folder)
    except OSError as error:
        raise unreadable(folder, error) from error
    for name in names:
        if name.endswith(".safetensors") and name not in manifest.files:
            raise damaged(folder / name, f"is not listed in {NAME}")
    return manifest


def read_verified(path: Path, entry: FileEntry, files: FileSystem) -> bytes:
    """The content of a file, checked against its entry."""
    data = _bytes(path, files, entry.num_bytes)
    if len(data) != entry.num_bytes:
        raise damaged(path, f"has {len(data)} bytes instead of {entry.num_bytes}")
    _check_sha256(path, hashlib.sha256(data).hexdigest(), entry)
    return data


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a file that differs from what was saved."""
    return CheckpointError(
        f"{path.name} {what}",
        where=str(path),
        why="the disk failed, the save was interrupted, or the file was changed afterwards",
        hint="resume from an older checkpoint with --resume, or name one that is valid",
    )


def _other_format(path: Path, found: object) -> CheckpointError:
    return CheckpointError(
        f"{path.name} has format {found}, but Reconv {__version__} reads format {FORMAT}",
        where=str(path),
        why="another version of Reconv wrote this checkpoint; state.json says which",
        hint="use that version; or use only its weights: --init with the path of its model.safetensors",
    )


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that cannot be read."""
    kind = UnreadableRunError if is_machine_fault(error) else CheckpointError
    return kind(
        f"{path.name} cannot be read: {error.strerror or error}", where=str(path), hint=f"ls -l '{path.parent}'"
    )


def _bytes(path: Path, files: FileSystem, max_bytes: int) -> bytes:
    def read() -> bytes:
        with files.open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise TooLargeError(path, size, max_bytes)
            return file.read()

    try:
        return retry_transient(read, path)
    except FileNotFoundError as error:
        raise damaged(path, "is missing") from error
    except OSError as error:
        raise unreadable(path, error) from error


def _check_sha256(path: Path, found: str, entry: FileEntry) -> None:
    if found != entry.sha256:
        raise damaged(path, f"is damaged: sha256 is {found[:12]}… instead of {entry.sha256[:12]}…")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Evaluation(_Strict):
    step: NonNegativeInt
    weights: str
    metrics: dict[str, float]
    confidence: dict[str, Any] | None = None


class _Monitored(_Strict):
    metric: str
    weights: str


class _BadImage(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    split: Literal["train", "val"]
    index: NonNegativeInt
    step: int
    path: str
    why: str


class _Divergence(_Strict):
    """The state of the divergence guard; the learning rate is multiplied by `lr_factor`."""

    start: float | None = None
    losses: list[list[float | int | None]] = []
    first_step: NonNegativeInt = 0
    num_rewinds: NonNegativeInt = 0
    warned: list[str] = []
    lr_factor: float = Field(default=1.0, gt=0, le=1)


class _State(_Strict):
    step: NonNegativeInt
    total_steps: PositiveInt
    history: list[_Evaluation]
    monitored: _Monitored
    skipped: NonNegativeInt
    micro_groups: PositiveInt
    bad_images: list[_BadImage]
    recipe: dict[str, Any]
    class_names: list[str] = Field(min_length=1)
    class_ids: list[int] = []
    display_names: list[str] = []
    data_fingerprint: dict[str, str]
    threads: int = Field(ge=1, le=MAX_THREADS)
    decoder: Decoder = "pillow"
    device: str
    teacher: str | None = None
    callbacks: dict[str, Any] = {}
    divergence: _Divergence = Field(default_factory=_Divergence)
    code: dict[str, str] = {}


def check_state(state: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` if the state of a checkpoint lacks something or has something impossible."""
    try:
        checked = _State.model_validate(dict(state))
    except ValidationError as error:
        first = error.errors()[0]
        raise malformed(path / STATE, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if checked.step > checked.total_steps:
        raise malformed(path / STATE, f"step {checked.step:,} of {checked.total_steps:,}")
    late = [evaluation.step for evaluation in checked.history if evaluation.step > checked.step]
    if late:
        raise malformed(path / STATE, f"it has an evaluation of step {late[0]:,}, after its own step {checked.step:,}")
    for evaluation in checked.history:
        try:
            _ = evaluation.confidence and ConfidenceCalibration.from_dict(evaluation.confidence)
        except ValueError as error:
            raise malformed(path / STATE, f"the evaluation of step {evaluation.step:,}: {error}") from error
        if evaluation.weights == checked.monitored.weights and checked.monitored.metric not in evaluation.metrics:
            raise malformed(
                path / STATE, f"the evaluation of step {evaluation.step:,} has no {checked.monitored.metric}"
            )


class MalformedCheckpointError(CheckpointError):
    """A checkpoint whose checksums are right and whose content cannot be: no older one is used instead."""


def malformed(path: Path, why: str) -> MalformedCheckpointError:
    """The error for a file whose checksum is right and whose content cannot be."""
    return MalformedCheckpointError(
        f"{path.name} of {path.parent.name} is malformed",
        where=str(path),
        why=f"{why}; its checksum is right, so another program or version wrote it",
        hint="move this checkpoint away and use an older one",
    )


def confidence_in_state(state: Mapping[str, Any], step: int, weights: str) -> ConfidenceCalibration | None:
    """The calibrated confidence of some weights at a step, from the evaluations in a checkpoint's state."""
    for entry in reversed(state["history"]):
        if entry["step"] == step and entry["weights"] == weights and entry.get("confidence"):
            return ConfidenceCalibration.from_dict(entry["confidence"])
    return None

"""The checkpoints of one run: saved atomically, and found newest valid first.

From the first completed save on, at every moment and after every crash, at least one valid checkpoint can be found.
Only the process that holds the run's lock may save or delete; reading needs no lock, and starts over if a checkpoint is
deleted meanwhile. A checkpoint of another run, recipe or step than its place says is never used and never deleted.

Names: `step-N` is a checkpoint; `.tmp-step-N-PID` one being written; `.old-step-N-PID` one being replaced by a new
save of the same step, valid until the new one is complete; `.trash-step-N-PID` one being deleted;
`misplaced-step-N-PID` one of another run that was in the way of a save.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from torch import Tensor

from reconv.checkpoint import manifest as manifests
from reconv.checkpoint.manifest import STATE, FileEntry, MalformedCheckpointError, Manifest, malformed
from reconv.checkpoint.run_identity import RunIdentity, read_identity
from reconv.checkpoint.safetensors_bytes import encode_pieces
from reconv.core.bits import bits_sum
from reconv.core.errors import CheckpointError, UnreadableRunError
from reconv.core.message import message
from reconv.logging.run_dir import RunDir
from reconv.storage import read_limits
from reconv.storage.bounded import parse_shallow_json
from reconv.storage.files import FileSystem, disk_error, disk_errors, disk_full_error, write_synced
from reconv.storage.transient import retry_transient

SUFFIX = ".safetensors"
_STEP = re.compile(r"step-(\d{9,})")
_HIDDEN = re.compile(r"\.(tmp|old|trash)-(step-(\d{9,}))-\d+")
_PART = re.compile(r"[a-z][a-z0-9_]*")
_HEADROOM_BYTES = 1 << 20  # for headers, state.json and the manifest
NUM_TRIES = 5  # of a reader whose checkpoint is deleted by retention meanwhile

Parts = Mapping[str, Mapping[str, Tensor]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The path and size of a checkpoint."""

    path: Path
    num_bytes: int


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest valid checkpoint, if any, and the newer ones that were skipped, with reasons."""

    path: Path | None
    skipped: tuple[tuple[Path, str], ...] = ()


@message
@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """The content of a checkpoint, in host memory."""

    step: int
    parts: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class WrongTensorError(Exception):
    """A tensor that was to be saved is not what was digested on its device; nothing was saved."""

    def __init__(self, tensor: str) -> None:
        super().__init__(f"{tensor} has changed in memory before it was on disk")
        self.tensor = tensor


class MisplacedCheckpointError(CheckpointError):
    """A checkpoint that is not what its place says: of another run, another recipe or another step."""


def folder_name(step: int) -> str:
    """The name of a step's checkpoint directory."""
    return f"step-{step:09d}"


def is_checkpoint_name(name: str) -> bool:
    """True if a folder of this name should be a checkpoint."""
    return _STEP.fullmatch(name) is not None


def open_store(run: RunDir, files: FileSystem | None = None) -> CheckpointStore:
    """The checkpoints of a run, which are used only if they are its own."""
    return CheckpointStore(run.checkpoints, files, read_identity(run))


class CheckpointStore:
    """The checkpoints of one run directory; without an identity, of any run."""

    def __init__(self, folder: Path, files: FileSystem | None = None, identity: RunIdentity | None = None) -> None:
        self.folder = folder
        self.files = files or FileSystem()
        self.identity = identity

    def save(
        self,
        step: int,
        parts: Parts,
        state: Mapping[str, Any],
        headers: Mapping[str, Mapping[str, str]] | None = None,
        digests: Mapping[str, Mapping[str, int]] | None = None,
    ) -> SavedCheckpoint:
        """Write a checkpoint; when this returns it is on disk under its final name.

        The tensors must not change until then. `headers` has the metadata of parts that are weights files. With
        `digests` the files are read again, and `WrongTensorError` is raised for a tensor with another `bits_sum`.
        """
        temporary = self._hidden("tmp", step)
        final = self.folder / folder_name(step)

        def write() -> Manifest:
            if not self.folder.exists():
                self.files.makedirs(self.folder)
                self.files.fsync_dir(self.folder.parent)
            self.remove_leftovers()
            self._check_space(parts)
            manifest = self._write(temporary, step, parts, state, headers or {})
            if digests is not None:
                self._check_digests(temporary, manifest, digests)
            self._publish(temporary, final, step)
            return manifest

        try:
            manifest = retry_transient(write, final)  # into a new folder: after a failed fsync data may be lost
        except OSError as error:
            failure = disk_error(final, error, fs=self.files)
            with suppress(OSError):  # else the next save removes it
                self.files.rmtree(temporary)
            raise failure from error
        return SavedCheckpoint(final, manifest.num_bytes)

    def _check_digests(self, folder: Path, manifest: Manifest, digests: Mapping[str, Mapping[str, int]]) -> None:
        """Compare the files of a checkpoint, as the system has them, with digests of what was to be saved."""
        try:
            for part, expected in digests.items():
                name = f"{part}{SUFFIX}"
                try:
                    tensors = safetensors.torch.load(
                        manifests.read_verified(folder / name, manifest.files[name], self.files)
                    )
                except CheckpointError as error:
                    raise WrongTensorError(name) from error
                for tensor, digest in expected.items():
                    if int(bits_sum(tensors[tensor])) != digest:
                        raise WrongTensorError(f"{part}.{tensor}")
        except WrongTensorError:
            self.files.rmtree(folder)
            raise

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints of later steps."""
        with disk_errors(self.folder, fs=self.files):
            later = [self.path(saved) for saved in self.steps() if saved > step]
            self._delete([path for path in later if not self._is_misplaced(path)])

    def newest(self) -> NewestCheckpoint:
        """The newest checkpoint that passes the full check, and which newer ones are damaged or cannot be read.

        Raises `MisplacedCheckpointError` if the newest one is another run's, and `UnreadableRunError` if none is valid
        and one cannot be read.
        """
        return self._first_valid(self.verify)[0]

    def load_newest(self) -> tuple[NewestCheckpoint, LoadedCheckpoint | None]:
        """The same with its content, each byte of which is read and checked once."""
        return self._first_valid(self.load)

    def _first_valid(self, read: Callable[[Path], T]) -> tuple[NewestCheckpoint, T | None]:
        """The newest checkpoint that `read` takes, and what it returned."""
        refusal: UnreadableRunError | None = None
        for _ in range(NUM_TRIES):
            skipped: list[tuple[Path, str]] = []
            for _, path in self._candidates():
                try:
                    content = read(path)
                except (MisplacedCheckpointError, MalformedCheckpointError):
                    raise
                except CheckpointError as error:
                    if not path.exists():
                        break  # retention has deleted it since the folder was listed: list it again
                    skipped.append((path, error.what))
                    refusal = refusal or (error if isinstance(error, UnreadableRunError) else None)
                else:
                    return NewestCheckpoint(path, tuple(skipped)), content
            else:
                break
        if refusal is not None:
            raise refusal
        return NewestCheckpoint(None, tuple(skipped)), None

    def verify(self, path: Path, *, full: bool = True) -> Manifest:
        """Check a checkpoint directory, and that it belongs here; raises `CheckpointError`.

        `full` reads every byte; otherwise only names and sizes are checked.
        """
        manifest = (manifests.verify if full else manifests.verify_sizes)(path, self.files)
        check_place(path, manifest, self.identity)
        return manifest

    def load(self, path: Path) -> LoadedCheckpoint:
        """Read a checkpoint directory, checking every byte; raises `CheckpointError`."""
        loaded, manifest = _load(path, self.files)
        check_place(path, manifest, self.identity)
        return loaded

    def read_state(self, path: Path) -> dict[str, Any]:
        """The content of `state.json`, checked."""
        return _read_state(path, manifests.read(path, self.files), self.files)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint directory, ascending, unchecked."""
        return sorted({step for step, _ in self._candidates()})

    def path(self, step: int) -> Path:
        """The directory of a step, which may not exist."""
        return self.folder / folder_name(step)

    def prune(self, keep_last: int, best_step: int | None = None, keep_steps: Collection[int] = ()) -> list[int]:
        """Delete all but the last, the best and those of `keep_steps`, after a full check of one that is kept."""
        with disk_errors(self.folder, fs=self.files):
            self.remove_leftovers()
            kept = {best_step, *keep_steps}
            if not {step for step, _ in self._candidates()[keep_last:]} - kept:
                return []  # nothing is old enough, whatever the check would find
            verified: int | None = None
            num_last = 0
            for step, path in self._candidates():
                if num_last >= keep_last and verified is not None:
                    break
                # One full check makes deleting safe; of the others only the sizes are checked.
                if self._is_valid(path, full=verified is None):
                    verified = step if verified is None else verified
                    num_last += 1
                    kept.add(step)
            # A damaged one newer than the verified one stays: it may be readable again, and is overwritten soon.
            older = [step for step in self.steps() if step not in kept and verified is not None and step < verified]
            deleted = [step for step in older if not self._is_misplaced(self.path(step))]
            self._delete([self.path(step) for step in deleted])
        return deleted

    def remove_leftovers(self) -> None:
        """Remove what crashes left behind; a checkpoint whose replacement was not completed is restored first."""
        for name in self._names():
            match = _HIDDEN.fullmatch(name)
            if match is None:
                continue
            hidden, final = self.folder / name, self.folder / match[2]
            if match[1] == "old" and not self._is_valid(final, full=True):
                if final.exists():
                    self._delete([final])
                self.files.replace(hidden, final)
                self.files.fsync_dir(self.folder)
            else:
                self.files.rmtree(hidden)

    def _candidates(self) -> list[tuple[int, Path]]:
        """Every directory that may be a checkpoint, newest step first; a replaced one comes after its replacement."""
        found: list[tuple[int, int, Path]] = []
        try:
            names = self._names()
        except OSError as error:
            raise manifests.unreadable(self.folder, error) from error
        for name in names:
            if match := _STEP.fullmatch(name):
                found.append((int(match[1]), 1, self.folder / name))
            elif (match := _HIDDEN.fullmatch(name)) and match[1] == "old":
                found.append((int(match[3]), 0, self.folder / name))
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def _names(self) -> list[str]:
        try:
            return self.files.listdir(self.folder)
        except FileNotFoundError:
            return []

    def _hidden(self, kind: str, step: int) -> Path:
        return self.folder / f".{kind}-{folder_name(step)}-{os.getpid()}"

    def _is_valid(self, path: Path, *, full: bool) -> bool:
        try:
            self.verify(path, full=full)
        except UnreadableRunError:
            raise  # nothing is deleted because a disk is out of order
        except CheckpointError:
            return False
        return True

    def _is_misplaced(self, path: Path) -> bool:
        try:
            check_place(path, manifests.read(path, self.files), self.identity)
        except MisplacedCheckpointError:
            return True
        except UnreadableRunError:
            raise
        except CheckpointError:
            return False
        return False

    def _check_space(self, parts: Parts) -> None:
        tensors = (tensor for part in parts.values() for tensor in part.values())
        needed_bytes = sum(t.numel() * t.element_size() for t in tensors) + _HEADROOM_BYTES
        if self.files.free_bytes(self.folder) < needed_bytes:
            raise disk_full_error(self.folder, "not enough disk space for a checkpoint", needed_bytes, self.files)

    def _write(
        self,
        folder: Path,
        step: int,
        parts: Parts,
        state: Mapping[str, Any],
        headers: Mapping[str, Mapping[str, str]],
    ) -> Manifest:
        self.files.mkdir(folder)
        entries = self._write_parts(folder, parts, headers)
        run_id, digest = ("", "") if self.identity is None else (self.identity.run_id, self.identity.recipe_digest)
        owner = {"run_id": run_id, "recipe_digest": digest} if run_id else {}
        text = json.dumps({**state, **owner}, indent=1).encode()
        write_synced(folder / STATE, [text], self.files)
        entries[STATE] = manifests.entry_of(text)
        manifest = Manifest(step, entries, run_id, digest)
        write_synced(folder / manifests.NAME, [manifests.render(manifest)], self.files)
        self.files.fsync_dir(folder)
        return manifest

    def _write_parts(
        self, folder: Path, parts: Parts, headers: Mapping[str, Mapping[str, str]]
    ) -> dict[str, FileEntry]:
        """Write a file for each part; large ones are written and hashed in threads, all at the same time."""
        entries: dict[str, FileEntry] = {}
        writes: list[Future[None]] = []
        digests: dict[str, Future[FileEntry]] = {}
        with ThreadPoolExecutor(2 * max(len(parts), 1), "reconv-checkpoint") as threads:
            for part, tensors in parts.items():
                if not _PART.fullmatch(part):
                    raise ValueError(f"{part!r} is not a valid name for a part of a checkpoint")
                name, pieces = f"{part}{SUFFIX}", encode_pieces(tensors, headers.get(part))
                if sum(map(len, pieces)) < manifests.PARALLEL_BYTES:
                    entries[name] = manifests.entry_of(*pieces)
                    write_synced(folder / name, pieces, self.files)
                else:
                    writes.append(threads.submit(write_synced, folder / name, pieces, self.files))
                    digests[name] = threads.submit(manifests.entry_of, *pieces)
            for write in writes:
                write.result()
            return entries | {name: digest.result() for name, digest in digests.items()}

    def _publish(self, temporary: Path, final: Path, step: int) -> None:
        if final.exists() and self._is_misplaced(final):
            self.files.replace(final, final.with_name(f"misplaced-{final.name}-{os.getpid()}"))
        replaced = self._hidden("old", step)
        is_replacing = final.exists()
        if is_replacing:
            self.files.replace(final, replaced)
        self.files.replace(temporary, final)
        self.files.fsync_dir(self.folder)
        if is_replacing:
            self.files.rmtree(replaced)

    def _delete(self, paths: list[Path]) -> None:
        """Rename first, so that a checkpoint name never refers to an incomplete one."""
        trash = [path.with_name(f".trash-{path.name}-{os.getpid()}") for path in paths]
        for path, hidden in zip(paths, trash, strict=True):
            self.files.replace(path, hidden)
        if trash:
            self.files.fsync_dir(self.folder)
        for hidden in trash:
            self.files.rmtree(hidden)


def _load(path: Path, files: FileSystem) -> tuple[LoadedCheckpoint, Manifest]:
    manifest = manifests.verify_sizes(path, files)
    state = _read_state(path, manifest, files)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, entry in manifest.files.items():
        if name == STATE:
            continue
        data = manifests.read_verified(path / name, entry, files)
        if name.endswith(SUFFIX):
            try:
                parts[name.removesuffix(SUFFIX)] = safetensors.torch.load(data)
            except Exception as error:  # a header that is no JSON, or of a dtype that torch does not have
                raise malformed(path / name, f"{type(error).__name__}: {error}") from error
    return LoadedCheckpoint(manifest.step, parts, state), manifest


def _read_state(path: Path, manifest: Manifest, files: FileSystem) -> dict[str, Any]:
    if STATE not in manifest.files:
        raise manifests.damaged(path / STATE, f"is not listed in {manifests.NAME}")
    if (num_bytes := manifest.files[STATE].num_bytes) > read_limits.STATE_BYTES:
        raise malformed(path / STATE, f"it has {num_bytes:,} bytes, more than {read_limits.STATE_BYTES:,}")
    data = manifests.read_verified(path / STATE, manifest.files[STATE], files)
    try:
        state = parse_shallow_json(data)
    except ValueError as error:
        raise malformed(path / STATE, f"not JSON: {error}") from error
    if not isinstance(state, dict):
        raise malformed(path / STATE, f"a {type(state).__name__} instead of an object")
    for name, expected in (("step", manifest.step), ("run_id", manifest.run_id)):
        if state.get(name, expected) != expected:
            raise malformed(path / STATE, f"{name} is {str(state[name])[:40]}, and {expected} in {manifests.NAME}")
    return state


def check_place(path: Path, manifest: Manifest, identity: RunIdentity | None) -> None:
    """Raise `MisplacedCheckpointError` unless a checkpoint is of the run and the step that its place says."""
    elsewhere = (
        "move it out of this run: then `reconv eval` can evaluate it, and a new run can start from it with --init"
    )
    if identity is not None and manifest.run_id != identity.run_id:
        raise MisplacedCheckpointError(
            f"{path.name} is a checkpoint of another run",
            where=str(path),
            why=f"its run id is {manifest.run_id or 'empty'}, this run's is {identity.run_id}",
            hint=elsewhere,
        )
    if identity is not None and manifest.recipe_digest not in identity.recipe_digests:
        raise MisplacedCheckpointError(
            f"{path.name} was trained with another recipe",
            where=str(path),
            why="settings that determine the result differ from those of this run; state.json has its recipe",
            hint=elsewhere,
        )
    match = _STEP.fullmatch(path.name)
    if match is not None and int(match[1]) != manifest.step:
        raise MisplacedCheckpointError(
            f"{path.name} is the checkpoint of step {manifest.step:,}",
            where=str(path),
            why="the directory was renamed or replaced; it is not used under another step",
            hint=f"rename it back: mv '{path}' '{path.with_name(folder_name(manifest.step))}'",
        )

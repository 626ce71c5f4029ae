"""Power loss: what a run changed on the disk is recorded, and replayed up to any point with any loss that fsync allows.

A write lasts once its file was synced after it; the creation, renaming or deletion of a name once its folder was. What
was not synced may be there, missing, or half there: a write whole, cut, or as zeros. See Pillai et al., "All File
Systems Are Not Created Equal" (OSDI 2014), and the crash tests of SQLite.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab import Lab, copy_run, train_args

BLOCK_BYTES = 512
NUM_RANDOM = 4  # states per point beside those that lose everything, only data, only names, or nothing


@dataclass(frozen=True, slots=True)
class Operation:
    """One recorded change, with paths relative to the run directory."""

    kind: str
    path: str
    target: str = ""
    offset: int = 0
    size: int = 0
    data: bytes = b""

    @property
    def is_name(self) -> bool:
        """Whether it changes a folder rather than the content of a file."""
        return self.kind in ("create", "mkdir", "rename", "unlink", "rmdir")


def read_recording(file: Path, root: Path) -> list[Operation]:
    """The operations of a recording."""
    content, at, operations = file.read_bytes(), 0, []
    while at < len(content):
        end = content.index(b"\n", at)
        kind, path, target, offset, size = content[at:end].decode().split("\t")
        at = end + 1
        data = b""
        if kind == "write":
            data, at = content[at : at + int(size)], at + int(size)
        names = [
            str(Path(name).relative_to(root)) if name else "" for name in (path.removesuffix(" (deleted)"), target)
        ]
        operations.append(Operation(kind, names[0], names[1], int(offset), int(size), data))
    return operations


@dataclass(slots=True)
class Node:
    """A file or a folder; writes and syncs follow it through renames."""

    is_folder: bool
    content: bytearray = field(default_factory=bytearray)
    names: dict[str, Node] = field(default_factory=dict)


class Disk:
    """A file system in memory that applies operations, whole or in part."""

    def __init__(self, start: Path | None) -> None:
        self.root = _load(start) if start is not None and start.exists() else Node(True)

    def find(self, path: str) -> Node | None:
        node: Node | None = self.root
        for name in Path(path).parts:
            node = None if node is None else node.names.get(name)
        return node

    def name(self, operation: Operation) -> None:
        """Change a folder; nothing happens if what it needs was lost."""
        path = Path(operation.path)
        folder = self.find(str(path.parent))
        if folder is None:
            return
        if operation.kind in ("create", "mkdir"):
            folder.names.setdefault(path.name, Node(operation.kind == "mkdir"))
        elif operation.kind in ("unlink", "rmdir"):
            folder.names.pop(path.name, None)
        else:
            target = Path(operation.target)
            to = self.find(str(target.parent))
            if to is not None and path.name in folder.names:
                to.names[target.name] = folder.names.pop(path.name)

    def write_to(self, path: Path) -> None:
        """Make the files."""
        _store(self.root, path)

    def digest(self) -> str:
        """A hash of all names and contents."""
        return _digest(self.root)


def _load(path: Path) -> Node:
    if path.is_dir():
        return Node(True, names={child.name: _load(child) for child in path.iterdir()})
    return Node(False, bytearray(path.read_bytes()))


def _store(node: Node, path: Path) -> None:
    if not node.is_folder:
        path.write_bytes(node.content)
        return
    path.mkdir()
    for name, child in node.names.items():
        _store(child, path / name)


def _digest(node: Node) -> str:
    parts = [f"{name} {_digest(child)}" for name, child in sorted(node.names.items())]
    return hashlib.sha256(bytes(node.content) + "\n".join([str(node.is_folder), *parts]).encode()).hexdigest()


def change_content(node: Node, operation: Operation, kept: str, draw: random.Random) -> None:
    """Write to a file or cut it: whole, in part or with zeros instead of the data."""
    if operation.kind == "truncate":
        if kept == "all":
            del node.content[operation.size :]
            node.content.extend(bytes(max(0, operation.size - len(node.content))))
        return
    data = operation.data
    if kept == "zeros":  # the size was on disk, the data was not
        data = bytes(len(data))
    elif kept == "part":
        data = data[: draw.randrange(0, len(data) + 1) // BLOCK_BYTES * BLOCK_BYTES]
    end = operation.offset + len(data)
    node.content.extend(bytes(max(0, end - len(node.content))))
    node.content[operation.offset : end] = data


def crash(start: Path | None, operations: Sequence[Operation], loss: str, seed: int) -> Disk:
    """The disk after a power loss behind these operations.

    Names of a folder change in order, as journals keep them: of those not synced a first part lasts. Losses: `none`,
    `all` (of what was not synced), `data` (names last), `names` (data lasts), `random`.
    """
    draw = random.Random(seed)
    nodes = trace(start, operations)
    is_durable = durable(operations, nodes)
    pending = [number for number in range(len(operations)) if not is_durable[number]]
    names = [number for number in pending if operations[number].is_name]
    if loss in ("none", "data"):
        lasting = set(names)
    elif loss in ("all", "names"):
        lasting = set()
    else:
        lasting = set(names[: draw.randint(0, len(names))])
    # The live tree tells which file a write went to; names that were lost are missing from the tree of the disk.
    disk, live = Disk(start), {}
    for number, operation in enumerate(operations):
        if operation.is_name and (is_durable[number] or number in lasting):
            disk.name(operation)
            if operation.kind in ("create", "mkdir"):
                node = disk.find(operation.path)
                if node is not None:
                    live.setdefault(nodes[number], node)
        elif operation.kind in ("write", "truncate"):
            node = live.get(nodes[number]) or (disk.find(nodes[number][1]) if nodes[number][0] == "old" else None)
            if node is None or node.is_folder:
                continue
            if is_durable[number] or loss in ("none", "names"):
                kept = "all"
            elif loss in ("all", "data"):
                kept = "nothing"
            else:
                kept = draw.choice(("all", "nothing", "zeros", "part"))
            if kept != "nothing":
                change_content(node, operation, kept, draw)
    return disk


def trace(start: Path | None, operations: Sequence[Operation]) -> list[tuple[str, str]]:
    """For each operation the identity of the file or folder it is about, which does not change with its name."""
    known: dict[str, tuple[str, str]] = {".": ("old", ".")}
    if start is not None and start.exists():
        known |= {str(p.relative_to(start)): ("old", str(p.relative_to(start))) for p in start.rglob("*")}
    found: list[tuple[str, str]] = []
    for number, operation in enumerate(operations):
        if operation.kind in ("create", "mkdir"):
            known[operation.path] = ("new", str(number))
        identity = known.get(operation.path, ("lost", operation.path))
        found.append(identity)
        if operation.kind == "rename":
            prefix = operation.path + "/"
            for path in [path for path in known if path == operation.path or path.startswith(prefix)]:
                known[operation.target + path[len(operation.path) :]] = known.pop(path)
        elif operation.kind in ("unlink", "rmdir"):
            known.pop(operation.path, None)
    return found


def durable(operations: Sequence[Operation], nodes: Sequence[tuple[str, str]]) -> list[bool]:
    """Which operations were synced before the end."""
    result = [False] * len(operations)
    folders = folders_of(operations, nodes)
    for number, operation in enumerate(operations):
        if operation.kind != "fsync":
            continue
        for earlier in range(number):
            if operations[earlier].is_name:
                result[earlier] = result[earlier] or nodes[number] in folders[earlier]
            elif nodes[earlier] == nodes[number]:
                result[earlier] = True
    return result


def folders_of(operations: Sequence[Operation], nodes: Sequence[tuple[str, str]]) -> list[tuple[tuple[str, str], ...]]:
    """For each operation on a name the identity of its folder; that of both for a rename."""
    known: dict[str, tuple[str, str]] = {}
    result: list[tuple[tuple[str, str], ...]] = []
    for number, operation in enumerate(operations):
        paths = [operation.path, *([operation.target] if operation.target else [])]
        parents = {str(Path(path).parent) for path in paths}
        result.append(tuple(known.get(parent, ("old", parent)) for parent in parents))
        if operation.kind == "mkdir":
            known[operation.path] = nodes[number]
        elif operation.kind == "rename" and operation.path in known:
            known[operation.target] = known.pop(operation.path)
    return result


def saved_steps(operations: Sequence[Operation]) -> int:
    """The last step whose save the event log reports: from there on nothing of it may be lost."""
    saved = 0
    for operation in operations:
        if operation.kind == "write" and operation.path == "events.jsonl" and b'"kind":"checkpoint"' in operation.data:
            saved = int(json.loads(operation.data)["step"])
    return saved


def recording(lab: Lab, start: str) -> tuple[Path, list[Operation]]:
    """The operations of a training, recorded once; the start is kept beside them."""
    folder = lab.folder / f"recording-{start}"
    if not folder.exists():
        folder.mkdir()
        run = lab.start_run(start, folder)
        if start == "middle":
            copy_run(run, folder / "start")
        else:
            run.mkdir()  # it exists and is empty
        ended = lab.command(train_args(run, "--resume"), setup=lambda: lab.layer.record(run, folder / "operations"))
        if ended.code:
            raise RuntimeError(ended.stderr)
        (folder / "root").write_text(str(run))
    return folder / "start", read_recording(folder / "operations", Path((folder / "root").read_text()))


def states(lab: Lab, start: str) -> Iterator[dict[str, Any]]:
    """Every point and loss that gives another disk than those before."""
    origin, operations = recording(lab, start)
    losses = [("all", 0), ("data", 0), ("names", 0), ("none", 0), *(("random", seed) for seed in range(NUM_RANDOM))]
    points = [(end, loss, 1000 * end + seed) for end in range(1, len(operations) + 1) for loss, seed in losses]
    seen: set[str] = set()
    for end, loss, seed in points[:: max(1, len(points) // lab.sample) if lab.sample else 1]:
        digest = crash(origin, operations[:end], loss, seed).digest()
        if digest not in seen:
            seen.add(digest)
            yield {"start": start, "end": end, "loss": loss, "seed": seed}


def cases(lab: Lab) -> Iterator[dict[str, Any]]:
    for start in ("new", "middle"):
        yield from states(lab, start)


def run(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    origin, operations = recording(lab, case["start"])
    done = operations[: case["end"]]
    run = folder / "run"
    crash(origin, done, case["loss"], case["seed"]).write_to(run)
    before = attempts(run)
    problem = lab.resume_problem(run)
    if problem:
        return f"after {done[-1].kind} {done[-1].path} {done[-1].target}: {problem}"
    new = attempts(run)[len(before) :]  # none if the run was finished
    if new and new[0] < saved_steps(done):
        return f"step {saved_steps(done)} was reported as saved, and the resume began at step {new[0]}"
    return ""


def attempts(run: Path) -> list[int]:
    """The steps at which the attempts of a run began."""
    events = run / "events.jsonl"
    lines = events.read_text(errors="replace").splitlines() if events.exists() else []
    return [json.loads(line)["from_step"] for line in lines if '"kind":"attempt"' in line and line.endswith("}")]

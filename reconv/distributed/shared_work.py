"""Work that the ranks of a launcher share: each part is done by one of them, and finished parts outlive a kill.

`data convert`, `data check`, `predict`, `eval` and `average` on several ranks give the output of one process: rank r
does every r-th part, the parts do not depend on the number of ranks, and rank 0 locks, assembles, writes and prints
(tests/distributed/test_shared_work.py, tests/inference/test_predict_ranks.py).
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from reconv.core.errors import DataError
from reconv.distributed.environment import read_launch_env
from reconv.distributed.failure import report_failures
from reconv.distributed.process_group import ProcessGroup, open_process_group
from reconv.storage.work_journal import WorkJournal

_NUM_PARTS, _MAX_PART = 256, 4096
CONTINUE = "run the same command again; finished parts are kept"


@contextmanager
def joined_ranks(device: str = "cpu") -> Iterator[ProcessGroup]:
    """The ranks that the launcher has started, or this process alone. An error of one ends all, and is printed once."""
    process_group = open_process_group(read_launch_env(), device, if_lost=CONTINUE)
    with report_failures(process_group):
        yield process_group


def check_same_plan(process_group: ProcessGroup, plan: Mapping[str, Any]) -> None:
    """Refuse ranks that would not do the same work."""
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
    found = process_group.all_gather((platform.node(), digest))
    others = [f"rank {rank} on {host}" for rank, (host, theirs) in enumerate(found) if theirs != found[0][1]]
    if others:
        raise DataError(
            "the ranks do not have the same data or options",
            where=f"{', '.join(others[:4])}, unlike rank 0 on {found[0][0]}",
            why="files are missing there, or a path is another folder",
            hint="put the data on storage that all machines share",
        )


@contextmanager
def open_journal(
    process_group: ProcessGroup, folder: Path | None, plan: Mapping[str, Any]
) -> Iterator[WorkJournal | None]:
    """The journal in a folder that all ranks see, locked by rank 0; None without a folder."""
    check_same_plan(process_group, plan)
    if folder is None:
        yield None
        return
    journal = WorkJournal(folder, plan)
    with ExitStack() as stack:
        process_group.on_rank0(lambda: stack.enter_context(journal.locked()))
        yield journal


def part_size(num_items: int, multiple: int) -> int:
    """Number of items in a part: the same for any number of ranks, and enough parts for many of them."""
    return multiple * max(1, min(_MAX_PART, -(-num_items // _NUM_PARTS)) // multiple)


def run_parts(
    process_group: ProcessGroup, parts: Sequence[str], work: Callable[[str], bytes], journal: WorkJournal | None
) -> Iterator[bytes]:
    """Do every part that the journal does not have, each on one rank; rank 0 gets all of them in order."""

    def find_missing() -> list[str]:
        return [part for part in parts if journal is None or journal.read(part) is None]

    missing = process_group.on_rank0(find_missing)
    found: dict[str, bytes] = {}
    for part in missing[process_group.rank :: process_group.world_size]:
        process_group.set_phase(f"part {part}")
        payload = work(part)
        if journal is None:
            found[part] = payload
        else:
            journal.write(part, payload)
    gathered = process_group.all_gather(found)
    if not process_group.is_rank0:
        return iter(())
    if journal is not None:
        return map(journal.wait_for, parts)
    found = {part: payload for theirs in gathered for part, payload in theirs.items()}
    return (found[part] for part in parts)

"""`run.json`: which run a directory belongs to, and with which recipes it was trained.

Every checkpoint has both in its manifest, so that one of another run or recipe is not mistaken for the run's own.

A checkpoint elsewhere than it says is refused, and never deleted (tests/checkpoint/test_run_identity.py,
tests/faults/test_untrue_checkpoints.py).
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reconv.checkpoint.manifest import unreadable
from reconv.core.errors import CheckpointError
from reconv.core.message import message
from reconv.core.version import __version__
from reconv.storage import read_limits
from reconv.storage.bounded import read_json_object
from reconv.storage.files import FileSystem, disk_errors, write_atomic

if TYPE_CHECKING:
    from reconv.logging.run_dir import RunDir

FORMAT = 1


@message
@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A random id, and the digests of all recipes of the run; it gets another one when its length is extended."""

    run_id: str
    recipe_digests: tuple[str, ...]  # the current one is the last

    @classmethod
    def new(cls, recipe_digest: str) -> RunIdentity:
        """The identity of a new run."""
        return cls(secrets.token_hex(16), (recipe_digest,))

    def with_recipe(self, recipe_digest: str) -> RunIdentity:
        """The same run, from now on with this recipe."""
        others = tuple(digest for digest in self.recipe_digests if digest != recipe_digest)
        return replace(self, recipe_digests=(*others, recipe_digest))

    @property
    def recipe_digest(self) -> str:
        return self.recipe_digests[-1]


def read_identity(run: RunDir) -> RunIdentity:
    """The content of `run.json`; raises `CheckpointError` if there is none."""
    try:
        content = read_json_object(run.identity, read_limits.RUN_JSON_BYTES)
        if content["format"] != FORMAT:
            raise _unusable(run, f"it has format {content['format']}, and Reconv {__version__} reads format {FORMAT}")
        run_id, digests = content["run_id"], content["recipe_digests"]
        is_list = isinstance(digests, list) and digests and all(isinstance(digest, str) for digest in digests)
        if not (isinstance(run_id, str) and run_id and is_list):
            raise TypeError("run_id or recipe_digests is not a text")
        return RunIdentity(run_id, tuple(digests))
    except FileNotFoundError as error:
        why = f"it was deleted, or the run was started by a version of Reconv that wrote none; this is {__version__}"
        raise _unusable(run, why) from error
    except OSError as error:
        raise unreadable(run.identity, error) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unusable(run, f"it is damaged: {type(error).__name__}: {error}") from error


def write_identity(run: RunDir, identity: RunIdentity, files: FileSystem | None = None) -> None:
    """Write `run.json` atomically."""
    content = {"format": FORMAT, "run_id": identity.run_id, "recipe_digests": list(identity.recipe_digests)}
    with disk_errors(run.identity, fs=files):
        write_atomic(run.identity, json.dumps(content, indent=1) + "\n", files)


def _unusable(run: RunDir, why: str) -> CheckpointError:
    return CheckpointError(
        "run.json cannot be used, so it is not known which checkpoints belong to this run",
        where=str(run.identity),
        why=why,
        hint="put the file back; or copy a checkpoint directory out of the run, and use that one by its path",
    )

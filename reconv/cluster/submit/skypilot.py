"""The SkyPilot task that trains a run on machines of a cloud: recovered after the loss of spot instances.

A managed job (`sky jobs launch`) starts the task again on new machines when it exits with 75, after a stop that was
saved, or when its machines are gone. The run is in an object store, from which each start takes it back.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from reconv.core.errors import ExitCode, UsageError
from reconv.core.version import __version__
from reconv.storage.object_stores.store import as_url, is_url

if TYPE_CHECKING:
    from reconv.cluster.submit.target import Request, Submitted

_PORT = 29500
_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]{0,50}[A-Za-z0-9])?")
# The exit codes after which a start on other machines continues the run: saved and stopped, a rank lost, no resources.
_RECOVERED = (ExitCode.PREEMPTED, ExitCode.RANK_LOST)
_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}  # of the stores that runs can be kept in
_MAX_RESTARTS = 3  # after any other error


class SkyPilotTarget:
    """Writes a task for `sky jobs launch`."""

    options = frozenset(("accelerators", "spot", "secrets", "manifest", "setup"))

    def text(self, request: Request) -> str:
        """The task as YAML."""
        return task_text(request)

    def submit(self, request: Request) -> Submitted:
        """Write the task to a file."""
        from reconv.cluster.submit.target import Submitted
        from reconv.core.text import count
        from reconv.storage.files import write_atomic

        text = task_text(request)
        name = yaml.safe_load(text)["name"]
        file = Path(request.options["manifest"] or f"{name}-task.yaml")
        write_atomic(file, text)
        size = f"{count(request.num_devices, 'device')} of {count(request.num_nodes, 'machine')}"
        return Submitted(
            {"manifest": str(file), "name": name, "run": request.options["out"]},
            [
                f"wrote {file}: {size}, run at {request.options['out']}",
                f"  start: {shlex.join(['sky', 'jobs', 'launch', str(file)])}",
            ],
        )


def task_text(request: Request) -> str:
    """The task as YAML; raises `UsageError` for what its machines would lack."""
    options = request.options
    resolved = request.check()
    name = options["name"] or re.sub(r"[^A-Za-z0-9_.-]+", "-", resolved.recipe.name)
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"--name {name!r} is not the name of a task", hint="use letters, digits, '.', '_' and '-'")
    if options["out"] is None or not is_url(options["out"]):
        raise UsageError(
            "--to skypilot needs --out with the address of an object store",
            why="the machines are new after a recovery, and have nothing of the run",
            hint="for example --out s3://bucket/runs/1",
        )
    if as_url(options["out"]).partition(":")[0] not in _EXTRAS:
        raise UsageError(f"a run cannot be kept at {options['out']}", hint="use s3://, gs:// or az://")
    files = _recipe_files(request)
    source = f"~/reconv-recipe/{files[0].name}" if files else request.recipe
    words = ["train", "--out", options["out"], "--resume", *request.train_words]
    program = shlex.join(request.program())
    command = f"{program} {words[0]} {source if files else shlex.quote(source)} {shlex.join(words[1:])}"
    task = {
        "name": name,
        "num_nodes": request.num_nodes,
        "resources": _resources(request),
        **({"secrets": dict.fromkeys(options["secrets"])} if options["secrets"] else {}),
        **({"file_mounts": {f"~/reconv-recipe/{f.name}": str(f) for f in files}} if files else {}),
        "setup": _setup(request),
        "run": _RUN.format(devices=options["devices_per_node"], port=_PORT, command=command),
    }
    return _HEADER.format(nodes=request.num_nodes, devices=options["devices_per_node"], run=options["out"]) + yaml.dump(
        task, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True
    )


def _resources(request: Request) -> dict[str, Any]:
    options = request.options
    is_cpu = options["device"].partition(":")[0] == "cpu"
    if options["accelerators"] is None and not is_cpu:
        raise UsageError(
            "--to skypilot needs --accelerators",
            hint=f"for example --accelerators H100:{options['devices_per_node']}, or --device cpu",
        )
    if options["accelerators"] is not None:
        kind, _, number = options["accelerators"].partition(":")
        if (number or "1") != str(options["devices_per_node"]):
            raise UsageError(
                f"--accelerators {options['accelerators']} and --devices-per-node {options['devices_per_node']} differ",
                hint=f"--accelerators {kind}:{options['devices_per_node']}",
            )
    cpus, memory = options["cpus_per_device"], options["memory_per_node"]
    return {
        **({"accelerators": options["accelerators"]} if options["accelerators"] is not None else {}),
        **({"cpus": f"{cpus * options['devices_per_node']}+"} if cpus is not None else {}),
        **({"memory": f"{memory.rstrip('G')}+"} if memory is not None else {}),
        **({"use_spot": True} if options["spot"] else {}),
        "job_recovery": {
            "max_restarts_on_errors": _MAX_RESTARTS,
            "recover_on_exit_codes": [int(code) for code in _RECOVERED],
        },
    }


def _recipe_files(request: Request) -> list[Path]:
    from reconv.recipe.load.extends import own_files

    files = [Path(os.path.abspath(file)) for file in own_files(request.recipe)]
    if len({file.name for file in files}) < len(files) or len({file.parent for file in files}) > 1:
        raise UsageError(
            "the recipe extends files in other folders",
            where=", ".join(map(str, files)),
            hint="put them into one folder, or extend a preset",
        )
    return files


def _setup(request: Request) -> str:
    if request.options["setup"] is not None:
        return Path(request.options["setup"]).read_text(encoding="utf-8")
    scheme = as_url(request.options["out"]).partition(":")[0]
    return f"pip install 'reconv[{_EXTRAS[scheme]}]=={__version__}'\n"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)

_HEADER = """\
# Written by `reconv submit --to skypilot`: {nodes} machines with {devices} processes each train {run}.
#   sky jobs launch FILE            start; SkyPilot starts it again on new machines until it is finished
#   sky jobs cancel NAME            stop; to continue: launch it again
"""

# SkyPilot's variables in the form that `reconv train` reads: the same names as torchrun's own.
_RUN = """\
export PET_NNODES=$SKYPILOT_NUM_NODES PET_NODE_RANK=$SKYPILOT_NODE_RANK PET_NPROC_PER_NODE={devices}
export PET_MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1) PET_MASTER_PORT={port}
{command}
"""

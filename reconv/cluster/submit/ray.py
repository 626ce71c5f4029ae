"""Trains on a Ray cluster: this command drives the run, prints what its ranks print, and exits as they do."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from reconv.core.errors import UsageError

if TYPE_CHECKING:
    from reconv.cluster.submit.target import Request, Submitted


class RayTarget:
    """Trains with an actor on each node of a Ray cluster."""

    options = frozenset(("address", "resume"))

    def text(self, request: Request) -> str:
        """The command, and on what it runs."""
        request.check()
        address = request.options["address"] or "the cluster of $RAY_ADDRESS, or of this machine"
        nodes, devices = request.options["nodes"], request.options["devices_per_node"]
        command = shlex.join(["reconv", "train", request.recipe, "--out", _out(request), *request.train_words])
        return f"# On {address}, on {nodes} nodes with {devices} ranks each:\n{command}\n"

    def submit(self, request: Request) -> Submitted:
        """Train until the run ends."""
        from reconv.cluster.ray import Ray as RayCluster
        from reconv.cluster.submit.target import Submitted
        from reconv.trainer.options import RunOptions

        options = request.options
        launch = RayCluster(
            nodes=options["nodes"],
            devices_per_node=options["devices_per_node"],
            cpus_per_device=options["cpus_per_device"] or 1,
            address=options["address"],
            nic=options["nic"],
        )
        run = RunOptions(
            request.recipe,
            request.overrides,
            options["data"],
            resume=options["resume"],
            device=options["device"],
            console="plain",
            stop_at=options.get("stop_at"),
            trust_code=options["trust_code"],
        )
        result = request.train(run, launch, _out(request))
        return Submitted({"run": str(result.folder), "summary": dict(result.summary)}, [], exit_code=result.exit_code)


def _out(request: Request) -> str:
    if request.options["out"] is None:
        raise UsageError(
            "--to ray needs --out", why="all nodes and all rounds use one run directory", hint="name it with --out DIR"
        )
    return str(request.options["out"])

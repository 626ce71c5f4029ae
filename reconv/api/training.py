"""`reconv.train`: the options of `reconv train` as keywords, and objects of yours where the recipe names code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reconv.api.objects import DatasetPair, PythonObjects, fit_to_objects, name_datasets, pair_of
from reconv.api.run_result import RunResult
from reconv.cluster.launch import Launch
from reconv.cluster.ray import Ray
from reconv.core.errors import UsageError
from reconv.logging.events import Event
from reconv.recipe.loader import Override
from reconv.recipe.presets import nearest
from reconv.recipe.schema import schema_fields
from reconv.recipe.shortcuts import shortcut_overrides
from reconv.trainer.options import RunOptions
from reconv.trainer.prepare import local_out
from reconv.trainer.run import run_training

_DEFAULT_RECIPE = "finetune"
# Options of `reconv train` that Python has under another name, or not at all.
_ELSEWHERE = {
    "set": "overrides={'schedule.lr': 0.05}",
    "quiet": "console='quiet'",
    "json": "the result's summary",
    "dry_run": "reconv.api.dry_run",
    "checkpoint": "resume=True",
    "elastic": "launch=reconv.Launch(elastic='1:4')",
    "rendezvous": "launch=reconv.Launch(rendezvous='HOST:PORT')",
    "nic": "launch=reconv.Launch(nic='eth1')",
}


def train(
    recipe: str | Path | None = None,
    *,
    data: str | Path | DatasetPair | None = None,
    train_data: Any = None,
    val_data: Any = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    batch_per_device: int | None = None,
    lr: float | str | None = None,
    model: Any = None,
    init: str | Path | None = None,
    resume_from: str | Path | None = None,
    freeze: bool = False,
    seed: int | None = None,
    workers: int | None = None,
    loss: Any = None,
    host_transforms: Sequence[Any] = (),
    device_transforms: Sequence[Any] = (),
    metrics: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    overrides: Mapping[str, Any] | Sequence[Override] = (),
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    devices: int | None = None,
    launch: Launch | Ray | None = None,
    console: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    runs: str | Path = "runs",
    stop_after: str | None = None,
    stop_at: str | None = None,
    on_divergence: str | None = None,
    profile: tuple[int, int] | None = None,
    trust_code: bool = False,
    mirror: str | None = None,
    **unknown: Any,
) -> RunResult:
    """Train a recipe, a preset's name or a YAML file, and return its run directory, summary and model.

    The keywords are the options of `reconv train`; `overrides` sets any other field of the recipe, as in
    `{"schedule.lr": 0.05}`. `data` is a path; map-style datasets are passed as `train_data` and `val_data`, or as a
    pair `data`. `model` is a name, a module, its class or a function that builds it; loss, transforms, metrics and
    callbacks are your own as well, all as described in docs/how-to/custom-code.md. Without a recipe `finetune` derives
    the settings from the data. `stop_after` (`100step`, `2ep`, `30min`, `3h`) ends early on the untouched schedule,
    `stop_at` (`25%`, `2ep`, `500step` of the whole run) at the first evaluation there or later;
    `resume` continues, with the same objects. Where the run that is resumed names an address of its copy that you have
    not given, `mirror` is that address or `off`. `devices` is short for `launch=Launch(devices=...)`; `launch` also
    starts elastic runs, and runs on other machines, as in `launch=reconv.Ray(nodes="1:4")`.

    `console` is auto, plan, plain, quiet or json; by default a notebook prints progress and a script prints nothing. A
    run that is interrupted saves a checkpoint: a notebook gets its result, a script a `PreemptedError`.
    """
    if unknown:
        raise _unknown_keyword(next(iter(unknown)))
    data = pair_of(data, train_data, val_data)
    if recipe is None and data is None:
        raise UsageError(
            "train needs a recipe or data",
            hint="reconv.train('quickstart'), or reconv.train(model=..., train_data=..., val_data=...)",
        )
    objects = PythonObjects()
    objects.set("model.name", model)
    objects.set("loss.name", loss)
    objects.set_list("augment.extra", host_transforms)
    objects.set_list("augment.extra", device_transforms, on_device=True)
    objects.set_list("metrics", metrics)
    objects.set_list("callbacks", callbacks)
    path = name_datasets(objects, data)
    launch = _launch_of(devices, launch)
    shortcuts = {
        "epochs": epochs,
        "batch_size": batch_size,
        "batch_per_device": batch_per_device,
        "lr": lr,
        "workers": workers,
        "seed": seed,
        "init": init,
        "resume_from": resume_from,
        "freeze": freeze,
        "profile": profile,
        "on_divergence": on_divergence,
    }
    keywords = shortcut_overrides(shortcuts, launch.num_ranks, "keyword")
    fitted = fit_to_objects(objects, loss, data) if recipe is None else []
    options = RunOptions(
        recipe=_DEFAULT_RECIPE if recipe is None else str(recipe),
        overrides=(*fitted, *objects.overrides, *keywords, *_as_overrides(overrides)),
        data=path,
        resume=resume,
        runs=Path(runs),
        device=device,
        console="auto" if console is None and in_ipython() else console,
        stop_after=stop_after,
        stop_at=stop_at,
        trust_code=trust_code,
        objects=objects.objects,
        return_when_interrupted=in_ipython(),
    )
    return start(options, launch, out=out, mirror=mirror, on_event=on_event)


def start(
    options: RunOptions,
    launch: Launch | Ray,
    *,
    out: str | Path | None = None,
    mirror: str | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> RunResult:
    """Train with these options; `out` is the run directory or the address of its copy, `mirror` as for `train`."""
    folder, url = local_out(out, options.runs, mirror)
    return RunResult.of(launch.start(run_training, replace(options, out=folder, mirror=url), on_event))


def _launch_of(devices: int | None, launch: Launch | Ray | None) -> Launch | Ray:
    if devices is not None and launch is not None:
        raise UsageError("devices and launch cannot be combined", hint=f"use launch=Launch(devices={devices})")
    return launch or Launch(devices)


def in_ipython() -> bool:
    """True in a notebook or an IPython shell."""
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def _as_overrides(overrides: Mapping[str, Any] | Sequence[Override]) -> list[Override]:
    if isinstance(overrides, Mapping):
        return [(field, value, "overrides") for field, value in overrides.items()]
    for item in overrides:
        if not isinstance(item, tuple) or len(item) != 3:
            raise UsageError(f"overrides has {item!r}", hint="pass a dict, as in overrides={'schedule.lr': 0.05}")
    return list(overrides)


def _unknown_keyword(name: str) -> UsageError:
    """The error for a keyword that `train` does not have: the closest one, or the recipe field of that name."""
    known = list(train.__kwdefaults__ or ())
    fields = [field for field in schema_fields() if name in (field, field.rpartition(".")[2])]
    if name in _ELSEWHERE:
        hint = f"use {_ELSEWHERE[name]}"
    elif fields:
        hint = f"set the recipe field: overrides={{{fields[0]!r}: ...}}"
    else:
        close = nearest(name, known)
        hint = f"did you mean {close}?" if close else "its keywords are: " + ", ".join(known)
    return UsageError(f"train has no keyword {name!r}", hint=hint)

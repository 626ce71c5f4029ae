"""`reconv.train`: the options of `reconv train` as keywords, and objects of yours where the recipe names code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from reconv.api.objects import DatasetPair, PythonObjects, fit_to_objects, name_datasets, pair_of
from reconv.api.run_result import RunResult
from reconv.cluster.elastic_config import ElasticConfig
from reconv.cluster.elastic_run import train_elastic, train_on_ray
from reconv.cluster.ray import Ray
from reconv.core.custom_code import CodeConsent
from reconv.core.errors import UsageError
from reconv.distributed.environment import num_local_ranks, planned_world_size, read_launch_env
from reconv.logging.events import Event
from reconv.recipe.fields import schema_fields
from reconv.recipe.loader import Override
from reconv.recipe.presets import nearest
from reconv.recipe.units import BatchPerDevice
from reconv.trainer.run_setup import RunArgs, local_out, run_on_devices
from reconv.trainer.training_run import run_training

_DEFAULT_RECIPE = "finetune"
# Options of `reconv train` that Python has under another name, or not at all.
_ELSEWHERE = {
    "set": "overrides={'schedule.lr': 0.05}",
    "quiet": "console='quiet'",
    "json": "the result's summary",
    "dry_run": "reconv.api.dry_run",
    "checkpoint": "resume=True",
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
    launch: Ray | None = None,
    elastic: str | None = None,
    rendezvous: str | None = None,
    nic: str | None = None,
    console: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    runs: str | Path = "runs",
    command: Sequence[str] = (),
    stop_after: str | None = None,
    profile: tuple[int, int] | None = None,
    trust_code: bool = False,
    mirror: str | None = None,
    consent: CodeConsent | None = None,
    **unknown: Any,
) -> RunResult:
    """Train a recipe, a preset's name or a YAML file, and return its run directory, summary and model.

    The keywords are the options of `reconv train`; `overrides` sets any other field of the recipe, as in
    `{"schedule.lr": 0.05}`. `data` is a path; map-style datasets are passed as `train_data` and `val_data`, or as a
    pair `data`. `model` is a name, a module, its class or a function that builds it; loss, transforms, metrics and
    callbacks are your own as well, all as described in docs/how-to/custom-code.md. Without a recipe `finetune` derives
    the settings from the data. `stop_after` (`100step`, `2ep`, `30min`, `3h`) ends early on the untouched schedule;
    `resume` continues, with the same objects. Where the run that is resumed names an address of its copy that you have
    not given, `mirror` is that address or `off`. `consent` limits the code that its recipe may name. `launch` trains on
    other machines, as in `launch=reconv.Ray(nodes="1:4")`.

    `console` is auto, plain, quiet or json; by default a notebook prints progress and a script prints nothing. A run
    that is interrupted saves a checkpoint: a notebook gets its result, a script a `PreemptedError`.
    """
    if unknown:
        raise _unknown_keyword(next(iter(unknown)))
    data = pair_of(data, train_data, val_data)
    if recipe is None and data is None:
        raise UsageError(
            "train needs a recipe or data",
            then="reconv.train('quickstart'), or reconv.train(model=..., train_data=..., val_data=...)",
        )
    objects = PythonObjects()
    objects.set("model.name", model)
    objects.set("loss.name", loss)
    objects.set_list("augment.extra", host_transforms)
    objects.set_list("augment.extra", device_transforms, on_device=True)
    objects.set_list("metrics", metrics)
    objects.set_list("callbacks", callbacks)
    path = name_datasets(objects, data)
    world_size = planned_world_size(devices)
    if launch is not None:
        if devices is not None or elastic is not None:
            raise UsageError("launch cannot be combined with devices or elastic", then="Ray(devices_per_node=...)")
        world_size = launch.limits[1] * launch.devices_per_node
    fields = {
        "epochs": ("length", None if epochs is None else f"{Decimal(repr(epochs)).normalize():f}ep"),
        "batch_size": ("batch.size", batch_size),
        "batch_per_device": ("batch.size", batch_per_device and BatchPerDevice(batch_per_device, world_size)),
        "lr": ("schedule.lr", lr),
        "workers": ("data.num_workers", workers),
        "seed": ("seed", seed),
        "init": ("model.init", init),
        "freeze": ("model.freeze_backbone", freeze or None),
        "profile": ("profile", None if profile is None else list(profile)),
    }
    if batch_size is not None and batch_per_device is not None:
        raise UsageError("batch_size and batch_per_device cannot be combined", then="use one of them")
    keywords = [(field, value, f"train({name}=...)") for name, (field, value) in fields.items() if value is not None]
    fitted = fit_to_objects(objects, loss, data) if recipe is None else []
    config = _elastic_config(elastic, rendezvous, devices)
    if on_event is not None and (
        config is not None or launch is not None or num_local_ranks(devices, read_launch_env()) is not None
    ):
        raise UsageError(
            "on_event cannot observe several processes", then="read events.jsonl in the run directory instead"
        )
    out, url = local_out(out, runs, mirror)
    args = RunArgs(
        recipe=_DEFAULT_RECIPE if recipe is None else str(recipe),
        overrides=(*fitted, *objects.overrides, *keywords, *_as_overrides(overrides)),
        data=path,
        out=out,
        mirror=url,
        resume=resume,
        runs=Path(runs),
        device=device,
        nic=nic,
        console="auto" if console is None and in_ipython() else console,
        command=tuple(command),
        stop_after=stop_after,
        trust_code=trust_code,
        consent=consent,
        objects=objects.objects,
        return_when_interrupted=in_ipython(),
    )
    if launch is not None:
        return RunResult.of(train_on_ray(launch, args))
    if config is not None:
        return RunResult.of(train_elastic(config, run_training, args))
    return RunResult.of(run_on_devices(devices, run_training, args, on_event))


def _elastic_config(elastic: str | None, rendezvous: str | None, devices: int | None) -> ElasticConfig | None:
    if elastic is None:
        if rendezvous is not None:
            raise UsageError("--rendezvous is for elastic runs", then="add --elastic MIN:MAX, as in --elastic 1:4")
        return None
    return ElasticConfig.parse(elastic, rendezvous, devices or 1)


def in_ipython() -> bool:
    """Whether this code runs in a notebook or an IPython shell."""
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def _as_overrides(overrides: Mapping[str, Any] | Sequence[Override]) -> list[Override]:
    if isinstance(overrides, Mapping):
        return [(field, value, "overrides") for field, value in overrides.items()]
    for item in overrides:
        if not isinstance(item, tuple) or len(item) != 3:
            raise UsageError(f"overrides has {item!r}", then="pass a dict, as in overrides={'schedule.lr': 0.05}")
    return list(overrides)


def _unknown_keyword(name: str) -> UsageError:
    """The error for a keyword that `train` does not have: the closest one, or the recipe field of that name."""
    known = list(train.__kwdefaults__ or ())
    fields = [field for field in schema_fields() if name in (field, field.rpartition(".")[2])]
    if name in _ELSEWHERE:
        then = f"use {_ELSEWHERE[name]}"
    elif fields:
        then = f"set the recipe field: overrides={{{fields[0]!r}: ...}}"
    else:
        close = nearest(name, known)
        then = f"did you mean {close}?" if close else "its keywords are: " + ", ".join(known)
    return UsageError(f"train has no keyword {name!r}", then=then)

"""Time of a training step on one device: measured by `bench train`, or from the table of known results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from reconv.core.errors import UsageError
from reconv.planner.device_kinds import DeviceKind
from reconv.planner.tables import read_table
from reconv.recipe.schema import Recipe
from reconv.storage import read_limits
from reconv.storage.bounded import read_json_object

# A step has a part that does not depend on the batch: 2.7 of 24.3 ms of ResNet-50 on an H200 (10,554 images/s at batch
# 256 and 11,167 at batch 512, benchmarks/LOG.md).
FIXED_FRACTION, FIXED_FRACTION_BATCH = 0.110, 256
_OTHER_DEVICE, _OTHER_SIZE, _OTHER_PRECISION = 0.15, 0.10, 0.15  # relative uncertainty of what is not measured as such
_OUR_DEVICE = "h200"
_KNOWN_BY_PRECISION = "resnet50"  # the network that was measured in every precision


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """The size of a network."""

    parameters: int
    norm_layers: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a training step of one device alone, as a function of its batch."""

    fixed_s: float
    per_image_s: float
    largest_batch: int  # larger ones are computed as several of at most this size
    source: str
    uncertainty: float = 0.0  # relative, beside that of the scaling model
    shared_host: float | None = None  # measured slowdown with 8 devices in a machine; None: not measured
    gradient_bytes: int | None = None

    def seconds(self, batch: int) -> float:
        """The time of a step with this batch."""
        passes = math.ceil(batch / self.largest_batch)
        return passes * self.fixed_s + batch * self.per_image_s

    @property
    def images_per_s(self) -> float:
        """The speed at the largest batch."""
        return self.largest_batch / self.seconds(self.largest_batch)

    def scaled(self, factor: float, uncertainty: float, note: str) -> StepTime:
        """A step that takes `factor` times as long."""
        return replace(
            self,
            fixed_s=self.fixed_s * factor,
            per_image_s=self.per_image_s * factor,
            source=f"{self.source}; {note}",
            uncertainty=math.hypot(self.uncertainty, uncertainty),
        )


@cache
def _networks() -> dict[str, NetworkFacts]:
    return {r["network"]: NetworkFacts(int(r["parameters"]), int(r["norm_layers"])) for r in read_table("networks.csv")}


@cache
def _known() -> dict[tuple[str, str, str], list[dict[str, str]]]:
    """The rows of step_times.csv by network, kind of device and precision."""
    found: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in read_table("step_times.csv"):
        found.setdefault((row["network"], row["device_kind"], row["precision"]), []).append(row)
    return found


def find_network(name: str, parameters: int | None = None) -> NetworkFacts:
    """The size of a network; of one that is not Reconv's, `parameters` must be given."""
    known = _networks().get(name)
    if parameters is not None:
        return NetworkFacts(parameters, known.norm_layers if known else 0)
    if known is None:
        raise UsageError(
            f"the number of parameters of {name} is not known",
            why="only those of Reconv's models are",
            hint="--parameters N, for example --parameters 25_600_000",
        )
    return known


def known_step_time(recipe: Recipe, kind: DeviceKind) -> StepTime:
    """The step time of the recipe's network on a kind of device: known there, or scaled from our H200."""
    network, precision = recipe.model.name, recipe.precision.family
    if rows := _known().get((network, kind.name, precision)):
        return _at_size(_from_rows(rows), rows[0], recipe)
    ours = _ours(network, precision)
    if ours is None or kind.relative_speed is None or (precision != "half" and kind.name != _OUR_DEVICE):
        devices = sorted({device for name, device, mode in _known() if name == network and mode == precision})
        raise UsageError(
            f"no step time of {network} in {recipe.precision.mode} on {kind.name} is known",
            why=f"it is known on {', '.join(devices)}" if devices else "this model was not measured",
            hint=f"on one {kind.name}: reconv bench train {recipe.name} --json step.json; then --measured step.json",
        )
    step_time, row = ours
    if kind.name != _OUR_DEVICE:
        note = f"times {1 / kind.relative_speed:.2f} for {kind.name} ({kind.speed_source})"
        step_time = step_time.scaled(1 / kind.relative_speed, _OTHER_DEVICE, note)
    return _at_size(step_time, row, recipe)


def measured_by_us(network: str, precision: str) -> list[tuple[int, float]]:
    """The batch sizes and images/s that were measured on one H200."""
    return [(int(r["batch"]), float(r["images_per_s"])) for r in _known().get((network, _OUR_DEVICE, precision), [])]


def _ours(network: str, precision: str) -> tuple[StepTime, Mapping[str, str]] | None:
    """Our own measurement; in another precision, scaled as that of ResNet-50."""
    known = _known()
    if rows := known.get((network, _OUR_DEVICE, precision)):
        return _from_rows(rows), rows[0]
    rows = known.get((network, _OUR_DEVICE, "half"), [])
    if not rows:
        return None
    half, other = (float(known[_KNOWN_BY_PRECISION, _OUR_DEVICE, p][0]["images_per_s"]) for p in ("half", precision))
    note = f"times {half / other:.2f} for {precision}, as ResNet-50"
    return _from_rows(rows).scaled(half / other, _OTHER_PRECISION, note), rows[0]


def _from_rows(rows: Sequence[Mapping[str, str]]) -> StepTime:
    """From the speeds at two batch sizes, or from one and the usual fixed part of a step."""
    points = sorted((int(row["batch"]), int(row["batch"]) / float(row["images_per_s"])) for row in rows)
    return _from_points(points, rows[0]["source"])


def _from_points(points: Sequence[tuple[int, float]], source: str) -> StepTime:
    """From (batch, seconds) of one or more steps; the fixed part of a step is never negative."""
    (first, first_s), (last, last_s) = points[0], points[-1]
    if last > first:
        per_image_s = min((last_s - first_s) / (last - first), last_s / last)
        return StepTime(last_s - per_image_s * last, per_image_s, last, source)
    relative = FIXED_FRACTION + (1 - FIXED_FRACTION) * last / FIXED_FRACTION_BATCH
    fixed_s = last_s * FIXED_FRACTION / relative
    return StepTime(fixed_s, (last_s - fixed_s) / last, last, source)


def _at_size(step_time: StepTime, row: Mapping[str, str], recipe: Recipe) -> StepTime:
    measured, wanted = int(row["image_size"]), recipe.data.preprocess.size
    if measured == wanted:
        return step_time
    factor = (wanted / measured) ** 2
    return step_time.scaled(factor, _OTHER_SIZE, f"times {factor:.2f} for {wanted} instead of {measured} px")


def measured_step_time(paths: Sequence[Path], recipe: Recipe) -> StepTime:
    """The step time in results of `bench train --json`; two with different batches also give its fixed part."""
    points: list[tuple[int, float]] = []
    shared_host: float | None = None
    gradient_bytes: int | None = None
    for path in paths:
        result = _read_result(path)
        _check_same_network(path, result, recipe)
        batch, scaling = int(result["batch_per_device"]), result.get("scaling")
        if scaling is None:
            points.append((batch, batch / float(result["images_per_s_per_device"])))
            continue
        points.append((batch, float(scaling["alone_step_ms"]) / 1000))
        slowdown = max(0.0, float(scaling["apart_step_ms"]) / float(scaling["alone_step_ms"]) - 1)
        shared_host = 3 * slowdown / math.log2(int(result["devices"]))
        gradient_bytes = int(scaling["gradient_bytes"])
    source = f"measured on {result['device']}, {', '.join(map(str, paths))}"
    return replace(_from_points(sorted(points), source), shared_host=shared_host, gradient_bytes=gradient_bytes)


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result = read_json_object(path, read_limits.SUMMARY_BYTES)
        is_usable = result.get("bench") == "train" and float(result["images_per_s_per_device"]) > 0
        is_usable &= int(result["batch_per_device"]) > 0 and isinstance(result["recipe"]["model"]["name"], str)
        if scaling := result.get("scaling"):
            is_usable &= float(scaling["alone_step_ms"]) > 0 and float(scaling["apart_step_ms"]) > 0
            is_usable &= int(scaling["gradient_bytes"]) > 0 and int(result["devices"]) > 1
        result["device"] = str(result["device"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise _not_a_result(path, str(why)) from error
    if not is_usable:
        raise _not_a_result(path, "its content is something else")
    return result


def _not_a_result(path: Path, why: str) -> UsageError:
    return UsageError(
        "this is no result of `bench train`",
        where=str(path),
        why=why,
        hint="make one on a device of that kind: reconv bench train RECIPE --json step.json",
    )


def _check_same_network(path: Path, result: Mapping[str, Any], recipe: Recipe) -> None:
    theirs = result["recipe"]["model"]["name"], result.get("image_size"), result.get("precision")
    wanted = recipe.model.name, recipe.data.preprocess.size, recipe.precision.mode
    if theirs != wanted:
        raise UsageError(
            f"{path} measured {theirs[0]} at {theirs[1]} px in {theirs[2]}, "
            f"and the recipe trains {wanted[0]} at {wanted[1]} px in {wanted[2]}",
            hint=f"reconv bench train {recipe.name} --json {path}",
        )

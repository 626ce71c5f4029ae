"""Figures that vendors have published, by chip, beside one H200 and predictions: the tables of two pages.

`docs/results/vendors.md` has the newest figures of training, `reference/published-figures.md` of the site all of them.

Published figures are `reconv/recipes/published.csv`, ours the stored results of `docs/results/data`, predictions those
of `reconv plan` for H200s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.cases import NETWORKS
from benchmarks.results import ROOT, load
from reconv.planner.cluster import Cluster, ClusterPrediction, dataset_size, predict_cluster
from reconv.planner.device_kinds import find_device_kind
from reconv.planner.step_time import known_step_time
from reconv.recipe import loader
from reconv.recipe.presets import preset_names
from reconv.recipe.published import Figure, accuracy_text, published_figures
from reconv.recipe.schema import Recipe

PAGE = ROOT / "docs" / "generators" / "published_figures.md"
NEWEST = ("V100 16 GB", "A100 80 GB", "Gaudi")  # chips of the short table
PREDICTED_DEVICES = (8, 64)
OURS, PREDICTED = "H200, measured", "H200, predicted"
_LABELS = {loader.load(name).recipe.model.name: label for name, label in NETWORKS.items() if "+" not in name}
_LABELS |= {
    "efficientnet_b4": "EfficientNet-B4",
    "efficientnet_b0_widese": "EfficientNet-B0, wide SE",
    "efficientnet_b4_widese": "EfficientNet-B4, wide SE",
    "ssd_resnet34": "SSD-ResNet34",
    "resnet20_cifar": "ResNet-20, CIFAR-10",
    "resnext29_cifar": "ResNeXt-29, CIFAR-10",
}
# The recipe whose run is predicted, for the network of a vendor.
_RECIPES = {
    ("resnet50", "NVIDIA"): "resnet50-nv-90ep-8gpu-{}",
    ("resnet50", "Graphcore"): "resnet50-gc-pod64-lars",
    ("resnet50", "Habana"): "resnet50-habana-8card-bf16",
    ("resnext101_32x4d", "NVIDIA"): "resnext101-nv-90ep-8gpu-{}",
    ("resnext101_32x4d", "Habana"): "resnext101-habana-tf-90ep-8card-bf16",
    ("se_resnext101_32x4d", "NVIDIA"): "se-resnext101-nv-90ep-8gpu-{}",
    ("efficientnet_b0", "NVIDIA"): "efficientnet-b0-nv-400ep-8gpu-{}",
    ("efficientnet_b4", "NVIDIA"): "efficientnet-b4-nv-400ep-8gpu-{}",
    ("ssd_resnet34", "Habana"): "ssd-resnet34-habana-8card-bf16",
}
_BATCHES = {"efficientnet_b4": 64, "ssd_resnet34": 128}  # of one H200, as measured; others: 256


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows and the cells of a table."""

    kinds: tuple[str, ...]
    row: Callable[[Figure], tuple[str, ...]]  # the leading cells, which name a row
    head: tuple[str, ...]
    cell: Callable[[Figure], str]
    with_earlier: bool = True


def table(name: str) -> str:
    """One of the tables as Markdown."""
    spec = _TABLES[name]
    figures = [f for f in published_figures() if f.kind in spec.kinds and spec.cell(f)]
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for figure in figures:
        rows.setdefault(spec.row(figure), {}).setdefault(figure.hardware, []).append(spec.cell(figure))
    for key, column, text in _OURS.get(name, lambda: ())():
        rows.setdefault(key, {})[column] = [text]
    found = {column for cells in rows.values() for column in cells}
    columns = [*sorted(found - {OURS, PREDICTED}), *(column for column in (OURS, PREDICTED) if column in found)]
    head = [*spec.head, *columns]
    ordered = sorted(rows.items(), key=lambda item: _row_order(item[0]))
    lines = [
        [*key, *(_merged(cells.get(column, []), spec.with_earlier) for column in columns)] for key, cells in ordered
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines]) + "\n"


def page() -> str:
    """The page of all published figures."""
    return PAGE.read_text(encoding="utf-8").format_map({name: table(name) for name in _TABLES})


def program(figure: Figure) -> str:
    """The program that a figure is of, without its release, as in NVIDIA RN50v1.5."""
    vendor, _, rest = figure.source.partition(" ")
    name = rest.split(", ")[1] if vendor == "NVIDIA" else {"Habana": "1.0"}.get(vendor, rest.partition(",")[0])
    return f"{vendor} {name.removeprefix('in ').removesuffix(' Training v1.1')}"


def _merged(texts: Sequence[str], with_earlier: bool) -> str:
    """The newest figure, and in parentheses those of earlier releases."""
    *earlier, last = texts or [""]
    different = list(dict.fromkeys(text for text in earlier if text != last)) if with_earlier else []
    return last + (f" ({', '.join(different)})" if different else "")


def _training_row(figure: Figure) -> tuple[str, ...]:
    return program(figure), _LABELS[figure.network], figure.precision, str(figure.devices)


def _accuracy_row(figure: Figure) -> tuple[str, ...]:
    epochs = "" if figure.epochs is None else str(figure.epochs)
    return program(figure), _LABELS[figure.network], figure.precision, epochs, figure.note


def _inference_row(figure: Figure) -> tuple[str, ...]:
    return program(figure), _LABELS[figure.network], figure.precision, str(figure.batch)


def _serving_row(figure: Figure) -> tuple[str, ...]:
    size = f"batch {figure.batch}" if figure.concurrency is None else f"concurrency {figure.concurrency}"
    return _LABELS[figure.network], figure.precision, figure.note, size


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}".removesuffix(".0")


def _speed(figure: Figure) -> str:
    """Images/s with the mean latency."""
    latency = "" if figure.latency_ms is None else f" / {figure.latency_ms:.4g} ms"
    tail = "" if figure.p99_ms is None else f", p99 {figure.p99_ms:.4g}"
    return _number(figure.images_per_s) + latency + tail


def _our_training() -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Measured steps of one H200, and predicted ones of several."""
    measured = {row.name: row.value for row in load("training-h200").rows}
    for key, program_name in _programs(("training",)):
        network, precision = key
        row = (program_name, _LABELS[network], precision)
        labels = {row.partition(",")[0]: value for row, value in reversed(measured.items())}
        if precision == "half" and _LABELS[network] in labels:
            yield (*row, "1"), OURS, _number(labels[_LABELS[network]])
        for prediction in _predictions(network, precision, program_name.partition(" ")[0]):
            low, high = prediction.images_per_s_range
            yield (
                (*row, str(prediction.devices)),
                PREDICTED,
                f"{prediction.images_per_s:,.0f} ({low:,.0f} to {high:,.0f})",
            )


def _our_overview() -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Steps in half precision, from any program; predictions without their range."""
    for (_, network, precision, devices), column, text in _our_training():
        if precision == "half":
            yield (network, devices), column, text.partition(" (")[0]


def _overview_cell(figure: Figure) -> str:
    is_shown = figure.precision == "half" and figure.devices in (1, *PREDICTED_DEVICES) and figure.hardware in NEWEST
    is_wide = figure.network.endswith("_widese")
    return _number(figure.images_per_s) if is_shown and not is_wide else ""


def _our_hours() -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Predicted hours of the whole run."""
    runs = {(f.network, f.precision, program(f), f.epochs): None for f in published_figures() if f.hours}
    for network, precision, program_name, epochs in runs:
        for prediction in _predictions(network, precision, program_name.partition(" ")[0], epochs):
            row = (program_name, _LABELS[network], precision, str(epochs), str(prediction.devices))
            low, high = prediction.hours_range
            yield row, PREDICTED, f"{prediction.hours:.3g} ({low:.3g} to {high:.3g})"


def _our_inference() -> Iterator[tuple[tuple[str, ...], str, str]]:
    measured = {row.name: row for row in load("inference-h200").rows}
    for (network, precision), program_name in _programs(("inference",)):
        for batch in (1, 32, 256):
            found = measured.get(f"{_LABELS[network]}, batch {batch}")
            if precision == "half" and found is not None:
                percentiles = found.more.get("p50, p99", "")
                p50, _, p99 = percentiles.removesuffix(" ms").partition(", ")
                latency = f" / p50 {p50} ms, p99 {p99}" if p50 else ""
                yield (program_name, _LABELS[network], precision, str(batch)), OURS, f"{found.value:,.0f}{latency}"


def _our_serving() -> Iterator[tuple[tuple[str, ...], str, str]]:
    found = next(row for row in load("serve-h200").rows if row.name == "reconv serve, 8 processes")
    row = (
        _LABELS["resnet50"],
        "half",
        "JPEG over HTTP, closed loop of 128 clients, batches of up to 64",
        "concurrency 128",
    )
    yield row, OURS, f"{found.value:,.0f} / p99 {found.more['p99']}"


def _programs(kinds: tuple[str, ...]) -> list[tuple[tuple[str, str], str]]:
    """Each network and precision that a program has figures of."""
    found = {((f.network, f.precision), program(f)): None for f in published_figures() if f.kind in kinds}
    return list(found)


@cache
def _predictions(network: str, precision: str, vendor: str, epochs: int | None = None) -> list[ClusterPrediction]:
    """Predictions of `reconv plan` for the vendor's recipe on H200s, at the batch of one H200; empty if it has none."""
    pattern = _RECIPES.get((network, vendor))
    if pattern is None or precision not in ("half", "tf32", "fp32"):
        return []
    preset = pattern.format("mixed" if precision == "half" else precision)
    if preset not in preset_names():
        return []

    batch = _BATCHES.get(network, 256)
    overrides: list[loader.Override] = [("batch.group", batch, "page")]
    if epochs is not None:
        overrides.append(("length", f"{epochs}ep", "page"))

    def recipe_for(count: int) -> Recipe:
        return loader.load(preset, [*overrides, ("batch.size", batch * count, "page")]).recipe

    kind = find_device_kind("h200")
    recipe = recipe_for(1)
    rows = predict_cluster(
        recipe_for, PREDICTED_DEVICES, Cluster(kind), known_step_time(recipe, kind), dataset_size(recipe)
    )
    return [row for row in rows if isinstance(row, ClusterPrediction)]


def _row_order(key: tuple[str, ...]) -> list[tuple[bool, int, str]]:
    """Numbers in the cells that name a row are ordered as numbers."""
    parts = [part for cell in key for part in re.split(r"(\d+)", cell)]
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


_TABLES = {
    "overview": _Table(
        ("training",),
        lambda f: (_LABELS[f.network], str(f.devices)),
        ("network", "devices"),
        _overview_cell,
        with_earlier=False,
    ),
    "training": _Table(
        ("training",), _training_row, ("program", "network", "precision", "devices"), lambda f: _number(f.images_per_s)
    ),
    "time": _Table(
        ("training", "accuracy"),
        lambda f: (program(f), _LABELS[f.network], f.precision, str(f.epochs), str(f.devices)),
        ("program", "network", "precision", "epochs", "devices"),
        lambda f: "" if f.hours is None else f"{f.hours:.3g}",
    ),
    "accuracy": _Table(
        ("accuracy",), _accuracy_row, ("program", "network", "precision", "epochs", "remark"), accuracy_text
    ),
    "inference": _Table(
        ("inference",), _inference_row, ("program", "network", "precision", "batch"), _speed, with_earlier=False
    ),
    "serving": _Table(("serving",), _serving_row, ("network", "precision", "server", "load"), _speed),
}
_OURS: dict[str, Callable[[], Iterable[tuple[tuple[str, ...], str, str]]]] = {
    "overview": _our_overview,
    "training": _our_training,
    "time": _our_hours,
    "inference": _our_inference,
    "serving": _our_serving,
}

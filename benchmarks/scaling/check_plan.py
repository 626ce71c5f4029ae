"""Check the model of `reconv plan` against published results: fit its parameters on some rows, predict the others.

    python -m benchmarks.scaling.check_plan [--markdown FILE]

Prints the error of every row. Each group of rows (a table, a system, a network and a precision) has a base: its row
with the fewest devices, from which the compute time of one device follows. `use` in published.csv says which
rows are fitted, which are held out, and which are left out because the source contradicts itself.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reconv.planner.device_kinds import DEVICE_KINDS, DeviceKind
from reconv.planner.model import FITTED, ScalingParameters, Workload, calibrate, predict_step
from reconv.planner.step_time import FIXED_FRACTION, FIXED_FRACTION_BATCH, find_network

ROWS = Path(__file__).parent / "published.csv"
NUM_IMAGES = 1_281_167  # of ImageNet's training set
_BOUNDS = {"straggler": (0.0, 0.1), "shared_host": (0.0, 0.4), "run_overhead_s": (0.0, 200.0)}


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One row of a published table."""

    table: str
    system: str
    network: str
    kind: DeviceKind
    precision: str
    devices: int
    batch_per_device: int
    images_per_s: float | None  # None: the run's time is published instead
    epochs: float
    minutes: float
    use: str

    @property
    def group(self) -> tuple[str, ...]:
        return self.table, self.system, self.network, self.kind.name, self.precision

    @property
    def num_steps(self) -> float:
        return self.epochs * NUM_IMAGES / (self.batch_per_device * self.devices)

    def measured_step_s(self, parameters: ScalingParameters) -> float:
        """The time of a step; of a run, the time outside of steps is subtracted."""
        if self.images_per_s is not None:
            return self.batch_per_device * self.devices / self.images_per_s
        return (60 * self.minutes - parameters.run_overhead_s) / self.num_steps

    @property
    def published(self) -> float:
        """Images per second, those of a run averaged over all of its time."""
        return self.images_per_s or self.epochs * NUM_IMAGES / (60 * self.minutes)

    def workload(self, compute_s: float) -> Workload:
        is_ipu = self.precision == "ipu-half"
        num_bytes = find_network(self.network).parameters * (2 if is_ipu else 4)
        return Workload(compute_s, self.batch_per_device, num_bytes, self.precision == "half")

    def relative_compute(self, batch: int) -> float:
        """The compute time of this row's batch, relative to that of another batch on the same device."""
        if self.precision == "ipu-half":  # more micro-batches of the same size
            return self.batch_per_device / batch
        return _affine(self.batch_per_device) / _affine(batch)


def _affine(batch: int) -> float:
    return FIXED_FRACTION + (1 - FIXED_FRACTION) * batch / FIXED_FRACTION_BATCH


def read_rows(path: Path = ROWS) -> list[PublishedRow]:
    """The published rows in the order of the file."""
    with open(path, encoding="utf-8", newline="") as file:
        return [
            PublishedRow(
                row["table"],
                row["system"],
                row["network"],
                DEVICE_KINDS[row["device_kind"]],
                row["precision"],
                int(row["devices"]),
                int(row["batch_per_device"]),
                float(row["images_per_s"]) if row["images_per_s"] else None,
                float(row["epochs"] or 0),
                float(row["minutes"] or 0),
                row["use"],
            )
            for row in csv.DictReader(file)
        ]


def predict_rows(
    rows: Sequence[PublishedRow], parameters: ScalingParameters = FITTED
) -> list[tuple[PublishedRow, float]]:
    """Each row that is not a base, with the predicted images per second."""
    bases = {row.group: row for row in rows if row.use == "base"}
    predicted: list[tuple[PublishedRow, float]] = []
    for row in rows:
        if row.use == "base":
            continue
        base = bases[row.group]
        alone = calibrate(
            base.workload(0.0), base.measured_step_s(parameters), base.devices, base.kind, parameters
        ).compute_s
        work = row.workload(alone * row.relative_compute(base.batch_per_device))
        step_s = predict_step(work, row.devices, row.kind, parameters).step_s
        if row.images_per_s is None:
            step_s += parameters.run_overhead_s / row.num_steps
        predicted.append((row, row.batch_per_device * row.devices / step_s))
    return predicted


def errors(predicted: Sequence[tuple[PublishedRow, float]], use: str) -> list[float]:
    """Relative errors of the rows with this use."""
    return [value / row.published - 1 for row, value in predicted if row.use == use]


def fit_loss(rows: Sequence[PublishedRow], parameters: ScalingParameters) -> float:
    """The mean squared relative error of the fitted rows."""
    needed = [row for row in rows if row.use in ("base", "fit")]
    return statistics.fmean(error**2 for error in errors(predict_rows(needed, parameters), "fit"))


def fit(rows: Sequence[PublishedRow]) -> ScalingParameters:
    """The parameters with the least error of the fitted rows, by coordinate descent."""
    found = ScalingParameters(0.02, 0.05, 30.0)
    for _ in range(4):
        for name, (low, high) in _BOUNDS.items():

            def loss_at(value: float, name: str = name, found: ScalingParameters = found) -> float:
                return fit_loss(rows, replace(found, **{name: value}))

            found = replace(found, **{name: _minimize(loss_at, low, high)})
    return found


def _minimize(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a function with one valley, by golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(24):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if function(left) <= function(right) else (left, high)
    return (low + high) / 2


def _perfect(rows: Sequence[PublishedRow]) -> list[float]:
    """The errors of held-out rows if scaling were perfect, for comparison."""
    bases = {row.group: row for row in rows if row.use == "base"}
    return [
        bases[row.group].published / bases[row.group].devices * row.devices / row.published - 1
        for row in rows
        if row.use == "held out"
    ]


def median_error(values: Sequence[float]) -> float:
    return statistics.median(map(abs, values))


def markdown(predicted: Sequence[tuple[PublishedRow, float]]) -> str:
    """A table of all rows."""
    lines = [
        "| table | system | network | precision | devices | published | predicted | error | use |",
        "|---" * 9 + "|",
    ]
    for row, value in predicted:
        cells = (
            row.table,
            row.system,
            row.network,
            row.precision.removeprefix("ipu-"),
            f"{row.devices:,}",
            f"{row.published:,.0f}",
            f"{value:,.0f}",
            f"{100 * (value / row.published - 1):+.1f} %",
            row.use,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    rows = read_rows()
    parameters = fit(rows)
    predicted = predict_rows(rows, FITTED)
    table = markdown(predicted)
    print(table)
    if args.markdown is not None:
        args.markdown.write_text(table, encoding="utf-8")
    print(f"fitted now: {parameters}\nused:       {FITTED}")
    for use in ("fit", "held out"):
        found = errors(predicted, use)
        worst = max(found, key=abs)
        print(
            f"{use}: {len(found)} rows, median error {100 * median_error(found):.1f} %, "
            f"mean {100 * statistics.fmean(map(abs, found)):.1f} %, worst {100 * worst:+.1f} %"
        )
    perfect = _perfect(rows)
    print(
        f"perfect scaling, for comparison: held out, median error {100 * median_error(perfect):.1f} %, "
        f"mean {100 * statistics.fmean(map(abs, perfect)):.1f} %"
    )
    ratios = sorted(row.published / value for row, value in predicted if row.use == "held out")
    print(
        f"published / predicted, held out: 10 % quantile {ratios[len(ratios) // 10]:.3f}, "
        f"90 % quantile {ratios[-1 - len(ratios) // 10]:.3f}"
    )


if __name__ == "__main__":
    main()

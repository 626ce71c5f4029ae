"""Text for numbers and results, the same on the console and in the report. Handles None and non-finite numbers."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconv.core.errors import ExitCode
from reconv.recipe.parts.metrics import METRICS

if TYPE_CHECKING:
    from reconv.logging.events import SlowRank

_LABELS = {metric.name: metric.label for metric in METRICS}
HEADLINES = tuple(metric.name for metric in METRICS if metric.is_headline)
_MAX_NAMED = 5  # classes in a line
_STOPPED = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED)


def is_loss(metric: str) -> bool:
    """True if lower is better. A loss is a plain number; every other metric is a fraction."""
    return metric == "loss" or metric.endswith("_loss")


def shown_metrics(names: Iterable[str]) -> list[str]:
    """The metrics to show in little space: all if they are few, else the headlines and the user's own."""
    listed = list(names)
    is_short = len(listed) < 5
    others = [name for name in listed if is_short or (name not in _LABELS and not is_loss(name))]
    return [name for name in dict.fromkeys((*HEADLINES, *others)) if name in listed]


def metric_name(metric: str) -> str:
    """The display name: top-1 for `top1`."""
    return _LABELS.get(metric, metric)


def metric_text(metric: str, value: float | None) -> str:
    """A metric's value: 99.17 %; a loss, and what is no fraction, with four digits."""
    return percent(value) if is_fraction(metric, value) else number(value)


def is_fraction(metric: str, value: float | None) -> bool:
    """True if a metric is shown in percent: no loss, and between 0 and 1, which metrics of the user need not be."""
    return not is_loss(metric) and (value is None or not math.isfinite(value) or 0 <= value <= 1)


def percent(value: float | None, digits: int = 2) -> str:
    """A fraction as a percentage."""
    return f"{100 * value:.{digits}f} %" if value is not None and math.isfinite(value) else number(value)


def number(value: float | None) -> str:
    """A number with four significant digits."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.3g}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def count(value: float | None) -> str:
    """A whole number with thousands separators."""
    return f"{value:,.0f}" if value is not None and math.isfinite(value) else number(value)


def rate(value: float | None) -> str:
    """Images per second, with more digits if there are few."""
    return count(value) if value is None or not math.isfinite(value) or value >= 100 else f"{value:.3g}"


def short_count(value: int) -> str:
    """A count with a unit: 272.5 k, 25.56 M."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return str(value)


def parameters(num_parameters: int, num_trained: int | None) -> str:
    """The number of parameters, and how many of them are trained if not all are."""
    total = f"{short_count(num_parameters)} parameters"
    return total if num_trained in (None, num_parameters) else f"{total} ({short_count(num_trained or 0)} trained)"


def size(num_bytes: float) -> str:
    """Bytes in decimal units: 1.25 GB."""
    for unit_bytes, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """A time with units: 42 s, 3 min 05 s, 2 h 07 min, 1 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return number(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def clock_time(seconds: float | None) -> str:
    """A remaining time: 0:35, 1:02:03."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _two_decimals(value: float) -> str:
    """A percentage with one decimal, or two where the second is not zero."""
    text = f"{value:.2f}"
    return text[:-1] if text.endswith("0") else text


def expectation(expect: Mapping[str, Any]) -> str:
    """The expected value: 99.0 ± 0.5, in percent unless it is a loss."""
    scale = 100.0 if is_fraction(expect["metric"], expect["value"]) else 1.0
    to_text = number if scale == 1.0 else _two_decimals
    tolerance = expect["tolerance"]
    return to_text(scale * expect["value"]) + (f" ± {to_text(scale * tolerance)}" if tolerance else "")


def result(summary: Mapping[str, Any]) -> str:
    """The result in one line: top-1 99.17 % (expected 99.0 ± 0.5: met)."""
    if summary["metric"] is None:
        return "no evaluation yet"
    value = f"{metric_name(summary['metric'])} {metric_text(summary['metric'], summary['value'])}"
    if summary.get("bad_val_images"):
        value += f" {without_bad(summary['bad_val_images'])}"
    if summary.get("partial"):
        value += f", {partial(summary['num_samples'])}"
    if summary.get("few_val_images"):
        value += f", {few_images(summary['few_val_images'])}"
    expect = summary["expect"]
    if expect is None or summary["exit_code"] != ExitCode.OK or summary.get("resume_command"):
        return value
    if expect["met"] is None:
        return f"{value} (expected {metric_name(expect['metric'])} {expectation(expect)}: not measured)"
    return f"{value} (expected {expectation(expect)}: {'met' if expect['met'] else 'NOT MET'})"


def few_images(counts: Mapping[str, int]) -> str:
    """Names classes with so few validation images that a metric says little about them."""
    shown = [f"{name} {count}" for name, count in sorted(counts.items(), key=lambda pair: pair[1])]
    more = f" and {len(shown) - _MAX_NAMED} more" if len(shown) > _MAX_NAMED else ""
    return f"few validation images: {', '.join(shown[:_MAX_NAMED])}{more}"


def partial(num_samples: int) -> str:
    """Says that only a part of the validation set was evaluated."""
    return f"partial: {num_samples:,} validation images"


def without_bad(num_skipped: int) -> str:
    """Says that some images are not part of a metric."""
    return f"without {num_skipped:,} bad image{'s' * (num_skipped > 1)}"


def state(summary: Mapping[str, Any]) -> str:
    """The state of a run: met, missed, finished, stopped, diverged, failed or unfinished."""
    code = summary["exit_code"]
    if code is None:
        return "unfinished"
    if code in _STOPPED or (code == ExitCode.OK and summary.get("resume_command")):  # the latter by --stop-after
        return "stopped"
    if code != ExitCode.OK:
        return "diverged" if code == ExitCode.DIVERGED else "failed"
    expect = summary["expect"]
    if expect is None or expect["met"] is None:
        return "finished"
    return "met" if expect["met"] else "missed"


def verdict(summary: Mapping[str, Any]) -> str:
    """The result as a sentence, for the report."""
    where = f"at step {summary['steps']:,} of {summary['total_steps']:,}"
    metric = summary["metric"]
    value = f"{metric_name(metric)} {metric_text(metric, summary['value'])}" if metric else "no evaluation"
    if summary.get("partial"):
        value += f" ({partial(summary['num_samples'])})"
    expect = summary["expect"]
    level = f"{expectation(expect)}{' %' if is_fraction(expect['metric'], expect['value']) else ''}" if expect else ""
    reason = summary.get("stopped_early")
    early = f" It stopped early {where}: {reason}." if reason else ""
    match state(summary):
        case "met":
            return f"Reached {value}; the recipe expects {level}.{early}"
        case "missed":
            return f"Reached {value}, below the {level} that the recipe expects.{early}"
        case "finished":
            return f"Finished with {value}.{early}"
        case "stopped":
            return f"Stopped {where} with {value} so far; it can be resumed."
        case "diverged":
            return f"Diverged {where}: non-finite loss or gradient. Last result: {value}."
        case "failed":
            return f"Failed {where} with exit code {summary['exit_code']}. Last result: {value}."
        case _:
            return f"Not finished: last logged {where}, with {value} so far. If it is not running, resume it."


def repeat_command(command: Sequence[str]) -> str:
    """The command that repeats the run from scratch."""
    return shlex.join([word for word in command if word != "--resume"])


def resume_command(run_dir: Path) -> str:
    """The command that resumes the run in a directory."""
    return shlex.join(["reconv", "resume", str(run_dir)])


def fork_command(run: Path, fields: Mapping[str, Any], *more: str) -> str:
    """The command that continues a run or a checkpoint as a new run with other values of recipe fields."""
    options = {"schedule.lr": "--lr", "batch.size": "--batch-size"}
    words: list[str] = []
    for name, value in fields.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        words += [options[name], text] if name in options else ["--set", f"{name}={text}"]
    return shlex.join(["reconv", "resume", str(run), "--fork", *more, *words])


def slow_rank(event: SlowRank) -> str:
    """Line on a rank that slows the others down, and what it spends its time with."""
    own_s, text = event.wait_s + event.forward_s, "waiting for data" if event.wait_s > event.forward_s else "computing"
    parts = f"{1000 * event.wait_s:.3g} ms waiting for data, {1000 * event.forward_s:.3g} ms in forward passes"
    return (
        f"step {event.step:,}: rank {event.rank} on {event.host} slows all ranks down by {text}: it needs "
        f"{1000 * own_s:.3g} ms of a step for itself ({parts}), the median rank {1000 * event.median_s:.3g} ms"
    )


def data_wait(fraction: float, seconds: Mapping[str, float], bottleneck: str, advice: str) -> str:
    """Line on the time a run waited for data, for which stage, and what to try."""
    total = sum(seconds.values()) or 1.0
    shares = ", ".join(f"{stage} {percent(value / total, 0)}" for stage, value in seconds.items())
    return f"waited for data {percent(fraction, 0)} of the time, mostly for {bottleneck} ({shares}); try: {advice}"

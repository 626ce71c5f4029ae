"""The summary of a run, `summary.json`: its result, speed and cost, as a function of the run directory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reconv.core.custom_code import FROM_PYTHON
from reconv.core.errors import ExitCode
from reconv.logging.clock import rates_of
from reconv.logging.events import EvalFinished
from reconv.logging.formatting import is_loss, resume_command
from reconv.recipe.parts.code import references_in
from reconv.report.run_record import RunRecord, load_run_record
from reconv.storage.files import write_atomic

# The metric of the result if the recipe names none: the first of these that was evaluated.
_USUAL_METRICS = ("top1", "map", "ap", "voc10", "loss")


def summarize(run_dir: Path) -> dict[str, Any]:
    """The content of `summary.json` for a run directory."""
    return summarize_record(load_run_record(run_dir))


def write_summary(run_dir: Path) -> dict[str, Any]:
    """Write `summary.json` and return its content."""
    summary = summarize(run_dir)
    write_atomic(run_dir / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return summary


def summarize_record(record: RunRecord) -> dict[str, Any]:
    """The summary of a loaded run."""
    plan, end = record.plan, record.end
    metric, candidates = result_evaluations(record)
    averaged = [e for e in _complete(record) if e.weights == "averaged" and metric in e.metrics]
    best = _best(candidates, metric)
    final = _final(candidates, averaged)
    value = _finite(final.metrics[metric]) if final and metric else None
    summary = {
        "recipe": record.name,
        "task": plan.task if plan else record.recipe.get("task"),
        "metric": metric,
        "value": value,
        "weights": final.weights if final else None,
        "best": _finite(best.metrics[metric]) if best and metric else None,
        "best_step": best.step if best else None,
        "steps": record.steps,
        "total_steps": plan.total_steps if plan else 0,
        "epochs": round(record.epoch(record.steps), 4),
        **_speed(record),
        **_checkpoints(record),
        "peak_memory_bytes": max((t.peak_memory_bytes for t in record.attempts), default=0),
        "num_parameters": (plan.num_parameters or None) if plan else None,
        "num_trained": plan.num_trained if plan else None,
        "expect": _expect(record.recipe, final),
        "exit_code": end.exit_code if end else None,
        "reason": end.reason if end else None,
        "stopped_early": None,
        "stopped_after": None,  # the limit of --stop-after or --stop-at, if it ended the last attempt
        "attempts": len(record.attempts),
        "non_finite_steps": len(record.non_finite),
        "bad_images": len(record.bad_images),
        "bad_val_images": final.skipped if final else 0,
        "partial": final.partial if final else False,  # only a part of the validation set was evaluated
        "num_samples": final.num_samples if final else None,
        "few_val_images": dict(plan.few_val_images) if plan else {},  # of classes with fewer than 10 of them
        "resume_command": _resume(record),
        "report": "report.html",
        "unverified_lines": list(record.unverified_lines),  # of events.jsonl; they are left out
    }
    finite = _finite_values(summary)
    return finite | _added_fields(finite, end.fields if end else {})


def result_evaluations(record: RunRecord) -> tuple[str | None, list[EvalFinished]]:
    """The metric of the result, and the evaluations that have it by step: of the EMA weights if there are any."""
    complete = _complete(record)
    metric = _metric(record.recipe, complete)
    return metric, _candidates(complete, metric)


def _added_fields(summary: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Additions of a run's end to its summary: texts that are not known before, and new keys."""
    return {name: value for name, value in fields.items() if name not in summary or _may_replace(summary[name], value)}


def _may_replace(known: Any, value: Any) -> bool:
    return known is None and (value is None or isinstance(value, str))


def _speed(record: RunRecord) -> dict[str, Any]:
    """Time and throughput over all attempts, including steps that were repeated after a resume."""
    train_s, wait_s = sum(t.train_s for t in record.attempts), sum(t.wait_s for t in record.attempts)
    rates = rates_of(sum(t.timed_images for t in record.attempts), train_s, wait_s)
    num_devices = max(1, record.plan.num_devices) if record.plan else 1
    rates_by_name = {"images_per_s": rates.images_per_s, "compute_images_per_s": rates.compute_images_per_s}
    return {
        "images": sum(t.images for t in record.attempts),
        "wall_s": round(sum(t.wall_s for t in record.attempts), 3),
        "num_devices": num_devices,
        **rates_by_name,
        **{
            f"{name}_per_device": None if value is None else value / num_devices
            for name, value in rates_by_name.items()
        },
        "data_wait_fraction": rates.data_wait_fraction,
        "data_bottleneck": (record.data_wait.bottleneck or None) if record.data_wait else None,
        "data_advice": (record.data_wait.advice or None) if record.data_wait else None,
        "startup_s": _rounded(record.end.startup_s) if record.end else None,  # these two: of the last attempt
        "phases_s": {name: _rounded(s) for name, s in record.end.phases.items()} if record.end else {},
        "data_stage_s": {k: round(v, 3) for k, v in record.data_wait.seconds.items()} if record.data_wait else None,
    }


def _checkpoints(record: RunRecord) -> dict[str, Any]:
    """Seconds that saving checkpoints blocked training, and that writing them took."""
    stalls_s = [s.wall_s if s.stall_s is None else s.stall_s for s in record.checkpoints]
    writes_s = [s.wall_s if s.write_s is None else s.write_s for s in record.checkpoints]
    return {
        "num_checkpoints": len(record.checkpoints),
        "save_stall_s": round(sum(stalls_s), 4),
        "save_stall_s_max": round(max(stalls_s), 4) if stalls_s else None,
        "save_write_s": round(sum(writes_s), 4),
    }


def _metric(recipe: Mapping[str, Any], evaluations: Sequence[EvalFinished]) -> str | None:
    """The metric of the result: the recipe's, or the usual one."""
    seen = {name for e in evaluations for name in e.metrics}
    expected = (recipe.get("expect") or {}).get("metric", "top1") if recipe.get("expect") else None
    best = (recipe.get("evaluate") or {}).get("best_metric")
    of_task = (recipe.get("detection") or {}).get("metric") if recipe.get("task") == "detection" else None
    wanted = (*(name for name in (expected, best, of_task) if name), *_USUAL_METRICS, *sorted(seen))
    return next((name for name in wanted if name in seen), None)


def _complete(record: RunRecord) -> list[EvalFinished]:
    """The evaluations of the whole validation set; all of them if there are none."""
    return [e for e in record.evaluations if not e.partial] or list(record.evaluations)


def _candidates(evaluations: Sequence[EvalFinished], metric: str | None) -> list[EvalFinished]:
    """The evaluations of the EMA weights if there are any, else of the raw weights."""
    with_metric = [e for e in evaluations if metric in e.metrics and e.weights != "averaged"]
    ema = [e for e in with_metric if e.weights == "ema"]
    return ema or with_metric


def _final(candidates: Sequence[EvalFinished], averaged: Sequence[EvalFinished]) -> EvalFinished | None:
    """The evaluation of the averaged checkpoints if that is the last one, else the last candidate."""
    if averaged and (not candidates or averaged[-1].step >= candidates[-1].step):
        return averaged[-1]
    return candidates[-1] if candidates else None


def _best(evaluations: Sequence[EvalFinished], metric: str | None) -> EvalFinished | None:
    finite = [e for e in evaluations if metric and math.isfinite(e.metrics[metric])]
    if not metric or not finite:
        return None
    sign = -1 if is_loss(metric) else 1
    return max(finite, key=lambda e: (sign * e.metrics[metric], -e.step))


def _expect(recipe: Mapping[str, Any], final: EvalFinished | None) -> dict[str, Any] | None:
    """The value the recipe expects, and whether the result meets it."""
    expect = recipe.get("expect")
    if not expect:
        return None
    metric, expected, tolerance = expect.get("metric", "top1"), expect["value"], expect.get("tolerance", 0)
    met: bool | None = None
    if final and metric in final.metrics and not final.partial:
        gain = (final.metrics[metric] - expected) * (-1 if is_loss(metric) else 1)
        met = gain >= -tolerance - 1e-9  # 0.985 + 0.005 is not 0.99 in binary
    return {"metric": metric, "value": expected, "tolerance": tolerance, "met": met}


def _resume(record: RunRecord) -> str | None:
    """The command that resumes the run, unless it is finished; a call in Python if it has objects from there."""
    if not record.attempts or _is_finished(record):
        return None
    if any(path.startswith(f"{FROM_PYTHON}:") for _, path in references_in(record.recipe)):
        return f"reconv.train(..., out={str(record.folder)!r}, resume=True) with the same objects"
    return resume_command(record.folder)


def _is_finished(record: RunRecord) -> bool:
    """True if nothing is left to do; --stop-after ends a command with exit code 0, too."""
    end = record.end
    return end is not None and end.exit_code == ExitCode.OK and not end.fields.get("stopped_after")


def _finite_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with None for NaN and infinity, also in mappings."""
    return {
        name: _finite_values(value)
        if isinstance(value, Mapping)
        else _finite(value)
        if isinstance(value, float)
        else value
        for name, value in values.items()
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _finite(value: float) -> float | None:
    """None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None

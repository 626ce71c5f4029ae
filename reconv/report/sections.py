"""The sections of one run's report; a section without content is empty."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from reconv.logging import formatting as fmt
from reconv.logging.events import CheckpointSaved, ImageLogged
from reconv.report import images, page
from reconv.report.charts import draw
from reconv.report.curves import charts_of_run
from reconv.report.markup import Html, el, join
from reconv.report.run_record import RunRecord

_MAX_ROWS = 200


def header(record: RunRecord, summary: Mapping[str, Any], live: page.LivePage | None = None) -> Html:
    """Header: the recipe, the result, and the commands to repeat or resume the run."""
    commands_typed = [attempt.start.command for attempt in record.attempts]
    command = next((words for words in reversed(commands_typed) if words[1:2] == ("train",)), ())
    can_resume = summary["resume_command"] and live is None
    commands = [
        *([page.command("repeat", fmt.repeat_command(command))] if command else []),
        *([page.command("resume", summary["resume_command"])] if can_resume else []),
    ]
    state = fmt.state(summary) if live is None else "running"
    verdict = fmt.verdict(summary) if live is None else _progress(record, summary)
    facts = [el("li", None, el("span", None, name), f" {value}") for name, value in _facts(record, summary) if value]
    return page.header(
        f"Reconv training report · run {record.label}",
        record.title,
        *([el("p", {"class": "about"}, str(record.recipe["description"]))] if record.recipe.get("description") else []),
        el("p", {"class": "verdict"}, page.badge(state), el("strong", None, verdict)),
        *([] if live is None else [_live_note(live)]),
        el("ul", {"class": "facts"}, *facts),
        *commands,
    )


def _progress(record: RunRecord, summary: Mapping[str, Any]) -> str:
    """Progress of a running run."""
    metric, steps = summary["metric"], f"At step {summary['steps']:,} of {summary['total_steps']:,}"
    value = f", {fmt.metric_name(metric)} {fmt.metric_text(metric, summary['value'])} so far" if metric else ""
    left_s = record.progress[-1].eta_s if record.progress else None
    left = f", about {fmt.duration(left_s)} left" if left_s is not None else ""
    return f"{steps}{value}{left}."


def _live_note(live: page.LivePage) -> Html:
    """Says that the page reloads itself; the script replaces the text once it does no longer."""
    text = f"Written {utc_time(live.written_s)}; reloads itself while the run is running."
    stale = (
        "The run has not written a new report for a long time: it may have been killed. Reload the page to look again."
    )
    return el("p", {"class": "live-note", "role": "status", "data-stale": stale}, text)


def _facts(record: RunRecord, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    environment = record.attempts[-1].start.environment if record.attempts else {}
    model = record.plan.model if record.plan and record.plan.model else _field(record.recipe, "model", "name")
    data = environment.get("data") or _field(record.recipe, "data", "source")
    started = record.attempts[0].start.time_s if record.attempts else None
    attempts = summary["attempts"]
    return [
        ("model", str(model)),
        ("data", str(data)),
        ("device", str(environment.get("device", ""))),
        ("date", "" if started is None else utc_time(started)),
        ("time", fmt.duration(summary["wall_s"]) + (f" in {attempts} attempts" if attempts > 1 else "")),
    ]


def _field(recipe: Mapping[str, Any], section: str, name: str) -> str:
    part = recipe.get(section)
    return str(part.get(name, "")) if isinstance(part, Mapping) else ""


def utc_time(time_s: float) -> str:
    """A time in UTC, so that every machine writes the same page."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):  # a time that no clock shows
        return "unknown"


def cards(record: RunRecord, summary: Mapping[str, Any]) -> Html:
    """The most important numbers."""
    metric, shown = summary["metric"], []
    if metric:
        best = f"best {fmt.metric_text(metric, summary['best'])} at step {summary['best_step'] or 0:,}"
        names = {"ema": ", EMA weights", "averaged": ", average of the last checkpoints"}
        remarks = names.get(summary["weights"] or "", "")
        if summary["bad_val_images"]:
            remarks += f", {fmt.without_bad(summary['bad_val_images'])}"
        if summary["partial"]:
            remarks += f"; {fmt.partial(summary['num_samples'])}"
        if summary["few_val_images"]:
            remarks += f"; {fmt.few_images(summary['few_val_images'])}"
        shown.append(page.card(fmt.metric_name(metric), fmt.metric_text(metric, summary["value"]), best + remarks))
    devices = summary["num_devices"]
    per_device = f", {fmt.rate(summary['images_per_s_per_device'])} per device" if devices > 1 else ""
    compute = f"{fmt.rate(summary['compute_images_per_s'])} without data wait{per_device}"
    steps = f"{summary['steps']:,} of {summary['total_steps']:,} steps"
    shown += [
        page.card("images/s", fmt.rate(summary["images_per_s"]), compute),
        page.card("data wait", fmt.percent(summary["data_wait_fraction"], 1), _data_wait(summary)),
        page.card("peak memory", fmt.size(summary["peak_memory_bytes"]), f"on {devices} device{'s' * (devices > 1)}"),
        _parameters(summary),
        page.card("epochs", f"{summary['epochs']:.4g}", steps),
    ]
    return el("dl", {"class": "cards"}, *shown)


def _parameters(summary: Mapping[str, Any]) -> Html:
    total, trained = summary["num_parameters"], summary["num_trained"]
    if not total:
        return Html("")
    if trained is None:
        return page.card("parameters", fmt.short_count(total))
    frozen = f"{fmt.short_count(trained)} trained, {fmt.short_count(total - trained)} frozen"
    return page.card("parameters", fmt.short_count(total), "all trained" if trained == total else frozen)


def _data_wait(summary: Mapping[str, Any]) -> str:
    text = "of the training time"
    if not summary["data_bottleneck"]:
        return text
    return f"{text}, mostly for {summary['data_bottleneck']}; try: {summary['data_advice']}"


def curves(record: RunRecord, summary: Mapping[str, Any]) -> Html:
    """The charts, and an explanation of their symbols."""
    charts = charts_of_run(record, summary)
    symbols = [
        *(["A dashed line with a flag is a resume."] if any(t.start.from_step for t in record.attempts) else []),
        *(["A triangle is a step with a non-finite loss or gradient."] if record.non_finite else []),
        *(["The ring is the best evaluation."] if summary["best"] is not None else []),
    ]
    intro = " ".join(["By epoch.", *symbols, "Hover over a chart, or use the arrow keys in it, for values."])
    return page.section("Curves", chart_grid([draw(c) for c in charts], [c.small for c in charts]), intro=intro)


def chart_grid(figures: Sequence[Html], are_small: Sequence[bool]) -> Html:
    """Large figures two in a row, small ones three."""
    large = [f for f, small in zip(figures, are_small, strict=True) if not small]
    small = [f for f, small in zip(figures, are_small, strict=True) if small]
    return join(
        [
            *([el("div", {"class": "charts"}, *large)] if large else []),
            *([el("div", {"class": "charts small"}, *small)] if small else []),
        ]
    )


def image_sections(record: RunRecord) -> Html:
    """The images of the run with their captions, as long as they fit into the page."""
    sections, left_bytes = [], images.BUDGET_BYTES * 4 // 3
    for event in record.images:
        uris = images.embed(record.folder, event, left_bytes)
        left_bytes -= sum(map(len, uris or ()))
        sections.append(page.section(event.title, _image_grid(event, uris), intro=event.note))
    return join(sections)


def _image_grid(event: ImageLogged, uris: Sequence[str] | None) -> Html:
    if uris is None:
        return el("p", {"class": "gone"}, f"{event.path} is missing, not an image, or too large to show.")
    if event.columns > 0 and len(uris) == len(event.captions):
        tiles = [
            el("figure", {"data-class": name}, _image(uri, caption), el("figcaption", None, caption))
            for uri, caption, name in zip(uris, event.captions, _classes_of(event), strict=True)
        ]
        wordy = sum(map(len, event.captions)) > 14 * len(event.captions)
        by_columns = "tiles wide" if event.columns <= 2 else "tiles medium" if event.columns <= 4 else ""
        look = by_columns or ("tiles wordy" if wordy else "tiles")
        return join([_class_filter(event), el("div", {"class": look}, *tiles)])
    captions = [el("ol", {"class": "captions"}, *(el("li", None, c) for c in event.captions))] if event.captions else []
    return join([*(_image(uri, event.title) for uri in uris), *captions])


def _classes_of(event: ImageLogged) -> Sequence[str | bool]:
    """The class of each tile; False where there is none to filter by."""
    return event.classes if len(event.classes) == len(event.captions) else [False] * len(event.captions)


def _class_filter(event: ImageLogged) -> Html:
    """A choice of the class whose tiles the page's script shows; nothing for tiles of one class or none."""
    counts = Counter(event.classes)
    if len(counts) < 2:
        return Html("")
    options = [el("option", {"value": name}, f"{name} ({count:,})") for name, count in sorted(counts.items())]
    everything = el("option", {"value": "", "selected": True}, f"all ({counts.total():,})")
    return el("label", {"class": "filter", "hidden": True}, "target class ", el("select", None, everything, *options))


def _image(uri: str, text: str) -> Html:
    """An image; a PNG has few pixels and is enlarged without blur."""
    return el("img", {"class": uri.startswith("data:image/png") and "crisp", "src": uri, "alt": text})


def messages(record: RunRecord) -> Html:
    """Messages: lines that are left out and non-finite steps first, then warnings, then the rest."""
    unverified = [el("li", {"class": "warning"}, text) for text in record.problems]
    if record.num_unchecked:
        text = f"{record.num_unchecked:,} lines of events.jsonl have no checksum and could not be verified: "
        unverified.append(el("li", {"class": "info"}, text + "an earlier version of Reconv wrote them"))
    ordered = sorted(record.messages, key=lambda note: note.level == "info")
    lines = [
        el(
            "li",
            {"class": n.level if n.level in ("info", "warning") else "info"},
            *_lines(f"step {n.step:,}: {n.text}" if n.step else n.text),
        )
        for n in ordered[:_MAX_ROWS]
    ]
    broken = [
        el(
            "li",
            {"class": "warning"},
            f"step {e.step:,}: non-finite loss or gradient (loss {fmt.number(e.loss)}); action: {e.action}; "
            f"{len(e.samples)} samples, first indices: {', '.join(map(str, e.samples[:8]))}",
        )
        for e in record.non_finite[:_MAX_ROWS]
    ]
    slow = [el("li", {"class": "warning"}, fmt.slow_rank(event)) for event in record.slow_ranks[:_MAX_ROWS]]
    hidden = len(record.messages) + len(record.non_finite) - len(lines) - len(broken)
    more = [el("li", {"class": "info"}, f"{hidden:,} more in events.jsonl")] if hidden else []
    notes = [*unverified, *broken, *slow, *lines, *more]
    return page.section("Messages", el("ul", {"class": "notes"}, *notes) if notes else Html(""))


def _lines(text: str) -> list[str]:
    """The first line of a message, and preformatted lines after it."""
    first, _, table = text.partition("\n")
    return [first, el("pre", {"tabindex": 0}, table)] if table else [first]


def bad_images(record: RunRecord) -> Html:
    """The files that were skipped because they cannot be read or decoded."""
    rows = [[f"{e.step:,}", e.split, e.path, e.reason] for e in record.bad_images[:_MAX_ROWS]]
    if not rows:
        return Html("")
    hidden = len(record.bad_images) - len(rows)
    more = f" The first {len(rows):,}; {hidden:,} more in events.jsonl." if hidden else ""
    intro = (
        f"{len(record.bad_images):,} files could not be read or decoded. In training, another sample replaces each; "
        f"evaluations skip them.{more}"
    )
    table = page.table(["after step", "split", "file", "reason"], rows, (0,), "Bad images")
    return page.section("Bad images", table, intro=intro)


def evaluations(record: RunRecord) -> Html:
    """Every evaluation with all its metrics."""
    if not record.evaluations:
        return Html("")
    names = sorted({name for e in record.evaluations for name in e.metrics}, key=lambda n: (n == "loss", n))
    rows = [
        [
            f"{e.step:,}",
            f"{e.epoch:.2f}",
            e.weights + (" (partial)" if e.partial else ""),
            *(fmt.metric_text(n, e.metrics.get(n)) for n in names),
            f"{e.num_samples:,}" + (f" ({e.skipped:,} skipped)" if e.skipped else ""),
            fmt.duration(e.wall_s),
            "best" if e.best else "",
        ]
        for e in record.evaluations[-_MAX_ROWS:]
    ]
    head = ["step", "epoch", "weights", *(fmt.metric_name(n) for n in names), "samples", "time", ""]
    numeric = [0, 1, *range(3, len(head) - 1)]
    shown = f"Evaluations: {_last_of(len(rows), len(record.evaluations))}"
    return page.fold(shown, page.table(head, rows, numeric, "Evaluations"))


def tables(record: RunRecord) -> Html:
    """Links to the tables beside the report."""
    notes = {"training.csv": "losses and rates", "validation.csv": "metrics", "evaluations.csv": "of eval --all"}
    rows = [
        el("li", None, el("a", {"href": name}, name), f": {notes.get(name, 'target and prediction of each image')}")
        for name in record.tables
    ]
    return page.fold("Tables", el("ul", None, *rows)) if rows else Html("")


def checkpoints(record: RunRecord) -> Html:
    """The checkpoints the run has written; old ones may have been deleted."""
    if not record.checkpoints:
        return Html("")
    rows = [
        [
            *(f"{s.step:,}", s.path, fmt.size(s.num_bytes), fmt.duration(s.wall_s)),
            *(fmt.duration(s.wall_s if s.stall_s is None else s.stall_s), _reason(s)),
        ]
        for s in record.checkpoints[-_MAX_ROWS:]
    ]
    head = ["step", "path", "size", "time", "training blocked", "reason"]
    shown = f"Checkpoints written: {_last_of(len(rows), len(record.checkpoints))}"
    return page.fold(shown, page.table(head, rows, (0, 2, 3, 4), "Checkpoints"))


def _reason(saved: CheckpointSaved) -> str:
    """Reason of a checkpoint, with reasons of those that were due while another was written."""
    steps = ", ".join(f"{step:,}" for step in saved.replaced)
    return f"{saved.reason}, also for step {steps}" if steps else saved.reason


def _last_of(num_shown: int, num_all: int) -> str:
    return f"{num_all:,}" if num_shown == num_all else f"the last {num_shown:,} of {num_all:,}"


def attempts(record: RunRecord) -> Html:
    """Each start of the process and how it ended."""
    rows = [
        [
            str(t.start.attempt),
            "" if t.start.time_s is None else utc_time(t.start.time_s),
            f"{t.start.from_step:,}",
            f"{t.last_step:,}",
            fmt.duration(t.wall_s),
            f"{t.end.reason} (exit code {t.end.exit_code})" if t.end else "no end logged: killed, or still running",
        ]
        for t in record.attempts[-_MAX_ROWS:]
    ]
    table = page.table(["attempt", "started", "from step", "to step", "time", "end"], rows, (0, 2, 3, 4), "Attempts")
    return page.fold(f"Attempts: {len(record.attempts)}", table, is_open=len(record.attempts) > 1) if rows else Html("")


def plan(record: RunRecord) -> Html:
    """The plan as text."""
    lines = record.plan.lines if record.plan else ()
    return page.fold("Plan", el("pre", {"class": "plan"}, "\n".join(lines)), is_open=True) if lines else Html("")


def environment(record: RunRecord) -> Html:
    """The environment of the last attempt, and the data's fingerprint."""
    facts = dict(record.attempts[-1].start.environment) if record.attempts else {}
    if record.data_fingerprint is not None:
        facts["data fingerprint"] = record.data_fingerprint.train[:16]
    rows = [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in facts.items()
    ]
    return page.fold("Environment", page.pairs(rows), is_open=True) if rows else Html("")


def recipe(record: RunRecord) -> Html:
    """The fields that differ from the defaults, and the resolved recipe."""
    if not record.recipe_text:
        return Html("")
    changed = sorted(changed_fields(record.recipe).items())
    rows = [[name, scalar(default), scalar(value)] for name, (default, value) in changed]
    different = page.table(["field", "default", "this run"], rows, (), "Fields that differ from the defaults")
    return join(
        [
            page.fold(f"Recipe fields that differ from the defaults: {len(rows)}", different) if rows else Html(""),
            page.fold("Resolved recipe", el("pre", {"tabindex": 0, "class": "recipe"}, record.recipe_text)),
        ]
    )


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as a flat one with dotted names."""
    if not isinstance(value, Mapping) or (prefix and not value):
        return {prefix: value}
    return {
        name: v
        for key, item in value.items()
        for name, v in flat(item, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def changed_fields(recipe: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """For each field that differs from the schema's default: the default and the recipe's value."""
    from reconv.recipe.schema import Recipe

    defaults = flat(Recipe().model_dump(mode="json"))
    return {
        name: (defaults.get(name), value)
        for name, value in flat(recipe).items()
        if value != defaults.get(name) and name not in ("name", "description")
    }


def scalar(value: Any) -> str:
    """A recipe value as in YAML."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

"""The page of a study, in the look of the report: verdict, history, importance, parallel coordinates and all trials.

It loads nothing from the network, and the same study gives the same bytes.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reconv.core.text import count
from reconv.logging import formatting as fmt
from reconv.report import page
from reconv.report.bars import StackedBar, draw_stacked_bars
from reconv.report.charts import Chart, Series, draw
from reconv.report.markup import Html, el
from reconv.tuner.result import TuneResult, describe_values
from reconv.tuner.space import Dimension, value_text
from reconv.tuner.study import TrialRecord

if TYPE_CHECKING:
    from reconv.trainer.lr_range import LrRange

_WIDTH, _HEIGHT, _TOP, _BOTTOM, _SIDE = 1120, 340, 30, 46, 90


def render_study(result: TuneResult, recipe_text: str) -> str:
    """The page as HTML."""
    title = f"{result.recipe}: {count(len(result.trials), 'trial')}"
    is_better = result.kept != 0
    return page.document(
        f"{title} · Reconv tune",
        page.header(
            "Reconv tune",
            title,
            el(
                "p",
                {"class": "verdict"},
                el(
                    "span", {"class": "badge good" if is_better else "badge warn"}, "better" if is_better else "default"
                ),
                el("span", None, result.verdict),
            ),
            page.command("train it", shlex.join(result.train_words)),
            *([page.command("again", result.command)] if result.command else []),
        ),
        _cards(result),
        page.section("Search", el("div", {"class": "charts"}, draw(_history(result)), _importance(result))),
        page.section(
            "Parallel coordinates",
            _parallel_coordinates(result),
            intro="A line for each trial, from the values it was given to the metric at the last rung it reached; "
            "darker lines are trials that were trained to their end, the thick one is the recipe to keep.",
        ),
        page.section("Fresh seeds", _confirmation(result)),
        page.section("Trials", page.table(*result.rows, numeric=range(2, 5), caption="All trials", is_sortable=True)),
        page.section(
            "Recipe to keep",
            el("pre", None, el("code", None, recipe_text)),
            intro="The file best.yaml, which reconv train takes.",
        ),
        page.section("Details", page.pairs(_details(result))),
    )


def _cards(result: TuneResult) -> Html:
    default, best = result.trials[0], result.trials[result.best]
    ended = [t for t in result.trials if t.state == "complete"]
    full = max(result.costs, default=0.0)
    cost = f"as much as {sum(result.costs) / full:.1f} whole trials" if full else ""
    failed = sum(bool(t.failure) for t in result.trials)
    name = fmt.metric_name(result.metric)
    return el(
        "dl",
        {"class": "cards"},
        page.card(f"{name}, default", result.text_of(result.value_of(default)), "trial 0: the recipe as it is"),
        page.card(f"{name}, best trial", result.text_of(result.value_of(best)), f"trial {best.number}"),
        page.card("trials", str(len(result.trials)), f"{len(ended)} to their end, {failed} failed"),
        page.card("epochs trained", f"{sum(result.costs):.4g}", cost),
    )


def _history(result: TuneResult) -> Chart:
    """The value of each trial by number, a line per rung, and the best at the end so far."""
    rungs = result.settings.rungs
    series = []
    for rung in reversed(range(rungs)):
        values = [(float(t.number), result.value_of(t, rung)) for t in result.trials]
        points = tuple((x, y) for x, y in values if y is not None)
        label = "at the end" if rung == rungs - 1 else f"at rung {rung + 1}"
        series.append(Series(label, _apart(points), rungs - 1 - rung, dots=True))
    best: list[tuple[float, float]] = []
    is_loss = fmt.is_loss(result.metric)
    for trial in result.trials:
        value = result.value_of(trial, rungs - 1)
        if value is None:
            continue
        if best:
            value = min(best[-1][1], value) if is_loss else max(best[-1][1], value)
        best.append((float(trial.number), value))
    if best:
        best.append((float(len(result.trials) - 1), best[-1][1]))
    series.append(Series("best so far", tuple(best), 7, 1))
    return Chart(
        f"{fmt.metric_name(result.metric)} by trial",
        "number" if is_loss else "percent",
        tuple(series),
        float(max(1, len(result.trials) - 1)),
        note="Trials are proposed in rounds, each from the results of the rounds before.",
        x_name="trial",
    )


def _apart(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points with gaps between them: trials are no line."""
    return tuple(point for x, y in points for point in ((x, y), (x, float("nan"))))


def _importance(result: TuneResult) -> Html:
    if not result.importance:
        return page.panel("Importance", "It needs at least four trials with different values.", Html(""))
    names, parts = list(result.importance), tuple(result.importance.values())
    listed = ", ".join(f"{name} {100 * part:.0f} %" for name, part in zip(names, parts, strict=True))
    note = f"{listed}: how far the values of the better half at rung 1 differ from those of all (PED-ANOVA)."
    return draw_stacked_bars("Importance", note, names, [StackedBar("at rung 1", "", parts)])


def _parallel_coordinates(result: TuneResult) -> Html:
    shown = [t for t in result.trials if t.scores and t.params]
    values = [value for t in shown if (value := result.value_of(t)) is not None]
    if not values:
        return Html("")
    low, high = min(values), max(values)
    axes = len(result.space) + 1
    xs = [_SIDE + (_WIDTH - 2 * _SIDE) * n / (axes - 1) for n in range(axes)]

    def y(part: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - part)

    def part_of(value: float) -> float:
        return 0.5 if high == low else (value - low) / (high - low)

    def line(trial: TrialRecord) -> Html:
        parts = [d.position(trial.params[d.field]) if d.field in trial.params else None for d in result.space]
        parts.append(part_of(result.value_of(trial) or 0.0))
        points = [f"{x:.1f} {y(part):.1f}" for x, part in zip(xs, parts, strict=True) if part is not None]
        is_kept, is_complete = trial.number == result.kept, trial.state == "complete"
        kind = "kept" if is_kept else "complete" if is_complete else "pruned"
        text = f"trial {trial.number}: {result.text_of(result.value_of(trial))} ({describe_values(trial.values)})"
        return el("g", {"class": f"trial {kind}"}, el("title", None, text), el("path", {"d": "M" + "L".join(points)}))

    # The kept one is drawn last, above the others.
    order = sorted(shown, key=lambda t: (t.number == result.kept, t.state == "complete", t.number))
    columns = [_axis(x, d.field.rpartition(".")[2], *_ends(d)) for x, d in zip(xs, result.space, strict=False)]
    columns.append(_axis(xs[-1], fmt.metric_name(result.metric), result.text_of(low), result.text_of(high)))
    label = f"{len(shown)} trials from their values to the metric; the table below has the numbers"
    svg = el(
        "svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "role": "img", "aria-label": label}, *map(line, order), *columns
    )
    return el("figure", {"class": "panel parallel"}, el("div", {"class": "scroll"}, svg))


def _ends(dimension: Dimension) -> tuple[str, str]:
    ends = dimension.ends()
    return value_text(ends[0]), value_text(ends[-1])


def _axis(x: float, name: str, low: str, high: str) -> Html:
    bottom = _HEIGHT - _BOTTOM
    middle = {"x": f"{x:.1f}", "text-anchor": "middle"}
    return el(
        "g",
        None,
        el("line", {"class": "axis", "x1": f"{x:.1f}", "x2": f"{x:.1f}", "y1": _TOP, "y2": bottom}),
        el("text", {**middle, "y": _TOP - 10}, high),
        el("text", {**middle, "y": bottom + 16}, low),
        el("text", {**middle, "y": bottom + 36, "class": "axis-name"}, name),
    )


def _confirmation(result: TuneResult) -> Html:
    confirmed = result.confirmation
    if confirmed is None:
        return Html("")
    rows = [
        ["the recipe as it is", *map(result.text_of, confirmed.default)],
        [f"trial {result.best}", *map(result.text_of, confirmed.best)],
    ]
    width = max(map(len, rows))
    head = ["", *(f"seed {seed}" for seed in confirmed.seeds)][:width]
    return page.table(head, [row + ["failed"] * (width - len(row)) for row in rows], range(1, width), "Fresh seeds")


def _details(result: TuneResult) -> list[tuple[str, str]]:
    settings = result.settings
    rungs = ", ".join(f"{float(point.rstrip('%')):.3g} %" if point else "the end" for point in settings.points)
    return [
        ("space", "; ".join(settings.space)),
        ("search", {"tpe": "TPE (Optuna)", "random": "random"}[settings.search] + f", seed {settings.seed}"),
        ("rungs", f"{rungs}; the best 1/{settings.reduction} of all trials at a rung go on"),
        ("rounds", f"{settings.round_size} trials each"),
        ("data", result.data or "of the recipe"),
    ]


def render_lr_range(found: LrRange, command: str) -> str:
    """The page of a learning rate range test: the loss over the rate."""
    title = f"{found.recipe}: learning rate range"
    notes = (el("li", None, line) for line in found.lines)
    return page.document(
        f"{title} · Reconv tune",
        page.header(
            "Reconv tune --lr-range", title, el("ul", {"class": "facts"}, *notes), page.command("again", command)
        ),
        page.section("Loss by learning rate", _loss_by_rate(found)),
        page.section("Values", page.table(*found.rows, numeric=range(3), caption="Loss by learning rate")),
    )


def _loss_by_rate(found: LrRange) -> Html:
    """The loss and its average over the logarithm of the rate, with the suggestion and where it diverges."""
    highest = 2 * found.smoothed[0]
    decades = [math.log10(lr) for lr in found.lrs]
    shown = [
        (d, min(v, highest), min(s, highest)) for d, v, s in zip(decades, found.losses, found.smoothed, strict=True)
    ]
    finite = [value for _, *pair in shown for value in pair if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    left, right, bottom = 60, _WIDTH - 20, _HEIGHT - _BOTTOM

    def x(decade: float) -> float:
        return left + (right - left) * (decade - decades[0]) / ((decades[-1] - decades[0]) or 1.0)

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * (value - low) / ((high - low) or 1.0)

    def line(kind: str, values: Sequence[tuple[float, float]]) -> Html:
        points = "L".join(f"{x(decade):.1f} {y(value):.1f}" for decade, value in values if math.isfinite(value))
        return el("g", {"class": kind}, el("path", {"d": "M" + points}))

    parts = [el("line", {"class": "axis", "x1": left, "x2": right, "y1": bottom, "y2": bottom})]
    for decade in range(math.ceil(decades[0]), math.floor(decades[-1]) + 1):
        parts.append(_tick(x(decade), bottom + 18, f"{10.0**decade:g}"))
    parts += [el("text", {"x": left - 8, "y": f"{y(v):.1f}", "text-anchor": "end"}, fmt.number(v)) for v in (low, high)]
    parts.append(_tick((left + right) / 2, bottom + 38, "learning rate"))
    for rate, text in ((found.suggestion, "suggested"), (found.diverged, "diverges"), (found.recipe_lr, "recipe")):
        if rate is not None and found.lrs[0] <= rate <= found.lrs[-1]:
            at = f"{x(math.log10(rate)):.1f}"
            parts.append(el("line", {"class": "axis", "x1": at, "x2": at, "y1": _TOP, "y2": bottom}))
            parts.append(_tick(float(at), _TOP + (12 if text == "recipe" else -8), f"{text} {rate:.2g}"))
    label = f"Loss by learning rate. {'; '.join(found.lines)}"
    curves = [
        line("trial pruned", [(decade, value) for decade, value, _ in shown]),
        line("trial kept", [(decade, value) for decade, _, value in shown]),
    ]
    svg = el("svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "role": "img", "aria-label": label}, *parts, *curves)
    return el("figure", {"class": "panel parallel"}, el("div", {"class": "scroll"}, svg))


def _tick(x: float, y: float, text: str) -> Html:
    return el("text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": "middle"}, text)

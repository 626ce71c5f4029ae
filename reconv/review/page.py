"""The page of a review: every finding with its image, to accept or reject; the decisions are downloaded as a list."""

from __future__ import annotations

import hashlib
import io
import json
from base64 import b64encode
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from PIL import Image

from reconv.core.errors import DataError
from reconv.data.inspect.draw_boxes import BAD, GOOD, NEUTRAL, DrawnBox, draw_boxes
from reconv.report import page
from reconv.report.markup import Html, data_block, el, join
from reconv.review.copies import sample_image
from reconv.review.findings import AUTOMATIC, COLUMNS, KINDS, Kind, ReviewFinding, as_row
from reconv.review.images import ReviewedImages
from reconv.review.run import LIKELY, LIST_FILE, Review

_SIDE_PX, _BOX_SIDE_PX = 220, 420
_MAX_PNG_PX = 64  # smaller images are stored as they are
_INTROS: dict[Kind, str] = {
    "label": "The score is the probability that the label is wrong. Accept to relabel the image; change the class in "
    "the field, or empty it to leave the image out.",
    "leak": "The same picture in both splits makes the validation result too good. Accept to leave out the one in "
    "training.",
    "copy": "The same picture twice, re-encoded, resized or cropped. Accept to leave out the smaller one.",
    "box": "What a detector sees otherwise: orange as annotated, green as detected. Accept to leave out the image "
    "until its boxes are corrected, for example in Label Studio (--export label-studio).",
    "outlier": "Unlike all other images. Accept to leave the image out.",
    "unreadable": "These files do not decode. Accept to leave them out.",
}
_KEYS = (("J", "next"), ("K", "previous"), ("A", "accept"), ("R", "reject"), ("U", "undo"), ("C", "change the class"))


def render(review: Review, limit: int) -> str:
    """The page, with the first `limit` findings of each kind; the list has all."""
    shown = [finding for kind in KINDS for finding in _of_kind(review, kind)[:limit]]
    rows = [as_row(review.images, finding) for finding in review.findings]
    order = {id(finding): number for number, finding in enumerate(review.findings)}
    accepted = {order[id(finding)] for finding in review.accepted}
    digest = hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()
    content = {
        "id": digest,
        "columns": COLUMNS,
        "rows": [{**row, "action": ""} for row in rows],
        "classes": review.images.class_names,
        "automatic": AUTOMATIC,
        "accepted": sorted(accepted),
    }
    block = Html(data_block(content).replace("<script ", '<script id="review-data" ', 1))
    sections = [_section(review, kind, shown, order, limit) for kind in KINDS]
    return page.document(
        f"{review.source} · Reconv data review",
        _header(review),
        _cards(review),
        _controls(),
        *sections,
        _classes(review),
        el("datalist", {"id": "classes"}, *(el("option", {"value": name}) for name in review.images.class_names)),
        block,
        script=_asset("review.js"),
        style=_asset("review.css"),
    )


def _asset(name: str) -> str:
    return (resources.files("reconv.review") / "assets" / name).read_text(encoding="utf-8")


def _of_kind(review: Review, kind: Kind) -> list[ReviewFinding]:
    return [finding for finding in review.findings if finding.kind == kind]


def _header(review: Review) -> Html:
    counts = [f"{len(d):,} {split}" for split, d in review.images.datasets.items()]
    facts = [
        ("images", ", ".join(counts)),
        ("classes", f"{len(review.images.class_names):,}"),
        ("evidence", review.evidence.method),
        ("took", f"{review.wall_s:,.0f} s"),
    ]
    items = [el("li", None, el("span", None, name), " ", value) for name, value in facts]
    notes = [el("p", {"class": "about"}, note) for note in review.evidence.notes]
    return page.header(
        "data review",
        review.source,
        el("ul", {"class": "facts"}, *items),
        *notes,
        page.command("then train", review.train_command(Path("corrections.csv"))),
    )


def _cards(review: Review) -> Html:
    counts = review.counts()
    estimate = "" if review.scores is None else f"estimated in all: {review.scores.num_wrong:,}"
    likely = f"with a score of {LIKELY:g} or more; {estimate}" if estimate else "not judged"
    short = sum(bool(row.shortage) for row in review.classes)
    return el(
        "dl",
        {"class": "cards"},
        page.card("Wrong labels", f"{counts['label']:,}", likely),
        page.card("Leaks", f"{counts['leak']:,}", "the same picture in both splits"),
        page.card("Near duplicates", f"{counts['copy']:,}", "within a split"),
        page.card("Other", f"{counts['box'] + counts['outlier'] + counts['unreadable']:,}",
                  f"{counts['box']:,} boxes, {counts['outlier']:,} outliers, {counts['unreadable']:,} unreadable"),
        page.card("Short classes", f"{short:,}", f"of {len(review.classes):,}"),
    )  # fmt: skip


def _controls() -> Html:
    keys = join(join([el("kbd", None, key), f" {text} "]) for key, text in _KEYS)
    threshold = {"id": "threshold", "type": "number", "min": 0, "max": 1, "step": 0.05, "value": 0.9}
    return el(
        "div",
        {"class": "controls"},
        el("button", {"type": "button", "class": "download"}, "Download corrections.csv"),
        el("label", None, "score from ", el("input", threshold)),
        el("button", {"type": "button", "id": "accept-above"}, "Accept these"),
        el("button", {"type": "button", "id": "hide-decided", "aria-pressed": "false"}, "Hide decided"),
        el("label", None, keys),
        el("span", {"class": "progress", "role": "status"}, ""),
    )


def _section(review: Review, kind: Kind, shown: Sequence[ReviewFinding], order: dict[int, int], limit: int) -> Html:
    findings = [finding for finding in shown if finding.kind == kind]
    if not findings:
        return Html("")
    total = len(_of_kind(review, kind))
    more = f" The first {limit:,} of {total:,}; {LIST_FILE} has all." if total > len(findings) else ""
    figures = [_figure(review.images, finding, order[id(finding)]) for finding in findings]
    wide = " wide" if kind in ("leak", "copy", "box") else ""
    body = el("div", {"class": f"findings{wide}"}, *figures)
    return page.section(f"{KINDS[kind]} ({total:,})", body, intro=_INTROS[kind] + more)


def _figure(images: ReviewedImages, finding: ReviewFinding, number: int) -> Html:
    pictures = [_picture(images, finding.row, finding)]
    if finding.other is not None:
        pictures.append(_picture(images, finding.other, None))
    change = {
        "label": join([el("del", None, finding.given), " → ", el("strong", None, finding.label or "leave out")]),
        "box": join([finding.given or "no box", " → ", el("strong", None, finding.label or "no box")]),
    }.get(finding.kind, el("strong", None, "leave out"))
    button = {"type": "button", "aria-pressed": "false"}
    classes = {"list": "classes", "value": finding.label, "aria-label": "class", "placeholder": "leave out"}
    field = [el("input", classes)] if finding.kind == "label" else []
    return el(
        "figure",
        {"class": "finding", "data-n": number, "tabindex": 0},
        el("div", {"class": "pictures"}, *pictures),
        el("div", {"class": "change"}, el("span", {"class": "score"}, f"{finding.score:.2f}"), change),
        el("p", {"class": "path"}, images.paths[finding.row]),
        el("p", {"class": "note"}, finding.note),
        el(
            "div",
            {"class": "actions"},
            el("button", {**button, "class": "accept"}, "Accept"),
            el("button", {**button, "class": "reject"}, "Reject"),
            *field,
        ),
    )


def _picture(images: ReviewedImages, row: int, finding: ReviewFinding | None) -> Html:
    split = images.split(row)
    caption = split if images.has_boxes else f"{split}, {images.class_names[images.labels[row]]}"
    uri = image_uri(images, row, finding)
    small = el("small", None, caption)
    if uri is None:
        return el("div", {"class": "gone"}, "cannot be shown", small)
    return el("div", None, el("img", {"src": uri[0], "alt": "", "class": uri[1] and "crisp", "loading": "lazy"}), small)


def image_uri(images: ReviewedImages, row: int, finding: ReviewFinding | None) -> tuple[str, bool] | None:
    """An image as a data URI, and whether it is so small that its pixels are shown; None if it cannot be read."""
    try:
        image = sample_image(images.sample(row))
    except DataError:
        return None
    is_small = max(image.size) <= _MAX_PNG_PX
    if finding is not None and finding.box is not None:
        image = _with_boxes(image, finding)
    side = _SIDE_PX if finding is None or finding.box is None else _BOX_SIDE_PX
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    if is_small:
        image.save(content, "PNG")
    else:
        image.save(content, "JPEG", quality=82)
    kind = "png" if is_small else "jpeg"
    return f"data:image/{kind};base64,{b64encode(content.getvalue()).decode()}", is_small


def _with_boxes(image: Image.Image, finding: ReviewFinding) -> Image.Image:
    box = finding.box
    assert box is not None
    detected = box.box_xyxy if box.problem == "missing" else box.detected_xyxy
    drawn = [DrawnBox(detected, finding.label, GOOD)] if detected is not None else []
    if box.problem != "missing":
        drawn.append(DrawnBox(box.box_xyxy, finding.given, BAD))
    others = [tuple(corners) for corners in box.truth.boxes_xyxy.tolist() if tuple(corners) != box.box_xyxy]
    return draw_boxes(image, [*drawn, *(DrawnBox(corners, "", NEUTRAL) for corners in others)])


def _classes(review: Review) -> Html:
    def count(number: int | None) -> str:
        return "" if number is None else f"{number:,}"

    rows = [
        [
            row.name,
            count(row.num_train),
            count(row.num_val),
            count(row.num_wrong),
            "" if row.agreement is None else f"{100 * row.agreement:.1f} %",
            row.shortage,
        ]
        for row in review.classes
    ]
    unit = "boxes" if review.images.has_boxes else "images"
    head = ["class", f"training {unit}", f"validation {unit}", "likely wrong", "labels predicted", "short of images"]
    intro = "Labels predicted: the share of a class's labels that networks predict which did not see the image."
    return page.section("Classes", page.table(head, rows, (1, 2, 3, 4), is_sortable=True), intro=intro)

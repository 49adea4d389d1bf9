"""What the model gets right and wrong: accuracy by class, what is taken for what, and pictures of mistakes."""

import base64
import binascii
from collections.abc import Sequence

from megabatch.report import numbers as figures
from megabatch.report import svg
from megabatch.report.html import Markup, tag
from megabatch.report.svg import Frame, Scale, figure, table
from megabatch.report.view import RunView
from megabatch.runs.records import Confusion, Example, Mistakes
from megabatch.text import one_line

FEW_CLASSES = 24  # all of which have a row of their own
ENDS = 10  # of many classes, the best and the worst
LARGEST_MATRIX = 24
TOP_CONFUSIONS = 20
FIRST_CONFUSIONS = 6
LONGEST_NAME = 28
ROW_PX = 22
BEGINNINGS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}  # of pictures that a run keeps
MOST_PICTURE_CHARACTERS = 360_000  # in all, so that the page stays below a megabyte
HISTOGRAM_BINS = 20


def class_top1(view: RunView) -> list[tuple[int, float]]:
    """The classes that were tested, and their accuracy."""
    shares = view.last_evaluation.class_top1 if view.last_evaluation else []
    return [(number, share) for number, share in enumerate(shares) if share is not None]


def short_name(view: RunView, number: int) -> str:
    return one_line(view.class_name(number), LONGEST_NAME)


def class_charts(view: RunView) -> list[Markup | None]:
    """Accuracy by class and what is taken for what; of many classes their distribution, and both ends of it."""
    found = sorted(class_top1(view), key=lambda row: -row[1])
    if len(found) < 2:
        return [confusion_chart(view)]
    if len(found) <= FEW_CLASSES:
        return [
            bars("classes", "By class", "Top-1 of every class, the best first.", view, found),
            confusion_chart(view),
        ]
    return [
        histogram(found),
        confusion_chart(view),
        bars("classes-worst", f"The {ENDS} worst classes", "Top-1, the worst first.", view, found[::-1][:ENDS]),
        bars("classes-best", f"The {ENDS} best classes", "Top-1, the best first.", view, found[:ENDS]),
    ]


def bars(key: str, title: str, about: str, view: RunView, rows: Sequence[tuple[int, float]]) -> Markup:
    """A row for each class: its name over the bar, so that long names have room on a phone too."""
    parts = []
    for place, (number, share) in enumerate(rows):
        top = place * (ROW_PX + 12)
        tip = f"{short_name(view, number)}: {figures.accuracy(share)}{tested(view, number)}"
        parts.append(svg.label(0, top + 11, short_name(view, number), "start"))
        parts.append(svg.label(1, top + 11, figures.accuracy(share), "end"))
        parts.append(svg.box(0, top + 17, 1, 8, "lane"))
        parts.append(svg.box(0, top + 17, share, 8, "rank", tip))
    numbers = table(
        ("class", "top-1", "images"),
        [(short_name(view, number), figures.accuracy(share), count_of(view, number)) for number, share in rows],
    )
    height_px = len(rows) * (ROW_PX + 12)
    drawing = svg.plot(f"{key}-plot", title, f"Accuracy of {len(rows)} classes.", height_px, *parts, style="flush")
    return figure(key, title, about, drawing, numbers=numbers)


def count_of(view: RunView, number: int) -> str:
    counts = view.mistakes.class_counts if view.mistakes else []
    return f"{counts[number]:,}" if number < len(counts) else figures.NOTHING


def tested(view: RunView, number: int) -> str:
    text = count_of(view, number)
    return "" if text == figures.NOTHING else f" of {text} images"


def histogram(found: Sequence[tuple[int, float]]) -> Markup:
    counts = [0] * HISTOGRAM_BINS
    for _, share in found:
        counts[min(HISTOGRAM_BINS - 1, int(share * HISTOGRAM_BINS))] += 1
    highest = max(counts)
    frame = Frame(
        Scale(0, 1, [(tick / 4, f"{25 * tick} %") for tick in range(5)]),
        Scale(0, highest, [(0, "0"), (highest, f"{highest:,}")]),
    )
    spans = [
        f"{100 * place // HISTOGRAM_BINS} to {100 * (place + 1) // HISTOGRAM_BINS} %" for place in range(len(counts))
    ]
    drawing = svg.histogram(
        "classes-histogram-plot",
        "Distribution over classes",
        f"How many of {len(found):,} classes have which accuracy.",
        frame,
        counts,
        [f"{figures.plural(number, 'class', 'classes')}: {span}" for span, number in zip(spans, counts, strict=True)],
    )
    rows = [(span, f"{number:,}") for span, number in zip(spans, counts, strict=True)]
    about = f"How many of the {len(found):,} classes have which top-1."
    return figure("classes", "Distribution over classes", about, drawing, numbers=table(("top-1", "classes"), rows))


def confusion_chart(view: RunView) -> Markup | None:
    mistakes = view.mistakes
    if not mistakes or not mistakes.confusions:
        return None
    size = len(mistakes.class_counts)
    pairs = [pair for pair in mistakes.confusions if max(pair.label, pair.predicted) < size]
    numbers = pair_table(view, mistakes, pairs)
    if 2 <= size <= LARGEST_MATRIX:
        return figure(
            "confusion",
            "Confusion matrix",
            "Rows: what an image shows; columns, in the same order: what it was taken for. The diagonal is right.",
            matrix(view, mistakes, pairs),
            numbers=numbers,
        )
    shown = pair_table(view, mistakes, pairs[:FIRST_CONFUSIONS])
    about = "Pairs of classes, the most frequent first."
    return figure("confusion", "Taken for each other", about, shown, numbers=numbers)


def pair_table(view: RunView, mistakes: Mistakes, pairs: Sequence[Confusion]) -> Markup:
    rows = []
    for label, predicted, number in ((pair.label, pair.predicted, pair.count) for pair in pairs[:TOP_CONFUSIONS]):
        of = mistakes.class_counts[label]
        share = figures.percent(number / of, 1) if of else figures.NOTHING
        rows.append((short_name(view, label), short_name(view, predicted), f"{number:,}", share))
    return table(("shows", "taken for", "images", "of its class"), rows, left=(0, 1))


def matrix(view: RunView, mistakes: Mistakes, pairs: Sequence[Confusion]) -> Markup:
    """Squares of a shade for each share of the row's images.  The diagonal is what no pair has."""
    size = len(mistakes.class_counts)
    counts = [[0] * size for _ in range(size)]
    for pair in pairs:
        counts[pair.label][pair.predicted] += pair.count
    width, height_px = 1 / size, 26 if size <= 12 else 20
    boxes = []
    for row, of in enumerate(mistakes.class_counts):
        counts[row][row] = max(0, of - sum(counts[row]))
        for column, number in enumerate(counts[row]):
            if not number or not of:
                continue
            share = min(1.0, number / of)
            kind = "heat-right" if row == column else "heat-wrong"
            step = min(8, 1 + int((share if row == column else min(1.0, 4 * share)) * 8))
            tip = (
                f"{short_name(view, row)} taken for {short_name(view, column)}: {number:,} of {of:,}, "
                f"{figures.percent(share, 1)}"
            )
            boxes.append(svg.box(column * width, row * height_px, width, height_px, f"{kind} heat-{step}", tip))
    names = [
        tag("text", one_line(view.class_name(row), 16), x=-8, y=row * height_px + height_px / 2 + 4, text_anchor="end")
        for row in range(size)
    ]
    return svg.plot(
        "confusion-plot",
        "Confusion matrix",
        f"{size} classes; {sum(pair.count for pair in pairs):,} of {sum(mistakes.class_counts):,} images are wrong.",
        size * height_px,
        *boxes,
        *names,
        style="names",
    )


def type_of(picture: str) -> str | None:
    """Of a picture in base64, as the page takes it over; None if it is none."""
    try:
        content = base64.b64decode(picture, validate=True)
    except (binascii.Error, ValueError):
        return None
    return next((kind for beginning, kind in BEGINNINGS.items() if content.startswith(beginning)), None)


def pictures(view: RunView) -> Markup | None:
    if not view.mistakes:
        return None
    shown, room = [], MOST_PICTURE_CHARACTERS
    for example in view.mistakes.examples:
        kind = type_of(example.picture)
        if kind and len(example.picture) <= room:
            room -= len(example.picture)
            shown.append(picture(view, example, kind))
    if not shown:
        return None
    return tag(
        "div",
        tag("h3", "Most confident mistakes"),
        tag("p", f"Test images after step {view.mistakes.step:,}, of which the model was most sure.", class_="about"),
        tag("ul", *shown, class_="pictures"),
        class_="block",
        id="mistakes",
    )


def picture(view: RunView, example: Example, kind: str) -> Markup:
    label, predicted = short_name(view, example.label), short_name(view, example.predicted)
    sure = figures.percent(example.confidence, 1)
    return tag(
        "li",
        tag(
            "img",
            src=f"data:{kind};base64,{example.picture}",
            alt=f"Test image {example.sample}, {label}, taken for {predicted} with {sure}",
        ),
        tag("span", label, class_="was"),
        tag("span", f"taken for {predicted}", class_="taken"),
        tag("span", sure, class_="taken"),
    )

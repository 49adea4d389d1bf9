"""The section on mistakes: accuracy by class, the confusion matrix, and images that were classified wrongly."""

import base64
import binascii
from collections.abc import Sequence

from megabatch.io import numbers as fmt
from megabatch.report import svg
from megabatch.report.html import Markup, tag
from megabatch.report.learning import Along, Series, line_chart, percent_label
from megabatch.report.svg import SHARES, Frame, Scale, chart, table
from megabatch.report.view import Curve, RunView
from megabatch.runs.records import Confusion, Example, Mistakes
from megabatch.text import one_line

FEW_CLASSES = 24  # up to this many classes have a row each
ENDS = 10  # with more classes, the best and the worst are shown
LARGEST_MATRIX = 24
TOP_CONFUSIONS = 20
FIRST_CONFUSIONS = 6
LONGEST_NAME = 28
ROW_PX = 22
SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
MOST_PICTURE_CHARACTERS = 360_000  # in total, so that the page stays below a megabyte
HISTOGRAM_BINS = 20


def class_top1(view: RunView) -> list[tuple[int, float]]:
    """Return the accuracy of each class that has test images."""
    shares = view.last_evaluation.class_top1 if view.last_evaluation else []
    return [(number, share) for number, share in enumerate(shares) if share is not None]


def share_name(view: RunView) -> str:
    last = view.last_evaluation
    return "Recall" if last and last.mean_average_precision is not None else "Top-1"


def measures(view: RunView) -> Markup | None:
    """Return a table of the measures of the last evaluation that are means over classes."""
    last = view.last_evaluation
    if not last or last.f1 is None:
        return None
    rows = [
        ("precision", fmt.accuracy(last.precision)),
        ("recall (balanced accuracy)", fmt.accuracy(last.balanced_accuracy)),
        ("F1", fmt.accuracy(last.f1)),
    ]
    about = "Means over the classes that have test images, in the last evaluation."
    return chart("measures", "Precision and recall", about, table(("measure", "value"), rows))


CONFIDENCE = Along("confidence", "confidence", lambda value: f"{fmt.number(value, 3)} %")


def reliability_chart(view: RunView) -> Markup | None:
    """Draw the accuracy of predictions by their confidence, beside that of a calibrated model."""
    last = view.last_evaluation
    bins = [each for each in last.reliability if each.count] if last else []
    if not last or not bins or last.ece is None:
        return None
    found = Curve([100 * each.confidence for each in bins], [100 * each.accuracy for each in bins])
    series = [
        Series("accuracy", "series-0", found, dotted=True),
        Series("calibrated", "series-1", Curve([0.0, 100.0], [0.0, 100.0])),
    ]
    about = (
        f"Accuracy of predictions by their confidence, in {len(last.reliability)} bins. Calibration error (ECE): "
        f"{fmt.percent(last.ece, 1)}."
    )
    return line_chart(
        "reliability", "Reliability", about, series, x=CONFIDENCE, y_label=percent_label, zero=True, unit="%"
    )


def short_name(view: RunView, number: int) -> str:
    return one_line(view.class_name(number), LONGEST_NAME)


def class_charts(view: RunView) -> list[Markup | None]:
    """Return charts of accuracy by class and of confusions.  With many classes, the distribution and both ends."""
    found, measure = sorted(class_top1(view), key=lambda row: -row[1]), share_name(view)
    if len(found) < 2:
        return [confusion_chart(view), measures(view), reliability_chart(view)]
    if len(found) <= FEW_CLASSES:
        return [
            bars("classes", "Accuracy by class", f"{measure} of each class, best first.", view, found),
            confusion_chart(view),
            measures(view),
            reliability_chart(view),
        ]
    return [
        histogram(found, measure.lower()),
        confusion_chart(view),
        bars(
            "classes-worst",
            f"The {ENDS} worst classes",
            f"{measure}, worst first.",
            view,
            found[::-1][:ENDS],
        ),
        bars("classes-best", f"The {ENDS} best classes", f"{measure}, best first.", view, found[:ENDS]),
        measures(view),
        reliability_chart(view),
    ]


def bars(key: str, title: str, about: str, view: RunView, rows: Sequence[tuple[int, float]]) -> Markup:
    """Draw a bar per class with the name above it, so that long names fit on a phone."""
    parts = []
    for place, (number, share) in enumerate(rows):
        top = place * (ROW_PX + 12)
        tip = f"{short_name(view, number)}: {fmt.accuracy(share)}{tested(view, number)}"
        parts.append(svg.label(0, top + 11, short_name(view, number), "start"))
        parts.append(svg.label(1, top + 11, fmt.accuracy(share), "end"))
        parts.append(svg.box(0, top + 17, 1, 8, "lane"))
        parts.append(svg.box(0, top + 17, share, 8, "rank", tip))
    numbers = table(
        ("class", share_name(view).lower(), "images"),
        [(short_name(view, number), fmt.accuracy(share), count_of(view, number)) for number, share in rows],
    )
    height_px = len(rows) * (ROW_PX + 12)
    drawing = svg.plot(f"{key}-plot", title, f"Accuracy of {len(rows)} classes.", height_px, *parts, style="flush")
    return chart(key, title, about, drawing, numbers=numbers)


def count_of(view: RunView, number: int) -> str:
    counts = view.mistakes.class_counts if view.mistakes else []
    return f"{counts[number]:,}" if number < len(counts) else fmt.MISSING


def tested(view: RunView, number: int) -> str:
    text = count_of(view, number)
    return "" if text == fmt.MISSING else f" of {text} images"


def histogram(found: Sequence[tuple[int, float]], measure: str) -> Markup:
    counts = [0] * HISTOGRAM_BINS
    for _, share in found:
        counts[min(HISTOGRAM_BINS - 1, int(share * HISTOGRAM_BINS))] += 1
    highest = max(counts)
    frame = Frame(SHARES, Scale(0, highest, [(0, "0"), (highest, f"{highest:,}")]))
    bins = [f"{100 * n // HISTOGRAM_BINS} to {100 * (n + 1) // HISTOGRAM_BINS} %" for n in range(HISTOGRAM_BINS)]
    about = f"Number of classes by their {measure}, of {len(found):,} classes."
    return svg.histogram_chart("classes", "Distribution over classes", about, frame, counts, bins, (measure, "classes"))


def confusion_chart(view: RunView) -> Markup | None:
    mistakes = view.mistakes
    if not mistakes or not mistakes.confusions:
        return None
    size = len(mistakes.class_counts)
    pairs = [pair for pair in mistakes.confusions if max(pair.label, pair.predicted) < size]
    numbers = pair_table(view, mistakes, pairs)
    if 2 <= size <= LARGEST_MATRIX:
        return chart(
            "confusion",
            "Confusion matrix",
            "Rows: true class; columns, in the same order: predicted class. Predictions on the diagonal are correct.",
            matrix(view, mistakes, pairs),
            numbers=numbers,
        )
    shown = pair_table(view, mistakes, pairs[:FIRST_CONFUSIONS])
    about = "Pairs of true and predicted class, most frequent first."
    return chart("confusion", "Most frequent confusions", about, shown, numbers=numbers)


def pair_table(view: RunView, mistakes: Mistakes, pairs: Sequence[Confusion]) -> Markup:
    rows = []
    for label, predicted, number in ((pair.label, pair.predicted, pair.count) for pair in pairs[:TOP_CONFUSIONS]):
        of = mistakes.class_counts[label]
        share = fmt.percent(number / of, 1) if of else fmt.MISSING
        rows.append((short_name(view, label), short_name(view, predicted), f"{number:,}", share))
    return table(("true class", "predicted", "images", "share of class"), rows, left=(0, 1))


def matrix(view: RunView, mistakes: Mistakes, pairs: Sequence[Confusion]) -> Markup:
    """Draw squares shaded by their share of the row.  Images in no confusion are on the diagonal."""
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
                f"{short_name(view, row)} predicted as {short_name(view, column)}: {number:,} of {of:,}, "
                f"{fmt.percent(share, 1)}"
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
    """Return the MIME type of a picture in base64, or None if it is neither PNG nor JPEG."""
    try:
        content = base64.b64decode(picture, validate=True)
    except (binascii.Error, ValueError):
        return None
    return next((kind for signature, kind in SIGNATURES.items() if content.startswith(signature)), None)


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
        tag(
            "p",
            f"Test images classified wrongly with the highest confidence, after step {view.mistakes.step:,}.",
            class_="about",
        ),
        tag("ul", *shown, class_="pictures"),
        class_="block",
        id="mistakes",
    )


def picture(view: RunView, example: Example, kind: str) -> Markup:
    label, predicted = short_name(view, example.label), short_name(view, example.predicted)
    confidence = fmt.percent(example.confidence, 1)
    return tag(
        "li",
        tag(
            "img",
            src=f"data:{kind};base64,{example.picture}",
            alt=f"Test image {example.sample}, {label}, predicted as {predicted} with {confidence}",
        ),
        tag("span", label, class_="was"),
        tag("span", f"predicted: {predicted}", class_="taken"),
        tag("span", confidence, class_="taken"),
    )

"""The page of several runs: overlaid curves and tables of differences."""

from collections.abc import Sequence

from megabatch.io import numbers as fmt
from megabatch.report.html import Markup, join, tag
from megabatch.report.learning import EPOCHS, WALL_TIME, Along, Series, in_percent, line_chart, percent_label
from megabatch.report.settings import UNSET, shown
from megabatch.report.svg import Key, chart, grid, legend, section, table
from megabatch.report.time_charts import mean_bar, present
from megabatch.report.verdict import findings_of, headline
from megabatch.report.view import PARTS, Curve, RunView, means
from megabatch.runs.comparison import Difference, RunComparison, compare
from megabatch.runs.intervals import Interval

COLOURS = 6  # each with a line style; further runs repeat them


def style_of(place: int) -> str:
    return f"series-{place % COLOURS} dash-{place % COLOURS}"


def overlay(views: Sequence[RunView]) -> list[Markup | None]:
    compared = compare([view.path for view in views])
    return [
        section("verdict", "Results", verdicts(views), results(views), seed_table(compared)),
        differences_section(views, compared),
        section("learning", "Learning", curves(views)),
        section("time", "Where the time goes", bars(views)),
    ]


def verdicts(views: Sequence[RunView]) -> Markup:
    rows = []
    for place, view in enumerate(views):
        key = legend([Key(style_of(place), view.name)])
        rows.append(tag("li", key, tag("p", headline(view, findings_of(view)))))
    return tag("ul", *rows, class_="verdicts")


def results(views: Sequence[RunView]) -> Markup:
    rows: list[tuple[str, ...]] = []
    for name, show in (
        ("status", lambda v: v.status),
        ("top-1", lambda v: fmt.accuracy(v.last_evaluation.top1 if v.last_evaluation else None)),
        ("best top-1", lambda v: fmt.accuracy(max(v.evaluations.of["top1"], default=None))),
        ("test loss", lambda v: fmt.number(v.last_evaluation.test_loss if v.last_evaluation else None)),
        ("steps", lambda v: fmt.count(v.num_steps)),
        ("epochs", lambda v: fmt.number(v.last_step.epoch if v.last_step else None)),
        ("wall time", lambda v: fmt.duration(v.wall_s)),
        ("time to target", lambda v: fmt.duration(v.summary.time_to_target_s if v.summary else None)),
        ("images/s", lambda v: fmt.count(v.summary.images_per_s if v.summary else None)),
        ("ranks", lambda v: fmt.count(v.num_ranks)),
        ("all-reduce", lambda v: v.tuning.algorithms if v.tuning else fmt.MISSING),
    ):
        cells = [show(view) for view in views]
        if any(cell != fmt.MISSING for cell in cells):
            rows.append((name, *cells))
    return table(("", *(view.name for view in views)), rows)


def difference_table(views: Sequence[RunView], found: Sequence[Difference]) -> Markup | None:
    if not found:
        return None
    rows = [(one.name, *(UNSET if value is None else shown(value) for value in one.values)) for one in found]
    return table(("", *(view.name for view in views)), rows, left=range(len(views) + 1))


def differences_section(views: Sequence[RunView], compared: RunComparison) -> Markup | None:
    """List the differences that `megabatch compare` finds."""
    settings = difference_table(views, compared.settings) or tag("p", "All settings are equal.", class_="about")
    environment = difference_table(views, compared.environment)
    block = tag("div", tag("h3", "Environment"), environment, class_="block") if environment else None
    return section("differences", "Differences", settings, block)


def seed_table(compared: RunComparison) -> Markup | None:
    """Return means over seeds, if some runs differ only in their seed."""
    if all(len(group.seeds) < 2 for group in compared.groups):
        return None
    rows = []
    for group in compared.groups:
        listed = ", ".join(f"{name}={shown(value)}" for name, value in group.settings.items() if value is not None)
        gap = group.gap_to_first
        rows.append(
            (
                listed or "all",
                ", ".join(map(str, group.seeds)) or fmt.MISSING,
                fmt.accuracy(group.top1.mean) if group.top1 else fmt.MISSING,
                interval_text(group.top1.interval if group.top1 else None),
                f"{100 * gap.size:+.2f}" if gap else fmt.MISSING,
                interval_text(gap.interval if gap else None),
            )
        )
    head = ("settings", "seeds", "top-1", "95 % interval", "gap to the first, points", "95 % interval")
    return tag("div", tag("h3", "Over seeds"), table(head, rows, left=(0, 1)), class_="block")


def interval_text(interval: Interval | None) -> str:
    return f"{100 * interval.low:.2f} to {100 * interval.high:.2f}" if interval else fmt.MISSING


def curves(views: Sequence[RunView]) -> Markup | None:
    def of_steps(name: str, smoothed: bool = True) -> list[Series]:
        found = [view.steps.curve(name, "epoch") for view in views]
        return named(views, [means(curve) if smoothed and len(curve.y) else curve for curve in found])

    def of_evaluations(name: str, x: Along) -> list[Series]:
        found = [in_percent(view.evaluations.curve(name, x.field)) for view in views]
        return [series._replace(dotted=True) for series in named(views, found)]

    def top1_chart(key: str, x: Along) -> Markup | None:
        series, title = of_evaluations("top1", x), f"Top-1 by {x.name}"
        return line_chart(key, title, "Test images.", series, x=x, y_label=percent_label, unit="%")

    speeds = of_steps("images_per_s")
    about = "Images per second during training steps."
    return grid(
        line_chart("loss", "Training loss", "Means of neighbouring steps.", of_steps("loss"), x=EPOCHS, clip=True),
        top1_chart("accuracy", EPOCHS),
        top1_chart("accuracy-time", WALL_TIME),
        line_chart("throughput", "Throughput", about, speeds, x=EPOCHS, y_label=fmt.count, zero=True, clip=True),
        line_chart("lr", "Learning rate", "", of_steps("lr", smoothed=False), x=EPOCHS, zero=True),
    )


def named(views: Sequence[RunView], curves: Sequence[Curve]) -> list[Series]:
    return [
        Series(view.name, style_of(place), curve) for place, (view, curve) in enumerate(zip(views, curves, strict=True))
    ]


def bars(views: Sequence[RunView]) -> Markup | None:
    """Draw the time breakdown of each run as a bar."""
    rows, parts = [], set()
    for place, view in enumerate(views):
        seconds = view.times.totals()
        if not present(seconds):
            continue
        parts |= {part.key for part in present(seconds)}
        name = join((view.name, ", ", fmt.duration(view.wall_s)))
        rows.append(
            tag(
                "div",
                tag("p", name, class_="about"),
                mean_bar(f"bar-{place}", f"Time breakdown of {view.name}", seconds, view.num_steps),
            )
        )
    keys = [Key(f"part-{part.key}", part.name, form="box") for part in PARTS if part.key in parts]
    stacked = tag("div", *rows, class_="stacked")
    return chart("time-bars", "Shares of the wall time", "", stacked, keys=keys, wide=True) if rows else None

"""Several runs on one page: their curves over each other, and a table of what differs."""

from collections.abc import Sequence

from megabatch.report import numbers as figures
from megabatch.report.html import Markup, join, tag
from megabatch.report.learning import EPOCHS, WALL_TIME, Along, Series, in_percent, line_chart, percent_label
from megabatch.report.settings import UNSET, shown
from megabatch.report.svg import Key, figure, grid, legend, section, table
from megabatch.report.time_charts import mean_bar, present
from megabatch.report.verdict import findings_of, headline
from megabatch.report.view import PARTS, Curve, RunView, means
from megabatch.runs.comparison import Difference, RunComparison, compare
from megabatch.runs.intervals import Interval

COLOURS = 6  # with a line style each; beyond that they come again


def style_of(place: int) -> str:
    return f"series-{place % COLOURS} dash-{place % COLOURS}"


def overlay(views: Sequence[RunView]) -> list[Markup | None]:
    compared = compare([view.path for view in views])
    return [
        section("verdict", "What came of them", verdicts(views), results(views), seed_table(compared)),
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
        ("top-1", lambda v: figures.accuracy(v.last_evaluation.top1 if v.last_evaluation else None)),
        ("best top-1", lambda v: figures.accuracy(max(v.evaluations.of["top1"], default=None))),
        ("test loss", lambda v: figures.number(v.last_evaluation.test_loss if v.last_evaluation else None)),
        ("steps", lambda v: figures.count(v.num_steps)),
        ("epochs", lambda v: figures.number(v.last_step.epoch if v.last_step else None)),
        ("wall time", lambda v: figures.seconds(v.wall_s)),
        ("time to target", lambda v: figures.seconds(v.summary.time_to_target_s if v.summary else None)),
        ("images/s", lambda v: figures.count(v.summary.images_per_s if v.summary else None)),
        ("ranks", lambda v: figures.count(v.num_ranks)),
        ("all-reduce", lambda v: v.tuning.algorithms if v.tuning else figures.NOTHING),
    ):
        cells = [show(view) for view in views]
        if any(cell != figures.NOTHING for cell in cells):
            rows.append((name, *cells))
    return table(("", *(view.name for view in views)), rows)


def difference_table(views: Sequence[RunView], found: Sequence[Difference]) -> Markup | None:
    if not found:
        return None
    rows = [(one.name, *(UNSET if value is None else shown(value) for value in one.values)) for one in found]
    return table(("", *(view.name for view in views)), rows, left=range(len(views) + 1))


def differences_section(views: Sequence[RunView], compared: RunComparison) -> Markup | None:
    """As `megabatch compare` finds them."""
    parts = []
    settings = difference_table(views, compared.settings)
    parts.append(settings or tag("p", "No setting differs.", class_="about"))
    environment = difference_table(views, compared.environment)
    if environment:
        parts.append(tag("div", tag("h3", "Environment"), environment, class_="block"))
    return section("differences", "What differs", *parts)


def seed_table(compared: RunComparison) -> Markup | None:
    """Where runs differ in the seed alone."""
    if all(len(group.seeds) < 2 for group in compared.groups):
        return None
    rows = []
    for group in compared.groups:
        told = ", ".join(f"{name}={shown(value)}" for name, value in group.settings.items() if value is not None)
        gap = group.gap_to_first
        rows.append(
            (
                told or "all",
                ", ".join(map(str, group.seeds)) or figures.NOTHING,
                figures.accuracy(group.top1.mean) if group.top1 else figures.NOTHING,
                interval_text(group.top1.interval if group.top1 else None),
                f"{100 * gap.size:+.2f}" if gap else figures.NOTHING,
                interval_text(gap.interval if gap else None),
            )
        )
    head = ("settings", "seeds", "top-1", "95 % interval", "to the first, points", "95 % interval")
    return tag("div", tag("h3", "Over seeds"), table(head, rows, left=(0, 1)), class_="block")


def interval_text(interval: Interval | None) -> str:
    return f"{100 * interval.low:.2f} to {100 * interval.high:.2f}" if interval else figures.NOTHING


def curves(views: Sequence[RunView]) -> Markup | None:
    def of_steps(name: str, smoothed: bool = True) -> list[Series]:
        found = [view.steps.curve(name, "epoch") for view in views]
        return named(views, [means(curve) if smoothed and len(curve.y) else curve for curve in found])

    def of_evaluations(name: str, x: Along) -> list[Series]:
        found = [in_percent(view.evaluations.curve(name, x.field)) for view in views]
        return [series._replace(dotted=True) for series in named(views, found)]

    return grid(
        line_chart("loss", "Training loss", "Mean of neighbouring steps.", of_steps("loss"), x=EPOCHS, clip=True),
        line_chart(
            "accuracy",
            "Top-1 by epoch",
            "Test images.",
            of_evaluations("top1", EPOCHS),
            x=EPOCHS,
            y_label=percent_label,
            unit="%",
        ),
        line_chart(
            "accuracy-time",
            "Top-1 by time",
            "Test images, against wall time.",
            of_evaluations("top1", WALL_TIME),
            x=WALL_TIME,
            y_label=percent_label,
            unit="%",
        ),
        line_chart(
            "throughput",
            "Throughput",
            "Images a second while training.",
            of_steps("images_per_s"),
            x=EPOCHS,
            y_label=figures.count,
            zero=True,
            clip=True,
        ),
        line_chart("lr", "Learning rate", "", of_steps("lr", smoothed=False), x=EPOCHS, zero=True),
    )


def named(views: Sequence[RunView], curves: Sequence[Curve]) -> list[Series]:
    return [
        Series(view.name, style_of(place), curve) for place, (view, curve) in enumerate(zip(views, curves, strict=True))
    ]


def bars(views: Sequence[RunView]) -> Markup | None:
    """A bar for each run, all of them 100 %."""
    rows, parts = [], set()
    for place, view in enumerate(views):
        seconds = view.times.totals()
        if not present(seconds):
            continue
        parts |= {part.key for part in present(seconds)}
        name = join((view.name, ", ", figures.seconds(view.wall_s)))
        rows.append(
            tag(
                "div",
                tag("p", name, class_="about"),
                mean_bar(f"bar-{place}", f"Where the time of {view.name} goes", seconds, view.num_steps),
            )
        )
    keys = [Key(f"part-{part.key}", part.name, form="box") for part in PARTS if part.key in parts]
    return (
        figure("time-bars", "Shares of the wall time", "", tag("div", *rows, class_="stacked"), keys=keys, wide=True)
        if rows
        else None
    )

"""The plots of a study: accuracy of the arms, learning-rate search, and curves over epochs.

Seeds that diverged are never averaged away: such an arm has no mean, and its label has the number of diverged seeds.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from megabatch.experiments.batch_limit import batches_of, is_batch_limit, limit_of
from megabatch.experiments.drawing import GREY, color_of, dash_of, label_ends, mark_log_ticks, to_svg
from megabatch.experiments.evidence import Arm, Curve, SearchRun, Study, slug
from megabatch.experiments.verdict import divergence, gap_words, has_diverged, percents, top1_gap, top1_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 8.0
PLOT_HEIGHT_INCHES = 3.6
ROW_INCHES = 0.42
# Values further below the best are marked at the edge of the axis: to scale, they would compress all others.
ACCURACY_POINTS = 5.0
SEARCH_POINTS, SEARCH_CONTEXT_POINTS = 15.0, 3.0  # context: shown below the best result of the worst arm
MARKERS = (".", "s", "^", "D", "P", "X")  # of momenta, if several are searched
LOG_RATIO = 20.0  # a larger range is drawn on a logarithmic axis


class Plot(Struct, frozen=True):
    name: str  # of its file, after the name of the study
    caption: str
    svg: str


def draw_plots(study: Study) -> list[Plot]:
    """Draw the plots for which the study has values."""
    painters: dict[str, tuple[str, Callable[[Study, Figure], None]]] = {}
    if any(arm.runs for arm in study.arms):
        caption = "top-1 of every seed (dots), mean and 95 % interval (lines)"
        caption += f"; the band is that of {study.baseline}" * (len(study.arms) > 1)
        painters["accuracy"] = caption, draw_accuracy
    if any(arm.tuned for arm in study.arms):
        caption = "top-1 on held-out images against the learning rate; rings mark the chosen rates"
        painters["search"] = caption, draw_search
    if is_batch_limit(study) and limit_of(study).points:
        caption = "epochs to the target against the batch: seeds, the fitted curve, and the forecast of the noise scale"
        painters["epochs"] = caption, draw_epochs
    for name in curve_names(study):
        assert slug(name) not in painters, f"two plots are named {slug(name)!r}"
        caption = f"{name} against epochs, mean and range over seeds"
        painters[slug(name)] = caption, partial(draw_over_epochs, name=name)
    return [Plot(name, caption, to_svg(partial(draw, study))) for name, (caption, draw) in painters.items()]


def curve_names(study: Study) -> list[str]:
    return sorted({name for arm in study.arms for run in arm.runs for name in run.curves})


def draw_accuracy(study: Study, figure: "Figure") -> None:
    """Draw a row for each arm: mean and interval above, seeds below."""
    arms, baseline = study.arms, study.arm(study.baseline)
    figure.set_size_inches(WIDTH_INCHES, 0.9 + ROW_INCHES * len(arms))
    axes = figure.subplots()
    low, high = accuracy_limits(study)
    beside: dict[str, Any] = {"va": "center", "transform": axes.get_yaxis_transform()}
    if len(arms) > 1 and (spread := top1_spread(baseline)) and spread.interval:
        axes.axvspan(spread.interval.low, spread.interval.high, color="#000000", alpha=0.08, lw=0)
    for row, arm in enumerate(arms):
        color, values = color_of(row), sorted(percents(arm))
        shown, beyond = [v for v in values if v >= low], [v for v in values if v < low]
        heights = [row + (0.12, 0.26)[place % 2] for place in range(len(shown))]  # neighbours do not hide each other
        axes.plot(shown, heights, "o", color=color, ms=5, mec="white", mew=0.6, alpha=0.75)
        if spread := top1_spread(arm):
            if spread.interval:
                axes.plot([spread.interval.low, spread.interval.high], [row - 0.12] * 2, color=color, lw=2)
            axes.plot([spread.mean] * 2, [row - 0.28, row + 0.04], color=color, lw=2)
        if beyond:
            axes.plot([low], [row], "<", color=color, ms=6, clip_on=False)
            axes.text(0.03, row, " ".join(f"{value:.1f}" for value in beyond), **beside)
        axes.text(1.02, row, beside_row(study, arm), **beside)
    for row, edge in [*criterion_edges(study), *published_results(study)]:
        axes.plot([edge, edge], [row - 0.42, row + 0.42], color=GREY, lw=1, ls=(0, (2, 1.5)))
    if len(arms) > 1:
        axes.text(1.02, -0.75, "points below the baseline", color=GREY, **beside)
    axes.set_yticks(range(len(arms)), [arm.name for arm in arms])
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.set_xlim(low, high)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    dashed = ["the criterion that an arm's mean must reach"] if criterion_edges(study) else []
    dashed += ["the published result"] if published_results(study) else []
    axes.set_xlabel("top-1, %" + (f"; dashed: {', or '.join(dashed)}" if dashed else ""))


def draw_epochs(study: Study, figure: "Figure") -> None:
    """Draw epochs to the target against the batch."""
    found = limit_of(study)
    figure.set_size_inches(WIDTH_INCHES, PLOT_HEIGHT_INCHES)
    axes = figure.subplots()
    batches = [float(point.batch) for point in found.points]
    low, high = min(batches), max(batches_of(study))
    axes.plot(
        batches, [point.epochs for point in found.points], "o", color=color_of(0), ms=5, mec="white", label="seeds"
    )
    along = [low * (high / low) ** (step / 60) for step in range(61)]
    for row, (label, curve) in enumerate((("fitted", found.curve), ("forecast by noise", found.forecast))):
        if curve:
            drawn = [curve.epochs(batch) for batch in along]
            axes.plot(along, drawn, color=color_of(row + 1), ls=dash_of(row), label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(batches_of(study)), [f"{batch:,}" for batch in sorted(batches_of(study))])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("global batch")
    axes.set_ylabel("epochs to the target")
    axes.legend(frameon=False)


def accuracy_limits(study: Study) -> tuple[float, float]:
    """Return limits around all seeds, intervals and criteria within ACCURACY_POINTS of the best seed."""
    values = [value for arm in study.arms for value in percents(arm)]
    best = max(values, default=0.0)
    for arm in study.arms:
        if (spread := top1_spread(arm)) and spread.interval:
            values += [spread.interval.low, spread.interval.high]
    values += [edge for _, edge in [*criterion_edges(study), *published_results(study)]]
    return with_margin([value for value in values if abs(value - best) <= ACCURACY_POINTS])


def criterion_edges(study: Study) -> list[tuple[int, float]]:
    """Return the row of the arm and the required mean, for each criterion on the gap of means."""
    edges = []
    for criterion in study.criteria:
        spread = top1_spread(study.arm(criterion.baseline))
        if spread and criterion.max_gap_points is not None:
            edges.append((study.arms.index(study.arm(criterion.arm)), spread.mean - criterion.max_gap_points))
    return edges


def published_results(study: Study) -> list[tuple[int, float]]:
    """Return the row of the arm and the published mean."""
    return [(row, 100 * arm.published) for row, arm in enumerate(study.arms) if arm.published is not None]


def draw_search(study: Study, figure: "Figure") -> None:
    """Rates that diverged, or fell out of the axis, are marked beneath it in lanes, one for each arm that has any."""
    figure.set_size_inches(WIDTH_INCHES, PLOT_HEIGHT_INCHES + 0.6)
    axes = figure.subplots()
    axes.set_xscale("log")
    lines = search_lines(study)
    found = [100 * run.top1 for line in lines for run in line.runs if run.top1 is not None]
    bests = [100 * max(top1s) for arm in study.arms if (top1s := [r.top1 for r in arm.tuned if r.top1 is not None])]
    low, high = focus(found, bests, SEARCH_POINTS, SEARCH_CONTEXT_POINTS)
    lane = 0.055 * (high - low)
    num_lanes = 0
    for line in lines:
        color = color_of(line.index)
        tried = [(run.learning_rate, 100 * run.top1) for run in line.runs if run.top1 is not None]
        heights = [y if y >= low else math.nan for _, y in tried]
        style: dict[str, Any] = {"marker": line.marker, "ms": 9 if line.marker == "." else 5, "color": color, "lw": 1.5}
        axes.plot([x for x, _ in tried], heights, dash_of(line.index), label=line.label, **style)
        diverged = [run.learning_rate for run in line.runs if run.top1 is None]
        below = [rate for rate, percent in tried if percent < low]
        if diverged or below:
            num_lanes += 1
        height = low - lane * num_lanes
        axes.plot(diverged, [height] * len(diverged), "x", color=color, ms=6, mew=1.6)
        axes.plot(below, [height] * len(below), "v", color=color, ms=5)
        chosen = [(x, y if y >= low else height) for x, y in tried if x == line.chosen]
        axes.plot([x for x, _ in chosen], [y for _, y in chosen], "o", ms=12, mfc="none", mec=color, mew=1.5)
    if num_lanes:
        axes.axhline(low, color=GREY, lw=0.8)
    axes.set_ylim(low - lane * (num_lanes + 0.7) if num_lanes else low, high)
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= high])
    rates = [run.learning_rate for arm in study.arms for run in arm.tuned]
    mark_log_ticks(axes.xaxis, min(rates), max(rates))
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)
    axes.set_xlabel("learning rate; ring: chosen" + ("; triangle: lower still, cross: diverged" if num_lanes else ""))
    axes.set_ylabel("top-1 on held-out images, %")


class SearchLine(Struct, frozen=True):
    """The learning rates that an arm tried with one momentum, ascending."""

    index: int  # of the arm
    label: str
    marker: str
    runs: list[SearchRun]
    chosen: float | None


def search_lines(study: Study) -> list[SearchLine]:
    lines = []
    for index, arm in enumerate(study.arms):
        momenta = sorted({run.momentum for run in arm.tuned}, key=lambda momentum: momentum or 0.0)
        for marker, momentum in zip(MARKERS, momenta, strict=False):
            runs = sorted((run for run in arm.tuned if run.momentum == momentum), key=lambda run: run.learning_rate)
            label = arm.name if momentum is None else f"{arm.name}, momentum {momentum:g}"
            is_chosen = arm.is_searched and arm.momentum == momentum
            lines.append(SearchLine(index, label, marker, runs, arm.learning_rate if is_chosen else None))
    return lines


def draw_over_epochs(study: Study, figure: "Figure", name: str) -> None:
    figure.set_size_inches(WIDTH_INCHES, PLOT_HEIGHT_INCHES + 0.6)
    axes = figure.subplots()
    curves = [[run.curves[name] for run in arm.runs if name in run.curves] for arm in study.arms]
    found = [y for arm_curves in curves for curve in arm_curves for _, y in curve if y is not None]
    if found and min(found) > 0 and max(found) > LOG_RATIO * min(found):
        axes.set_yscale("log")
        axes.set_ylim(min(found) / 1.3, max(found) * 1.3)
        mark_log_ticks(axes.yaxis, min(found), max(found))
    else:
        axes.set_ylim(*with_margin(found))
    draw_curves(axes, study.arms, curves)
    axes.set_xlabel("epochs")
    axes.set_ylabel(name)


def draw_curves(axes: "Axes", arms: Sequence[Arm], curves: Sequence[Sequence[Curve]]) -> None:
    """Draw the mean and range of each arm; an arm with diverged seeds has a thin line per seed."""
    last = max((x for arm_curves in curves for curve in arm_curves for x, _ in curve), default=1.0)
    axes.set_xlim(0, last)
    ends = []
    for index, (arm, arm_curves) in enumerate(zip(arms, curves, strict=True)):
        color, dash = color_of(index), dash_of(index)
        is_diverged = has_diverged(arm)
        lines = arm_curves if is_diverged else [mean_curve(arm_curves)]
        for line in lines:
            heights = [math.nan if y is None else y for _, y in line]
            axes.plot([x for x, _ in line], heights, dash, color=color, lw=0.8 if is_diverged else 1.7)
        if not is_diverged:
            shared = shared_points(arm_curves)
            axes.fill_between(
                [x for x, _ in shared],
                [min(ys) for _, ys in shared],
                [max(ys) for _, ys in shared],
                color=color,
                alpha=0.15,
                lw=0,
            )
        points = [(x, y) for line in lines for x, y in line if y is not None]
        if points:
            x = max(x for x, _ in points)
            heights = [y for at, y in points if at == x]
            name = f"{arm.name} ({divergence(arm)})" if is_diverged else arm.name
            ends.append((x, math.fsum(heights) / len(heights), name, color))
    label_ends(axes, ends, PLOT_HEIGHT_INCHES)


def mean_curve(curves: Sequence[Curve]) -> Curve:
    return [(x, math.fsum(ys) / len(ys)) for x, ys in shared_points(curves)]


def shared_points(curves: Sequence[Curve]) -> list[tuple[float, list[float]]]:
    """Return the epochs at which every seed has a value, with these values."""
    seeds = [{x: y for x, y in curve if y is not None} for curve in curves]
    epochs = sorted(set.intersection(*(set(seed) for seed in seeds))) if seeds else []
    return [(x, [seed[x] for seed in seeds]) for x in epochs]


def focus(values: Sequence[float], results: Sequence[float], most: float, context: float) -> tuple[float, float]:
    """Return limits around results within `most` of the best, and values up to `context` below them."""
    floor = max(results, default=0.0) - most
    lowest = min((result for result in results if result >= floor), default=0.0) - context
    return with_margin([value for value in values if value >= lowest])


def with_margin(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def beside_row(study: Study, arm: Arm) -> str:
    baseline = study.baseline_of(arm)
    if has_diverged(arm) or not arm.runs:
        return divergence(arm)
    if arm is baseline:
        return "baseline" if len(study.arms) > 1 else ""
    return gap_words(found) if (found := top1_gap(study, arm, baseline)) else ""

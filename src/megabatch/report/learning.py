"""The charts of one run as it trains, from its columns."""

import math
from collections.abc import Sequence

from megabatch.report import figures
from megabatch.report.curves import Series, line_chart
from megabatch.report.events import RunEvent
from megabatch.report.html import Markup
from megabatch.report.scales import along_powers
from megabatch.report.thin import Curve, finite, means
from megabatch.report.view import RunView

SMOOTHED = 200  # steps, from which on a mean is drawn over the noise


def smooth(name: str, style: str, curve: Curve, value: str = "") -> Series:
    """A mean, with every step behind it, where there are many."""
    if len(curve.y) < SMOOTHED:
        return Series(name, style, curve, value=value)
    return Series(name, style, means(curve), faint=curve, value=value)


def loss_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    losses, tests = view.steps.curve("loss"), view.evaluations.curve("test_loss")
    series = [smooth("training", "series-0", losses), Series("test", "series-1", tests, dotted=True)]
    about = "Mean cross-entropy of the global batch, and of the test images."
    if len(losses.y) >= SMOOTHED:
        about += " Strong: mean; faint: every step."
    return line_chart("loss", "Loss", about, series, clip=True, events=events)


def accuracy_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    last = view.last_evaluation
    target = view.setting("train.target_top1")
    is_target = isinstance(target, float) and 0 < target <= 1
    return line_chart(
        "accuracy",
        "Accuracy",
        "Test images whose class is the first guess, or among the first five.",
        [
            Series(
                "top-1",
                "series-0",
                in_percent(view.evaluations.curve("top1")),
                dotted=True,
                value=figures.accuracy(last.top1 if last else None),
            ),
            Series(
                "top-5",
                "series-1",
                in_percent(view.evaluations.curve("top5")),
                dotted=True,
                value=figures.accuracy(last.top5 if last else None),
            ),
        ],
        y_label=percent_label,
        events=events,
        target=(100 * target, f"target {figures.percent(target, 1)}") if is_target else None,
        unit="%",
    )


def in_percent(curve: Curve) -> Curve:
    return Curve(curve.x, [100 * value for value in curve.y])


def percent_label(value: float) -> str:
    return f"{figures.number(value, 4)} %"


def learning_rate_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    curve = view.steps.curve("lr")
    return line_chart("lr", "Learning rate", "", [Series("learning rate", "series-0", curve)], zero=True, events=events)


def throughput_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    """Of steps; evaluations and checkpoints are not in it."""
    curve = view.steps.curve("images_per_s")
    mean_text = ""
    if view.summary and view.summary.images_per_s:
        mean_text = f"{figures.count(view.summary.images_per_s)} on average"
    return line_chart(
        "throughput",
        "Throughput",
        "Images a second, over all ranks, while training.",
        [smooth("images/s", "series-0", curve, mean_text)],
        y_label=figures.count,
        zero=True,
        clip=True,
        events=events,
    )


def loss_scale_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    """Where there is one: without fp16 it is 1 throughout."""
    scales = view.steps.of["loss_scale"]
    if all(scale == 1 for scale in scales) and not view.skipped_steps:
        return None
    curve = Curve(view.steps.of["step"], [math.log2(scale) if scale > 0 else math.nan for scale in scales])
    skipped = figures.plural(len(view.skipped_steps), "step")
    return line_chart(
        "loss-scale",
        "Loss scale",
        f"{skipped} skipped, since gradients overflowed: the red marks at the foot." if view.skipped_steps else "",
        [Series("loss scale", "series-0", curve, value=figures.count(scales[-1]))],
        y_label=lambda exponent: figures.number(2.0**exponent) if abs(exponent) < 1000 else figures.NOTHING,
        y_scale=along_powers(scales),
        events=events,
        ticks=view.skipped_steps,
        unit="2^",
    )


def memory_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    resident, device = view.evaluations.curve("resident_mb"), view.evaluations.curve("device_mb")
    return line_chart(
        "memory",
        "Memory",
        "Of rank 0's process, and the most that it has taken of its accelerator, at evaluations.",
        [
            Series("process", "series-0", resident, dotted=True, value=last_of(resident)),
            Series("accelerator", "series-1", device, dotted=True, value=last_of(device)),
        ],
        y_label=lambda value: figures.megabytes(value),
        zero=True,
        events=events,
        unit="MB",
    )


def last_of(curve: Curve) -> str:
    known = finite(curve.y)
    return figures.megabytes(known[-1]) if known else ""

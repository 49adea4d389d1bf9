"""One step as a pipeline: backward fills buckets, the node adds them up, the network carries them.

Predicted is what the plan expects (plan.json, `Tuning.passages`); measured is one ordinary step of rank 0 (step.json).
Both lie on one time axis, on which backward begins at the same place.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megabatch.planning.tuning import Tuning
from megabatch.report import figures, svg
from megabatch.report.figure import Key, figure, table
from megabatch.report.html import Markup, join, tag
from megabatch.report.scales import Scale, along_time
from megabatch.report.view import RunView
from megabatch.runs.step_trace import StepTrace

LANE_PX, LANE_GAP_PX, HEAD_PX = 26, 6, 26
READY_PX = 20  # of a lane, below its letters, from where marks begin
NARROWEST_PX, LETTER_PX = 270, 7  # the plot of a phone, in which letters must have room
MOST_BARS = 600
UNLIKE = 1.5  # times as long: then prediction and measurement are of different backwards
COLOURS = 4  # of buckets, in turn


class Bar(NamedTuple):
    begin_s: float
    end_s: float
    style: str
    tip: str
    text: str = ""


class Lane(NamedTuple):
    name: str
    bars: list[Bar]
    ready_s: Sequence[float] = ()  # of buckets


class Group(NamedTuple):
    name: str
    lanes: list[Lane]


def style_of(bucket: int) -> str:
    return f"bucket-{bucket % COLOURS}"


def predicted(tuning: Tuning, start_s: float) -> Group:
    """`start_s` is when backward begins."""
    node: list[Bar] = []
    network: list[Bar] = []
    for number, (bucket, passage) in enumerate(zip(tuning.buckets, tuning.passages, strict=True)):
        about = f"bucket {number}, {figures.size_mb(bucket.num_bytes)} MB, {bucket.plan.name}"
        spans = (
            (node, "in the node", passage.begin_s, passage.before_end_s),
            (network, "on the network", passage.crossing_begin_s, passage.crossing_end_s),
            (node, "in the node, after the network", passage.after_begin_s, passage.end_s),
        )
        for lane, where, begin_s, end_s in spans:
            if end_s > begin_s:
                tip = f"{about}: {where} {span_text(begin_s, end_s)} after backward begins"
                lane.append(Bar(start_s + begin_s, start_s + end_s, style_of(number), tip, str(number)))
    backward = Bar(
        start_s,
        start_s + tuning.backward_s,
        "part-backward",
        f"backward: {figures.milliseconds(tuning.backward_s)}",
        "backward",
    )
    lanes = [Lane("backward", [backward], [start_s + bucket.ready_s for bucket in tuning.buckets]), Lane("node", node)]
    return Group("predicted", [lane for lane in (*lanes, Lane("network", network)) if lane.bars])


def measured(trace: StepTrace) -> Group:
    lanes: dict[str, list[Bar]] = {"training": [], "node": [], "network": []}
    for span in trace.spans:
        if span.end_s <= span.begin_s:
            continue
        of = "" if span.bucket is None else f"bucket {span.bucket}: "
        waits = ", waiting" if span.is_wait else ""
        tip = f"{of}{span.name}{waits}, {span_text(span.begin_s, span.end_s)}"
        if span.lane == "training":
            style = f"part-{training_part(span.name)}"
            text = span.name
        else:
            style = "bucket-none" if span.bucket is None else style_of(span.bucket)
            text = "" if span.bucket is None or span.is_wait else str(span.bucket)
        lanes[span.lane].append(Bar(span.begin_s, span.end_s, style + " waits" * span.is_wait, tip, text))
    ready_s = [bucket.ready_s for bucket in trace.buckets]
    found = [Lane(name, bars, ready_s if name == "training" else ()) for name, bars in lanes.items() if bars]
    return Group("measured", found)


def training_part(name: str) -> str:
    """The colour of what the training thread does."""
    known = {"data": "data", "forward": "forward", "backward": "backward", "update": "update"}
    for word, part in known.items():
        if word in name:
            return part
    return "comm" if "comm" in name or "wait" in name or "reduce" in name else "other"


def span_text(begin_s: float, end_s: float) -> str:
    return f"{figures.milliseconds(begin_s)} to {figures.milliseconds(end_s)}"


def last_backward(trace: StepTrace) -> tuple[float, float]:
    """When that of the last microbatch began and ended: the one during which gradients are all-reduced."""
    backwards = [span for span in trace.spans if span.lane == "training" and "backward" in span.name]
    return max(((span.begin_s, span.end_s) for span in backwards), default=(0.0, 0.0))


def is_alike(tuning: Tuning, trace: StepTrace) -> bool:
    """Whether backward took as long in the traced step as when it was planned for."""
    begin_s, end_s = last_backward(trace)
    return tuning.backward_s <= UNLIKE * (end_s - begin_s) and end_s - begin_s <= UNLIKE * tuning.backward_s


def pipeline_chart(view: RunView) -> Markup | None:
    tuning, trace = view.tuning, view.trace
    groups = []
    is_shared = not (tuning and trace) or is_alike(tuning, trace)
    if tuning and tuning.topology.num_ranks > 1:
        groups.append(predicted(tuning, last_backward(trace)[0] if trace and is_shared else 0.0))
    if trace and trace.spans:
        groups.append(measured(trace))
    if not groups:
        return None
    drawing, height_px = draw(groups, is_shared)
    told = "; ".join(f"{group.name}: {', '.join(lane.name for lane in group.lanes)}" for group in groups)
    return figure(
        "pipeline",
        "One step as a pipeline",
        about(view),
        svg.plot("pipeline-plot", "One step as a pipeline", f"Lanes, {told}.", height_px, drawing, style="lanes"),
        keys=[
            Key(style_of(0), "a bucket, by its number", form="box"),
            Key("ready", "ready to be all-reduced"),
            *(Key(f"part-{part}", part, form="box") for part in ("forward", "backward", "update") if trace),
            *([Key("part-comm", "exposed: training waits", form="box")] if trace else []),
        ],
        numbers=span_table(groups),
        wide=True,
    )


def about(view: RunView) -> str:
    told = []
    if view.tuning:
        exposed = figures.milliseconds(view.tuning.exposed_s)
        told.append(f"Predicted: {exposed} of communication are exposed after backward.")
    if view.trace:
        waits = [span for span in view.trace.spans if span.lane == "training" and training_part(span.name) == "comm"]
        exposed_s = sum(span.end_s - span.begin_s for span in waits)
        told.append(f"Measured in step {view.trace.step:,}: {figures.milliseconds(exposed_s)}.")
    if view.tuning and view.trace and not is_alike(view.tuning, view.trace):
        begin_s, end_s = last_backward(view.trace)
        planned, took = figures.milliseconds(view.tuning.backward_s), figures.milliseconds(end_s - begin_s)
        told.append(
            f"Backward took {planned} when this was planned, and {took} in that step: each has a time axis of its own."
        )
    return " ".join(told)


def draw(groups: Sequence[Group], is_shared: bool) -> tuple[Markup, float]:
    """On one time axis, or each on its own; and how high that is."""
    ends = [max((bar.end_s for lane in group.lanes for bar in lane.bars), default=1.0) for group in groups]
    parts, top = [], 0.0
    for place, (group, end_s) in enumerate(zip(groups, ends, strict=True)):
        scale = along_time(max(ends) if is_shared else end_s)
        parts.append(tag("text", group.name, x=-72, y=top + 16, class_="strong"))
        top += HEAD_PX
        ready = [ready_s for lane in group.lanes for ready_s in lane.ready_s][:MOST_BARS]
        marks = [svg.vertical(scale.share(at), top + READY_PX, top + LANE_PX + 4, "ready") for at in ready]
        for lane in group.lanes:
            parts += draw_lane(lane, scale, top)
            top += LANE_PX + LANE_GAP_PX
        parts += marks
        top += LANE_GAP_PX
        if not is_shared or place == len(groups) - 1:
            parts.append(svg.x_axis(scale, top))
            top += svg.FOOT_PX
    return join(parts), top


def draw_lane(lane: Lane, scale: Scale, top: float) -> list[Markup]:
    parts = [
        tag("text", lane.name, x=-8, y=top + LANE_PX / 2 + 4, text_anchor="end"),
        svg.box(0, top, 1, LANE_PX, "lane"),
    ]
    for bar in lane.bars[:MOST_BARS]:
        left, width = scale.share(bar.begin_s), scale.share(bar.end_s) - scale.share(bar.begin_s)
        parts.append(svg.box(left, top, max(width, 0.001), LANE_PX, bar.style, bar.tip))
        if bar.text and width * NARROWEST_PX > LETTER_PX * len(bar.text) + 2 * LETTER_PX:
            is_bucket = bar.style.startswith("bucket")
            at, anchor = (left + width / 2, "middle") if is_bucket else (left + 0.008, "start")
            parts.append(svg.label(at, top + LANE_PX / 2 + 4, bar.text, anchor, svg.text_on(bar.style)))
    return parts


def span_table(groups: Iterable[Group]) -> Markup:
    rows = [
        (group.name, lane.name, bar.tip, figures.milliseconds(bar.end_s - bar.begin_s))
        for group in groups
        for lane in group.lanes
        for bar in lane.bars
    ]
    return table(("", "lane", "what", "time"), rows, left=(0, 1, 2))

"""One step as a pipeline: backward fills buckets, the node adds them up, the network carries them.

Predicted is what the plan expects (plan.json, `Tuning.passages`); measured is one ordinary step of rank 0 (step.json).
Both lie on one time axis, on which backward begins at the same place.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megabatch.planning.tuning import Bucket, Tuning
from megabatch.report import numbers as figures
from megabatch.report import svg
from megabatch.report.html import Markup, join, tag
from megabatch.report.svg import Key, Scale, along_time, figure, table
from megabatch.report.view import RunView
from megabatch.runs.records import StepTrace, TracedBucket
from megabatch.text import one_line

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


# The communication plan: every bucket, what was predicted and measured of it, what was chosen and why.

LONGEST_NAMES = 80
LONGEST_REASON = 240


def plan_facts(tuning: Tuning) -> str:
    sizes = [len(node) for node in tuning.topology.nodes]
    each = f"{sizes[0]:,}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes[:8]))
    num_bytes = sum(bucket.num_bytes for bucket in tuning.buckets)
    num_tensors = sum(len(bucket.gradients) for bucket in tuning.buckets)
    crossing = f"; {max(tuning.bytes_crossing) / 1e6:,.1f} MB leave a host each step" if len(sizes) > 1 else ""
    return (
        f"{figures.plural(len(sizes), 'host')} of {each} {'rank' if each == '1' else 'ranks'}; "
        f"{figures.plural(num_tensors, 'gradient')}, {num_bytes / 1e6:,.1f} MB, in "
        f"{figures.plural(len(tuning.buckets), 'bucket')}, by {tuning.algorithms}{crossing}."
    )


def bucket_table(view: RunView) -> Markup | None:
    tuning = view.tuning
    if not tuning or tuning.topology.num_ranks < 2:
        return None
    traced = {bucket.bucket: bucket for bucket in view.trace.buckets} if view.trace else {}
    rows = [
        row_of(number, bucket, passage.end_s, traced.get(number))
        for number, (bucket, passage) in enumerate(zip(tuning.buckets, tuning.passages, strict=True))
    ]
    head = (
        "bucket",
        "gradients",
        "MB",
        "ready",
        "predicted",
        "probed",
        "in the step",
        "reduced at",
        "choice and reason",
    )
    return tag(
        "div",
        tag("h3", "Every bucket"),
        tag(
            "p",
            "Ready and reduced: since backward began, as planned. Predicted and probed: the all-reduce alone, by the "
            "links' prices and as measured before training. In the step: from ready to reduced, as measured.",
            class_="about",
        ),
        table(head, rows, left=(1, 8)),
        class_="block",
    )


def row_of(number: int, bucket: Bucket, reduced_s: float, traced: TracedBucket | None) -> tuple[str, ...]:
    chosen = bucket.candidate
    in_step_s = None if traced is None else traced.reduced_s - traced.ready_s
    return (
        str(number),
        one_line(names_of(bucket), LONGEST_NAMES),
        figures.size_mb(bucket.num_bytes),
        figures.milliseconds(bucket.ready_s),
        figures.milliseconds(chosen.predicted_s),
        figures.milliseconds(chosen.measured_s),
        figures.milliseconds(in_step_s),
        figures.milliseconds(reduced_s),
        one_line(f"{bucket.plan.name}: {bucket.reason or 'the only plan'}", LONGEST_REASON),
    )


def names_of(bucket: Bucket) -> str:
    first, last = bucket.gradients[0], bucket.gradients[-1]
    return first if len(bucket.gradients) == 1 else f"{len(bucket.gradients)}: {first} .. {last}"

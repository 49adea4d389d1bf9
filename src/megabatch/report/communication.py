"""The communication section: one step drawn as a pipeline, and a table of all buckets.

Backward fills buckets, the node all-reduces them, and the network carries them.  "Predicted" is the plan (plan.json,
`Tuning.passages`); "measured" is one ordinary step of rank 0 (step.json).  Both share a time axis on which backward
starts at the same position.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megabatch.io import numbers as fmt
from megabatch.planning.tuning import Bucket, Tuning
from megabatch.report import svg
from megabatch.report.html import Markup, join, tag
from megabatch.report.svg import Key, Scale, along_time, chart, table
from megabatch.report.view import RunView
from megabatch.runs.records import StepTrace, TracedBucket
from megabatch.text import one_line

LANE_PX, LANE_GAP_PX, HEAD_PX = 26, 6, 26
READY_PX = 20  # top of the marks, below the text of a lane
NARROWEST_PX, CHARACTER_PX = 270, 7  # the width of a plot on a phone, in which text must fit
MOST_BARS = 600
MOST_RATIO = 1.5  # of two backward times that can share a time axis
COLOURS = 4  # of buckets, in turn
LONGEST_NAMES = 80
LONGEST_REASON = 240


class Bar(NamedTuple):
    begin_s: float
    end_s: float
    style: str
    tip: str
    text: str = ""


class Lane(NamedTuple):
    name: str
    bars: list[Bar]
    ready_s: Sequence[float] = ()  # when buckets are ready


class LaneGroup(NamedTuple):
    name: str
    lanes: list[Lane]


def style_of(bucket: int) -> str:
    return f"bucket-{bucket % COLOURS}"


def predicted(tuning: Tuning, start_s: float) -> LaneGroup:
    """Return the bars of the plan; backward starts at `start_s`."""
    node: list[Bar] = []
    network: list[Bar] = []
    for number, (bucket, passage) in enumerate(zip(tuning.buckets, tuning.passages, strict=True)):
        about = f"bucket {number}, {fmt.in_mb(bucket.num_bytes)} MB, {bucket.plan.name}"
        spans = (
            (node, "in the node", passage.begin_s, passage.before_end_s),
            (network, "on the network", passage.crossing_begin_s, passage.crossing_end_s),
            (node, "in the node, after the network", passage.after_begin_s, passage.end_s),
        )
        for lane, where, begin_s, end_s in spans:
            if end_s > begin_s:
                tip = f"{about}: {where} {span_text(begin_s, end_s)} after backward starts"
                lane.append(Bar(start_s + begin_s, start_s + end_s, style_of(number), tip, str(number)))
    backward = Bar(
        start_s,
        start_s + tuning.backward_s,
        "part-backward",
        f"backward: {fmt.milliseconds(tuning.backward_s)}",
        "backward",
    )
    lanes = [Lane("backward", [backward], [start_s + bucket.ready_s for bucket in tuning.buckets]), Lane("node", node)]
    return LaneGroup("predicted", [lane for lane in (*lanes, Lane("network", network)) if lane.bars])


def measured(trace: StepTrace) -> LaneGroup:
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
    return LaneGroup("measured", found)


def training_part(name: str) -> str:
    """Return the part of the time breakdown that a span of the training thread belongs to."""
    for part in ("data", "forward", "backward", "update"):
        if part in name:
            return part
    return "comm" if "comm" in name or "wait" in name or "reduce" in name else "other"


def span_text(begin_s: float, end_s: float) -> str:
    return f"{fmt.milliseconds(begin_s)} to {fmt.milliseconds(end_s)}"


def last_backward(trace: StepTrace) -> tuple[float, float]:
    """Return the start and end of the last microbatch's backward, during which gradients are all-reduced."""
    backwards = [span for span in trace.spans if span.lane == "training" and "backward" in span.name]
    return max(((span.begin_s, span.end_s) for span in backwards), default=(0.0, 0.0))


def is_alike(tuning: Tuning, trace: StepTrace) -> bool:
    """Return whether backward took about as long in the traced step as in the plan."""
    begin_s, end_s = last_backward(trace)
    return tuning.backward_s <= MOST_RATIO * (end_s - begin_s) and end_s - begin_s <= MOST_RATIO * tuning.backward_s


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
    listed = "; ".join(f"{group.name}: {', '.join(lane.name for lane in group.lanes)}" for group in groups)
    return chart(
        "pipeline",
        "One step as a pipeline",
        about(view),
        svg.plot("pipeline-plot", "One step as a pipeline", f"Lanes, {listed}.", height_px, drawing, style="lanes"),
        keys=[
            Key(style_of(0), "a bucket, with its number", form="box"),
            Key("ready", "bucket ready"),
            *(Key(f"part-{part}", part, form="box") for part in ("forward", "backward", "update") if trace),
            *([Key("part-comm", "exposed: training waits", form="box")] if trace else []),
        ],
        numbers=span_table(groups),
        wide=True,
    )


def about(view: RunView) -> str:
    tuning, trace = view.tuning, view.trace
    parts = []
    if tuning:
        parts.append(f"Predicted: {fmt.milliseconds(tuning.exposed_s)} of communication are exposed after backward.")
    if trace:
        waits = [span for span in trace.spans if span.lane == "training" and training_part(span.name) == "comm"]
        exposed_s = sum(span.end_s - span.begin_s for span in waits)
        parts.append(f"Measured in step {trace.step:,}: {fmt.milliseconds(exposed_s)}.")
    if tuning and trace and not is_alike(tuning, trace):
        begin_s, end_s = last_backward(trace)
        planned, measured = fmt.milliseconds(tuning.backward_s), fmt.milliseconds(end_s - begin_s)
        parts.append(f"The time axes differ: backward took {planned} for the plan and {measured} in that step.")
    return " ".join(parts)


def draw(groups: Sequence[LaneGroup], is_shared: bool) -> tuple[Markup, float]:
    """Draw the groups on one time axis or on separate ones; return the drawing and its height."""
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
        if bar.text and width * NARROWEST_PX > CHARACTER_PX * len(bar.text) + 2 * CHARACTER_PX:
            is_bucket = bar.style.startswith("bucket")
            at, anchor = (left + width / 2, "middle") if is_bucket else (left + 0.008, "start")
            parts.append(svg.label(at, top + LANE_PX / 2 + 4, bar.text, anchor, svg.text_on(bar.style)))
    return parts


def span_table(groups: Iterable[LaneGroup]) -> Markup:
    rows = [
        (group.name, lane.name, bar.tip, fmt.milliseconds(bar.end_s - bar.begin_s))
        for group in groups
        for lane in group.lanes
        for bar in lane.bars
    ]
    return table(("", "lane", "work", "time"), rows, left=(0, 1, 2))


def plan_facts(tuning: Tuning) -> str:
    sizes = [len(node) for node in tuning.topology.nodes]
    each = f"{sizes[0]:,}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes[:8]))
    num_bytes = sum(bucket.num_bytes for bucket in tuning.buckets)
    num_tensors = sum(len(bucket.gradients) for bucket in tuning.buckets)
    crossing = f"; {fmt.in_mb(max(tuning.bytes_crossing))} MB leave a node per step" if len(sizes) > 1 else ""
    return (
        f"{fmt.plural(len(sizes), 'node')} of {each} {'rank' if each == '1' else 'ranks'}; "
        f"{fmt.plural(num_tensors, 'gradient')}, {fmt.in_mb(num_bytes)} MB, in "
        f"{fmt.plural(len(tuning.buckets), 'bucket')}, by {tuning.algorithms}{crossing}."
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
    times = ("ready", "predicted", "probed", "in the step", "reduced")
    return tag(
        "div",
        tag("h3", "Buckets"),
        tag(
            "p",
            "Ready and reduced: planned time since backward started. Predicted and probed: all-reduce time by the "
            "cost model, and as measured before training. In the step: measured time from ready to reduced.",
            class_="about",
        ),
        table(("bucket", "gradients", "MB", *times, "plan and reason"), rows, left=(1, 8)),
        class_="block",
    )


def row_of(number: int, bucket: Bucket, reduced_s: float, traced: TracedBucket | None) -> tuple[str, ...]:
    chosen = bucket.candidate
    in_step_s = None if traced is None else traced.reduced_s - traced.ready_s
    return (
        str(number),
        one_line(names_of(bucket), LONGEST_NAMES),
        fmt.in_mb(bucket.num_bytes),
        fmt.milliseconds(bucket.ready_s),
        fmt.milliseconds(chosen.predicted_s),
        fmt.milliseconds(chosen.measured_s),
        fmt.milliseconds(in_step_s),
        fmt.milliseconds(reduced_s),
        one_line(f"{bucket.plan.name}: {bucket.reason or 'the only plan'}", LONGEST_REASON),
    )


def names_of(bucket: Bucket) -> str:
    first, last = bucket.gradients[0], bucket.gradients[-1]
    return first if len(bucket.gradients) == 1 else f"{len(bucket.gradients)}: {first} .. {last}"

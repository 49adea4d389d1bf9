"""The communication plan: every bucket, what was predicted and measured of it, what was chosen and why."""

from megabatch.planning.tuning import Bucket, Tuning
from megabatch.report import figures
from megabatch.report.figure import table
from megabatch.report.html import Markup, tag
from megabatch.report.view import RunView
from megabatch.runs.step_trace import TracedBucket
from megabatch.text import one_line

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

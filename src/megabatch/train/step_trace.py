"""One ordinary step of rank 0 in detail, for the run's report: what it did, and when each bucket was all-reduced.

A few steps are traced soon after the start; of those that no evaluation or checkpoint followed, the one of median
duration is kept.  On an accelerator all of it is the device's time, by events.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from megabatch.comm.timeline import BUCKETS, IN_NODE, NETWORK, Event, Timeline
from megabatch.ranks.activity import ALL_REDUCE, BACKWARD, TracedActivity
from megabatch.runs.records import Record, StepRecord
from megabatch.runs.step_trace import Lane, Span, StepTrace, TracedBucket
from megabatch.train.parts import Training

PASSED_OVER = 10  # steps after a start, in which caches and DDP's buckets settle
TRACED = 7
ORDINARY = {"data", "forward", BACKWARD, ALL_REDUCE, "update", "the device's results", "records"}
LANES: Mapping[str, Lane] = {IN_NODE: "node", NETWORK: "network"}
DIGITS = 6


def traced(
    records: Iterator[Record], first_step: int, training: Training, keep: Callable[[StepTrace], None]
) -> Iterator[Record]:
    """The same records; `keep` gets the step, unless the run is over before.  For rank 0."""
    timeline, activity = training.gradients.timeline, training.world.activity
    assert isinstance(timeline, Timeline)
    wanted = range(first_step + PASSED_OVER + 1, first_step + PASSED_OVER + TRACED + 1)  # as records number them
    follows = not timeline.steps  # else the whole run is recorded, by somebody who says which step begins
    if follows:
        timeline.steps = wanted
    for record in records:
        yield record
        if not isinstance(record, StepRecord) or record.step > wanted.stop + training.steps_ahead:
            continue
        if follows:
            timeline.begin_step(record.step + 1)
        if record.step + 1 == wanted.start:
            activity.times.traced = []
        # Its events have happened, and been read, a step after the last that is wanted.
        if record.step == wanted.stop + training.steps_ahead and activity.times.traced:
            timeline.collect()
            trace = trace_of(activity.times.traced, list(timeline.events), wanted)
            activity.times.traced = None
            if follows:
                timeline.steps, timeline.events = range(0), type(timeline.events)()
            if trace:
                keep(trace)


def trace_of(done: Sequence[TracedActivity], events: Sequence[Event], wanted: range) -> StepTrace | None:
    """None if no step was an ordinary one."""
    by_step: defaultdict[int, list[TracedActivity]] = defaultdict(list)
    for activity in done:
        by_step[activity.step].append(activity)
    began_s = {step: min(activity.began_s for activity in found) for step, found in by_step.items()}
    durations_s = {
        step: began_s[step + 1] - began_s[step]
        for step in wanted
        if {step, step + 1} <= began_s.keys() and {activity.what for activity in by_step[step]} <= ORDINARY
    }
    if not durations_s:
        return None
    step = sorted(durations_s, key=lambda step: durations_s[step])[len(durations_s) // 2]
    origin_s = began_s[step]

    def at(seconds: float) -> float:
        return round(seconds - origin_s, DIGITS)

    of_step = [event for event in events if event.step == step]
    buckets = buckets_of(of_step, at)
    ready_s = [event.began_s for event in of_step if event.kind == "b" and event.about["bucket"] >= 0]
    spans = [
        Span(lane="training", name=activity.what, begin_s=at(activity.began_s), end_s=at(activity.ended_s))
        for activity in joined(without_waits(by_step[step], ready_s))
    ]
    spans += [
        Span(
            lane=LANES[event.lane],
            name=event.name.partition(": ")[2],
            begin_s=at(event.began_s),
            end_s=at(event.ended_s),
            bucket=bucket if (bucket := event.about["bucket"]) >= 0 else None,
            is_wait=": waits for" in event.name,
        )
        for event in sorted(of_step, key=lambda event: event.began_s)
        if event.kind == "X" and event.lane in LANES
    ]
    return StepTrace(step=step, duration_s=round(durations_s[step], DIGITS), spans=spans, buckets=buckets)


def without_waits(done: Sequence[TracedActivity], ready_s: Sequence[float]) -> list[TracedActivity]:
    """Backward ends with its last gradient: DDP then waits for the all-reduce before it hands back."""
    last_s, result = max(ready_s, default=math.inf), list[TracedActivity]()
    for activity in done:
        if activity.what == BACKWARD and activity.began_s < last_s < activity.ended_s:
            result += [activity._replace(ended_s=last_s), activity._replace(what=ALL_REDUCE, began_s=last_s)]
        else:
            result.append(activity)
    return result


def joined(done: Sequence[TracedActivity]) -> list[TracedActivity]:
    """Reading the clock in between cuts an activity in two."""
    result: list[TracedActivity] = []
    for activity in done:
        if result and result[-1].what == activity.what:
            result[-1] = result[-1]._replace(ended_s=activity.ended_s)
        else:
            result.append(activity)
    return result


def buckets_of(events: Sequence[Event], at: Callable[[float], float]) -> list[TracedBucket]:
    """Those that were seen to be ready and reduced."""
    marks = {(event.kind, event.about["bucket"]): event for event in events if event.lane == BUCKETS}
    return [
        TracedBucket(
            bucket=number,
            num_bytes=ready.about["bytes"],
            plan=ready.about["plan"],
            ready_s=at(ready.began_s),
            reduced_s=at(marks["e", number].began_s),
        )
        for (kind, number), ready in sorted(marks.items(), key=lambda mark: mark[0][1])
        if kind == "b" and number >= 0 and ("e", number) in marks
    ]

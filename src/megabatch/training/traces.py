"""One ordinary step of rank 0 in detail, for the run's report: what it did, and when each bucket was all-reduced.

A few steps are traced soon after the start; of those that no evaluation or checkpoint followed, the one of median
duration is kept.  On an accelerator all of it is the device's time, by events.
"""

import math
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from megabatch.io.disk import make_private
from megabatch.planning.topology import Topology
from megabatch.ranks.world import World
from megabatch.runs.files import TIMELINE
from megabatch.runs.records import Lane, Record, Span, StepRecord, StepTrace, TracedBucket
from megabatch.telemetry.activity import ALL_REDUCE, BACKWARD, TracedActivity
from megabatch.telemetry.timeline import BUCKETS, IN_NODE, NETWORK, STEPS, TRAINING, Event, Timeline
from megabatch.text import print_line
from megabatch.torch_api import queue_callback
from megabatch.training.parts import Training

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


# `comm.timeline`: every rank writes timeline/rank-<r>.json into the run's folder when the run ends, however it ends.
#
# Each rank writes its own: a run that has failed can collect nothing any more, and the traces of a thousand ranks are
# too much for one.  A host that does not see the folder leaves its ranks out, and says so.

ROUNDS = 9  # of agreeing on a moment: one alone may be milliseconds off, where a rank waits for a core


@contextmanager
def recorded(
    records: Iterator[Record], first_step: int, training: Training, folder: Path | None
) -> Iterator[Iterator[Record]]:
    """The same records, while what happens in between goes to the timeline.  Rank 0 knows the run's folder."""
    if folder:
        shutil.rmtree(folder / TIMELINE, ignore_errors=True)  # of the attempt before; of a link, nothing
    world, topology, timeline = training.world, training.gradients.topology, training.gradients.timeline
    assert isinstance(timeline, Timeline)
    run_folder = Path(world.broadcast_text(str(folder.resolve() if folder else "")))
    timeline.restart(common_moment(world, topology), first_step + 1)
    watch(training.model, timeline)
    try:
        yield marked(records, timeline)
    finally:
        own_host = topology.members("node", world.rank)
        problem = write(timeline, run_folder)
        if problem and world.rank == own_host[0]:
            ranks = f"ranks {own_host[0]} to {own_host[-1]}" if len(own_host) > 1 else f"rank {own_host[0]}"
            print_line(f"megabatch: no timeline of {ranks}: {problem}", to_stderr=True)


def marked(records: Iterator[Record], timeline: Timeline) -> Iterator[Record]:
    timeline.begin_step(timeline.step)
    for record in records:
        timeline.leave(STEPS)
        timeline.enter(TRAINING, "records")
        yield record
        if isinstance(record, StepRecord) and record.evaluated:
            timeline.enter(TRAINING, "evaluation")
        else:
            timeline.begin_step(record.step + 1)
    timeline.under_way.clear()  # a step that is not taken


def write(timeline: Timeline, run_folder: Path) -> str | None:
    """Returns why it could not."""
    if not run_folder.is_dir():
        return f"{run_folder} is not seen here; a run.dir on a disk that all hosts share would be"
    try:
        make_private(run_folder / TIMELINE)
        timeline.write(run_folder / TIMELINE / f"rank-{timeline.rank}.json")
    except OSError as error:
        return f"{run_folder / TIMELINE} cannot be written to ({error.strerror})"
    return None


def common_moment(world: World, topology: Topology) -> float:
    """A moment that all ranks share, on this rank's clock.

    Ranks come out of a collective at about the same time, and do so a few times; the differences to rank 0's clock have
    a median.  Ranks of a host have one clock, and take the difference of the first of them.
    """
    came_out_s = []
    for _ in range(ROUNDS):
        world.barrier()
        came_out_s.append(time.perf_counter())
    all_came_out_s = world.gather(torch.tensor(came_out_s, dtype=torch.float64, device=world.device))
    first_of_host = topology.members("node", world.rank)[0]
    first, own_host = all_came_out_s[0].tolist(), all_came_out_s[first_of_host].tolist()
    ahead_s = statistics.median(own_s - first_s for own_s, first_s in zip(own_host, first, strict=True))
    return float(first[-1] + ahead_s)


def watch(model: DistributedDataParallel, timeline: Timeline) -> None:
    """Lets the model itself say when forward and backward begin and end, so that the training loop need not."""

    def begin_forward(*_: Any) -> None:
        timeline.enter(TRAINING, "forward")

    def end_forward(_: Any, __: Any, logits: torch.Tensor) -> None:
        logits.register_hook(begin_backward)

    def begin_backward(_: torch.Tensor) -> None:
        timeline.enter(TRAINING, "backward")
        queue_callback(end_backward)

    def end_backward() -> None:
        if not model.require_backward_grad_sync:  # another microbatch follows
            timeline.enter(TRAINING, "input")
            return
        timeline.enter(TRAINING, "waiting for all-reduce")
        # Behind the callbacks of our hook and of DDP, which wait.
        queue_callback(lambda: timeline.enter(TRAINING, "update"))

    model.register_forward_pre_hook(begin_forward)
    model.register_forward_hook(end_forward)

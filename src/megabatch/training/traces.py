"""The trace of one ordinary step on rank 0, for the run's report: its activities, and the all-reduce of each bucket.

A few steps are traced soon after the start.  Of those without an evaluation or checkpoint, the one of median duration
is written.  On an accelerator all times are the device's, from events.
"""

import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from megabatch.io.disk import make_private
from megabatch.planning.topology import Topology
from megabatch.ranks.world import World
from megabatch.runs.files import TIMELINE
from megabatch.runs.records import Lane, Record, Span, StepRecord, StepTrace, TracedBucket
from megabatch.telemetry.activity import ALL_REDUCE, BACKWARD
from megabatch.telemetry.timeline import BUCKETS, IN_NODE, NETWORK, NO_STEPS, TRAINING, Event, Timeline
from megabatch.text import print_line
from megabatch.training.parts import Training

WARM_UP_STEPS = 10  # not traced: caches and DDP's buckets are not final
TRACED_STEPS = 7
ORDINARY = {"data", "forward", BACKWARD, ALL_REDUCE, "update", "the device's results", "records"}
LANES: Mapping[str, Lane] = {IN_NODE: "node", NETWORK: "network"}
DIGITS = 6


def trace_step(
    records: Iterator[Record], first_step: int, training: Training, write: Callable[[StepTrace], None]
) -> Iterator[Record]:
    """Yield the records unchanged, and call `write` with the trace of a step.  Rank 0 only."""
    timeline = training.gradients.timeline
    first = first_step + WARM_UP_STEPS + 1  # records count steps from 1
    wanted = range(first, first + TRACED_STEPS)
    records_run = bool(timeline.steps)  # comm.timeline=true
    if not records_run:
        timeline.steps = range(wanted.start, wanted.stop + 1)
    for record in records:
        yield record
        # All events of the wanted steps are complete one step after the last of them.
        if isinstance(record, StepRecord) and record.step == wanted.stop + training.steps_ahead:
            timeline.collect()
            trace = trace_of(list(timeline.events), wanted)
            if not records_run:
                timeline.steps = NO_STEPS
                timeline.restart(origin_s=0.0, first_step=record.step)
            if trace:
                write(trace)


def trace_of(events: Sequence[Event], wanted: range) -> StepTrace | None:
    """Return the trace of the ordinary step of median duration; None if no step is ordinary."""
    activities: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.lane == TRAINING:
            activities[event.step].append(event)
    began_s = {step: min(activity.began_s for activity in found) for step, found in activities.items()}
    durations_s = {
        step: began_s[step + 1] - began_s[step]
        for step in wanted
        if {step, step + 1} <= began_s.keys() and {activity.name for activity in activities[step]} <= ORDINARY
    }
    if not durations_s:
        return None
    step = sorted(durations_s, key=lambda step: durations_s[step])[len(durations_s) // 2]
    origin_s = began_s[step]

    def at(seconds: float) -> float:
        return round(seconds - origin_s, DIGITS)

    of_step = [event for event in events if event.step == step]
    spans = [
        Span(lane="training", name=activity.name, begin_s=at(activity.began_s), end_s=at(activity.ended_s))
        for activity in activities[step]
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
    return StepTrace(
        step=step, duration_s=round(durations_s[step], DIGITS), spans=spans, buckets=buckets_of(of_step, at)
    )


def buckets_of(events: Sequence[Event], at: Callable[[float], float]) -> list[TracedBucket]:
    """Return the buckets with both a ready and a reduced event."""
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


# `comm.timeline`: every rank writes timeline/rank-<r>.json to the run's folder when the run ends, even after an error.
#
# Each rank writes its own file: a failed run cannot use collectives, and the traces of a thousand ranks are too
# large for one.  Ranks on a node without access to the folder print a line instead.

ROUNDS = 9  # barriers to align clocks: a single one may be milliseconds off if a rank waits for a core


@contextmanager
def record_timeline(first_step: int, training: Training, folder: Path | None) -> Iterator[None]:
    """Record the steps in this context, and write the timeline when it ends.  Only rank 0 passes `folder`."""
    if folder:
        shutil.rmtree(folder / TIMELINE, ignore_errors=True)  # from an earlier attempt; rmtree does not follow links
    world, topology, timeline = training.world, training.gradients.topology, training.gradients.timeline
    run_folder = Path(world.broadcast_text(str(folder.resolve() if folder else "")))
    timeline.restart(common_origin_s(world, topology), first_step + 1)
    try:
        yield
    finally:
        node_ranks = topology.members("node", world.rank)
        problem = write_timeline(timeline, run_folder)
        if problem and world.rank == node_ranks[0]:
            ranks = f"ranks {node_ranks[0]} to {node_ranks[-1]}" if len(node_ranks) > 1 else f"rank {node_ranks[0]}"
            print_line(f"megabatch: no timeline of {ranks}: {problem}", to_stderr=True)


def write_timeline(timeline: Timeline, run_folder: Path) -> str | None:
    """Write this rank's timeline.  Return the reason if it cannot be written."""
    if not run_folder.is_dir():
        return f"{run_folder} does not exist on this node; set run.dir to a folder that all nodes share"
    try:
        make_private(run_folder / TIMELINE)
        timeline.write(run_folder / TIMELINE / f"rank-{timeline.rank}.json")
    except OSError as error:
        return f"{run_folder / TIMELINE} cannot be written ({error.strerror})"
    return None


def common_origin_s(world: World, topology: Topology) -> float:
    """Return a common origin of time for all ranks, on this rank's clock.

    Ranks leave a barrier at about the same time.  The offset to rank 0's clock is the median over several barriers.
    Ranks of a node share a clock and use the offset of the node's first rank.
    """
    left_barrier_s = []
    for _ in range(ROUNDS):
        world.barrier()
        left_barrier_s.append(time.perf_counter())
    all_left_s = world.gather(torch.tensor(left_barrier_s, dtype=torch.float64, device=world.device))
    first_of_node = topology.members("node", world.rank)[0]
    rank_0_s, node_s = all_left_s[0].tolist(), all_left_s[first_of_node].tolist()
    offset_s = statistics.median(here_s - there_s for here_s, there_s in zip(node_s, rank_0_s, strict=True))
    return float(rank_0_s[-1] + offset_s)

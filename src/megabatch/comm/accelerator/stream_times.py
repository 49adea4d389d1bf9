"""When an accelerator's streams came to their collectives and were through, by events: the host's clock shows launches.

Events are recorded around each phase of an all-reduce, and only asked whether they have happened, never waited for.
What has happened is counted when somebody asks, or when the next bucket comes; what has not, later.

    waited_s         of all collectives, from their begin to their end.  All others wait in them for the straggler,
                     whose own are the shortest; no clocks are compared.
    exposed_wait_s   of a step: from the end of backward, on the stream that computes, to the end of its last all-reduce
    waiting()        the collective in which the streams are, for the watchdog's thread: others have not come to it yet.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megabatch.comm.cpu.barrier import Header
from megabatch.comm.work import Work
from megabatch.planning.plan import Phase, Transfer
from megabatch.telemetry.timeline import BUCKETS, NoTimeline, Timeline, lane_of, name_bucket

REBASE_S = 60.0  # elapsed times are single precision


@dataclass
class Collective:
    """One phase of one bucket on a stream."""

    header: Header
    phase: Phase
    about: dict[str, Any]
    began: torch.Event  # the stream came to it
    ended: torch.Event  # it was through
    is_issued: bool = False  # else the host is still at it: the first time, ranks connect and compare layouts

    @property
    def has_begun(self) -> bool:
        return self.began.query()

    @property
    def is_through(self) -> bool:
        return self.is_issued and self.ended.query()


class Moment(NamedTuple):
    """Of a bucket, for the timeline: it is ready, or reduced."""

    happened: torch.Event
    header: Header
    is_ready: bool
    about: dict[str, Any]


class StepEnd(NamedTuple):
    backward_ended: torch.Event
    reduced: torch.Event


class StreamTimes:
    """Of one rank: what `PhaseRunner` tells a timeline, as events on the current stream."""

    def __init__(self, device: torch.device, timeline: Timeline | NoTimeline) -> None:
        self.device, self.timeline = device, timeline
        self.clock = None
        if isinstance(timeline, Timeline):
            self.clock, timeline.collect = DeviceClock(self.event()), self.collect
        self.pending: deque[Collective] = deque()  # in the order of their issue
        self.moments: deque[Moment] = deque()
        self.spare: list[torch.Event] = []
        self.seconds_in_collectives = 0.0
        self.steps: deque[StepEnd] = deque()
        self.newest_exposed_s: float | None = None

    def event(self) -> torch.Event:
        """Recorded on the current stream."""
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def enter_phase(self, work: Work, phase: Phase, transfer: Transfer) -> None:
        stream = torch.accelerator.current_stream(self.device)
        began, ended = self.spare_event(), self.spare_event()
        began.record(stream)
        num_bytes = (transfer.end - transfer.begin) * work.whole.element_size()
        about = {"bytes": num_bytes, "plan": work.plan.name, "bucket": work.key}
        self.pending.append(Collective(work.header, phase, about, began, ended))

    def leave_phase(self, phase: Phase, waited_s: float) -> None:
        newest = self.pending[-1]
        newest.ended.record(torch.accelerator.current_stream(self.device))
        newest.is_issued = True

    def spare_event(self) -> torch.Event:
        return self.spare.pop() if self.spare else torch.Event(self.device, enable_timing=True)

    def note_ready(self, work: Work) -> None:
        if self.is_wanted(work.header):
            about = {"bytes": work.whole.nbytes, "plan": work.plan.name, "bucket": work.key}
            self.moments.append(Moment(self.event(), work.header, True, about))

    def note_reduced(self, work: Work) -> None:
        if self.is_wanted(work.header):
            self.moments.append(Moment(self.event(), work.header, False, {"bucket": work.key}))

    def is_wanted(self, header: Header) -> bool:
        return isinstance(self.timeline, Timeline) and header.step + 1 in self.timeline.steps

    def note_step_end(self, backward_ended: torch.Event) -> None:
        """The current stream has issued the last all-reduce of a step."""
        self.steps.append(StepEnd(backward_ended, self.event()))

    def waiting(self) -> Collective | None:
        """The oldest collective that is not through, if the stream has come to it.  For any thread."""
        oldest = self.unfinished()
        return oldest if oldest and oldest.has_begun else None

    def unfinished(self) -> Collective | None:
        return next((collective for collective in tuple(self.pending) if not collective.is_through), None)

    @property
    def waited_s(self) -> float:
        self.collect()
        return self.seconds_in_collectives

    @property
    def exposed_wait_s(self) -> float | None:
        """Of the newest step that has ended on the device; None before the first."""
        self.collect()
        return self.newest_exposed_s

    def collect(self) -> None:
        """Counts what has happened since."""
        while self.pending and self.pending[0].is_through:
            collective = self.pending.popleft()
            self.seconds_in_collectives += collective.began.elapsed_time(collective.ended) / 1e3
            if self.clock and self.is_wanted(collective.header):
                self.add_span(self.clock, collective)
            self.spare += [collective.began, collective.ended]
        while self.steps and self.steps[0].reduced.query():
            step = self.steps.popleft()
            self.newest_exposed_s = step.backward_ended.elapsed_time(step.reduced) / 1e3
        while self.clock and self.moments and self.moments[0].happened.query():
            self.add_moment(self.clock, self.moments.popleft())

    def add_span(self, clock: "DeviceClock", collective: Collective) -> None:
        header, phase = collective.header, collective.phase
        began_s, ended_s = clock.seconds_at(collective.began), clock.seconds_at(collective.ended)
        name = f"{name_bucket(header.bucket)}: {phase}"
        self.timeline.add("X", lane_of(phase), name, header.step + 1, began_s, ended_s, collective.about)

    def add_moment(self, clock: "DeviceClock", moment: Moment) -> None:
        name, step, at_s = name_bucket(moment.header.bucket), moment.header.step + 1, clock.seconds_at(moment.happened)
        if moment.is_ready:
            self.timeline.add("i", BUCKETS, f"{name} ready", step, at_s, at_s, moment.about)
        self.timeline.add("b" if moment.is_ready else "e", BUCKETS, name, step, at_s, at_s, moment.about)
        clock.rebase(moment.happened, at_s)


class DeviceClock:
    """The host's seconds at which events happened on the device; they are compared once, before any step."""

    def __init__(self, event: torch.Event) -> None:
        event.synchronize()
        self.base, self.base_s = event, time.perf_counter()

    def seconds_at(self, event: torch.Event) -> float:
        return self.base_s + self.base.elapsed_time(event) / 1e3

    def rebase(self, event: torch.Event, at_s: float) -> None:
        """On an event that nobody records again."""
        if at_s - self.base_s > REBASE_S:
            self.base, self.base_s = event, at_s

"""Times of collectives on an accelerator's streams, measured with events: the host's clock only shows launches.

Events are recorded around each phase of an all-reduce.  They are queried, never waited for.  Events that have completed
are counted when a value is read or the next bucket starts.

    waited_s         total time in collectives.  All ranks wait in them for the straggler, whose own time is the
                     shortest; no clocks are compared.
    waiting()        the collective that the streams are in, for the watchdog's thread: other ranks have not reached it.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megabatch.comm.cpu.barrier import BarrierHeader
from megabatch.comm.work import Work
from megabatch.planning.plan import Phase, Transfer
from megabatch.telemetry.timeline import BUCKETS, DeviceClock, Timeline, lane_of, name_bucket


@dataclass
class Collective:
    """One phase of one bucket on a stream."""

    header: BarrierHeader
    phase: Phase
    about: dict[str, Any]
    began: torch.Event  # the stream reached it
    ended: torch.Event  # the stream completed it
    is_issued: bool = False  # if false, the host is still issuing it: the first time, ranks connect and compare layouts

    @property
    def has_started(self) -> bool:
        return self.began.query()

    @property
    def is_complete(self) -> bool:
        return self.is_issued and self.ended.query()


class Moment(NamedTuple):
    """The time at which a bucket is ready or reduced, for the timeline."""

    happened: torch.Event
    header: BarrierHeader
    is_ready: bool
    about: dict[str, Any]


class StreamTimes:
    """Records the phases of one rank as events on the current stream.  `PhaseRunner` calls it like a timeline."""

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        self.device, self.timeline = device, timeline
        self.clock = timeline.clock = DeviceClock(self.event())
        timeline.collectors.append(self.collect)
        self.pending: deque[Collective] = deque()  # in the order of issue
        self.moments: deque[Moment] = deque()
        self.spare: list[torch.Event] = []
        self.seconds_in_collectives = 0.0

    def event(self) -> torch.Event:
        """Record a new event on the current stream."""
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

    def is_wanted(self, header: BarrierHeader) -> bool:
        return header.step + 1 in self.timeline.steps

    def waiting(self) -> Collective | None:
        """Return the oldest incomplete collective if the stream has reached it.  Any thread may call this."""
        oldest = self.unfinished()
        return oldest if oldest and oldest.has_started else None

    def unfinished(self) -> Collective | None:
        return next((collective for collective in tuple(self.pending) if not collective.is_complete), None)

    @property
    def waited_s(self) -> float:
        self.collect()
        return self.seconds_in_collectives

    def collect(self) -> None:
        """Count the collectives and moments that have completed since the last call."""
        while self.pending and self.pending[0].is_complete:
            collective = self.pending.popleft()
            self.seconds_in_collectives += collective.began.elapsed_time(collective.ended) / 1e3
            if self.is_wanted(collective.header):
                self.add_span(collective)
            self.spare += [collective.began, collective.ended]
        while self.moments and self.moments[0].happened.query():
            self.add_moment(self.moments.popleft())

    def add_span(self, collective: Collective) -> None:
        header, phase = collective.header, collective.phase
        began_s, ended_s = self.clock.seconds_at(collective.began), self.clock.seconds_at(collective.ended)
        name = f"{name_bucket(header.bucket)}: {phase}"
        self.timeline.add("X", lane_of(phase), name, header.step + 1, began_s, ended_s, collective.about)

    def add_moment(self, moment: Moment) -> None:
        name, step = name_bucket(moment.header.bucket), moment.header.step + 1
        at_s = self.clock.seconds_at(moment.happened)
        if moment.is_ready:
            self.timeline.add("i", BUCKETS, f"{name} ready", step, at_s, at_s, moment.about)
        self.timeline.add("b" if moment.is_ready else "e", BUCKETS, name, step, at_s, at_s, moment.about)
        self.clock.rebase(moment.happened, at_s)

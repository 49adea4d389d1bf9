"""The timeline of a rank: spans on lanes, written as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

    steps         step 7                                   step 8
    training      data forward backward   all-reduce update data forward backward ...
    buckets                  ^0    ^1    ^2                 when each is ready; a separate row lasts until it is reduced
    in the node               0111  0222                   phases, and waits for other ranks and for the network
    network                     000   111  222

A lane has one span at a time: entering a lane ends its previous span.  Each lane is written by one thread, and all of
them append to one deque, so there is no lock.

On accelerators the host only launches work.  There every lane but `steps` comes from events on streams, converted to
the host's clock by `DeviceClock`: the training lane from `Activity`, the others from comm/accelerator/stream_times.py.
"""

import json
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megabatch.io.disk import write_file
from megabatch.planning.plan import Phase, Plan, Transfer

if TYPE_CHECKING:
    import torch  # commands that print help need not wait for it

STEPS, TRAINING, BUCKETS, IN_NODE, NETWORK = LANES = ("steps", "training", "buckets", "in the node", "network")
NUMBERS = {lane: 1 + index for index, lane in enumerate(LANES)}
ALL_STEPS = range(1, sys.maxsize)
NO_STEPS = range(0)
KEPT_STEPS = 50  # in addition to the current one
REBASE_S = 60.0  # elapsed times have single precision


class BucketPart(Protocol):
    """A part of a bucket that is being all-reduced: `comm.work.Work`."""

    key: int
    whole: "torch.Tensor"
    end: int
    plan: Plan


class Event(NamedTuple):
    kind: str  # of the trace format: X is a span, i an instant, b and e begin and end a span outside the lanes
    lane: str
    name: str
    step: int
    began_s: float
    ended_s: float
    about: dict[str, Any]


class Timeline:
    """The spans of one rank in the steps in `steps`.  Times are written relative to `origin_s`."""

    def __init__(self, rank: int = 0, steps: range = NO_STEPS) -> None:
        self.rank, self.steps = rank, steps
        self.clock: DeviceClock | None = None  # of an accelerator
        self.collectors: list[Callable[[], None]] = []  # add the spans that an accelerator has completed
        self.restart(origin_s=0.0, first_step=1)

    def restart(self, origin_s: float, first_step: int) -> None:
        """Drop all spans, and continue with `first_step`."""
        self.origin_s = origin_s
        self.step = first_step  # the current one; from 1, as in the records
        self.is_on = first_step in self.steps
        self.events: deque[Event] = deque()
        self.open_spans: dict[str, Event] = {}

    def begin_step(self, step: int) -> None:
        self.step, self.is_on = step, step in self.steps
        if not self.is_on:
            self.open_spans.clear()
            return
        while self.events and self.events[0].step < step - KEPT_STEPS:
            self.events.popleft()
        self.enter(STEPS, f"step {step}")

    def enter(self, lane: str, name: str, now_s: float | None = None, **about: Any) -> None:
        if not self.is_on:
            return
        now_s = time.perf_counter() if now_s is None else now_s
        self.leave(lane, now_s=now_s)
        self.open_spans[lane] = Event("X", lane, name, self.step, now_s, now_s, about)

    def leave(self, lane: str, waited_s: float = 0.0, now_s: float | None = None) -> None:
        """End the span of a lane, if there is one.  During its first `waited_s` it waited for other ranks."""
        span = self.open_spans.pop(lane, None)
        if span is None:
            return
        now_s = time.perf_counter() if now_s is None else now_s
        met_s = min(now_s, span.began_s + waited_s)
        if waited_s:
            name = f"{span.name.partition(':')[0]}: waits for other ranks"
            self.events.append(span._replace(name=name, ended_s=met_s))
        self.events.append(span._replace(began_s=met_s, ended_s=now_s))

    def enter_phase(self, work: BucketPart, phase: Phase, transfer: Transfer) -> None:
        if not self.is_on:
            return
        num_bytes = (transfer.end - transfer.begin) * work.whole.element_size()
        name = f"{name_bucket(work.key)}: {phase}"
        self.enter(lane_of(phase), name, bytes=num_bytes, plan=work.plan.name, bucket=work.key)

    def leave_phase(self, phase: Phase, waited_s: float) -> None:
        self.leave(lane_of(phase), waited_s)

    def enter_wait(self, work: BucketPart) -> None:
        if self.is_on:
            self.enter(IN_NODE, f"{name_bucket(work.key)}: waits for the network", bucket=work.key)

    def add(
        self, kind: str, lane: str, name: str, step: int, began_s: float, ended_s: float, about: dict[str, Any]
    ) -> None:
        """Add a span or instant that an accelerator has completed."""
        if step in self.steps and began_s >= self.origin_s:
            self.events.append(Event(kind, lane, name, step, began_s, ended_s, about))

    def note_ready(self, key: int, tensor: "torch.Tensor", plan: Plan) -> None:
        if not self.is_on:
            return
        now_s, about = time.perf_counter(), {"bytes": tensor.nbytes, "plan": plan.name, "bucket": key}
        self.events.append(Event("i", BUCKETS, f"{name_bucket(key)} ready", self.step, now_s, now_s, about))
        self.events.append(Event("b", BUCKETS, name_bucket(key), self.step, now_s, now_s, about))

    def note_reduced(self, work: BucketPart) -> None:
        """Note the end of a bucket's all-reduce, if `work` is its last part."""
        if self.is_on and work.end == len(work.whole):
            now_s, about = time.perf_counter(), {"bucket": work.key}
            self.events.append(Event("e", BUCKETS, name_bucket(work.key), self.step, now_s, now_s, about))

    def collect(self) -> None:
        """Add the spans that an accelerator has completed since the last call."""
        with suppress(RuntimeError):  # a failed device cannot be queried
            for collect in self.collectors:
                collect()

    def write(self, path: Path) -> None:
        """Write the trace atomically.  Spans that have not ended last until now."""
        self.collect()
        now_s = time.perf_counter()
        lasting = [span._replace(ended_s=now_s) for span in list(self.open_spans.values())]
        events = [*self.events, *lasting]  # a copy: threads may still append after a failure
        rows = [*self.names(), *map(self.row, events)]
        write_file(path, '{"traceEvents": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n", is_private=True)

    def names(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that name the rank and its lanes."""
        rank = f"rank {self.rank} on {platform.node()}"
        yield {"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": rank}}
        for lane, number in NUMBERS.items():
            yield {"ph": "M", "name": "thread_name", "pid": self.rank, "tid": number, "args": {"name": lane}}

    def row(self, event: Event) -> dict[str, Any]:
        row: dict[str, Any] = {"ph": event.kind, "name": event.name, "pid": self.rank, "tid": NUMBERS[event.lane]}
        row["ts"] = round((event.began_s - self.origin_s) * 1e6, 3)
        row["args"] = {"step": event.step, **event.about}
        match event.kind:
            case "X":
                row["dur"] = round((event.ended_s - event.began_s) * 1e6, 3)
            case "i":
                row["s"] = "t"  # shown on its lane only
            case "b" | "e":
                row |= {"cat": "bucket", "id2": {"local": f"{event.name} of step {event.step}"}}  # local: to this rank
        return row


class DeviceClock:
    """Converts events of a device to the host's clock.  The two clocks are compared once, before the first step."""

    def __init__(self, event: "torch.Event") -> None:
        event.synchronize()
        self.base, self.base_s = event, time.perf_counter()

    def seconds_at(self, event: "torch.Event") -> float:
        return self.base_s + self.base.elapsed_time(event) / 1e3

    def rebase(self, event: "torch.Event", at_s: float) -> None:
        """Count from `event`, which must not be recorded again, if the base is old."""
        if at_s - self.base_s > REBASE_S:
            self.base, self.base_s = event, at_s


def name_bucket(number: int) -> str:
    return f"bucket {number}" if number >= 0 else "the step's metrics"


def lane_of(phase: Phase) -> str:
    return IN_NODE if phase.axis == "node" else NETWORK

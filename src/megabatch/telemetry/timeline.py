"""What a rank does when: spans on lanes, as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

    steps         step 7                                   step 8
    training      input forward backward     waiting update input forward backward ...
    buckets                  ^0    ^1    ^2                 each as it is ready; beside the lanes, from there to reduced
    in the node               0111  0222                   phases, and waits for other ranks and for the network
    network                     000   111  222

A lane does one thing at a time: what is entered on it ends what was before.  One thread enters each lane, and what all
have recorded is appended to one deque, so nothing is locked.

On accelerators buckets, node and network are what streams did, by events (stream_times.py), put on the host's clock.
`training` is the host's: when it launched forward, backward and update, not when the device was at them.
"""

import json
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from megabatch.io.disk import write_file
from megabatch.planning.plan import Phase, Plan, Transfer

STEPS, TRAINING, BUCKETS, IN_NODE, NETWORK = LANES = ("steps", "training", "buckets", "in the node", "network")
NUMBERS = {lane: 1 + index for index, lane in enumerate(LANES)}
ALL_STEPS = range(sys.maxsize)
NO_STEPS = range(0)
KEPT_STEPS = 50  # the newest, and the one under way


class Traveller(Protocol):
    """A part of a bucket on its way through an all-reduce: `comm.work.Work`."""

    key: int
    whole: torch.Tensor
    end: int
    plan: Plan


class Event(NamedTuple):
    kind: str  # as the format has it: X is a span, i an instant, b and e are the ends of what lies beside the lanes
    lane: str
    name: str
    step: int
    began_s: float
    ended_s: float
    about: dict[str, Any]


class Timeline:
    """Of one rank, while it is `is_on`: in the steps that somebody wants.  Times are written relative to `origin_s`."""

    def __init__(self, rank: int, steps: range = ALL_STEPS) -> None:
        self.rank, self.steps = rank, steps
        self.collect: Callable[[], None] = lambda: None  # adds what an accelerator's events have shown since
        self.restart(origin_s=0.0, first_step=1)

    def restart(self, origin_s: float, first_step: int) -> None:
        """Forgets what was before the first step."""
        self.origin_s = origin_s
        self.step = first_step  # under way; from 1, as in the records
        self.is_on = first_step in self.steps
        self.events: deque[Event] = deque()
        self.under_way: dict[str, Event] = {}

    def begin_step(self, step: int) -> None:
        self.step, self.is_on = step, step in self.steps
        if not self.is_on:
            return
        while self.events and self.events[0].step < step - KEPT_STEPS:
            self.events.popleft()
        self.enter(STEPS, f"step {step}")
        self.enter(TRAINING, "input")

    def enter(self, lane: str, name: str, **about: Any) -> None:
        if not self.is_on:
            return
        now_s = self.leave(lane)
        self.under_way[lane] = Event("X", lane, name, self.step, now_s, now_s, about)

    def leave(self, lane: str, waited_s: float = 0.0) -> float:
        """Ends what the lane does, if anything, now.  The first `waited_s` of it went by until other ranks came."""
        now_s = time.perf_counter()
        span = self.under_way.pop(lane, None)
        if span is None:
            return now_s
        met_s = min(now_s, span.began_s + waited_s)
        if waited_s:
            name = f"{span.name.partition(':')[0]}: waits for other ranks"
            self.events.append(span._replace(name=name, ended_s=met_s))
        self.events.append(span._replace(began_s=met_s, ended_s=now_s))
        return now_s

    def enter_phase(self, work: Traveller, phase: Phase, transfer: Transfer) -> None:
        if not self.is_on:
            return
        num_bytes = (transfer.end - transfer.begin) * work.whole.element_size()
        name = f"{name_bucket(work.key)}: {phase}"
        self.enter(lane_of(phase), name, bytes=num_bytes, plan=work.plan.name, bucket=work.key)

    def leave_phase(self, phase: Phase, waited_s: float) -> None:
        self.leave(lane_of(phase), waited_s)

    def enter_wait(self, work: Traveller) -> None:
        if self.is_on:
            self.enter(IN_NODE, f"{name_bucket(work.key)}: waits for the network", bucket=work.key)

    def add(
        self, kind: str, lane: str, name: str, step: int, began_s: float, ended_s: float, about: dict[str, Any]
    ) -> None:
        """What events on an accelerator's streams have shown, when they are known."""
        if step in self.steps and began_s >= self.origin_s:
            self.events.append(Event(kind, lane, name, step, began_s, ended_s, about))

    def note_ready(self, key: int, tensor: torch.Tensor, plan: Plan) -> None:
        if not self.is_on:
            return
        now_s, about = time.perf_counter(), {"bytes": tensor.nbytes, "plan": plan.name, "bucket": key}
        self.events.append(Event("i", BUCKETS, f"{name_bucket(key)} ready", self.step, now_s, now_s, about))
        self.events.append(Event("b", BUCKETS, name_bucket(key), self.step, now_s, now_s, about))

    def note_reduced(self, work: Traveller) -> None:
        """With its last part."""
        if self.is_on and work.end == len(work.whole):
            now_s, about = time.perf_counter(), {"bucket": work.key}
            self.events.append(Event("e", BUCKETS, name_bucket(work.key), self.step, now_s, now_s, about))

    def write(self, path: Path) -> None:
        """The whole file or the one before it.  What is still under way lasts until now."""
        with suppress(RuntimeError):  # a device that has failed shows nothing more
            self.collect()
        now_s = time.perf_counter()
        lasting = [span._replace(ended_s=now_s) for span in list(self.under_way.values())]
        events = [*self.events, *lasting]  # a copy: after a failure threads may still append
        rows = [*self.names(), *map(self.row, events)]
        write_file(path, '{"traceEvents": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n", is_private=True)

    def names(self) -> Iterator[dict[str, Any]]:
        """Of the rank, and of its lanes."""
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
                row["s"] = "t"  # a mark on its lane alone
            case "b" | "e":
                row |= {"cat": "bucket", "id2": {"local": f"{event.name} of step {event.step}"}}  # local: to this rank
        return row


class NoTimeline:
    """Records nothing, where nobody ever asks for it."""

    def add(
        self, kind: str, lane: str, name: str, step: int, began_s: float, ended_s: float, about: dict[str, Any]
    ) -> None: ...

    def enter_phase(self, work: Traveller, phase: Phase, transfer: Transfer) -> None: ...

    def leave_phase(self, phase: Phase, waited_s: float) -> None: ...

    def enter_wait(self, work: Traveller) -> None: ...

    def leave(self, lane: str) -> None: ...

    def note_ready(self, key: int, tensor: torch.Tensor, plan: Plan) -> None: ...

    def note_reduced(self, work: Traveller) -> None: ...


def name_bucket(number: int) -> str:
    return f"bucket {number}" if number >= 0 else "the step's metrics"


def lane_of(phase: Phase) -> str:
    return IN_NODE if phase.axis == "node" else NETWORK

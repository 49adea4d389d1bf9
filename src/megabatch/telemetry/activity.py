"""The activity recorder of a rank: its current activity, its start, and the time that each activity takes.

`Activity` is the only place that records the activities of the training thread.  Its readers are the watchdog
(comm/faults/), the times of a step (training/step_metrics.py), the timeline and the traced step (training/traces.py).

There are two clocks.  On a CPU an activity lasts from one `begin` to the next by the host's clock.  On an accelerator
the host only launches work, so `begin` records an event on the computing stream: an activity lasts from its event to
the next one, during which the device worked on it or was idle.  Events are queried, never waited for.  The watchdog
always reads the host's clock.
"""

import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from megabatch.telemetry.timeline import TRAINING, Timeline
from megabatch.text import print_line, print_text

if TYPE_CHECKING:
    import torch  # commands that print help need not wait for it

START_UP_TIMEOUT_S = 600.0  # before the first step: images are indexed, models compiled
LONGER = 3.0  # a rank is stuck after this many times its longest activity, if that exceeds comm.timeout_s
START_UP = "start-up"  # the first activity
FRAMES = 3  # frames of a stack in a message
BACKWARD = "backward"
ALL_REDUCE = "all-reduce"  # the part of it that backward does not hide
INTERRUPT = signal.SIGURG  # ignored by default


class DeviceActivity(NamedTuple):
    """An activity, and the event on the computing stream at which it starts."""

    what: str
    step: int
    event: "torch.Event"


class Activity:
    """The activities of the training thread, the time that each one takes, and the timeline that shows them.

    The training thread calls `begin` several times per step.  The watchdog's thread reads `what` and `changed_s`, the
    loop takes the seconds of each activity for a record (`take`), and every activity is a span of the timeline.

    If `is_followed` is false, the activity belongs to a script that only calls backward: `begin` is not called.
    """

    def __init__(self, timeout_s: float, is_followed: bool = True) -> None:
        self.timeout_s, self.is_followed = timeout_s, is_followed
        self.thread = threading.get_ident()
        self.what, self.waits, self.step = START_UP, False, 0  # waits: for other ranks; step: from 1
        self.since_s = self.changed_s = self.counted_s = time.perf_counter()
        self.longest_s: float | None = None  # the longest activity since the first step; None outside of training
        self.spent_s: dict[str, float] = {}  # until `counted_s`
        self.timeline = Timeline()
        self.device: torch.device | None = None
        self.on_device: deque[DeviceActivity] = deque()  # the device is at the first one
        self.spare: list[torch.Event] = []
        self.error: BaseException | None = None

    def record(self, timeline: Timeline, device: "torch.device") -> None:
        """Count seconds from now on, and add every activity to `timeline`."""
        self.timeline, self.spent_s, self.counted_s = timeline, {}, time.perf_counter()
        timeline.collectors.append(self.collect)
        self.device = None if device.type == "cpu" else device
        self.on_device.clear()
        if self.device:
            self.mark(self.what)

    def begin(self, what: str, waits: bool = False) -> None:
        now_s = time.perf_counter()
        if self.longest_s is not None:
            self.longest_s = max(self.longest_s, now_s - self.since_s)
        self.count(now_s)
        self.what, self.waits, self.since_s, self.changed_s = what, waits, now_s, now_s
        self.mark(what)

    def mark(self, what: str) -> None:
        """Begin a span of the timeline: now, or when the device reaches this point of its stream."""
        if self.device is None:
            self.timeline.enter(TRAINING, what, self.since_s)
        else:
            import torch

            event = self.spare.pop() if self.spare else torch.Event(self.device, enable_timing=True)
            event.record(torch.accelerator.current_stream(self.device))
            self.on_device.append(DeviceActivity(what, self.step, event))

    def count(self, now_s: float) -> None:
        if self.device is None:
            self.spent_s[self.what] = self.spent_s.get(self.what, 0.0) + now_s - self.counted_s
            self.counted_s = now_s

    def collect(self) -> None:
        """Count the activities that the device has completed.  Waits for nothing."""
        timeline = self.timeline
        while len(self.on_device) > 1 and self.on_device[1].event.query():
            ended, following = self.on_device.popleft(), self.on_device[0]
            taken_s = ended.event.elapsed_time(following.event) / 1e3
            self.spent_s[ended.what] = self.spent_s.get(ended.what, 0.0) + taken_s
            if timeline.clock and ended.step in timeline.steps:
                began_s = timeline.clock.seconds_at(ended.event)
                timeline.add("X", TRAINING, ended.what, ended.step, began_s, began_s + taken_s, {})
            self.spare.append(ended.event)

    def take(self) -> dict[str, float]:
        """Return the seconds of each activity since the last call, with those of the current one so far.

        On an accelerator these are seconds of the device; activities that it has not completed are in the next result.
        """
        self.count(time.perf_counter())
        self.collect()
        spent_s, self.spent_s = self.spent_s, {}
        return spent_s

    def begin_step(self, step: int) -> None:
        self.step = step
        self.timeline.begin_step(step)

    def bucket_is_ready(self, is_last: bool) -> None:
        """Note progress within backward.  After its last bucket, backward only waits for the all-reduce."""
        self.note_progress()
        if is_last and self.what == BACKWARD:
            self.begin(ALL_REDUCE, waits=True)

    def note_progress(self) -> None:
        self.changed_s = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this rank as waiting for other ranks."""
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    def begin_steps(self) -> None:
        """Note the end of the first step, and of start-up."""
        self.longest_s = self.longest_s or 0.0

    def end_steps(self) -> None:
        """Note that other ranks no longer wait for this one."""
        self.begin("the end")
        self.collect()
        self.longest_s = None
        self.timeline.open_spans.clear()
        self.timeline = Timeline()

    @property
    def steps_run(self) -> bool:
        return self.is_followed and self.longest_s is not None

    @property
    def patience_s(self) -> float:
        """The seconds after which a rank without progress is stuck."""
        if not self.is_followed:
            return self.timeout_s
        if self.longest_s is None:
            return max(self.timeout_s, START_UP_TIMEOUT_S)
        return max(self.timeout_s, LONGER * self.longest_s)

    @property
    def where(self) -> str:
        return f"{self.what} of step {self.step}" if self.step else self.what

    def describe(self) -> str:
        """Return: has been in data of step 12 on node3 since 15:08:05 (reader.py:112 read < loop.py:150 forward)"""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - time.perf_counter() + self.since_s))
        return f"has been in {self.where} on {platform.node()} since {since} ({self.innermost_frames()})"

    def innermost_frames(self) -> str:
        *outer, last = traceback.extract_stack(sys._current_frames().get(self.thread))
        others = [frame for frame in outer if "torch" not in Path(frame.filename).parts]  # frames of torch rarely help
        frames = [last, *reversed(others[1 - FRAMES :])]
        return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)

    def stack(self) -> str:
        return "".join(traceback.format_stack(sys._current_frames().get(self.thread)))

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let another thread `interrupt` this one, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(INTERRUPT, self.raise_error)
        try:
            yield
        finally:
            signal.signal(INTERRUPT, before)

    def interrupt(self, error: BaseException) -> None:
        """Raise the error in the training thread as soon as that is not in a call that no signal interrupts."""
        if self.thread == threading.main_thread().ident and signal.getsignal(INTERRUPT) == self.raise_error:
            self.error = error
            signal.pthread_kill(self.thread, INTERRUPT)

    def raise_error(self, number: int, frame: FrameType | None) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class ExitReporter:
    """Reports the error of a rank and ends its process, if the training thread is stuck and cannot raise the error."""

    ends_process = False  # the process always ends right after an error

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def announce(self, error: BaseException) -> None:
        """Report an error that is raised, before any cleanup.  Here the caller of the script does that."""

    def report(self, error: BaseException) -> None:
        if error.__traceback__:
            print_text("".join(traceback.format_exception(error)).rstrip("\n"), to_stderr=True)
        print_line(f"megabatch: rank {self.rank}: {error}", to_stderr=True)

    def log(self, text: str) -> None:
        """Append to the log of the run, if there is one."""

    def log_path(self) -> Path | None:
        return None

    def end_process(self, error: BaseException) -> None:
        self.report(error)
        os._exit(1)

"""What a rank is doing, and since when: for its watchdog, and for the ranks that wait for it."""

import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol

from megabatch.text import print_line

START_UP_TIMEOUT_S = 600.0  # until steps run: images are indexed, models compiled
LONGER = 3.0  # than anything took so far is too long, even if the recipe is less patient
START_UP = "start-up"  # the first activity
FRAMES = 3  # of a stack, in a line
BACKWARD = "backward"  # an activity of which the all-reduce knows more
ALL_REDUCE = "all-reduce"  # what is left of it after backward
INTERRUPT = signal.SIGURG  # which nobody minds who does not listen


class TracedActivity(NamedTuple):
    """An activity that was traced; by a clock of the host's seconds."""

    what: str
    step: int
    began_s: float
    ended_s: float


class HostTimes:
    """The seconds of each activity since they were last taken, by the host's clock."""

    def __init__(self) -> None:
        self.what, self.step, self.since_s = START_UP, 0, time.perf_counter()
        self.spent_s: dict[str, float] = {}
        self.traced: list[TracedActivity] | None = None  # while somebody wants to know of each

    def begin(self, what: str, step: int) -> None:
        now_s = time.perf_counter()
        self.spent_s[self.what] = self.spent_s.get(self.what, 0.0) + now_s - self.since_s
        if self.traced is not None:
            self.traced.append(TracedActivity(self.what, self.step, self.since_s, now_s))
        self.what, self.step, self.since_s = what, step, now_s

    def take(self) -> dict[str, float]:
        """Of the one that is under way, what there is of it."""
        self.begin(self.what, self.step)
        spent_s, self.spent_s = self.spent_s, {}
        return spent_s


class ActivityTimes(Protocol):
    """`HostTimes`, or what takes the time of a device."""

    traced: list[TracedActivity] | None

    def begin(self, what: str, step: int) -> None: ...

    def take(self) -> dict[str, float]: ...


class Activity:
    """Written by the thread that trains, several times a step; read by its watchdog.

    One that is not `followed` is that of a script of which we see backward alone.
    """

    def __init__(self, timeout_s: float, is_followed: bool = True) -> None:
        self.timeout_s, self.is_followed = timeout_s, is_followed
        self.thread = threading.get_ident()
        self.what, self.waits, self.step = START_UP, False, 0  # waits: for other ranks; step: from 1
        self.since_s = time.monotonic()
        self.longest_s: float | None = None  # of what it did since steps run
        self.error: BaseException | None = None
        self.times: ActivityTimes = HostTimes()

    def begin(self, what: str, waits: bool = False) -> None:
        now_s = time.monotonic()
        if self.longest_s is not None and now_s - self.since_s > self.longest_s:
            self.longest_s = now_s - self.since_s
        self.what, self.waits, self.since_s = what, waits, now_s
        self.times.begin(what, self.step)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, for other ranks."""
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    def begin_steps(self) -> None:
        """The first step is done: what is stuck from now on is not starting up."""
        self.longest_s = self.longest_s or 0.0

    def end_steps(self) -> None:
        """Nobody waits for this rank any more."""
        self.begin("the end")
        self.longest_s = None

    @property
    def steps_run(self) -> bool:
        return self.is_followed and self.longest_s is not None

    @property
    def patience_s(self) -> float:
        """What may take so long may not take longer."""
        if not self.is_followed:
            return self.timeout_s
        if self.longest_s is None:
            return max(self.timeout_s, START_UP_TIMEOUT_S)
        return max(self.timeout_s, LONGER * self.longest_s)

    @property
    def where(self) -> str:
        return f"{self.what} of step {self.step}" if self.step else self.what

    def describe(self) -> str:
        """is in data of step 12 on node3 since 15:08:05 (reader.py:112 read < loop.py:150 forward_backward)"""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + self.since_s))
        return f"is in {self.where} on {platform.node()} since {since} ({self.innermost_frames()})"

    def innermost_frames(self) -> str:
        *outer, last = traceback.extract_stack(sys._current_frames().get(self.thread))
        others = [frame for frame in outer if "torch" not in Path(frame.filename).parts]  # whose frames say little
        frames = [last, *reversed(others[1 - FRAMES :])]
        return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)

    def stack(self) -> str:
        return "".join(traceback.format_stack(sys._current_frames().get(self.thread)))

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, another thread can `interrupt` this one, if it is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(INTERRUPT, self.raise_error)
        try:
            yield
        finally:
            signal.signal(INTERRUPT, before)

    def interrupt(self, error: BaseException) -> None:
        """Raises the error in the thread that trains, unless that is in a call which no signal ends."""
        if self.thread == threading.main_thread().ident and signal.getsignal(INTERRUPT) == self.raise_error:
            self.error = error
            signal.pthread_kill(self.thread, INTERRUPT)

    def raise_error(self, number: int, frame: FrameType | None) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class LastWords:
    """How a rank says why it ends, where it cannot raise it: its thread that trains does not come back."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def speak(self, error: BaseException) -> None:
        print_line(f"megabatch: rank {self.rank}: {error}", to_stderr=True)

    def log(self, text: str) -> None:
        """Into the run's log, where there is one."""

    def log_path(self) -> Path | None:
        return None

    def end(self, error: BaseException) -> None:
        self.speak(error)
        os._exit(1)

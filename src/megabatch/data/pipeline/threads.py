"""Threads that can be left behind, and a watch over what each of them is doing.

A thread that reads from a file server that does not answer, or decodes an image made to take for ever, cannot be
interrupted.  It can be named, replaced, and left to itself: these threads are daemons, for which Python does not wait
when it ends, as it does for those of concurrent.futures.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

Result = TypeVar("Result")

TICKS = 10  # by which a time limit is counted
MOST_LEFT = 8  # threads: more of them that hang, and it is not the image but what it lies on


class Threads:
    """A pool.  At its end what has not begun is cancelled, and what has is waited for, as long as `patience_s`."""

    def __init__(self, count: int, name: str, patience_s: float | None) -> None:
        self.name, self.patience_s = name, patience_s
        self.jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.num_started = 0
        for _ in range(count):
            self.add_thread()

    def add_thread(self) -> None:
        name = f"{self.name}_{self.num_started}"
        thread = threading.Thread(target=work_on, args=(self.jobs,), name=name, daemon=True)
        self.num_started += 1
        self.threads.append(thread)
        thread.start()

    def replace(self, ident: int) -> None:
        """Another takes the place of a thread, for which nobody waits any more."""
        self.threads = [thread for thread in self.threads if thread.ident != ident]
        self.add_thread()

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        future: Future[Result] = Future()
        self.jobs.put((future, job))
        return future

    def close(self) -> None:
        with suppress(Empty):
            while job := self.jobs.get_nowait():
                job[0].cancel()
        for _ in range(self.num_started):
            self.jobs.put(None)
        end_s = None if self.patience_s is None else time.monotonic() + self.patience_s
        for thread in self.threads:
            thread.join(None if end_s is None else max(0.0, end_s - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def work_on(jobs: "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    while task := jobs.get():
        future, job = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
        del task, future, job  # not kept while it waits for the next


class Doing(NamedTuple):
    thread: int
    image: int
    of: Any  # what it is done for


class Watch:
    """What every thread is doing, and for how long.

    A thread says what it begins, which costs it no look at a clock.  Whoever waits for the threads looks at them every
    `tick_s`: what is the same TICKS times in a row takes longer than `limit_s`.  A process that was stopped for a while
    has looked once in that time, so nothing seems late that was stopped along with it.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.tick_s = limit_s, limit_s / TICKS
        self.doing: dict[int, Doing] = {}  # by thread
        self.seen: dict[int, tuple[Doing, int]] = {}  # and how many times in a row
        self.num_late = 0

    def begin(self, image: int, of: Any = None) -> None:
        thread = threading.get_ident()
        self.doing[thread] = Doing(thread, image, of)

    def end(self) -> None:
        self.doing.pop(threading.get_ident(), None)

    def look(self) -> list[Doing]:
        """What takes too long, once each: from then on its thread is left to itself."""
        late = []
        seen, self.seen = self.seen, {}
        for thread, doing in list(self.doing.items()):
            before, times = seen.get(thread, (None, 0))
            times = times + 1 if doing is before else 1
            if times > TICKS:
                late.append(doing)
                self.doing.pop(thread, None)
            else:
                self.seen[thread] = doing, times
        self.num_late += len(late)
        return late

    def wait(self, future: Future[Any]) -> list[Doing]:
        """Until it is done, or something takes too long."""
        late: list[Doing] = []
        while not late and not is_done(future, self.tick_s):
            late = self.look()
        return late


def is_done(future: Future[Any], wait_s: float) -> bool:
    try:
        future.exception(wait_s)
    except TimeoutError:
        return False
    return True

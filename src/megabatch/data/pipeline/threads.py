"""A thread pool whose stuck threads can be abandoned, and a watch that finds them.

A thread cannot be interrupted while it reads from a file server that does not answer, or decodes a hostile image.  But
it can be reported, replaced and abandoned.  The threads are daemons: unlike those of concurrent.futures, they do not
keep Python from exiting.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self, TypeVar

import torch

Result = TypeVar("Result")

CPU = torch.device("cpu")
TICKS = 10  # per time limit
MAX_ABANDONED = 8  # threads; if more hang, the cause is the storage and not the image


class Threads:
    """A thread pool.  On exit, pending jobs are cancelled and running ones are waited for, for up to `patience_s`.

    `device` is the current device of the threads.  Otherwise each would create a context on device 0.
    """

    def __init__(self, count: int, name: str, patience_s: float | None, device: torch.device = CPU) -> None:
        self.name, self.patience_s, self.device = name, patience_s, device
        self.jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.num_started = 0
        for _ in range(count):
            self.add_thread()

    def add_thread(self) -> None:
        name = f"{self.name}_{self.num_started}"
        thread = threading.Thread(target=work_on, args=(self.jobs, self.device), name=name, daemon=True)
        self.num_started += 1
        self.threads.append(thread)
        thread.start()

    def replace(self, ident: int) -> None:
        """Abandon a thread and start another one in its place."""
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

    def __exit__(self, *error: object) -> None:
        self.close()


def work_on(jobs: "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]", device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    while task := jobs.get():
        future, job = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
        del task, future, job  # do not keep them alive while waiting for the next job


class Task(NamedTuple):
    thread: int
    image: int
    batch: Any


class Watch:
    """The current task of every thread, with a time limit.

    A thread records the start of a task without reading the clock.  The caller that waits for the threads polls them
    every `tick_s`: a task that is seen more than TICKS times in a row takes longer than `limit_s`.  If the process is
    stopped for a while, this counts as one poll, so its tasks do not seem late.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.tick_s = limit_s, limit_s / TICKS
        self.running: dict[int, Task] = {}  # by thread
        self.seen: dict[int, tuple[Task, int]] = {}  # with the number of polls in a row
        self.num_late = 0

    def begin(self, image: int, batch: Any = None) -> None:
        thread = threading.get_ident()
        self.running[thread] = Task(thread, image, batch)

    def end(self) -> None:
        self.running.pop(threading.get_ident(), None)

    def poll(self) -> list[Task]:
        """Return the tasks that are late.  Each is returned once, and its thread is no longer watched."""
        late = []
        seen, self.seen = self.seen, {}
        for thread, task in list(self.running.items()):
            before, times = seen.get(thread, (None, 0))
            times = times + 1 if task is before else 1
            if times > TICKS:
                late.append(task)
                self.running.pop(thread, None)
            else:
                self.seen[thread] = task, times
        self.num_late += len(late)
        return late

    def wait(self, future: Future[Any]) -> list[Task]:
        """Wait until the future is done or tasks are late, and return the late tasks."""
        late: list[Task] = []
        while not late and not is_done(future, self.tick_s):
            late = self.poll()
        return late


def is_done(future: Future[Any], wait_s: float) -> bool:
    try:
        future.exception(wait_s)
    except TimeoutError:
        return False
    return True

"""A thread that writes copies of the training state, one at a time, while training goes on.

There are two copies at most: one is being written, and one waits, or is held: the best state so far, if it could not be
written, is tried again before the next one.  A third takes the place of the one that waits, unless that is the best so
far: training never waits for the disk.  Where all are wanted (`keeps_all`) it waits; `is_busy` says whether it is
better to come later.
"""

import threading
from collections.abc import Callable

import torch
from msgspec import Struct

from megabatch.train.checkpoint import Description
from megabatch.train.snapshot import Snapshot

COPIES = 2


class Save(Struct):
    """A state that is to become a checkpoint."""

    snapshot: Snapshot
    description: Description  # without its checksum
    is_best: bool  # of all evaluations so far
    stall_s: float | None  # that the host was held by the copy; None once it is recorded


class BackgroundWriter:
    def __init__(self, write: Callable[[Save], bool], keeps_all: bool = False) -> None:
        """`write` returns whether that settles it; what it raises is raised where the next copy is asked for."""
        self.write, self.keeps_all = write, keeps_all
        self.num_overtaken = 0  # states that were never written, because a newer one came first
        self.changed = threading.Condition()
        self.spare = [Snapshot() for _ in range(COPIES)]
        self.queue: list[Save] = []
        self.current: Save | None = None
        self.held: Save | None = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.reserving: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        is_reserving = self.reserving is not None and self.reserving.is_alive()
        return is_reserving or self.current is not None or bool(self.queue)

    def reserve(self, state: dict[str, torch.Tensor]) -> None:
        """Has memory for the first copy made ready, meanwhile."""
        with self.changed:
            snapshot = self.spare.pop()

        def work() -> None:
            try:
                snapshot.reserve(state)
            finally:
                with self.changed:
                    self.spare.append(snapshot)
                    self.changed.notify_all()

        self.reserving = threading.Thread(target=work, name="checkpoints", daemon=True)
        self.reserving.start()

    def take_spare(self, for_best: bool) -> Snapshot | None:
        """To be filled and handed to `submit`; None: the best state waits for the disk, and this one is not it."""
        with self.changed:
            self.raise_error()
            if for_best and self.held:
                self.spare.append(self.held.snapshot)
                self.held = None
            if not self.spare and not self.keeps_all:
                self.num_overtaken += 1
                overtaken = next((save for save in self.queue if for_best or not save.is_best), None)
                if overtaken:
                    self.queue.remove(overtaken)
                    self.spare.append(overtaken.snapshot)
                elif not for_best:
                    return None
            self.changed.wait_for(lambda: self.spare)
            self.raise_error()
            return self.spare.pop()

    def submit(self, save: Save) -> None:
        with self.changed:
            self.queue += [self.held, save] if self.held else [save]
            self.held = None
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="checkpoints", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def drain(self) -> None:
        """Until everything is written, or was tried."""
        with self.changed:
            self.changed.wait_for(lambda: not self.queue and not self.current)
            self.raise_error()

    def raise_error(self) -> None:
        if self.error:
            error, self.error = self.error, None
            raise error

    def close(self) -> None:
        """The thread ends, after what it has to do."""
        with self.changed:
            thread, self.thread = self.thread, None
            self.changed.notify_all()
        for started in (thread, self.reserving):
            if started:
                started.join()

    def work(self) -> None:
        while save := self.next():
            is_settled = True
            try:
                is_settled = self.write(save)
            except BaseException as error:
                self.error = error
            self.done(save, is_settled)

    def next(self) -> Save | None:
        with self.changed:
            self.changed.wait_for(lambda: self.queue or self.thread is None)
            self.current = self.queue.pop(0) if self.queue else None
            return self.current

    def done(self, save: Save, is_settled: bool) -> None:
        with self.changed:
            if save.is_best and not is_settled and not any(later.is_best for later in self.queue):
                self.held = save
            else:
                self.spare.append(save.snapshot)
            self.current = None
            self.changed.notify_all()

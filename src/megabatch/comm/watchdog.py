"""Who keeps the others waiting, and with what: ranks that have made no progress for long write it to the store.

Half of the timeout without progress, and a rank writes to the store where it stands, unasked; so when the time is up,
the ranks that wait for it can say what it lacks.  A rank that aborts writes why.  One that has written nothing hangs as
a whole, or is gone.

On accelerators nobody but this thread notices that others do not come: the host has issued its collectives, and goes on
or waits for the device.  So it looks at their events, and never waits for one; when the device has been in the same
collective for the whole of the timeout, or another rank has aborted meanwhile, it calls `on_hang`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from megabatch.comm.progress import WAITS, BackwardProgress
from megabatch.comm.rank_states import RankStates
from megabatch.comm.stream_times import Collective

LOOK_EVERY_S = 2.0  # at most, on accelerators
ABORTED = "aborted"  # a key of the store: some rank has


class Watchdog:
    def __init__(
        self, store: Any, rank: int, names: Sequence[int], timeout_s: float, progress: BackwardProgress
    ) -> None:
        self.store, self.timeout_s, self.progress = store, timeout_s, progress
        self.states = RankStates(store, rank, names, timeout_s)
        self.on_hang: Callable[[Collective, str], None] = lambda collective, why: None
        self.waiting: Collective | None = None  # in which the device was when it was last looked at
        self.waiting_since_s = 0.0
        progress.restart_clock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="megabatch watchdog", daemon=True)
        self.thread.start()

    def watch(self) -> None:
        times = self.progress.times
        if times:
            torch.accelerator.set_device_index(times.device.index)  # of this thread, which asks for events
        reported_s = None
        with suppress(RuntimeError):  # the store is gone, with the rank that held it
            while not self.ended.wait(min(self.timeout_s / 8, LOOK_EVERY_S) if times else self.timeout_s / 8):
                why = self.look_at_device()
                if why and self.waiting:
                    self.on_hang(self.waiting, why)
                    return
                seen_s = self.progress.changed_s
                if reported_s is not None and seen_s != reported_s:
                    reported_s = None
                    self.states.withdraw()
                if reported_s is None and time.monotonic() - seen_s > self.timeout_s / 2:
                    reported_s = seen_s
                    self.states.write(self.progress.describe())

    def look_at_device(self) -> str | None:
        """Why nothing more is to be expected of the collective that the device is in, if so."""
        waiting, now_s = self.progress.times.waiting() if self.progress.times else None, time.monotonic()
        if waiting is None or waiting is not self.waiting:
            self.waiting, self.waiting_since_s = waiting, now_s
            return None
        if now_s - self.waiting_since_s > self.timeout_s:
            return f"other ranks did not come within {self.timeout_s:g} s"
        try:
            return "another rank has aborted, and does not come" if self.store.check([ABORTED]) else None
        except RuntimeError:  # the store is gone, with the rank that held it
            return "the rank that held the store does not come"

    def say_last(self, message: str) -> None:
        """The last that this rank writes."""
        self.ended.set()
        with suppress(RuntimeError):
            self.states.write(message, is_final=True)
            if message != WAITS:
                self.store.set(ABORTED, "")

    def heard(self, waits_for_all: bool = False) -> list[str]:
        """What the other ranks have said; with `waits_for_all` also who says nothing, though all have reason to."""
        return self.states.heard(waits_for_all)

    def differences(self, layout: str, members: Sequence[int]) -> list[str]:
        """What first differs in the layouts of a bucket that these ranks have, each of which writes its own."""
        return self.states.differences(layout, members)

    def close(self) -> None:
        self.ended.set()
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=10)

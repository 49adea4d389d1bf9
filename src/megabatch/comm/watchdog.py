"""Who keeps the others waiting, and with what: ranks that have made no progress for long write it to the store.

Half of the timeout without progress, and a rank tells the store where it stands, unasked; so when the time is up, the
ranks that wait for it can say what it lacks.  A rank that has told nothing hangs as a whole, or is gone.
"""

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self


class Watchdog:
    def __init__(self, store: Any, rank: int, names: Sequence[int], timeout_s: float, state: Callable[[], str]) -> None:
        self.store, self.rank, self.names, self.timeout_s, self.state = store, rank, names, timeout_s, state
        self.progress_s = time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="megabatch watchdog", daemon=True)
        self.thread.start()

    def see_progress(self) -> None:
        self.progress_s = time.monotonic()

    def watch(self) -> None:
        told_of_s = None
        while not self.ended.wait(self.timeout_s / 8):
            seen_s = self.progress_s
            if time.monotonic() - seen_s > self.timeout_s / 2 and seen_s != told_of_s:
                told_of_s = seen_s
                self.tell()

    def tell(self) -> None:
        self.store.set(f"state/{self.rank}", self.state())

    def told(self) -> list[str]:
        """What the other ranks have told."""
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        try:
            ranks = [rank for rank in others if self.store.check([f"state/{rank}"])]
            return [f"rank {self.names[rank]} {self.store.get(f'state/{rank}').decode()}" for rank in ranks]
        except RuntimeError:  # the store is gone, with the rank that held it
            return []

    def close(self) -> None:
        self.ended.set()
        self.thread.join(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

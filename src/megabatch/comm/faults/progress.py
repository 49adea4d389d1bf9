"""Where this rank is in its backward pass, for itself and for the ranks that wait for it."""

import time

import torch

from megabatch.comm.accelerator.stream_times import StreamTimes
from megabatch.comm.layouts import BucketLayouts
from megabatch.telemetry.timeline import name_bucket

WAITS = "waits"  # said by a rank that nobody waits for


class BackwardProgress:
    """Written by the hook, read by the watchdog's thread."""

    def __init__(self, layouts: BucketLayouts, times: StreamTimes | None = None) -> None:
        self.layouts, self.times = layouts, times  # times: of an accelerator's streams
        self.step = 0  # whose buckets are being filled, from 0
        self.first = 0  # what messages call that: steps of the trainer count from 1
        self.reduced: set[int] = set()  # buckets of this step
        self.last: torch.futures.Future[torch.Tensor] | None = None  # bucket of the newest step that is complete here
        self.ready_s = 0.0  # when the newest bucket was ready: from the last one on, backward waits for other ranks
        self.changed_s = time.monotonic()

    def restart_clock(self) -> None:
        self.changed_s = time.monotonic()

    def bucket_is_ready(self) -> None:
        self.ready_s = time.perf_counter()
        self.changed_s = time.monotonic()

    def bucket_has_started(self, index: int, future: torch.futures.Future[torch.Tensor], is_last: bool) -> None:
        self.reduced.add(index)
        if is_last:
            self.last = future
            self.step += 1
            self.reduced = set()

    @property
    def is_waiting(self) -> bool:
        """For other ranks: all buckets of a step are on their way, and have not come back."""
        return self.last is not None and not self.last.done()

    def describe(self) -> str:
        """What this rank lacks; WAITS if it lacks nothing but other ranks.  Asks no device to end what it does."""
        if self.is_waiting:
            return WAITS
        unfinished = self.times.unfinished() if self.times else None
        if unfinished:
            header = unfinished.header
            where = f"{name_bucket(header.bucket)} of step {header.step + self.first}"
            return WAITS if unfinished.has_begun else f"has issued {where}, and its device has not come to it"
        reduced = list(self.reduced)
        missing = self.layouts.missing_from(reduced)
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        return f"has reduced {len(reduced)} buckets of step {self.step + self.first} and has no gradient yet of {some}"

"""The progress of this rank's backward pass, for its messages and for the ranks that wait for it."""

import torch

from megabatch.comm.accelerator.stream_times import StreamTimes
from megabatch.comm.layouts import BucketLayouts
from megabatch.telemetry.timeline import name_bucket
from megabatch.text import listed

WAITS = "waits"  # the report of a rank that only waits for others


class BackwardProgress:
    """Written by the hook, read by the watchdog's thread."""

    def __init__(self, layouts: BucketLayouts, times: StreamTimes | None = None) -> None:
        self.layouts, self.times = layouts, times  # times: of an accelerator's streams
        self.step = 0  # the step whose buckets are being filled, from 0
        self.first_step = 0  # the number of step 0 in messages: steps of the trainer count from 1
        self.reduced: set[int] = set()  # buckets of this step
        self.last: torch.futures.Future[torch.Tensor] | None = (
            None  # last bucket of the newest step whose backward is complete here
        )

    def bucket_has_started(self, index: int, future: torch.futures.Future[torch.Tensor], is_last: bool) -> None:
        self.reduced.add(index)
        if is_last:
            self.last = future
            self.step += 1
            self.reduced = set()

    @property
    def is_waiting(self) -> bool:
        """Return True if this rank waits for others: all buckets of a step have started and are not yet reduced."""
        return self.last is not None and not self.last.done()

    def describe(self) -> str:
        """Return why others wait for this rank, or WAITS if it waits for them.  Does not wait for the device."""
        if self.is_waiting:
            return WAITS
        unfinished = self.times.unfinished() if self.times else None
        if unfinished:
            header = unfinished.header
            bucket = f"{name_bucket(header.bucket)} of step {header.step + self.first_step}"
            return WAITS if unfinished.has_started else f"has issued {bucket}, but its device has not reached it"
        reduced = list(self.reduced)
        missing = self.layouts.missing_from(reduced)
        step = self.step + self.first_step
        return f"has reduced {len(reduced)} buckets of step {step} and has no gradient yet for {listed(missing, 3)}"

"""Where the time of a step goes: the activities of a rank (`ranks.activity`), as the parts of `StepTimes`.

On a CPU the host's clock says how long each took.  On an accelerator, whose host only launches, an event on the stream
that computes marks where each begins: between two of them the device was at the first, or idle while the host was.
Events are asked whether they have happened, never waited for, so what a row has is what the device has come to; the
rest follows in the next.
"""

from collections import deque
from collections.abc import Mapping

import torch

from megabatch.comm.stream_times import DeviceClock
from megabatch.ranks.activity import ALL_REDUCE, BACKWARD, START_UP, ActivityTimes, HostTimes, TracedActivity
from megabatch.runs.records import StepTimes

PARTS = ("data", "forward", BACKWARD, "update", "evaluation", "checkpoint")  # activities that are parts by that name
DIGITS = 6  # microseconds


def step_times(spent_s: Mapping[str, float], comm_s: float = 0.0) -> StepTimes:
    """Adds up to what was spent.  Of backward and the all-reduce after it, `comm_s` was waited for other ranks."""
    backward_s = spent_s.get(BACKWARD, 0.0) + spent_s.get(ALL_REDUCE, 0.0)
    comm_s = min(max(comm_s, 0.0), backward_s)
    parts = {part: spent_s.get(part, 0.0) for part in PARTS} | {BACKWARD: backward_s - comm_s, "comm": comm_s}
    rounded = {part: round(part_s, DIGITS) for part, part_s in parts.items()}
    total_s = sum(spent_s.values())
    return StepTimes(**rounded, other=max(0.0, round(total_s - sum(rounded.values()), DIGITS)))


class DeviceTimes:
    """The seconds of each activity on an accelerator, as far as it has come to them; `take` waits for nothing."""

    def __init__(self, device: torch.device, clock: DeviceClock | None) -> None:
        self.device, self.clock = device, clock
        self.begun: deque[tuple[str, int, torch.Event]] = deque()  # the device is at the first
        self.spare: list[torch.Event] = []
        self.traced: list[TracedActivity] | None = None
        self.begin(START_UP, 0)

    def begin(self, what: str, step: int) -> None:
        event = self.spare.pop() if self.spare else torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        self.begun.append((what, step, event))

    def take(self) -> dict[str, float]:
        spent_s: dict[str, float] = {}
        while len(self.begun) > 1 and self.begun[1][2].query():
            (what, step, began), (_, _, ended) = self.begun.popleft(), self.begun[0]
            spent_s[what] = spent_s.get(what, 0.0) + began.elapsed_time(ended) / 1e3
            if self.traced is not None and self.clock:
                self.traced.append(
                    TracedActivity(what, step, self.clock.seconds_at(began), self.clock.seconds_at(ended))
                )
            self.spare.append(began)
        return spent_s


def activity_times(device: torch.device, clock: DeviceClock | None) -> ActivityTimes:
    return HostTimes() if device.type == "cpu" else DeviceTimes(device, clock)
